"""Finds a script's hooks on what flows back through a model, which are given other numbers on several processes.

A gradient of an activation is that of the mean over one process's rows, while that of a parameter is averaged. Hooks of
parameters are judged in :mod:`drivetrain.loop.gradient_hooks`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, final

from torch import Tensor, nn

from drivetrain.distributed import trees

_LIBRARIES = ("torch.", "drivetrain", "deepspeed.")
"""Beginnings of the names of modules whose hooks are an engine's."""


@final
class BackwardHooks:
    """Looks for hooks in a model's first forward in training, and at the first loss. Not collective.

    The first forward is looked at as by a profiler, unless another one runs or torch compiles it; later ones are not.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: dict[str, None] = {}
        self._outputs: list[Tensor] = []
        self._looked = False

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward itself, or for the first time one that is looked at."""
        if self._looked:
            self._look_at_outputs()
            return forward
        self._looked = True

        def watched_forward(*args: Any, **kwargs: Any) -> Any:
            watches = sys.getprofile() is None and not self._is_compiled()
            if watches:
                sys.setprofile(self._look)
            try:
                output = forward(*args, **kwargs)
            finally:
                if watches:
                    sys.setprofile(None)
            # Until the next forward or loss: a script need not keep what it has set a hook on.
            self._outputs = [leaf for _, leaf in trees.leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn]
            return output

        return watched_forward

    def found(self) -> list[str]:
        """What was found, each with its place. To be called at the first loss, once the script has seen outputs."""
        self._look_at_outputs()
        for name, module in self._module.named_modules():
            # torch has no public way to list them.
            for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):  # noqa: SLF001
                if not str(getattr(hook, "__module__", "")).startswith(_LIBRARIES):
                    self._found[f"a backward hook of {name or type(module).__name__}"] = None
        return list(self._found)

    def _is_compiled(self) -> bool:
        if getattr(self._module, "_orig_mod", None) is not None:
            return True
        return any(each._compiled_call_impl is not None for each in self._module.modules())  # noqa: SLF001 (no public word)

    def _look_at_outputs(self) -> None:
        if any(each._backward_hooks for each in self._outputs):  # noqa: SLF001 (as above)
            self._found["register_hook of an output"] = None
        if any(each.retains_grad for each in self._outputs):
            self._found["retain_grad of an output"] = None
        self._outputs.clear()

    def _look(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and frame.f_code is Tensor.register_hook.__code__:
            tensor, by = frame.f_locals.get("self"), frame.f_back
            if isinstance(tensor, Tensor) and tensor.is_leaf:
                return
            name = "register_hook"
        elif event == "c_call" and getattr(called, "__name__", "") == "retain_grad":
            name, by = "retain_grad", frame
        else:
            return
        if by is not None and not str(by.f_globals.get("__name__", "")).startswith(_LIBRARIES):
            self._found[f"{name} at {Path(by.f_code.co_filename).name}:{by.f_lineno}"] = None
