"""``drivetrain new-plugin``: names that it takes, names that it refuses, and what it leaves alone.

That what it writes installs, passes the kit and is clean: ``tests/third_party/test_third_party_new_plugin.py``.
"""

from __future__ import annotations

import ast
import tomllib
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from drivetrain.errors import UsageError
from drivetrain.registry import Registry
from drivetrain_testing import new_plugin

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def new(*arguments):
    """Run the command in the current folder; raises what it refuses."""
    return CliRunner().invoke(new_plugin.new_plugin, arguments, catch_exceptions=False)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_kits_entry_point_adds_the_command():
    (module,) = PROJECT["entry-points"]["drivetrain.hooks"].values()
    registry = Registry(entry_points=())
    registry.register(import_module(module), name="testing")
    group = click.Group()
    assert registry.add_commands(group) == []
    assert list(group.commands) == ["new-plugin"]


def test_it_writes_a_package_of_one_name(tmp_path):
    assert new("my_engine").exit_code == 0
    made = tmp_path / "drivetrain-my-engine"
    project = tomllib.loads((made / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "drivetrain-my-engine"
    assert project["entry-points"] == {"drivetrain": {"my_engine": "drivetrain_my_engine.plugin"}}
    assert project["dependencies"] == ["drivetrain>=0.1,<0.2"]
    sources = sorted(path.relative_to(made).as_posix() for path in made.rglob("*.py"))
    assert sources == [
        "conftest.py",
        "src/drivetrain_my_engine/__init__.py",
        "src/drivetrain_my_engine/backend.py",
        "src/drivetrain_my_engine/config.py",
        "src/drivetrain_my_engine/plugin.py",
        "tests/test_my_engine_conformance.py",
    ]
    backend = ast.parse((made / "src/drivetrain_my_engine/backend.py").read_text(encoding="utf-8"))
    classes = [node.name for node in backend.body if isinstance(node, ast.ClassDef)]
    assert classes == ["MyEngineTrainable", "MyEngineBackend"]
    for path in made.rglob("*"):
        assert path.is_dir() or "{{" not in path.read_text(encoding="utf-8"), path


def test_it_writes_a_package_of_replicas(tmp_path):
    assert new("my_engine", "--replicated").exit_code == 0
    made = tmp_path / "drivetrain-my-engine"
    backend = (made / "src/drivetrain_my_engine/backend.py").read_text("utf-8")
    assert "class MyEngineBackend(ReplicatedBackend)" in backend
    assert "world_sizes = (1, 2)" in (made / "tests/test_my_engine_conformance.py").read_text("utf-8")
    for path in made.rglob("*"):
        assert path.is_dir() or "{{" not in path.read_text(encoding="utf-8"), path


def test_it_writes_elsewhere_and_into_an_empty_folder(tmp_path):
    (tmp_path / "deep/place").mkdir(parents=True)
    assert new("my_engine", "--folder", "deep/place").exit_code == 0
    assert (tmp_path / "deep/place/src/drivetrain_my_engine/plugin.py").is_file()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("My-Engine", "'My-Engine' cannot be a backend's name. It is lower-case letters, digits and _"),
        ("My-Engine", "begins with a letter, and not with drivetrain. Try: drivetrain new-plugin my_engine"),
        ("drivetrain_mine", "Try: drivetrain new-plugin mine"),
        ("2fast", "'2fast' cannot be a backend's name."),
        ("mesh", "'mesh' is a key of the configuration file"),
        ("on", "YAML reads on as True, not as a name."),
        ("single", "the backend name 'single' is taken [drivetrain 0.1.0]. Choose another name."),
        ("DDP", "the backend name 'DDP' is taken [drivetrain-ddp"),
        ("none", "the backend name 'none' is taken [drivetrain 0.1.0]."),
    ],
)
def test_a_name_that_cannot_be_is_refused(tmp_path, name, sentence):
    with pytest.raises(UsageError) as refused:
        new(name)
    assert sentence in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_name_of_ours_is_taken_though_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("drivetrain.registry.get_registry", lambda: Registry(entry_points=()))
    with pytest.raises(UsageError, match=r"'fsdp' is taken \[drivetrain-fsdp\]"):
        new_plugin.check_name("fsdp")


def test_nothing_that_is_there_is_lost(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("two years of work", encoding="utf-8")
    (tmp_path / "file").write_text("a file", encoding="utf-8")
    for folder in ("mine", "file"):
        with pytest.raises(UsageError, match=r"nothing was written\. Remove it, or write elsewhere") as refused:
            new("my_engine", "--folder", folder)
        assert f"{folder} exists already" in str(refused.value)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert (tmp_path / "mine/notes.txt").read_text(encoding="utf-8") == "two years of work"
    assert (tmp_path / "file").read_text(encoding="utf-8") == "a file"


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/inside cannot be written: Not a directory") as refused:
        new("my_engine", "--folder", "file/inside")
    assert "Choose another --folder." in str(refused.value)
