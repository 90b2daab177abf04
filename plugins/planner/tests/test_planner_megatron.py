"""Layouts of the backend megatron: what is counted without ranks, and what is refused as training would refuse it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points

import pytest
import torch
from planner_grid import Combination, megatron_section, request_for

from drivetrain.api.programs import load_config
from drivetrain_planner.choosing import GROUP, choose, settings_of, weigh
from drivetrain_planner.machines import find
from drivetrain_planner.optimizers import optimizer_costs

(_point,) = entry_points(group=GROUP, name="megatron")
estimates = _point.load()


@cache
def layouts(model, ranks, **section):
    """Layouts of a model under a section; several tests look at one of them."""
    return estimates(request_for(model, ranks, sections={"megatron": section}))


def layout(model, ranks, **section):
    (found,) = layouts(model, ranks, **section)
    return found


def largest_share(model):
    """Of the parameters by two ranks: norms and positions stay whole, and by Transformers 5.20 Llama's words do."""
    if model != "llama":
        return 0.52
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        plan = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1)).tp_plan
    return 0.52 if any("embed_tokens" in key for key in plan) else 0.6


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_tensor_parallelism_shares_the_layers(model):
    whole = next(each for each in ranks_of_one(model) if each.title == "single")
    found = layout(model, 2, tensor_parallel_size=2)
    assert not found.refused, found.refused
    assert 0.5 < found.resident["parameters"] / whole.resident["parameters"] < largest_share(model)
    assert found.memory["activations"] < whole.memory["activations"]
    flops = [sum(each.flops * each.count for each in one.trace.forward) for one in (found, whole)]
    assert flops[0] == pytest.approx(flops[1] / 2)
    (reduced,) = [each for each in found.traffic if each.operation == "all_reduce"]
    # Two in a layer's forward and two in its backward, of samples x words x width in float32; then embedding and loss.
    assert reduced.calls >= 4 * 4
    assert reduced.bytes >= 4 * 4 * (4 * 64 * 128 * 4)


def ranks_of_one(model):
    from drivetrain_planner.single import estimates as single

    return single(request_for(model, 1))


@pytest.mark.slow
def test_every_product_of_degrees_is_offered():
    found = [each.title.partition(", ")[0] for each in layouts("gpt2", 4)]
    assert found == ["pp 2", "pp 4", "tp 2", "tp 2 x pp 2", "tp 4"]


def test_both_axes_together_share_the_parts_of_a_stage():
    both = layout("llama", 4, tensor_parallel_size=2, pipeline_parallel_size=2, num_micro_batches=4)
    stages = layout("llama", 2, pipeline_parallel_size=2, num_micro_batches=4)
    assert not both.refused, both.refused
    assert 0.5 < both.resident["parameters"] / stages.resident["parameters"] < largest_share("llama")
    assert both.memory["activations"] < stages.memory["activations"]
    assert {"send", "all_reduce"} <= {each.operation for each in both.traffic}


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_there_are_stages():
    gpipe, steady = (
        layout("llama", 2, pipeline_parallel_size=2, schedule=schedule, num_micro_batches=4)
        for schedule in ("gpipe", "1f1b")
    )
    assert gpipe.memory["activations"] > 1.5 * steady.memory["activations"]
    # (p - 1) / (m + p - 1), where stages are alike.
    assert steady.idle == pytest.approx(0.2, abs=0.15)
    machine = find("cpu", 2)
    weighed = weigh(steady, request_for("llama", 2), machine)
    assert weighed.seconds["waiting"] == pytest.approx(weighed.seconds["computation"] * steady.idle / (1 - steady.idle))


