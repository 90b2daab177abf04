"""Collects the results of conformance modules: prints the closing table and writes the report.

A run conforms when every test of the suite ran and passed, or failed as a declared gap. What was left out, replaced,
skipped, or expected to fail by other means than ``Requirements.gaps`` is told and fails the session. Where the command
line chose some tests (``-k``, ``::``, ...) what did not run is no failure, but the verdict is ``partial``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Generator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, final

import pytest

import drivetrain
from drivetrain_testing import report, selection

NAME = "drivetrain-conformance"
NOT_INSTALLED = "the backend is registered by the test, not installed"
"""The one reason for which a test of the suite may be skipped: it looks at an installed distribution."""

_TELL = 5
"""Names of tests in one sentence."""


def users_model(config: pytest.Config) -> str:
    """``"module:build"`` where the command line names a model, else empty."""
    return str(config.getoption("drivetrain_model", ""))


def watch(config: pytest.Config, module: ModuleType) -> None:
    """Follow a conformance module from its collection to the closing table. May be called twice.

    Not in a worker of pytest-xdist, which runs a part of the tests: there is no verdict then, and no table.
    """
    if not module.Requirements.certifies or hasattr(config, "workerinput"):
        return
    watcher = config.pluginmanager.get_plugin(NAME)
    if watcher is None:
        watcher = Outcomes(config)
        config.pluginmanager.register(watcher, NAME)
    watcher.modules[module.__name__] = module


@final
class Outcomes:
    """Notes what the suite's tests do. Registered with pytest when the first conformance module is collected."""

    def __init__(self, config: pytest.Config) -> None:
        self.modules: dict[str, ModuleType] = {}
        self._config = config
        self._ended: dict[str, dict[tuple[str, str], str]] = {}
        self._problems: dict[str, list[str]] = {}
        self._runs: list[report.Run] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note how each phase of a test of the suite ended."""
        found = yield
        if isinstance(item, pytest.Function) and item.originalname in selection.TESTS and self._follows(item.module):
            self._note(item, found)
        return found

    def saw(self, module: str) -> bool:
        """Whether any test of the suite ran for this module."""
        return module in self._ended

    def _follows(self, module: ModuleType) -> bool:
        return self.modules.get(module.__name__) is module

    def _note(self, item: pytest.Function, found: pytest.TestReport) -> None:
        from drivetrain_testing import suite

        ended = self._ended.setdefault(item.module.__name__, {})
        name = item.callspec.id if hasattr(item, "callspec") else ""
        key = (item.originalname, name)
        problem = ""
        if item.function is not getattr(suite, item.originalname):
            problem = f"{item.originalname} is not the suite's"
        elif hasattr(found, "wasxfail"):
            case = name.rpartition("-")[0]
            if found.skipped and selection.gaps(item.module.Requirements).get(case) == found.wasxfail:
                ended.setdefault(key, report.GAP)
                return
            problem = f"{item.name} is expected to fail, but no gap says so"
        elif found.skipped:
            reason = found.longrepr[-1] if isinstance(found.longrepr, tuple) else str(found.longrepr)
            if reason.removeprefix("Skipped: ") == NOT_INSTALLED and item.module.Requirements.setup:
                ended[key] = report.SKIPPED
                return
            problem = f"{item.name} was skipped: {reason.removeprefix('Skipped: ')}"
        if problem:
            self._problems.setdefault(item.module.__name__, []).append(problem)
        if problem or found.failed:
            ended[key] = report.FAILED
        elif found.when == "call":
            ended.setdefault(key, report.PASSED)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report; a run that does not conform fails the session."""
        if self._config.option.collectonly:
            return
        chosen = _chosen_by_hand(session)
        self._runs = [self._run(module, complete=not chosen) for module in self.modules.values()]
        path = self._config.getoption("drivetrain_report", "")
        if path:
            report.write(Path(path), drivetrain.__version__, self._runs)
        if session.exitstatus == pytest.ExitCode.OK and any(run.verdict == "fails" for run in self._runs):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _run(self, module: ModuleType, *, complete: bool) -> report.Run:
        requirements = module.Requirements
        info, distribution, version = selection.description(requirements)
        ended = self._ended.get(module.__name__, {})
        missing = selection.expected(requirements, users_model(self._config)) - set(ended)
        run = report.Run(
            name=module.__name__.rpartition(".")[2].removeprefix("test_"),
            backend=info.name,
            distribution=distribution,
            version=version,
            contract=info.api,
            engines=_versions(("torch", *info.requires)),
            world_sizes=list(requirements.world_sizes),
            device=requirements.device,
            section=dict(requirements.section),
            mesh={str(world): dict(axes) for world, axes in requirements.mesh.items()},
            atol=requirements.atol,
            atol_reason=requirements.atol_reason,
            capabilities=_plain(dataclasses.asdict(info.capabilities)),
            gaps=selection.gaps(requirements),
            problems=list(dict.fromkeys(self._problems.get(module.__name__, []))),
            complete=complete or not missing,
        )
        for (test, name), outcome in ended.items():
            case, world = test.replace("test_", "suite."), name or "once"
            if test == "test_conformance":
                case, _, world = name.rpartition("-")
            run.cases.setdefault(case, {})[world] = outcome
        if missing and complete:
            names = sorted(f"{test}[{name}]" if name else test for test, name in missing)
            rest = f" and {len(names) - _TELL} more" if len(names) > _TELL else ""
            run.problems.append(f"{len(names)} tests of the suite did not run: {', '.join(names[:_TELL])}{rest}")
        return run

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the closing table and a badge for each backend."""
        if not self._runs:
            return
        terminalreporter.section("conformance", sep="=")
        for line in report.table(self._runs):
            terminalreporter.write_line(line)
        for runs in report.by_backend(self._runs).values():
            terminalreporter.write_line(f"badge: {report.badge(runs, drivetrain.__version__)}")


def _chosen_by_hand(session: pytest.Session) -> bool:
    """Whether somebody at the keyboard asked for less than all, or stopped before the end."""
    option = session.config.option
    chosen = (option.keyword, option.markexpr, option.deselect, getattr(option, "lf", False))
    stopped = session.shouldstop or session.shouldfail or session.exitstatus == pytest.ExitCode.INTERRUPTED
    return any((*chosen, stopped, any("::" in argument for argument in session.config.args)))


def _versions(requirements: tuple[str, ...]) -> dict[str, str]:
    """Installed versions of the distributions that these requirements name."""
    found = {}
    for line in requirements:
        name = re.split(r"[ <>=!~;\[(]", line, maxsplit=1)[0]
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}
