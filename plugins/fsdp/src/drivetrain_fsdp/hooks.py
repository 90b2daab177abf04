"""Calls gradient hooks of sharded parameters with the full gradient of one backward, as on one process.

``fully_shard`` calls no ``register_hook`` and calls ``register_post_accumulate_grad_hook`` whenever it has reduced a
part of a backward. Here both are called once after each backward of which the parameter is part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from drivetrain.api import GradientHook, UnsupportedError, UsageError
from drivetrain_fsdp.shards import box_of

Hooks = dict[int, Callable[[Any], Any]]

_METHODS = ("register_hook", "register_post_accumulate_grad_hook")


class GradientHooks:
    """Hooks of one model's parameters, whether set before ``prepare`` or after it.

    Args:
        module: not sharded yet; its hooks are taken from it, and handles that the script holds still remove them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._may_register: Callable[[], None] = _may
        self._before: dict[str, Hooks] = {}
        self._after: dict[str, Hooks] = {}
        self._parameters: dict[str, Tensor] = {}
        self._aside: dict[str, Tensor | None] = {}
        self.begun = False
        """A backward is under way."""
        for name, parameter in module.named_parameters():
            # A parameter that stays whole remains this object, and must not call them too.
            if parameter._backward_hooks:  # noqa: SLF001 (torch has no public way to them)
                self._before[name], parameter._backward_hooks = parameter._backward_hooks, None  # noqa: SLF001
            hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001
            if hooks:
                # None would leave those that it has in place.
                self._after[name], parameter._post_accumulate_grad_hooks = hooks, OrderedDict()  # noqa: SLF001

    def watch(self, module: nn.Module, may_register: Callable[[], None]) -> None:
        """Redirect hooks that the script registers on these parameters to this object.

        Args:
            module: sharded.
            may_register: called before each; raises where a hook would miss gradients of earlier micro-batches.
        """
        self._may_register = may_register
        for name, parameter in module.named_parameters():
            self._parameters[name] = parameter
            for method, kept in zip(_METHODS, (self._before, self._after), strict=True):
                setattr(parameter, method, partial(self._register, name, kept, method))

    def release(self) -> None:
        """Undo :meth:`watch`, so that a parameter which only a graph still refers to does not keep the engine alive."""
        for parameter in self._parameters.values():
            for method in _METHODS:
                vars(parameter).pop(method, None)

    @property
    def active(self) -> bool:
        """Whether some parameter has a hook."""
        return any(self._before.values()) or any(self._after.values())

    def listed(self) -> Iterator[GradientHook]:
        """Hooks of the script. Not collective."""
        for accumulated, kept in enumerate((self._before, self._after)):
            for name, hooks in kept.items():
                for number, hook in hooks.items():
                    yield GradientHook(number, name, self._parameters[name], hook, bool(accumulated))

    def before_backward(self) -> None:
        """Set gradients of earlier backwards aside, so that hooks see only those of the next one."""
        self.begun = True
        for name in self._hooked():
            parameter = self._parameters[name]
            self._aside[name] = parameter.grad
            parameter.grad = None

    def after_backward(self) -> None:
        """Call the hooks of parameters that this backward reached. Collective over all ranks."""
        self.begun = False
        reached = []
        for name, earlier in self._aside.items():
            parameter = self._parameters[name]
            grad = parameter.grad
            if grad is None:
                parameter.grad = earlier
                continue
            reached.append(name)
            hooks = self._before.get(name)
            if hooks:
                _replace(grad, _changed(name, _whole(grad), list(hooks.values())))
            if earlier is not None:
                _local(grad).add_(_local(earlier))
        self._aside.clear()
        for name in reached:
            for hook in list(self._after.get(name, {}).values()):
                if hook(self._parameters[name]) is not None:
                    raise UsageError(
                        f"a post accumulate grad hook of {name} returned something; torch wants None",
                        cure="Change param.grad in place, or by assignment, and return nothing.",
                    )

    def _hooked(self) -> Iterable[str]:
        return [name for name in self._parameters if self._before.get(name) or self._after.get(name)]

    def _register(self, name: str, kept: dict[str, Hooks], method: str, hook: Callable[[Any], Any]) -> RemovableHandle:
        if not self._parameters[name].requires_grad:
            raise UsageError(
                f"{method} on {name}, which requires no gradient", cure=f"Write {name}.requires_grad_() before it."
            )
        self._may_register()
        hooks = kept.setdefault(name, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle


def _may() -> None:
    """Do nothing: no parameters are sharded yet."""


def refuse_hooks(parameter: Tensor) -> None:
    """Make hooks raise on a parameter that is gathered for one forward: they would get this rank's gradient only."""
    for method in _METHODS:
        setattr(parameter, method, _refuse)


def _refuse(*_hook: Any) -> NoReturn:
    raise UnsupportedError(
        "a gradient hook was set on a parameter between a forward and its backward, while it is gathered for them",
        cure="Set hooks of parameters before the forward.",
    )


def _changed(name: str, grad: Tensor, hooks: Iterable[Callable[[Any], Any]]) -> Tensor:
    """The result of the hooks for a gradient; each gets the previous one's result."""
    for hook in hooks:
        found = hook(grad)
        if found is None:
            continue
        if not isinstance(found, Tensor) or found.shape != grad.shape:
            raise UsageError(
                f"a hook of {name} returned {type(found).__name__} of shape {list(getattr(found, 'shape', []))} for a "
                f"gradient of shape {list(grad.shape)}",
                cure="Return a tensor of the gradient's shape, or None.",
            )
        grad = found
    return grad


def _whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _replace(grad: Tensor, whole: Tensor) -> None:
    """Write this rank's shard of a full gradient to the gradient."""
    whole = _whole(whole)
    local = _local(grad)
    local.copy_(whole[box_of(grad)] if whole.dim() else whole)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
