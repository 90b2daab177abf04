"""Profiles a block with ``torch.profiler`` and writes one Chrome trace per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from drivetrain.errors import UsageError
from drivetrain.kwargs import ProfileKwargs
from drivetrain.topology import Topology


def build_profiler(
    handler: ProfileKwargs, on_trace_ready: Callable[[torch.profiler.profile], Any] | None = None
) -> torch.profiler.profile:
    """The profiler that a handler describes, not started.

    Args:
        handler: its settings.
        on_trace_ready: takes the place of the handler's own.

    Raises:
        UsageError: an activity that this torch does not know.
    """
    activities = None
    if handler.activities is not None:
        unknown = [name for name in handler.activities if not hasattr(ProfilerActivity, name.upper())]
        if unknown:
            raise UsageError(f"this torch cannot profile {', '.join(unknown)}")
        activities = [getattr(ProfilerActivity, name.upper()) for name in handler.activities]
    return torch.profiler.profile(
        activities=activities,
        schedule=None if handler.schedule_option is None else torch.profiler.schedule(**handler.schedule_option),
        on_trace_ready=on_trace_ready or handler.on_trace_ready,
        record_shapes=handler.record_shapes,
        profile_memory=handler.profile_memory,
        with_stack=handler.with_stack,
        with_flops=handler.with_flops,
        with_modules=handler.with_modules,
    )


@contextmanager
def profile(handler: ProfileKwargs, topology: Topology) -> Iterator[torch.profiler.profile]:
    """Profile the block on this rank; not collective.

    With ``output_trace_dir`` every trace goes to ``profile_<rank>.json`` there, a schedule's further cycles to
    ``profile_<rank>_<cycle>.json``; the handler's ``on_trace_ready`` is called before that.

    Args:
        handler: settings; ``schedule_option`` needs a ``profiler.step()`` per step of the loop.
        topology: for the rank.
    """
    written = 0

    def ready(profiler: torch.profiler.profile) -> None:
        nonlocal written
        if handler.on_trace_ready is not None:
            handler.on_trace_ready(profiler)
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            cycle = f"_{written}" if written else ""
            profiler.export_chrome_trace(str(folder / f"profile_{topology.rank}{cycle}.json"))
            written += 1

    with build_profiler(handler, ready) as profiler:
        yield profiler
