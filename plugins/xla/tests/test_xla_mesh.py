"""One process, several devices: the numbers of one device, parameters and moments in shards."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is in the environment of `make test-xla`")

import xla_jobs as jobs

from drivetrain_testing import RankFailedError, spawn

TOLERANCE = 2e-6
"""float32 losses of about 2.5: XLA adds in another order than torch, and shards in another than one device."""

MESHES = {
    "one-device": ("1", {}),
    "dp2": ("2", {"dp_replicate": 2}),
    "dp4": ("4", {}),
    "fsdp2": ("2", {"dp_shard": 2}),
    "fsdp4": ("4", {"dp_shard": 4}),
    "tp2": ("2", {"tp": 2}),
    "dp2-fsdp2": ("4", {"dp_replicate": 2, "dp_shard": 2}),
    "fsdp2-tp2": ("4", {"dp_shard": 2, "tp": 2}),
}


@pytest.fixture(scope="module")
def reference():
    return spawn(jobs.curve, 1, "single", {}, {})[0]


@pytest.mark.parametrize("name", MESHES)
def test_the_curve_is_that_of_one_process(reference, name):
    devices, mesh = MESHES[name]
    section = {"min_shard_elements": 1} if mesh else {}
    found = spawn(jobs.curve, 1, "xla", mesh, section, env={"CPU_NUM_DEVICES": devices})[0]
    assert reference[-1] < reference[0], "the reference does not learn, so the curve says little"
    assert found == pytest.approx(reference, abs=TOLERANCE)


def test_a_plan_for_tensor_parallelism_is_followed(reference):
    section = {"tensor_parallel_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}
    found = spawn(jobs.curve, 1, "xla", {"tp": 2}, section, env={"CPU_NUM_DEVICES": "2"})[0]
    assert found == pytest.approx(reference, abs=TOLERANCE)


def test_a_plan_that_names_no_module_is_refused():
    section = {"tensor_parallel_plan": {"blocks.*.upp": "colwise"}}
    with pytest.raises(RankFailedError, match=r"no module of the model is called 'blocks.\*.upp'"):
        spawn(jobs.curve, 1, "xla", {"tp": 2}, section, env={"CPU_NUM_DEVICES": "2"})


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    with pytest.raises(RankFailedError, match="does not fit the 4 devices"):
        spawn(jobs.curve, 1, "xla", {"dp_replicate": 3}, {}, env={"CPU_NUM_DEVICES": "4"})


def test_parameters_and_moments_are_in_shards(tmp_path):
    """Also after a checkpoint was loaded, whose values come whole."""
    found = spawn(jobs.shards, 1, {"dp_shard": 4}, tmp_path / "here", env={"CPU_NUM_DEVICES": "4"})[0]["found"]
    for moment in found:
        assert {name: parts for name, parts in moment.items() if set(parts) != {0.25}} == {}


def test_tensor_axis_and_shards_together(tmp_path):
    mesh = {"dp_shard": 2, "tp": 2}
    found = spawn(jobs.shards, 1, mesh, tmp_path / "here", env={"CPU_NUM_DEVICES": "4"})[0]["found"]
    for moment in found:
        assert set(moment["blocks.0.up.weight"]) == {0.25}
        assert set(moment["blocks.0.norm.weight"]) == {0.5}
