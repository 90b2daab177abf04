"""A name of torch's pipelining or of Megatron-Core's that is gone ends in a sentence."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleGPipe,
    get_schedule_class,
)

from drivetrain.api import BackendBlockedError
from drivetrain_megatron import private_names
from drivetrain_megatron.pipeline import transport
from drivetrain_megatron.planner.actions import Action
from drivetrain_megatron.planner.catalogue import find
from drivetrain_megatron.planner.engine_lists import NotingStage, build, construct, run_noting, stages_of


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_installed_torch_has_all(name: str) -> None:
    schedule = find(name)
    private_names.check(build(schedule, 2, schedule.stages_per_rank or 2, 0, 4)[0])


def test_what_a_schedule_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    built, _ = build(find("gpipe"), 2, 1, 0, 4)
    monkeypatch.delattr(PipelineScheduleSingle, "_initialize_stage")
    with pytest.raises(BackendBlockedError) as caught:
        run_noting(built, 4)
    said = "ScheduleGPipe has no _initialize_stage, which drivetrain-megatron needs of torch "
    assert said + metadata.version("torch") in str(caught.value)
    assert not hasattr(built, "_initialize_stages"), "nothing was set"


def test_what_a_flag_that_is_only_set_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = find("interleaved_1f1b")
    built, _ = build(schedule, 2, 2, 0, 4)
    assert isinstance(built, PipelineScheduleMulti)
    flag = private_names.flags(built)[0]
    delattr(built, flag)
    # The flag of older releases is looked for first; without it a newer release is expected.
    with pytest.raises(BackendBlockedError, match=r"has no .*_stages_(back|for)ward_initialized"):
        private_names.check(built)


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b"])
def test_older_releases_of_torch_have_one_flag_for_both_directions(name: str) -> None:
    schedule = find(name)
    built, _ = build(schedule, 2, schedule.stages_per_rank or 2, 0, 4)
    for flag in private_names.flags(built):
        delattr(built, flag)
    older = "_stage_initialized" if isinstance(built, PipelineScheduleSingle) else "_stages_initialized"
    newer = older.replace("_init", "_backward_init"), older.replace("_init", "_forward_init")
    assert private_names.flags(built) == newer
    setattr(built, older, False)
    assert private_names.flags(built) == (older,)
    private_names.check(built)


def test_gpipe_takes_fewer_micro_batches_than_stages_where_torch_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.9 does, when the schedule is built."""
    made = ScheduleGPipe.__init__

    def refusing(self: Any, stage: Any, n_microbatches: int, **options: Any) -> None:
        if n_microbatches < stage.num_stages:
            raise ValueError(n_microbatches)
        made(self, stage, n_microbatches, **options)

    monkeypatch.setattr(ScheduleGPipe, "__init__", refusing)
    built, noted = build(find("gpipe"), 4, 1, 0, 2)
    run_noting(built, 2)
    assert [str(action) for action in noted] == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble", "zbv"])
def test_lists_of_older_releases_of_torch_get_messages(name: str) -> None:
    schedule = find(name)
    runs_messages, _ = build(schedule, 2, 2, 0, 4)

    class WithoutMessages(PipelineScheduleMulti):
        """As most schedules of torch 2.9: has a list, and runs it in time steps."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            named = get_schedule_class(schedule.torch_name)(*args, **options)
            self.pipeline_order = named.pipeline_order

    noted: list[Action] = []
    stages = [NotingStage(stage, 2, 0, 4, noted) for stage in stages_of(schedule.placement, 2, 2, 0)]
    built = construct(WithoutMessages, stages, 4, lambda *_: 0.0)
    assert built.pipeline_order_with_comms == runs_messages.pipeline_order_with_comms
    run_noting(built, 4)
    assert len(noted) == len([each for each in built.pipeline_order_with_comms[0] if each.is_compute_op])


def test_what_would_run_messages_is_named_where_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(private_names.run_with_messages(), "_prepare_schedule_with_comms")
    with pytest.raises(BackendBlockedError, match="no _prepare_schedule_with_comms, which drivetrain-megatron"):
        private_names.run_with_messages()


def test_a_backward_is_split_only_where_torch_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.9, which counts some weights twice; there a stage computes its backward in one piece."""
    received, weight = (torch.tensor(value, requires_grad=True) for value in (3.0, 2.0))
    output = received * weight
    assert transport.can_split([output], [received], [weight]) == transport.splits_rightly()
    weigh = transport.stage_backward_weight

    def twice(weights: Any, groups: Any) -> None:
        weights = list(weights)
        weigh(iter(weights), groups)
        for one in weights:
            one.grad *= 2

    monkeypatch.setattr(transport, "stage_backward_weight", twice)
    transport.splits_rightly.cache_clear()
    try:
        assert not transport.can_split([output], [received], [weight])
    finally:
        transport.splits_rightly.cache_clear()


def test_what_megatron_core_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    from drivetrain_megatron.core_engine import parallel_state
    from drivetrain_megatron.core_engine import private_names as of_core

    parallel_state.import_core()
    from megatron.core.tensor_parallel import random

    monkeypatch.delattr(random, "_get_cuda_rng_state")
    with pytest.raises(BackendBlockedError) as caught:
        of_core.check()
    assert "has no _get_cuda_rng_state, which drivetrain-megatron needs of megatron-core 0.16" in str(caught.value)
