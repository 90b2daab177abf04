"""Prints a line for each test file that ended, and at the end what tests cost that are not marked slow.

A pytest plugin for the suite of this repository: ``make test`` and ``make test-all`` name it with ``-p``. A dot for
each test says nothing about which file hangs, and nothing at all in a log that is read later.

Files run in the order of what they cost, the dearest first: a worker takes whole files, and one that began a long file
last would be waited for. ``make test-all ARGS=--record-costs`` renews the record of it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, final

import psutil
import pytest

SLOW_SECONDS = 4.0
"""Processor seconds from which a test that is not marked slow is named at the end."""

QUIET_SECONDS = 15.0
"""How long nothing may be said while tests run."""

COST, LAST = "processor_seconds", "last_of_its_file"

RECORD = Path(__file__).with_name("suite_costs.json")
"""For each costly test file the seconds on the clock of what `make test` runs, and of what `make test-all` runs."""

RECORDED_SECONDS = 10
"""Seconds from which a file is in the record. Their order hardly matters for the others, which fill the gaps."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register ``--record-costs``."""
    parser.addoption("--record-costs", action="store_true", help="write what each test file took, for later orders")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Put files that take long first, by the record; the order within a file stays."""
    recorded = json.loads(RECORD.read_text())
    which = 0 if config.option.markexpr == "not slow" else 1
    known = {config.rootpath / file: seconds[which] for file, seconds in recorded.items()}
    items.sort(key=lambda item: -known.get(item.path, 0))


def pytest_configure(config: pytest.Config) -> None:
    """Watch the tests in a worker, and print in the process that starts the workers (or runs the tests itself)."""
    if config.option.record_costs and not (config.option.by_turns and config.args_source.name == "TESTPATHS"):
        raise pytest.UsageError("--record-costs is of the whole suite: make test-all ARGS=--record-costs")
    config.pluginmanager.register(Costs(), "suite-costs")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "suite-progress")


def processor_seconds() -> float:
    """What this process, the processes that it started, and the fork server with its ranks have used so far."""
    used = sum(psutil.Process().cpu_times()[:4])
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return used + (sum(psutil.Process(server).cpu_times()[:4]) if server else 0.0)


@final
class Costs:
    """Writes into each test's report what it cost and whether its file ends with it."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._last = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        """Note where the test begins."""
        self._begun = processor_seconds()
        self._last = nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the figures to the last report of a test, which pytest-xdist carries to where they are printed."""
        report = yield
        if call.when == "teardown":
            slow = item.get_closest_marker("slow") is not None
            report.user_properties += [(COST, [processor_seconds() - self._begun, slow]), (LAST, self._last)]
        return report


@final
class Progress:
    """Prints in place of pytest's dots."""

    def __init__(self, config: pytest.Config) -> None:
        self._begun = self._said = time.monotonic()
        self._config = config
        self._total = self._ended = 0
        self._files: dict[str, Counter[str]] = {}
        self._seconds: dict[str, float] = {}
        self._clock: dict[str, float] = {}
        self._costs: list[tuple[float, bool, str]] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Learn how many tests there are: every worker collects all of them."""
        self._total = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learn the same where no workers are used."""
        self._total = self._total or len(session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letters, and count as pytest does."""
        if hasattr(report, "wasxfail"):
            return ("xfailed" if report.skipped else "xpassed", "", "") if report.when == "call" else None
        if report.failed:
            return "failed" if report.when == "call" else "error", "", ""
        if report.skipped:
            return "skipped", "", ""
        return ("passed" if report.when == "call" else "", "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say a failure at once, and a file when its last test ended."""
        file = report.nodeid.partition("::")[0]
        counts = self._files.setdefault(file, Counter())
        self._seconds[file] = self._seconds.get(file, 0.0) + report.duration
        self._clock[report.nodeid] = self._clock.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            counts["failed"] += 1
            self._say(f"FAILED {report.nodeid}")
        elif report.when == "call" or report.skipped:
            counts[report.outcome] += 1
        if report.when != "teardown":
            return
        self._ended += 1
        figures = dict(report.user_properties)
        self._costs.append((*figures.get(COST, (0.0, False)), report.nodeid))
        if figures.get(LAST):
            words = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing ran"
            self._say(f"{file}: {words} in {self._seconds[file]:.0f} s")
        elif time.monotonic() - self._said > QUIET_SECONDS:
            self._say(f"{file}: {sum(counts.values())} so far")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        minutes, seconds = divmod(int(self._said - self._begun), 60)
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(f"{minutes:3d}:{seconds:02d} {100 * self._ended // max(self._total, 1):3d}%  {text[:300]}")
        reporter.flush()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name the tests that cost much and are not marked slow, and what all tests cost together."""
        heavy = sorted((cost for cost in self._costs if cost[0] >= SLOW_SECONDS and not cost[1]), reverse=True)
        for seconds, _, name in heavy[:40]:
            terminalreporter.write_line(f"{seconds:6.1f} processor seconds, and not marked slow: {name}")
        total = sum(cost[0] for cost in self._costs)
        terminalreporter.write_line(f"{total:.0f} processor seconds in {len(self._costs)} tests")
        if self._config.option.record_costs:
            self._record()

    def _record(self) -> None:
        quick, whole = dict.fromkeys(self._files, 0.0), dict.fromkeys(self._files, 0.0)
        for _, slow, name in self._costs:
            file = name.partition("::")[0]
            quick[file] += 0.0 if slow else self._clock[name]
            whole[file] += self._clock[name]
        kept = {file: [round(quick[file]), round(whole[file])] for file in sorted(whole)}
        lines = [f'  "{file}": {seconds}' for file, seconds in kept.items() if seconds[1] >= RECORDED_SECONDS]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
