"""Deterministic mode of trial forwards: random numbers do not depend on the number of rows."""

from __future__ import annotations

import random
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_numpy = np.random


@final
class Steady(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Disables dropout; other random functions return the same number for every element.

    A permutation stays one that moves every element, and sorting equal numbers does not keep their order: a model that
    mixes samples at random (mixup, shuffled negatives) still mixes them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket
        if name is _aten.sort:
            return _sorted(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name is _aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
        if "dropout_p" in names:
            return func(*_with(args, names, "dropout_p", 0.0), **{k: v for k, v in kwargs.items() if k != "dropout_p"})
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor):
            return made
        if name is _aten.randperm:
            return made.copy_(torch.arange(1, len(made) + 1, device=made.device) % max(len(made), 1))
        if name in {_aten.bernoulli, _aten.bernoulli_}:
            return made.fill_(1)
        if name in {_aten.randint, _aten.randint_like, _aten.random, _aten.random_}:
            return made.fill_(made.new_full((), _lowest(args, kwargs, names)))
        if name is _aten.multinomial:
            return made.copy_(args[0].topk(made.shape[-1]).indices) if made.shape[-1] <= args[0].shape[-1] else made
        if made.is_floating_point():
            return made.fill_(0.5)
        return made


def _with(args: Any, names: list[str], name: str, value: Any) -> Any:
    place = names.index(name)
    return tuple(value if index == place else one for index, one in enumerate(args))


def _lowest(args: Any, kwargs: Any, names: list[str]) -> int:
    for name in ("low", "from"):
        if name in kwargs:
            return int(kwargs[name] or 0)
        if name in names and names.index(name) < len(args):
            return int(args[names.index(name)] or 0)
    return 0


def _sorted(func: Any, args: Any, kwargs: Any) -> Any:
    """Equal numbers in the opposite of their order, which is as good an order as theirs."""
    values = args[0]
    if not values.dim() or not values.numel():
        return func(*args, **kwargs)
    rest = list(args[1:])
    names = [argument.name for argument in func._schema.arguments][1:]  # noqa: SLF001
    given = {**dict(zip(names, rest, strict=False)), **kwargs}
    dim, descending = given.get("dim", -1), given.get("descending", False)
    ordered, indices = _aten.sort.stable(values.flip(dim), stable=True, dim=dim, descending=descending)
    return ordered, values.shape[dim] - 1 - indices


def start() -> None:
    """Reset every generator; call it inside of :func:`~drivetrain_megatron.module_state.same_randomness`."""
    random.seed(0)
    _numpy.seed(0)
    torch.manual_seed(0)
