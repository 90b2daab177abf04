"""Replaces the parameters of an existing optimizer by the sharded ones of the same name."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.api import Topology, UsageError
from drivetrain_fsdp.shards import from_rank_zero, local_device, part_like

logger = logging.getLogger(__name__)


class FormerParameters:
    """The parameters of a module before it was sharded, by identity; they are not kept alive.

    Args:
        module: not sharded yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(one): (name, weakref.ref(one)) for name, one in module.named_parameters()}

    def name(self, parameter: Tensor) -> str | None:
        """The name that a parameter had; ``None`` when it was not one of them."""
        name, alive = self._names.get(id(parameter), ("", None))
        return name if alive is not None and alive() is parameter else None

    def close(self, module: nn.Module) -> None:
        """Make the replaced parameters raise where they are used, since that would not affect the model."""
        present = set(map(id, module.parameters()))
        for _, alive in self._names.values():
            one: Any = alive()
            if type(one) is nn.Parameter and id(one) not in present:
                one.__class__ = _Replaced

    def include(self, parameters: Iterable[Tensor]) -> bool:
        """Whether any of these tensors is one of the former parameters."""
        return any(self.name(parameter) is not None for parameter in parameters)


_ABOUT = frozenset(
    {
        *("shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "__len__", "stride", "is_contiguous"),
        *("dtype", "device", "layout", "get_device", "itemsize", "element_size", "nbytes", "names", "name", "__repr__"),
        *("requires_grad", "is_leaf", "grad_fn", "retains_grad", "output_nr", "_version", "_backward_hooks"),
        *("is_floating_point", "is_complex", "is_signed", "is_sparse", "is_quantized", "is_nested", "is_inference"),
        *("is_cuda", "is_cpu", "is_xpu", "is_hpu", "is_npu", "is_mps", "is_mtia", "is_xla", "is_meta", "is_mkldnn"),
    }
)
"""What may be asked of a parameter that was replaced: its successor's answer is the same."""


class _Replaced(nn.Parameter):
    """A parameter that is no longer part of the model."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow metadata of the parameter, and raise for operations that read, write or compute with its values."""
        name = str(getattr(func, "__name__", func))
        if name == "__get__":
            name = str(func.__self__.__name__)
        if name not in _ABOUT:
            _refuse(name)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(*args, **kwargs or {})

    @property
    def grad(self) -> Any:
        _refuse("grad")

    @grad.setter
    def grad(self, value: Any) -> None:
        """Allow setting it to ``None``."""
        if value is not None:
            self.grad  # noqa: B018 (raises)


def _refuse(name: str) -> NoReturn:
    raise UsageError(
        f"`{name}` was called on a parameter that was taken from the model before accelerator.prepare; fsdp put a "
        "sharded one in its place, and this one trains no more and gets no gradient",
        cure="Call model.parameters() after prepare, and again where a list of them is kept.",
    )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All that an optimizer holds, group after group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def remap(optimizer: Optimizer, former: FormerParameters, module: nn.Module, topology: Topology) -> None:
    """Replace former parameters by those of the same name, in place, and shard their state alike.

    Groups keep their order and hyper-parameters. State that is shaped like its parameter becomes sharded like it, from
    rank 0's values; other state (a step count) stays. Collective over all ranks when there is state.
    """
    present = dict(module.named_parameters())
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            name = former.name(old)
            if name is None:
                continue
            new = present[name]
            state = optimizer.state.pop(old, None)
            group["params"][index] = new
            if state is not None:
                optimizer.state[new] = {slot: _cut(value, new, topology) for slot, value in state.items()}
        _one_kind(group, present)


def _cut(value: Any, new: Tensor, topology: Topology) -> Any:
    # `new` has the shape of the whole also when it is sharded.
    if not isinstance(value, Tensor) or value.shape != new.shape or not value.dim():
        return value
    read = from_rank_zero(value, value, topology)
    return part_like(new.detach(), read, dtype=new.dtype, device=local_device(new))


def _one_kind(group: dict[str, Any], present: Mapping[str, Tensor]) -> None:
    """Disable fused and foreach kernels for groups that mix plain and sharded tensors."""
    own = {id(parameter) for parameter in present.values()}
    kinds = {isinstance(parameter, DTensor) for parameter in group["params"] if id(parameter) in own}
    if len(kinds) < 2:
        return
    for how in ("foreach", "fused"):
        if how in group:
            if group[how]:
                logger.warning("An optimizer group holds 0-d parameters beside sharded ones; %s is off for it.", how)
            group[how] = False
