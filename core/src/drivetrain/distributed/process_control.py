"""Process control: ranks, barriers, and running or splitting work by rank."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from drivetrain.backend import Backend
from drivetrain.distributed.trees import honor_type
from drivetrain.distributed.watchdog import check_collective
from drivetrain.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def share(length: int, index: int, count: int, padded: bool = False) -> list[int]:
    """Return the indices of process ``index`` of ``count`` among ``length`` items: contiguous, one more for the first.

    Args:
        length: number of items.
        index: which process.
        count: number of processes.
        padded: repeat an item (the process's last, or the last of all for one that gets none) so that all processes
            get the same number. Nothing repeats when there is no item at all.
    """
    each, extra = divmod(length, count)
    start = index * each + min(index, extra)
    mine = list(range(start, start + each + (index < extra)))
    if padded and length:
        filler = mine[-1] if mine else length - 1
        mine += [filler] * (each + (extra > 0) - len(mine))
    return mine


def split(inputs: Any, index: int, count: int, padded: bool = False) -> Any:
    """The share of one process; the argument is unchanged. Local.

    Args:
        inputs: a list, tuple or other sequence, a tensor or array (cut along dim 0), a dict of these (nested too, all
            of one length), a ``torch`` dataset with a length, or an object with ``select(indices)`` such as those of
            the ``datasets`` package.
        index: which process.
        count: number of processes.
        padded: see :func:`share`.

    Raises:
        UsageError: values of a dict that differ in length, or something that has no items to share out.
    """
    if count == 1:
        return inputs
    lengths = dict(_lengths(inputs, ""))
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path or 'it'}: {length}" for path, length in lengths.items())
        raise UsageError(
            f"values of different length cannot be split between processes ({listed})",
            cure="Give them one length, or split them one by one.",
        )
    if not lengths:
        return inputs
    return _take(inputs, share(next(iter(lengths.values())), index, count, padded))


def _lengths(inputs: Any, path: str) -> list[tuple[str, int]]:
    if isinstance(inputs, Mapping):
        return [found for key, value in inputs.items() for found in _lengths(value, f"{path}[{key!r}]")]
    if isinstance(inputs, (Tensor, np.ndarray)) and inputs.ndim == 0:
        raise UsageError(
            f"a 0-d {type(inputs).__name__} cannot be split between processes",
            cure="Give it a dim of which each process takes a part.",
        )
    if _can_be_taken_from(inputs):
        return [(path, len(inputs))]
    raise UsageError(
        f"{type(inputs).__name__} cannot be split between processes",
        cure="Give a list, a tuple, a tensor, a dict of these, or a dataset with a length.",
    )


def _can_be_taken_from(inputs: Any) -> bool:
    if isinstance(inputs, (str, bytes)):
        return False
    selects = callable(getattr(inputs, "select", None)) or isinstance(inputs, Dataset)
    return isinstance(inputs, (Tensor, np.ndarray, Sequence)) or (selects and hasattr(inputs, "__len__"))


def _take(inputs: Any, indices: list[int]) -> Any:
    if isinstance(inputs, Mapping):
        return honor_type(inputs, [_take(value, indices) for value in inputs.values()])
    run = slice(indices[0], indices[-1] + 1) if indices else slice(0, 0)
    is_run = len(indices) == run.stop - run.start
    if isinstance(inputs, Tensor):
        return inputs[run] if is_run else inputs[torch.tensor(indices, device=inputs.device)]
    if isinstance(inputs, np.ndarray):
        return inputs[run] if is_run else inputs[indices]
    if callable(getattr(inputs, "select", None)):
        return inputs.select(indices)
    if isinstance(inputs, Dataset):
        return Subset(inputs, indices)
    if is_run:
        return inputs[run]
    items = [inputs[index] for index in indices]
    return tuple(items) if isinstance(inputs, tuple) else items


_asked: set[str] = set()
"""Names of properties that a script of this process has asked for."""


def num_processes_was_read() -> bool:
    """Whether a script of this process has asked for :attr:`ProcessControl.num_processes`."""
    return bool(_asked)


class ProcessControl:
    """Ranks and process control, the common base of ``PartialState`` and ``Accelerator``.

    Args:
        job: the started backend.
    """

    def __init__(self, job: Backend) -> None:
        self._job, self._topology = job, job.topology

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return torch.device(self._topology.device)

    @property
    def num_processes(self) -> int:
        """Number of processes in the job.

        Losses are averaged over those that see samples of their own, :attr:`data_parallel_size`.
        """
        _asked.add("num_processes")
        return self._topology.world_size

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel processes: those that share a model, by its layers or by parts of them, count as one.

        What a loss is averaged over, and a batch is shared out over.
        """
        return self._topology.dp_size

    @property
    def process_index(self) -> int:
        """Global rank."""
        return self._topology.rank

    @property
    def local_process_index(self) -> int:
        """Rank among the processes of this machine."""
        return self._topology.process.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is global rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest global rank."""
        return self.process_index == self._topology.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._topology.world_size > 1

    def wait_for_everyone(self) -> None:
        """Wait until every process has made this call. Collective over all ranks."""
        check_collective("wait_for_everyone")
        self._job.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the main process first, then on all others. Collective over all ranks."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the first process of each machine, then on all others. Collective over all ranks."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, mine: bool) -> Iterator[None]:
        if not mine:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # Also when the block raised: the others wait for this process and must not wait for ever.
            if mine:
                self.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each machine."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)  # noqa: T201 (this is the method's purpose)

    @overload
    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_main_process(self, function: Any = None) -> Any:
        """Decorate a function to run on the main process only; elsewhere it returns ``None``."""
        return _only_where(lambda: self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorate a function to run on the first process of each machine only; elsewhere it returns ``None``."""
        return _only_where(lambda: self.is_local_main_process, function)

    @overload
    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_last_process(self, function: None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_last_process(self, function: Any = None) -> Any:
        """Decorate a function to run on the last process only; elsewhere it returns ``None``."""
        return _only_where(lambda: self.is_last_process, function)

    @overload
    def on_process(self, function: Callable[P, R], process_index: int) -> Callable[P, R | None]: ...
    @overload
    def on_process(
        self, function: None = None, *, process_index: int
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on one process only; elsewhere it returns ``None``. A lone process runs it.

        Args:
            function: what to run; leave it out to write ``@on_process(process_index=1)``.
            process_index: global rank.

        Raises:
            UsageError: no such process.
        """
        chosen = self._existing("process_index", process_index, self._topology.world_size)
        return _only_where(lambda: self.process_index == chosen or not self.use_distributed, function)

    @overload
    def on_local_process(self, function: Callable[P, R], local_process_index: int) -> Callable[P, R | None]: ...
    @overload
    def on_local_process(
        self, function: None = None, *, local_process_index: int
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run on one process of each machine only; elsewhere it returns ``None``.

        A process that is alone runs it whatever the number.

        Args:
            function: what to run; leave it out to write ``@on_local_process(local_process_index=1)``.
            local_process_index: rank on the machine.

        Raises:
            UsageError: no such process.
        """
        size = self._topology.process.local_world_size
        chosen = self._existing("local_process_index", local_process_index, size)
        return _only_where(lambda: self.local_process_index == chosen or not self.use_distributed, function)

    def _existing(self, name: str, index: int | None, size: int) -> int:
        if index is None or index < 0 or (index >= size and self.use_distributed):
            raise UsageError(
                f"{name}={index} names none of {size} processes; the function would run nowhere",
                cure=f"Give {name} a value from 0 to {size - 1}.",
            )
        return index

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Split inputs contiguously between processes; if they do not divide evenly, the first processes get one more.

        Processes that compute one model together (along ``tp``, ``cp`` or ``pp``) get the same share. Not collective;
        the inputs themselves are left as they were. A process for which none is left gets an empty share, or with
        ``apply_padding`` a copy of the last input.

        Args:
            inputs: a list, tuple, tensor, array, dataset, or a dict of lists, tuples, tensors of one length.
            apply_padding: repeat inputs so that all shares have the same length, as ``gather`` wants it.

        Raises:
            UsageError: dict values of different lengths, or something without items to share out.
        """
        yield split(inputs, self._topology.dp_rank, self._topology.dp_size, apply_padding)


def _only_where(here: Callable[[], bool], function: Callable[P, R] | None) -> Any:
    """A decorator, or the decorated function; the condition is evaluated at each call."""

    def decorate(inner: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(inner)
        def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return inner(*args, **kwargs) if here() else None

        return run

    return decorate if function is None else decorate(function)
