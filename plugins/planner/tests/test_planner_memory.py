"""What the planner says that a rank holds, against what it is seen to hold: real ranks, every storage counted.

The engines' own buffers are replayed from their sources, so the two agree to a few bytes wherever torch's kernels need
no workspace that a dispatch mode does not see. The tolerance leaves room for what changes with the
smallest version of torch; with torch 2.13 the largest error without a pipeline is 0.1 %, and with one 2.1 %.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_grid import ZERO, Combination, combinations, estimates_of
from planner_jobs import censused, censused_on_device, copied, counted

_MEGATRON = [each for each in combinations() if each.title.startswith(("tp", "pp"))]
_EACH = list({(each.title, each.precision): each for each in _MEGATRON}.values())
_OFFLOADED = [each for each in combinations() if "offload" in each.title]
PART = [*[each for each in combinations() if each not in _MEGATRON + _OFFLOADED][3::4], *_EACH, *_OFFLOADED]
"""``make test-all`` runs a third of them by turns, ``planner_grid.py --all`` every combination; the record that the
documents show is of those."""


def test_the_part_has_every_model_and_layout():
    for name in ("model", "title", "ranks", "precision", "windows"):
        assert {getattr(each, name) for each in PART} == {getattr(each, name) for each in combinations()}


def check(model, title, ranks, *, measure=censused, tolerance=0.01, **given):
    one = Combination(model, title, ranks, **given)
    estimate = one.estimate()
    assert not estimate.refused, estimate.refused
    seen = one.count(estimate, measure)
    assert abs(estimate.peak / seen - 1) <= tolerance, (estimate.peak, seen, estimate.memory, estimate.moment)


# On one process alone: what gloo's threads free, the profiler does not see freed, and the sum grows by a bucket where
# they are late.
@pytest.mark.parametrize(
    "model", ["gpt2", pytest.param("vit", marks=pytest.mark.slow), pytest.param("resnet", marks=pytest.mark.slow)]
)
def test_one_process_by_torchs_own_allocator(model):
    check(model, "single", 1, measure=counted, tolerance=0.01)


@pytest.mark.parametrize(
    ("title", "ranks"),
    [
        *[("ddp", 3), ("fsdp", 3), ("fsdp, recompute", 2), ("zero 2", 2), ("tp 2", 2)],
        ("pp 2, 1f1b, 4 micro-batches", 2),
    ],
)
@pytest.mark.gate("fsdp-3")
def test_gpt2_under_each_backend(title, ranks):
    check("gpt2", title, ranks, tolerance=0.005, windows=2 if title.startswith(("tp", "pp")) else 1)


@pytest.mark.slow
def test_stages_of_layers_that_are_cut():
    check("gpt2", "tp 2 x pp 2, 1f1b, 4 micro-batches", 4)


@pytest.mark.parametrize("title", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_windows_keep_whole_gradients(title):
    check("gpt2", title, 2, windows=2, tolerance=0.005)


@pytest.mark.slow
def test_bf16():
    check("llama", "fsdp", 2, precision="bf16", tolerance=0.005)


@pytest.mark.parametrize(
    ("model", "precision", "windows"),
    [
        ("gpt2", "no", 1),
        pytest.param("llama", "bf16", 2, marks=pytest.mark.slow),
        pytest.param("resnet", "no", 1, marks=pytest.mark.slow),
    ],
)
def test_what_stays_on_the_device_under_offload(monkeypatch, model, precision, windows):
    """Ranks on the CPU that make the copies which an accelerator would make; gloo makes one of each message besides."""
    one = Combination(model, "fsdp, offload", 2, precision=precision, windows=windows)
    request = one.request()
    together = estimates_of(request, one.title)
    estimate = estimates_of(replace(request, device_type="cuda"), one.title)
    monkeypatch.setattr("drivetrain_fsdp.estimates._Layout.apart", True)
    with_copies = estimates_of(request, one.title)
    seen = one.count(with_copies, censused_on_device)
    told = (with_copies.peak, seen, with_copies.memory, with_copies.moment)
    assert abs(with_copies.peak / seen - 1) <= 0.01, told
    assert estimate.peak <= with_copies.peak
    # What is there no more is with the host.
    assert estimate.host["parameters"] == together.resident["parameters"]
    assert estimate.host["optimizer states"] == together.resident["optimizer states"]
    assert estimate.peak < together.peak


@pytest.mark.parametrize(
    ("title", "model", "precision", "windows", "ranks"),
    [
        ("zero 2, offload", "gpt2", "no", 1, 2),
        pytest.param("zero 1, offload", "llama", "no", 2, 3, marks=pytest.mark.slow),
        pytest.param("zero 2, offload", "llama", "bf16", 2, 3, marks=pytest.mark.slow),
        pytest.param("zero 3, offload", "gpt2", "no", 2, 2, marks=pytest.mark.slow),
        pytest.param("zero 3, offload", "gpt2", "no", 1, 1, marks=pytest.mark.slow),
        pytest.param("zero 3, offload of parameters too", "gpt2", "no", 1, 3, marks=pytest.mark.slow),
        pytest.param("zero 3, offload of parameters too", "llama", "bf16", 2, 3, marks=pytest.mark.slow),
        pytest.param("zero 3, offload of parameters too", "resnet", "no", 1, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.turns(2)
def test_what_stays_on_the_device_under_offload_of_zero(monkeypatch, title, model, precision, windows, ranks):
    """Ranks on the CPU, of whose storages those are left out that the engine makes in host memory."""
    one = Combination(model, title, ranks, precision=precision, windows=windows)
    request = one.request()
    together = estimates_of(request, title)
    monkeypatch.setattr("drivetrain_deepspeed.estimates._Layout.apart", True)
    apart = estimates_of(request, title)
    counts = one.counts(apart, censused_on_device)
    seen, host = (max(each[key] for each in counts) for key in ("most", "host"))
    assert abs(apart.peak / seen - 1) <= 0.01, (apart.peak, seen, apart.memory, apart.moment)
    assert abs(sum(apart.host.values()) / host - 1) <= 0.01, (apart.host, host)
    # What is there no more is with the host, and the rest is where it was; gathered are copies, of one process too.
    before, after = (sum(each.resident.values()) - each.resident.get("gathered", 0) for each in (together, apart))
    assert sum(apart.host.values()) == before - after
    if ranks > 1:  # One process alone is refused without offload.
        plain = estimates_of(replace(request, sections=ZERO), title.partition(",")[0])
        assert apart.host["optimizer states"] == plain.resident["optimizer states"]
    assert not apart.resident.get("optimizer states")


@pytest.mark.slow
def test_an_optimizer_without_state():
    check("resnet", "ddp", 2, optimizer="sgd")


@pytest.mark.slow
@pytest.mark.timeout(400)
# T5's blocks return views, which nothing here changes in place.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("one", PART, ids=lambda one: one.name.replace("; ", "-"))
@pytest.mark.turns(3)
def test_models_and_layouts(one):
    estimate = one.estimate()
    assert not estimate.refused, estimate.refused
    seen = one.count(estimate)
    # A pipeline's rank holds up to 120 kB that are not predicted, which shows where it holds little.
    tolerance = 0.03 if "pp" in one.title else 0.01
    assert abs(estimate.peak / seen - 1) <= tolerance, (estimate.peak, seen, estimate.memory, estimate.moment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "ranks", "windows"),
    [("ddp", 3, 1), ("fsdp", 3, 1), ("fsdp", 2, 2), ("zero 1", 3, 2), ("zero 2", 3, 2), ("zero 3", 3, 1)],
)
def test_copies_of_the_engine(title, ranks, windows):
    """Bytes that a rank's engine reads and writes beside the model and the optimizer."""
    one = Combination("gpt2", title, ranks, windows=windows, optimizer="sgd")
    estimate = one.estimate()
    alone = Combination("gpt2", "single", 1, windows=windows, optimizer="sgd")
    plain = alone.counts(alone.estimate(), copied)[0]
    # Gloo reduces in place, and copies this rank's part from there.
    own = sum(2 * each.bytes // ranks for each in estimate.traffic if each.operation == "reduce_scatter")
    seen = max(one.counts(estimate, copied)) - plain - own
    assert abs(estimate.copied / seen - 1) <= 0.05, (estimate.copied, seen)


@pytest.mark.slow
def test_copies_of_replicas_of_a_pipeline():
    """Four ranks copy what two do, and what averaging gradients takes."""
    schedule = "1f1b, 4 micro-batches"
    two, four = (
        Combination("gpt2", title, ranks, optimizer="sgd")
        for title, ranks in ((f"pp 2, {schedule}", 2), (f"pp 2, 2 replicas, {schedule}", 4))
    )
    estimate, alone = four.estimate(), two.estimate()
    assert alone.copied == 0
    seen = max(four.counts(estimate, copied)) - max(two.counts(alone, copied))
    assert abs(estimate.copied / seen - 1) <= 0.05, (estimate.copied, seen)
