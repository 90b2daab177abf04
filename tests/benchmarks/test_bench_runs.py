"""`make bench` in small: it runs and prints a table. How fast anything is, is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_testing import spawn

# Programs beside the library.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_what_was_measured_is_kept_when_a_later_part_fails(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import measure
        from benchmarks.pairs import Samples
        from benchmarks.report import Section
    finally:
        sys.path.remove(str(ROOT))
    times = {name: Samples([], [1.0]) for name in ("bare torch", "drivetrain")}

    def fails(quick):
        yield Section("The first", "wall", "ms", "step", times)
        raise MemoryError

    monkeypatch.setattr(measure, "measure_gpu", fails)
    monkeypatch.setattr(measure, "used_by_others", lambda: 0.0)
    written = [tmp_path / "rows.json", tmp_path / "tables.md"]
    with pytest.raises(MemoryError):
        measure.main(["gpu", "--json", str(written[0]), "--markdown", str(written[1])])
    assert all("The first" in each.read_text() for each in written)


@pytest.mark.slow
@pytest.mark.timeout(920)
def test_a_quick_run_prints_a_table_of_every_group(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick", "--here"]
    written = [tmp_path / "rows.json", tmp_path / "tables.md"]
    options = ["--json", str(written[0]), "--markdown", str(written[1])]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    sections = json.loads(written[0].read_text())["sections"]
    titles = [section["title"] for section in sections]
    zero = ("deepspeed, training", "deepspeed, prepare", "deepspeed, save_state", "deepspeed, ZeRO-3 with CPU offload")
    words = ("Training step", "Loading", "gather_for_metrics", "save_state", "load_state", "--help", "Import")
    for word in (
        *words,
        "Step with a watchdog",
        "fsdp, training",
        "fsdp, save_state",
        "waits for a save",
        "memory",
        "megatron, training",
        "megatron_core, training",
        "Pipeline",
        "Llama",
        *zero,
    ):
        assert any(word in title for title in titles), f"{word} is not among {titles}"
    for section in sections:
        ours = [row for row in section["rows"] if "drivetrain" in row["name"]]
        skipped = [remark for remark in section["remarks"] if remark.startswith("skipped: ")]
        assert bool(ours) != bool(skipped), section["title"]
        assert section["title"] in done.stdout
        assert section["title"] in written[1].read_text()


def test_the_model_of_the_gpu_group_trains_in_small_on_a_cpu():
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import llama
    finally:
        sys.path.remove(str(ROOT))
    samples, meaning = spawn(llama.measure, 1, llama.SMALL, "cpu", 1, 2, timeout=180)[0]
    assert set(samples) == {"bare torch", "drivetrain", "bare torch again"}
    assert sum("tokens/s" in line for line in meaning) == 3


def test_the_offloaded_model_of_the_gpu_group_trains_in_small_on_a_cpu():
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import llama, zero_offload
    finally:
        sys.path.remove(str(ROOT))
    samples, meaning = spawn(zero_offload.measure, 1, llama.SMALL, "cpu", 1, 2, timeout=100)[0]
    assert set(samples) == {"bare DeepSpeed", "drivetrain", "bare DeepSpeed again"}
    assert sum("tokens/s" in line for line in meaning) == 3


def losses_in_turn(contenders, case):
    """Of three steps of each, in one group of ranks, as they are measured."""
    from benchmarks import megatron_core as core

    found = []
    for name in contenders:
        found.append(core.losses(name, case, 3))
        core.peers.begin = lambda: None  # The ranks have met.
    return found


def test_the_contenders_of_the_llama_train_alike():
    pytest.importorskip("megatron.core", reason="needs drivetrain-megatron[core]")
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import megatron_core as core
        from benchmarks.measure import LLAMA_SMALL
    finally:
        sys.path.remove(str(ROOT))
    alone = spawn(core.losses, 1, core.SINGLE, core.LlamaCase(**LLAMA_SMALL), 3, timeout=100)[0]
    assert len(set(alone)) == 3, "it trains"
    for axis in ("tp", "pp"):
        contenders = (core.BARE, core.OURS, core.TORCH)
        # The last rank is the one whose stage knows the loss.
        found = spawn(losses_in_turn, 2, contenders, core.LlamaCase(axis, **LLAMA_SMALL), timeout=300)[-1]
        for name, each in zip(contenders, found, strict=True):
            # Float32, in another order: the seventh digit.
            assert each == pytest.approx(alone, rel=1e-6), (axis, name)


def test_a_group_that_does_not_exist_is_named():
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--here", "stepz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2
    assert "stepz" in done.stderr
    assert "steps" in done.stderr
