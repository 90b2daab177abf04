"""Builds the learning-rate schedule of a DeepSpeed file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.api import UsageError
from drivetrain.api.accelerate import DummyScheduler
from drivetrain_deepspeed.config import show
from drivetrain_deepspeed.written import Written

_WARMUP = "WarmupLR"


def refuse_two(written: Written, kind: str) -> None:
    """Raise :class:`UsageError` when the file names a schedule and the script prepares a scheduler of its own."""
    if names_one(written):
        section = written.values["scheduler"]
        raise UsageError(
            f"scheduler.type: {show(section['type'])} ({written.where(('scheduler', 'type'))}), but the script has "
            f"prepared a {kind}",
            cure="Remove `scheduler` from the file to use the script's, or prepare drivetrain.utils.DummyScheduler in "
            "the script to use the file's.",
        )


def plan(
    written: Written,
    rates: Sequence[float],
    *,
    total_num_steps: int | None = None,
    warmup_num_steps: int | None = None,
    further: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]] | None:
    """Type and parameters of the file's schedule with ``"auto"`` filled in; ``None`` when the file names none.

    Args:
        written: the section.
        rates: learning rate of each parameter group.
        total_num_steps: optimizer updates in the run, if the script sets it.
        warmup_num_steps: the same of the warm-up.
        further: what else the script gives for parameters left open.

    Raises:
        UsageError: ``"auto"`` without a value, or a number that contradicts the script.
    """
    if not names_one(written):
        return None
    section = written.values["scheduler"]
    facts = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": max(rates, default=None),
        "total_num_steps": total_num_steps,
        "warmup_num_steps": warmup_num_steps,
        **(further or {}),
    }
    params: dict[str, Any] = {}
    for key, value in dict(section.get("params") or {}).items():
        where = written.where(("scheduler", "params", key))
        if value == "auto":
            params[key] = facts.get(key)
            if key == "warmup_num_steps" and section["type"] == _WARMUP:
                # Without a warm-up this schedule is constant, which needs no number.
                params[key] = params[key] or 0
            elif params[key] is None or (key == "warmup_num_steps" and params[key] < 1):
                raise UsageError(
                    f'scheduler.params.{key}: "auto" ({where}) has nothing to be filled in from',
                    cure=f"Prepare drivetrain.utils.DummyScheduler(optimizer, {key}=...) with a number of at least 1, "
                    "or write the number into the file.",
                )
            continue
        said = {"total_num_steps": total_num_steps, "warmup_num_steps": warmup_num_steps or None}.get(key)
        if said is not None and said != value:
            raise UsageError(
                f"the file says scheduler.params.{key}: {show(value)} ({where}), but the script has "
                f"DummyScheduler(..., {key}={said})",
                cure=f'Make them equal, or write "auto" for {key}.',
            )
        params[key] = value
    return str(section["type"]), params


def of_placeholder(written: Written, placeholder: DummyScheduler, optimizer: Any) -> Any:
    """The file's scheduler in the place of a ``DummyScheduler``, on the optimizer that really steps."""
    planned = plan(
        written,
        [group["lr"] for group in optimizer.param_groups],
        total_num_steps=placeholder.total_num_steps,
        warmup_num_steps=placeholder.warmup_num_steps,
        further=placeholder.kwargs,
    )
    assert planned is not None
    return make(*planned, optimizer)


def make(kind: str, params: Mapping[str, Any], optimizer: Any) -> Any:
    """DeepSpeed's scheduler of this name, else torch's, on the optimizer that really steps.

    Raises:
        UsageError: neither DeepSpeed nor torch has a scheduler of this name, or it refuses the parameters.
    """
    if kind == _WARMUP and params.get("warmup_num_steps") == 0:
        return _constant(optimizer, params.get("warmup_max_lr"))
    for module in ("deepspeed.runtime.lr_schedules", "torch.optim.lr_scheduler"):
        found = vars(importlib.import_module(module)).get(kind)
        if isinstance(found, type):
            try:
                return found(optimizer, **params)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"the scheduler {kind} cannot be made of the file's parameters: {error}",
                    cure="Correct `scheduler: params:` of DeepSpeed's file.",
                ) from error
    raise UsageError(
        f"neither DeepSpeed nor torch has a scheduler {kind!r}",
        cure="Write one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest.",
    )


def _constant(optimizer: Any, rate: float | None) -> Any:
    """DeepSpeed's ``WarmupLR`` without a warm-up, which it refuses itself."""
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = rate
    return importlib.import_module("torch.optim.lr_scheduler").ConstantLR(optimizer, factor=1.0)


def names_one(written: Written) -> bool:
    """Whether the file names a schedule."""
    section = written.values.get("scheduler")
    return isinstance(section, Mapping) and "type" in section
