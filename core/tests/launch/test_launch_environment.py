"""What a launcher's environment says, and what is refused because it says half of it."""

from __future__ import annotations

import pytest

from drivetrain.errors import EnvironmentVariableError
from drivetrain.launch.environment import (
    CONFIG,
    LAUNCHER,
    available_cores,
    meeting_point,
    read_process_info,
    refuse_nested,
    worker_environment,
)
from drivetrain.launch.machines import first_host
from drivetrain.topology import ProcessInfo

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
    assert read_process_info(environ) == ProcessInfo()


def test_torchrun_is_read_in_full():
    assert read_process_info(TORCHRUN) == ProcessInfo(5, 8, 1, 4, 1, 2, "torchrun")


def test_our_own_launcher_is_named():
    assert read_process_info({**TORCHRUN, LAUNCHER: "drivetrain"}).launcher == "drivetrain"


def test_one_process_of_a_cluster_needs_no_local_rank():
    assert read_process_info({"RANK": "0", "WORLD_SIZE": "1"}) == ProcessInfo(launcher="environment")


def test_on_one_machine_started_by_hand_the_sizes_follow():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    assert read_process_info(environ) == ProcessInfo(1, 2, 1, 2, 0, 1, "environment")


def test_the_machine_follows_from_equal_shares():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    process = read_process_info(environ)
    assert (process.node_rank, process.num_nodes) == (1, 2)


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
        ({"WORLD_SIZE": "1_000"}, "WORLD_SIZE is '1_000', not a number"),
        ({"WORLD_SIZE": "8.0"}, "WORLD_SIZE is '8.0', not a number"),
        ({"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, "8 processes cannot be 4 on this one of 1 machine"),
        ({"GROUP_WORLD_SIZE": "6"}, "8 processes cannot be 4 on this one of 6 machines"),
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
        del environ["GROUP_WORLD_SIZE"], environ["GROUP_RANK"]  # of which it would follow
    with pytest.raises(EnvironmentVariableError) as caught:
        read_process_info(environ)
    assert word in caught.value.what
    for name in {"RANK", "WORLD_SIZE"} & environ.keys():
        assert f"{name}={environ[name]}" in caught.value.whose
    assert "drivetrain launch" in caught.value.cure


def test_a_world_without_a_rank_is_never_a_run_of_one():
    with pytest.raises(EnvironmentVariableError):
        read_process_info({"WORLD_SIZE": "2"})


def test_workers_share_the_cores_unless_the_user_said_how_many_threads():
    added = worker_environment("{}", 10**6, {})
    assert added == {CONFIG: "{}", LAUNCHER: "drivetrain", "OMP_NUM_THREADS": "1"}
    assert worker_environment("{}", 1, {})["OMP_NUM_THREADS"] == str(available_cores())
    assert "OMP_NUM_THREADS" not in worker_environment("{}", 2, {"OMP_NUM_THREADS": "3"})


DEEPSPEED = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
}  # fmt: skip
RAY = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-node0-7@1",
}  # fmt: skip
INTEL_MPI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[03-04]",
}  # fmt: skip
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "node[03-04]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [(DEEPSPEED, "environment"), (RAY, "environment"), (OPEN_MPI, "mpirun"), (INTEL_MPI, "mpirun"), (SRUN, "srun")],
)
def test_every_launcher_is_read(environ, launcher):
    assert read_process_info(environ) == ProcessInfo(5, 8, 1, 4, 1, 2, launcher)


