from __future__ import annotations

import pytest
import torch

from drivetrain.checkpoint import inspect
from drivetrain_testing import spawn

WRITERS = [("replicated", 1), ("replicated", 2), ("replicated", 4), ("sharded", 2), ("sharded", 4), ("hybrid", 4)]
READERS = [("replicated", 1), ("replicated", 2), ("sharded", 2), ("sharded", 4)]


@pytest.fixture(scope="module")
def written(jobs, tmp_path_factory):
    made = {}

    def write(layout, world):
        if (layout, world) not in made:
            path = tmp_path_factory.mktemp("written") / "ckpt"
            made[layout, world] = path, spawn(jobs.save_job, world, path, layout)[0]
        return made[layout, world]

    return write


@pytest.mark.parametrize("reader", READERS, ids=lambda one: f"to-{one[0]}-{one[1]}")
@pytest.mark.parametrize("writer", WRITERS, ids=lambda one: f"{one[0]}-{one[1]}")
@pytest.mark.gate(
    "replicated-1-to-sharded-4", "sharded-4-to-replicated-2", "hybrid-4-to-sharded-2", "sharded-2-to-sharded-4"
)
@pytest.mark.turns(2)
def test_what_was_saved_comes_back_under_any_layout_and_world_size(jobs, written, writer, reader):
    path, (at_save, losses) = written(*writer)
    for rank in spawn(jobs.load_job, reader[1], path, reader[0]):
        loaded, continued, custom, counters, info, betas = rank
        assert loaded.keys() == at_save.keys()
        for name, value in at_save.items():
            assert torch.equal(loaded[name], value), name
        # float32; the order of sums differs between layouts.
        assert continued == pytest.approx(losses, abs=1e-6)
        assert torch.equal(custom.pop("t"), torch.arange(3))
        assert custom == {"seen": 3, "tuple": (1, float("inf")), 7: b"x"}
        assert counters == {"step": 3}
        assert info == {"iteration": 4}
        assert betas == (0.8, 0.9)


def test_a_used_optimizer_takes_over_the_saved_state(jobs, written):
    path, (at_save, losses) = written("sharded", 2)
    loaded, continued, *_ = spawn(jobs.load_job, 2, path, "sharded", warm=True)[0]
    assert all(torch.equal(loaded[name], value) for name, value in at_save.items())
    assert continued == pytest.approx(losses, abs=1e-6)


def test_each_number_is_written_once_and_spread_over_the_ranks(written):
    path, _ = written("replicated", 4)
    inspection = inspect(path)
    manifest = inspection.manifest
    writers = {chunk.file.split("/")[1] for entry in manifest.tensors.values() for chunk in entry.chunks}
    assert len(writers) == 4
    assert all(len(entry.chunks) == 1 for entry in manifest.tensors.values())
    assert "model.embed.weight" in manifest.tensors
    assert "optim.embed.weight.exp_avg" in manifest.tensors
    assert not any("head" in name or "volatile" in name for name in manifest.tensors)
    assert manifest.trainables[0]["extra"]["tied"] == {"head.weight": "embed.weight"}
    assert [group["params"][0] for group in manifest.trainables[0]["optimizers"][0]] == ["embed.weight", "body.bias"]
    assert inspection.problems == ()
    assert inspection.num_bytes == sum(file.stat().st_size for file in path.glob("data-*/*"))


def test_a_sharded_state_is_written_in_shards(written):
    path, _ = written("sharded", 2)
    entry = inspect(path).manifest.tensors["model.embed.weight"]
    assert entry.sharded
    assert [chunk.offsets for chunk in entry.chunks] == [(0, 0), (5, 0)]


def test_torchs_own_checkpoint_reads_our_tensors(jobs, written):
    path, (at_save, _) = written("replicated", 2)
    assert torch.equal(spawn(jobs.dcp_job, 2, path)[0], at_save["body.weight"])


