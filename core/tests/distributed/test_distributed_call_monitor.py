"""The comparison of calls beside the training, on real engines: ranks that come apart raise, others do not."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.distributed import call_monitor
from drivetrain.errors import CollectiveMismatchError
from drivetrain_testing import RankFailedError, spawn

STEPS = 24
PAUSE = 0.05
"""Seconds of a step: a comparison every 0.1 s then finds a difference within a few steps."""

ENGINES = {
    "ddp": {"distributed_type": "ddp"},
    "fsdp": {"distributed_type": "fsdp"},
    "zero2": {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 2}},
    "zero3": {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 3}},
    "tp": {"distributed_type": "megatron", "megatron": {"tensor_parallel_size": 2}},
}


def accelerator_of(engine, folder, **settings):
    monitor = {"interval_seconds": 0.1, **settings}
    path = Path(folder, f"config-{os.environ['RANK']}.yaml")
    path.write_text(json.dumps({**ENGINES[engine], "use_cpu": True, "rank_monitor": monitor}))
    return Accelerator(config=path, project_dir=folder)


def report_of(function, world_size, *arguments, **named):
    """The report of the rank that raises first; others may be inside of a collective, whose end is that rank's."""
    with pytest.raises(RankFailedError) as caught:
        spawn(function, world_size, *arguments, **named)
    assert isinstance(caught.value.cause, CollectiveMismatchError), caught.value
    return caught.value.cause.what.splitlines()


def skips(accelerator, index, loss, optimizer):
    return index == 3 and accelerator.process_index == 1


def skips_another(accelerator, index, loss, optimizer):
    return index == 2 + accelerator.process_index


def other_rate(accelerator, index, loss, optimizer):
    if index == 3 and accelerator.process_index == 1:
        optimizer.param_groups[0]["lr"] = 0.5


def other_momentum(accelerator, index, loss, optimizer):
    if accelerator.process_index == 1:
        optimizer.param_groups[0]["momentum"] = 0.5


def freezes(accelerator, index, loss, optimizer):
    if index == 0 and accelerator.process_index == 1:
        optimizer.param_groups[0]["params"][-1].requires_grad_(False)


def breaks(accelerator, index, loss, optimizer):
    return "break" if index == 3 and accelerator.process_index == accelerator.num_processes - 1 else None


def train(engine, folder, act, saves=False, **settings):
    """Train for two epochs, in which a rank does something by itself."""
    accelerator = accelerator_of(engine, folder, **settings)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(STEPS * 2 * accelerator.num_processes, 8))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    for _ in range(2):
        for index, (x,) in enumerate(loader):
            loss = model(x).square().mean()
            does = act(accelerator, index, loss, optimizer)
            if does == "break":
                break
            if does:
                continue
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(PAUSE)
            if saves and index == 4:
                accelerator.save_state(f"{folder}/saved")
    accelerator.end_training()


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.gate("ddp")
def test_a_rank_that_skips_a_batch_is_named_with_the_batch(engine, tmp_path):
    lines = report_of(train, 2, engine, str(tmp_path), skips)
    assert lines[0] == "ranks are apart since call 8, in optimizer step 3:"  # prepare, and two of each of three steps
    assert lines[1].startswith("  rank 0: backward at test_distributed_call_monitor.py:")
    assert lines[1].endswith(", batch 3 of epoch 0")
    assert lines[2].endswith(", batch 4 of epoch 0")
    assert lines[3].startswith("since then gradients of different batches")


# Under ddp and tp the ranks' copies are compared too, by checks of these engines, which may find it first.
@pytest.mark.parametrize("engine", ["fsdp", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("act", "words"),
    [
        (other_rate, ("optimizer 0, rates 0.1", "optimizer 0, rates 0.5")),
        (other_momentum, ("rates 0.1", "rates 0.1")),
    ],
)
@pytest.mark.gate("other_rate-*-fsdp", "other_rate-*-zero3")
def test_settings_of_an_optimizer_that_differ_are_named_at_the_step(engine, act, words, tmp_path):
    lines = report_of(train, 2, engine, str(tmp_path), act)
    assert " step at test_distributed_call_monitor.py:" in lines[1]
    assert words[0] in lines[1]
    assert words[1] in lines[2]
    assert lines[1].partition(":")[2] != lines[2].partition(":")[2]
    assert lines[3].startswith("since then the ranks' copies or parts of the model were changed in different ways")


# ZeRO has flat parameters in its groups; tests/parity freezes those of the model there.
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "tp"])
@pytest.mark.gate("ddp", "fsdp")
def test_a_parameter_that_one_rank_freezes_is_named_before_gradients_are_sent(engine, tmp_path):
    """gloo would abort the processes, as the ranks would send different numbers of gradients."""
    lines = report_of(train, 2, engine, str(tmp_path), freezes)
    assert lines[1].startswith("  rank 0: backward at test_distributed_call_monitor.py:")
    assert lines[2].startswith("  rank 1: change of requires_grad at test_distributed_call_monitor.py:")
    assert lines[2].endswith("3 of 4 parameters require gradients from now on")


def waits_elsewhere(accelerator, index, loss, optimizer):
    """Wait in another collective than the other rank, so that none of them comes to a call that could raise."""
    call_monitor._END_SECONDS = 1.0
    if index == 3 and accelerator.process_index == 1:
        accelerator.gather(torch.zeros(1000))


