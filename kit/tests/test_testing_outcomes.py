"""A conformance run that leaves something out fails and says what; the closing table, the report and the badge.

Runs pytest inside of pytest, on a few of the kit's cases and without ranks: what is tested here is who notices.
"""

from __future__ import annotations

import json

import pytest

from drivetrain.errors import UsageError
from drivetrain_testing import RankFailedError, report, selection, suite
from drivetrain_testing.cases import state
from drivetrain_testing.scenario import Outcome

pytest_plugins = ["pytester"]

EVERY = selection.all_cases()
"""Imported here, since pytester forgets what its inner runs import."""

CASES = ("gradients.dense", "gradients.buffers", "clipping.clips_by_value")
BROKEN = "gradients.buffers"
"""Fails in every run here."""

REQUIREMENTS = """
class Requirements(BaseRequirements):
    backend = "single"
    world_sizes = (1,)
    gaps = {"gradients.buffers": "counts too much"}
"""
WHOLE = f"from drivetrain_testing.suite import *\n{REQUIREMENTS}"


def ranks_taken_out(function, world_size, case=None, kit=None, **_):
    """What the ranks of a sound backend would have returned."""
    if case in state.killed_parts.values():
        (kit.shared / "killed").touch()
        raise RankFailedError("killed")
    samples = list(range(state.GLOBAL_BATCH * state.MICRO_STEPS))
    shown = state.GLOBAL_BATCH * state.CUT
    answers = {
        state.departure: ({}, {}),
        state.arrival: ({}, {}),
        state.shuffled_first: samples[:shown],
        state.shuffled_rest: (samples[shown:], samples[::-1]),
    }
    return [answers.get(case, {})] * world_size


def run_case(name, kit, world_size):
    assert name != BROKEN


@pytest.fixture
def inner(pytester, monkeypatch):
    """Run pytest on a conformance module; options, then text of a ``conftest.py``."""
    monkeypatch.setattr(selection, "all_cases", lambda: {name: EVERY[name] for name in CASES})
    monkeypatch.setattr(selection, "neighbours", lambda _: [])
    monkeypatch.setattr(suite, "run_case", run_case)
    monkeypatch.setattr(suite, "spawn", ranks_taken_out)
    monkeypatch.setattr(suite, "reference", lambda _: Outcome())
    monkeypatch.setattr(suite, "assert_same_state", lambda *_: None)

    def run(module, *options, conftest=""):
        pytester.makeconftest(conftest)
        path = pytester.makepyfile(test_conformance_of_toy=module)
        return pytester.runpytest_inprocess(path, "-p", "no:cacheprovider", "--report", "report.json", *options)

    return run


def verdict(pytester):
    kit, (run,) = report.read(pytester.path / "report.json")
    assert kit
    return run


def test_a_whole_run_conforms_and_says_so(inner, pytester):
    result = inner(WHOLE)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*= conformance =*",
            "run *backend *distribution *worlds *passed *gaps *failed *verdict",
            "conformance_of_toy *single *drivetrain * 1 * 1 * 0 * conforms",
            "conformance_of_toy: gap gradients.buffers: counts too much",
            "badge: ![[]single: conforms *](https://img.shields.io/badge/*-conforms_(*_passed,_1_gap)-brightgreen)",
        ]
    )
    run = verdict(pytester)
    assert (run.verdict, run.complete, run.problems) == ("conforms", True, [])
    assert run.cases["gradients.dense"] == {"1": "passed"}
    assert run.cases["gradients.buffers"] == {"1": "gap"}
    assert run.cases["suite.state_travels"] == {"single-1-to-single-1": "passed"}
    assert run.cases["suite.killed_save"] == {"writing": "passed", "completing": "passed"}
    assert run.engines["torch"]
    assert run.capabilities["multi_process"] is False


def test_a_case_that_fails_is_named(inner, pytester):
    result = inner(WITHOUT_GAPS)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["conformance_of_toy: failed gradients.buffers on 1", "badge: *-red)"])
    assert verdict(pytester).verdict == "fails"


