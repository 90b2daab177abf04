"""Ranks are real, fresh and reported: what a test may expect of ``spawn``, and what it says when a rank fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import UsageError
from drivetrain_testing import RankFailedError, RankTimeoutError, spawn


@dataclass
class Payload:
    """A class that only this test module defines; it must survive the way into the ranks and back."""

    value: torch.Tensor


def report() -> tuple[int, int, str, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["LOCAL_RANK"], torch.get_num_threads()


def summed(payload: Payload, *, factor: int) -> Payload:
    dist.init_process_group("gloo")
    mine = payload.value * factor * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    dist.destroy_process_group()
    return Payload(mine)


def model_outlives_its_group(folder: str) -> int:
    """DDP models that are dropped at once after their process group, as at the end of a function that trained one."""
    for turn in range(10):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{folder}/{turn}", rank=rank, world_size=size)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
        model(torch.ones(4, 8)).sum().backward()
        dist.destroy_process_group()
        del model
    return turn


def wrong_in_rank_1() -> None:
    assert os.environ["RANK"] != "1", "not me"


def start_method() -> str:
    return multiprocessing.get_start_method()


def names_of_threads() -> list[str]:
    """Return the names of all threads of this process, those of C++ included."""
    return sorted(path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def raise_while_others_wait() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def hang_in_rank_0() -> None:
    if os.environ["RANK"] == "0":
        time.sleep(600)


def die(how: str) -> None:
    print("last words", flush=True)
    if os.environ["RANK"] == "1":
        if how == "exit":
            os._exit(9)
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(600)


def leave_a_mark() -> int:
    MARKS.append("x")
    os.environ["DRIVETRAIN_TEST_MARK"] = "x"
    return len(MARKS)


MARKS: list[str] = []


def read_environment(name: str) -> str | None:
    return os.environ.get(name)


def warn() -> None:
    warnings.warn("beware", UserWarning, stacklevel=1)


def speak() -> None:
    print(f"rank {os.environ['RANK']} speaks")


class StubbornError(Exception):
    """Can be pickled but not unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("stubborn")


def raise_stubborn() -> None:
    raise StubbornError(1, 2)


def exit_cleanly() -> None:
    raise SystemExit(0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    assert spawn(report, world_size) == [(rank, world_size, str(rank), 1) for rank in range(world_size)]


def test_process_group_works_without_arguments() -> None:
    results = spawn(summed, 2, Payload(torch.ones(3)), factor=10)
    for result in results:
        assert torch.equal(result.value, torch.full((3,), 30.0))


def test_assertion_in_one_rank_is_told_with_rank_and_traceback() -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed") as caught:
        spawn(wrong_in_rank_1, 2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.cause, AssertionError)
    assert "wrong_in_rank_1" in str(caught.value)
    assert "not me" in str(caught.value)


def test_first_failure_ends_ranks_that_wait_for_it() -> None:
    with pytest.raises(RankFailedError, match="rank 1 has had enough") as caught:
        spawn(raise_while_others_wait, 2, timeout=50)
    assert not isinstance(caught.value, RankTimeoutError)
    assert isinstance(caught.value.cause, ValueError)


def test_store_of_a_failed_job_is_closed() -> None:
    spawn(report, 1)  # what starts threads once has started them
    threads = names_of_threads()
    with pytest.raises(RankFailedError) as caught:
        spawn(wrong_in_rank_1, 2)
    assert caught.value.__traceback__ is not None  # and its frames are alive
    assert names_of_threads() == threads


def test_hang_is_ended_and_told_with_stacks() -> None:
    with pytest.raises(RankTimeoutError, match="rank 0 of 2 not done after 1 s") as caught:
        spawn(hang_in_rank_0, 2, timeout=1)
    assert "hang_in_rank_0" in caught.value.traceback


def test_model_that_outlives_its_process_group_hangs_no_rank(tmp_path: Path) -> None:
    assert spawn(model_outlives_its_group, 2, str(tmp_path)) == [9, 9]


@pytest.mark.parametrize(("how", "told"), [("exit", "exit code 9"), ("signal", "SIGSEGV")])
def test_silent_death_is_told_with_its_cause_and_last_words(how: str, told: str) -> None:
    with pytest.raises(RankFailedError, match=told) as caught:
        spawn(die, 2, how, timeout=50)
    assert caught.value.rank == 1
    assert "last words" in caught.value.traceback


def test_exception_that_cannot_travel_is_told_by_its_traceback() -> None:
    with pytest.raises(RankFailedError, match="stubborn") as caught:
        spawn(raise_stubborn, 1)
    assert caught.value.cause is None


def test_system_exit_is_a_failure() -> None:
    with pytest.raises(RankFailedError, match="SystemExit"):
        spawn(exit_cleanly, 1)


def test_ranks_are_fresh_and_leave_nothing() -> None:
    assert spawn(leave_a_mark, 2) == [1, 1]
    assert spawn(leave_a_mark, 1) == [1]
    assert "DRIVETRAIN_TEST_MARK" not in os.environ
    assert "RANK" not in os.environ


def test_processes_of_a_rank_start_as_under_a_launcher() -> None:
    assert spawn(start_method, 1) == [multiprocessing.get_all_start_methods()[0]]


def test_environment_is_added_and_removed() -> None:
    assert spawn(read_environment, 1, "SOME_NAME", env={"SOME_NAME": "v"}) == ["v"]
    assert spawn(read_environment, 1, "RANK", env={"RANK": None}) == [None]


def test_todays_environment_reaches_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATE_NAME", "late")
    assert spawn(read_environment, 1, "LATE_NAME") == ["late"]


def test_warning_filters_hold_in_ranks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RankFailedError, match="beware"):
            spawn(warn, 1)
        warnings.simplefilter("ignore")
        assert spawn(warn, 1) == [None]


def test_output_of_ranks_appears_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    spawn(speak, 2)
    assert capsys.readouterr().out == "rank 0 speaks\nrank 1 speaks\n"


def test_many_small_jobs() -> None:
    for _ in range(50):
        assert len(spawn(report, 2)) == 2


@pytest.mark.parametrize("world_size", [0, 1])
def test_function_without_a_name_is_refused(world_size: int) -> None:
    words = r"spawn cannot run .* on [01] ranks\. Give it a function at the top level of a module, and at least 1 rank"
    with pytest.raises(UsageError, match=words):
        spawn((lambda: None) if world_size else report, world_size)
    assert len(spawn(report, 1)) == 1
