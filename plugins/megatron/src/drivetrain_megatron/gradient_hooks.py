"""Runs gradient hooks of sharded parameters on the full gradient, once per batch instead of once per micro-batch.

``parameter.register_hook(hook)`` is called with the gradient of the whole parameter by the whole batch, whether it was
set before ``prepare`` or after: a mask or a normalisation then does what it does in one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from drivetrain.api import GradientHook, LocalGradients, UnsupportedError, hooks_of
from drivetrain.api.engines import try_hook
from drivetrain_megatron.pipeline.skeleton import Elsewhere, unaware
from drivetrain_sharding import pickle_as_made

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
    """Move hooks to the parameters that replace theirs; hooks registered later see full gradients too.

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
        new.register_hook = _registering(name, module, whole, part)  # type: ignore[method-assign]

        def refuse(*_: Any, name: str = name) -> Any:
            raise _refused(name)

        new.register_post_accumulate_grad_hook = refuse  # type: ignore[method-assign]
        for hook in (old._backward_hooks or {}).values():  # noqa: SLF001 (torch has no public way to list them)
            new.register_hook(hook)


def _registering(name: str, module: nn.Module, whole: Whole, part: Part) -> Callable[..., RemovableHandle]:
    """A ``register_hook`` for a parameter of ``module`` that is a part; see :func:`carry`.

    It does not refer to the parameter, which has it as an attribute: the memory of a parameter whose stage is another
    is needed at once, and Python collects cycles rarely. Nor is there a weak reference to it, with which torch could
    not exchange it when the model is moved.
    """
    register, alive = type(module.get_parameter(name)).register_hook, weakref.ref(module)

    def itself() -> Tensor:
        owner = alive()
        assert owner is not None, "its hooks are set and called while the model is there"
        return owner.get_parameter(name)

    def register_hook(hook: Callable[[Tensor], Any]) -> RemovableHandle:
        def on_whole(gradient: Tensor) -> Tensor | None:
            with torch.no_grad():
                changed = hook(whole(name, gradient))
                return None if changed is None else part(changed, itself())

        on_whole.of_script = hook  # type: ignore[attr-defined]
        return register(itself(), on_whole)  # type: ignore[no-untyped-call, no-any-return]

    return register_hook


def refuse(former: Mapping[str, Tensor], module: nn.Module, why: str) -> None:
    """Raise for hooks that would never be called, registered before or later.

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
            pickle_as_made(parameter, {"register_hook", "register_post_accumulate_grad_hook"})


def listed(module: nn.Module) -> Iterator[GradientHook]:
    """The script's hooks on gradients of parameters, those of other stages too. Not collective."""
    for found in hooks_of(module):
        its = getattr(found.hook, "of_script", found.hook)
        if not (LocalGradients.keeps(its) or _is_ours(its)):
            yield found._replace(hook=its)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, Elsewhere):
            for accumulated, hooks in enumerate(parameter._hooks):  # noqa: SLF001 (a class of ours)
                for number, hook in hooks.items():
                    its = getattr(hook, "of_script", hook)
                    yield GradientHook(number, name, parameter, its, bool(accumulated))


