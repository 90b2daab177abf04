"""A rank's range of a tensor's elements in row-major order, which ``torch.distributed.checkpoint`` saves and fills.

DeepSpeed lays its parameters one after another into a flat buffer and cuts that into equal parts, wherever this falls.
The part of one parameter is then a range of its elements. A checkpoint's files hold boxes; a range is at most
``2 * dims - 1`` of them (the end of a row, whole rows, the beginning of a row, for two dims), each of which is
contiguous in the flat buffer, so that nothing is gathered or copied on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@final
class FlatShard(Tensor):
    """The elements ``start`` to ``start + local.numel()`` of a tensor of ``shape``, in row-major order.

    It represents the full tensor (its ``shape`` is the full one) in ``PortableState.tensors``, to be saved and to be
    filled; it computes nothing. ``torch.distributed.checkpoint`` takes it as it is. Ranks that hold the same range may
    both offer it; ranges that overlap otherwise are an error of the save.

    Args:
        local: 1-d, contiguous, the live memory; may be empty.
        start: index of its first element in the flattened tensor.
        shape: of the full tensor.
    """

    local: Tensor
    start: int

    def __new__(cls, local: Tensor, start: int, shape: tuple[int, ...]) -> FlatShard:
        assert local.dim() == 1, local.shape
        assert local.is_contiguous()
        assert 0 <= start <= math.prod(shape) - local.numel(), (start, local.numel(), shape)
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001  torch's documented way to a tensor like this.
        shard: FlatShard = make(cls, shape, dtype=local.dtype, device=local.device)
        shard.local, shard.start = local.detach(), start
        return shard

    def boxes(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield the boxes of the full tensor that make up this range: offsets and a view of the elements."""
        at = 0
        for offsets, sizes in boxes(tuple(self.shape), self.start, self.start + self.local.numel()):
            count = math.prod(sizes)
            yield offsets, self.local[at : at + count].view(sizes)
            at += count

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FlatShard({self.start}:{self.start + self.local.numel()} of {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not torch.ops.aten.detach.default:
            raise TypeError(f"{function} was called on a FlatShard: it says where elements are, it does not compute")
        return args[0]

    # torch's protocol for tensors that wrap others: an average of a model is laid out alike through it.

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["local"], self.start

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], start: int, size: Any, stride: Any) -> FlatShard:
        return FlatShard(inner["local"], start, tuple(size))

    # Protocol of torch.distributed.checkpoint's planners for tensors of unknown layouts.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, part in self.boxes():
            if index.offset is None or tuple(index.offset) == offsets:
                return part
        raise ValueError(f"{index.fqn} has no box at {index.offset} on this rank")


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a tensor's elements, in row-major order, into boxes: offsets and sizes, in the order of elements.

    An empty tensor is one box; an empty range of another tensor is none.
    """
    if math.prod(shape) == 0:
        yield (0,) * len(shape), shape
    elif start < stop:
        yield from _boxes(shape, start, stop)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # Complete rows are first to last.
    if first > last:
        # Inside one row.
        for offsets, sizes in _boxes(shape[1:], start - last * row, stop - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    if start < first * row:
        for offsets, sizes in _boxes(shape[1:], start - (first - 1) * row, row):
            yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        for offsets, sizes in _boxes(shape[1:], 0, stop - last * row):
            yield (last, *offsets), (1, *sizes)
