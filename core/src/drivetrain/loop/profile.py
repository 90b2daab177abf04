"""Profiles a block with ``torch.profiler`` and writes one Chrome trace per rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from drivetrain.errors import UsageError
from drivetrain.kwargs import ProfileKwargs
from drivetrain.topology import Topology


@contextmanager
def profile(handler: ProfileKwargs, topology: Topology) -> Iterator[torch.profiler.profile]:
    """Profile the block on this rank; not collective.

    With ``output_trace_dir`` every trace goes to ``profile_<rank>.json`` there, a schedule's further cycles to
    ``profile_<rank>_<cycle>.json``; the handler's ``on_trace_ready`` is called before that.

    Args:
        handler: settings; ``schedule_option`` needs a ``profiler.step()`` per step of the loop.
        topology: for the rank.

    Raises:
        UsageError: an activity that this torch does not know.
    """
    names = handler.activities
    unknown = [name for name in names or () if not hasattr(ProfilerActivity, name.upper())]
    if unknown:
        known = ", ".join(name.lower() for name in ProfilerActivity.__members__)
        raise UsageError(f"this torch cannot profile {', '.join(unknown)}", cure=f"Activities are {known}.")
    written = count()

    def ready(profiler: torch.profiler.profile) -> None:
        if handler.on_trace_ready is not None:
            handler.on_trace_ready(profiler)
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            cycle = next(written)
            name = f"profile_{topology.rank}_{cycle}.json" if cycle else f"profile_{topology.rank}.json"
            profiler.export_chrome_trace(str(folder / name))

    with torch.profiler.profile(
        activities=None if names is None else [getattr(ProfilerActivity, name.upper()) for name in names],
        schedule=None if handler.schedule_option is None else torch.profiler.schedule(**handler.schedule_option),
        on_trace_ready=ready,
        record_shapes=handler.record_shapes,
        profile_memory=handler.profile_memory,
        with_stack=handler.with_stack,
        with_flops=handler.with_flops,
        with_modules=handler.with_modules,
    ) as profiler:
        yield profiler
