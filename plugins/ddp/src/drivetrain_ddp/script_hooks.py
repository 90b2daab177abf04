"""Calls gradient hooks of parameters with the reduced gradient, as on one process.

Autograd calls the hooks of a parameter with the gradient of this rank's samples, before it is reduced. The result of a
nonlinear hook, such as a clamp, would then differ from that on one process, and a hook that only reads would see a
part. During a backward that reduces, hooks are therefore disabled, and they are called after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from drivetrain.api import LocalGradients, UsageError

Hook = Callable[[Tensor], Any]


class _Entry(NamedTuple):
    """One hook in torch's dictionary. The entry stays while disabled: handles remove it, and the order is kept."""

    hooks: dict[int, Any]
    key: int
    hook: Hook

    @property
    def present(self) -> bool:
        return self.key in self.hooks

    def put(self, hook: Hook) -> None:
        """Let autograd call this function for the entry, unless the script has removed the hook."""
        if self.present:
            self.hooks[self.key] = hook


@final
class ScriptHooks:
    """The hooks of one model's parameters by ``register_hook`` and ``register_post_accumulate_grad_hook``.

    Args:
        local: tells which hooks are ours.
        name: the name of a parameter, for messages.
    """

    def __init__(self, local: LocalGradients, name: Callable[[Tensor], str]) -> None:
        self._local, self._name = local, name
        self.found: dict[Tensor, tuple[list[_Entry], list[_Entry]]] = {}
        """Those of this backward."""
        self._earlier: dict[Tensor, Tensor] = {}
        self._closes = False

    def begin(self, hooked: Iterable[Tensor], others: Collection[int]) -> int:
        """Disable the hooks of these parameters before a backward that reduces; returns how many there are.

        Where gradients hold contributions of this rank alone, of micro-batches before, hooks were called with those:
        they stay where they are, which is the same for those that commute with an average.

        Args:
            hooked: the parameters.
            others: hooks of torch's own, by the number of their handle.
        """
        self._closes = self._local.exist()
        for one in hooked:
            kinds: tuple[list[_Entry], list[_Entry]] = ([], [])
            # torch has no public way to list them.
            of_torch: tuple[Any, Any] = (one._backward_hooks, one._post_accumulate_grad_hooks)  # noqa: SLF001
            for hooks, kind in zip(of_torch, kinds, strict=True):
                for key, hook in (hooks or {}).items():
                    if key not in others and hook is not _nothing and not self._local.keeps(hook):
                        kind.append(_Entry(hooks, key, hook))
            if any(kinds):
                self.found[one] = kinds
                if not self._closes and one.grad is not None:
                    self._earlier[one] = one.grad.detach().clone()
        if not self._closes:
            self.hold()
        return sum(len(before) + len(after) for before, after in self.found.values())

    def hold(self) -> None:
        """Prevent autograd from calling the hooks until :meth:`end`."""
        for before, after in self.found.values():
            for each in (*before, *after):
                each.put(_nothing)

    def end(self) -> None:
        """Enable the hooks again after the backward, with or without an error."""
        for before, after in self.found.values():
            for each in (*before, *after):
                each.put(each.hook)
        self.found.clear()
        self._earlier.clear()

    @torch.no_grad()
    def call(self, arrived: Iterable[Tensor], unreached: Collection[int]) -> bool:
        """Call the hooks on reduced gradients; returns whether one of them changed a gradient.

        Args:
            arrived: the parameters that the backward of this rank reached, in that order.
            unreached: parameters that this backward did not reach on any rank, by identity.

        Raises:
            UsageError: hooks were called with parts of the gradient, and would give another result.
        """
        found, earlier = dict(self.found), dict(self._earlier)
        self.end()
        if self._closes:
            for parameter, kinds in found.items():
                self._check(parameter, *kinds)
            return False
        changed = False
        # One process calls them as gradients arrive.
        ordered = {id(one): one for one in (*arrived, *found) if one in found}
        for parameter in ordered.values():
            if id(parameter) in unreached or parameter.grad is None:
                continue
            before, after = ([each for each in kind if each.present] for kind in found[parameter])
            if before:
                changed |= self._replace(parameter, earlier.get(parameter), before)
            for each in after:
                changed |= self._visit(parameter, each.hook)
        return changed

    def _replace(self, parameter: Tensor, earlier: Tensor | None, hooks: Iterable[_Entry]) -> bool:
        """Call hooks with what this backward added to a gradient, and add their result instead."""
        total = parameter.grad
        assert total is not None
        # What was there before was part of the reduction all the same: a rank without hooks, as where the main process
        # logs alone, reduces it too. A copy, since a hook may keep what it is given, and total will change.
        added = total.detach().clone() if earlier is None else total.detach() - earlier
        version = added._version  # noqa: SLF001 (a hook may write to what it is given)
        changed = added
        for each in hooks:
            found = each.hook(changed)
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
        if total.layout == result.layout == torch.strided:
            # It may be a part of a bucket.
            total.copy_(result)
        else:
            parameter.grad = result
        return True

    def _visit(self, parameter: Tensor, hook: Hook) -> bool:
        """Call a hook that reads ``.grad`` itself, and may change it."""
        grad = parameter.grad
        version = None if grad is None else grad._version  # noqa: SLF001
        if hook(parameter) is not None:
            raise UsageError(
                f"a post accumulate grad hook of {self._name(parameter)} returned something",
                cure="Return None from it, and change p.grad in place.",
            )
        return parameter.grad is not grad or (grad is not None and grad._version != version)  # noqa: SLF001

    def _check(self, parameter: Tensor, before: Iterable[_Entry], after: Collection[_Entry]) -> None:
        """Raise for hooks whose result differs because they were called with parts of the gradient."""
        if after:
            raise self._refused(parameter, "register_post_accumulate_grad_hook", "finds what is accumulated so far")
        grad = parameter.grad
        if grad is None:
            return
        for each in before:
            problem = _why_not_the_same(each.hook, grad)
            if problem:
                raise self._refused(parameter, "register_hook", problem)

    def _refused(self, parameter: Tensor, method: str, why: str) -> UsageError:
        return UsageError(
            f"gradients were accumulated without reducing them, and a hook of {self._name(parameter)} by {method} was "
            f"called with those of this rank's samples; it {why}, so that it would not do what it does on one process",
            cure="Reduce in each micro-batch: Accelerator(gradient_accumulation_plugin="
            "GradientAccumulationPlugin(num_steps=..., sync_each_batch=True)), or leave no_sync out; or change p.grad "
            "after the last accelerator.backward(loss).",
        )


