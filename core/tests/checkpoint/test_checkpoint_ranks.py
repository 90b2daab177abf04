"""What every rank does together, and how a failure of one is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drivetrain.distributed.collectives import Ranks
from drivetrain.errors import CheckpointError, UsageError


def test_an_error_that_is_a_sentence_already_gets_no_second_full_stop():
    def work():
        raise UsageError("the engine has nothing to save", cure="Prepare a model first.")

    alone = SimpleNamespace(rank=0, world_size=1, dp_size=1)
    with pytest.raises(CheckpointError) as caught:
        Ranks(SimpleNamespace(topology=alone)).agree("collect the state", work)
    assert str(caught.value).endswith("UsageError: the engine has nothing to save. Prepare a model first.")
