"""Several machines train one run: like one process, with machines that are lost, come back, and join."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("job.py")
SAMPLES, STEPS, HOLD, SAVED = 96, 16, 5, 3
"""Of ``job.py``: what it trains on, how often, where a first life of it stops, and what it has saved by then."""

LOST = "rendezvous.lost_after_seconds=6"
"""A launcher that ten other programs keep from running for three seconds was seen to be taken for lost."""

# Launchers on one machine after another: core/tests/launch shows each of these cases on one.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # on a machine that does ten other things


def lines(path: Path) -> list[dict]:
    """What the job wrote down."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What one process writes down."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, JOB, folder], check=True, timeout=200)
    log = lines(folder / "log.jsonl")
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    return log


def assert_same_run(log: list[dict], alone: list[dict]) -> None:
    """The last life of each step, one after the other, is the run of one process: no sample twice, none left out.

    A step that was trained after the last checkpoint and lost is trained again, on the same samples; its first life has
    left no trace in the parameters that went on.
    """
    steps = {line["step"]: line for line in log}
    assert list(steps) == list(range(1, STEPS + 1))
    assert [steps[line["step"]]["ids"] for line in alone] == [line["ids"] for line in alone]
    for epoch in range(2):
        half = [steps[step]["ids"] for step in range(1 + epoch * STEPS // 2, 1 + (epoch + 1) * STEPS // 2)]
        assert sorted(itertools.chain.from_iterable(half)) == list(range(SAMPLES))
    # 16 steps of Adam in float32 whose gradients are added in another order were seen to differ by 4e-7.
    expected = {line["step"]: pytest.approx(line["loss"], rel=1e-4, abs=1e-5) for line in alone}
    assert [line["loss"] for line in log] == [expected[line["step"]] for line in log]


def lives(log: list[dict]) -> list[tuple[int, int, int]]:
    """World, first and last step of each stretch that was trained without interruption."""
    found: list[tuple[int, int, int]] = []
    for line in log:
        if found and found[-1][0] == line["world"] and found[-1][2] + 1 == line["step"]:
            found[-1] = (*found[-1][:2], line["step"])
        else:
            found.append((line["world"], line["step"], line["step"]))
    return found


def held(folder: Path) -> bool:
    """The first life of the job has come to where it stays."""
    return len(lines(folder / "log.jsonl")) == HOLD


def test_ranks_follow_machine_rank_and_three_machines_train_as_one_process(cluster, tmp_path, alone):
    machines = cluster(3)
    numbers = ("--num_machines", 3, "--num_processes", 3)
    order = [2, 1, 0]  # the addresses ascend with the number, the arrival does not
    launched = [machines.launch(number, *numbers, command=(JOB, tmp_path)) for number in order]
    assert [code for code, _ in machines.ends(*launched)] == [0, 0, 0]
    places = lines(tmp_path / "places.jsonl")
    assert sorted((it["machine"], it["RANK"], it["GROUP_RANK"]) for it in places) == [(str(n),) * 3 for n in range(3)]
    # The host name of every namespace leads to a loopback address, which gloo would have taken.
    assert {(it["MASTER_ADDR"], it["GLOO_SOCKET_IFNAME"]) for it in places} == {("10.231.7.1", "eth0")}
    assert_same_run(lines(tmp_path / "log.jsonl"), alone)


@pytest.mark.parametrize("how", ["power", "cable"])
def test_a_machine_that_is_lost_stops_the_others(cluster, tmp_path, how):
    machines = cluster(2)
    numbers = ("--num_machines", 2, "--num_processes", 2, "--set", LOST)
    first, second = (machines.launch(number, *numbers, command=(JOB, tmp_path, HOLD)) for number in range(2))
    machines.wait_until(lambda: held(tmp_path))
    if how == "power":
        machines.machines[1].kill()
    else:
        machines.unplug(1)
    ((code, words),) = machines.ends(first)
    assert code == 1
    sentence = "machine 1 (" + words.rpartition("machine 1 (")[2].partition(",")[0]
    assert words.rstrip(".\n").endswith(f"{sentence}, 10.231.7.2) was lost: no sign of life for 6 seconds"), words
    assert words.count("was lost") == 1
    # Power: its connections end, and the ranks that are left complain of it, if they come to before they are stopped.
    assert words.count("Traceback") <= (1 if how == "power" else 0)
    if how == "cable":
        assert "rank 0 was stopped [host" in words
    ((code, words),) = machines.ends(second)
    assert code == (-9 if how == "power" else 1)
    if how == "cable":  # it is as lost to itself: it must not hold its devices for ever
        assert "rank 1 was stopped [host" in words
        assert (
            "machine 0 at 10.231.7.1, port 29617, which coordinates the run, was lost: no answer for 6 seconds" in words
        )
    assert [machine.pids() for machine in machines.machines] == [[], []]


def test_when_machine_0_is_lost_the_others_stop_and_say_so(cluster, tmp_path):
    machines = cluster(2)
    numbers = ("--num_machines", 2, "--num_processes", 2, "--max_restarts", 3)
    first, second = (machines.launch(number, *numbers, command=(JOB, tmp_path, HOLD)) for number in range(2))
    machines.wait_until(lambda: held(tmp_path))
    machines.machines[0].kill()
    (_, (code, words)) = machines.ends(first, second)
    assert code == 1
    assert "machine 0 at 10.231.7.1, port 29617, which coordinates the run, was lost" in words
    assert "Start all machines again" in words
    assert machines.machines[1].pids() == []


def test_a_machine_that_comes_back_is_taken_in_and_the_run_goes_on(cluster, tmp_path, alone):
    machines = cluster(2)
    numbers = ("--num_machines", 2, "--num_processes", 2, "--max_restarts", 1)
    numbers += ("--set", LOST)
    first, second = (machines.launch(number, *numbers, command=(JOB, tmp_path, HOLD)) for number in range(2))
    machines.wait_until(lambda: held(tmp_path))
    machines.machines[1].kill()
    assert machines.ends(second)[0][0] == -9
    again = machines.launch(1, *numbers, command=(JOB, tmp_path, HOLD))
    assert [code for code, _ in machines.ends(first, again)] == [0, 0]
    log = lines(tmp_path / "log.jsonl")
    assert lives(log) == [(2, 1, HOLD), (2, SAVED + 1, STEPS)]
    assert_same_run(log, alone)


@pytest.mark.parametrize(("how", "here"), [("power", 2), ("cable", 1)])
def test_the_ranks_of_a_lost_machine_are_given_up_and_the_others_go_on(cluster, tmp_path, alone, how, here):
    machines = cluster(2)
    numbers = ("--num_machines", "1:4", "--num_processes", 4 * here, "--max_restarts", 1)
    numbers += ("--set", LOST, "--set", "rendezvous.last_call_seconds=4")
    first, _ = (machines.launch(number, *numbers, command=(JOB, tmp_path, HOLD)) for number in range(2))
    machines.wait_until(lambda: held(tmp_path))
    if how == "power":
        machines.machines[1].kill()  # the connections end, and the workers that are left fail at once
    else:
        machines.unplug(1)  # nobody hears anything
    ((code, words),) = machines.ends(first)
    assert code == 0, words
    log = lines(tmp_path / "log.jsonl")
    assert lives(log) == [(2 * here, 1, HOLD), (here, SAVED + 1, STEPS)]
    assert_same_run(log, alone)


def test_a_machine_that_joins_is_taken_in(cluster, tmp_path, alone):
    machines = cluster(2)
    numbers = ("--num_machines", "1:2", "--num_processes", 2)
    first = machines.launch(0, *numbers, command=(JOB, tmp_path, HOLD))
    machines.wait_until(lambda: held(tmp_path))
    second = machines.launch(1, *numbers, command=(JOB, tmp_path, HOLD))
    (code, words), _ = machines.ends(first, second)
    assert (code, second.returncode) == (0, 0)
    assert "the workers are started again: since machines came or went\n" in words
    log = lines(tmp_path / "log.jsonl")
    assert lives(log) == [(1, 1, HOLD), (2, SAVED + 1, STEPS)]
    assert_same_run(log, alone)
