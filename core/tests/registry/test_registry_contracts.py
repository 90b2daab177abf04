"""The core is ahead of a plugin, or behind it: packages of contract 0 and 99, built and installed by pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from drivetrain.api import CONTRACT

PROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"

    [project]
    name = "drivetrain-{name}"
    version = "3.1"

    [project.entry-points.drivetrain]
    {name} = "drivetrain_{name}.plugin"

    [tool.hatch.build.targets.wheel]
    packages = ["drivetrain_{name}"]
"""
PLUGIN = """
    from drivetrain.api import BackendInfo, hookimpl

    @hookimpl
    def drivetrain_backends():
        return [BackendInfo(name="{name}", summary="Of contract {api}.", api={api}, backend="drivetrain_{name}.none:N")]
"""
CONTRACTS = {"ancient": 0, "futuristic": 99}
"""By the name of a backend."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with both distributions, as pip installs them."""
    folder = tmp_path_factory.mktemp("contracts")
    for name, api in CONTRACTS.items():
        package = folder / name / f"drivetrain_{name}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "plugin.py").write_text(dedent(PLUGIN.format(name=name, api=api)), encoding="utf-8")
        (folder / name / "pyproject.toml").write_text(dedent(PROJECT.format(name=name)), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--target", folder / "site", *(folder / name for name in CONTRACTS)],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        check=True,
        timeout=100,
    )
    return folder / "site"


def run(installed, *command):
    path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(("name", "behind"), [("ancient", "drivetrain-ancient"), ("futuristic", "drivetrain")])
@pytest.mark.gate("ancient-*")
def test_a_script_that_asks_for_it_reads_both_numbers_and_what_to_upgrade(installed, name, behind):
    code = f"from drivetrain import Accelerator\nAccelerator(cpu=True, distributed_type={name!r})"
    done = run(installed, "-c", code)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"drivetrain.errors.ContractMismatchError: backend {name!r} speaks version {CONTRACTS[name]} of the backend "
        f"contract, this core speaks version {CONTRACT} [drivetrain-{name} 3.1]. Run: pip install --upgrade {behind}"
    )


def test_it_is_listed_as_blocked_with_the_reason_and_harms_nobody(installed):
    done = run(installed, "-c", "from drivetrain.cli.main import main; main()", "backends", "--json")
    assert done.returncode == 0, done.stderr
    reports = {report["name"]: report for report in json.loads(done.stdout)}
    for name, api in CONTRACTS.items():
        assert reports[name]["version"] == "3.1"
        assert not reports[name]["ready"]
        assert f"speaks version {api} of the backend contract" in reports[name]["why"]
        assert reports[name]["cure"].startswith("Run: pip install --upgrade drivetrain")
    assert reports["single"]["ready"]


def test_a_script_that_asks_for_another_backend_runs(installed):
    done = run(installed, "-c", "from drivetrain import Accelerator\nprint(Accelerator(cpu=True).distributed_type)")
    assert done.stdout.strip() == "single", done.stderr
