"""Finds hooks on gradients of parameters, and checks whether they are linear.

A hook may be called with a part of the gradient (of one rank's samples), or with a multiple of it (where the size of a
window is known only after its last backward). A linear hook commutes with averages and multiples. Any other hook does
not, and a hook that returns nothing reads another value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.errors import UsageError

Hook = Callable[[Tensor], Tensor | None]

_OF_TORCH = ("torch.distributed.", "torch.nn.parallel.")
"""Modules of torch whose hooks reduce gradients."""


class GradientHook(NamedTuple):
    """A hook of the script on the gradient of a parameter.

    Args:
        number: torch's, of its handle.
        name: of the parameter.
        parameter: with the shape and dtype of what the hook is given.
        hook: as the script set it.
        accumulated: it is of ``register_post_accumulate_grad_hook``, else of ``register_hook``.
    """

    number: int
    name: str
    parameter: Tensor
    hook: Callable[..., Any]
    accumulated: bool


def hooks_of(module: nn.Module) -> Iterator[GradientHook]:
    """The hooks of a module's parameters that are not an engine's. Not collective."""
    for name, parameter in module.named_parameters():
        # torch has no public way to list them.
        both = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)  # noqa: SLF001
        for accumulated, hooks in enumerate(both):
            for number, hook in (hooks or {}).items():
                if not (hasattr(hook, "keeps_account") or str(getattr(hook, "__module__", "")).startswith(_OF_TORCH)):
                    yield GradientHook(number, name, parameter, hook, bool(accumulated))


Cause = Literal["items", "samples", "scale"]
"""Reason for which a hook is called with a multiple of the gradient that one process would find.

``"items"``: their number is not known yet, so that no gradient of the window is what it would be on one process.
``"samples"``: the window was shorter than expected, and only what hooks returned is another number. ``"scale"``: the
loss is multiplied, as under ``mixed_precision: fp16``, and what hooks returned is divided again.
"""

_SINCE: dict[Cause, str] = {
    "items": "since the number of items by which a window divides is known after its last backward only",
    "samples": "since the number of samples by which a window divides is known after its last backward only",
    "scale": "since mixed_precision: fp16 multiplies the loss",
}
_DENOMINATOR = (
    "Pass the number where it is known before: accelerator.backward(loss_sum, denominator=n), with n of the whole "
    "window over all ranks; or change p.grad after the last accelerator.backward(loss)."
)
_CURES: dict[Cause, str] = {
    "items": _DENOMINATOR,
    "samples": _DENOMINATOR,
    "scale": "Change p.grad after accelerator.backward(loss), when it is divided again, or use mixed_precision: bf16.",
}


def refuse_multiples(hooks: Iterable[GradientHook], tried: set[int], cause: Cause) -> None:
    """Refuse hooks that were, or will be, called with a multiple of the gradient and would see the difference.

    Not collective. Each hook is tried once, with fixed numbers, so that every rank comes to the same answer.

    Args:
        hooks: of the models that a loss trains.
        tried: numbers of those that are linear; those that are found to be are added.
        cause: why they are given a multiple.

    Raises:
        UsageError: a hook is not linear, or looks at gradients.
    """
    for number, name, parameter, hook, accumulated in hooks:
        if number in tried:
            continue
        found = "finds what is accumulated so far" if accumulated else try_hook(hook, parameter)
        if found == "linear":
            tried.add(number)
        elif cause == "items" or found != "returns nothing":
            kind = "register_post_accumulate_grad_hook" if accumulated else "register_hook"
            is_so = "is not linear, as one that clamps or normalises" if found == "not linear" else found
            raise UsageError(
                f"{name} has a hook by {kind} that {is_so}. It is given a multiple of the gradient of one process, "
                f"{_SINCE[cause]}",
                cure=_CURES[cause],
            )


@torch.no_grad()
def try_hook(hook: Hook, like: Tensor) -> Literal["linear", "not linear", "returns nothing"]:
    """Call a hook of ``register_hook`` a few times with fixed numbers, so that every rank comes to the same answer.

    Not collective.

    Args:
        hook: of the script.
        like: a tensor with the gradient's shape, dtype and device; its values are not read.
    """
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(like.shape, generator=generator).to(like.device, like.dtype) for _ in range(2))
    # Powers of two, by which floats multiply exactly, far enough apart to meet thresholds.
    far = 2.0**8 if like.dtype == torch.float16 else 2.0**20
    try:
        of_one = _called(hook, one)
        scaled = all(_close(_called(hook, one * by) / by, of_one) for by in (-1 / far, far))
        linear = scaled and _close(_called(hook, one + other), of_one + _called(hook, other))
    except _NothingReturnedError:
        return "returns nothing"
    return "linear" if linear else "not linear"


class _NothingReturnedError(Exception):
    pass


def _called(hook: Hook, given: Tensor) -> Tensor:
    """Return the gradient after a hook: its result, or its argument, which it may have changed."""
    written = given.clone()
    returned = hook(written)
    if returned is not None:
        return returned
    if torch.equal(written, given):
        raise _NothingReturnedError
    return written


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal up to rounding, measured by the largest element: sums in a hook may cancel."""
    largest = float(other.abs().max()) if other.numel() else 0.0
    tolerance = 64 * torch.finfo(other.dtype).eps * largest
    return math.isfinite(largest) and one.shape == other.shape and bool(torch.allclose(one, other, 0.0, tolerance))
