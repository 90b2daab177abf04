"""A rank that saves by itself while the main process does something else: who waits in vain says for whom."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import CollectiveMismatchError
from drivetrain.kwargs import InitProcessGroupKwargs
from drivetrain_testing import spawn

PATIENCE = 4.0
"""Seconds until a process group gives up a rank; more than the two by which ranks that are apart exchange words."""


def save_on_rank_1(folder, watched):
    waits = InitProcessGroupKwargs(timeout=timedelta(seconds=PATIENCE))
    accelerator = Accelerator(cpu=True, distributed_type="ddp", desync_watchdog=watched, kwargs_handlers=[waits])
    accelerator.prepare(nn.Linear(2, 1))
    try:
        if accelerator.process_index == 1:
            accelerator.save_state(folder)
        accelerator.wait_for_everyone()
    except (CollectiveMismatchError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("watched", [False, True])
def test_an_extra_save_of_one_rank_is_told_in_words(tmp_path, watched):
    main, other = spawn(save_on_rank_1, 2, str(tmp_path / "saved"), watched)
    assert other[0] == "CollectiveMismatchError"
    assert "save_state at test_distributed_attendance.py:" in other[1]
    assert "is_main_process" in other[1]
    assert not (tmp_path / "saved").exists()
    if watched:
        # Both learn what the other did, also the main process, whose call alone was compared.
        assert main == other
        assert main[1].startswith("ranks are apart after 1 equal calls:\n")
        assert "rank 0: wait_for_everyone at test_distributed_attendance.py:" in main[1]
        assert "rank 1: save_state at test_distributed_attendance.py:" in main[1]
    else:
        assert "the main process has not made this call" in other[1]
