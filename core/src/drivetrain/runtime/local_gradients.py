"""Which gradients hold contributions of this rank alone, for engines that reduce them after a backward of their own."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn


@final
class LocalGradients:
    """Keeps account of the parameters that a backward has reached since gradients were last reduced.

    An engine makes one for each model, calls :meth:`reduced` after it has reduced the model's gradients, and answers
    ``Trainable.has_unreduced_gradients`` by :meth:`exist`. A plain ``loss.backward()`` is noticed, too.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._reached: set[Tensor] = set()
        self._hooks: dict[Tensor, Any] = {}
        self._watch()

    def _watch(self) -> None:
        for parameter in self._module.parameters():
            if parameter.requires_grad and parameter not in self._hooks:
                # The bound method of a set: no Python frame for each parameter of each backward.
                hook = parameter.register_post_accumulate_grad_hook(self._reached.add)  # type: ignore[no-untyped-call]
                self._hooks[parameter] = hook

    def reduced(self) -> None:
        """All gradients of the model are the same on every rank now."""
        self._reached.clear()
        self._watch()

    def exist(self) -> bool:
        """Whether some gradient holds contributions of this rank alone. Not collective."""
        return any(parameter.grad is not None for parameter in self._reached)

    def release(self) -> None:
        """Stop watching."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._reached.clear()