def _why_not_the_same(hook: Hook, grad: Tensor) -> str:
    """Return why calling a hook on parts of the gradient is wrong; empty if the result is the same."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    if not grad.numel() or not bool(torch.isfinite(values).all()):
        # The loss scale was too large, and this step is skipped.
        return ""
    # Much larger than the gradient, and with another factor for each element: clamps, norms and masks by size show. A
    # second try, since what a linear hook leaves of the first may be so small that rounding is all that is seen.
    size = 1e3 if torch.finfo(grad.dtype).eps < 1e-5 else 8.0
    for ends in ((-size, size), (size, -0.3 * size)):
        problem = _probe(hook, grad, ends)
        if not problem:
            return ""
    return problem


def _probe(hook: Hook, grad: Tensor, ends: tuple[float, float]) -> str:
    if grad.is_sparse:
        off = grad * ends[0]
    else:
        off = grad * torch.linspace(*ends, grad.numel(), dtype=grad.dtype, device=grad.device).view_as(grad)
    # What three ranks might have, two of them the same. A sum, as in weight decay, commutes with the average, too.
    whole, first, second = (_call(hook, each) for each in (grad, grad + 2 * off, grad - off))
    if whole is None or first is None or second is None:
        return "only looks at them, and has seen parts"
    eps = torch.finfo(grad.dtype).eps
    allowed = 128.0 if eps < 1e-5 else 8.0
    largest = max(float(each.abs().max()) for each in (first, second, whole))
    error = float((first + 2 * second - 3 * whole).abs().max())
    return "" if error <= allowed * eps * largest else "is not linear"


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
    """Replaces a disabled hook."""
