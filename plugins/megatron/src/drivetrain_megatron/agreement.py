"""Checks that ranks which compute one batch together have read the same batch.

The ranks of a pipeline, and those of the axis ``tp``, each read the batch for themselves, which costs no message. That
is right as long as reading it twice gives the same: a dataset that draws augmentations from a generator of its own, or
without a seed, gives every rank another sample. So a digest of what was read is compared in each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from drivetrain.api import UsageError

_MASK, _HALF = (1 << 62) - 1, (1 << 31) - 1
_ROUNDING = 1e-3
"""Kernels may sum in another order on each rank; other labels change a loss by more."""


_LOSS = "the loss"

_CURE = (
    "Leave out what takes a rank's part of the samples, or skips batches by the rank. Where numbers are drawn, let one "
    "process read for all, DataLoaderConfiguration(dispatch_batches=True) or dataloader.dispatch_batches: true; or "
    "make what is drawn a function of the sample's index."
)


@torch.no_grad()
def digest(tensors: Iterable[Any], device: torch.device) -> Tensor:
    """Return a 62-bit hash of the contents and shapes of tensors. Reads each byte once."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for place, tensor in enumerate(tensors):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        words = _words(local.detach())
        # Odd weights, so that no place is without effect; products wrap around.
        weights = torch.arange(1, 2 * len(words) + 1, 2, device=words.device)
        told = (words * weights).sum() * (2 * place + 3) + hash(tuple(local.shape))
        total = total * 31 + told.to(device)
    return total & _MASK


def _words(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(-1)
    if flat.dtype is torch.bool:
        return flat.to(torch.int64)
    size = flat.element_size()
    for width in (8, 4, 2, 1):
        if (flat.numel() * size) % width == 0 and (width <= size or flat.storage_offset() * size % width == 0):
            kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
            return flat.view(kind).to(torch.int64)
    raise AssertionError("every tensor has whole bytes")


def check(digests: Sequence[Tensor], names: Sequence[str], groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Compare digests over each of some groups. Collective over them.

    Args:
        digests: of this rank.
        names: what each of them is a digest of, for the error.
        groups: of ranks that must have the same; ``None`` is passed over.

    Raises:
        UsageError: on every rank of a group, when they differ.
    """
    wrong = [name for name, other in zip(names, differing(digests, groups), strict=True) if other]
    if wrong:
        raise differ(wrong)


def differing(digests: Sequence[Tensor], groups: Sequence[dist.ProcessGroup | None]) -> list[bool]:
    """Return which of some digests differ over the ranks of any group. Collective over the groups."""
    mine = torch.stack(list(digests))
    both = torch.cat([mine, -mine])
    for group in groups:
        if group is not None:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = both[: len(mine)], -both[len(mine) :]
    return [high != low for high, low in zip(highest.tolist(), lowest.tolist(), strict=True)]


def differ(names: Sequence[str]) -> UsageError:
    """The error for values that ranks were given differently."""
    if list(names) == [_LOSS]:
        return UsageError(
            "the processes that compute one batch together were given the same inputs of the model, and have different "
            "losses: the labels differ, or what the loss is computed with; or the script has written to parameters or "
            "to an optimizer's state on some of these processes alone",
            cure="Write on every process, not under `if accelerator.is_main_process:`. " + _CURE,
        )
    return UsageError(
        f"the processes that compute one batch together were given different values of {' and '.join(names)}: each "
        "reads the batch for itself, and the dataset or the script draws random numbers that differ among them, or "
        "takes other samples on each",
        cure=_CURE,
    )


@final
class Inputs:
    """Compares what the ranks of an axis gave to a model's forwards, once for each backward or evaluation.

    Args:
        group: the ranks that compute one batch together; ``None`` where each computes alone.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._given: list[Tensor] = []

    def given(self, arguments: Any) -> None:
        """A forward begins. Collective over the group where no backward follows."""
        if self._group is None:
            return
        tensors = [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]
        self._given.append(digest(tensors, self._device))
        if not torch.is_grad_enabled():
            check([self._given.pop()], ["the model's inputs"], [self._group])

    @torch.no_grad()
    def check(self, loss: Tensor) -> None:
        """Compare batches when a backward begins; the loss covers its labels too. Collective over the group.

        Raises:
            UsageError: on every rank, when they differ.
        """
        if self._group is None:
            return
        # As many forwards as there were, in one number; the loss apart, since kernels may round it otherwise.
        told = torch.zeros((), dtype=torch.int64, device=self._device)
        for one in self._given:
            told = (told * 31 + one) & _MASK
        self._given.clear()
        value = torch.nan_to_num(loss.detach().double().reshape(-1)[0], posinf=0.0, neginf=0.0).to(self._device)
        # A single rank may overflow; then the step is skipped on all.
        infinite = (~loss.detach().reshape(-1)[0].isfinite()).double().to(self._device)
        halves = torch.stack([(told & _HALF).double(), (told >> 31).double(), value, infinite])
        both = torch.cat([halves, -halves])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        *highest, most, overflow, a, b, c, _ = both.tolist()
        lowest, least = [-a, -b], -c
        if highest != lowest:
            raise differ(["the model's inputs"])
        if not overflow and most - least > _ROUNDING * max(abs(most), abs(least)) + 1e-6:
            raise differ([_LOSS])
