from __future__ import annotations

import math
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from drivetrain.checkpoint import FileEntry, Naming, loader
from drivetrain.checkpoint.manifest import MANIFEST, Manifest, TensorEntry, stored_name
from drivetrain.checkpoint.saver import layout_of
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.tensors import Source, TensorFile, raw_bytes, write_tensors
from drivetrain.checkpoint.tree import Encoder, decode
from drivetrain.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

# ---- trees ----------------------------------------------------------------------------------------------------------

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.bfloat16])
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.none(), inner)
        | st.dictionaries(st.just("$"), inner)
    ),
    max_leaves=20,
)


@given(trees)
def test_a_tree_comes_back_as_it_was(tree):
    manifest = Manifest("B", {}, 1, 0.0, counters=Encoder().encode(tree, "x"))
    again = decode(Manifest.from_json(manifest.to_json(), "here").counters, {}.__getitem__)
    assert again == tree
    assert repr(again) == repr(tree), "1, 1.0 and True are told apart"


def test_tensors_and_numpy_values_come_back():
    encoder = Encoder()
    tree = {
        "a.b": torch.arange(3),
        "a": {"b": torch.ones(())},
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::-1],
        "scalar": np.float64(0.1),
        "nan": float("nan"),
        "device": torch.device("cpu"),
    }
    node = encoder.encode(tree, "x")
    again = decode(node, encoder.tensors.__getitem__)
    assert set(encoder.tensors) == {"x.a.b", "x.a.b#2", "x.array", "x.scalar"}
    assert torch.equal(again["a.b"], tree["a.b"])
    assert torch.equal(again["a"]["b"], tree["a"]["b"])
    assert again["array"].dtype == np.uint32
    assert (again["array"] == tree["array"]).all()
    assert again["scalar"] == tree["scalar"]
    assert type(again["scalar"]) is np.float64
    assert math.isnan(again["nan"])
    assert again["device"] == torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"f": len}, "x.f is of type builtin_function_or_method"),
        ({"s": [0, {1}]}, r"x.s\[1\] is of type set"),
        ({(1, 2): 3}, "a key of x is of type tuple"),
        ({"n": np.array(["a"])}, "x.n is of type numpy.ndarray of dtype <U1"),
        ({"t": torch.zeros(2).to_sparse()}, "x.t is of type torch.Tensor with layout torch.sparse_coo"),
        ({"p": os.terminal_size((1, 2))}, "x.p is of type os.terminal_size"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_with_its_path(value, words):
    with pytest.raises(CheckpointError, match=words):
        Encoder().encode(value, "x")


@pytest.mark.parametrize(
    "node",
    [
        {"$": "eval", "value": "1"},
        {"$": "dtype", "value": "load"},
        {"$": "bytes", "value": "!"},
        {"$": "tuple"},
        {"$": []},
    ],
)
def test_an_unknown_kind_is_corrupt(node):
    with pytest.raises(CheckpointCorruptError, match="makes no sense"):
        decode(node, {}.__getitem__)


# ---- names ----------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["model", "optim"]), st.text(min_size=1), st.integers(0, 12), st.integers(0, 12))
def test_a_stored_name_belongs_to_one_trainable(kind, rest, index, other):
    name = stored_name(f"{kind}.{rest}", index)
    manifest = Manifest("single", {}, 1, 0.0, tensors={name: TensorEntry("float32", (), ())})
    assert list(manifest.specs(index)) == [f"{kind}.{rest}"]
    assert (not manifest.specs(other)) == (other != index)


def test_a_name_of_neither_kind_is_refused():
    with pytest.raises(CheckpointError, match=r"names a tensor 'weights.x'"):
        stored_name("weights.x", 0)


# ---- tensor files ---------------------------------------------------------------------------------------------------

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=6),
    st.data(),
)
def test_any_dtype_shape_and_box_is_read_as_it_was_written(tmp_path_factory, specs, data):
    path = tmp_path_factory.mktemp("file") / "one.safetensors"
    tensors = {}
    for number, (dtype, shape, transposed) in enumerate(specs):
        tensor = (torch.rand(shape) * 4).to(dtype)
        tensors[f"t{number}"] = tensor.mT if transposed and tensor.ndim >= 2 else tensor
    entry = write_tensors(path, [Source.of(name, tensor) for name, tensor in tensors.items()], {"format": "pt"})
    assert entry.size == path.stat().st_size
    file = TensorFile(path)
    assert file.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        start = [data.draw(st.integers(0, max(size - 1, 0))) for size in tensor.shape]
        box = [slice(low, data.draw(st.integers(low, size))) for low, size in zip(start, tensor.shape, strict=True)]
        whole, part = file.read(name, tensor.dtype, tensor.shape), file.read(name, tensor.dtype, tensor.shape, box)
        assert bits(whole) == bits(tensor)
        assert bits(part) == bits(tensor[tuple(box)])


