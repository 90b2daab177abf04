"""Other libraries' checkpoints become ours: written by the libraries themselves where they are installed."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint._extension import StreamTransformExtension

from drivetrain.api import CheckpointError, CheckpointNotFoundError
from drivetrain.api.programs import checkpoint
from drivetrain_convert import convert
from drivetrain_convert.matching import match, match_unordered
from drivetrain_testing import spawn

HERE = Path(__file__).parent
PEERS = HERE.parents[2] / ".venv-bench"  # Made by `make bench`; has both libraries, once it is stamped.


def made(kind, package, folder):
    """The later losses of a run of the library itself, and what it saved."""
    if importlib.util.find_spec(package):
        python = sys.executable
    elif (PEERS / ".installed").exists():
        python = str(PEERS / "bin/python")
    else:
        pytest.skip(f"{package} is installed neither here nor by `make bench`, so there is no checkpoint of its making")
    command = [python, "-W", "ignore", str(HERE / "foreign_makers.py"), kind, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", ["safe", "pickled"])
@pytest.mark.gate("safe")
def test_a_folder_of_accelerate_goes_on(makers, tmp_path, layout):
    losses, numbers = made("accelerate", "accelerate", tmp_path / "theirs")
    # Safetensors do not keep the order of parameters, by which an optimizer numbers them.
    names = [name for name, _ in makers.build()[0].named_parameters()] if layout == "safe" else ()
    report = convert(tmp_path / "theirs" / layout, tmp_path / "ours", parameters=names)
    assert report.kind == "a save_state folder of Accelerate"
    assert "custom.0" in report.carried
    assert "scheduler.0" in report.carried
    assert [sentence for sentence in report.left_out if "position in the data" not in sentence] == []
    (resumed,) = spawn(makers.resume_job, 1, tmp_path / "ours", True)
    assert resumed[0] == pytest.approx(losses, abs=1e-6)
    assert resumed[1] == numbers, "the random numbers go on"
    assert resumed[2:] == (7, 6), "three steps before, three after"
    assert spawn(makers.resume_job, 2, tmp_path / "ours", True)[1][0] == pytest.approx(losses, abs=1e-6)


def test_a_file_of_fabric_goes_on(makers, tmp_path):
    losses, _ = made("fabric", "lightning_fabric", tmp_path / "theirs")
    report = convert(tmp_path / "theirs" / "run.ckpt", tmp_path / "ours", "fabric")
    assert checkpoint.inspect(tmp_path / "ours").manifest.info["notes"] == {"epoch": 3}
    (resumed,) = spawn(makers.resume_job, 1, tmp_path / "ours")
    assert resumed[0] == pytest.approx(losses, abs=1e-6), report.left_out


# Accelerate and Fabric refuse to shard on a CPU, so these are written by bare torch in the layout that they document.
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("full", "Accelerate's FSDP checkpoint, full"),
        ("sharded", "Accelerate's FSDP checkpoint, sharded"),
        ("fabric", "a sharded checkpoint of Lightning Fabric"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_fsdp_go_on(makers, tmp_path, layout, kind):
    losses = spawn(makers.sharded_job, 2, tmp_path / "theirs", layout)[0]
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert report.kind == kind
    assert report.carried[0].endswith("1 of them under a second name")
    (resumed,) = spawn(makers.resume_job, 1, tmp_path / "ours")
    assert resumed[0] == pytest.approx(losses, abs=1e-6)


def trained(makers):
    net, optimizer, scheduler = makers.build()
    makers.train(net, optimizer, scheduler, torch.Tensor.backward, 0)
    return net, optimizer, scheduler


def test_a_file_of_torch_goes_on_whatever_its_entries_are_called(makers, tmp_path):
    net, optimizer, scheduler = trained(makers)
    theirs = {"net": net.state_dict(), "opt": optimizer.state_dict(), "sched": scheduler.state_dict(), "loss": 0.5}
    torch.save(theirs, tmp_path / "run.pt")
    losses = makers.train(net, optimizer, scheduler, torch.Tensor.backward, 3)
    report = convert(tmp_path / "run.pt", tmp_path / "ours")
    assert "optimizer 0, for model 0, with 6 states" in report.carried
    (resumed,) = spawn(makers.resume_job, 1, tmp_path / "ours")
    assert resumed[0] == pytest.approx(losses, abs=1e-6)
    assert resumed[3] == 6, "three that the optimizer had counted, and three more"


def test_a_bare_state_dict_of_a_wrapped_model_gives_the_weights(makers, tmp_path):
    net, _, _ = trained(makers)
    torch.save({f"module.{name}": value for name, value in net.state_dict().items()}, tmp_path / "model.pt")
    report = convert(tmp_path / "model.pt", tmp_path / "ours")
    manifest = checkpoint.inspect(tmp_path / "ours").manifest
    assert "model.body.weight" in manifest.tensors
    assert manifest.trainables[0]["extra"]["tied"] == {"head.weight": "embed.weight"}
    assert "of model 0" in report.carried[0]


def test_an_optimizer_whose_numbers_fit_in_two_ways_is_left_out_and_said(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW([net[1].weight])
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    report = convert(tmp_path / "run.pt", tmp_path / "ours")
    assert any("optimizer 0: it numbers its parameters" in sentence for sentence in report.left_out)
    assert not any(name.startswith("optim") for name in checkpoint.inspect(tmp_path / "ours").manifest.tensors)


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_nothing_is_executed(tmp_path, monkeypatch, makers):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, "evil.pt")
    with pytest.raises(CheckpointError, match="cannot be read as weights only"):
        convert("evil.pt", "ours")
    Path("folder").mkdir()
    Path("folder/.metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"names posix\.system, which is no part of an index"):
        convert("folder", "ours")
    net, _, _ = makers.build()
    Path("theirs").mkdir()
    torch.save(net.state_dict(), "theirs/pytorch_model.bin")
    for name in ("optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl", "scaler.pt"):
        torch.save(Evil(), f"theirs/{name}")
    report = convert("theirs", "ours")
    assert sum("cannot be read as weights only" in sentence for sentence in report.left_out) == 5
    assert not Path("executed").exists()


def test_what_is_not_there_or_not_a_checkpoint_is_said(tmp_path, makers):
    with pytest.raises(CheckpointNotFoundError):
        convert(tmp_path / "nothing", tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no model was found"):
        convert(tmp_path / "empty", tmp_path / "ours")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert(tmp_path / "text.pt", tmp_path / "ours")
    (tmp_path / "ours already").mkdir()
    (tmp_path / "ours already" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is a Drivetrain checkpoint already. Load it as it is."):
        convert(tmp_path / "ours already", tmp_path / "ours")
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tmp_path / "text.pt", tmp_path / "taken")
    assert not (tmp_path / "ours").exists()
    assert not list(tmp_path.glob(".tmp*"))


def test_a_file_of_something_else_is_refused_until_a_state_dict_is_saved(tmp_path, makers):
    net, _, _ = makers.build()
    torch.save(list(net.parameters()), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt holds a list, not a dictionary\. .* a state dict was saved"):
        convert(tmp_path / "model.pt", tmp_path / "ours")
    torch.save(net.state_dict(), tmp_path / "model.pt")
    assert convert(tmp_path / "model.pt", tmp_path / "ours").kind == "a file of torch.save"


def test_a_kind_of_folder_that_the_source_is_not_is_refused_and_auto_finds_the_right_one(tmp_path, makers):
    net, _, _ = makers.build()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    torch.save(net.state_dict(), theirs / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"is no folder of torch\.distributed\.checkpoint\. Try --from auto"):
        convert(theirs, tmp_path / "ours", "torch")
    with pytest.raises(CheckpointError, match=r"model\.bin is no folder\. Accelerate's save_state writes a folder"):
        convert(theirs / "pytorch_model.bin", tmp_path / "ours", "accelerate")
    assert not (tmp_path / "ours").exists()
    for kind in ("auto", "accelerate"):
        assert convert(theirs, tmp_path / f"ours {kind}", kind).kind == "a save_state folder of Accelerate"


class Turned(StreamTransformExtension):
    """Writes every byte turned round, as a compression would write others."""

    @staticmethod
    def registry_name():
        return "turned"

    @staticmethod
    def from_descriptor(version):
        return Turned()

    def get_descriptor(self):
        return "turned/1"

    def transform_to(self, output):
        class Around(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                return output.write(bytes(255 - byte for byte in bytes(data)))

        return Around()

    def transform_from(self, source):
        raise AssertionError("nobody reads it")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # What torch 2.9 says when its own reader writes.
def test_transformed_parts_are_refused_until_they_are_saved_without_extensions(tmp_path):
    import torch.distributed.checkpoint as dcp

    def save(name, **settings):
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"model": {"w": torch.ones(2)}}, storage_writer=dcp.FileSystemWriter(tmp_path / name, **settings))
        return tmp_path / name

    with pytest.raises(CheckpointError, match=r"the parts in .* are compressed .*Save it without extensions"):
        convert(save("turned", _extensions=[Turned()]), tmp_path / "ours")
    assert convert(save("plain"), tmp_path / "ours").carried[0].startswith("1 tensors of model 0")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # What torch 2.9 says when its own reader writes.
def test_a_folder_whose_parts_point_outside_is_refused(tmp_path):
    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "theirs")
    index = pickle.loads((tmp_path / "theirs/.metadata").read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../secret"
    (tmp_path / "theirs/.metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        convert(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(
    ("names", "groups", "expected"),
    [
        ("a2 b3", [[(2,), (3,)]], [["a2", "b3"]]),
        ("a2 b2", [[(2,)]], None),
        ("a2 b2", [[(2,), (2,)]], [["a2", "b2"]]),
        ("a2 b2", [[None, None]], [["a2", "b2"]]),
        ("a2 b3 c2 d3", [[(2,), (2,)], [(3,), (3,)]], [["a2", "c2"], ["b3", "d3"]]),
        ("a2 b2", [[(2,)], [(2,)]], None),
        ("a2 b3", [[(4,)]], None),
        ("a2 b3 c4", [[(2,), (4,)]], [["a2", "c4"]]),
    ],
)
def test_numbers_are_named_when_there_is_one_way(names, groups, expected):
    assert match([(name, (int(name[1]),)) for name in names.split()], groups) == expected


def test_without_an_order_only_shapes_that_occur_once_are_named():
    names = [("a", (2,)), ("b", (3,)), ("c", (2,))]
    assert match_unordered(names, [[(3,)]]) == [["b"]]
    assert match_unordered(names, [[(2,)]]) is None
    assert match_unordered(names, [[None]]) is None
    assert match_unordered(names, [[(3,)], [(3,)]]) is None


def test_the_order_of_parameters_must_be_the_models(makers, tmp_path):
    net, _, _ = makers.build()
    torch.save(net.state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="no parameter nobody"):
        convert(tmp_path / "model.pt", tmp_path / "ours", parameters=["body.weight", "nobody"])
