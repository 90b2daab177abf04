"""What ``drivetrain new-plugin`` writes is certified, and so is what the pages about backends make of it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("write-a-backend.md", "describe-a-backend.md", "certify-a-backend.md")
PAGE = "\n".join((ROOT / "docs/how-to" / name).read_text(encoding="utf-8") for name in PAGES)
FILES = re.findall(r"^```python\n# (\S+\.py)(?:, continued)?\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
(HOOKS,) = re.findall(r"^```toml\n(\[project\.entry-points.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)).splitlines()


@pytest.fixture(scope="module")
def stranger(stranger):
    """An environment with the core and the kit."""
    stranger.install(ROOT / "kit")
    return stranger


@pytest.fixture(scope="module")
def generated(stranger, tmp_path_factory):
    """A package as it is written by the kit that the stranger installed, installed beside it."""
    folder = tmp_path_factory.mktemp("new")
    told = stranger.run(["drivetrain", "new-plugin", "tin_engine"], folder).stdout
    made = folder / "drivetrain-tin-engine"
    assert told.splitlines()[0] == f"Wrote {made.name}, 10 files. Its README.md tells the next step; to begin:"
    stranger.install(made)
    return made


@pytest.fixture(scope="module")
def replicas(stranger, tmp_path_factory):
    """As ``generated``, for a backend of replicas."""
    folder = tmp_path_factory.mktemp("replicas")
    stranger.run(["drivetrain", "new-plugin", "copies", "--replicated"], folder)
    stranger.install(folder / "drivetrain-copies")
    return folder / "drivetrain-copies"


@pytest.fixture(scope="module")
def written(stranger, tmp_path_factory):
    """The package of the pages: generated, installed as they say, then its files as they stand there."""
    folder = tmp_path_factory.mktemp("page")
    assert COMMANDS[:3] == [
        "drivetrain new-plugin lockstep --replicated",
        "cd drivetrain-lockstep",
        'pip install --editable ".[test,lint]"',
    ]
    stranger.run(shlex.split(COMMANDS[0]), folder)
    made = folder / "drivetrain-lockstep"
    with (made / "pyproject.toml").open("a", encoding="utf-8") as project:
        project.write("\n" + HOOKS)
    stranger.install("--editable", made)
    texts = {}
    for path, text in FILES:
        texts.setdefault(path, []).append(text)
    for path, parts in texts.items():
        (made / path).write_text("\n\n".join(parts), encoding="utf-8")
    return made


@pytest.fixture(params=["generated", "replicas", "written"])
def package(request):
    return request.getfixturevalue(request.param)


def kit(stranger, package, *arguments):
    """What the kit prints, when all that ran passed: no gap, nothing skipped."""
    done = stranger.run(["python", "-m", "pytest", "-p", "no:cacheprovider", *arguments], package, limit=380)
    assert not re.search(r"\d+ (failed|xfailed|skipped|error)", done.stdout), done.stdout
    return done.stdout


# ---- each of them ---------------------------------------------------------------------------------------------------


def test_it_registers(stranger, package, tmp_path):
    reports = json.loads(stranger.run(["drivetrain", "backends", "--json"], tmp_path).stdout)
    (report,) = [report for report in reports if report["distribution"] == package.name]
    assert package.name == "drivetrain-" + report["name"].replace("_", "-")
    assert (report["ready"], report["why"]) == (True, "")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_passes_the_kit(stranger, package):
    told = kit(stranger, package, "-q", "--report", "report.json")
    assert re.search(rf" {package.name} 0.1.0 .* 0 +0 +conforms$", told, re.MULTILINE), "no gap, no failure"
    (run,) = json.loads((package / "report.json").read_text(encoding="utf-8"))["runs"]
    assert run["distribution"] == package.name
    assert len(run["cases"]) > 50


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_its_types_are_clean(stranger, package):
    # One cache for both: torch is read once.
    told = stranger.run(["python", "-m", "mypy", "--cache-dir", stranger.folder / "mypy"], package, limit=380).stdout
    assert "no issues found in 4 source files" in told


@pytest.mark.parametrize("config", ["pyproject.toml", ROOT / "pyproject.toml"], ids=["its own rules", "the house's"])
@pytest.mark.gate("generated-its own rules", "written-the house's")
def test_its_style_is_clean(package, config):
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [ruff, *command, "--no-cache", "--config", config, "."],
            cwd=package, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


# ---- as it is generated ---------------------------------------------------------------------------------------------


def test_its_name_is_taken_from_now_on(stranger, generated, tmp_path):
    done = stranger.run(["drivetrain", "new-plugin", "tin_engine"], tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the backend name 'tin_engine' is taken [drivetrain-tin-engine 0.1.0].")


def test_a_script_chooses_it(stranger, generated, tmp_path):
    script = "from drivetrain import Accelerator\nprint(type(Accelerator(cpu=True).backend).__name__)\n"
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    command = ["drivetrain", "launch", "--config", "train.yaml", "script.py"]
    (tmp_path / "train.yaml").write_text("distributed_type: tin_engine\ntin_engine: {}\n", encoding="utf-8")
    assert "TinEngineBackend" in stranger.run(command, tmp_path).stdout
    (tmp_path / "train.yaml").write_text("distributed_type: tin_engine\ntin_engine: {speed: 2}\n", encoding="utf-8")
    done = stranger.run(command, tmp_path, check=False)
    assert "speed" in done.stderr
    assert "train.yaml:2:14" in done.stderr


# ---- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_pages_other_commands_work(stranger, written):
    """A bare `pytest` is ``test_it_passes_the_kit``, on what was generated and on the page's files."""
    others = [line for line in COMMANDS[3:] if line != "pytest"]
    assert others == [
        "drivetrain backends",
        'pytest -k "gradients.dense-2"',
        "drivetrain test --config train.yaml --plot ranks.png",
        "drivetrain launch --config train.yaml train.py",
    ]
    assert "lockstep  ready" in stranger.run(shlex.split(others[0]), written).stdout
    assert re.search(r"\b1 passed", kit(stranger, written, *shlex.split(others[1])[1:]))
    config = re.findall(r"^```text\n(distributed_type:.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    (written / "train.yaml").write_text(config[0], encoding="utf-8")
    done = stranger.run(shlex.split(others[2]), written)
    assert "2 process(es), backend lockstep" in done.stdout
    assert "Everything works. The picture: ranks.png" in done.stdout
    assert (written / "ranks.png").read_bytes().startswith(b"\x89PNG")
    # The script of the tutorial, and what that says it prints.
    tutorial = (ROOT / "docs/tutorial/first-run.md").read_text(encoding="utf-8")
    story = tutorial.partition("<!-- saved as: train.py -->\n")[2]
    source, printed = re.findall(r"^```(?:python|text)\n(.*?)^```", story, re.DOTALL | re.MULTILINE)[:2]
    (written / "train.py").write_text(source, encoding="utf-8")
    assert stranger.run(shlex.split(others[3]), written).stdout == printed


def contract():
    """Every name that the author of a backend may have to know."""
    from drivetrain import hookspecs
    from drivetrain.api import Backend, BackendInfo, Capabilities, RunSettings, Trainable
    from drivetrain_testing.requirements import BaseRequirements

    for kind in (Backend, Trainable):
        yield from (name for name in vars(kind) if not name.startswith("_") and callable(getattr(kind, name)))
    for record in (BackendInfo, Capabilities, RunSettings):
        yield from (field.name for field in dataclasses.fields(record))
    yield from (name for name in vars(BaseRequirements) if not name.startswith("_"))
    yield from (name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("drivetrain_"))


def test_the_reference_explains_every_part_of_the_contract():
    """Left out: `setup`, which is for backends that are not installed."""
    names = {*contract()} - {"setup"}
    page = (ROOT / "docs/reference/backend-contract.md").read_text(encoding="utf-8")
    assert sorted(name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", page)) == []
