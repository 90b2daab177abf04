"""Finds hooks on gradients of activations, whose values differ between one process and several.

A gradient of an activation is that of the mean over one process's rows, while that of a parameter is averaged. Hooks of
parameters are checked in :mod:`drivetrain.loop.gradient_hooks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final
from weakref import ref

from torch import Tensor, nn

from drivetrain.distributed import trees

_LIBRARIES = ("torch.", "drivetrain", "deepspeed.")
"""Prefixes of modules whose hooks belong to an engine."""


@final
class BackwardHooks:
    """Checks the hooks of a model's layers and of its last outputs at the first loss. Not collective.

    Nothing is kept alive and no call is intercepted, so hooks on what lies between the layers are not seen.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._outputs: Sequence[ref[Tensor]] = ()

    def note(self, output: Any) -> None:
        """Record the outputs of a forward, in place of the previous ones."""
        self._outputs = [ref(leaf) for _, leaf in trees.leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn]

    def found(self) -> list[str]:
        """Return where hooks were found, in words. To be called at the first loss, once the script has seen outputs."""
        found = dict[str, None]()
        for name, module in self._module.named_modules():
            # torch has no public way to list them.
            for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):  # noqa: SLF001
                if _is_of_script(hook):
                    found[f"a backward hook of {name or type(module).__name__}"] = None
        outputs = [each for each in (weak() for weak in self._outputs) if each is not None]
        of_outputs = [hook for each in outputs for hook in (each._backward_hooks or {}).values()]  # noqa: SLF001 (as above)
        if any(map(_is_of_script, of_outputs)):
            found["register_hook of an output"] = None
        if any(each.retains_grad for each in outputs):
            found["retain_grad of an output"] = None
        return list(found)


def _is_of_script(hook: Any) -> bool:
    """Whether it is none of an engine's own, such as the one by which DeepSpeed notices a backward."""
    return not str(getattr(hook, "__module__", "")).startswith(_LIBRARIES)
