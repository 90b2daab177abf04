"""What a launcher's environment says, and what is refused because it says half of it."""

from __future__ import annotations

import pytest

from drivetrain.errors import EnvironmentVariableError
from drivetrain.launch.environment import CONFIG, LAUNCHER, available_cores, read_place, worker_environment
from drivetrain.topology import Place

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HOME": "/root", "MASTER_ADDR": "node0", "MASTER_PORT": "1"},
        {"WORLD_SIZE": "1"},
        {"RANK": "", "WORLD_SIZE": ""},
    ],
)
def test_a_plain_python_process_is_alone(environ):
    assert read_place(environ) == Place()


def test_torchrun_is_read_in_full():
    assert read_place(TORCHRUN) == Place(5, 8, 1, 4, 1, 2, "torchrun")


def test_our_own_launcher_is_named():
    assert read_place({**TORCHRUN, LAUNCHER: "drivetrain"}).launcher == "drivetrain"


def test_one_process_of_a_cluster_needs_no_local_rank():
    assert read_place({"RANK": "0", "WORLD_SIZE": "1"}) == Place(launcher="environment")


def test_on_one_machine_started_by_hand_the_sizes_follow():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    assert read_place(environ) == Place(1, 2, 1, 2, 0, 1, "environment")


def test_the_machine_follows_from_equal_shares():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    place = read_place(environ)
    assert (place.node_rank, place.num_nodes) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": None, "WORLD_SIZE": None}, "RANK and WORLD_SIZE are not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set"),
        ({"RANK": "8"}, "rank 8 does not exist in a world of 8"),
        ({"RANK": "-1"}, "rank -1 does not exist"),
        ({"RANK": "zero"}, "RANK is 'zero', not a number"),
        ({"LOCAL_RANK": "4"}, "local rank 4 does not exist on a machine with 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "this machine has 9 processes, the whole job 8"),
        ({"LOCAL_WORLD_SIZE": "0"}, "local rank 1 does not exist on a machine with 0"),
        ({"RANK": "0"}, "local rank 1 is larger than rank 0"),
        ({"GROUP_RANK": "2"}, "machine 2 does not exist among 2"),
    ],
)
def test_half_an_environment_is_refused_and_what_was_seen_is_listed(changes, word):
    environ = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    if "LOCAL_WORLD_SIZE" in changes and changes["LOCAL_WORLD_SIZE"] is None:
        del environ["GROUP_WORLD_SIZE"]
    with pytest.raises(EnvironmentVariableError) as caught:
        read_place(environ)
    assert word in caught.value.what
    for name in {"RANK", "WORLD_SIZE"} & environ.keys():
        assert f"{name}={environ[name]}" in caught.value.whose
    assert "drivetrain launch" in caught.value.cure


def test_a_world_without_a_rank_is_never_a_run_of_one():
    with pytest.raises(EnvironmentVariableError):
        read_place({"WORLD_SIZE": "2"})


def test_workers_share_the_cores_unless_the_user_said_how_many_threads():
    added = worker_environment("{}", 10**6, {})
    assert added == {CONFIG: "{}", LAUNCHER: "drivetrain", "OMP_NUM_THREADS": "1"}
    assert worker_environment("{}", 1, {})["OMP_NUM_THREADS"] == str(available_cores())
    assert "OMP_NUM_THREADS" not in worker_environment("{}", 2, {"OMP_NUM_THREADS": "3"})