def test_interleaving_waits_less_and_holds_more():
    steady = layout("llama", 2, pipeline_parallel_size=2, num_micro_batches=4)
    several = layout("llama", 2, pipeline_parallel_size=2, num_micro_batches=4, schedule="interleaved_1f1b")
    assert several.title == "pp 2, interleaved_1f1b of 2 stages a rank, 4 micro-batches"
    assert several.idle < steady.idle
    assert several.memory["activations"] > steady.memory["activations"]
    (sent,) = [each for each in several.traffic if each.operation == "send"]
    (once,) = [each for each in steady.traffic if each.operation == "send"]
    # Of four stages three cuts are crossed, in place of one.
    assert sent.bytes == 3 * once.bytes


def test_a_stage_that_follows_on_its_own_rank_sends_nothing():
    sent, once = (
        sum(each.bytes for each in layout("llama", 2, pipeline_parallel_size=2, num_micro_batches=4, **given).traffic)
        for given in ({"schedule": "zbv"}, {})
    )
    # Down the ranks and up again: two of three cuts lie between ranks.
    assert sent == 2 * once


def test_a_backward_in_two_parts_leaves_no_rank_waiting_as_long():
    whole, split = (
        layout("llama", 2, pipeline_parallel_size=2, num_micro_batches=4, schedule=schedule, stages_per_rank=1)
        for schedule in ("1f1b", "zero_bubble")
    )
    assert split.title == "pp 2, zero_bubble, 4 micro-batches"
    assert split.settings["megatron"]["stages_per_rank"] == 1
    if torch.__version__.startswith("2.9."):  # Its split backward is wrong, so that training computes whole ones.
        assert split.idle == whole.idle
    else:
        assert split.idle < whole.idle
    # Both compute the same.
    flops = [sum(each.flops * each.count for each in one.trace.backward) for one in (whole, split)]
    assert flops[0] == pytest.approx(flops[1], rel=0.02)


PLENTY = 2**40

SMOOTH = replace(find("cpu", 2), launch=0.0)
"""A machine on which half as many samples take half as long."""


def test_what_the_section_leaves_open_is_searched():
    own = layout("llama", 2, pipeline_parallel_size=2)
    assert own.title == "pp 2, 1f1b, 2 micro-batches"
    request = request_for("llama", 2)
    found = list(own.variants(SMOOTH, PLENTY))
    assert found
    for each in found:
        assert "zero_bubble" not in each.title, "what a split backward costs is not known"
        assert each.title != own.title
        assert weigh(each, request, SMOOTH).time < weigh(own, request, SMOOTH).time
        assert each.rank > own.rank
        assert each.variants is None
        assert layout("llama", 2, **each.settings["megatron"]).memory == each.memory


def test_what_the_section_says_is_kept():
    own = layout("llama", 2, pipeline_parallel_size=2, schedule="1f1b")
    (only,) = own.variants(SMOOTH, PLENTY)
    assert only.title == "pp 2, 1f1b, 4 micro-batches"
    own = layout("llama", 2, pipeline_parallel_size=2, num_micro_batches=4)
    assert {each.settings["megatron"]["num_micro_batches"] for each in own.variants(SMOOTH, PLENTY)} <= {4}
    own = layout("llama", 2, pipeline_parallel_size=2, schedule="zero_bubble", stages_per_rank=1, num_micro_batches=4)
    assert not list(own.variants(SMOOTH, PLENTY))


def test_a_pipeline_that_is_too_large_is_searched_for_one_that_fits():
    own = layout("llama", 2, pipeline_parallel_size=2)
    less = own.peak - 1
    found = list(own.variants(SMOOTH, less))
    assert any(each.peak <= less for each in found), [(each.title, each.peak) for each in found]
    # Smaller parts, of which as many are held.
    assert {each.settings["megatron"]["num_micro_batches"] for each in found} == {4}
    assert not list(own.variants(SMOOTH, own.resident["parameters"]))


def test_a_tied_table_is_on_the_first_and_the_last_stage():
    gpt2 = layout("gpt2", 2, pipeline_parallel_size=2)
    single = next(iter(ranks_of_one("gpt2")))
    table = 512 * 128 * 4
    # The other rank has the table too.
    assert gpt2.resident["parameters"] > (single.resident["parameters"] + table) / 2 - 1
    assert gpt2.resident["parameters"] < single.resident["parameters"]


