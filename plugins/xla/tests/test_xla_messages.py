"""What a user reads without torch_xla, with the wrong torch, without a TPU; TorchTPU's device. Needs no torch_xla."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from drivetrain.api import Readiness, UsageError
from drivetrain.api.programs import get_registry
from drivetrain_xla import chips
from drivetrain_xla.config import XLAConfig
from drivetrain_xla.layout import chosen_cuts, device_mesh_sizes, parameter_spec
from drivetrain_xla.probing import judge


@pytest.fixture
def bus(tmp_path):
    """Makes a PCI bus with these devices; Google's chips by their ids."""

    def make(*devices: tuple[str, str]):
        for number, (vendor, device) in enumerate(devices):
            folder = tmp_path / f"0000:00:{number:02x}.0"
            folder.mkdir()
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "device").write_text(f"{device}\n")
        return tmp_path

    return make


def ask(bus, installed, environ=None, *, libtpu=False) -> Readiness:
    return judge(installed.get, environ or {}, has_libtpu=libtpu, bus=bus)


PAIR = {"torch": "2.9.1", "torch_xla": "2.9.0"}
TPU = ("0x1ae0", "0x0063")
OTHER = ("0x8086", "0x0063")


def test_without_torch_xla(bus):
    found = ask(bus(), {"torch": "2.13.0"})
    assert not found.ready
    assert found.reason == "torch_xla is not installed"
    assert found.cure == (
        'In an environment of its own, since it replaces torch, run: pip install "torch==2.9.*" "torch_xla==2.9.*" '
        '(on a TPU machine: pip install "torch==2.9.*" "torch_xla[tpu]==2.9.*")'
    )


def test_without_torch_xla_but_with_torchtpu(bus):
    found = ask(bus(), {"torch": "2.13.0", "torch_tpu": "0.2.0"})
    assert not found.ready
    assert "TorchTPU 0.2.0 is, whose device the backends of torch train on" in found.reason
    assert found.cure.startswith("Write distributed_type: ddp or fsdp")


@pytest.mark.parametrize("torch", ["2.13.0", "2.8.0", "2.10.0+cpu"])
def test_with_another_torch(bus, torch):
    found = ask(bus(), {**PAIR, "torch": torch})
    assert not found.ready
    assert found.reason == (
        f"torch_xla 2.9.0 is linked to torch 2.9, but torch {torch} is installed: importing it fails"
    )
    assert 'pip install "torch==2.9.*"' in found.cure


def test_with_another_torch_xla(bus):
    found = ask(bus(), {"torch": "2.8.0", "torch_xla": "2.8.1"})
    assert (found.ready, found.reason) == (
        False,
        "torch_xla 2.8.1 is installed, this plugin works with torch_xla 2.9",
    )


def test_without_a_tpu(bus):
    found = ask(bus(OTHER), PAIR)
    assert found == Readiness(True, "this machine has no TPU: XLA runs on its CPU, with use_cpu: true (--cpu)")
    asked = ask(bus(), PAIR, {"PJRT_DEVICE": "TPU"})
    assert (asked.ready, asked.reason) == (False, "PJRT_DEVICE=TPU, but this machine has no TPU")
    assert "use_cpu: true" in asked.cure


def test_with_a_tpu_without_libtpu(bus):
    place = bus(TPU, TPU, OTHER)
    found = ask(place, PAIR)
    assert (found.ready, found.reason) == (
        False,
        "this machine has 2 chip(s), TPU v5e, but not libtpu, which drives them",
    )
    assert "torch_xla[tpu]" in found.cure
    assert ask(place, PAIR, libtpu=True) == Readiness(True)
    assert ask(place, PAIR, {"PJRT_DEVICE": "CPU"}).ready


def test_chips_that_a_process_may_use(bus):
    place = bus(TPU, TPU, TPU, TPU, OTHER)
    assert chips.present(place) == ["TPU v5e"] * 4
    assert chips.usable({}, place) == 4
    assert chips.usable({"TPU_VISIBLE_CHIPS": "0,2"}, place) == 2
    assert chips.usable({"TPU_VISIBLE_CHIPS": ""}, place) == 0
    assert chips.description(place)["chips"] == "4"


def test_torchtpus_device_is_described_to_the_core():
    (found,) = [each for each in get_registry().devices() if each["type"] == "tpu"]
    assert found["visibility"] == "TPU_VISIBLE_CHIPS"
    assert found["communication_backend"] == "tpu_dist"
    assert found["chips"].isdigit()


IMPORT_TORCHTPU = """
import torch
import torch_tpu
found = torch.accelerator.current_accelerator(check_available=True)
print("accelerator", None if found is None else found.type)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_tpu") is None, reason="torch_tpu is not installed here")
def test_torchtpu_without_a_tpu_leaves_the_cpu():
    """Importing it on a machine without chips registers no accelerator, so ``ddp`` and ``fsdp`` run on the CPU."""
    command = [sys.executable, "-c", IMPORT_TORCHTPU]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "accelerator None" in ended.stdout


# ---- where parameters lie -------------------------------------------------------------------------------------------


def test_the_longest_dim_that_the_axis_divides_is_cut():
    sizes = {"dp_shard": 4, "tp": 1}
    assert parameter_spec((8, 12), sizes) == (None, "dp_shard")
    assert parameter_spec((8, 13), sizes) == ("dp_shard", None)
    assert parameter_spec((7, 13), sizes) == (None, None)
    assert parameter_spec((), sizes) == ()
    assert parameter_spec((8, 12), sizes, min_elements=97) == (None, None)


def test_tensor_and_shard_axes_take_different_dims():
    sizes = {"dp_shard": 2, "tp": 2}
    assert parameter_spec((8, 12), sizes, "colwise") == ("tp", "dp_shard")
    assert parameter_spec((8, 12), sizes, "rowwise") == ("dp_shard", "tp")
    assert parameter_spec((8,), sizes, "colwise") == ("tp",)
    assert parameter_spec((8,), sizes, "rowwise") == ("dp_shard",)
    assert parameter_spec((7, 12), sizes, "colwise") == (None, "dp_shard")


def test_patterns_of_a_plan():
    names = ["", "blocks.0.up", "blocks.1.up", "blocks.1.down", "head"]
    assert chosen_cuts(names, {"blocks.*.up": "colwise", "head": "rowwise"}) == {
        "blocks.0.up": "colwise",
        "blocks.1.up": "colwise",
        "head": "rowwise",
    }
    with pytest.raises(UsageError, match=r"no module of the model is called 'block\.up'"):
        chosen_cuts(names, {"block.up": "colwise"})


def test_replicas_take_the_devices_that_are_left():
    assert device_mesh_sizes({}, 4) == {"dp_replicate": 4, "dp_shard": 1, "tp": 1}
    assert device_mesh_sizes({"dp_shard": 2}, 8) == {"dp_replicate": 4, "dp_shard": 2, "tp": 1}
    for asked in ({"dp_shard": 3}, {"dp_replicate": 2}, {"tp": 8}):
        with pytest.raises(UsageError, match="does not fit the 4 devices"):
            device_mesh_sizes(asked, 4)


def test_a_plan_without_a_mesh_is_a_mistake():
    with pytest.raises(ValueError, match="tensor_parallel_plan needs spmd"):
        XLAConfig(spmd=False, tensor_parallel_plan={"head": "colwise"})
