"""Loads the model of a plan by name: the user's model and batch, or a Transformers configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.api import UsageError
from drivetrain_planner.naming import called, named, told
from drivetrain_planner.tracing import Example


def build(where: str) -> nn.Module:
    """Make a model without its memory.

    Args:
        where: ``package.module:function``, ``file.py:function``; or a Transformers ``config.json``, its folder, or its
            name on the hub (``Qwen/Qwen3-0.6B``), which is made as a causal language model.

    Raises:
        UsageError: there is no such thing, it fails, or it does not return a module.
    """
    if is_transformers(where):
        return _transformers(where)
    if ":" not in where:
        raise UsageError(f"{where!r} {_lack(Path(where))}", cure=_NAMES)
    function = named(where, "model")
    with torch.device("meta"):
        model = called(function, where, _ON_META)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{where!r} returned a {type(model).__name__}, not a model", cure="Name a function that returns a module."
        )
    return model


_NAMES = (
    "Write package.module:function or train.py:function, or name a config.json of Transformers, its folder, or a model "
    "of the hub, such as Qwen/Qwen3-0.6B."
)

_ON_META = (
    "It is called without arguments, and its tensors are on the device meta, without values: give arguments defaults, "
    "and let it load no weights, read no values and name no other device."
)


def _lack(path: Path) -> str:
    """Return what is wrong with a model that is named without a function."""
    if path.is_dir():
        return "has no config.json"
    return "is no file" if path.suffix in (".json", ".py") and not path.is_file() else "names no model"


def is_transformers(where: str) -> bool:
    """Whether this is a ``config.json`` of Transformers, a folder with one, or looks like a name on the hub."""
    path = Path(where)
    if path.is_dir() or path.is_file():
        return (path.is_file() and path.suffix == ".json") or (path / "config.json").is_file()
    return re.fullmatch(r"[\w.-]+/[\w.-]+", where) is not None and path.suffix not in (".py", ".json", ".yaml", ".yml")


def _transformers(where: str) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as problem:
        what = f"{where} is a configuration of Transformers, which is not installed"
        raise UsageError(what, cure="Run: pip install transformers") from problem
    try:
        config = AutoConfig.from_pretrained(where)  # type: ignore[no-untyped-call,unused-ignore]
    except (OSError, ValueError) as problem:
        raise UsageError(
            f"Transformers cannot read a configuration of {where!r}: {told(problem)}",
            cure="Name a config.json that is here, or correct the name; one of the hub needs the network once.",
        ) from problem

    def made() -> Any:
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call,unused-ignore]

    cure = "It is made as a causal language model. Write a function that returns yours: train.py:make."
    with torch.device("meta"):
        model: nn.Module = called(made, where, cure)
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
    cure = "It is called without arguments; give each a default."
    found = called(named(batch, "batch"), batch, cure)
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
