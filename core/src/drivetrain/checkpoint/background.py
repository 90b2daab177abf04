"""A save that goes on beside the training: copied into host memory at once, written by a thread.

The thread's ranks talk over a process group of their own, so that its messages never meet those of the training. One
save runs at a time. The folder appears as with any save: whole or not at all.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.checkpoint.saver import SaveHooks, SaveWork
from drivetrain.checkpoint.storage import PlanMemory, PlannedFile
from drivetrain.checkpoint.tensorfile import Source
from drivetrain.distributed.ranks import Ranks
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.backend import Backend
    from drivetrain.checkpoint.state import TrainingState

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes: a cache line, and of every element size."""


@final
class HostBuffer:
    """One block of host memory that holds what a rank writes; kept for the next save, and larger only when it must be.

    Args:
        device: of the training; where it is not the CPU the block is pinned, so that copies into it are fast.
    """

    def __init__(self, device: str) -> None:
        self._on_device = device != "cpu"
        self._block = torch.empty(0, dtype=torch.uint8)

    def keep(self, files: Sequence[PlannedFile]) -> list[PlannedFile]:
        """Copy every tensor of these files; the files returned read the copies. They hold until the next call."""
        sizes = [_aligned(source.num_bytes) for file in files for source in file.sources]
        self._make_room(sum(sizes))
        start = 0
        kept = []
        for file in files:
            sources = []
            for source in file.sources:
                sources.append(Source.of(source.key, self._copy(source, start)))
                start += _aligned(source.num_bytes)
            kept.append(dataclasses.replace(file, sources=tuple(sources)))
        if self._on_device:
            torch.accelerator.synchronize()
        return kept

    def release(self) -> None:
        """Give the memory back."""
        self._block = torch.empty(0, dtype=torch.uint8)

    def _make_room(self, num_bytes: int) -> None:
        if self._block.numel() < num_bytes:
            self.release()  # Before the larger one is there: never both.
            self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_device)

    def _copy(self, source: Source, start: int) -> Tensor:
        place = self._block[start : start + source.num_bytes].view(source.dtype).view(source.shape)
        place.copy_(source.produce().detach(), non_blocking=self._on_device)
        return place


@final
class BackgroundSaver:
    """Saves of one run beside its training, one at a time. Its methods belong to the main thread.

    Args:
        backend: the started backend; its runtime is ``torch.distributed`` where it has several processes.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer = HostBuffer(backend.topology.device)
        self._plans = PlanMemory()
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._target: Path | None = None
        self._failure: BaseException | None = None

    def start(
        self,
        path: str | Path,
        state: TrainingState,
        *,
        info: Mapping[str, Any] | None = None,
        hooks: SaveHooks | None = None,
        alone: bool = False,
        afterwards: Callable[[], object] | None = None,
    ) -> Path:
        """Copy the state and begin to write it. Collective over all ranks, until the copy is made; then it returns.

        The save before this one must have been waited for.

        Args:
            path: see :func:`drivetrain.checkpoint.save`, also for ``state``, ``info``, ``hooks`` and ``alone``.
            state: what to write.
            info: plain JSON for the manifest.
            hooks: called here, not in the thread.
            alone: only the main process calls this.
            afterwards: called by the main process's thread once the checkpoint is complete.

        Returns:
            ``path``, made absolute; the checkpoint appears there later.

        Raises:
            CheckpointError: on every rank, when any of them failed before the thread began.
        """
        assert self._thread is None, "the save before is waited for"
        work = SaveWork(Path(path).absolute(), state, self._backend, frozenset(), dict(info or {}))
        # Its group is at rest until the thread begins.
        ranks = Ranks(self._backend, alone=alone, group=None if alone else self._own_group())
        with work.whole_or_gone(ranks):
            work.begin_beside(ranks, hooks, self._buffer.keep, self._plans)
        self._target = work.target
        # A thread that set to work at once would keep this one off the interpreter for a switch interval, 5 ms.
        returned = threading.Event()
        arguments = (returned, work, ranks, afterwards)
        # Not a daemon: a script that ends while it runs ends after it.
        self._thread = threading.Thread(target=self._run, args=arguments, name="drivetrain-save")
        self._thread.start()
        returned.set()
        return work.target

    def wait(self) -> Path | None:
        """Wait until the save that runs is complete; not collective, yet every rank's thread waits for the others'.

        Returns:
            Its folder; ``None`` when none ran.

        Raises:
            CheckpointError: it failed, on every rank; told once. What was complete before is untouched.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            what = failure.what if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
            raise CheckpointError(
                f"the save of {self._target} in the background failed: {what}",
                cure="Older checkpoints are as they were. Cure the cause and save again.",
            ) from failure
        return self._target

    def close(self) -> None:
        """Wait, then let go of memory and process group. Not collective. A failure is logged: the run is over."""
        try:
            self.wait()
        except CheckpointError as problem:
            logger.error("%s", problem)  # noqa: TRY400 (the sentence says it all; the traceback is the thread's)
        self._buffer.release()
        self._plans = PlanMemory()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _own_group(self) -> Any:
        """A process group of all ranks for the thread. Collective over all ranks the first time."""
        if self._backend.topology.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", group_desc="drivetrain checkpoints")
        return self._group

    def _run(
        self, returned: threading.Event, work: SaveWork, ranks: Ranks, afterwards: Callable[[], object] | None
    ) -> None:
        returned.wait()
        try:
            with work.whole_or_gone(ranks):
                work.finish(ranks)
            if afterwards is not None:
                act = afterwards
                ranks.agree("remove older checkpoints", lambda: act() if ranks.is_main else None)
        except BaseException as problem:  # noqa: BLE001  The main thread raises it at its next call.
            self._failure = problem


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
