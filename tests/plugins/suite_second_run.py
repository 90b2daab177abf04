"""Runs failed tests once more, alone, at the end, and forgives those whose failure is a declared transient error.

A pytest plugin for the suite of this repository; ``make test`` and ``make test-all`` name it with ``-p``. A run of
thousands of tests that start processes must not be lost to one port that somebody else took in between, and no defect
may hide behind a retry. So a failure is forgiven only if **both** hold: what was printed matches one of
:data:`TRANSIENT`, and the test passes when it runs again by itself. Anything else stays a failure, and so do more than
:data:`MOST` of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, final

import pytest

MOST = 2
"""Forgiven failures in one run. More than that is a pattern, not bad luck."""


@dataclass(frozen=True)
class Transient:
    """An error that comes from outside of the code under test.

    Args:
        pattern: what the failure's text must contain, as a regular expression.
        reason: where it comes from, and how it is known not to be ours.
    """

    pattern: str
    reason: str


TRANSIENT = (
    Transient(
        r"EADDRINUSE|Address already in use|errno: 98",
        "A test asks the kernel for a free port and passes it to a process that binds it a moment later; another "
        "process of the machine can be given the same one in between. torchrun and torch.distributed's environment "
        "take numbers, not open sockets, so the moment cannot be closed.",
    ),
    Transient(
        r"Gloo connectFullMesh failed with .*Connection closed by peer",
        "While gloo connects the ranks of a new group, a connection of two ranks that both go on can be closed. "
        "torch's own tests of ProcessGroupGloo have met it, too, on one machine (pytorch/pytorch#53270). A rank that "
        "ended in that moment fails the test when it runs again.",
    ),
    Transient(
        r"(?s)(?=.*gloo)(?=.*(SIGABRT|exit code -6|terminate called))",
        "Gloo's destructors can abort a process that ends after its peer has gone, with bare "
        "DistributedDataParallel too. Ranks that `spawn` starts are judged by their results; programs that tests start "
        "have an exit code only.",
    ),
)


def pytest_configure(config: pytest.Config) -> None:
    """Act in the process that sees all results."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondRun(config), "suite-second-run")


@final
class SecondRun:
    """Collects failures, and judges them at the end of the session."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failures: dict[str, str] = {}
        self._told: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a failed test printed."""
        if report.failed:
            before = self._failures.get(report.nodeid, "")
            self._failures[report.nodeid] = f"{before}{report.longreprtext}\n{report.capstdout}\n{report.capstderr}\n"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Run what failed again where all of it is transient; green only if all of it passes then."""
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not 0 < len(self._failures) <= MOST:
            return
        reasons = {name: transient(text) for name, text in self._failures.items()}
        if not all(reasons.values()):
            return
        for name, found in reasons.items():
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", name]
            again = subprocess.run(command, cwd=self._config.rootpath, capture_output=True, text=True, check=False)
            if again.returncode != 0:
                self._told.append(f"FAILED AGAIN, alone: {name}\n{again.stdout[-3000:]}")
                return
            assert found is not None
            self._told.append(f"PASSED WHEN RUN AGAIN, ALONE: {name}\n  forgiven as: {found.pattern}\n  {found.reason}")
        session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say aloud what was run again."""
        if self._told:
            terminalreporter.section("run again", sep="=", yellow=True)
            for line in self._told:
                terminalreporter.write_line(line)


def transient(text: str) -> Transient | None:
    """The declared transient error that a failure's text shows; ``None`` where it shows none."""
    return next((each for each in TRANSIENT if re.search(each.pattern, text)), None)