@pytest.mark.parametrize(
    ("model", "ranks", "section", "why"),
    [
        ("gpt2", 1, {}, "it shares out layers over processes, and there is one"),
        ("gpt2", 2, {"engine": "megatron_core"}, "engine: megatron_core is not modelled"),
        ("gpt2", 2, {"tensor_parallel_size": 2, "sequence_parallel": True}, "sequence_parallel is not modelled"),
        ("gpt2", 3, {"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide"),
        ("gpt2", 64, {"pipeline_parallel_size": 64}, "cannot be cut into 64 pipeline stages"),
        (
            "gpt2",
            2,
            {"pipeline_parallel_size": 2, "schedule": "interleaved_1f1b", "num_micro_batches": 1},
            "interleaved_1f1b does not take 1 micro-batch, and the schedule that training takes in its place",
        ),
        ("gpt2", 2, {"pipeline_parallel_size": 2, "split_points": ("nowhere",)}, "is not a module of the model"),
        ("gpt2", 4, {"pipeline_parallel_size": 4, "num_micro_batches": 2}, "does not take 2 micro-batches"),
        (
            "gpt2",
            4,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel": "fsdp"},
            "data_parallel: fsdp",
        ),
        (
            "resnet",
            2,
            {"pipeline_parallel_size": 2, "num_micro_batches": 2},
            "BatchNorm2d computes with all samples of a batch",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(model, ranks, section, why):
    found = layout(model, ranks, **section)
    assert why in found.refused, found


def test_an_optimizer_that_looks_at_whole_parameters_is_refused():
    request = replace(request_for("gpt2", 2, sections={"megatron": {"tensor_parallel_size": 2}}))
    request = replace(request, optimizer=replace(optimizer_costs("AdamW"), elementwise=False))
    assert "is not element-wise" in estimates(request)[0].refused


def test_a_batch_in_one_piece_takes_the_plainer_schedule():
    found = layout("resnet", 2, pipeline_parallel_size=2, num_micro_batches=1)
    assert not found.refused, found.refused
    assert found.title == "pp 2, gpipe, 1 micro-batch"


def test_a_batch_that_training_does_not_cut_is_planned_in_one_piece():
    found = layout("resnet", 2, pipeline_parallel_size=2)
    written = layout("resnet", 2, pipeline_parallel_size=2, num_micro_batches=1)
    assert (found.title, found.memory) == (written.title, written.memory)
    (remark,) = found.remarks
    assert remark.startswith("the batch stays in one piece, so that the stages wait for each other: BatchNorm2d")


def test_a_pipeline_that_would_keep_the_batch_whole_is_not_offered():
    found = estimates(request_for("resnet", 2))
    refused = [each.refused for each in found if each.title.startswith("pp 2")]
    assert refused
    assert all("BatchNorm2d computes with all samples of a batch" in why for why in refused), refused


def test_a_layout_can_be_written_and_read(tmp_path):
    request = request_for("gpt2", 2, sections={"megatron": {"tensor_parallel_size": 2}})
    chosen = choose(request, find("cpu", 2))
    mine = next(each for each in chosen.fitting if each.estimate.backend == "megatron")
    import yaml

    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(settings_of(mine, request)))
    resolved = load_config(path)
    assert resolved.config.distributed_type == "megatron"
    assert resolved.sections["megatron"]["tensor_parallel_size"] == 2


def test_titles_tell_the_section():
    several = megatron_section("pp 2, zero_bubble of 3 stages a rank, 4 micro-batches")
    assert (several["schedule"], several["stages_per_rank"]) == ("zero_bubble", 3)
    one = Combination("gpt2", "tp 2 x pp 2, 1f1b, 4 micro-batches", 4)
    assert megatron_section(one.title) == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "schedule": "1f1b",
        "num_micro_batches": 4,
    }
