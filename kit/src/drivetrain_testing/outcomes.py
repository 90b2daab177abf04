"""Collects the results of conformance modules: prints the closing table and writes the report.

A run conforms when every test of the suite ran and passed, or failed as a declared gap. What was left out, replaced,
skipped, or expected to fail by other means than ``Requirements.gaps`` is told and fails the session. Where the command
line chose some tests (``-k``, ``::``, ...) what did not run is no failure, but the verdict is ``partial``.
"""

from __future__ import annotations

import dataclasses
import json
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
    """Follow a conformance module from its collection to the closing table. May be called twice."""
    if module.Requirements.certifies:
        _watcher(config).modules[module.__name__] = module


def receive(config: pytest.Config, found: str) -> None:
    """Take over what a worker of pytest-xdist reports at its end."""
    _watcher(config).received.extend(json.loads(found))


def _watcher(config: pytest.Config) -> Outcomes:
    watcher = config.pluginmanager.get_plugin(NAME)
    if watcher is None:
        watcher = Outcomes(config)
        config.pluginmanager.register(watcher, NAME)
    assert isinstance(watcher, Outcomes)
    return watcher


@final
class Outcomes:
    """Notes what the suite's tests do. Registered with pytest when the first conformance module is collected."""

    def __init__(self, config: pytest.Config) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.received: list[dict[str, Any]] = []
        """From workers of pytest-xdist; in one module's tests can be spread over several of them."""
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
        found = [self._found(module, chosen=_chosen_by_hand(session)) for module in self.modules.values()]
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[NAME] = json.dumps([each for each in found if each["run"]["cases"]])
            return
        self._runs = _merged(found + self.received)
        path = self._config.getoption("drivetrain_report", "")
        if path:
            report.write(Path(path), drivetrain.__version__, self._runs)
        if session.exitstatus == pytest.ExitCode.OK and any(run.verdict == "fails" for run in self._runs):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _found(self, module: ModuleType, *, chosen: bool) -> dict[str, Any]:
        """Return the results of a module: its run, the tests that did not run, and whether the user chose that."""
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
        )
        for (test, name), outcome in ended.items():
            case, world = test.replace("test_", "suite."), name or "once"
            if test == "test_conformance":
                case, _, world = name.rpartition("-")
            run.cases.setdefault(case, {})[world] = outcome
        missing_names = sorted(f"{test}[{name}]" if name else test for test, name in missing)
        return {"run": dataclasses.asdict(run), "missing": missing_names, "chosen": chosen}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the closing table and a badge for each backend."""
        if not self._runs:
            return
        terminalreporter.section("conformance", sep="=")
        for line in report.table(self._runs):
            terminalreporter.write_line(line)
        for runs in report.by_backend(self._runs).values():
            terminalreporter.write_line(f"badge: {report.badge(runs, drivetrain.__version__)}")


def _merged(found: list[dict[str, Any]]) -> list[report.Run]:
    """One run for each module, whatever processes its tests ran in."""
    runs: dict[str, report.Run] = {}
    missing: dict[str, set[str]] = {}
    for each in found:
        part = report.Run(**each["run"])
        run = runs.setdefault(part.name, part)
        missing[part.name] = missing.get(part.name, set(each["missing"])) & set(each["missing"])
        run.complete = run.complete and not each["chosen"]
        if run is not part:
            run.problems += [problem for problem in part.problems if problem not in run.problems]
            for case, worlds in part.cases.items():
                run.cases.setdefault(case, {}).update(worlds)
    for name, run in runs.items():
        names = sorted(missing[name])
        if names and run.complete:
            rest = f" and {len(names) - _TELL} more" if len(names) > _TELL else ""
            run.problems.append(f"{len(names)} tests of the suite did not run: {', '.join(names[:_TELL])}{rest}")
        run.complete = run.complete or not names
    return list(runs.values())


def _chosen_by_hand(session: pytest.Session) -> bool:
    """Whether the user selected some tests or stopped before the end."""
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