SOME = "from drivetrain_testing.suite import BaseRequirements, pytest_generate_tests, test_conformance\n" + REQUIREMENTS
NONE = "from drivetrain_testing.requirements import BaseRequirements\n" + REQUIREMENTS + "\ndef test_it():\n    pass\n"
WITHOUT_GAPS = WHOLE.replace("gaps =", "gaps = {}; _old =")
OWN_TEST = "\ndef test_state_travels(journey):\n    pass\n"
OWN_CHECK = "def test_suite_is_whole():\n    pass\n"
SKIP_ALL = "\nimport pytest\npytestmark = pytest.mark.skip('later')\n"
SKIP_ONE = """
import pytest
@pytest.fixture(autouse=True)
def _(request):
    if 'dense' in request.node.name:
        pytest.skip('slow')
"""
OWN_PARAMETERS = """
def pytest_generate_tests(metafunc):
    few = {'conformance_case,world_size': [('gradients.dense', 1)], 'journey': [], 'moment': ['writing']}
    for names, values in few.items():
        if names.partition(',')[0] in metafunc.fixturenames:
            metafunc.parametrize(names, values)
"""
DESELECT = """
def pytest_collection_modifyitems(items):
    items[:] = [each for each in items if 'dense' not in each.name]
"""
EXPECT_FAILURES = """
import pytest
def pytest_collection_modifyitems(items):
    for each in items:
        each.add_marker(pytest.mark.xfail(reason='flaky', strict=False))
"""
DENSE = "test_conformance[[]gradients.dense-1]"
FEWER = "* tests of the suite did not run: *"

CHEATS = {
    "a mark that skips the module": (WHOLE + SKIP_ALL, "", "* was skipped: later"),
    "a fixture that skips a case": (WHOLE, SKIP_ONE, f"{DENSE} was skipped: slow"),
    "a test of the same name": (WHOLE + OWN_TEST, "", "test_state_travels is not the suite's"),
    "and of the one that looks for it": (WHOLE + OWN_TEST + OWN_CHECK, "", "test_suite_is_whole is not the suite's"),
    "a test deleted": (WHOLE + "\ndel test_killed_save\n", "", "2 tests of the suite did not run: test_killed_save*"),
    "some of the suite imported": (SOME, "", FEWER),
    "nothing of the suite imported": (NONE, "", FEWER),
    "parameters of its own": (WHOLE + OWN_PARAMETERS, "", FEWER),
    "deselected by a conftest": (WHOLE, DESELECT, f"1 tests of the suite did not run: {DENSE}"),
    "expected to fail without a gap": (WITHOUT_GAPS, EXPECT_FAILURES, "* is expected to fail, but no gap says so"),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_nothing_else_switches_a_test_off(inner, pytester, cheat):
    module, conftest, told = CHEATS[cheat]
    result = inner(module, conftest=conftest)
    assert result.ret == 1, "the run did not fail"
    result.stdout.fnmatch_lines([f"conformance_of_toy: {told}"])
    assert verdict(pytester).verdict == "fails"


NO_CASE = "names no case that applies here"
MISTAKES = {
    "gradients.dense-": "the gap 'gradients.dense' has no reason",
    "gradients.dens-why": f"{NO_CASE}. Did you mean 'gradients.dense'?",
    "honesty.one_process_only-why": f"'honesty.one_process_only' {NO_CASE}",
    "gap = {}": "Requirements.gap is nothing that the kit reads. Did you mean 'gaps'?",
    "world_sizes = ()": "run no case",
    "atol = 1.0": "atol 1 is larger than 1e-06 without an atol_reason",
}
"""A line of the requirements, or a gap with its reason."""


@pytest.mark.parametrize("line", MISTAKES)
def test_requirements_that_say_nothing_are_told(inner, line):
    gap, dash, reason = line.partition("-")
    written = f'gaps = {{"{gap}": "{reason}", "{BROKEN}": "counts too much"}}' if dash else line
    result = inner(f"{WHOLE}    {written}\n")
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"E *{MISTAKES[line]}*"])


def test_a_gap_that_passes_fails(inner):
    result = inner(WHOLE.replace('{"gradients.buffers"', '{"gradients.dense": "why", "gradients.buffers"'))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["conformance_of_toy: failed gradients.dense on 1"])


CHECK = "test_conformance_of_toy.py::test_suite_is_whole"


@pytest.mark.parametrize("options", [("-k", "dense"), ("--deselect", CHECK)])
def test_tests_chosen_by_hand_make_a_partial_run(inner, pytester, options):
    result = inner(WHOLE, *options)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["conformance_of_toy * partial"])
    assert verdict(pytester).complete is False


def test_a_module_that_borrows_cases_claims_nothing(inner):
    result = inner(SOME + "    certifies = False\n")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*= conformance =*")


def test_a_file_that_is_no_report_is_refused(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="is no report of the conformance kit"):
        report.read(path)
    path.write_text(json.dumps({"format": 2, "runs": []}), encoding="utf-8")
    with pytest.raises(UsageError, match="has format 2, this kit reads 1"):
        report.read(path)
