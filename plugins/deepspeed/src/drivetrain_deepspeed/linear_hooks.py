"""Checks that a script's hooks on parameters are linear, so that they may run before gradients are reduced.

DeepSpeed reduces in buckets after autograd, so that a hook of ``register_hook`` is given the gradient of this rank's
samples. For a linear hook the mean over ranks is the hook of the mean; for any other it is not, and a hook that returns
nothing reads one rank's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from drivetrain.api import UnsupportedError
from drivetrain.api.engines import try_hook

_CURE = (
    "Call accelerator.clip_grad_norm_ or accelerator.clip_grad_value_ after accelerator.backward, or use "
    "distributed_type: ddp, where a hook is given the gradient of all ranks."
)


@final
class LinearHooks:
    """Tries each hook that the script sets, once, at the first gradient of its parameter.

    A trial calls the hook a few times with fixed tensors, the same on every rank, so that all ranks come to the same
    answer.

    Args:
        parameters: the trained ones, each with the handle of the plugin's own hook.
        named: a parameter in words, by identity.
    """

    def __init__(self, parameters: list[tuple[Any, Any]], named: Callable[[int], str]) -> None:
        self._hooks = [(each, each._backward_hooks) for each, _ in parameters]  # noqa: SLF001 (no public way)
        self._named = named
        self._known = {handle.id for _, handle in parameters}
        """Hooks that were found linear, or are ours. torch numbers all hooks of a process."""
        self.untried: set[int] = set()
        """Parameters with other hooks."""

    def look(self) -> None:
        """Notice hooks that were set since the last call."""
        for parameter, hooks in self._hooks:
            if len(hooks) > 1 and not hooks.keys() <= self._known:
                self.untried.add(id(parameter))

    @torch.no_grad()
    def check(self, parameter: Any, gradient: Tensor) -> None:
        """Check the hooks of a parameter when its gradient is computed. Not collective.

        Raises:
            UnsupportedError: one is not linear, or returns nothing.
        """
        self.untried.discard(id(parameter))
        for number, hook in list(parameter._backward_hooks.items()):  # noqa: SLF001 (as above)
            if number not in self._known:
                _refuse(try_hook(hook, gradient), self._named(id(parameter)), "register_hook")
                self._known.add(number)


def try_accumulated(hook: Callable[[Tensor], None], parameter: Tensor, whose: str) -> None:
    """The same for a hook of ``register_post_accumulate_grad_hook``, which is given a parameter with its gradient.

    It is tried on a copy of the parameter. Stage 0 alone leaves gradients there.

    Raises:
        UnsupportedError: it is not linear, does not change the gradient, or takes no other tensor.
    """
    changed = []

    def written(gradient: Tensor) -> Tensor | None:
        stand_in = parameter.detach().clone().requires_grad_()
        stand_in.grad = gradient.clone()
        hook(stand_in)
        changed.append(stand_in.grad is None or not torch.equal(stand_in.grad, gradient))
        return stand_in.grad

    kind = "register_post_accumulate_grad_hook"
    try:
        found = try_hook(written, parameter)
        _refuse("returns nothing" if found == "linear" and not any(changed) else found, whose, kind)
    except UnsupportedError:
        raise
    except Exception as error:  # of the script's own code
        raise UnsupportedError(
            f"{whose} has a hook by register_post_accumulate_grad_hook, which is called before DeepSpeed reduces "
            f"gradients and could not be tried on a copy of the parameter ({type(error).__name__}: {error})",
            cure=_CURE,
        ) from error


def _refuse(found: str, whose: str, kind: str) -> None:
    """Raise unless a hook was found linear."""
    if found == "not linear":
        raise UnsupportedError(
            f"{whose} has a hook by {kind} that is not linear, as one that clamps or normalises: DeepSpeed "
            "reduces gradients after hooks, which are given the gradient of this rank's samples alone",
            cure=_CURE,
        )
    if found == "returns nothing":
        raise UnsupportedError(
            f"{whose} has a hook by {kind} that returns nothing: DeepSpeed reduces gradients after hooks, so "
            "that what it looks at is the gradient of this rank's samples alone",
            cure="Read the norm of all gradients by accelerator.clip_grad_norm_(model.parameters(), math.inf) after "
            "accelerator.backward, or use distributed_type: ddp, where a hook is given the gradient of all ranks.",
        )
