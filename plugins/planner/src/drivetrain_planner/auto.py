"""Resolves ``distributed_type: auto``: chooses a layout once, and stores the choice."""

from __future__ import annotations

import hashlib
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
_TOLD = "# which is of "


def chosen(resolved: ResolvedConfig) -> Mapping[str, Any]:
    """The keys of a chosen layout: of the file that an earlier launch wrote, else chosen now and written there.

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
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if not text.startswith(_MARK + digest):
            raise UsageError(
                f"{path} was chosen for another model, batch or machine than the configuration describes now"
                f"{_differences(text, told)}",
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
    head = f"{_MARK}{digest}\n{_TOLD}{json.dumps(told, sort_keys=True)}\n"
    path.write_text(head + yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
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


def _differences(text: str, told: dict[str, Any]) -> str:
    """Return which keys differ from those that stand in a file; empty where it is of an older release or was edited."""
    line = next((line for line in text.splitlines() if line.startswith(_TOLD)), "")
    try:
        before = json.loads(line.removeprefix(_TOLD) or "{}")
    except ValueError:
        return ""
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
