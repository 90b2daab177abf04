"""Detects a short batch that a script keeps and trains on in a later loop.

Ranks share such a batch unevenly, so that a loss over it has another weight than one over the current batch. Its
tensors are known by their memory, and the losses over them by the outputs of the models that were given them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, final
from weakref import ref

import torch
from torch import Tensor

from drivetrain.data.plan import Rows
from drivetrain.distributed import trees

Data = TypeVar("Data")

_MOST = 64
"""Tensors that are remembered, and outputs."""


class _Held(NamedTuple):
    """The memory of a tensor that a loader has yielded.

    Args:
        tensor: the memory may be another's when it is gone.
        begin, end: addresses.
        rows: of its batch.
    """

    tensor: ref[Tensor]
    begin: int
    end: int
    rows: Rows

    def overlaps(self, other: _Held) -> bool:
        """Whether the two share memory."""
        return self.begin < other.end and other.begin < self.end


@final
class KeptBatches:
    """The uneven batches that loaders have yielded and that the script still holds. Not collective.

    Attributes:
        held: their tensors, those of the current batch excluded. Empty for a script that keeps no uneven batch.
        current: the tensors of the current batch, where it is uneven.
        outputs: autograd nodes of what models gave for such batches since the last step of an optimizer.
    """

    def __init__(self) -> None:
        self.held: list[_Held] = []
        self.current: list[_Held] = []
        self.outputs: dict[Any, Rows] = {}

    def show(self, rows: Rows, batch: Data) -> Data:
        """Record a batch that is about to be yielded, if ranks have unequal parts of it, and return it.

        It is the current one until :meth:`end`. Kept batches that share memory with it are dropped: a collate function
        reuses one buffer, or batches are views of one tensor, so that memory does not identify them.
        """
        uneven = not rows.even and rows.counted and not rows.missing
        if uneven or self.held:
            current = [_Held(ref(tensor), *_memory(tensor), rows) for tensor in _tensors(batch)]
            self.held = [one for one in self.held if not any(map(one.overlaps, current))]
            self.current = current if uneven else []
        return batch

    def end(self) -> None:
        """The current batch is no longer the current one."""
        self.held = (self.held + self.current)[-_MOST:]
        self.current = []
        self._forget_freed()

    def rows_of(self, value: Any) -> Rows | None:
        """Return the rows of the kept batch that a tree of tensors has memory of; ``None`` if it has none."""
        self._forget_freed()
        if not self.held or torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001 (no public word)
            return None  # what a transform is given has no memory
        for tensor in _tensors(value):
            address = tensor.data_ptr()
            for one in self.held:
                if one.begin <= address < one.end:
                    return one.rows
        return None

    def note(self, output: Any, rows: Rows) -> None:
        """Record a model's outputs for a kept batch with these rows, until an optimizer steps."""
        for _, leaf in trees.leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None and len(self.outputs) < _MOST:
                self.outputs[leaf.grad_fn] = rows

    def _forget_freed(self) -> None:
        self.held[:] = [one for one in self.held if one.tensor() is not None]


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors whose memory has an address that does not change."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu", None if accelerator is None else accelerator.type)
    for _, leaf in trees.leaves(tree):
        if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type in kinds and leaf.numel():
            yield leaf
