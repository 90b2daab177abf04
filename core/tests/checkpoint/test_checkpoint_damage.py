from __future__ import annotations

import json
import pickle
import re
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import export_model, inspect, read_manifest
from drivetrain.checkpoint.loader import compare_groups
from drivetrain.checkpoint.manifest import MANIFEST, Manifest
from drivetrain.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from drivetrain_testing import spawn


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def original(jobs, tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "ckpt"
    spawn(jobs.save_job, 2, path, "replicated")
    return path


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "ckpt")


def data_file(path, kind="tensors"):
    return min(path.glob(f"data-*/{kind}-*"))


def loads(jobs, path, **options):
    """What each of two ranks got: (error class, text), or its warnings."""
    outcomes = spawn(jobs.load_warnings_job, 2, path, **options)
    return outcomes[0]


def edit(path, change):
    """Alter the manifest and make its checksum right again, as an attacker would."""
    body = json.loads((path / MANIFEST).read_text())
    del body["checksum"]
    change(body)
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    (path / MANIFEST).write_text(json.dumps({"checksum": zlib.crc32(text.encode()), **body}))


def test_the_untouched_copy_loads(jobs, copy):
    assert spawn(jobs.load_warnings_job, 2, copy) == [[], []]


@pytest.mark.parametrize("kind", ["tensors", "rng"])
def test_a_missing_file_is_named_on_every_rank(jobs, copy, kind):
    victim = data_file(copy, kind)
    victim.unlink()
    for name, text in spawn(jobs.load_warnings_job, 2, copy):
        assert name == "CheckpointCorruptError"
        assert f"{victim.name} is missing" in text
    assert inspect(copy).problems == (f"{victim.parent.name}/{victim.name} is missing",)


def test_a_truncated_file_is_named(jobs, copy):
    victim = data_file(copy)
    victim.write_bytes(victim.read_bytes()[:-3])
    name, text = loads(jobs, copy)
    assert name == "CheckpointCorruptError"
    assert f"{victim.name} has {victim.stat().st_size} bytes" in text


def test_one_flipped_bit_is_found(jobs, copy):
    victim = data_file(copy)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    name, text = loads(jobs, copy)
    assert name == "CheckpointCorruptError"
    assert f"{victim.name} was altered" in text


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_a_truncated_manifest_is_corrupt(copy, keep):
    text = (copy / MANIFEST).read_text()
    (copy / MANIFEST).write_text(text[:keep])
    with pytest.raises(CheckpointCorruptError):
        read_manifest(copy)


def test_an_altered_manifest_is_corrupt(copy):
    text = (copy / MANIFEST).read_text()
    (copy / MANIFEST).write_text(text.replace('"world_size": 2', '"world_size": 3'))
    with pytest.raises(CheckpointCorruptError, match="its own checksum"):
        read_manifest(copy)


def test_a_newer_format_says_to_upgrade(copy):
    edit(copy, lambda body: body.update(version=99))
    with pytest.raises(CheckpointError, match=r"format version 99, this Drivetrain reads 1.*Upgrade"):
        read_manifest(copy)


def test_another_programs_manifest_is_told(tmp_path):
    (tmp_path / MANIFEST).write_text('{"name": "a web app"}')
    with pytest.raises(CheckpointError, match="not written by Drivetrain"):
        read_manifest(tmp_path)


def test_a_folder_without_manifest_and_no_folder_are_not_found(jobs, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="holds no complete checkpoint"):
        read_manifest(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        read_manifest(tmp_path / "nowhere")
    assert [kind for kind, _ in spawn(jobs.load_warnings_job, 2, tmp_path)] == ["CheckpointNotFoundError"] * 2


@pytest.mark.parametrize("victim", ["manifest", "tensors", "rng"])
@pytest.mark.parametrize("fix_checksums", [False, True])
def test_a_pickle_in_place_of_a_file_is_refused_and_not_executed(jobs, copy, tmp_path, victim, fix_checksums):
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    target = copy / MANIFEST if victim == "manifest" else data_file(copy, victim)
    target.write_bytes(bomb)
    if fix_checksums and victim != "manifest":
        name = f"{target.parent.name}/{target.name}"
        edit(copy, lambda body: body["files"].update({name: {"size": len(bomb), "crc32": zlib.crc32(bomb)}}))
    kind, text = loads(jobs, copy)
    assert kind == "CheckpointCorruptError", text
    assert not (tmp_path / "executed").exists()
    pickle.loads(bomb).close()
    assert (tmp_path / "executed").exists(), "the bomb was a real one"


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "data/../../outside"])
def test_a_manifest_cannot_point_outside_of_its_folder(copy, name):
    edit(copy, lambda body: body["files"].update({name: {"size": 1, "crc32": 1}}))
    with pytest.raises(CheckpointCorruptError, match="not a path below the checkpoint"):
        read_manifest(copy)


def test_chunks_that_do_not_cover_their_tensor_are_corrupt(copy):
    edit(copy, lambda body: body["tensors"]["model.embed.weight"].update(shape=[11, 8]))
    with pytest.raises(CheckpointCorruptError, match="hold 80 elements"):
        read_manifest(copy)


