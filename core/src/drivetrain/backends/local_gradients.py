"""Tracks gradients that are not yet reduced over ranks, for engines that reduce them after their own backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from drivetrain.errors import UsageError

_FUNCTION = BackwardCFunction.apply.__code__
"""Calls the backward of an autograd function of Python."""


@final
class LocalGradients:
    """Tracks the parameters that a backward has reached since gradients were last reduced.

    An engine makes one for each model, calls :meth:`reduced` after it has reduced the model's gradients, and on several
    processes answers ``Trainable.has_unreduced_gradients`` by :meth:`exist`. A plain ``loss.backward()`` is noticed,
    too, and ``torch.autograd.grad`` with parameters as inputs raises :class:`UsageError`: what it returns is never
    reduced. With ``create_graph=True`` too: a penalty on the norm of such gradients would be the mean of the ranks'
    norms.

    Args:
        module: the model.
        reduces: whether the script expects gradients over all ranks; false on one process and inside ``no_sync``. It is
            asked for the refusal of ``torch.autograd.grad`` alone.
        begun: called at the first gradient of each backward that reaches the model, also of one that the script began.
    """

    def __init__(
        self, module: nn.Module, reduces: Callable[[], bool], begun: Callable[[], None] | None = None
    ) -> None:
        self._module, self._reduces, self.begun = module, reduces, begun
        self.reached: list[Tensor] = []
        """Parameters that backwards have reached since :meth:`before_backward`, possibly more than once."""
        self._earlier: dict[int, Tensor] = {}
        self._hooks: dict[Tensor, Any] = {}
        self._task = -1
        """Number that torch assigns to the last backward that reached the model."""
        self.watch()

    def watch(self) -> None:
        """Update the hooks: parameters may have been added, removed or unfrozen."""
        present = set(self._module.parameters())
        for gone in self._hooks.keys() - present:
            self._hooks.pop(gone).remove()
        for parameter in present:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(self._hook(parameter))  # type: ignore[no-untyped-call]

    def _hook(self, parameter: Tensor) -> Callable[[Tensor], None]:
        task, reached, passes = torch._C._current_graph_task_id, self.reached.append, self._passes  # noqa: SLF001

        # Runs for each parameter in each backward, hence a list: a set would call Tensor.__hash__. Of one parameter in
        # each backward more is checked.
        def at(_grad: Tensor) -> None:
            if task() == self._task or passes(parameter):
                reached(parameter)

        at.keeps_account = True  # type: ignore[attr-defined]
        return at

    @staticmethod
    def keeps(hook: Any) -> bool:
        """Whether a hook of a parameter is one of ours, for this model or another."""
        return getattr(hook, "keeps_account", False)

    def _passes(self, parameter: Tensor) -> bool:
        """Whether the first gradient of a new backward is accumulated into ``.grad``."""
        if not parameter.requires_grad:
            return False  # frozen since the forward: autograd calls hooks, and accumulates nothing
        if not is_taken(parameter):
            self._task = torch._C._current_graph_task_id()  # noqa: SLF001 (as torch.utils.checkpoint asks)
            if len(self.reached) > 8 * len(self._hooks):
                # The script calls backward() itself, again and again, inside of no_sync.
                self.reached[:] = {id(each): each for each in self.reached}.values()
            if self.begun is not None:
                self.begun()
            return True
        if self._reduces() and not is_of_a_function():
            names = {id(one): name for name, one in self._module.named_parameters()}
            # In a backward, gradients are enabled under create_graph=True alone.
            penalty = " For a penalty on the gradient of all ranks use one process." if torch.is_grad_enabled() else ""
            raise UsageError(
                f"torch.autograd.grad was asked for the gradient of {names.get(id(parameter), 'a parameter')} of "
                f"{type(self._module).__name__}, and would return that of this rank's samples alone",
                cure="Call accelerator.backward(loss), which leaves gradients over all ranks in p.grad. Where this "
                "rank's own is meant, as in an inner step of meta-learning, write `with "
                "accelerator.no_sync(model):` around torch.autograd.grad; accelerator.reduce(gradient, 'mean') "
                f"averages it over ranks.{penalty}",
            )
        return False

    def before_backward(self) -> None:
        """Start the engine's own backward: from now on :attr:`reached` lists what it reaches."""
        self._earlier.update(zip(map(id, self.reached), self.reached, strict=True))
        self.reached.clear()

    def reduced(self) -> None:
        """All gradients of the model are the same on every rank now."""
        self.forget()
        self.watch()

    def forget(self) -> None:
        """Like :meth:`reduced`, for an engine that calls :meth:`watch` itself when the model changes."""
        self._earlier.clear()
        self.reached.clear()

    def exist(self) -> bool:
        """Whether a gradient holds contributions of this rank only. Not collective."""
        return any(parameter.grad is not None for parameter in chain(self._earlier.values(), self.reached))

    def release(self) -> None:
        """Stop watching."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.forget()


def is_of_a_function() -> bool:
    """Whether the backward of an autograd function called the current one, as a function that recomputes does.

    What it returns goes into the gradients of the backward around it. To be called in a hook of a parameter.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (inspect.stack() reads sources too)
    while frame is not None:
        if frame.f_code is _FUNCTION:
            return True
        frame = frame.f_back
    return False


def is_taken(parameter: Tensor) -> bool:
    """Whether the current backward is a ``torch.autograd.grad`` that returns the gradient of this parameter.

    To be called in a hook of the parameter, or of a node that the backward runs before it.
    """
    # A hook of the parameter runs at its accumulator, which torch takes as long to find as ten such hooks.
    node = torch._C._current_autograd_node()  # noqa: SLF001 (as torch.autograd.graph reads it)
    if getattr(node, "variable", None) is not parameter:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            node = get_gradient_edge(parameter).node
    try:
        torch._C._will_engine_execute_node(node)  # noqa: SLF001
    except RuntimeError:
        # torch does not answer outside of a backward, and within one not for a leaf of torch.autograd.grad.
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            raise
        return True
    return False
