"""All ranks do something together, and all of them learn when one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.backend import Backend

T = TypeVar("T")


class Ranks:
    """Collectives over every rank of the job, by global rank.

    A backend's own object collectives span the data-parallel ranks; where the mesh has other axes too, the default
    process group spans them all.

    Args:
        backend: whose ranks these are.
        alone: only the main process is in this; it waits for nobody.
        group: a process group of all ranks to talk over instead, for a thread beside the training.
    """

    def __init__(self, backend: Backend, *, alone: bool = False, group: Any = None) -> None:
        self._backend, self._group = backend, group
        topology = backend.topology
        self.rank, self.world_size = topology.rank, 1 if alone else topology.world_size
        self._data_parallel_only = topology.dp_size == topology.world_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """One picklable value from every rank, on every rank. Collective over all ranks."""
        if self.world_size == 1:
            return [value]
        if self._data_parallel_only and self._group is None:
            return self._backend.gather_object(value)
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """The main process's picklable value, on every rank. Collective over all ranks."""
        return value if self.world_size == 1 else cast("T", self._backend.broadcast_object(value, 0))

    def ask_whether_same(self, fits: bool, mark: int) -> Callable[[], bool]:
        """Begin to find out whether ``fits`` is true on every rank and ``mark`` the same. Collective over all ranks.

        Far cheaper than :meth:`gather`. Only where these ranks were given a process group, which carries CPU tensors.

        Returns:
            Waits for the answer. To be called before anything else is asked of these ranks.
        """
        if self.world_size == 1:
            return lambda: fits
        import torch
        import torch.distributed as dist

        assert self._group is not None, "the default group may carry no CPU tensors"
        told = torch.tensor([not fits, mark, -mark])
        arriving = dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> bool:
            arriving.wait()
            unfit, highest, lowest = told.tolist()
            return not unfit and highest == -lowest

        return answer

    def agree(self, action: str, work: Callable[[], T]) -> list[T]:
        """Every rank works, and nobody goes on when one of them failed. Collective over all ranks.

        Args:
            action: what ``work`` does, as in "rank 1 could not <action>".
            work: not collective; what it returns is picklable.

        Returns:
            What each rank's work returned, by rank.

        Raises:
            CheckpointError: (or the subclass that was raised) on every rank, with the number of the first that failed.
        """
        value: T | None = None
        failure: CheckpointError | None = None
        cause: Exception | None = None
        try:
            value = work()
        except CheckpointError as problem:
            failure = problem
        except Exception as problem:  # noqa: BLE001  Whatever it is, the other ranks wait to hear of it.
            failure = CheckpointError(f"could not {action}: {type(problem).__name__}: {problem}".rstrip("."))
            cause = problem
        outcomes = self.gather((value, failure))
        failed = [(rank, error) for rank, (_, error) in enumerate(outcomes) if error is not None]
        if failed:
            raise self._joined(failed) from cause
        return [cast("T", outcome) for outcome, _ in outcomes]

    def _joined(self, failed: list[tuple[int, CheckpointError]]) -> CheckpointError:
        rank, error = failed[0]
        everyone = len(failed) == self.world_size and len({other.what for _, other in failed}) == 1
        if self.world_size == 1 or everyone:
            return error
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        whose = ", ".join(part for part in (error.whose, f"rank {rank}{others}") if part)
        return type(error)(f"rank {rank} of {self.world_size}: {error.what}", whose=whose, cure=error.cure)
