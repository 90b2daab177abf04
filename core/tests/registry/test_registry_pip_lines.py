"""The line that installs an extra: the published one, or folders of the clone that the core is installed from."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from drivetrain import registry
from drivetrain.registry import pip_line, source_tree


def project(folder, name, dependencies=(), extras=""):
    folder.mkdir(parents=True)
    text = f'[project]\nname = "{name}"\ndependencies = {json.dumps(list(dependencies))}\n'
    (folder / "pyproject.toml").write_text(text + extras, encoding="utf-8")


@pytest.fixture
def clone(tmp_path):
    """Two plugins, of which one needs the other, one with an extra, the kit and the core."""
    extras = (
        "[project.optional-dependencies]\n"
        'warp = ["drivetrain-warp>=0.1,<0.2"]\nrune = ["drivetrain-runes[rune]>=0.1"]\n'
        'testing = ["drivetrain-testing"]\n'
    )
    root = tmp_path / "a clone"
    project(root / "core", "drivetrain", extras=extras)
    project(root / "kit", "drivetrain-testing", ["drivetrain>=0.1"])
    project(root / "plugins/cut", "drivetrain-cut", ["drivetrain>=0.1"])
    project(root / "plugins/warp", "drivetrain-warp", ["drivetrain>=0.1", "drivetrain-cut>=0.1", "torch>=2.9"])
    project(root / "plugins/runes", "drivetrain-runes", ["drivetrain>=0.1"])
    return root


@pytest.fixture
def origin(monkeypatch):
    """Sets what pip wrote down when it installed the core."""

    def set_(text):
        class Installed:
            version = "0.1.0"

            def read_text(self, name):
                assert name == "direct_url.json"
                return text

        monkeypatch.setattr(metadata, "distribution", lambda name: Installed() if name == "drivetrain" else real(name))

    real = metadata.distribution
    source_tree.cache_clear()
    yield set_
    source_tree.cache_clear()


def editable(root):
    return json.dumps({"url": (root / "core").as_uri(), "dir_info": {"editable": True}})


def test_from_an_index_or_a_wheel_it_is_the_extra(clone, origin):
    origin(None)
    assert pip_line("warp") == 'pip install "drivetrain[warp]"'
    assert pip_line("warp", "plot") == 'pip install "drivetrain-warp[plot]"'


def test_from_a_folder_that_was_copied_it_is_the_extra(clone, origin):
    origin(json.dumps({"url": (clone / "core").as_uri(), "dir_info": {}}))
    assert pip_line("warp") == 'pip install "drivetrain[warp]"'


def test_from_a_clone_it_is_the_folders_that_are_missing(clone, origin, monkeypatch):
    origin(editable(clone))
    cut, warp = (f"--editable '{clone}/plugins/{name}'" for name in ("cut", "warp"))
    assert pip_line("warp") == f"pip install {cut} {warp}"
    monkeypatch.setattr(registry, "unmet_requirements", lambda requirements: [])
    assert pip_line("warp") == f"pip install {warp}"


def test_extras_of_a_plugin_and_the_kit(clone, origin):
    origin(editable(clone))
    assert pip_line("rune") == f"pip install --editable '{clone}/plugins/runes[rune]'"
    assert pip_line("warp", "plot").endswith(f"--editable '{clone}/plugins/warp[plot]'")
    assert pip_line("testing") == f"pip install --editable '{clone}/kit'"
    assert pip_line("NAME") == f"pip install --editable '{clone}/plugins/NAME'"


def test_what_is_not_in_the_clone_is_the_extra(clone, origin):
    origin(editable(clone))
    assert pip_line("tower") == 'pip install "drivetrain[tower]"'


def test_a_clone_that_was_moved_is_none(clone, origin, tmp_path):
    origin(editable(clone))
    clone.rename(tmp_path / "elsewhere")
    assert source_tree() is None


def test_every_extra_of_ours_has_its_folder():
    """Check that what a clone's messages name is there."""
    root = Path(__file__).resolve().parents[3]
    core = registry._project(root / "core")
    for extra in core["optional-dependencies"]:
        if extra not in ("all", "fsspec"):  # torch brings fsspec: no message names this extra
            assert registry._folders(root, extra), extra
