"""Pictures that commands write, and that of ``drivetrain test --plot``: which samples a rank reads, what it holds."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from drivetrain import Accelerator
from drivetrain.api import UsageError
from drivetrain.api.programs import pictures
from drivetrain.cli.main import drivetrain
from drivetrain.cli.self_test import DEPTH, WIDTH, held_bytes, live_storages, read_samples
from drivetrain.cli.self_test_picture import COLOURS, OTHERS, RankReport, repeated, write
from drivetrain_testing import spawn

# Weights and biases of the model that is measured, in float32.
MODEL = 4 * DEPTH * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)


# ---- what every command checks --------------------------------------------------------------------------------------


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=re.escape("not installed. Type: pip install this. Or look.")):
        pictures.check(tmp_path / "a.png", "pip install this", "Or look.")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.txt", "'a.txt' has no suffix of a picture. Use .png or .svg."),
        ("a", "'a' has no suffix of a picture"),
        ("none/a.png", "'none/a.png' cannot be written: there is no folder 'none'. Make it"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_first(name, words, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(words)):
        pictures.check(Path(name), "")
    # Before a process is started, too.
    done = CliRunner().invoke(drivetrain, ["test", "--cpu", "--plot", name])
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)


def test_a_file_that_cannot_be_written_says_so(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UsageError, match=r"a\.png' cannot be written: Is a directory\. Name a file elsewhere"):
        pictures.save(pictures.figure(1, 1), tmp_path / "a.png")


# ---- what is collected on each rank ---------------------------------------------------------------------------------


def samples_on_rank(settings):
    accelerator = Accelerator(cpu=True, distributed_type="ddp")
    for key, value in settings.items():
        setattr(accelerator.dataloader_config, key, value)
    return read_samples(accelerator)


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        # Batches of four go to the ranks in turn; one sample is left, and rank 1 takes part with the first one.
        ({}, ([16], [0])),
        # Each batch of eight is cut in two.
        ({"split_batches": True}, ([16], [0])),
        ({"even_batches": False}, ([16],)),
    ],
    ids=["default", "split_batches", "not even"],
)
def test_the_samples_are_those_that_a_prepared_loader_gives(settings, last):
    pytest.importorskip("drivetrain_ddp")
    first, second = spawn(samples_on_rank, 2, settings)
    assert first[:2] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert second[:2] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert [*first[2:], *second[2:]] == list(last)


def bytes_on_rank(config):
    return held_bytes(Accelerator(cpu=True, config=config))


@pytest.mark.parametrize(
    ("backend", "share", "section"),
    [
        ("ddp", 1, ""),
        ("fsdp", 2, ""),
        pytest.param("megatron", 2, "megatron: {pipeline_parallel_size: 2}\n", marks=pytest.mark.slow, id="pipeline"),
    ],
)
def test_parts_of_a_model_are_counted_as_they_lie_on_a_rank(backend, share, section, tmp_path):
    pytest.importorskip(f"drivetrain_{backend}")
    (tmp_path / "c.yaml").write_text(f"distributed_type: {backend}\n{section}", encoding="utf-8")
    for held in spawn(bytes_on_rank, 2, tmp_path / "c.yaml"):
        assert held["parameters"] == pytest.approx(MODEL / share, rel=0.01)
        assert held["gradients"] == pytest.approx(MODEL / share, rel=0.01)
        assert held["optimizer states"] == pytest.approx(2 * MODEL / share, rel=0.01)
        # None of these keeps more than small buffers.
        assert held[OTHERS] < 0.05 * MODEL


def test_a_tensor_is_counted_once_however_many_look_at_it():
    whole = torch.zeros(10, 10)
    assert list(live_storages([whole, whole[0], whole.detach(), nn.Parameter(whole)]).values()) == [400]
    assert live_storages([torch.empty(5, device="meta"), torch.eye(3).to_sparse()]) == {}


# ---- the picture ----------------------------------------------------------------------------------------------------

HELD = {"parameters": 4e6, "gradients": 4e6, "optimizer states": 8e6, OTHERS: 0}


def test_what_was_read_before_is_found():
    batches = [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    reports = [RankReport(dp_rank, {}, batches[dp_rank], {}) for dp_rank in (0, 0, 1, 1)]
    assert repeated(reports) == [[[False, False], [False, True]]] * 2 + [[[False, False], [True, True]]] * 2


def test_bars_are_as_long_as_their_bytes(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.image import imread

    reports = [RankReport(rank, {}, [[rank]], HELD) for rank in (0, 1)]
    write(reports, tmp_path / "a.png", backend="ddp", settings=[])
    pixels = (imread(tmp_path / "a.png")[:, :, :3] * 255).round().astype(int)

    def area(colour):
        wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
        return int((abs(pixels - wanted).max(axis=2) <= 1).sum())

    # Twice as much, and the patches of the legend.
    optimizer, gradients = area(COLOURS["optimizer states"]), area(COLOURS["gradients"])
    assert optimizer / gradients == pytest.approx(2, rel=0.1)
    assert area(COLOURS["parameters"]) == pytest.approx(gradients, rel=0.05)


def test_parts_follow_each_other_in_the_row_of_their_rank():
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.figure import Figure

    from drivetrain.cli.self_test_picture import _draw_memory

    axes = Figure().add_subplot()
    half = {part: size / 2 for part, size in HELD.items()}
    _draw_memory(axes, [RankReport(0, {}, [], HELD), RankReport(1, {}, [], half)])
    bars = [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert bars == [(0, 0, 4), (0, 4, 4), (0, 8, 8), (1, 0, 2), (1, 2, 2), (1, 4, 4)]


def test_a_picture_names_ranks_batches_and_megabytes(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    import matplotlib as mpl

    places = [{"dp_shard": dp, "tp": tp} for dp in (0, 1) for tp in (0, 1)]
    batches = [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    reports = [RankReport(each["dp_shard"], each, batches[each["dp_shard"]], HELD) for each in places]
    with mpl.rc_context({"svg.fonttype": "none"}):
        write(reports, tmp_path / "a.svg", backend="megatron on 4 processes", settings=["split_batches"])
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for words in ("rank 3: dp_shard 1, tp 1", "16.0 MB", ": split_batches", "read once more", "megatron on 4"):
        assert words in text, words
    assert OTHERS.partition("'")[0] not in text


def test_buckets_of_a_fixed_size_leave_room_for_the_model(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        write([RankReport(0, {}, [[0]], {**HELD, OTHERS: 2e9})], tmp_path / "a.svg", backend="deepspeed", settings=[])
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "... 2000.0 MB ..." in text
    assert ">2016.0 MB<" in text
    # Sixteen megabytes of the model, and as much of a bar that is cut.
    assert ">30<" in text
    assert ">2000<" not in text


@pytest.mark.slow
def test_the_self_test_draws_its_ranks(drivetrain, tmp_path):
    pytest.importorskip("drivetrain_fsdp")
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    style = tmp_path / "matplotlibrc"
    style.write_text("svg.fonttype: none\n", encoding="utf-8")
    picture = tmp_path / "ranks.svg"
    run = partial(drivetrain, "test", "--cpu", "--num_processes", "2", "--distributed_type", "fsdp")
    done = run("--plot", picture, "--set", "dataloader.even_batches=false", MATPLOTLIBRC=str(style))
    assert done.returncode == 0, done.stderr
    assert f"Everything works. The picture: {picture}" in done.stdout
    text = picture.read_text(encoding="utf-8")
    # Parameters, gradients and twice as much of Adam's states, half of each.
    for words in ("rank 1: dp_shard 1", f"{4 * MODEL / 2 / 1e6:.1f} MB", "even_batches off", "fsdp on 2 process"):
        assert words in text, words