def test_a_tensor_of_another_shape_in_the_file_is_corrupt(jobs, copy):
    def swap(body):
        entry = body["tensors"]["model.body.weight"]
        entry["chunks"][0]["key"] = body["tensors"]["model.body.bias"]["chunks"][0]["key"]
        entry["chunks"][0]["file"] = body["tensors"]["model.body.bias"]["chunks"][0]["file"]

    edit(copy, swap)
    kind, text = loads(jobs, copy)
    assert kind == "CheckpointCorruptError"
    assert "model.body.bias" in text


def rename(body, old, new):
    body["tensors"] = {new if name == old else name: entry for name, entry in body["tensors"].items()}


def test_missing_and_unknown_names_are_listed_with_a_guess(jobs, copy):
    edit(copy, lambda body: rename(body, "model.body.weight", "model.boddy.weight"))
    kind, text = loads(jobs, copy)
    assert kind == "CheckpointMismatchError"
    assert "missing in the checkpoint: model.body.weight (did you mean model.boddy.weight?)" in text
    assert "in the checkpoint but not here: model.boddy.weight" in text


def test_not_strict_passes_over_names_and_says_so(jobs, copy):
    edit(copy, lambda body: rename(body, "model.body.weight", "model.boddy.weight"))
    first, second = spawn(jobs.load_warnings_job, 2, copy, strict=False)
    assert len(first) == 1
    assert "passes over: missing in the checkpoint: model.body.weight" in first[0]
    assert second == []


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_named_strict_or_not(jobs, copy, strict):
    def stretch(body):
        entry = body["tensors"]["model.body.weight"]
        entry["shape"] = entry["chunks"][0]["shape"] = [16, 4]

    edit(copy, stretch)
    kind, text = loads(jobs, copy, strict=strict)
    assert kind == "CheckpointMismatchError"
    assert "other shapes: model.body.weight is [16, 4] in the checkpoint and [8, 8] here" in text


def test_a_full_disk_is_told_with_numbers_and_a_cure(jobs, tmp_path):
    (text, left), _ = spawn(jobs.full_disk_job, 2, tmp_path / "ckpt")
    assert "could not write its part of the checkpoint: No space left on device. It takes " in text
    assert re.search(rf"[\d,.]+ MB, and [\d,.]+ MB were free in {tmp_path}", text)
    assert "ProjectConfiguration(total_limit=2)" in text
    assert left == []


def test_a_folder_that_cannot_be_made_is_named(jobs):
    (text,) = spawn(jobs.unwritable_job, 1, Path("/proc/ckpt"))
    assert text.startswith("/proc/ckpt cannot be made: ")
    assert "Name a folder that can be written to" in text


def test_other_parameters_stand_in_two_lists():
    one, other = [[{"params": ["weight", "bias"]}]], [[{"params": ["0.weight", "0.bias", "2.bias"]}]]
    lists = "only in the checkpoint: bias, weight; only here: 0.bias, 0.weight, 2.bias"
    assert compare_groups(one, other, {}, "model 0") == [f"optimizer 0 of model 0 holds other parameters ({lists})"]


def test_other_parameter_groups_are_described(jobs, copy):
    def regroup(body):
        first, second = body["trainables"][0]["optimizers"][0]
        second["params"].append(first["params"].pop())

    edit(copy, regroup)
    kind, text = loads(jobs, copy)
    assert kind == "CheckpointMismatchError"
    assert "optimizer 0 of model 0 has 2 parameter group(s) where 2 were saved, differing in body.weight" in text


def test_nothing_is_changed_by_a_load_that_fails(jobs, copy):
    """The state after the error is the one before."""
    edit(copy, lambda body: rename(body, "model.body.weight", "model.boddy.weight"))
    assert spawn(jobs.untouched_job, 2, copy) == [True, True]


def test_the_manifest_survives_its_own_text(original):
    manifest = read_manifest(original)
    assert Manifest.from_json(manifest.to_json(), "here") == manifest


def test_an_info_that_is_no_json_is_refused():
    for wrong in (object(), float("nan"), {(1, 2): 3}):
        with pytest.raises(CheckpointError, match=r"info must be plain JSON: .*\. Write finite numbers, text, lists"):
            Manifest("B", {}, 1, 0.0, info={"x": wrong}).to_json()
    advised = {"x": 0.5, "note": "text", "list": [1, 2], "dict": {"1": 2}}
    assert Manifest.from_json(Manifest("B", {}, 1, 0.0, info=advised).to_json(), "here").info == advised


def test_the_errors_are_value_errors():
    assert issubclass(CheckpointMismatchError, ValueError)
    assert issubclass(CheckpointCorruptError, ValueError)


def test_a_failed_export_leaves_the_older_one(tmp_path):
    export_model(iter({"a": torch.ones(2)}.items()), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def broken():
        yield "a", torch.zeros(2)
        yield "b", torch.zeros(2).to(torch.float8_e4m3fnuz)

    with pytest.raises(CheckpointError, match="b has dtype float8_e4m3fnuz"):
        export_model(broken(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before
