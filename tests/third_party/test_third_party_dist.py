"""What `make dist` builds is installed from its folder, without this tree, and does what README says."""

from __future__ import annotations

import importlib.util
import re
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

spec = importlib.util.spec_from_file_location("packaging_dist", ROOT / "tests/packaging/dist.py")
dist = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dist)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the sdist of every distribution."""
    folder = tmp_path_factory.mktemp("dist")
    dist.build(folder)
    return folder


@pytest.fixture(scope="module")
def installed(environment, built):
    """An environment in which pip has resolved an extra for two backends among these files."""
    environment.run([*environment.PIP, "--find-links", built, "drivetrain[ddp,fsdp]"], environment.folder)
    return environment


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_built_is_as_it_should_be(built):
    assert list(dist.problems(built)) == []
    assert len(list(built.glob("*.whl"))) == len(list(built.glob("*.tar.gz"))) == len(dist.FOLDERS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_description_that_an_index_refuses_is_noticed(built, tmp_path):
    (wheel,) = built.glob("drivetrain_ddp-*.whl")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(tmp_path / wheel.name, "w") as new:
        for name in old.namelist():
            body = old.read(name)
            if name.endswith("/METADATA"):
                head = body.partition(b"\n\n")[0].replace(b"text/markdown", b"text/x-rst")
                body = head + b"\n\nA title\n===\n\n.. nothing::\n"
            new.writestr(name, body)
    (said,) = dist.of_twine([tmp_path / wheel.name])
    assert "syntax errors in markup" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_file_that_is_missing_or_a_stranger_is_noticed(built, tmp_path):
    (wheel,) = built.glob("drivetrain_ddp-*.whl")
    with zipfile.ZipFile(wheel) as old:
        contents = {name: old.read(name) for name in old.namelist()}
    project = dist.project_of(ROOT / "plugins/ddp")
    versions = {"drivetrain": "0.1.0", "drivetrain-planner": "0.1.0"}
    assert list(dist.of_wheel(contents, project, versions)) == []
    without = {name: body for name, body in contents.items() if not name.endswith("py.typed")}
    info = "drivetrain_ddp-0.1.0.dist-info"
    assert list(dist.of_wheel({**without, "tests/a.py": b""}, project, versions)) == [
        f"holds drivetrain_ddp, {info}, tests, not drivetrain_ddp and {info} alone",
        "has no drivetrain_ddp/py.typed",
        "holds tests/a.py",
    ]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("drivetrain>=0.1,<0.2", []),
        ("drivetrain>=0.1", ["asks for drivetrain>=0.1, without an upper bound"]),
        ("drivetrain>=0.2,<0.3", ["asks for drivetrain<0.3,>=0.2, and drivetrain is 0.1.0"]),
        ("drivetrain-wrap>=0.1,<0.2", ["asks for drivetrain-wrap<0.2,>=0.1, which is none of ours"]),
    ],
)
def test_bounds_that_are_missing_are_noticed(asked, told):
    assert list(dist.of_bounds([Requirement(asked)], {"drivetrain": "0.1.0"})) == told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_readme_and_another_backend_by_one_line(installed, tmp_path):
    python, yaml = (
        re.search(rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[1] for kind in ("python", "yaml")
    )
    where = "import drivetrain, drivetrain_fsdp, drivetrain_sharding as s\nprint(drivetrain.__file__, s.__file__)\n"
    (tmp_path / "script.py").write_text(python, encoding="utf-8")
    (tmp_path / "where.py").write_text(where, encoding="utf-8")
    assert str(ROOT) not in installed.run(["python", "where.py"], tmp_path).stdout
    assert installed.run(["python", "script.py"], tmp_path).stdout.startswith("1 process(es), loss")
    launch = ["drivetrain", "launch", "--config", "config.yaml", "script.py"]
    for backend in ("ddp", "fsdp"):
        text = yaml.replace("distributed_type: ddp", f"distributed_type: {backend}")
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        done = installed.run(launch, tmp_path)
        assert done.stdout.startswith("2 process(es), loss")
        assert f": {backend} (drivetrain-{backend} " in done.stderr
    (tmp_path / "config.yaml").write_text(yaml.replace("type: ddp", "type: deepspeed"), encoding="utf-8")
    done = installed.run(launch, tmp_path, check=False)
    assert 'Run: pip install "drivetrain[deepspeed]"' in done.stderr
