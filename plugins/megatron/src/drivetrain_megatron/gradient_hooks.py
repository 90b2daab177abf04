"""Gradient hooks that a script sets on parameters, where parameters are parts and batches come in micro-batches.

``parameter.register_hook(hook)`` is called with the gradient of the whole parameter by the whole batch, whether it was
set before ``prepare`` or after: a mask or a normalisation then does what it does in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from drivetrain.api import UnsupportedError

Whole = Callable[[str, Tensor], Tensor]
Part = Callable[[Tensor, Tensor], Tensor]


def refuse_steps_in_backward(module: nn.Module) -> None:
    """Raise :class:`UnsupportedError` for hooks that run when a gradient is accumulated, now or when they are set."""
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:  # noqa: SLF001 (torch has no public name)
            raise _refused(name)


def _refused(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}.register_post_accumulate_grad_hook: a gradient is accumulated from micro-batches and reduced over "
        "ranks after backward, so that the hook would run before it is complete",
        cure="Do it after accelerator.backward(loss), or use parameter.register_hook, which gets whole gradients.",
    )


def carry(former: Mapping[str, Tensor], module: nn.Module, whole: Whole, part: Part) -> None:
    """Give parameters that replaced others the hooks of those, and let hooks set later see whole gradients too.

    Args:
        former: by first name, what the script set hooks on.
        module: holds what stands under these names now.
        whole: ``whole(name, gradient)``, of a gradient laid out as the parameter is. Collective.
        part: ``part(whole, parameter)``, what this rank holds of it.
    """
    for name, new in module.named_parameters():
        old = former.get(name)
        if old is None or new is old:
            continue
        if not isinstance(new, DTensor):
            for hook in (old._backward_hooks or {}).values():  # noqa: SLF001 (torch has no public way to list them)
                new.register_hook(hook)  # type: ignore[no-untyped-call]
            continue
        register = new.register_hook

        def register_hook(
            hook: Callable[[Tensor], Any],
            name: str = name,
            new: Tensor = new,
            register: Callable[..., RemovableHandle] = register,
        ) -> RemovableHandle:
            def on_whole(gradient: Tensor) -> Tensor | None:
                with torch.no_grad():
                    changed = hook(whole(name, gradient))
                    return None if changed is None else part(changed, new)

            return register(on_whole)

        def refuse(*_: Any, name: str = name) -> Any:
            raise _refused(name)

        new.register_hook = register_hook  # type: ignore[method-assign]
        new.register_post_accumulate_grad_hook = refuse  # type: ignore[method-assign]
        for hook in (old._backward_hooks or {}).values():  # noqa: SLF001 (torch has no public way to list them)
            new.register_hook(hook)


def refuse(former: Mapping[str, Tensor], module: nn.Module, why: str) -> None:
    """Refuse hooks that nothing would call, those that are set and those to come.

    Args:
        former: by first name, what the script set hooks on.
        module: holds what stands under these names now.
        why: they would not be called.

    Raises:
        UnsupportedError: there are some.
    """
    for name, parameter in module.named_parameters():
        problem = UnsupportedError(
            f"{name}.register_hook: {why}",
            cure="Change parameter.grad after accelerator.backward(loss), or use data_parallel: ddp and engine: torch.",
        )
        if former.get(name, parameter)._backward_hooks:  # noqa: SLF001 (torch has no public way to list them)
            raise problem
        if former.get(name) is not parameter:

            def refused(*_: Any, problem: UnsupportedError = problem) -> Any:
                raise problem

            parameter.register_hook = refused  # type: ignore[method-assign]
            parameter.register_post_accumulate_grad_hook = refused  # type: ignore[method-assign]


@contextmanager
def put_off(parameters: Iterable[nn.Parameter], factor: float) -> Iterator[None]:
    """Backwards of micro-batches run in here; afterwards each hook is called once, with what they added together.

    Args:
        parameters: this rank's.
        factor: by which their gradients are larger than those of the script's loss.
    """
    waiting: list[tuple[nn.Parameter, Any, dict[Any, Any], Tensor | None]] = []
    for one in parameters:
        hooks = one._backward_hooks  # noqa: SLF001 (torch has no public way to list them)
        if hooks:
            waiting.append((one, hooks, dict(hooks), one.grad))
            hooks.clear()
            one.grad = None
    try:
        yield
    except BaseException:
        for one, hooks, called, before in waiting:
            hooks.update(called)
            one.grad = before
        raise
    for one, hooks, called, before in waiting:
        hooks.update(called)
        added = one.grad
        if added is not None:
            with torch.no_grad():
                added = added / factor
                for hook in called.values():
                    changed = hook(added)
                    added = added if changed is None else changed
                added = added * factor
        one.grad = before if added is None else added if before is None else before + added
