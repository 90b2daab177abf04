"""One process's share of a list, a tuple, a dict of these, a tensor, an array or a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from drivetrain.errors import UsageError
from drivetrain.runtime.trees import honor_type


def share(length: int, index: int, count: int, padded: bool = False) -> list[int]:
    """Which of ``length`` items process ``index`` of ``count`` gets: a run of them, the first processes one more.

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
    """The share of one process; the argument is left as it was. Local.

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
        raise UsageError(f"values of different length cannot be split between processes ({listed})")
    if not lengths:
        return inputs
    return _take(inputs, share(next(iter(lengths.values())), index, count, padded))


def _lengths(inputs: Any, path: str) -> list[tuple[str, int]]:
    if isinstance(inputs, Mapping):
        return [found for key, value in inputs.items() for found in _lengths(value, f"{path}[{key!r}]")]
    if isinstance(inputs, (Tensor, np.ndarray)) and inputs.ndim == 0:
        raise UsageError(f"a 0-d {type(inputs).__name__} cannot be split between processes")
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