@pytest.mark.filterwarnings("ignore")
def test_random_state_follows_its_coordinate_and_a_new_one_is_derived(jobs, tmp_path):
    path = tmp_path / "ckpt"
    saved = spawn(jobs.random_job, 2, path, True)
    assert saved[0] != saved[1]
    assert spawn(jobs.random_job, 1, path, False) == saved[:1]
    four = spawn(jobs.random_job, 4, path, False)
    assert four[:2] == saved
    assert four == spawn(jobs.random_job, 4, path, False), "derived from the checkpoint alone"
    assert len({tuple(numbers) for numbers in four}) == 4


def test_derived_random_state_is_logged_once_and_no_warning(jobs, tmp_path):
    path = tmp_path / "ckpt"
    spawn(jobs.random_job, 2, path, True)
    first, second, third = spawn(jobs.load_log_job, 3, path)
    (line,) = first
    assert line.startswith("INFO: the checkpoint holds the random state of 2 data-parallel process(es), and here are 3")
    assert second == third == []


def test_further_ranks_take_the_one_random_state(jobs, written):
    path, _ = written("replicated", 1)
    assert spawn(jobs.load_warnings_job, 2, path) == [[], []]
    one, two = spawn(jobs.random_job, 2, path, False)
    assert one == two
    apart = spawn(jobs.random_job, 2, path, False, True)
    assert apart[0] == one != apart[1]


def test_an_object_that_differs_between_ranks_is_named(jobs, tmp_path):
    first, second = spawn(jobs.differing_job, 2, tmp_path / "ckpt")
    assert first == ["custom.0 has another state on rank 1 than on rank 0, whose state is saved"]
    assert second == []


def test_a_warning_that_is_an_error_fails_every_rank(jobs, written, tmp_path):
    for kind, text, exists in spawn(jobs.refused_warning_job, 3, tmp_path / "ckpt"):
        assert kind == "CheckpointError"
        assert "rank 0 of 3: could not write its part of the checkpoint: UserWarning: custom.0 has another" in text
        assert not exists
    for kind, text, unchanged in spawn(jobs.refused_remark_job, 3, written("replicated", 2)[0]):
        assert kind == "CheckpointError"
        assert "rank 0 of 3: could not make sense of the checkpoint: UserWarning: strict=False passes over" in text
        assert unchanged


def test_a_plan_is_kept_while_all_ranks_keep_the_same_one(jobs, tmp_path):
    assert spawn(jobs.older_plan_job, 3, tmp_path) == [[1, 1, 2, 2]] * 3


def test_a_sharded_object_of_the_users_is_saved_sharded_and_resharded(jobs, tmp_path):
    saved = spawn(jobs.averaged_job, 2, tmp_path / "ckpt", True)[0]
    loaded = spawn(jobs.averaged_job, 4, tmp_path / "ckpt", False)[3]
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert len(inspect(tmp_path / "ckpt").manifest.tensors["objects.custom.0.body.weight"].chunks) == 2


def test_hooks_write_beside_the_checkpoint_and_leave_models_out(jobs, tmp_path):
    assert spawn(jobs.hooks_job, 2, tmp_path / "ckpt") == [[5.0], [5.0]]
    names = {path.name for path in (tmp_path / "ckpt").iterdir() if path.is_file()}
    assert names - {".owner.json"} == {"manifest.json", "adapter-0.txt", "adapter-1.txt"}
    assert not any(name.startswith("model.") for name in inspect(tmp_path / "ckpt").manifest.tensors)


@pytest.mark.parametrize("saving", [True, False], ids=["save", "load"])
def test_memory_beyond_the_state_is_about_one_parameter(jobs, tmp_path, saving):
    megabytes, parameters = 128, 8
    (grown, _) = spawn(jobs.memory_job, 2, tmp_path / "ckpt", saving, megabytes)
    # A rank holds 64 MiB, 8 of each parameter; a save or load that copied its whole part would show all of it.
    assert grown < 2.5 * megabytes / parameters / 2, grown
