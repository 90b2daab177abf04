"""A name of torch's pipelining or of Megatron-Core's that is gone ends in a sentence."""

from __future__ import annotations

from importlib import metadata

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from drivetrain.api import BackendBlockedError
from drivetrain_megatron import private_names
from drivetrain_megatron.planner.catalogue import find
from drivetrain_megatron.planner.engine_lists import build, run_noting


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