def test_a_rank_that_is_apart_and_waits_ends_with_the_report(tmp_path):
    """Within seconds, where the engine's time-out is half an hour."""
    lines = report_of(train, 2, "ddp", str(tmp_path), waits_elsewhere)
    assert lines[1].startswith("  rank 0: backward at test_distributed_call_monitor.py:")
    assert lines[2].startswith("  rank 1: gather at test_distributed_call_monitor.py:")


def learns_by_turns(accelerator, index, loss, optimizer):
    """Freeze and unfreeze on all ranks alike, in every step."""
    optimizer.param_groups[0]["params"][-1].requires_grad_(bool(index % 2))


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_all_ranks_may_freeze_and_unfreeze_alike(engine, tmp_path):
    spawn(train, 2, engine, str(tmp_path), learns_by_turns)


def test_a_checkpoint_of_ranks_that_are_apart_is_not_written(tmp_path):
    """At long intervals it is the save that compares. No rank waits: each has left one batch out."""
    lines = report_of(train, 2, "ddp", str(tmp_path), skips_another, saves=True, interval_seconds=5)
    assert lines[0].startswith("ranks are apart since call 6, ")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(("engine", "world"), [("ddp", 3), ("fsdp", 4)])
@pytest.mark.gate("fsdp-4")
def test_a_rank_that_leaves_the_loop_is_named_among_several(engine, world, tmp_path):
    lines = report_of(train, world, engine, str(tmp_path), breaks)
    assert lines[0] == "ranks are apart since call 8, in optimizer step 3:"
    assert lines[1].startswith(f"  ranks 0-{world - 2}: backward at ")
    assert lines[1].endswith("batch 3 of epoch 0")
    assert lines[2].startswith(f"  rank {world - 1}: backward at ")
    assert lines[2].endswith("batch 0 of epoch 1")


def lawful(engine, folder):
    """Do what ranks may do apart: look, log, save, measure, evaluate and read other data by themselves."""
    accelerator = accelerator_of(engine, folder, interval_seconds=0.02)
    rank = accelerator.process_index
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(48, 4))
    model, optimizer, loader, others = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=2), DataLoader(data, batch_size=2)
    )
    kept = []
    for epoch in range(2):
        for index, (x,) in enumerate(loader):
            if rank == 0 and index == 3:
                kept.append(iter(others))
                next(kept[-1])
            loss = model(x).square().mean()
            if rank:  # the same calls from other lines
                accelerator.backward(loss)
            else:
                accelerator.backward(loss)
            if rank == 0:
                time.sleep(0.01)  # slower than the others
                accelerator.print(loss.item())
            if engine == "ddp" and rank == 0:
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["note"] = f"rank {rank}"
        if engine == "ddp" and rank == 0:
            accelerator.save_state(f"{folder}/{epoch}")
            accelerator.save_model(model, f"{folder}/model-{epoch}")
    with accelerator.main_process_first():
        accelerator.print("ready")
    if engine == "ddp":
        with accelerator.join_uneven_inputs([model]):
            for _ in range(1 + rank):
                accelerator.backward(model(x).square().mean())
    accelerator.end_training()
    return call_monitor.Current.monitor is None


def waits_for(event):
    event.wait()


def test_the_stack_of_a_thread_is_found_without_following_its_frames():
    event = threading.Event()
    thread = threading.Thread(target=waits_for, args=(event,), name="a name, which newer versions of Python show")
    thread.start()
    stack = ""
    while "in wait\n" not in stack or "in waits_for" not in stack:
        stack = call_monitor._stack_of(thread.ident)
    event.set()
    thread.join()
    assert stack.index("in wait\n") < stack.index("in waits_for"), "the innermost frame stands first"
    assert "test_the_stack_of" not in stack, "the frames of this thread are another's"
    assert call_monitor._stack_of(thread.ident) == "", "it has ended"
    mine = call_monitor._stack_of(threading.get_ident())
    assert "test_the_stack_of" in mine


def watching(thread):
    """A monitor that has looked at nothing yet, of a process whose main thread this is."""
    monitor = object.__new__(call_monitor.CallMonitor)
    monitor._main, monitor._moves, monitor._frames = thread.ident, False, deque(maxlen=5)
    return monitor


def test_a_thread_that_is_not_written_among_too_many_is_not_said_to_have_ended():
    event = threading.Event()
    threads = [threading.Thread(target=waits_for, args=(event,)) for _ in range(120)]
    for each in threads:
        each.start()
    monitor = watching(threads[0])
    try:
        said = monitor._where()
    finally:
        event.set()
        for each in threads:
            each.join()
    assert said == "has too many threads to tell where its main one is"
    assert monitor._where() == "has ended its main thread"


def adds_up(event):
    while not event.is_set():
        sum(range(100))


@pytest.mark.parametrize(("does", "moves"), [(adds_up, True), (waits_for, False)])
def test_looks_tell_a_thread_in_a_short_loop_from_one_that_is_stopped(does, moves):
    event = threading.Event()
    thread = threading.Thread(target=does, args=(event,))
    thread.start()
    monitor = watching(thread)
    try:
        while f"in {does.__name__}" not in call_monitor._stack_of(thread.ident):
            pass
        for _ in range(3):  # it may be on its way to where it stops at the first
            monitor._where()
    finally:
        event.set()
        thread.join()
    assert monitor._moves is moves



@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.gate("ddp", "zero3")
def test_what_ranks_may_do_apart_is_not_reported(engine, tmp_path):
    assert all(spawn(lawful, 2, engine, str(tmp_path)))


