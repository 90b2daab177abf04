"""Checkpoints on remote storages by fsspec: its memory, an object store by HTTP, and S3 with s3fs and moto."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

import object_store
import pytest
import remote_jobs
import torch
from click.testing import CliRunner
from fsspec.registry import known_implementations
from safetensors.torch import load_file

from drivetrain.checkpoint import (
    Naming,
    Source,
    TensorFile,
    export_model,
    folder_of,
    inspect,
    read_manifest,
    storage_of,
    write_tensors,
)
from drivetrain.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from drivetrain.checkpoint.storage import RemoteStorage
from drivetrain.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from drivetrain_testing import spawn


@pytest.fixture
def store():
    with object_store.serving() as server:
        yield server


def s3():
    """A real S3 server in threads of this process, and a bucket in it."""
    reason = "s3fs and moto need botocore, which needs python-dateutil<3, and locks/dev.txt holds 4"
    file_system = pytest.importorskip("s3fs", reason=reason).S3FileSystem
    server = pytest.importorskip("moto.server", reason=reason).ThreadedMotoServer(port=0)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    settings = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(name, value)
        urlopen(Request(f"{address}/moto-api/reset", method="POST")).close()
        urlopen(Request(f"{address}/bucket", method="PUT")).close()
        file_system.clear_instance_cache()  # One of this process would ask the server of the test before.
        yield
    server.stop()


@pytest.fixture(params=["bucket", "s3"])
def scheme(request):
    """A storage that processes share."""
    with contextlib.contextmanager(s3)() if request.param == "s3" else object_store.serving():
        yield request.param


def manifest(staging, text=b"abc", **info):
    """Write one file into the data folder; a manifest that names it."""
    with (staging.data / "file").open("xb") as file:
        file.write(text)
    return Manifest("B", {}, 1, 0.0, info=info, files={f"{staging.data.name}/file": FileEntry(3, 891568578)})


def saved(folder, **info):
    storage = storage_of(folder)
    staging = storage.stage(folder)
    storage.commit(staging, manifest(staging, **info))
    return staging


# ---- Whole runs


@pytest.mark.parametrize("blocking", [True, False])
def test_a_run_is_named_pruned_and_taken_up_in_the_memory_of_fsspec(blocking):
    ((paths, seen, loaded, restored, again),) = spawn(remote_jobs.named_job, 1, "memory://bucket/run/", blocking)
    assert paths == [f"memory://bucket/run/checkpoints/checkpoint_{number}" for number in range(4)]
    assert seen[0] == ["checkpoint_0"]
    assert seen[3] == ["checkpoint_2", "checkpoint_3"]
    assert loaded == paths[-1]
    assert restored
    assert again.endswith("checkpoint_4")


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.gate("bucket-True", "s3-False")
def test_a_run_of_several_processes_is_named_pruned_and_taken_up(scheme, blocking):
    for paths, seen, loaded, restored, _ in spawn(remote_jobs.named_job, 2, f"{scheme}://bucket/run", blocking):
        assert seen == [
            ["checkpoint_0"],
            ["checkpoint_0", "checkpoint_1"],
            ["checkpoint_1", "checkpoint_2"],
            ["checkpoint_2", "checkpoint_3"],
        ]
        assert loaded == paths[-1] == f"{scheme}://bucket/run/checkpoints/checkpoint_3"
        assert restored


@pytest.mark.parametrize(
    ("writer", "reader"), [(("sharded", 2), ("replicated", 3)), (("replicated", 2), ("sharded", 3))]
)
@pytest.mark.gate("bucket-writer0-*", "s3-writer1-*")
def test_what_was_saved_comes_back_under_another_layout_and_world_size(scheme, writer, reader):
    url = f"{scheme}://bucket/ckpt"
    at_save, losses = spawn(remote_jobs.save_job, writer[1], url, writer[0])[0]
    assert inspect(url).problems == ()
    for loaded, continued, custom, counters, _, _ in spawn(remote_jobs.load_job, reader[1], url, reader[0]):
        assert loaded.keys() == at_save.keys()
        for name, value in at_save.items():
            assert torch.equal(loaded[name], value), name
        # float32; the order of sums differs between layouts.
        assert continued == pytest.approx(losses, abs=1e-6)
        assert custom["seen"] == 3
        assert counters == {"step": 3}


def test_a_copy_of_a_remote_checkpoint_is_a_local_one_and_the_other_way(store, tmp_path):
    at_save, _ = spawn(remote_jobs.save_job, 2, "bucket://bucket/ckpt", "sharded")[0]
    for name in store.names("bucket/ckpt/"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.objects[name])
    loaded = spawn(remote_jobs.load_job, 1, tmp_path / "bucket" / "ckpt", "replicated")[0][0]
    assert all(torch.equal(loaded[name], value) for name, value in at_save.items())
    spawn(remote_jobs.save_job, 1, f"file://{tmp_path}/local", "replicated")
    assert inspect(tmp_path / "local").problems == (), "file:// is the local folder"
    for path in (tmp_path / "local").rglob("*"):
        if path.is_file():
            store.objects[f"bucket/copy/{path.relative_to(tmp_path / 'local')}"] = path.read_bytes()
    assert len(spawn(remote_jobs.load_job, 2, "bucket://bucket/copy", "sharded")) == 2


def test_hooks_write_into_a_local_folder_that_is_sent_and_read_what_was_sent(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spawn(remote_jobs.hooks_job, 2, "bucket://bucket/ckpt")
    assert {"bucket/ckpt/adapter-0.txt", "bucket/ckpt/adapter-1.txt"} <= set(store.names())
    assert store.objects["bucket/ckpt/adapter-1.txt"] == b"mine"
    assert spawn(remote_jobs.hooks_loading_job, 1, "bucket://bucket/ckpt") == [["adapter-0.txt", "adapter-1.txt"]]
    assert list(tmp_path.glob("drivetrain-hooks-*")) == []


def test_an_interrupted_run_saves_itself_there_and_trackers_want_a_local_folder():
    ((where, logs, text),) = spawn(remote_jobs.interrupted_job, 1, "memory://bucket/run")
    assert where == "memory://bucket/run/interrupted"
    assert logs is None
    assert "Pass a local project_dir" in text


LAST_LINE = """
import sys, background_jobs, object_store
accelerator, *_ = background_jobs.run()
accelerator.save_state(sys.argv[1], blocking=False)
"""


@pytest.mark.gate("s3")
def test_a_script_that_ends_with_a_save_ends_after_it(scheme):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LAST_LINE, f"{scheme}://bucket/last"]
    subprocess.run(command, check=True, env=environment, timeout=100)
    assert inspect(f"{scheme}://bucket/last").problems == ()


# ---- Whole or not at all


@pytest.mark.parametrize("part", [MANIFEST, "rng-00000", "tensors-00001"])
@pytest.mark.gate("manifest.json", "tensors-*")
def test_a_save_that_fails_leaves_nothing_and_the_checkpoint_before_stays(store, part):
    store.refuses = lambda method, name: method == "PUT" and part in name
    for text in spawn(remote_jobs.refused_job, 2, "bucket://bucket/ckpt"):
        assert "503" in text
    assert store.names() == []
    store.refuses = lambda method, name: False
    before = spawn(remote_jobs.save_job, 2, "bucket://bucket/ckpt", "sharded")[0][0]
    names = store.names()
    store.refuses = lambda method, name: method == "PUT" and part in name
    assert all(spawn(remote_jobs.refused_job, 2, "bucket://bucket/ckpt"))
    assert store.names() == names
    loaded = spawn(remote_jobs.load_job, 2, "bucket://bucket/ckpt", "sharded")[0][0]
    assert all(torch.equal(loaded[name], value) for name, value in before.items())


def test_the_manifest_is_the_last_object_and_what_has_none_is_no_checkpoint(store):
    spawn(remote_jobs.save_job, 2, "bucket://bucket/run/checkpoint_0", "sharded")
    written = [name for method, name, _ in store.requests if method == "PUT"]
    assert written[-1].endswith(MANIFEST)
    assert sum(name.endswith(MANIFEST) for name in written) == 1
    body = {name.replace("checkpoint_0", "checkpoint_1"): data for name, data in store.objects.items()}
    store.objects.update({name: data for name, data in body.items() if not name.endswith(MANIFEST)})
    assert Naming("bucket://bucket/run").latest().name == "checkpoint_0"
    with pytest.raises(CheckpointNotFoundError, match="bucket://bucket/run/checkpoint_1 holds no complete checkpoint"):
        read_manifest("bucket://bucket/run/checkpoint_1")
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint at bucket://bucket/nowhere"):
        read_manifest("bucket://bucket/nowhere")


def test_an_older_checkpoint_is_replaced_by_the_manifest_and_its_files_go_after_it(store):
    folder = folder_of("bucket://bucket/last")
    saved(folder, number=1)
    storage = storage_of(folder)
    staging = storage.stage(folder)
    after = manifest(staging, number=2)
    assert inspect(folder).manifest.info == {"number": 1}
    assert len(folder.subfolders()) == 2
    storage.commit(staging, after)
    assert inspect(folder).manifest.info == {"number": 2}
    assert [each.name for each in folder.subfolders()] == [staging.data.name]


def test_a_manifest_that_arrives_while_its_answer_is_lost_keeps_its_files(store):
    store.loses = lambda method, name: method == "PUT" and name.endswith(MANIFEST)
    (text,) = spawn(remote_jobs.refused_job, 1, "bucket://bucket/ckpt")
    assert "503" in text
    assert inspect("bucket://bucket/ckpt").problems == ()


def test_of_two_runs_in_one_folder_the_second_to_complete_is_refused(store):
    folder = folder_of("bucket://bucket/run/checkpoint_7")
    storage = storage_of(folder)
    first = storage.stage(folder)
    mine = manifest(first, run="one")
    second = replace(first, data=folder / "data-0123456789ab")
    storage.commit(second, manifest(second, run="two"))
    with pytest.raises(CheckpointError, match="another run has saved at bucket://bucket/run/checkpoint_7 since"):
        storage.commit(first, mine)
    assert inspect(folder).manifest.info == {"run": "two"}
    assert inspect(folder).problems == ()


def test_another_programs_manifest_is_not_replaced(store):
    store.objects["bucket/theirs/manifest.json"] = b'{"name": "another program"}'
    with pytest.raises(CheckpointError, match="it would be overwritten"):
        RemoteStorage().stage(folder_of("bucket://bucket/theirs"))
    assert store.names() == ["bucket/theirs/manifest.json"]


def test_a_storage_that_does_not_answer_makes_no_older_checkpoint_the_newest_and_deletes_nothing(store):
    naming = Naming("bucket://bucket/run", total_limit=1, run="mine")
    for number in range(3):
        saved(folder_of(f"bucket://bucket/run/checkpoint_{number}"), run="mine")
    names = store.names()
    store.refuses = lambda method, name: method == "GET" and "checkpoint_1" in name
    with pytest.raises(CheckpointError, match="503"):
        naming.prune(folder_of("bucket://bucket/run/checkpoint_2"))
    assert store.names() == names
    store.refuses = lambda method, name: method == "GET" and "checkpoint_2" in name
    with pytest.raises(CheckpointError, match="503"):
        naming.latest()
    store.refuses = lambda method, name: method in ("HEAD", "POST")
    with pytest.raises(OSError, match="503"):
        naming.latest()


def test_a_limit_removes_this_runs_and_what_interrupted_saves_left_and_nothing_else(store):
    for number, run in enumerate(["other", "mine", "mine", "mine"]):
        saved(folder_of(f"bucket://bucket/run/checkpoint_{number}"), run=run)
    for left in ("checkpoint_5/data-0123456789ab/file", "checkpoint_9/data-0123456789ab/file", "notes.txt"):
        store.objects[f"bucket/run/{left}"] = b"abc"
    saved(folder_of("bucket://bucket/run/checkpoint_6"), run="mine")
    naming = Naming("bucket://bucket/run", total_limit=2, run="mine")
    removed = naming.prune(folder_of("bucket://bucket/run/checkpoint_6"))
    assert [each.name for each in removed] == ["checkpoint_1", "checkpoint_2"]
    left = [each.name for each in folder_of("bucket://bucket/run").subfolders()]
    assert left == ["checkpoint_0", "checkpoint_3", "checkpoint_6", "checkpoint_9"]
    assert "bucket/run/notes.txt" in store.objects
    assert naming.claim_next() == 10
    assert naming.latest().name == "checkpoint_6"


# ---- Files


def test_a_remote_file_gives_every_box_of_every_dtype_as_a_local_one_does(store, tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "words": torch.randn(6, 5, 3, generator=generator),
        "half": torch.randn(4, 4, generator=generator).to(torch.bfloat16),
        "complex": torch.randn(4, 2, dtype=torch.complex64, generator=generator),
        "flags": torch.tensor([True, False, True]),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
    }
    sources = [Source.of(name, tensor) for name, tensor in tensors.items()]
    remote = folder_of("bucket://bucket/file.safetensors")
    assert write_tensors(remote, sources, {"a": "b"}) == write_tensors(tmp_path / "file", sources, {"a": "b"})
    assert store.objects["bucket/file.safetensors"] == (tmp_path / "file").read_bytes()
    here, there = TensorFile(tmp_path / "file"), TensorFile(remote)
    assert there.metadata == {"a": "b"}
    assert there.sources().keys() == here.sources().keys()
    for name, tensor in tensors.items():
        boxes = [None, [slice(0, size) for size in tensor.shape]]
        boxes += [[slice(size // 3, size // 2 + 1) for size in tensor.shape]]
        boxes += [[slice(0, size // 2) for size in tensor.shape], [slice(1, 1) for _ in tensor.shape]]
        for box in boxes if 0 not in tensor.shape else boxes[:2]:
            expected = here.read(name, tensor.dtype, tensor.shape, box)
            assert torch.equal(there.read(name, tensor.dtype, tensor.shape, box), expected), (name, box)
    with pytest.raises(CheckpointCorruptError, match="is F32"):
        there.check("words", torch.float16, (6, 5, 3))
    with pytest.raises(CheckpointCorruptError, match="holds no nothing"):
        there.check("nothing", torch.float16, ())


def test_a_rank_reads_the_header_and_its_rows_only(store):
    remote = folder_of("bucket://bucket/file.safetensors")
    write_tensors(remote, [Source.of("large", torch.arange(1 << 20).reshape(1 << 10, 1 << 10))])
    rows = TensorFile(remote).read("large", torch.int64, (1 << 10, 1 << 10), [slice(512, 520), slice(0, 1 << 10)])
    assert rows[0, 0] == 512 << 10
    header, asked = 256 << 10, 8 * (1 << 10) * 8
    assert store.bytes_read() <= header + asked


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", (60).to_bytes(8, "little") + b'{"a": {"dtype": "F32"}}'.ljust(60)],
)
def test_a_remote_file_that_is_none_of_ours_is_named(store, data):
    store.objects["bucket/ckpt/file"] = data
    with pytest.raises(CheckpointCorruptError, match="file cannot be read as safetensors"):
        TensorFile(folder_of("bucket://bucket/ckpt/file"))


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_damage_is_found_before_anything_is_changed(store, damage):
    spawn(remote_jobs.save_job, 1, "bucket://bucket/ckpt", "replicated")
    (name,) = (each for each in store.names() if "/tensors-" in each)
    data = store.objects.pop(name)
    if damage != "missing":
        store.objects[name] = data[:-1] + (b"" if damage == "truncated" else bytes([data[-1] ^ 1]))
    ((kind, text),) = spawn(remote_jobs.load_warnings_job, 1, "bucket://bucket/ckpt")
    assert kind == "CheckpointCorruptError"
    assert Path(name).name in text


# ---- Paths and addresses


def test_paths_and_addresses_name_the_folders_that_they_say(tmp_path):
    assert folder_of(tmp_path) == folder_of(str(tmp_path)) == folder_of(f"file://{tmp_path}") == tmp_path
    assert folder_of("runs/one") == Path("runs/one")
    remote = folder_of("s3://bucket/run/")
    assert str(remote) == "s3://bucket/run"
    assert remote == folder_of(remote) == folder_of("s3://bucket") / "run"
    assert (remote.name, str(remote.parent), remote.parent.parent) == ("run", "s3://bucket", remote.parent)
    with pytest.raises(CheckpointError, match='Pass text: "s3://bucket/run"'):
        folder_of(Path("s3://bucket/run"))
    with pytest.raises(CheckpointError, match="Write the last part only: s3://bucket/run"):
        folder_of("simplecache::s3://bucket/run")


def test_a_scheme_whose_file_system_is_not_installed_says_what_to_install(monkeypatch):
    known = {"class": "absent_package.FileSystem", "err": "Install absent_package to access it"}
    monkeypatch.setitem(known_implementations, "absent", known)
    with pytest.raises(CheckpointError, match=r"Install absent_package .*Type: pip install absent_package"):
        read_manifest("absent://bucket/run")
    with pytest.raises(CheckpointError, match=r"Protocol not known: nosuch .*pip install the package that brings"):
        read_manifest("nosuch://bucket/run")
    texts = spawn(remote_jobs.refused_job, 2, "nosuch://bucket/run")
    assert texts[0] == texts[1]
    assert "nosuch:// cannot be reached" in texts[0]


def test_what_writes_by_other_means_wants_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="a model is written into a folder of this machine, and s3://bucket/m is"):
        export_model(iter([("a", torch.ones(1))]), "s3://bucket/m")
    assert list(tmp_path.iterdir()) == []


def test_the_commands_look_into_a_remote_checkpoint(store, tmp_path):
    from drivetrain.cli.checkpoint import checkpoint

    at_save, _ = spawn(remote_jobs.save_job, 2, "bucket://bucket/ckpt", "sharded")[0]
    done = CliRunner().invoke(checkpoint, ["inspect", "bucket://bucket/ckpt"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("bucket://bucket/ckpt\n")
    assert "whole: " in done.output
    done = CliRunner().invoke(checkpoint, ["export", "bucket://bucket/ckpt", str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(weights["body.weight"], at_save["body.weight"])
    (name,) = (each for each in store.names() if "tensors-00001" in each)
    del store.objects[name]
    done = CliRunner().invoke(checkpoint, ["inspect", "bucket://bucket/ckpt"])
    assert done.exit_code == 1
    assert "is missing" in done.output
