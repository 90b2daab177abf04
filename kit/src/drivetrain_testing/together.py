"""Several cases in one group of ranks, one after the other: what it spares is starting ranks for each of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from drivetrain_testing.kit import Kit, function_of, run_in_rank
from drivetrain_testing.processes import RankFailedError, spawn


def passed_together(kits: Mapping[str, Kit], world_size: int, folder: Path) -> frozenset[str]:
    """Run these cases in turn; the names of those that passed on every rank.

    Each case has accelerators and a process group of its own and must leave the process as it found it. The first
    failure ends the group, since its other ranks may be waiting for the one that failed; the cases that come after it
    have not passed then. Nothing is said about a failure: it is to be repeated on ranks of its own, for a clean report.

    Args:
        kits: a kit for each case, with a folder of its own.
        world_size: number of ranks.
        folder: an empty folder that all ranks see.
    """
    with contextlib.suppress(RankFailedError):  # Told by the same case on fresh ranks, whose word counts.
        timeout = sum(kit.timeout for kit in kits.values()) / 20 + 30
        spawn(_in_turn, world_size, dict(kits), str(folder), timeout=timeout)
    return frozenset.intersection(*(_passed(folder / f"passed-{rank}") for rank in range(world_size)))


def _passed(told: Path) -> frozenset[str]:
    return frozenset(told.read_text(encoding="utf-8").split() if told.exists() else ())


def _in_turn(kits: Mapping[str, Kit], folder: str) -> None:
    with (Path(folder) / f"passed-{os.environ['RANK']}").open("w", buffering=1, encoding="utf-8") as passed:
        for name, kit in kits.items():
            run_in_rank(function_of(name), kit)
            passed.write(f"{name}\n")
