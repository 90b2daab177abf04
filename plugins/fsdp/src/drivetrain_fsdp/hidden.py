"""Gradients that FSDP keeps out of sight: whole ones of micro-batches that were not reduced yet.

torch has no public way to drop them, which ``zero_grad`` after ``no_sync`` must.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule


def drop_unreduced(modules: Iterable[FSDPModule], parameters: Iterable[Tensor]) -> None:
    """Drop what has gathered of these parameters' gradients. Not collective."""
    wanted = {id(parameter) for parameter in parameters}
    for group in _groups(modules):
        mine = [one for one in group.fsdp_params if id(one.sharded_param) in wanted]
        for one in mine:
            one.unsharded_accumulated_grad = None
            # There is none before the first forward.
            if getattr(one, "_unsharded_param", None) is not None:
                one._unsharded_param.grad = None  # noqa: SLF001
        if len(mine) == len(group.fsdp_params):
            group._partial_reduce_output = None  # noqa: SLF001


def _groups(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    for module in modules:
        state: Any = module._get_fsdp_state()  # noqa: SLF001
        groups = getattr(state, "_fsdp_param_groups", None)
        # Up to torch 2.12 a module had one group at most.
        yield from groups if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]  # noqa: SLF001