def bits(tensor):
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.clone(memory_format=torch.contiguous_format).reshape(-1)
    return tuple(tensor.shape), tensor.dtype, bytes(flat.view(torch.uint8).numpy())


def test_the_library_reads_what_we_write(tmp_path):
    from safetensors.torch import load_file

    tensors = {"odd": torch.ones(3, dtype=torch.bool), "a": torch.rand(2, 3), "zero": torch.tensor(7)}
    write_tensors(tmp_path / "x", [Source.of(name, tensor) for name, tensor in tensors.items()])
    again = load_file(tmp_path / "x")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


# ---- folders and numbers --------------------------------------------------------------------------------------------


def complete(path, iteration=None, created=0.0):
    path.mkdir(parents=True)
    info = {} if iteration is None else {"iteration": iteration}
    (path / MANIFEST).write_text(Manifest("B", {}, 1, created, info=info).to_json())
    return path


def test_latest_has_the_highest_number_of_the_complete_ones(tmp_path):
    complete(tmp_path / "checkpoint_1", 1, created=3.0)
    newest = complete(tmp_path / "checkpoint_10", 10, created=1.0)
    complete(tmp_path / "checkpoint_9", 9, created=2.0)
    complete(tmp_path / "best", 11)
    complete(tmp_path / "checkpoint_12_copy", 12)
    (tmp_path / "checkpoint_13").mkdir()
    (tmp_path / "checkpoint_14").write_text("a file")
    (tmp_path / "checkpoint_15").mkdir()
    (tmp_path / "checkpoint_15" / MANIFEST).write_text("{}")
    assert Naming(tmp_path).latest() == newest
    assert [one.number for one in Naming(tmp_path).complete()] == [1, 9, 10]


def test_no_checkpoint_is_said(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="holds no complete checkpoint"):
        Naming(tmp_path / "none").latest()


def test_only_the_oldest_complete_ones_beyond_the_limit_are_deleted(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "checkpoint_0").mkdir()
    (tmp_path / "checkpoint_0" / "mine.txt").write_text("not a checkpoint")
    for number in range(1, 5):
        complete(tmp_path / f"checkpoint_{number}", number)
    naming = Naming(tmp_path, total_limit=2, iteration=4)
    assert naming.prune(tmp_path / "checkpoint_4") == [tmp_path / "checkpoint_1", tmp_path / "checkpoint_2"]
    assert {path.name for path in tmp_path.iterdir()} == {"best", "checkpoint_0", "checkpoint_3", "checkpoint_4"}


def test_numbers_go_on_after_a_resume_and_never_meet_another_runs(tmp_path):
    for number in range(4):
        complete(tmp_path / f"checkpoint_{number}", number)
    naming = Naming(tmp_path)
    assert naming.resumed(Manifest("B", {}, 1, 0.0, info={"iteration": 1})) == 4
    assert naming.claim_next() == 4


def test_a_limit_of_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="at least 1"):
        Naming(tmp_path, total_limit=0)


