"""The record of the oldest and the newest releases says what a run gave."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("releases_run", HERE / "run.py")
assert SPEC is not None
assert SPEC.loader is not None
run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)

REPORT = """<testsuites><testsuite>
<testcase classname="core.tests.test_a" name="test_good"/>
<testcase classname="core.tests.test_a" name="test_bad[1-x]"><failure message="no"/></testcase>
<testcase classname="core.tests.test_a" name="test_torn"/>
<testcase classname="core.tests.test_a" name="test_torn"><error message="teardown"/></testcase>
<testcase classname="core.tests.test_a" name="test_left"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def requirements() -> list[Requirement]:
    """What the distributions ask for of others, extras included; without torch_xla's, which is tested alone."""
    found = []
    for each in run.distributions():
        project = tomllib.loads((run.ROOT / each / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = [] if each == "plugins/xla" else project.get("optional-dependencies", {}).values()
        found += map(Requirement, [*project["dependencies"], *(one for extra in extras for one in extra)])
    return [one for one in found if not canonicalize_name(one.name).startswith("drivetrain")]


def test_every_requirement_has_a_lower_bound():
    """Without one, the lowest release that the metadata admit is the first that was ever published."""
    unbounded = [str(one) for one in requirements() if not any(each.operator in {">=", "=="} for each in one.specifier)]
    assert not unbounded


@pytest.mark.parametrize("world", ["oldest", "newest"])
def test_what_was_recorded_is_what_is_asked_for(world):
    versions = json.loads(run.OUTCOMES.read_text(encoding="utf-8"))[world]["versions"]
    for one in requirements():
        name = canonicalize_name(one.name)
        if name in versions:
            public = Version(Version(versions[name]).public)
            assert one.specifier.contains(public, prereleases=True), f"{one}, {versions[name]}: make test-{world}"


def test_tests_are_counted_by_how_they_ended(tmp_path):
    (tmp_path / "junit.xml").write_text(REPORT, encoding="utf-8")
    found = run.ended(tmp_path / "junit.xml")
    assert found["passed"] == ["core/tests/test_a::test_good"]
    assert found["failed"] == ["core/tests/test_a::test_bad[1-x]", "core/tests/test_a::test_torn"]
    assert found["skipped"] == ["core/tests/test_a::test_left"]


def test_a_run_of_what_failed_leaves_the_counts_of_the_complete_run():
    whole = run.recorded({}, {"passed": ["a", "b"], "skipped": [], "failed": ["d", "c"]}, {"x": "1"}, failed=False)
    assert whole["failed"] == ["c", "d"]
    again = run.recorded(whole, {"passed": ["c"], "skipped": [], "failed": ["d"]}, {"x": "1"}, failed=True)
    assert (again["passed"], again["failed"], again["passed_when_run_again"]) == (2, ["d"], ["c"])
