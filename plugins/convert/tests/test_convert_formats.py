"""Checkpoint formats that a plugin brings: a third party's comes through the same door as ours."""

from __future__ import annotations

import json
import shutil
import sys
import types
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner

from drivetrain.api import CheckpointError, UnsupportedError
from drivetrain.api.programs import checkpoint
from drivetrain_convert import CheckpointFormat, ForeignCheckpoint, convert, convert_to
from drivetrain_convert.command import convert as command
from drivetrain_convert.formats import installed_formats, load_format


class Diary(CheckpointFormat):
    """Numbers as text: ``diary.json``."""

    options: ClassVar = {"indent": "spaces before a line"}

    def recognises(self, path: Path) -> bool:
        return (path / "diary.json").is_file()

    def read(self, path: Path) -> ForeignCheckpoint:
        found = ForeignCheckpoint("a diary")
        found.add_model(
            {key: torch.tensor(rows) for key, rows in json.loads((path / "diary.json").read_text()).items()}
        )
        return found

    def write(self, saved, target, options):
        rows = {key[6:]: one.produce().tolist() for key, one in saved.tensors.items() if key.startswith("model.")}
        (target / "diary.json").write_text(json.dumps(rows, indent=int(options.get("indent", 0))))
        return ["everything but numbers"]


class Silent(CheckpointFormat):
    """Writes nothing."""

    def recognises(self, path: Path) -> bool:
        return False

    def read(self, path: Path) -> ForeignCheckpoint:
        raise CheckpointError("empty")


def install(site, monkeypatch, name, *formats):
    """Put a distribution beside the installed ones."""
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{each} = formats_of_a_test:{each.capitalize()}" for each in formats]
    (folder / "entry_points.txt").write_text("\n".join(["[drivetrain.checkpoint_formats]", *lines]))
    monkeypatch.syspath_prepend(site)


@pytest.fixture
def formats(monkeypatch, tmp_path_factory):
    module = types.ModuleType("formats_of_a_test")
    module.Diary, module.Silent = Diary, Silent
    sys.modules[module.__name__] = module

    install(tmp_path_factory.mktemp("site"), monkeypatch, "diaries", "diary", "silent")
    yield
    del sys.modules[module.__name__]


def test_it_is_recognised_read_and_written(formats, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "diary.json").write_text('{"weight": [1.0, 2.5]}')
    assert {"diary", "silent"} <= set(installed_formats())
    for kind in ("auto", "diary"):
        assert convert(tmp_path / "theirs", tmp_path / kind, kind).kind == "a diary"
    assert checkpoint.inspect(tmp_path / "auto").manifest.tensors["model.weight"].shape == (2,)
    assert convert_to(tmp_path / "auto", tmp_path / "back", "diary", {"indent": "2"}) == ["everything but numbers"]
    assert (tmp_path / "back" / "diary.json").read_text().splitlines()[1].startswith("  ")


def test_the_command_takes_options_and_prints_what_is_left_out(formats, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "diary.json").write_text('{"weight": [1.0]}')
    ours, back = str(tmp_path / "ours"), str(tmp_path / "back")
    run = CliRunner().invoke
    done = run(command, [str(tmp_path / "theirs"), ours, "--from", "diary"])
    assert done.output.splitlines()[0] == f"{ours}: from a diary"
    done = run(command, [ours, back, "--to", "diary", "--set", "indent=1"])
    assert done.output.splitlines() == [f"{back}: written as diary", "  left out: everything but numbers"]
    assert "--set takes KEY=VALUE" in run(command, [ours, back, "--to", "diary", "--set", "indent"]).output
    assert "--set belongs to --to" in run(command, [ours, back, "--set", "indent=1"]).output


def test_what_cannot_be_done_is_said_and_leaves_nothing(formats, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "diary.json").write_text('{"weight": [1.0]}')
    convert(tmp_path / "theirs", tmp_path / "ours")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"the format diary has no option 'indemt'\. Did you mean"):
        convert_to(tmp_path / "ours", tmp_path / "back", "diary", {"indemt": "2"})
    with pytest.raises(UnsupportedError, match="reads checkpoints and writes none"):
        convert_to(tmp_path / "ours", tmp_path / "back", "silent")
    with pytest.raises(CheckpointError, match=r"Did you mean 'diary'\?"):
        convert_to(tmp_path / "ours", tmp_path / "back", "dairy")
    with pytest.raises(ValueError, match="invalid literal"):
        convert_to(tmp_path / "ours", tmp_path / "back", "diary", {"indent": "two"})
    with pytest.raises(CheckpointError, match="exists already"):
        convert_to(tmp_path / "ours", tmp_path / "theirs", "diary")
    with pytest.raises(CheckpointError, match="holds 1 model"):
        convert_to(tmp_path / "ours", tmp_path / "back", "diary", index=1)
    assert sorted(tmp_path.iterdir()) == before


def test_one_name_of_two_plugins_is_refused(formats, monkeypatch, tmp_path):
    install(tmp_path, monkeypatch, "ledgers", "diary")
    words = r"two plugins bring a checkpoint format named 'diary': (diaries|ledgers) 1\.0 and (diaries|ledgers) 1\.0"
    with pytest.raises(CheckpointError, match=rf"{words}\. Uninstall one of the two"):
        load_format("silent")
    shutil.rmtree(tmp_path / "ledgers-1.0.dist-info")
    assert isinstance(load_format("diary"), Diary)


@pytest.mark.parametrize("wrong", [dict, print])
def test_a_plugin_that_names_no_format_is_refused_until_it_is_repaired(formats, monkeypatch, tmp_path, wrong):
    module = sys.modules["formats_of_a_test"]
    install(tmp_path, monkeypatch, "notes", "note")
    module.Note = wrong
    with pytest.raises(CheckpointError, match=r"formats_of_a_test:Note is no CheckpointFormat\. Tell the plugin's"):
        load_format("note")
    module.Note = Diary
    assert isinstance(load_format("note"), Diary)


def test_a_format_of_a_plugin_that_is_not_installed_says_what_to_type(monkeypatch):
    core = Message()
    core["Provides-Extra"] = "ledger"
    monkeypatch.setattr(metadata, "metadata", {"drivetrain": core}.__getitem__)
    with pytest.raises(CheckpointError, match="no installed plugin brings the checkpoint format 'ledger'") as caught:
        load_format("ledger")
    assert 'pip install "drivetrain[ledger]"' in str(caught.value)
