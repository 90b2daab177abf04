"""Environments as found on clusters: launchers inside of Slurm, names exported by batch scripts, odd values."""

from __future__ import annotations

import pytest

from drivetrain.errors import EnvironmentVariableError
from drivetrain.launch.environment import meeting_point, read_process_info
from drivetrain.topology import ProcessInfo

SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1",
}  # fmt: skip
DAEMON = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip
"""What srun tells the second of two daemons, and what that one's processes inherit."""
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
RAY = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("inner", "launcher"), [(OPEN_MPI, "mpirun"), (HYDRA, "mpirun"), (RAY, "environment")], ids=["ompi", "hydra", "ray"]
)
def test_processes_of_daemons_that_srun_started_belong_to_their_own_launcher(inner, launcher):
    environ = {**DAEMON, **inner, **MASTER}
    assert read_process_info(environ) == ProcessInfo(3, 4, 1, 2, 1, 2, launcher)
    assert meeting_point(environ) is None


def test_a_number_exported_for_all_tasks_is_not_taken_for_a_launcher_of_its_own():
    same_everywhere = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MASTER}
    with pytest.raises(EnvironmentVariableError, match="srun says rank 1 of 2, RANK says otherwise") as caught:
        read_process_info({**DAEMON, **same_everywhere})
    assert "SLURM_PROCID=1" in caught.value.whose
    assert "RANK=0" in caught.value.whose


@pytest.mark.parametrize(
    "exported",
    [
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "4", "NODE_RANK": "0", **MASTER},
        {"LOCAL_RANK": "1"},
        {"RANK": "1"},
        {"WORLD_SIZE": "1"},
    ],
)
def test_what_a_batch_script_exports_for_srun_may_be_part_of_it(exported):
    assert read_process_info({**SRUN, **exported}) == ProcessInfo(1, 4, 1, 4, 0, 1, "srun")


@pytest.mark.parametrize(
    ("exported", "words"),
    [
        ({"WORLD_SIZE": "8"}, "srun says rank 1 of 4, WORLD_SIZE says otherwise"),
        ({"LOCAL_RANK": "0"}, "srun says rank 1 of 4, LOCAL_RANK says otherwise"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "srun says rank 1 of 4, RANK and WORLD_SIZE say otherwise"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', not a number"),
    ],
)
def test_and_has_to_say_the_same(exported, words):
    with pytest.raises(EnvironmentVariableError, match=words) as caught:
        read_process_info({**SRUN, **exported})
    for name, value in {**exported, "SLURM_STEP_NUM_TASKS": "4"}.items():
        assert f"{name}={value}" in caught.value.whose


def test_unequal_machines_of_slurm_are_counted_and_have_to_add_up():
    nodes = {**SRUN, "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_TASKS": "7"}
    last = {**nodes, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    assert read_process_info(last) == ProcessInfo(6, 7, 0, 1, 3, 4, "srun")
    third = {**nodes, "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
    assert read_process_info(third) == ProcessInfo(5, 7, 1, 2, 2, 4, "srun")
    with pytest.raises(EnvironmentVariableError, match="counts 7 processes, and the world has 9"):
        read_process_info({**third, "SLURM_STEP_NUM_TASKS": "9"})


def test_a_task_that_does_not_know_of_the_others_never_trains_alone():
    part = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}  # a container was given some variables only
    with pytest.raises(EnvironmentVariableError, match="SLURM_STEP_NUM_TASKS is not set") as caught:
        read_process_info(part)
    assert "SLURM_PROCID=1" in caught.value.whose


def test_empty_variables_are_no_variables_where_processes_meet():
    empty = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "")
    assert read_process_info(empty) == ProcessInfo()
    assert meeting_point(empty) is None
    assert meeting_point({**SRUN, **empty}) == meeting_point(SRUN)


def test_two_that_contradict_each_other_are_told_apart_by_their_variables():
    both = {**OPEN_MPI, "PMI_RANK": "0", "PMI_SIZE": "2"}
    with pytest.raises(EnvironmentVariableError, match=r"\(OMPI_COMM_WORLD_RANK\) and mpirun \(PMI_RANK\)"):
        read_process_info(both)
