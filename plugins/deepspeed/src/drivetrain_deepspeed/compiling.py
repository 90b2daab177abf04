"""Checks whether DeepSpeed's compiled optimizers can be built on this machine."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.api import BackendBlockedError

_OPS = {"adam": "fused_adam", "adamw": "fused_adam", "lamb": "fused_lamb", "lion": "fused_lion"}
_OFFLOADED = {"adam": "cpu_adam", "adamw": "cpu_adam", "lion": "cpu_lion", "adagrad": "cpu_adagrad"}
_STALE_SECONDS = 900
"""Builds were seen to take 50 to 75 s on a loaded machine of two cores."""

_WHOSE = "section `deepspeed:`"


@dataclass(frozen=True)
class _Op:
    """One of DeepSpeed's extensions.

    Args:
        name: DeepSpeed's, ``"cpu_adam"``.
        optimizer: the one that it is for.
        instead: what to write in order not to need it.
    """

    name: str
    optimizer: str
    instead: str


@contextmanager
def guard(config: Mapping[str, Any], installed: Mapping[str, Any]) -> Iterator[None]:
    """Around the making of an engine, in which DeepSpeed compiles its own optimizers.

    Args:
        config: the dictionary that DeepSpeed is given.
        installed: by name, whether an extension came compiled with DeepSpeed.

    Raises:
        BackendBlockedError: there is nothing to compile with, somebody's broken build is in the way, or this one fails.
    """
    op = _op(config)
    if op is None or installed.get(op.name):
        yield
        return
    _check(op)
    try:
        yield
    except Exception as error:
        failed = _of_builder(error)
        if failed is None:
            raise
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST")
        raise BackendBlockedError(
            f"DeepSpeed could not compile its optimizer {op.optimizer} ({op.name}): {' '.join(str(failed).split())}",
            whose=_WHOSE if architectures is None else f"{_WHOSE}, TORCH_CUDA_ARCH_LIST={architectures}",
            cure=f"See that compiler, ninja and, for CUDA, the toolkit of torch's version are there, or {op.instead}.",
        ) from error


def _of_builder(error: BaseException | None) -> BaseException | None:
    """The error of DeepSpeed's builder of extensions, or of torch's below it: this one, or one that led to it."""
    while error is not None:
        frames = traceback.walk_tb(error.__traceback__)
        if any(str(frame.f_globals.get("__name__")).startswith("deepspeed.ops.op_builder") for frame, _ in frames):
            return error
        error = error.__cause__ or error.__context__
    return None


def _op(config: Mapping[str, Any]) -> _Op | None:
    """Return the extension that this dictionary makes DeepSpeed compile, if any."""
    optimizer = config.get("optimizer", {})
    if not optimizer or optimizer.get("params", {}).get("torch_adam"):
        return None
    kind = str(optimizer["type"])
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    name = (_OPS if offload.get("device", "none") == "none" else _OFFLOADED).get(kind.lower())
    if name is None:
        return None
    # Only for Adam has DeepSpeed torch's own in the place of its own.
    is_adam = kind.lower() in ("adam", "adamw")
    torchs = "write `torch_adam: true` beside its `lr` for torch's Adam, or " if is_adam else ""
    return _Op(name, kind, f"{torchs}prepare an optimizer of torch in the script")


def _check(op: _Op) -> None:
    compiler = os.environ.get("CXX", "c++")
    for program, what in ((compiler, f"C++ compiler ({compiler})"), ("ninja", "ninja")):
        if shutil.which(program) is None:
            raise BackendBlockedError(
                f"DeepSpeed compiles its optimizer {op.optimizer} ({op.name}) when it is first made, and there is no "
                f"{what} on PATH",
                whose=_WHOSE,
                cure=f"Install one (apt install g++ ninja-build), or {op.instead}.",
            )
    for lock in _locks(op.name):
        if _age(lock) > _STALE_SECONDS:
            raise BackendBlockedError(
                f"a build of {op.name} that was broken off has left {lock}, for which every later one would wait for "
                "ever",
                whose=_WHOSE,
                cure=f"Remove it: rm {lock}",
            )


def _locks(op: str) -> list[Path]:
    """Return the lock files with which torch marks a build in progress."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_extensions"
    return [*folder.glob(f"{op}/lock"), *folder.glob(f"*/{op}/lock")]


def _age(path: Path) -> float:
    """Seconds since a file was written; 0 where it has just gone, with the build that made it."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
