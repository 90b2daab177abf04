"""A stranger's package, installed from its folder into an environment without our other plugins, and tested there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples/third_party/diloco"
README = (PACKAGE / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """The programs of an environment that has what this one has, but of Drivetrain only the core and the package.

    Installed without a network: other people's packages are linked from this environment. Ours are built and copied as
    for anybody, so that a file missing from a wheel is missing here.
    """
    folder = tmp_path_factory.mktemp("stranger") / "env"
    venv.create(folder, with_pip=False)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for kind in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(kind).iterdir():
            if "drivetrain" not in entry.name and entry.suffix != ".pth" and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run([folder / "bin/python", *install, ROOT / "core", PACKAGE], folder)
    return folder / "bin"


def run(command, folder, *, limit=110, check=True):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "PIP_"))}
    environ |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environ["PATH"] = f"{Path(command[0]).parent}:{environ['PATH']}"
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environ, capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_it_is_found_beside_the_reference_backend_alone(stranger, tmp_path):
    reports = json.loads(run([stranger / "drivetrain", "backends", "--json"], tmp_path).stdout)
    assert {report["name"]: report["distribution"] for report in reports} == {
        "diloco": "drivetrain-diloco",
        "single": "drivetrain",
    }
    assert all(report["ready"] for report in reports)


def test_a_backend_that_is_not_there_is_told_with_its_cure(stranger, tmp_path):
    (tmp_path / "script.py").write_text("from drivetrain import Accelerator\nAccelerator()\n", encoding="utf-8")
    (tmp_path / "train.yaml").write_text("distributed_type: ddp\n", encoding="utf-8")
    command = [stranger / "drivetrain", "launch", "--config", "train.yaml", "script.py"]
    done = run(command, tmp_path, check=False)
    assert done.returncode != 0
    assert 'pip install "drivetrain[ddp]"' in done.stdout + done.stderr


def test_its_readme_works_as_it_stands(stranger, tmp_path):
    (tmp_path / "train.py").write_text(blocks("python")[0], encoding="utf-8")
    (tmp_path / "train.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    launch, traffic = blocks("sh")[0].splitlines()
    told = run([stranger / launch.split()[0], *launch.split()[1:]], tmp_path).stdout
    losses = [float(value) for value in re.findall(r"^epoch \d loss ([\d.]+)$", told, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 3
    (file,) = (tmp_path / "runs").rglob("*.jsonl")
    logged = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["diloco/round"] for line in logged if "diloco/round" in line] == list(range(1, 11))
    manifest = json.loads((tmp_path / "runs/last/manifest.json").read_text(encoding="utf-8"))
    assert manifest["backend"] == "DiLoCoBackend"
    assert "rounds of 500" in run([stranger / traffic.split()[0], *traffic.split()[1:]], tmp_path).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", sorted(path.name for path in PACKAGE.glob("tests/test_*.py")))
def test_its_own_tests_pass(stranger, file):
    """The conformance kit, the cases that hold in rounds, and the rounds themselves."""
    command = [stranger / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{file}"]
    done = run(command, PACKAGE, limit=580)
    assert re.search(r"\d+ passed", done.stdout)
