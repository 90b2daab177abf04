"""Reads and guards the parameter groups of ``fully_shard``: what it gathers for a forward and its backward.

torch documents none of these attributes. Some are read with a default, since they come into being with the first
forward: another name would leave gradients where ``zero_grad`` should drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from drivetrain.api import UnsupportedError
from drivetrain_sharding import private_names
from drivetrain_sharding.plain_data import keep_memory

_WHOLE = ("_unsharded_param", "_sharded_post_forward_param")


def parameter_groups(modules: Iterable[FSDPModule], user: str) -> list[Any]:
    """List the groups of these units: the parameters of each that are in none of its inner ones. Not collective.

    Args:
        modules: sharded by ``fully_shard``.
        user: the distribution of the engine, for the error.

    Raises:
        BackendBlockedError: the installed torch keeps them elsewhere, or lacks an attribute of theirs.
    """
    found = [group for module in modules for group in private_names.groups_of(module, user)]
    for group in found:
        private_names.check_group(group, user)
    return found


def keep_class_name(module: nn.Module) -> None:
    """Restore the class name ``Net`` of a unit, which ``fully_shard`` changes to ``FSDPNet``. Not collective."""
    made = type(module)
    original = made.__mro__[2]
    made.__name__, made.__qualname__, made.__module__ = original.__name__, original.__qualname__, original.__module__


def gathered(group: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the gathered parameters of a unit that a forward has used, with their names. Not collective."""
    for one in group.fsdp_params:
        whole = getattr(one, "_unsharded_param", None)
        if whole is not None:
            yield one._param_fqn, whole  # noqa: SLF001


def is_own(groups: Iterable[Any], parent: nn.Module, name: str, value: Any) -> bool:
    """Whether this parameter is FSDP's own: a shard, or the gathered parameter of one forward. Not collective."""
    for group in groups:
        for one in group.fsdp_params:
            info = one._module_info  # noqa: SLF001
            places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            if any(module is parent and its == name for module, its in places):
                mine = (one.sharded_param, *(getattr(one, each, None) for each in _WHOLE))
                return any(value is each for each in mine)
    return False


def refuse_other_values(groups: Iterable[Any], engine: str) -> None:
    """Raise in a forward of a unit that was given other tensors than its parameters. Not collective.

    FSDP puts gathered parameters in their places, and would compute with those.

    Args:
        groups: see :func:`parameter_groups`.
        engine: what gathers parameters, for the message.
    """
    for group in groups:
        group.pre_forward = partial(_pre_forward, group, group.pre_forward, engine)


def _pre_forward(group: Any, plain: Callable[..., Any], engine: str, *args: Any) -> Any:
    for one in group.fsdp_params:
        info = one._module_info  # noqa: SLF001
        found = info.module._parameters.get(info.param_name)  # noqa: SLF001
        if found is None:
            raise UnsupportedError(
                f"the parameter {info.param_name} of {type(info.module).__name__} was taken out of it after prepare "
                f"(parametrizations and pruning do that), and {engine} would gather and save it still",
                cure="Prune and parametrize a model before accelerator.prepare(model, optimizer).",
            )
        if found is not one.sharded_param and all(found is not getattr(one, each, None) for each in _WHOLE):
            raise UnsupportedError(
                f"{type(info.module).__name__} was called with another tensor as its {info.param_name} "
                f"(torch.func.functional_call), and {engine} would compute with its own",
                cure="Compute with other values in a second model that is not prepared, or use distributed_type: ddp.",
            )
    return plain(*args)


def hear_of_backwards(groups: Iterable[Any], engine: str, reached: Callable[[Any], None] | None = None) -> None:
    """Refuse second derivatives, and call ``reached`` before each backward reaches a unit. Not collective.

    Args:
        groups: see :func:`parameter_groups`.
        engine: what gathers parameters, for the message.
        reached: is given the group; also in a backward that the script began.
    """
    for group in groups:
        heard = None if reached is None else partial(reached, group)
        group.pre_backward = partial(_pre_backward, group.pre_backward, engine, heard)


def _pre_backward(plain: Callable[..., None], engine: str, heard: Callable[[], None] | None, *args: Any) -> None:
    # In a backward, gradients are enabled under create_graph=True alone.
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"{engine} cannot differentiate a gradient (create_graph=True, as a gradient penalty does): the parameters "
            "that it gathers for the first backward are freed before the second",
            cure="Use distributed_type: ddp for this model, or a loss without second derivatives.",
        )
    if heard is not None:
        heard()
    plain(*args)


def keep_gathered_memory(groups: Iterable[Any], user: str, check: Callable[[Tensor], None] | None = None) -> None:
    """Refuse other memory (``p.data = ...``) for gathered parameters. Not collective.

    Args:
        groups: see :func:`parameter_groups`.
        user: the distribution of the engine, for the error where a parameter has no gathered one.
        check: is given each parameter that was gathered for the first time; raises where a script may not use it.
    """
    for group in groups:
        for one in group.fsdp_params:
            one.init_unsharded_param = partial(_init_unsharded, one, one.init_unsharded_param, user, check)


def _init_unsharded(one: Any, init: Callable[[], None], user: str, check: Callable[[Tensor], None] | None) -> None:
    init()
    # It is created once; where an extension creates it each time, the first only is checked.
    del one.init_unsharded_param
    private_names.check_gathered(one, user)
    whole = one._unsharded_param  # noqa: SLF001
    # What a script has set on the parameter, for a forward that reads it.
    shard = one.sharded_param
    vars(whole).update({name: its for name, its in vars(shard).items() if not hasattr(type(shard), name)})
    if check is not None:
        check(whole)
    # torch may leave parameters without a name.
    name = f"parameter {one._param_fqn}" if one._param_fqn else "a parameter"  # noqa: SLF001
    keep_memory(whole, f"{name}, which is gathered for a forward and its backward,")


def sharded_parameters(groups: Iterable[Any]) -> Iterator[nn.Parameter]:
    """Yield the parameters of these groups, which are shards. Not collective."""
    return (one.sharded_param for group in groups for one in group.fsdp_params)


def convert_gradients(groups: Iterable[Any], convert: Callable[[Any], Any]) -> None:
    """Convert each gradient that FSDP makes. Not collective.

    Args:
        groups: see :func:`parameter_groups`.
        convert: is given a ``DTensor``, and returns it as a subclass.
    """
    for group in groups:
        for one in group.fsdp_params:
            one.to_sharded_dtensor = partial(_converted, one.to_sharded_dtensor, convert)


def _converted(make: Callable[[Tensor], Any], convert: Callable[[Any], Any], local: Tensor) -> Any:
    return convert(make(local))
