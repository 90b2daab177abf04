"""``drivetrain checkpoint``: inspect, export, and where convert is."""

from __future__ import annotations

import json
import subprocess
import sys

import cli_checkpoint_jobs
import pytest
import torch
from safetensors.torch import load_file

from drivetrain.registry import get_registry, pip_line
from drivetrain_testing import spawn


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "ckpt"
    return path, spawn(cli_checkpoint_jobs.small_job, 1, path)[0]


def test_inspect_tells_what_is_in_it_and_that_it_is_whole(drivetrain, saved):
    done = drivetrain("checkpoint", "inspect", str(saved[0]))
    assert done.returncode == 0
    for words in ("by single on 1 process(es)", '{"step": 1}', "model ", "optim ", "2 tensors, 80 B", "whole: "):
        assert words in done.stdout, words


def test_inspect_gives_programs_everything(drivetrain, saved):
    found = json.loads(drivetrain("checkpoint", "inspect", "--json", str(saved[0])).stdout)
    assert found["whole"] is True
    assert found["tensors"]["model.1.bias"]["shape"] == [4]
    assert found["num_bytes"] == sum(entry["size"] for entry in found["files"].values())
    assert found["trainables"][0]["extra"]["tied"] == {"1.weight": "0.weight"}


def test_inspect_names_every_damaged_file_and_ends_with_1(drivetrain, saved, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    (victim,) = copy.glob("data-*/tensors-*")
    victim.write_bytes(victim.read_bytes()[:-1])
    done = drivetrain("checkpoint", "inspect", str(copy))
    assert done.returncode == 1
    assert f"damaged: {victim.parent.name}/{victim.name} has" in done.stdout
    done = drivetrain("checkpoint", "inspect", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert "there is no checkpoint at" in done.stderr
    done = drivetrain("checkpoint", "inspect", str(tmp_path))
    assert f"{tmp_path} holds no complete checkpoint. Name a checkpoint in it; the newest is {copy}." in done.stderr
    done = drivetrain("checkpoint", "export", str(copy), str(tmp_path / "out"))
    assert done.returncode == 2
    assert not (tmp_path / "out").exists(), "nothing of a damaged checkpoint is exported"


def test_export_writes_files_that_plain_torch_loads(drivetrain, saved, tmp_path):
    path, state = saved
    done = drivetrain("checkpoint", "export", str(path), str(tmp_path))
    assert done.stdout.split() == [str(tmp_path / "model.safetensors")]
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(loaded) == {"0.weight", "1.bias"}, "tied weights once"
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)


def test_export_cuts_into_files_with_an_index(drivetrain, saved, tmp_path):
    drivetrain("checkpoint", "export", str(saved[0]), str(tmp_path), "--max-shard-size", "20B")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"0.weight", "1.bias"}
    assert len(list(tmp_path.glob("model-0000?-of-00002.safetensors"))) == 2


@pytest.mark.parametrize(
    ("backend", "world_size", "size"),
    [("single", 1, "10GB"), ("ddp", 2, "20KB"), pytest.param("fsdp", 2, "20KB", marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_export_of_any_backend(drivetrain, tmp_path, backend, world_size, size):
    pytest.importorskip("transformers", reason="transformers is not installed, so nothing can load the export")
    if backend not in {report.name for report in get_registry().reports() if report.ready}:
        pytest.skip(f"{backend} is not installed")
    logits = spawn(cli_checkpoint_jobs.llama_job, world_size, tmp_path / "ckpt", backend)[0]
    done = drivetrain("checkpoint", "export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--max_shard_size", size)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/model.safetensors.index.json").exists() is (size == "20KB")
    loaded, report = spawn(cli_checkpoint_jobs.pretrained_job, 1, tmp_path / "out")[0]
    assert report == {}, "no key is missing, unexpected or misshapen"
    torch.testing.assert_close(loaded, logits, rtol=0, atol=1e-6)  # one process adds in another order


def test_convert_without_its_distribution_says_what_to_type(saved, tmp_path):
    code = (
        "import sys; sys.modules['drivetrain_convert'] = None\n"
        "from drivetrain.cli.main import main\n"
        f"main(['checkpoint', 'convert', 'theirs', {str(tmp_path / 'ours')!r}, '--from', 'torch'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2
    what = "reading and writing checkpoints of other libraries needs drivetrain-convert, which is not installed"
    assert done.stderr == f"error: {what}. Run: {pip_line('convert')}\n"


def test_looking_imports_no_torch(saved):
    code = (
        "import sys\nfrom drivetrain.cli.main import drivetrain\n"
        f"drivetrain.main(['checkpoint', 'inspect', {str(saved[0])!r}], standalone_mode=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    assert "whole: " in done.stdout
    assert not any(line.rpartition("|")[2].strip() == "torch" for line in done.stderr.splitlines())
