"""Optimizers that DeepSpeed compiles when they are first made: is there a compiler, and no broken build in the way?"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.api import BackendBlockedError

_OPS = {"adam": "fused_adam", "adamw": "fused_adam", "lamb": "fused_lamb", "lion": "fused_lion"}
_OFFLOADED = {"adam": "cpu_adam", "adamw": "cpu_adam", "lion": "cpu_lion", "adagrad": "cpu_adagrad"}
_STALE_SECONDS = 900
"""Builds were seen to take 50 to 75 s on a loaded machine of two cores."""


def check(kind: str, config: Mapping[str, Any]) -> None:
    """Raise :class:`BackendBlockedError` when making this optimizer would fail or hang.

    Args:
        kind: ``optimizer.type`` of the dictionary.
        config: the dictionary.
    """
    op = _op(kind, config)
    if op is None:
        return
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise BackendBlockedError(
            f"DeepSpeed compiles its optimizer {kind} ({op}) when it is first made, and there is no C++ compiler "
            f"({compiler}) on PATH",
            whose="section `deepspeed:`",
            cure="Install one (apt install g++), or write `torch_adam: true` beside its `lr` for torch's Adam, or "
            "prepare an optimizer of torch in the script.",
        )
    for lock in _locks(op):
        if time.time() - lock.stat().st_mtime > _STALE_SECONDS:
            raise BackendBlockedError(
                f"a build of {op} that was broken off has left {lock}, for which every later one would wait for ever",
                whose="section `deepspeed:`",
                cure=f"Remove it: rm {lock}",
            )


def _op(kind: str, config: Mapping[str, Any]) -> str | None:
    params = config["optimizer"].get("params", {})
    if params.get("torch_adam"):
        return None
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {}) or {}
    table = _OFFLOADED if offload.get("device", "none") != "none" else _OPS
    return table.get(kind.lower())


def _locks(op: str) -> list[Path]:
    """Where torch marks a build in progress."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_extensions"
    return [*folder.glob(f"{op}/lock"), *folder.glob(f"*/{op}/lock")]
