"""The committed conformance reports belong to the kit and the backends as they are now."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from drivetrain.registry import get_registry
from drivetrain_testing import report, selection
from drivetrain_testing.cases.honesty import PROOFS

CURE = "run: make reports"
BRINGS = "[project.entry-points.drivetrain]"
"""What a plugin that brings a backend has in its pyproject.toml."""


def backends():
    root = Path(__file__).resolve().parents[2]
    files = sorted(root.glob("plugins/*/pyproject.toml"))
    return ["single", *(file.parent.name for file in files if BRINGS in file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", backends())
def test_the_report_of_a_backend_is_of_today(name, root, core):
    kit, runs = report.read(root / f"docs/reports/{name}.json")
    (described,) = [each for each in get_registry().reports() if each.name == name]
    info = get_registry().info(name)
    declared = {
        key: sorted(value) if isinstance(value, frozenset) else value
        for key, value in dataclasses.asdict(info.capabilities).items()
    }
    assert kit == core.project["version"], CURE
    assert runs, CURE
    for run in runs:
        assert (run.backend, run.distribution, run.version) == (name, described.distribution, described.version), CURE
        assert (run.contract, dict(run.capabilities)) == (info.api, declared), CURE
        cases = {case for case in run.cases if not case.startswith("suite.")}
        assert cases == set(selection.applying(info.capabilities)), CURE
        suite = {case.replace("suite.", "test_") for case in run.cases if case.startswith("suite.")}
        assert suite == set(selection.TESTS) - {"test_conformance"}, CURE
        assert run.verdict == "conforms", report.table([run])


def test_every_backend_and_no_other_has_a_report(root):
    assert {path.stem for path in (root / "docs/reports").glob("*.json")} == set(backends()), CURE


def test_a_report_of_yesterday_is_noticed(root, tmp_path):
    """A case more in the kit, or a capability changed in a backend, and the report no longer fits."""
    kit, (run, *_) = report.read(root / "docs/reports/single.json")
    run.cases.pop("gradients.dense")
    report.write(tmp_path / "docs/reports/single.json", kit, [run])
    with pytest.raises(AssertionError, match=CURE):
        test_the_report_of_a_backend_is_of_today("single", tmp_path, type("Core", (), {"project": {"version": kit}}))


def test_every_capability_is_proved_both_ways():
    from drivetrain.api import Capabilities
    from drivetrain_testing.kit import FAMILIES, all_cases

    assert set(PROOFS) == {field.name for field in dataclasses.fields(Capabilities)}
    known = {"", *all_cases(), *(f"{family}." for family in FAMILIES)}
    assert {case for pair in PROOFS.values() for case in pair} <= known
