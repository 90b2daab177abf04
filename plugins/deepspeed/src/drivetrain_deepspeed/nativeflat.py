"""Builds the flat buffers of DeepSpeed's files for any stage and world size, tensor by tensor."""

from __future__ import annotations

import math
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.api import CheckpointError
from drivetrain_convert import SavedModel, Source

_ALIGNMENT = 2
"""DeepSpeed's ``nccl_start_alignment_factor``: a rank's part is a multiple of so many elements."""


class Rooms:
    """Tensors in memory-mapped files, so that the system may write them out.

    Args:
        folder: made here, and removed by :meth:`close`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        folder.mkdir()

    def make(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, 1-d."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        self._count += 1
        return torch.from_file(str(self._folder / str(self._count)), shared=True, size=numel, dtype=dtype)

    def keep(self, key: str, saved: SavedModel) -> Tensor:
        """One saved tensor."""
        source = saved.tensors[key]
        room = self.make(math.prod(source.shape), source.dtype)
        room.copy_(source.produce().reshape(-1))
        return room.view(source.shape)

    def clear(self) -> None:
        """Free the disk space; the tensors must not be used any more."""
        for path in self._folder.iterdir():
            path.unlink()

    def close(self) -> None:
        """The end."""
        shutil.rmtree(self._folder)


@dataclass(frozen=True)
class Flat:
    """One flat buffer.

    Args:
        group: index of its parameter group.
        shapes: its parameters in order.
        world_size: how many ranks share it.
        interleaved: each rank has a part of each parameter (ZeRO-3), else a part of the row of parameters.
    """

    group: int
    shapes: OrderedDict[str, tuple[int, ...]]
    world_size: int
    interleaved: bool

    @property
    def part(self) -> int:
        """Elements of one rank, with padding."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        if self.interleaved:
            return sum(-(-size // self.world_size) for size in sizes)
        unit = _ALIGNMENT * self.world_size
        return -(-sum(sizes) // unit) * unit // self.world_size

    def padding(self, rank: int) -> int:
        """Elements at the end of a rank's part that belong to no parameter (ZeRO-1 and 2)."""
        total = sum(math.prod(shape) for shape in self.shapes.values())
        return min(self.part, max(0, (rank + 1) * self.part - total))

    def pieces(self, rank: int) -> Iterator[tuple[str, int, int]]:
        """Name, start in the rank's part and length of what a rank has of each parameter; none that is empty."""
        for name, _, owner, start, numel in self._places():
            if owner == rank:
                yield name, start, numel

    def scatter(self, sources: Mapping[str, Source], dtype: torch.dtype, rooms: Rooms) -> list[Tensor]:
        """Each rank's part of buffers laid out like this one; parameters without a source are zero."""
        parts = [rooms.make(self.part, dtype) for _ in range(self.world_size)]
        name, whole = None, None
        for wanted, at, rank, start, numel in self._places():
            if wanted not in sources:
                continue
            if wanted != name:
                name, whole = wanted, sources[wanted].produce().reshape(-1)
            assert whole is not None
            parts[rank][start : start + numel] = whole[at : at + numel]
        return parts

    def fill(self, saved: SavedModel, rooms: Rooms) -> dict[str, Any]:
        """Master values under ``"master"`` and every slot: a list of the ranks' parts, or a number for all.

        Raises:
            CheckpointError: a slot that is neither.
        """
        masters = {name: saved.tensors[f"model.{name}"] for name in self.shapes}
        filled: dict[str, Any] = {"master": self.scatter(masters, torch.float32, rooms)}
        for slot, sources in _slots(self, saved).items():
            shaped = {name: source for name, source in sources.items() if source.shape}
            if not shaped:
                filled[slot] = _number(slot, sources, saved)
            elif all(source.shape == self.shapes[name] for name, source in sources.items()):
                filled[slot] = self.scatter(sources, next(iter(sources.values())).dtype, rooms)
            else:
                raise CheckpointError(
                    f"{slot} is not shaped like its parameters, so DeepSpeed has no place for it",
                    cure="Write a checkpoint of an optimizer that DeepSpeed has, such as Adam.",
                )
        return filled

    def _places(self) -> Iterator[tuple[str, int, int, int, int]]:
        """Name, start in the parameter, rank, start in the rank's part, length; parameter by parameter."""
        at = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            if self.interleaved:
                share = -(-size // self.world_size)
                for rank in range(self.world_size):
                    numel = max(0, min(share, size - rank * share))
                    if numel:
                        yield name, rank * share, rank, at, numel
                at += share
                continue
            done = 0
            while done < size:
                rank, start = divmod(at + done, self.part)
                numel = min(size - done, self.part - start)
                yield name, done, rank, start, numel
                done += numel
            at += size


def flats_of(saved: SavedModel, frozen: Sequence[str], stage: int, world_size: int, limit: int) -> list[Flat]:
    """The flat buffers of one stage, in DeepSpeed's order.

    Args:
        saved: the checkpoint.
        frozen: parameters that are in none.
        stage: 1, 2 or 3.
        world_size: how many ranks share them.
        limit: ZeRO-3 begins another buffer when a rank's part has so many elements.
    """
    flats = []
    for number, group in enumerate(saved.optimizers[0]):
        shapes: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        for name in group["params"]:
            shape = saved.tensors[f"model.{name}"].shape
            if name in frozen or not math.prod(shape):
                continue
            shapes[name] = shape
            if stage == 3 and Flat(number, shapes, world_size, interleaved=True).part >= limit:
                flats.append(Flat(number, shapes, world_size, interleaved=True))
                shapes = OrderedDict()
        if shapes:
            flats.append(Flat(number, shapes, world_size, interleaved=stage == 3))
    return flats


def _slots(flat: Flat, saved: SavedModel) -> dict[str, dict[str, Source]]:
    """Sources by slot and parameter."""
    found: dict[str, dict[str, Source]] = {}
    for key, source in saved.tensors.items():
        kind, _, rest = key.partition(".")
        name, _, slot = rest.rpartition(".")
        if kind == "optim" and name in flat.shapes:
            found.setdefault(slot, {})[name] = source
    return found


def _number(slot: str, sources: Mapping[str, Source], saved: SavedModel) -> Any:
    """One number for a whole buffer, the largest of its parameters': a tensor or a plain number, as it was."""
    values = {name: source.produce() for name, source in sources.items()}
    largest = max(values, key=lambda name: float(values[name]))
    value = values[largest].clone()
    return value.item() if f"optim.{largest}.{slot}" in saved.extra.get("numbers", {}) else value
