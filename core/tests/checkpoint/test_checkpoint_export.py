from __future__ import annotations

import io
import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from drivetrain.checkpoint import export_model, save_object
from drivetrain.checkpoint.export import _parse_size
from drivetrain.errors import CheckpointError
from drivetrain_testing import spawn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_a_small_model_is_one_file_that_the_library_loads(tmp_path):
    model, other = Tied(), Tied()
    paths = export_model(iter(model.state_dict().items()), tmp_path)
    assert paths == [tmp_path / "model.safetensors"]
    assert paths[0].stat().st_size < 2000, "no room is wasted on a header"
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        assert "head.weight" not in file.keys()  # noqa: SIM118  It is no dictionary.
    load_model(other, paths[0])
    assert all(
        torch.equal(one, two) for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_shards_and_index_as_transformers_expects_them(tmp_path):
    tensors = {f"layer.{number}": torch.full((100,), float(number)) for number in range(5)}
    (tmp_path / "model.safetensors").write_text("an older export")
    (tmp_path / "model-00001-of-00009.safetensors").write_text("an older export")
    (tmp_path / "config.json").write_text("{}")
    paths = export_model(iter(tensors.items()), tmp_path, max_shard_size=900)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [path.name for path in paths] == [*names, "model.safetensors.index.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", *names, "model.safetensors.index.json"]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert index["weight_map"] == {f"layer.{number}": names[number // 2] for number in range(5)}
    loaded = {name: tensor for path in paths[:-1] for name, tensor in load_file(path).items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_large_file_is_streamed_and_holds_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.checkpoint.export._HELD", 1000)
    tensors = {"odd": torch.ones(3, dtype=torch.bool)} | {f"t{n}": torch.rand(50, 3) for n in range(5)}
    (path,) = export_model(iter(tensors.items()), tmp_path)
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] == (1 << 20) - 8
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_only_one_tensor_is_alive_at_a_time(tmp_path, monkeypatch):
    import weakref

    monkeypatch.setattr("drivetrain.checkpoint.export._HELD", 0)
    alive = weakref.WeakSet()

    def produce():
        for number in range(5):
            # The one before is still the consumer's loop variable.
            assert len(alive) <= 1, number
            tensor = torch.full((1000,), float(number))
            alive.add(tensor)
            yield f"t{number}", tensor
            del tensor

    (path,) = export_model(produce(), tmp_path)
    assert [tensor[0].item() for _, tensor in sorted(load_file(path).items())] == [0, 1, 2, 3, 4]


def test_tensors_that_reuse_memory_are_not_taken_for_tied(tmp_path):
    def produce():
        for number in range(20):
            yield f"t{number}", torch.full((1000,), float(number))

    (path,) = export_model(produce(), tmp_path)
    assert {name: tensor[0].item() for name, tensor in load_file(path).items()} == {f"t{n}": n for n in range(20)}


def test_names_given_as_tied_are_saved_once(tmp_path):
    tensors = {"embed": torch.ones(2), "head": torch.ones(2)}
    (path,) = export_model(iter(tensors.items()), tmp_path, tied={"head": "embed"})
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == ["embed"]
        assert file.metadata()["head"] == "embed"


def test_without_safetensors_it_is_torchs_file(tmp_path):
    model, other = Tied(), Tied()
    (path,) = export_model(iter(model.state_dict().items()), tmp_path, safe_serialization=False)
    assert path.name == "pytorch_model.bin"
    other.load_state_dict(torch.load(path, weights_only=True))
    assert torch.equal(model.head.weight, other.head.weight)


def test_all_ranks_iterate_one_writes_and_all_learn_of_a_failure(jobs, tmp_path):
    first, second = spawn(jobs.export_job, 2, tmp_path / "out", "float32")
    assert (first, second) == ((["model.safetensors"], 3), ([], 3))
    failed = spawn(jobs.export_job, 2, tmp_path / "bad", "float8_e4m3fnuz")
    assert [kind for kind, _ in failed] == ["CheckpointError"] * 2
    assert "t0 has dtype float8_e4m3fnuz" in failed[1][1]


@pytest.mark.parametrize(("size", "number"), [(5, 5), ("10GB", 10**10), ("2 GiB", 2**31), ("500kb", 500_000), ("7", 7)])
def test_sizes(size, number):
    assert _parse_size(size) == number


@pytest.mark.parametrize("size", ["ten", "10 parsecs", 0, "-1GB"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(CheckpointError, match="max_shard_size"):
        _parse_size(size)


def test_save_object(tmp_path):
    save_object({"a": [1, "x"]}, tmp_path / "any.pt")
    assert torch.load(tmp_path / "any.pt", weights_only=True) == {"a": [1, "x"]}
    buffer = io.BytesIO()
    save_object(torch.ones(2), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), torch.ones(2))
    weight = torch.rand(3)
    save_object({"a": weight, "b": weight}, tmp_path / "safe", safe_serialization=True)
    save_object({"a": weight, "b": weight}, tmp_path / "safe", safe_serialization=True)
    assert {name: tensor.tolist() for name, tensor in load_file(tmp_path / "safe").items()} == {"a": weight.tolist()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["any.pt", "safe"]


@pytest.fixture
def full_disk(monkeypatch):
    """Leave no room in files opened for writing, so that the first write raises the system's own error."""
    monkeypatch.setattr("pathlib.Path.open", lambda path, mode="r", **given: open("/dev/full", "wb"))  # noqa: SIM115,PTH123


FULL = r"No space left on device\. It takes more than the [\d,.]+ MB that were free in {}\. Free some space"


@pytest.mark.parametrize("safe", [False, True])
def test_a_full_disk_leaves_the_older_file(tmp_path, safe, request):
    old, new = torch.zeros(4), torch.ones(10**6)
    save_object({"a": old}, tmp_path / "best.pt", safe_serialization=safe)
    before = (tmp_path / "best.pt").read_bytes()
    request.getfixturevalue("full_disk")
    with pytest.raises(CheckpointError, match="could not save best.pt: " + FULL.format(re.escape(str(tmp_path)))):
        save_object({"a": new}, tmp_path / "best.pt", safe_serialization=safe)
    request.getfixturevalue("monkeypatch").undo()
    assert (tmp_path / "best.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


@pytest.mark.parametrize("safe", [False, True])
def test_an_export_to_a_full_disk_names_it(tmp_path, full_disk, safe):
    with pytest.raises(CheckpointError, match="could not export the model: " + FULL.format(re.escape(str(tmp_path)))):
        export_model(iter({"a": torch.ones(10**6)}.items()), tmp_path, safe_serialization=safe)
    assert list(tmp_path.iterdir()) == []


def test_save_object_writes_through_links_and_to_devices(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "7.pt").write_bytes(b"old")
    (tmp_path / "latest.pt").symlink_to(tmp_path / "runs" / "7.pt")
    save_object({"a": 1}, tmp_path / "latest.pt")
    assert (tmp_path / "latest.pt").is_symlink()
    assert torch.load(tmp_path / "runs" / "7.pt") == {"a": 1}
    save_object({"a": 1}, "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_save_object_refuses_what_safetensors_cannot_hold(tmp_path):
    with pytest.raises(CheckpointError, match="flat dictionary of tensors"):
        save_object({"a": 1}, tmp_path / "x", safe_serialization=True)
    with pytest.raises(CheckpointError, match="to a path"):
        save_object({}, io.BytesIO(), safe_serialization=True)