def test_staging_refuses_a_file_and_another_programs_manifest(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file is a file\. Give a folder; it is made when it does not exist"):
        LocalStorage().stage(tmp_path / "file")
    staging = LocalStorage().stage(tmp_path / "folder")
    assert staging.target == tmp_path / "folder"
    LocalStorage().abandon(staging)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / MANIFEST).write_text('{"name": "a web app"}')
    with pytest.raises(CheckpointError, match="it would be overwritten"):
        LocalStorage().stage(tmp_path / "app")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app", "file"]


def test_sweeping_spares_the_living_and_other_machines(tmp_path):
    mine = LocalStorage().stage(tmp_path / "x").folder
    dead = mine.with_name(mine.name.replace(f"-{os.getpid()}-", "-999999999-"))
    host = mine.name.split("-")[1]
    elsewhere = dead.with_name(dead.name.replace(host, "00000000"))
    dead.mkdir()
    elsewhere.mkdir()
    LocalStorage().sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, elsewhere}


def test_discarding_leaves_nothing(tmp_path):
    LocalStorage().discard(complete(tmp_path / "checkpoint_1"))
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_read_without_torch():
    import subprocess
    import sys

    code = (
        "import sys, drivetrain.checkpoint as c; c.read_manifest, c.Naming, c.inspect; "
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path.home())


def test_each_file_is_checked_by_one_rank_and_no_rank_gets_all_large_ones(tmp_path, monkeypatch):
    generator, sizes = random.Random(0), (0, 1, 5, 5, 9, 100)
    files = {f"file{index}": FileEntry(generator.choice(sizes), 0) for index in range(50)}
    manifest = Manifest("B", {}, 1, 0.0, files=files)
    for world in (1, 3, 16):
        checked = [[] for _ in range(world)]
        for rank in range(world):
            monkeypatch.setattr(loader, "check_file", lambda folder, name, _, mine=checked[rank]: mine.append(name))
            loader._check_share(tmp_path, manifest, SimpleNamespace(rank=rank, world_size=world))
        assert sorted(name for names in checked for name in names) == sorted(files)
        loads = [sum(files[name].size for name in names) for names in checked]
        assert max(loads) - min(loads) <= max(sizes)


def test_one_element_out_of_a_strided_tensor_is_written():
    element = torch.arange(8, dtype=torch.int16)[::2][1:2]
    assert element.is_contiguous()
    assert element.stride(0) == 2
    assert bytes(raw_bytes(element)) == b"\x02\x00"


class Cut:
    """A tensor that is cut in an engine's own way: torch asks it for its chunks."""

    dtype, shape = torch.float32, torch.Size((4,))

    def __init__(self, offset):
        self.offset = offset

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size((self.offset,)), torch.Size((2,)))]


def test_a_layout_tells_where_the_parts_of_a_tensor_lie():
    tensors = {"whole": torch.zeros(4), "cut": Cut(0)}
    assert layout_of(tensors) == layout_of({"whole": torch.ones(4), "cut": Cut(0)})
    assert layout_of(tensors) != layout_of({"whole": torch.zeros(4), "cut": Cut(2)})
    assert layout_of(tensors) != layout_of({"whole": torch.zeros(4), "cut": torch.zeros(4)})


def test_a_tensor_that_is_resized_while_it_is_saved_is_refused_and_saved_afterwards(tmp_path):
    grown = torch.ones(4)

    def grow():
        grown.resize_(8)
        return torch.zeros(2)

    sources = [Source("lazy", torch.float32, (2,), grow), Source.of("grown", grown)]
    with pytest.raises(CheckpointError, match=r"grown changed its size while it was being saved\. Save when"):
        write_tensors(tmp_path / "during", sources)
    write_tensors(tmp_path / "after", [Source.of("grown", grown.zero_())])
    assert torch.equal(load_file(tmp_path / "after")["grown"], torch.zeros(8))