def test_unequal_shares_of_slurm():
    environ = {**SRUN, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_LOCALID": "1"}
    assert read_process_info(environ).local_world_size == 3
    assert read_process_info({**environ, "SLURM_NODEID": "0"}).local_world_size == 4


def test_the_shell_of_a_batch_job_is_one_process():
    assert read_process_info(BATCH_SCRIPT) == ProcessInfo()
    assert read_process_info({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == ProcessInfo()


def test_torchrun_under_srun_or_mpirun_counts_alone():
    one_a_machine = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert read_process_info({**one_a_machine, **TORCHRUN}) == ProcessInfo(5, 8, 1, 4, 1, 2, "torchrun")
    assert read_process_info({**OPEN_MPI, **TORCHRUN, LAUNCHER: "drivetrain"}).launcher == "drivetrain"


def test_two_launchers_that_agree_are_one():
    assert read_process_info({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "srun"
    assert read_process_info({**OPEN_MPI, **RAY}) == ProcessInfo(5, 8, 1, 4, 1, 2, "environment")


@pytest.mark.parametrize(
    "environ",
    [
        {**OPEN_MPI, **RAY, "RANK": "4", "LOCAL_RANK": "0"},
        {**SRUN, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        {**SRUN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_two_launchers_that_contradict_each_other_are_refused(environ):
    with pytest.raises(EnvironmentVariableError) as caught:
        read_process_info(environ)
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if name in environ:
            assert f"{name}={environ[name]}" in caught.value.whose


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": None}, "OMPI_COMM_WORLD_LOCAL_RANK is not set"),
        ({"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK is 'x', not a number"),
        ({"OMPI_COMM_WORLD_RANK": "9"}, "rank 9 does not exist"),
    ],
)
def test_half_an_environment_of_mpirun_is_refused(changes, word):
    environ = {name: value for name, value in {**OPEN_MPI, **changes}.items() if value is not None}
    with pytest.raises(EnvironmentVariableError) as caught:
        read_process_info(environ)
    assert word in caught.value.what


def test_where_tasks_of_a_cluster_meet():
    host, port = meeting_point(SRUN)
    assert host == "node03"
    assert 20000 <= port < 30000
    assert meeting_point({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}) == (host, port)
    assert meeting_point({**SRUN, "SLURM_JOB_ID": "78"}) != (host, port)
    assert meeting_point({**SRUN, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "1"}) is None
    assert meeting_point(TORCHRUN) is None
    assert meeting_point({}) is None
    assert meeting_point(BATCH_SCRIPT) is None


def test_mpirun_on_one_machine_meets_there_and_on_several_must_be_told():
    here = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    assert meeting_point(here)[0] == "127.0.0.1"
    assert meeting_point({**here, "MASTER_PORT": "4321"}) == ("127.0.0.1", 4321)
    assert meeting_point({**OPEN_MPI, "MASTER_ADDR": "10.0.0.1"})[0] == "10.0.0.1"
    with pytest.raises(EnvironmentVariableError, match="mpirun -x MASTER_ADDR"):
        meeting_point(OPEN_MPI)


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("node03", "node03"), ("node03,node07", "node03"), ("node[03-05,9],gpu1", "node03"), ("node[9]", "node9"),
        ("n[1,3]-ib,x", "n1-ib"), ("rack[1-2]node[3-4]", "rack1node3"), ("gpu1,node[03-05]", "gpu1"),
    ],
)  # fmt: skip
def test_the_first_host_of_slurms_list(listed, first):
    assert first_host(listed) == first


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"PMI_SIZE": "2"}, "PMI_RANK is not set"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_RANK is not set"),
    ],
)
def test_a_rank_of_mpirun_without_its_size_is_refused(environ, word):
    with pytest.raises(EnvironmentVariableError, match=word):
        read_process_info(environ)
    assert read_process_info(environ | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set, so that the processes do not know the address of rank 0"),
        ({"MASTER_ADDR": None, "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_where_to_meet_must_be_said(changes, word):
    environ = {name: value for name, value in {**DEEPSPEED, **changes}.items() if value is not None}
    with pytest.raises(EnvironmentVariableError, match=word):
        meeting_point(environ)
    with pytest.raises(EnvironmentVariableError, match="MASTER_PORT is 'x'"):
        meeting_point(SRUN | {"MASTER_PORT": "x"})
    assert meeting_point({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize("environ", [TORCHRUN, DEEPSPEED, OPEN_MPI, SRUN])
def test_a_launcher_in_each_process_of_another_is_refused(environ):
    for machines in (1, 2):
        with pytest.raises(EnvironmentVariableError, match="itself one of 8 processes") as caught:
            refuse_nested(machines, environ)
        assert "=8" in caught.value.whose
    refuse_nested(8, environ)


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "8", "RANK": "3"}, BATCH_SCRIPT, {"WORLD_SIZE": "1"}])
def test_a_launcher_on_each_machine_or_in_a_batch_script_is_not(environ):
    refuse_nested(1, environ)
