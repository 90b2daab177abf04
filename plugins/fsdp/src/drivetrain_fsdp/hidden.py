"""What FSDP keeps out of sight: whether a unit is gathered, and gradients that were not reduced yet.

torch has no public way to drop such gradients, which ``zero_grad`` after ``no_sync`` must, nor to ask a unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule


def drop_unreduced(modules: Iterable[FSDPModule], parameters: Iterable[Tensor]) -> None:
    """Drop what has gathered of these parameters' gradients. Not collective."""
    wanted = {id(parameter) for parameter in parameters}
    for group in groups(modules):
        mine = [one for one in group.fsdp_params if id(one.sharded_param) in wanted]
        for one in mine:
            one.unsharded_accumulated_grad = None
            # There is none before the first forward.
            if getattr(one, "_unsharded_param", None) is not None:
                one._unsharded_param.grad = None  # noqa: SLF001
        if len(mine) == len(group.fsdp_params):
            group._partial_reduce_output = None  # noqa: SLF001


def reshard(units: Iterable[Any]) -> None:
    """Let the parameters of these :func:`groups` be shards. Not collective.

    ``FSDPModule.reshard`` costs microseconds at each step also where there is nothing to do.
    """
    for group in units:
        if not group.is_sharded:
            group.reshard()


def groups(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """What FSDP gathers at once: the parameters of each module that are in none of its inner units."""
    for module in modules:
        state: Any = module._get_fsdp_state()  # noqa: SLF001
        several = getattr(state, "_fsdp_param_groups", None)
        # Up to torch 2.12 a module had one group at most.
        yield from several if several is not None else [g for g in (state._fsdp_param_group,) if g is not None]  # noqa: SLF001
