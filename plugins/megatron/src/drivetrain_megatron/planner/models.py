"""Imports functions named on the command line, which return a model or the arguments of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from drivetrain.api import UsageError
from drivetrain_planner import called, named

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_ON_META = (
    "It is called without arguments, and its tensors are on the device meta, without values: give arguments defaults, "
    "and let it load no weights, read no values and name no other device."
)


def build(where: str) -> nn.Module:
    """Make a model without its memory.

    Args:
        where: ``package.module:function`` or ``file.py:function``; a class without arguments is a function, too.

    Raises:
        UsageError: there is no such thing, or it does not return a module.
    """
    function = named(where, "model")
    with torch.device("meta"):
        model = called(function, where, _ON_META)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{where!r} returned a {type(model).__name__}, not a model", cure="Name a function that returns a module."
        )
    return model


def batch(where: str) -> Arguments:
    """The arguments of a forward: a dict is given by name, a tuple or list in its order, anything else alone.

    Raises:
        UsageError: there is no such function.
    """
    found = called(named(where, "batch"), where, "It is called without arguments; give each a default.")
    if isinstance(found, Mapping):
        return (), dict(found)
    return (tuple(found) if isinstance(found, (tuple, list)) else (found,)), {}
