"""Carries attributes (``p.lr_scale = 0.1``) and gradients of parameters over to those that an engine puts there."""

from __future__ import annotations

from typing import Any, final
from weakref import ref

import torch
from torch import Tensor, nn


@final
class LeftOnParameters:
    """Carries what a script has set on the parameters of a model over to those that an engine puts in their places.

    Args:
        module: not yet given to an engine.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        named = _named(module)
        self._attributes = {name: its for name, one in named.items() if (its := _attributes(one))}
        # By weak references: an engine frees parameters. One that is on another rank refuses to be asked.
        here = {name: one for name, one in named.items() if type(one).grad is Tensor.grad}
        self._gradients = {name: (ref(one), one.grad) for name, one in here.items() if one.grad is not None}

    @torch.no_grad()
    def take_over(self) -> None:
        """Set them on the parameters that are there now. Collective where writes to a gradient are."""
        named = _named(self._module) if self._attributes or self._gradients else {}
        for name, its in self._attributes.items():
            if name in named:
                vars(named[name]).update({key: value for key, value in its.items() if key not in vars(named[name])})
        done = set()
        for name, (before, gradient) in self._gradients.items():
            one = named.get(name)
            if one is not None and before() is not one and one.grad is None and id(one) not in done:
                done.add(id(one))
                one.grad = torch.zeros_like(one)
                one.grad.copy_(gradient)


def _attributes(parameter: Tensor) -> dict[str, Any]:
    """Return what is set on a parameter, but for methods that an engine has put in the place of torch's."""
    return {name: value for name, value in vars(parameter).items() if not hasattr(type(parameter), name)}


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))
