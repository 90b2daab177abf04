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
    digest = _digest(resolved)
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if not text.startswith(_MARK + digest):
            raise UsageError(
                f"{path} was chosen for another model, batch or machine than the configuration describes now",
                cure=f"Remove it to choose again, or train with it: --config {path}.",
            )
        sys.stderr.write(f"distributed_type: auto is {path}, which an earlier launch has chosen.\n")
        return _read(path, text)
    from drivetrain_planner.choosing import settings_of
    from drivetrain_planner.report import lines

    found = _choose(resolved)
    best = found.best
    settings = settings_of(best, found.request)
    path.write_text(f"{_MARK}{digest}\n{yaml.safe_dump(settings, sort_keys=False)}", encoding="utf-8")
    sys.stderr.write("\n".join((*lines(found), f"distributed_type: auto is {path}; keep it, or remove it.", "")))
    return settings


def _choose(resolved: ResolvedConfig) -> Any:
    from drivetrain_planner.choosing import check_mesh, choose
    from drivetrain_planner.requests import asked_by, machine_of, request

    check_mesh(resolved.config.mesh.sizes())
    processes = resolved.config.num_processes
    machine = machine_of(resolved, processes)
    return choose(request(asked_by(resolved, processes or machine.devices), machine), machine)


def _digest(resolved: ResolvedConfig) -> str:
    """Return a digest of everything that a choice depends on, except the code of the model."""
    config = resolved.config
    told = [config.plan.model_dump(mode="json"), config.num_processes, config.mixed_precision, config.use_cpu]
    return hashlib.sha256(json.dumps([told, resolved.sections], sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path, text: str) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise UsageError(f"{path} cannot be read: {problem}", cure="Remove it to choose again.") from problem
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise UsageError(f"{path} names no distributed_type", cure="Remove it to choose again.")
    return values
