"""The plugins of `make test`: which failures are run again and forgiven, and what is printed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import suite_gate
from suite_second_run import transient

from drivetrain_testing.kit import FAMILIES, all_cases

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"

pytest_plugins = ["pytester"]

ADDRESS = "[Errno 98] Address already in use"
ONCE = """
    import pathlib
    def test_it():
        mark = pathlib.Path("ran")
        if not mark.exists():
            mark.touch()
            raise OSError({message!r})
"""
ALWAYS = """
    def test_it():
        raise OSError({message!r})
"""


@pytest.fixture
def judged(pytester, monkeypatch):
    """Run tests under the plugins, in a process of their own and with the options given."""
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))

    def run(source, *options, message=ADDRESS):
        pytester.makepyfile(test_inner=source.format(message=message))
        plugins = ("-p", "suite_progress", "-p", "suite_second_run", "-o", "console_output_style=classic")
        return pytester.runpytest_subprocess(*plugins, "-p", "no:cacheprovider", *options)

    return run


WORKERS = pytest.mark.parametrize(
    "options", [("-n", "2", "--dist", "loadfile"), pytest.param((), marks=pytest.mark.slow)], ids=["workers", "alone"]
)
"""As `make test` runs, and in one process."""


@WORKERS
def test_a_declared_error_that_does_not_come_again_is_forgiven_aloud(judged, options):
    found = judged(ONCE, *options)
    assert found.ret == 0
    again = "PASSED WHEN RUN AGAIN, ALONE: test_inner.py::test_it"
    found.stdout.fnmatch_lines(["*FAILED test_inner.py::test_it", again])


@WORKERS
def test_a_declared_error_that_comes_again_fails(judged, options):
    found = judged(ALWAYS, *options)
    assert found.ret == 1
    found.stdout.fnmatch_lines(["FAILED AGAIN, alone: test_inner.py::test_it"])


def test_any_other_error_fails_though_it_does_not_come_again(judged):
    found = judged(ONCE, message="the sum is wrong")
    assert found.ret == 1
    found.stdout.no_fnmatch_line("*RUN AGAIN*")


def test_one_other_failure_takes_the_second_run_from_all(judged):
    assert judged(ONCE + "\n    def test_other():\n        raise ValueError\n").ret == 1


def test_more_than_two_are_no_bad_luck(judged):
    many = "\n".join(ONCE.replace("test_it", f"test_{each}").replace('"ran"', f'"ran{each}"') for each in range(3))
    found = judged(many)
    assert found.ret == 1
    found.stdout.no_fnmatch_line("*RUN AGAIN*")


@WORKERS
def test_a_file_is_told_when_its_last_test_ended(judged, options):
    source = """
        import pytest
        def test_one(): pass
        @pytest.mark.skip
        def test_two(): pass
        @pytest.mark.xfail
        def test_three(): raise ValueError
        def test_four(): pass
    """
    found = judged(source, *options, message="")
    assert found.ret == 0
    file = "  0:?? 100%  test_inner.py: 2 passed, 2 skipped in * s"
    found.stdout.fnmatch_lines([file, "* processor seconds in 4 tests", "*2 passed, 1 skipped, 1 xfailed*"])


def test_a_connection_that_breaks_is_forgiven_only_while_a_group_is_formed():
    broken = "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:19584."
    assert transient(f"RuntimeError: Gloo connectFullMesh failed with {broken}") is not None
    assert transient(f"RuntimeError: {broken}") is None


LAYOUT = """
    import pytest
    class Requirements:
        backend = {backend!r}
        world_sizes = (2, 4)
    @pytest.mark.parametrize("world_size", [2, 4])
    @pytest.mark.parametrize("conformance_case", {cases!r})
    def test_conformance(conformance_case, world_size): pass
"""


@pytest.fixture
def ran_of_layouts(pytester):
    """Run two layouts of one backend, and one of another, with these cases and options; what ran."""

    def run(cases, *options):
        for name, backend in (("one", "cut"), ("other", "cut"), ("whole", "ddp")):
            pytester.makepyfile(**{f"test_{name}": LAYOUT.format(backend=backend, cases=cases)})
        plugins = ("-p", "suite_gate", "-p", "no:cacheprovider", "-W", "ignore")
        found = pytester.runpytest_inprocess(*plugins, *options, "-v")
        return [line.split()[0] for line in found.outlines if " PASSED" in line]

    return run


def test_the_gate_runs_each_quick_case_in_one_layout_of_each_backend(ran_of_layouts, pytester):
    cases = ["gradients.dense", "mesh.cp", "data.one"]
    slow = f"{LAYOUT}    pytestmark = pytest.mark.slow\n"
    pytester.makepyfile(test_another=slow.format(backend="cut", cases=cases))
    ran = ran_of_layouts(cases, "-m", "not slow")
    assert sorted(each for each in ran if "test_whole" not in each) == [
        "test_one.py::test_conformance[gradients.dense-2]",
        "test_other.py::test_conformance[mesh.cp-2]",
    ]
    assert sum("test_whole" in each for each in ran) == 3


def test_by_turns_each_case_runs_in_one_layout_of_each_backend(ran_of_layouts):
    ran = ran_of_layouts(["gradients.dense", "data.one", "data.two", "data.three"], "--by-turns")
    assert sum("test_whole" in each for each in ran) == 8
    assert sum("gradients.dense" in each and "test_whole" not in each for each in ran) == 4
    turns = [each for each in ran if "test_whole" not in each and "gradients" not in each]
    assert sorted(each.partition("[")[2] for each in turns) == ["data.one-2]", "data.three-2]", "data.two-4]"]


def test_by_turns_a_third_of_the_slow_parameters_runs(pytester):
    pytester.makepyfile(
        test_one="""
        import pytest
        @pytest.mark.turns(3)
        @pytest.mark.gate("1", "5")
        @pytest.mark.parametrize("number", range(8))
        def test_it(number): pass
    """
    )
    plugins = ("-p", "suite_gate", "-p", "no:cacheprovider", "-W", "ignore")

    def ran(*options):
        found = pytester.runpytest_inprocess(*plugins, "-v", *options)
        return [line.partition("[")[2][0] for line in found.outlines if " PASSED" in line]

    assert ran() == list("01234567")
    turns = ran("--by-turns")
    assert set("15") < set(turns)
    assert len(turns) == 4
    assert ran("-m", "not slow") == list("15")


def test_by_turns_the_kit_does_not_miss_what_was_left_out(pytester):
    pytester.makepyfile(
        test_one="""
        import pytest
        class Requirements:
            backend = "cut"
            world_sizes = (2, 4)
        @pytest.mark.parametrize("world_size", [2, 4])
        @pytest.mark.parametrize("conformance_case", ["data.one"])
        def test_conformance(conformance_case, world_size): pass
    """
    )
    pytester.makeconftest("""
        from drivetrain_testing.outcomes import _chosen_by_hand
        def pytest_sessionfinish(session):
            print("a part was chosen:", _chosen_by_hand(session))
    """)
    plugins = ("-p", "suite_gate", "-p", "no:cacheprovider", "-W", "ignore", "-s")
    assert "a part was chosen: False" in pytester.runpytest_inprocess(*plugins).stdout.str()
    assert "a part was chosen: True" in pytester.runpytest_inprocess(*plugins, "--by-turns").stdout.str()


def test_the_quick_cases_are_cases_of_every_family():
    assert set(suite_gate.QUICK_CASES) == set(FAMILIES)
    named = {f"{family}.{case}" for family, cases in suite_gate.QUICK_CASES.items() for case in cases.split()}
    assert not named - all_cases().keys()
