"""What every rank does together, and how a failure of one is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drivetrain.distributed.collectives import Ranks
from drivetrain.errors import CheckpointError, UsageError
from drivetrain_testing import spawn


def test_an_error_that_is_a_sentence_already_gets_no_second_full_stop():
    def work():
        raise UsageError("the engine has nothing to save", cure="Prepare a model first.")

    alone = SimpleNamespace(rank=0, world_size=1, dp_size=1)
    with pytest.raises(CheckpointError) as caught:
        Ranks(SimpleNamespace(topology=alone)).agree("collect the state", work)
    assert str(caught.value).endswith("UsageError: the engine has nothing to save. Prepare a model first.")


def test_parts_that_leave_holes_are_refused_until_every_rank_hands_its_own_over(jobs, tmp_path):
    for kind, text in spawn(jobs.handed_job, 2, tmp_path / "holes", "parts of one rank"):
        assert kind == "CheckpointError"
        assert "the parts of the state on the ranks do not make up whole tensors: " in text
        assert text.endswith(
            "Hand each tensor over whole on every rank that has it, or as a DTensor on all ranks of its mesh."
        )
    for form in ("whole", "parts"):
        assert spawn(jobs.handed_job, 2, tmp_path / form, form) == [("", 8)] * 2
