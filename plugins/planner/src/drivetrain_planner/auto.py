"""Resolves ``distributed_type: auto``: chooses a layout once, and stores the choice."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from drivetrain.api import UsageError
from drivetrain.api.programs import ResolvedConfig

MODEL_CURE = "Write plan: {model: train.py:make_model, batch: train.py:batch}."

_MARK = "# chosen for "


def chosen(resolved: ResolvedConfig) -> Mapping[str, Any]:
    """Return the keys of a chosen layout: of the file that an earlier launch wrote, else chosen now and written there.

    Raises:
        UsageError: ``plan:`` says too little, no layout fits, or the file was chosen for something else.
    """
    plan = resolved.config.plan
    if plan.model is None:
        raise UsageError(
            "distributed_type: auto does not know the model",
            cure=MODEL_CURE,
        )
    path = Path(plan.file)
    told = _told(resolved)
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if (before := _told_by(text)) != told:
            raise UsageError(
                f"{path} was chosen for another model, batch or machine than the configuration describes now"
                f"{_differences(before, told)}",
                cure=f"Remove it to choose again, train with it (--config {path}), or give this configuration a file "
                "of its own: plan: {file: other.auto.yaml}.",
            )
        sys.stderr.write(f"distributed_type: auto is {path}, which an earlier launch has chosen.\n")
        return _read(path, text)
    from drivetrain_planner.choosing import settings_of
    from drivetrain_planner.report import lines

    found = _choose(resolved)
    best = found.best
    settings = settings_of(best, found.request)
    text = f"{_MARK}{json.dumps(told, sort_keys=True)}\n{yaml.safe_dump(settings, sort_keys=False)}"
    path.write_text(text, encoding="utf-8")
    sys.stderr.write("\n".join((*lines(found), f"distributed_type: auto is {path}; keep it, or remove it.", "")))
    return settings


def _choose(resolved: ResolvedConfig) -> Any:
    from drivetrain_planner.choosing import check_mesh, choose
    from drivetrain_planner.requests import asked_by, machine_of, request

    check_mesh(resolved.config.mesh.sizes())
    processes = resolved.config.num_processes
    machine = machine_of(resolved, processes)
    return choose(request(asked_by(resolved, processes or machine.devices), machine), machine)


def _told(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return everything that a choice depends on, except the code of the model, by key."""
    config = resolved.config
    told = {f"plan.{key}": value for key, value in config.plan.model_dump(mode="json").items()}
    told |= {key: getattr(config, key) for key in ("num_processes", "mixed_precision", "use_cpu")}
    return json.loads(json.dumps(told | resolved.sections))  # type: ignore[no-any-return]


def _told_by(text: str) -> dict[str, Any]:
    """Return what a file says that it was chosen for; empty where its first line does not say it any more."""
    line = text.partition("\n")[0]
    try:
        return dict(json.loads(line.removeprefix(_MARK)))
    except (TypeError, ValueError):
        return {}


def _differences(before: dict[str, Any], told: dict[str, Any]) -> str:
    keys = [key for key in {**before, **told} if before.get(key) != told.get(key)] if before else []
    words = [f"{key} is {json.dumps(told.get(key))}, and was {json.dumps(before.get(key))}" for key in keys]
    return f" ({'; '.join(words)})" if words else ""


def _read(path: Path, text: str) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise UsageError(f"{path} cannot be read: {problem}", cure="Remove it to choose again.") from problem
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise UsageError(f"{path} names no distributed_type", cure="Remove it to choose again.")
    return values
