"""Runs the test suite in several pytest processes that share its files, and reports progress while it runs.

    python tests/run.py                  everything
    python tests/run.py -m "not slow"    what a change usually breaks; any option or path of pytest works

Ranks wait for each other much of the time: two processes leave a quarter of two cores idle, so there is one more than
cores. Each process collects all tests and claims one file after the other, so that they end together. Files stay whole:
what a file's fixtures prepare is prepared once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
QUIET_SECONDS = 15
"""How long nothing may be said of a file that takes longer."""

MOST_PROCESSES = 8

SLOW_WEIGHT = 10
"""How many other tests one that is marked slow counts for, so that no file of two of them is left to the end."""

SLOW_SECONDS = 4.0
"""Processor seconds from which a test that is not marked slow is named at the end."""


def main() -> int:
    """Start the processes, pass on what they report, and print the failures at the end."""
    arguments = sys.argv[1:]
    count = min((os.cpu_count() or 1) + 1, MOST_PROCESSES)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drivetrain-tests-") as folder:
        logs = [Path(folder, f"{number}.log") for number in range(count)]
        reader, writer = os.pipe()
        workers = []
        for log in logs:
            command = [sys.executable, __file__, "--share", folder, str(writer), *arguments]
            with log.open("w") as output:
                workers.append(
                    subprocess.Popen(
                        command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, pass_fds=[writer],
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )  # fmt: skip
        os.close(writer)
        print(f"Collecting tests in {count} processes", flush=True)
        try:
            with os.fdopen(reader, encoding="utf-8") as reports:
                show(reports, begun)
            codes = [worker.wait() for worker in workers]
        except KeyboardInterrupt:  # The workers got the signal too.
            codes = [worker.wait() for worker in workers] + [pytest.ExitCode.INTERRUPTED]
        bad = [code for code in codes if code not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}]
        for log, code in zip(logs, codes, strict=False):
            print(closing_part(log.read_text(encoding="utf-8", errors="replace"), whole=code in bad), end="")
        lines = [line for path in Path(folder).glob("*.costs") for line in path.read_text().splitlines()]
        costs = [json.loads(line) for line in lines]
    heavy = sorted((cost for cost in costs if cost[0] >= SLOW_SECONDS and not cost[1]), reverse=True)
    for seconds, _, name in heavy[:20]:
        print(f"{seconds:6.1f} processor seconds, and not marked slow: {name}")
    print(f"{sum(cost[0] for cost in costs):.0f} processor seconds in {len(costs)} tests")
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    print(f"{'Failed' if bad else 'Passed'} in {minutes} min {seconds} s", flush=True)
    return int(bad[0]) if bad else 0


def show(reports: Iterator[str], begun: float) -> None:
    """Print each report of a worker behind the time and the share of tests that ended."""
    ended = total = 0
    for line in reports:
        tests, collected, text = line.rstrip("\n").split("\t")
        ended, total = ended + int(tests), int(collected)
        minutes, seconds = divmod(int(time.monotonic() - begun), 60)
        print(f"{minutes:3d}:{seconds:02d} {100 * ended // max(total, 1):3d}%  {text}", flush=True)


def closing_part(log: str, *, whole: bool) -> str:
    """What pytest printed after its line of dots: failures, tables, the summary; all of it when it went wrong early."""
    start = log.find("\n====")
    return log[start + 1 :] if start >= 0 else log if whole else ""


class SharedFiles:
    """A pytest plugin that runs the files that this process claims, and reports each to the parent process.

    Args:
        folder: where processes claim files, by creating a file there.
        reports: file descriptor that lines for :func:`show` are written to.
    """

    def __init__(self, folder: str, reports: int) -> None:
        self.folder = Path(folder)
        self.reports = reports
        self.costs = Path(folder, f"{os.getpid()}.costs")
        self.total = 0
        self.unreported = 0
        self.last_report = time.monotonic()
        self.file = ""
        self.counts: dict[str, int] = {}

    def report(self, text: str) -> None:
        """Write one line; short enough that lines of several processes do not mix."""
        line = f"{self.unreported}\t{self.total}\t{text[:300]}\n"
        os.write(self.reports, line.encode())
        self.unreported = 0
        self.last_report = time.monotonic()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """As pytest's own loop, for the files that no other process has claimed."""
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        if session.config.option.collectonly:
            return True
        self.total = len(session.items)
        claimed = self.claimed_files(session.items)
        file = next(claimed, None)
        while file is not None:
            begun = time.monotonic()
            self.file, self.counts = file[0].nodeid.partition("::")[0], {}
            following = None
            for index, item in enumerate(file):
                last = index == len(file) - 1
                if last:  # claimed now, since fixtures of the session live until the last test of all
                    following = next(claimed, None)
                coming = file[index + 1] if not last else following[0] if following else None
                before = processor_seconds()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=coming)
                self.unreported += 1
                slow = item.get_closest_marker("slow") is not None
                with self.costs.open("a", encoding="utf-8") as costs:
                    costs.write(json.dumps([processor_seconds() - before, slow, item.nodeid]) + "\n")
                if session.shouldfail or session.shouldstop:
                    raise session.Interrupted(session.shouldfail or session.shouldstop)
                if time.monotonic() - self.last_report > QUIET_SECONDS and not last:
                    self.report(f"{self.file}: {index + 1} of {len(file)}, running")
            self.report(f"{self.file}: {self.summary()} in {time.monotonic() - begun:.0f} s")
            file = following
        return True

    def claimed_files(self, items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
        """The tests of each file that this process may run; those that take long come first, as far as marks say."""
        files = [list(group) for _, group in groupby(items, lambda item: item.path)]
        for file in sorted(files, key=lambda file: sum(map(weight, file)), reverse=True):
            mark = self.folder / file[0].nodeid.partition("::")[0].replace("/", "+")
            try:
                mark.open("x").close()
            except FileExistsError:
                continue
            yield file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count outcomes; a failure is told at once."""
        if report.failed:
            self.counts["failed"] = self.counts.get("failed", 0) + 1
            self.report(f"FAILED {report.nodeid}")
        elif report.when == "call" or report.skipped:
            self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1

    def summary(self) -> str:
        """``12 passed, 1 skipped``."""
        return ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items()) or "nothing ran"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Conformance modules that another process ran are followed there."""
        watcher: Any = session.config.pluginmanager.get_plugin("drivetrain-conformance")
        if watcher is not None:
            watcher.modules = {name: module for name, module in watcher.modules.items() if watcher.saw(name)}


def weight(item: pytest.Item) -> int:
    """How long a test takes, about, beside one that is not marked slow. Cases of the kit share their ranks."""
    conformance = hasattr(getattr(item, "module", None), "Requirements")
    return SLOW_WEIGHT if item.get_closest_marker("slow") is not None and not conformance else 1


def processor_seconds() -> float:
    """What this process, the processes that it started, and the fork server with its ranks have used so far."""
    used = sum(psutil.Process().cpu_times()[:4])
    server = forkserver._forkserver._forkserver_pid  # its ranks are its own children, not ours
    return used + (sum(psutil.Process(server).cpu_times()[:4]) if server else 0.0)


def worker(folder: str, reports: str, *arguments: str) -> int:
    """Be one of the processes."""
    os.set_inheritable(int(reports), False)
    sys.path[0] = str(ROOT)  # as `python -m pytest` has it
    return int(pytest.main(["-q", *arguments], plugins=[SharedFiles(folder, int(reports))]))


if __name__ == "__main__":
    sys.exit(worker(*sys.argv[2:]) if sys.argv[1:2] == ["--share"] else main())
