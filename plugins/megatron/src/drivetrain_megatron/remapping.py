"""Optimizers that were made for the whole parameters: they get what stands under the same names now."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.api import UsageError


class FormerParameters:
    """The parameters of a module before they were replaced, by identity; they are not kept alive.

    Args:
        module: nothing of it replaced yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(one): (name, weakref.ref(one)) for name, one in module.named_parameters()}

    def name(self, parameter: Tensor) -> str | None:
        """The name that a parameter had; ``None`` when it was not one of them."""
        name, alive = self._names.get(id(parameter), ("", None))
        return name if alive is not None and alive() is parameter else None

    def close(self, module: nn.Module) -> None:
        """From now on those that were replaced raise where their gradient is asked for: they never get one."""
        present = set(map(id, module.parameters()))
        for _, alive in self._names.values():
            one: Any = alive()
            if type(one) is nn.Parameter and id(one) not in present:
                one.__class__ = _Replaced

    def replaced(self, parameters: Iterable[Tensor], module: nn.Module) -> bool:
        """Whether any of these was one of them and is in the module no more."""
        present = set(map(id, module.parameters()))
        return any(id(one) not in present and self.name(one) is not None for one in parameters)

    def include(self, parameters: Iterable[Tensor]) -> bool:
        """Whether any of these was one of them."""
        return any(self.name(parameter) is not None for parameter in parameters)


class _Replaced(nn.Parameter):
    """A parameter that the model has no more."""

    @property
    def grad(self) -> Any:
        raise UsageError(
            "the gradient of a parameter was asked for that was taken from the model before accelerator.prepare, which "
            "put one in its place that is cut over tensor-parallel ranks; this one gets no gradient",
            cure="Call model.parameters() after prepare, and pass an optimizer to prepare together with its model.",
        )

    @grad.setter
    def grad(self, value: Any) -> None:
        """Dropping what is not there is right."""
        if value is not None:
            self.grad  # noqa: B018 (raises)


@torch.no_grad()
def remap(
    optimizer: Optimizer,
    former: FormerParameters,
    module: nn.Module,
    cut: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Exchange former parameters for those of the same name, in place; groups keep order and hyper-parameters.

    Args:
        optimizer: made for the former parameters.
        former: what they were called.
        module: where their names lead now.
        cut: ``cut(whole, parameter)``, this rank's part of state that is shaped like the whole parameter.
    """
    present = dict(module.named_parameters())
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            name = former.name(old)
            new = None if name is None else present[name]
            if new is None or new is old:
                continue
            state: dict[str, Any] | None = optimizer.state.pop(old, None)
            group["params"][index] = new
            if state is not None:
                optimizer.state[new] = {slot: _cut(value, old, new, cut) for slot, value in state.items()}
        one_kernel(group)


def _cut(value: Any, old: Tensor, new: Tensor, cut: Callable[[Tensor, Tensor], Tensor]) -> Any:
    return cut(value, new) if isinstance(value, Tensor) and value.dim() and value.shape == old.shape else value


def one_kernel(group: dict[str, Any]) -> None:
    """Plain tensors and DTensors, or DTensors of two meshes, cannot go through one fused or foreach kernel."""
    kinds = {one.device_mesh if isinstance(one, DTensor) else None for one in group["params"]}
    if len(kinds) > 1:
        for how in ("foreach", "fused"):
            if how in group:
                group[how] = False
