"""Gradient hooks that the script sets on parameters: each gets what it gets on one process, the reduced gradient.

Autograd calls the hooks of a parameter with the gradient of this rank's samples, before it is reduced. A hook that is
not linear, such as a clamp, would then make another gradient of it than on one process, and one that only looks would
see a part. During a backward that reduces they are therefore held back, and called after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, final

import torch
from torch import Tensor

from drivetrain.api import LocalGradients, UsageError

Hook = Callable[[Tensor], Any]


@final
class ScriptHooks:
    """The hooks of one model's parameters by ``register_hook`` and ``register_post_accumulate_grad_hook``.

    Args:
        local: tells which hooks are ours.
        name: the name of a parameter, for messages.
    """

    def __init__(self, local: LocalGradients, name: Callable[[Tensor], str]) -> None:
        self._local, self._name = local, name
        self._found: dict[Tensor, tuple[list[Hook], list[Hook]]] = {}
        self._held: list[tuple[dict[int, Any], int, Hook]] = []
        self._earlier: dict[Tensor, Tensor] = {}
        self._closes = False
        self.number = 0
        """How many there were in the last backward that reduced."""

    def begin(self, trained: Iterable[Tensor], others: Collection[int]) -> None:
        """Hold the hooks of these parameters back: a backward that reduces is about to run.

        Where gradients hold contributions of this rank alone, of micro-batches before, hooks were called with those:
        they stay where they are, which is the same for those that are linear.

        Args:
            trained: the parameters.
            others: hooks of torch's own, by the number of their handle.
        """
        self.end()
        hooked = [one for one in trained if len(one._backward_hooks or ()) > 1 or one._post_accumulate_grad_hooks]  # noqa: SLF001
        self.number = 0
        if not hooked:
            return
        self._closes = self._local.exist()
        for one in hooked:
            kinds: tuple[list[Hook], list[Hook]] = ([], [])
            # torch has no public way to list them.
            of_torch: tuple[Any, Any] = (one._backward_hooks, one._post_accumulate_grad_hooks)  # noqa: SLF001
            for hooks, kind in zip(of_torch, kinds, strict=True):
                for key, hook in (hooks or {}).items():
                    if key not in others and hook is not _nothing and not self._local.keeps(hook):
                        kind.append(hook)
                        self._held.append((hooks, key, hook))
            if any(kinds):
                self._found[one] = kinds
                if not self._closes and one.grad is not None:
                    self._earlier[one] = one.grad.detach().clone()
        self.number = len(self._held)
        if not self._closes:
            self.hold()

    @property
    def found(self) -> bool:
        """Some parameter has hooks in this backward."""
        return bool(self._found)

    def hold(self) -> None:
        """Keep autograd from calling the hooks until :meth:`restore`."""
        # The entry stays, so that the script's handle still removes it and the order is kept.
        for hooks, key, _hook in self._held:
            if key in hooks:
                hooks[key] = _nothing

    def restore(self) -> None:
        """Give the hooks back to autograd."""
        for hooks, key, hook in self._held:
            if key in hooks:
                hooks[key] = hook
        self._held.clear()

    def end(self) -> None:
        """The backward is over, with an error or without."""
        self.restore()
        self._found.clear()
        self._earlier.clear()

    @torch.no_grad()
    def call(self, unreached: Collection[int]) -> bool:
        """Call the hooks on reduced gradients; returns whether one of them changed a gradient.

        Args:
            unreached: parameters that this backward did not reach on any rank, by identity.

        Raises:
            UsageError: hooks were called with parts of the gradient, and are not linear.
        """
        found, earlier = dict(self._found), dict(self._earlier)
        self.end()
        if self._closes:
            for parameter, (before, after) in found.items():
                self._check(parameter, before, after)
            return False
        changed = False
        for parameter, (before, after) in found.items():
            if id(parameter) in unreached or parameter.grad is None:
                continue
            if before:
                changed |= self._replace(parameter, earlier.get(parameter), before)
            for hook in after:
                changed = True
                if hook(parameter) is not None:
                    raise UsageError(
                        f"a post accumulate grad hook of {self._name(parameter)} returned something",
                        cure="Return None from it, and change p.grad in place.",
                    )
        return changed

    def _replace(self, parameter: Tensor, earlier: Tensor | None, hooks: Iterable[Hook]) -> bool:
        """Call hooks with what this backward added to a gradient, and add what they make of it instead."""
        total = parameter.grad
        assert total is not None
        # Not left out of the reduction: a rank without hooks, as where the main process logs alone, reduces it too.
        added = total if earlier is None else total - earlier
        version = added._version  # noqa: SLF001 (a hook may write to what it is given)
        changed = added
        for hook in hooks:
            found = hook(changed)
            if found is None:
                continue
            if not isinstance(found, Tensor) or found.shape != changed.shape or found.dtype != changed.dtype:
                raise UsageError(
                    f"a hook of {self._name(parameter)} returned {_describe(found)} for a gradient that is "
                    f"{_describe(changed)}",
                    cure="Return a tensor of the gradient's shape and dtype, or None.",
                )
            changed = found
        if changed is added and added._version == version:  # noqa: SLF001
            return False
        result = changed if earlier is None else earlier + changed
        if result is total:
            return True
        if total.layout == result.layout == torch.strided:
            # It may be a part of a bucket.
            total.copy_(result)
        else:
            parameter.grad = result
        return True

    def _check(self, parameter: Tensor, before: Iterable[Hook], after: Collection[Hook]) -> None:
        """Raise for hooks for which it matters that they were called with parts of the gradient."""
        if after:
            raise self._refused(parameter, "register_post_accumulate_grad_hook", "is called with what is accumulated")
        grad = parameter.grad
        if grad is None:
            return
        for hook in before:
            problem = _why_not_linear(hook, grad)
            if problem:
                raise self._refused(parameter, "register_hook", problem)

    def _refused(self, parameter: Tensor, method: str, why: str) -> UsageError:
        return UsageError(
            f"gradients were accumulated without reducing them, and a hook of {self._name(parameter)} by {method} was "
            f"called with those of this rank's samples; it {why}, so that it would not do what it does on one process",
            cure="Reduce in each micro-batch: Accelerator(gradient_accumulation_plugin="
            "GradientAccumulationPlugin(num_steps=..., sync_each_batch=True)), or no no_sync; or change p.grad after "
            "the last accelerator.backward(loss).",
        )


def _why_not_linear(hook: Hook, grad: Tensor) -> str:
    """What is wrong with calling a hook on parts of a gradient; empty where it gives the same."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    if not bool(torch.isfinite(values).all()):
        # The loss scale was too large, and this step is skipped.
        return ""
    precise = torch.finfo(grad.dtype).eps < 1e-5
    size, allowed = (1e3, 128.0) if precise else (8.0, 8.0)
    if grad.is_sparse:
        one = grad * size
    else:
        # Much larger than the gradient, and with another factor for each element: clamps, norms and masks by size show.
        one = grad * torch.linspace(-size, size, grad.numel(), dtype=grad.dtype, device=grad.device).view_as(grad)
    outputs = [_call(hook, each) for each in (grad, one, grad - one)]
    if any(each is None for each in outputs):
        return "returns nothing and sees parts"
    whole, first, second = outputs
    assert whole is not None
    assert first is not None
    assert second is not None
    largest = max(float(each.abs().max()) for each in (first, second, whole)) if grad.numel() else 0.0
    error = float((first + second - whole).abs().max()) if grad.numel() else 0.0
    return "" if error <= allowed * torch.finfo(grad.dtype).eps * largest else "is not linear"


def _call(hook: Hook, grad: Tensor) -> Tensor | None:
    given = grad.clone()
    version = given._version  # noqa: SLF001 (a hook may write to what it is given)
    found = hook(given)
    if found is None:
        found = given if given._version != version else None  # noqa: SLF001
    return found.to_dense() if isinstance(found, Tensor) else found


def _describe(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _nothing(_grad: Tensor) -> None:
    """Stands where a hook is held back."""
