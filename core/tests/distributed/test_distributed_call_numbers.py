"""Calls are numbered, compared and reported, without an engine: several monitors share one store in one process."""

from __future__ import annotations

import logging
import threading
import time
from itertools import repeat

import pytest
import torch
import torch.distributed as dist

from drivetrain.distributed import call_monitor
from drivetrain.distributed.call_monitor import KEPT_CALLS, CallMonitor
from drivetrain.errors import CollectiveMismatchError

INTERVAL = 0.05


@pytest.fixture
def ranks(monkeypatch):
    """``ranks(4)``: the monitors of four ranks."""
    monkeypatch.setattr(call_monitor, "_serial", repeat(0))
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    made = []

    def make(world_size, **settings):
        settings["interval_seconds"] = INTERVAL
        made.extend(CallMonitor(store, rank, world_size, **settings) for rank in range(world_size))
        return made

    yield make
    for each in made:
        each.close()
    assert not any(thread.name == "drivetrain-call-monitor" for thread in threading.enumerate())


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(INTERVAL / 5)


def on_all(monitors, call):
    """Call on each rank at the same time; the errors by rank, ``None`` where there was none."""
    found = [None] * len(monitors)

    def run(rank):
        try:
            call(monitors[rank])
        except CollectiveMismatchError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(monitors))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return found


def test_equal_calls_at_any_speed_are_not_apart(ranks):
    monitors = ranks(4)
    for number in range(2 * KEPT_CALLS // 16):
        for rank, each in enumerate(monitors):
            each.record("backward", f"backward at job.py:{rank}", (0, 0, number), (0, True, ()))
            rates = 0.1, float("nan"), torch.ones(1)
            each.record("step", "step at job.py:9", None, (0, 0.0, rates, ((f"{rank}",),), ()))
        if number % 100 == 0:
            time.sleep(INTERVAL)
    monitors[0].record("backward", "backward at job.py:1", (0, 0, 9), (0, True, ()))  # the others have not got so far
    time.sleep(4 * INTERVAL)
    assert [each.error for each in monitors] == [None] * 4
    for each in monitors[1:]:
        each.record("backward", "backward at job.py:1", (0, 0, 9), (0, True, ()))
    assert on_all(monitors, CallMonitor.agree) == [None] * 4


def test_the_first_difference_of_all_is_named_on_every_rank(ranks):
    monitors = ranks(4)
    for number in range(6):
        for rank, each in enumerate(monitors):
            # Rank 3 is apart since call 5, rank 2 since call 3: 0 1 2 ... on ranks 0 and 1.
            skipped = (rank == 2 and number > 1) + (rank == 3 and number > 3)
            each.record("backward", f"backward at job.py:{7}", (0, 1, number + skipped), (0, True, ()))
            if number == 4 and rank == 0:
                each.saved("out/checkpoint_4")
    until(lambda: all(each.error for each in monitors))
    (report,) = {each.error.what for each in monitors}
    assert report.splitlines() == [
        "ranks are apart since call 3, in optimizer step 0:",
        "  ranks 0-1, 3: backward at job.py:7, batch 2 of epoch 1",
        "  rank 2: backward at job.py:7, batch 3 of epoch 1",
        "since then gradients of different batches, or of different losses, were added up",
        "saved since then, and not to be resumed from: out/checkpoint_4",
    ]
    for each in monitors:
        with pytest.raises(CollectiveMismatchError, match="since call 3"):
            each.record("step", "step at job.py:8", None, (0, 0.0, (0.1,), (), ()))


def test_ranks_that_have_made_fewer_calls_do_not_agree(ranks):
    monitors = ranks(3)
    for each in monitors:
        each.record("step", "step at job.py:8", None, (0, 1.0, (0.1,), (), ()))
    monitors[1].record("step", "step at job.py:8", None, (0, 1.0, (0.1,), (), ()))
    (report,) = set(on_all(monitors, CallMonitor.agree))
    assert report.splitlines()[:3] == [
        "ranks are apart since call 2, in optimizer step 1:",
        "  ranks 0, 2: has not made it; its last: step at job.py:8, optimizer 0, rates 0.1, clipped to 1",
        "  rank 1: step at job.py:8, optimizer 0, rates 0.1, clipped to 1",
    ]


def test_what_ranks_do_in_uneven_blocks_and_failed_attempts_is_forgotten(ranks):
    monitors = ranks(2)
    monitors[1].suspended = True
    monitors[1].record("backward", "backward at job.py:7", (0, 0, 5), (0, True, ()))
    monitors[1].suspended = False
    monitors[0].record("gather", "gather at job.py:3")
    on_all(monitors, lambda each: each.begin_anew())
    for each in monitors:
        each.record("gather", "gather at job.py:4")
    assert on_all(monitors, CallMonitor.agree) == [None] * 2
    monitors[0].record("gather", "gather at job.py:5")
    monitors[1].record("reduce sum", "reduce sum at job.py:5")
    until(lambda: all(each.error for each in monitors))
    assert "since call 2," in str(monitors[0].error)


def test_a_rank_that_has_ended_is_waited_for_by_name(ranks, caplog):
    monitors = ranks(2, standstill_seconds=4 * INTERVAL)
    monitors[0].record("wait_for_everyone", "wait_for_everyone at job.py:3")
    monitors[1].close()
    with caplog.at_level(logging.WARNING):
        until(lambda: caplog.messages)
    first, mine, other, _ = caplog.messages[0].splitlines()
    assert first == "rank 1 is waited for, for 0.2 s so far, and slow or stopped:"
    assert mine.endswith("; last call: wait_for_everyone at job.py:3")
    assert other == "  rank 1: gives no sign of life; no call yet"


def test_a_rank_without_a_store_compares_nothing():
    assert call_monitor.start(None, 0, 2, 2, interval=1, standstill=60, compares=True) is None
    assert call_monitor.Current.monitor is None


def test_accelerators_share_one_monitor(monkeypatch):
    monkeypatch.setattr(call_monitor.Current, "monitor", None)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    first, second = (call_monitor.start(store, 0, 2, 2, interval=1, standstill=60, compares=True) for _ in range(2))
    assert first is second
    call_monitor.stop(first)
    assert call_monitor.Current.monitor is first
    call_monitor.stop(second)
    assert call_monitor.Current.monitor is None
