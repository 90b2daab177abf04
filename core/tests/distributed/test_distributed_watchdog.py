"""The desync watchdog, on real engines: ranks that are apart raise one report on every rank, and nobody waits."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.backend import RunSettings
from drivetrain.distributed import watchdog
from drivetrain.distributed.watchdog import log_call
from drivetrain.errors import CollectiveMismatchError, UnsupportedError
from drivetrain.kwargs import InitProcessGroupKwargs
from drivetrain_testing import spawn

PATIENCE = 6.0
"""Seconds until an absent rank is given up; the reports of present ones take none of it."""


def more(accelerator, loss, rank):
    if rank == 1:
        accelerator.gather(loss)


def fewer(accelerator, loss, rank):
    if rank == 1:
        accelerator.gather(loss)
    if rank == 0:
        accelerator.wait_for_everyone()


def other_order(accelerator, loss, rank):
    first, second = (accelerator.gather, accelerator.reduce) if rank else (accelerator.reduce, accelerator.gather)
    first(loss)
    second(loss)


def other_shape(accelerator, loss, rank):
    accelerator.gather(torch.zeros(2 + rank, 3))


def other_dtype(accelerator, loss, rank):
    accelerator.gather(torch.zeros(2, dtype=torch.float32 if rank else torch.float64))


def other_line(accelerator, loss, rank):
    if rank:
        accelerator.gather(loss)
    else:
        accelerator.gather(loss)


def main_only(accelerator, loss, rank):
    if accelerator.is_main_process:
        accelerator.gather(loss)


APART = {
    more: ("backward", "gather of float32[] at test_distributed_watchdog.py:"),
    fewer: ("wait_for_everyone at", "gather of float32[] at"),
    other_order: ("reduce sum of float32[] at", "gather of float32[] at"),
    other_shape: ("gather of float32[2, 3] at", "gather of float32[3, 3] at"),
    other_dtype: ("gather of float64[2] at", "gather of float32[2] at"),
    other_line: ("gather of float32[] at", "gather of float32[] at"),
    main_only: ("gather of float32[] at", "backward at"),
}


def started(backend="ddp", **arguments):
    waits = InitProcessGroupKwargs(timeout=timedelta(seconds=PATIENCE))
    accelerator = Accelerator(
        cpu=True, distributed_type=backend, desync_watchdog=True, kwargs_handlers=[waits], **arguments
    )
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def train(backend, act, at=1):
    """Three steps, in the second of which ranks part; the report that this rank gets."""
    accelerator, model, optimizer, loader = started(backend)
    try:
        for index, (x,) in enumerate(loader):
            loss = model(x).mean()
            if index == at and act(accelerator, loss, accelerator.process_index) == "break":
                break
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.gather(loss)
        accelerator.end_training()
    except CollectiveMismatchError as error:
        return str(error)
    return "no report"


@pytest.mark.parametrize(("backend", "acts"), [("ddp", list(APART)), ("fsdp", [more, other_shape, main_only])])
def test_every_way_to_part_becomes_one_report_on_every_rank(backend, acts):
    for act in acts:
        first, second = spawn(train, 2, backend, act)
        assert first == second, act.__name__
        lines = first.splitlines()
        assert lines[0] == "ranks are apart after 3 equal calls:"  # prepare; backward and gather of the first step
        for rank, word in enumerate(APART[act]):
            assert lines[1 + rank].startswith(f"  rank {rank}: {word}"), act.__name__
            assert lines[1 + rank].endswith(", batch 1")


def leave_early(accelerator, loss, rank):
    return "break" if rank == 1 else None


def skip_backward(backend):
    accelerator, model, optimizer, loader = started(backend)
    try:
        for index, (x,) in enumerate(loader):
            loss = model(x).mean()
            if index == 1 and accelerator.process_index == 1:
                continue
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()
    except CollectiveMismatchError as error:
        return str(error)
    return "no report"


def test_a_rank_that_leaves_the_loop_or_skips_a_backward_is_named():
    reports = spawn(train, 2, "ddp", leave_early)
    assert reports[0] == reports[1]
    assert "rank 0: backward at" in reports[0]
    assert "rank 1: end_training at" in reports[0]
    reports = spawn(skip_backward, 2, "ddp")
    # Without the number of the batch the two would be the same call, and gradients of different steps be summed.
    assert "rank 0: backward at test_distributed_watchdog.py:" in reports[0]
    assert ", batch 1\n" in reports[0]
    assert ", batch 2\n" in reports[0]


def absent(how):
    accelerator, _, _, _ = started()
    if accelerator.process_index == 1:
        if how == "ended":
            accelerator._close()
            return "ended"
        time.sleep(2 * PATIENCE)
    try:
        accelerator.wait_for_everyone()
    except CollectiveMismatchError as error:
        return str(error)
    return "no report"


def test_a_rank_that_does_not_come_is_named_after_the_time_out_and_learns_of_it():
    first, second = spawn(absent, 2, "asleep")
    assert "rank 0: wait_for_everyone at test_distributed_watchdog.py:" in first
    assert "rank 1: has not made this call; last call that all ranks made: prepare at test_distributed_watch" in first
    assert "rank 1: wait_for_everyone at" in second
    first, _ = spawn(absent, 2, "ended")
    assert "rank 1: its script has ended; last call that all ranks made: prepare at" in first


def lawful():
    """What scripts may do: different numbers of calls that stay on a rank, and blocks that wait by themselves."""
    accelerator, model, optimizer, loader = started(gradient_accumulation_steps=2)
    rank = accelerator.process_index
    with accelerator.main_process_first():
        pass
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    for _ in range(rank):
        with accelerator.no_sync(model):
            accelerator.backward(model(x).mean())
    with accelerator.join_uneven_inputs([model]):
        for _ in range(1 + rank):
            accelerator.backward(model(x).mean())
    gathered = accelerator.gather_for_metrics([rank] * (1 + rank))
    padded = accelerator.pad_across_processes(torch.ones(1 + rank, 2))
    accelerator.end_training()
    return gathered, tuple(padded.shape)


def test_what_is_lawful_stays_so():
    assert spawn(lawful, 2) == [([0, 1, 1], (2, 2))] * 2


def three():
    accelerator, *_ = started()
    time.sleep(0.2 * accelerator.process_index)
    try:
        (accelerator.wait_for_everyone if accelerator.process_index else accelerator.check_trigger)()
    except CollectiveMismatchError as error:
        return str(error)
    return "no report"


def test_three_ranks_say_the_same():
    reports = spawn(three, 3)
    assert len(set(reports)) == 1
    assert reports[0].count("wait_for_everyone at") == 2
    assert reports[0].count("check_trigger at") == 1


def test_alone_there_is_nothing_to_compare():
    accelerator = Accelerator(cpu=True, desync_watchdog=True)
    assert accelerator._watchdog is None
    accelerator.gather(torch.ones(1))


def without_a_group():
    class Lazy:
        topology = type("Topology", (), {"world_size": 2})
        settings = RunSettings()

    with pytest.raises(UnsupportedError, match="Lazy makes no process group"):
        watchdog.watch(Lazy(), lambda: None)


def test_ranks_without_a_process_group_are_refused():
    spawn(without_a_group, 1)


def calls_me():
    return log_call("call")


def test_a_call_is_logged_with_the_line_outside_of_us():
    # `log_call` is called by a public method; its caller is the script.
    site = calls_me()
    assert site.startswith("call at test_distributed_watchdog.py:")
    with nullcontext():
        assert calls_me() != site  # another line


@pytest.mark.parametrize("steps", [1, 2])
def test_a_backward_is_logged_with_its_line_in_and_at_the_end_of_a_window(steps, monkeypatch):
    monkeypatch.setattr(watchdog, "_sites", sites := {})
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = accelerator.prepare(nn.Linear(2, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).mean())
    line = test_a_backward_is_logged_with_its_line_in_and_at_the_end_of_a_window.__code__.co_firstlineno + 6
    found = [site.text for site in sites.values() if site.text.startswith("backward")]
    assert found == [f"backward at test_distributed_watchdog.py:{line}"]
