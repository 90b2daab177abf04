"""Reads and writes reports of conformance runs, and formats them as tables. Imports no torch.

A report is a JSON object::

    {"format": 1, "kit": "0.1.0", "python": "3.11.9", "runs": [...]}

with one run for each conformance module, whose keys are the fields of :class:`Run`. ``format`` grows when a reader of
the one before would misread it; keys may be added without that.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.errors import UsageError

FORMAT = 1
PASSED, GAP, FAILED, SKIPPED = "passed", "gap", "failed", "skipped"
"""Outcomes of a case in one world. ``gap``: it failed, as declared with a reason."""


@dataclass
class Run:
    """Results of one conformance module.

    Args:
        name: the module's, without ``test_``.
        backend: the backend's name.
        distribution: the distribution of the backend.
        version: of the distribution; empty for a backend that is not installed.
        contract: version of the backend contract that it speaks.
        engines: versions of torch and of what the backend requires, by distribution.
        world_sizes: worlds that the cases ran on.
        device: device type; ``None`` = the best there was.
        section: the config section.
        mesh: axis sizes by world size.
        atol: largest difference from the single-process run.
        atol_reason: why it is larger than the kit's own, else empty.
        capabilities: what the backend declares, sets as sorted lists.
        cases: outcome by case and world (or journey).
        gaps: reasons of the declared gaps, by case.
        problems: why this is no conformance run although no case failed: what was left out, replaced or skipped.
        complete: every case ran; ``False`` where the command line chose some.
    """

    name: str
    backend: str
    distribution: str
    version: str
    contract: int
    engines: Mapping[str, str]
    world_sizes: Sequence[int]
    device: str | None
    section: Mapping[str, Any]
    mesh: Mapping[str, Mapping[str, int]]
    atol: float
    atol_reason: str
    capabilities: Mapping[str, Any]
    cases: dict[str, dict[str, str]] = field(default_factory=dict)
    gaps: Mapping[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    complete: bool = True

    def count(self, outcome: str) -> int:
        """Return the number of pairs of case and world with this outcome."""
        return Counter(each for worlds in self.cases.values() for each in worlds.values())[outcome]

    @property
    def verdict(self) -> str:
        """``conforms``, ``fails``, or ``partial`` where only some cases ran and all of them passed."""
        if self.problems or self.count(FAILED) or not self.cases:
            return "fails"
        return "conforms" if self.complete else "partial"

    @property
    def owner(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".strip()


def write(path: Path, kit: str, runs: Sequence[Run]) -> None:
    """Write a report.

    Args:
        path: the file; its folder is made.
        kit: version of the core that brings the kit.
        runs: one for each conformance module.
    """
    document = {
        "format": FORMAT,
        "kit": kit,
        "python": platform.python_version(),
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[str, list[Run]]:
    """Return the kit's version and the runs of a report.

    Raises:
        UsageError: the file is no report, or one of a format that is not known here.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        known = document["format"]
        if known == FORMAT:
            names = {each.name for each in dataclasses.fields(Run)}
            runs = [Run(**{name: value for name, value in run.items() if name in names}) for run in document["runs"]]
            return str(document["kit"]), runs
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no report of the conformance kit: {error}", cure="Write one: pytest --report report.json"
        ) from error
    raise UsageError(
        f"{path} has format {known}, this kit reads {FORMAT}", cure="Run: pip install --upgrade drivetrain"
    )


def summary(runs: Sequence[Run]) -> str:
    """Return what came out in a few words: ``conforms (214 passed, 2 gaps)``."""
    passed, gaps, failed = (sum(run.count(outcome) for run in runs) for outcome in (PASSED, GAP, FAILED))
    verdicts = {run.verdict for run in runs}
    verdict = next((each for each in ("fails", "partial") if each in verdicts), "conforms")
    words = [f"{passed} passed"] + [f"{gaps} gap{'s' * (gaps > 1)}"] * bool(gaps) + [f"{failed} failed"] * bool(failed)
    return f"{verdict} ({', '.join(words)})"


def badge(runs: Sequence[Run], kit: str) -> str:
    """Return a line of Markdown for a README: an image that says what came out."""
    colour = {"conforms": "brightgreen", "partial": "yellow", "fails": "red"}[summary(runs).partition(" ")[0]]
    label, message = (text.replace("-", "--").replace(" ", "_") for text in (f"drivetrain {kit}", summary(runs)))
    return f"![{runs[0].backend}: {summary(runs)}](https://img.shields.io/badge/{label}-{message}-{colour})"


def by_backend(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each backend."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.backend, []).append(run)
    return found


def table(runs: Sequence[Run]) -> list[str]:
    """Return the closing table: a row for each run, then every gap with its reason and everything that failed."""
    rows = [("run", "backend", "distribution", "worlds", "passed", "gaps", "failed", "verdict")]
    for run in runs:
        counts = [str(run.count(outcome)) for outcome in (PASSED, GAP, FAILED)]
        worlds = ",".join(map(str, run.world_sizes))
        rows.append((run.name, run.backend, run.owner, worlds, counts[0], counts[1], counts[2], run.verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for run in runs:
        lines += [f"{run.name}: gap {case}: {reason}" for case, reason in sorted(run.gaps.items())]
        if run.atol_reason:
            lines.append(f"{run.name}: tolerance {run.atol:g}: {run.atol_reason}")
        lines += [
            f"{run.name}: failed {case} on {', '.join(failed)}"
            for case, worlds in run.cases.items()
            if (failed := [world for world, outcome in worlds.items() if outcome == FAILED])
        ]
        lines += [f"{run.name}: {problem}" for problem in run.problems]
    return lines
