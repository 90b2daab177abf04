"""Accelerate's own test scripts, read from the installed package, with Drivetrain in its place.

    make test-accelerate

Each call of a check is counted on its own: a check that fails ends its ranks, and the script is run again without it.
What is waived, and why, stands in ``waivers.py``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import renamed
from waivers import NOT_RUN, WAIVERS, Waiver

from drivetrain_testing import RankFailedError, preload, spawn

PLACES: Mapping[str, tuple[str, int]] = {
    "single": ("single", 1),
    "ddp-1": ("ddp", 1),
    "ddp-2": ("ddp", 2),
    "ddp-3": ("ddp", 3),
    "ddp-4": ("ddp", 4),
    "fsdp-2": ("fsdp", 2),
}
"""Backend and number of processes, by name."""

SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "test_ops.py": tuple(PLACES),
    "test_script.py": tuple(PLACES),
    "test_sync.py": tuple(PLACES),
    "test_distributed_data_loop.py": ("ddp-2", "fsdp-2"),
    "external_deps/test_metrics.py": tuple(PLACES),
    "test_notebook.py": ("ddp-2",),
    "test_merge_weights.py": ("fsdp-2",),
}
"""Where each script is run: what it says itself that it needs, else everywhere."""

STARTS_PROCESSES = ("test_notebook.py",)
"""Scripts that begin in one process and start the others."""

_BOTH = (True, False)
_WINDOWS = [
    {"split_batches": split, "dispatch_batches": dispatch, "sync_each_batch": sync}
    for split, dispatch, sync in product(_BOTH, _BOTH, _BOTH)
]
LEFT_OUT: Mapping[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "test_sync.py": (
        r"ddp-[234]",
        [("test_gradient_accumulation", each) for each in _WINDOWS]
        + [("test_gradient_accumulation_with_opt_and_scheduler", each) for each in _WINDOWS if any(each.values())],
    ),
    "external_deps/test_metrics.py": (
        r".*",
        [
            ("test_gather_for_metrics_with_iterable_dataset", {}),
            ("test_gather_for_metrics_with_non_tensor_objects_iterable_dataset", {}),
        ],
    ),
}
"""Checks that a script makes on accelerators alone, and that hold on a CPU just as well: in which places, with what."""


@dataclass
class Outcome:
    """How one check ended in one place."""

    place: str
    script: str
    check: str
    error: str | None
    waiver: Waiver | None

    @property
    def name(self) -> str:
        return f"{self.place} {self.script} {self.check}"


def run(script: str, place: str, *, timeout: float = 90) -> list[Outcome]:
    """Every check of a script in one place."""
    backend, world = PLACES[place]
    where, extra = LEFT_OUT.get(script, ("", []))
    calls = [*extra] if re.fullmatch(where, place) else []
    env: dict[str, str | None] = {
        "DRIVETRAIN_DISTRIBUTED_TYPE": backend,
        "DRIVETRAIN_USE_CPU": "1",
        # Accelerate's way, which is not the default.
        "DRIVETRAIN_SCHEDULER__STEP_PER_PROCESS": "true",
    }
    if script in STARTS_PROCESSES:
        env |= {"ACCELERATE_NUM_PROCESSES": str(world), "RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None}
        world = 1
    names: dict[int, str] = {}
    errors: dict[int, str] = {}
    passed_over: set[int] = set()
    while True:
        with tempfile.TemporaryDirectory() as folder:
            try:
                spawn(renamed.run, world, script, calls, folder, frozenset(passed_over), timeout=timeout, env=env)
                error, culprit = None, -1
            except RankFailedError as failure:
                error, culprit = str(failure), failure.rank
            ranks = [_read(Path(folder, f"{rank}.jsonl")) for rank in range(world)]
        for number, name, event in (line for rank in ranks for line in rank):
            names[number] = name
            if number < 0:
                errors[number] = event
        done = [{number for number, _, event in rank if event != "begun"} for rank in ranks]
        everywhere = set.intersection(*done)
        if error is None:
            break
        begun = [{number for number, _, _ in rank} for rank in ranks]
        # The rank that failed says where; a job that ran out of time, in the first check that not all have passed.
        failed = min(begun[culprit] - done[culprit] if culprit >= 0 else set.union(*begun) - everywhere, default=-1)
        if failed < 0:
            # Between two checks or around them: what would follow is not known.
            failed = max(names, default=-1) + 1
            names[failed] = "(outside of checks)"
            errors[failed] = error
            break
        errors[failed] = error
        # What some rank had not come to is run again.
        passed_over |= {failed, *(number for number in everywhere if number >= 0)}
    return [
        Outcome(place, script, name, errors.get(number), waiver_of(place, script, name))
        for number, name in sorted(names.items())
    ]


def _read(path: Path) -> list[tuple[int, str, str]]:
    if not path.is_file():
        return []
    return [tuple(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def waiver_of(place: str, script: str, check: str) -> Waiver | None:
    """The reason why this check need not pass, if there is one."""
    for each in WAIVERS:
        if each.script == script and re.fullmatch(each.check, check) and re.fullmatch(each.places, place):
            return each
    return None


def report(outcomes: Iterable[Outcome]) -> str:
    """Counts by place, then what failed, then what is waived."""
    found = list(outcomes)
    lines = [f"{'place':8} {'passed':>7} {'failed':>7} {'waived':>7}"]
    for place in (*dict.fromkeys(each.place for each in found), "all"):
        counts = Counter(kind(each) for each in found if place in (each.place, "all"))
        lines.append(f"{place:8} {counts['passed']:7} {counts['failed']:7} {counts['waived']:7}")
    passed, failed = (sum(kind(each) == word for each in found) for word in ("passed", "failed"))
    applicable = passed + failed
    lines.append(f"{passed} of {applicable} applicable checks pass ({passed / max(applicable, 1):.1%})")
    lines += [f"failed: {each.name}: {_last_line(each)}" for each in found if kind(each) == "failed"]
    reasons: dict[str, list[str]] = {}
    for each in found:
        if each.waiver is not None and each.error is not None:
            reasons.setdefault(each.waiver.reason, []).append(each.name)
    lines += [f"waived ({len(names)}): {reason}" for reason, names in reasons.items()]
    lines += [f"waived, and passes: {each.name}" for each in found if each.waiver is not None and each.error is None]
    lines += [f"not run: {script}: {reason}" for script, reason in NOT_RUN.items()]
    return "\n".join(lines)


def kind(outcome: Outcome) -> str:
    """``passed``, ``failed`` or ``waived``."""
    if outcome.error is None:
        return "passed"
    return "failed" if outcome.waiver is None else "waived"


def _last_line(outcome: Outcome) -> str:
    lines = [line for line in (outcome.error or "").splitlines() if line and not line[0].isspace()]
    return lines[-1] if lines else ""


def main() -> int:
    """Run the suite; the exit status says whether enough of it passes and no waiver is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", action="append", choices=PLACES, help="where to run; everywhere by default")
    parser.add_argument("--script", action="append", choices=SCRIPTS, help="what to run; everything by default")
    parser.add_argument("--show", action="store_true", help="print the errors in full")
    options = parser.parse_args()
    preload("transformers", "datasets")
    outcomes = []
    for script, places in SCRIPTS.items():
        if options.script and script not in options.script:
            continue
        for place in places:
            if options.place and place not in options.place:
                continue
            found = run(script, place)
            outcomes += found
            counts = Counter(map(kind, found))
            print(f"# {place} {script}: {dict(counts)}", file=sys.stderr, flush=True)
            for each in found:
                if kind(each) == "failed":
                    words = each.error if options.show else _last_line(each)
                    print(f"failed: {each.name}: {words}", file=sys.stderr, flush=True)
    print(report(outcomes))
    passed, failed = (sum(kind(each) == word for each in outcomes) for word in ("passed", "failed"))
    return int(passed < 0.97 * (passed + failed))


if __name__ == "__main__":
    sys.exit(main())
