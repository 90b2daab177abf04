"""Checkpoints go from and to the other backends, and models to plain torch, from host copies."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_xla", reason="torch_xla is in the environment of `make test-xla`")

import xla_jobs as jobs

from drivetrain_testing import spawn

TOLERANCE = 2e-6
"""float32 losses of about 2.5, added in three orders: by torch, by XLA, over ranks."""


@pytest.fixture(scope="module")
def reference():
    """Six steps that nobody stops."""
    return spawn(jobs.curve, 1, "single", {}, {}, 1)[0]


@pytest.mark.parametrize(
    ("devices", "world_size", "mesh"),
    [("1", 1, {}), ("4", 1, {"dp_shard": 4}), ("1", 2, {})],
    ids=["one-device", "four-devices", "two-processes"],
)
def test_a_run_goes_from_ddp_by_xla_to_fsdp(reference, tmp_path, devices, world_size, mesh):
    """Two steps under each, as if nothing had happened: moments, schedule, data position, tied weights, buffers."""
    first, second, third = (tmp_path / name for name in ("ddp", "xla", "fsdp"))
    curve = spawn(jobs.write, 2, "ddp", first, {})[0]
    curve += spawn(jobs.write, world_size, "xla", second, mesh, first, env={"CPU_NUM_DEVICES": devices})[0]
    curve += spawn(jobs.write, 2, "fsdp", third, {}, second)[0]
    assert curve == pytest.approx(reference, abs=TOLERANCE)


@pytest.mark.parametrize(("devices", "mesh"), [("1", {}), ("4", {"dp_shard": 2, "tp": 2})])
def test_a_model_is_exported_from_host_copies(tmp_path, devices, mesh):
    from safetensors.torch import load_file

    state = spawn(jobs.export, 1, tmp_path, mesh, env={"CPU_NUM_DEVICES": devices})[0]
    saved = load_file(tmp_path / "model.safetensors")
    assert set(state) - set(saved) == {"head.weight"}, "a tied weight is written once"
    assert all(torch.equal(saved[name], state[name]) for name in saved)
    plain = jobs.Net()
    plain.load_state_dict(state)
    assert torch.equal(plain.head.weight, plain.embed.weight)