@final
class LinearHooks:
    """Refuses hooks that are not linear where they are called before gradients are averaged over data-parallel ranks.

    Of a linear hook the average is the hook of the average. Each hook is tried once, with fixed numbers in place of the
    gradient, so that every rank comes to the same answer, the stages that lack the parameter too.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: set[int] = set()
        """torch numbers all hooks of a process."""

    @torch.no_grad()
    def check(self) -> None:
        """Try the hooks that were set since the last call. Not collective.

        Raises:
            UnsupportedError: one is not linear, or only looks at gradients.
        """
        for number, name, parameter, hook, accumulated in listed(self._module):
            if number not in self._known and not accumulated:
                _try(hook, parameter, name)
                self._known.add(number)


def _try(hook: Callable[[Tensor], Tensor | None], parameter: Tensor, name: str) -> None:
    found = try_hook(hook, parameter)
    if found == "not linear":
        raise UnsupportedError(
            f"{name} has a hook by register_hook that is not linear, as one that clamps or normalises; with several "
            "data-parallel ranks it is given the gradient of one rank's samples alone",
            cure=_AFTER,
        )
    if found == "returns nothing":
        raise UnsupportedError(
            f"{name} has a hook by register_hook that returns nothing; with several data-parallel ranks what it looks "
            "at is the gradient of one rank's samples alone",
            cure=_AFTER,
        )


_AFTER = (
    "Call accelerator.clip_grad_norm_ or clip_grad_value_ after accelerator.backward(loss), of which the first returns "
    "the norm of all gradients; or use distributed_type: ddp, where a hook is given the gradient of all ranks."
)


def refuse_accumulated(module: nn.Module) -> None:
    """From now on refuse hooks that run when a gradient is accumulated, which is before it is reduced over ranks."""
    for name, parameter in module.named_parameters():

        def refused(*_: Any, name: str = name) -> Any:
            raise _refused(name)

        parameter.register_post_accumulate_grad_hook = refused  # type: ignore[method-assign]
        pickle_as_made(parameter, {"register_post_accumulate_grad_hook"})


@contextmanager
def put_off(
    parameters: Iterable[nn.Parameter], factor: float, added_up: Collection[Tensor], absent: Iterable[Elsewhere]
) -> Iterator[None]:
    """Backwards of micro-batches run in here; afterwards each hook is called once, with what they added together.

    Args:
        parameters: this rank's.
        factor: by which their gradients are larger than those of the script's loss.
        added_up: those that several stages hold, of which each has its share of the gradient, with hooks or without.
        absent: those of other stages, whose hooks are called with what refuses to be read.
    """
    waiting = _take(parameters, {id(one) for one in added_up})
    try:
        yield
    except BaseException:
        for one, several, grad in waiting:
            _set(several)
            one.grad = grad
        raise
    for _, several, _ in waiting:
        _set(several)
    with torch.no_grad(), unaware():
        for one, ((_, before), (_, after)), grad in waiting:
            added = one.grad if one.grad is None or not before else _changed(one.grad, before.values(), factor)
            one.grad = grad if added is None else added if grad is None else grad + added
            if added is not None:
                for hook in after.values():
                    hook(one)
        for foreign in absent:
            foreign.call_hooks()


Hooks = list[tuple[Any, dict[Any, Any]]]
"""Torch's dictionary of hooks, and what was in it."""


def _take(parameters: Iterable[nn.Parameter], anyway: Collection[int]) -> list[tuple[nn.Parameter, Hooks, Any]]:
    """Take hooks and gradients off those that have hooks, and off those of some identities."""
    waiting: list[tuple[nn.Parameter, Hooks, Any]] = []
    for one in parameters:
        # Torch has no public way to list them.
        before, after = one._backward_hooks, one._post_accumulate_grad_hooks  # noqa: SLF001
        several = [(hooks, _of_script(hooks)) for hooks in (before, after)]
        if any(called for _, called in several) or id(one) in anyway:
            waiting.append((one, several, one.grad))
            for hooks, called in several:
                if hooks is not None:
                    for key in called:
                        del hooks[key]
            one.grad = None
    return waiting


def _of_script(hooks: dict[Any, Any] | None) -> dict[Any, Any]:
    return {key: hook for key, hook in (hooks or {}).items() if not _is_ours(hook)}


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("drivetrain_megatron.") and not hasattr(hook, "of_script")


def _changed(added: Tensor, hooks: Iterable[Callable[[Tensor], Any]], factor: float) -> Tensor:
    added = added / factor
    for hook in hooks:
        changed = hook(added)
        added = added if changed is None else changed
    return added * factor


def _set(several: Hooks) -> None:
    for hooks, called in several:
        if called:
            hooks.update(called)
