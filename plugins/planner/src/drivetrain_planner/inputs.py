"""What is planned for, by name: the user's model and batch, or a Transformers configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from drivetrain.api import UsageError
from drivetrain_planner.naming import named
from drivetrain_planner.tracing import Example


def build(where: str) -> nn.Module:
    """Make a model without its memory.

    Args:
        where: ``package.module:function``, ``file.py:function``, or a Transformers ``config.json`` or its folder, which
            is made as a causal language model.

    Raises:
        UsageError: there is no such thing, or it does not return a module.
    """
    if is_transformers(where):
        return _transformers(where)
    function = named(where, "model")
    with torch.device("meta"):
        model = function()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{where!r} returned a {type(model).__name__}, not a model", cure="Name a function that returns a module."
        )
    return model


def is_transformers(where: str) -> bool:
    """Whether this is a ``config.json`` of Transformers, or a folder with one."""
    path = Path(where)
    return (path.is_file() and path.suffix == ".json") or (path / "config.json").is_file()


def _transformers(where: str) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as problem:
        what = f"{where} is a configuration of Transformers, which is not installed"
        raise UsageError(what, cure="Run: pip install transformers") from problem
    config = AutoConfig.from_pretrained(where)  # type: ignore[no-untyped-call,unused-ignore]
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call,unused-ignore]
    return model


def example(batch: str | None, loss: str | None, model: str, samples: int, length: int) -> Example:
    """The micro-batch that is traced.

    Args:
        batch: a function, named like the model, that returns the arguments of a forward: a mapping by name, a tuple or
            list in order, anything else alone. ``None``: token ids and labels, for a Transformers configuration.
        loss: a function of the model's output and what ``batch`` returned; ``None`` = the output's own loss.
        model: how the model was named.
        samples: sequences of token ids.
        length: of a sequence.

    Raises:
        UsageError: a function is not there, or a batch cannot be guessed.
    """
    function = None if loss is None else named(loss, "loss function")
    if batch is None:
        if not is_transformers(model):
            raise UsageError(
                "a micro-batch of the model is needed", cure="Name a function that returns one: --batch train.py:batch."
            )
        ids = torch.zeros(samples, length, dtype=torch.long)
        tokens = {"input_ids": ids, "labels": ids.clone()}
        return Example((), tokens, tokens, function)
    found = named(batch, "batch")()
    if isinstance(found, Mapping):
        return Example((), dict(found), found, function)
    return Example(tuple(found) if isinstance(found, tuple | list) else (found,), {}, found, function)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size(text: str) -> int:
    """Bytes, written as ``80GB``, ``24GiB`` or a plain number. Raises :class:`UsageError` for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if found is None:
        raise UsageError(f"{text!r} is no size", cure="Write 80GB, 24GiB, or bytes.")
    return round(float(found[1]) * _UNITS[found[2] or ""])
