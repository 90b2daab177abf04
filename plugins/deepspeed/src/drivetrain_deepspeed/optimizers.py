"""Resolves the optimizer of a DeepSpeed file against the one that the script prepares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.api import UsageError
from drivetrain.api.accelerate import DummyOptim
from drivetrain_deepspeed.config import show
from drivetrain_deepspeed.written import Written

_IMPLEMENTATION = frozenset({"torch_adam", "adam_w_mode", "fused", "foreach"})
"""Parameters that select an implementation; the script's optimizer has its own."""

_ALWAYS = {"bias_correction": True}
"""Behaviour of torch's optimizers that has no parameter."""

_OWN = frozenset({"fusedadam", "deepspeedcpuadam"})


@dataclass(frozen=True)
class ScriptOptimizer:
    """The optimizer that the script prepares.

    Args:
        kind: its class's name.
        placeholder: it is a ``DummyOptim``.
        given: hyper-parameters that a placeholder was given.
        defaults: hyper-parameters of its constructor.
        groups: those of its parameter groups.
    """

    kind: str
    placeholder: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()

    def values(self, key: str) -> list[Any]:
        """Return its values of one hyper-parameter: the default, and those of its groups before any schedule."""
        if key in _ALWAYS and key not in self.defaults:
            return [_ALWAYS[key]]
        found = [self.defaults[key]] if key in self.defaults else []
        return found + [group.get(f"initial_{key}", group[key]) for group in self.groups if key in group]


def describe(optimizer: Any) -> ScriptOptimizer:
    """Describe a torch optimizer or a ``DummyOptim``."""
    groups = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
    kind = type(optimizer).__name__
    placeholder = isinstance(optimizer, DummyOptim)
    return ScriptOptimizer(kind, placeholder, optimizer.given if placeholder else {}, optimizer.defaults, groups)


def engine_optimizer(written: Written, script: ScriptOptimizer, device: str = "") -> dict[str, Any] | None:
    """Type and parameters of the optimizer that the engine makes; ``None`` when the script's own steps.

    A script's own optimizer and a file that names one agree when they are of one kind and every number that the file
    writes is the script's; ``"auto"`` agrees with everything.

    Args:
        written: the section.
        script: what the script prepares.
        device: device type of the run.

    Raises:
        UsageError: they do not agree, or there is a placeholder and nothing to put in its place.
    """
    section = written.values.get("optimizer")
    if not isinstance(section, Mapping) or "type" not in section:
        if script.placeholder:
            raise UsageError(
                "DummyOptim stands for the optimizer that DeepSpeed's file names, and none is named",
                cure="Write one (`optimizer` with `type` and `params`), or pass e.g. torch.optim.AdamW(...).",
            )
        return None
    kind, params = str(section["type"]), dict(section.get("params") or {})
    if script.placeholder:
        filled = _filled(written, params, script)
        if device == "cpu" and kind.lower() in ("adam", "adamw"):
            # Compiling DeepSpeed's own takes a minute, and its results are the same numbers.
            filled.setdefault("torch_adam", True)
        return {**section, "type": kind, "params": filled}
    wrong = [] if _is_kind(kind, params, script) else [f"it is a {script.kind} in the script"]
    for key, value in params.items():
        theirs = script.values(key)
        if key not in _IMPLEMENTATION and value != "auto" and not any(_equal(value, each) for each in theirs):
            said = " or ".join(dict.fromkeys(show(each) for each in theirs)) or "no such parameter"
            wrong.append(f"params.{key}: {show(value)} ({written.where(('optimizer', 'params', key))}) is {said} there")
    if wrong:
        raise UsageError(
            f"optimizer.type: {show(kind)} ({written.where(('optimizer', 'type'))}), but {'; '.join(wrong)}",
            cure="Remove `optimizer` from the file to use the script's, or prepare drivetrain.utils.DummyOptim in the "
            "script to use the file's.",
        )
    return None


def _filled(written: Written, params: dict[str, Any], script: ScriptOptimizer) -> dict[str, Any]:
    """The file's parameters with ``"auto"`` replaced by the placeholder's, or left to the optimizer's own default."""
    result: dict[str, Any] = {}
    for key, value in params.items():
        if value != "auto":
            if key in script.given and not _equal(value, script.given[key]):
                where = written.where(("optimizer", "params", key))
                raise UsageError(
                    f"the file says optimizer.params.{key}: {show(value)} ({where}), but the script has "
                    f"DummyOptim(..., {key}={show(script.given[key])})",
                    cure=f'Make them equal, or write "auto" for {key}.',
                )
            result[key] = value
        elif key in script.given or key in ("lr", "weight_decay"):
            result[key] = script.given.get(key, script.defaults[key])
    for key, value in script.given.items():
        result.setdefault(key, value)
    return result


def _is_kind(kind: str, params: Mapping[str, Any], script: ScriptOptimizer) -> bool:
    mine, theirs = script.kind.lower(), kind.lower().replace("_", "")
    if theirs not in ("adam", "adamw"):
        return mine == theirs
    if mine in _OWN:
        return True
    # DeepSpeed's Adam decouples weight decay by default, as AdamW does.
    decoupled = theirs == "adamw" or bool(params.get("adam_w_mode", True))
    without_decay = not any(script.values("weight_decay"))
    return mine == ("adamw" if decoupled else "adam") or (mine in ("adam", "adamw") and without_decay)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return list(one) == list(other)
    return bool(one == other)
