"""The pytest plugin that is active wherever the kit is installed: its options, and the start of conformance reports.

It does nothing for other tests and imports no torch. The report is made in :mod:`drivetrain_testing.outcomes`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

ALONE = Path(__file__).with_name("parity.py")
"""File that is collected if a model is given and no test is named."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--drivetrain-model``, ``--drivetrain-timeout`` and ``--report``."""
    group = parser.getgroup("drivetrain", "conformance of Drivetrain backends")
    group.addoption(
        "--drivetrain-model",
        default="",
        metavar="MODULE:BUILD",
        help="train the model that this function returns under the backends of the conformance tests that are named "
        "here; under every installed backend where no test is named",
    )
    group.addoption(
        "--drivetrain-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long the ranks of one conformance case may take; more for a slow machine or a large engine (60)",
    )
    described = {"dest": "drivetrain_report", "default": "", "metavar": "FILE"}
    group.addoption("--drivetrain-report", help="write what the conformance tests found, as JSON", **described)
    with contextlib.suppress(ValueError):  # Another plugin's option: ours still has its long name.
        group.addoption("--report", help="the same as --drivetrain-report", **described)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Leave out what lies around the kit's own module: in a source tree that is the conftest of another project."""
    known = early_config.known_args_namespace
    if known.drivetrain_model and not known.file_or_dir:
        known.confcutdir = str(ALONE.parent)


def pytest_configure(config: pytest.Config) -> None:
    """With a model given and no test named, collect the kit's own module for it."""
    if config.getoption("drivetrain_model") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(ALONE)]


def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> None:
    """Notice conformance modules, whatever of the suite they import."""
    if name != "Requirements" or not isinstance(obj, type):
        return
    from drivetrain_testing.requirements import BaseRequirements

    if issubclass(obj, BaseRequirements):
        from drivetrain_testing.outcomes import watch

        watch(collector.config, collector.obj)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist found of conformance modules."""
    from drivetrain_testing.outcomes import NAME, receive

    found = getattr(node, "workeroutput", {}).get(NAME)
    if found is not None:
        receive(node.config, found)
