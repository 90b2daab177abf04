"""Environments of clusters that number machines: read whole, or refused with the variables and their values."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.config import load_config
from drivetrain.errors import ConfigError, EnvironmentVariableError
from drivetrain.launch import plan as planning
from drivetrain.launch.coordinator import is_here
from drivetrain.launch.environment import LAUNCHER, OTHERS, find_machine, meeting_point, read_process_info
from drivetrain.launch.machines import PLATFORMS, read_machine
from drivetrain.launch.plan import describe, make_plan
from drivetrain.topology import ProcessInfo

# ---- What each cluster sets in the container, or in each process, of the machine with the number 1 -------------------

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "HOSTNAME": "job-worker-0"}
TRAINER = {
    **POD, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "1",
}  # fmt: skip
"""A TrainJob of Kubeflow Trainer 2."""
PYTORCH_JOB = {
    **POD, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "0",
}  # fmt: skip
"""A PyTorchJob of the training operator up to 1.6."""
PYTORCH_JOB_7 = {
    **PYTORCH_JOB, "WORLD_SIZE": "8", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456",
}  # fmt: skip
"""A PyTorchJob of 1.7 with nprocPerNode: 4, whose WORLD_SIZE counts processes."""
ELASTIC = {
    **POD, "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:3",
    "PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "10",
}  # fmt: skip
LWS = {
    **POD, "LWS_LEADER_ADDRESS": "job-0.job.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1",
}  # fmt: skip
VOLCANO = {
    **POD, "MASTER_ADDR": "job-master-0.job", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1",
    "VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0", "VC_MASTER_HOSTS": "job-master-0.job", "VC_MASTER_NUM": "1",
    "VC_WORKER_HOSTS": "job-worker-0.job", "VC_WORKER_NUM": "1",
}  # fmt: skip
"""The tasks master and worker, with the plugin for PyTorch; this is the first worker."""
VOLCANO_SVC = {
    **POD, "VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    "VC_WORKER_NUM": "2",
}  # fmt: skip
INDEXED = {
    **POD, "JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-workers-0-0.job", "MASTER_PORT": "3389",
}  # fmt: skip
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "0", "SM_NUM_CPUS": "4",
    "SM_NETWORK_INTERFACE_NAME": "eth0", "TRAINING_JOB_NAME": "job",
}  # fmt: skip
SPEC = {
    "cluster": {"workerpool0": ["cmle-workerpool0-ab-0:2222"], "workerpool1": ["cmle-workerpool1-ab-0:2222"]},
    "environment": "cloud",
    "task": {"type": "workerpool1", "index": 0},
}
VERTEX = {
    "CLUSTER_SPEC": json.dumps(SPEC), "MASTER_ADDR": "cmle-workerpool0-ab-0", "MASTER_PORT": "2222", "RANK": "1",
    "WORLD_SIZE": "2",
}  # fmt: skip

MACHINES = {
    "trainer": (TRAINER, ("job-node-0-0.job", 29400, "1")),
    "pytorch_job": (PYTORCH_JOB, ("job-master-0", 23456, "")),
    "pytorch_job_7": (PYTORCH_JOB_7, ("job-master-0", 23456, "4")),
    "lws": (LWS, ("job-0.job.default", None, "")),
    "volcano": (VOLCANO, ("job-master-0.job", 23456, "")),
    "volcano_svc": (VOLCANO_SVC, ("job-worker-0.job", None, "")),
    "indexed": (INDEXED, ("job-workers-0-0.job", 3389, "")),
    "sagemaker": (SAGEMAKER, ("algo-1", None, "")),
    "vertex": (VERTEX, ("cmle-workerpool0-ab-0", 2222, "")),
}

AZURE = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105", "AZUREML_NODE_COUNT": "2", "AZUREML_RUN_ID": "job_1",
}  # fmt: skip
FLUX = {
    "FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2Xyz", "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "20", "FLUX_URI": "local:///tmp/x",
}  # fmt: skip
PALS = {
    "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_NODEID": "1", "PALS_APID": "2f-11",
    "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4", "PBS_JOBID": "12.pbs",
}  # fmt: skip
JSRUN = {
    "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4", "LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch5 1 h41n08 42 h41n09 42",
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
HOROVOD = {
    "HOROVOD_HOSTNAME": "n2", "HOROVOD_RANK": "5", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.7", "HOROVOD_GLOO_RENDEZVOUS_PORT": "41000",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-node0-7@1",
}  # fmt: skip
PROCESSES = {
    "azure": (AZURE, "environment"),
    "flux": (FLUX, "flux"),
    "pals": (PALS, "mpirun"),
    "pals_pmix": ({name: PALS[name] for name in PALS if not name.startswith("PMI_") or name == "PMI_SIZE"}, "mpirun"),
    "jsrun": (JSRUN, "jsrun"),
    "horovodrun": (HOROVOD, "horovodrun"),
    "azure_mpi": ({**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, "mpirun"),
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def planned(environ, **overrides):
    return make_plan(load_config(overrides={"use_cpu": True, **overrides}, environ={}), environ=environ)


# ---- Whole environments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("environ", "where"), MACHINES.values(), ids=MACHINES)
def test_the_number_of_a_machine_is_read(environ, where):
    machine = read_machine(environ)
    assert (machine.rank, machine.count, machine.fewest) == (1, 2, 2)
    assert (machine.address, machine.port, machine.processes) == where
    assert machine.seen.items() <= environ.items()


@pytest.mark.parametrize("name", [name for name in MACHINES if name != "pytorch_job_7"])
def test_a_script_without_a_launcher_is_a_rank_of_the_world(name):
    environ, (host, port, _) = MACHINES[name]
    process = read_process_info(environ)
    assert process == ProcessInfo(1, 2, 0, 1, 1, 2, process.launcher)
    assert process.launcher in {platform.name for platform in PLATFORMS}
    # Those with torch's own names are met by them.
    point = (environ["MASTER_ADDR"], int(environ["MASTER_PORT"])) if "MASTER_PORT" in environ else (host, port or 29500)
    assert (meeting_point(environ) or point) == point


@pytest.mark.parametrize(("environ", "where"), MACHINES.values(), ids=MACHINES)
def test_a_launcher_takes_its_number_from_the_cluster(environ, where):
    host, port, processes = where
    plan = planned(environ)
    here = int(processes or 1)
    assert (plan.num_machines, plan.machine_rank, plan.fewest_machines) == (2, 1, 0)
    assert (plan.processes_here, plan.world_size) == (here, 2 * here)
    assert plan.rdzv_endpoint == f"{host}:{port or 29500}"
    assert f"on machine 1 (numbered by {plan.numbered_by})" in describe(plan, load_config(environ={}))


@pytest.mark.parametrize(("environ", "launcher"), PROCESSES.values(), ids=PROCESSES)
def test_ranks_of_processes_are_read(environ, launcher):
    assert read_process_info(environ) == ProcessInfo(5, 8, 1, 4, 1, 2, launcher)


def test_azure_ml_on_machine_0_needs_the_number_of_machines():
    first = {**AZURE, "RANK": "1", "NODE_RANK": "0"}
    assert read_process_info(first) == ProcessInfo(1, 8, 1, 4, 0, 2, "environment")
    with pytest.raises(EnvironmentVariableError, match="LOCAL_WORLD_SIZE is not set"):
        read_process_info(without(first, "AZUREML_NODE_COUNT"))
    assert read_process_info(without(AZURE, "AZUREML_NODE_COUNT")).local_world_size == 4


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        (PROCESSES["azure_mpi"][0], "10.0.0.4"),
        ({**OPEN_MPI, "SLURM_JOB_NODELIST": "node[03-04]"}, "node03"),
        ({**OPEN_MPI, "LSB_MCPU_HOSTS": "h1 4 h2 4"}, "h1"),
        ({**OPEN_MPI, "SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}, "algo-1"),
        (JSRUN, "h41n08"),
        (HOROVOD, "10.0.0.7"),
    ],
    ids=["azure", "slurm", "lsf", "sagemaker", "jsrun", "horovod"],
)
def test_where_processes_on_several_machines_meet(environ, host):
    assert meeting_point(environ)[0] == host
    assert meeting_point({**environ, "MASTER_ADDR": "n9"})[0] == "n9"


def test_the_first_machine_of_a_pbs_job_is_in_its_file(tmp_path):
    path = tmp_path / "nodes"
    path.write_text("x1001c0s1b0n0\nx1001c0s1b0n1\n")
    host, port = meeting_point({**PALS, "PBS_NODEFILE": str(path)})
    assert host == "x1001c0s1b0n0"
    assert 20000 <= port < 30000
    with pytest.raises(EnvironmentVariableError, match="MASTER_ADDR, the address of machine 0, is not set"):
        meeting_point({**PALS, "PBS_NODEFILE": str(tmp_path / "none")})


def test_rank_0_notices_that_the_others_look_for_it_elsewhere():
    assert is_here("192.0.2.1") is False  # a documentation address, which no machine has
    assert is_here("127.0.0.1")
    assert is_here("no-such-host.invalid") is None
    first = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(EnvironmentVariableError, match=r"the other ranks expect rank 0 on 192.0.2.1, and it runs on"):
        meeting_point({**first, "AZ_BATCH_MASTER_NODE": "192.0.2.1:6000"})
    assert meeting_point({**first, "AZ_BATCH_MASTER_NODE": "127.0.0.1:6000"})[0] == "127.0.0.1"


# ---- One machine is alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        POD,
        {**TRAINER, "PET_NNODES": "1", "PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"},
        {"PET_NPROC_PER_NODE": "1"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {**PYTORCH_JOB, "RANK": "0", "WORLD_SIZE": "1"},
        {**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"},
        {"JOB_COMPLETION_INDEX": "", "PET_NNODES": ""},
    ],
)
def test_one_machine_is_a_run_of_its_own(environ):
    assert read_process_info(environ) == ProcessInfo()
    assert meeting_point(environ) is None
    assert (planned(environ).num_machines, planned(environ).world_size) == (1, 1)


# ---- Halves and contradictions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "words", "shown"),
    [
        (without(TRAINER, "PET_NODE_RANK"), "and PET_NODE_RANK is not set", "PET_NNODES=2"),
        (without(TRAINER, "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"), "WORLD_SIZE is not set", "INDEX=1"),
        (ELASTIC, "and PET_NODE_RANK is not set", "PET_NNODES=1:3"),
        ({"PET_NODE_RANK": "1"}, "machine 1 does not exist among 1", "PET_NODE_RANK=1"),
        ({**TRAINER, "PET_NODE_RANK": "2"}, "machine 2 does not exist among 2", "PET_NODE_RANK=2"),
        ({**TRAINER, "PET_NODE_RANK": "one"}, "PET_NODE_RANK is 'one', not a number", "PET_NODE_RANK=one"),
        ({**TRAINER, "PET_NNODES": "3:2"}, "says 3 to 2 machines", "PET_NNODES=3:2"),
        ({**TRAINER, "PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE is 'many'", "PET_NPROC_PER_NODE=many"),
        ({**TRAINER, "PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT is 99999", "PET_MASTER_PORT=99999"),
        (without(LWS, "LWS_WORKER_INDEX"), "and LWS_WORKER_INDEX is not set", "LWS_GROUP_SIZE=2"),
        (without(LWS, "LWS_GROUP_SIZE"), "and LWS_GROUP_SIZE is not set", "LWS_WORKER_INDEX=1"),
        ({**POD, "JOB_COMPLETION_INDEX": "3"}, "and WORLD_SIZE is not set", "JOB_COMPLETION_INDEX=3"),
        (without(VOLCANO, "RANK", "WORLD_SIZE"), "RANK or VC_TASK_INDEX and WORLD_SIZE or VC", "VC_TASK_INDEX=0"),
        (without(VOLCANO, "RANK"), "RANK or VC_TASK_INDEX is not set", "VC_TASK_INDEX=0"),
        (without(PYTORCH_JOB, "WORLD_SIZE"), "and WORLD_SIZE is not set", "RANK=1"),
        (without(SAGEMAKER, "SM_HOSTS"), "SM_HOSTS is not set", "SM_CURRENT_HOST=algo-2"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-9"}, "are not what this cluster sets", "SM_CURRENT_HOST=algo-9"),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1,algo-2"}, "are not what this cluster sets", "SM_HOSTS=algo-1,algo-2"),
        ({**VERTEX, "CLUSTER_SPEC": "{}"}, "CLUSTER_SPEC is not what this cluster sets", "CLUSTER_SPEC={}"),
    ],
)
def test_half_an_environment_is_refused_with_its_variables(environ, words, shown):
    for read in (read_process_info, find_machine):
        with pytest.raises(EnvironmentVariableError) as caught:
            read(environ)
        assert words in caught.value.what
        assert shown in caught.value.whose
        assert caught.value.cure


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TRAINER, "RANK": "0", "WORLD_SIZE": "2"}, "Kubeflow (PET_*) says machine 1 of 2, indexed Job, JobSet says"),
        ({**TRAINER, "RANK": "1", "WORLD_SIZE": "4"}, "Kubeflow (PET_*) says machine 1 of 2, indexed Job, JobSet says"),
        ({**LWS, "PET_NNODES": "4", "PET_NODE_RANK": "1"}, "says machine 1 of 4, LeaderWorkerSet says machine 1 of 2"),
        ({**SAGEMAKER, **LWS, "LWS_WORKER_INDEX": "0"}, "says machine 0 of 2, SageMaker says machine 1 of 2"),
        ({**VERTEX, **POD, "RANK": "0"}, "Vertex AI says machine 1 of 2, Kubernetes"),
    ],
)
def test_two_clusters_that_contradict_each_other_are_refused(environ, words):
    for read in (read_process_info, find_machine):
        with pytest.raises(EnvironmentVariableError) as caught:
            read(environ)
        assert words in caught.value.what


def test_world_size_of_a_pytorch_job_may_count_processes():
    assert read_machine(PYTORCH_JOB_7).count == 2
    with pytest.raises(EnvironmentVariableError, match="says machine 1 of 6"):
        read_machine({**PYTORCH_JOB_7, "WORLD_SIZE": "6"})


def test_ranks_that_were_exported_by_hand_may_not_contradict_the_cluster():
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read_process_info({**TRAINER, **ranks}) == ProcessInfo(1, 2, 0, 1, 1, 2, "environment")
    alone = {**ranks, "RANK": "0", "WORLD_SIZE": "1"}
    with pytest.raises(EnvironmentVariableError, match=r"says machine 1 of 2, and .* say machine 0 of 1") as caught:
        read_process_info({**TRAINER, **alone})
    assert "PET_NODE_RANK=1" in caught.value.whose
    assert "LOCAL_RANK=0" in caught.value.whose
    # A launcher inside of the pod has counted for itself, and so has mpirun.
    assert read_process_info({**TRAINER, **alone, LAUNCHER: "drivetrain"}).launcher == "drivetrain"
    assert read_process_info({**SAGEMAKER, **OPEN_MPI}).launcher == "mpirun"
    # In a JobSet with ranks of processes there is nothing else that numbers machines.
    assert read_process_info({**POD, "JOB_COMPLETION_INDEX": "1", **ranks}).world_size == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE asks for 4 processes on this machine"),
        ({"PET_NPROC_PER_NODE": "4", "PET_NNODES": "1", "PET_NODE_RANK": "0"}, "asks for 4 processes"),
        ({"PET_NPROC_PER_NODE": "cpu"}, "one process on each of 3 cores"),
        ({"PET_NNODES": "1:4"}, "says 1 to 4 machines, which a launcher has to count"),
    ],
)
def test_what_needs_a_launcher_is_refused_without_one(changes, words, monkeypatch):
    monkeypatch.setattr("drivetrain.launch.environment.available_cores", lambda: 3)
    with pytest.raises(EnvironmentVariableError, match=words) as caught:
        read_process_info({**TRAINER, **changes})
    assert "drivetrain launch script.py" in caught.value.cure


@pytest.mark.parametrize("environ", [LWS, SAGEMAKER, {**TRAINER, "PET_NPROC_PER_NODE": "auto"}])
def test_a_machine_with_several_accelerators_needs_a_launcher_too(environ, monkeypatch):
    monkeypatch.setattr(planning, "count_devices", lambda: 8)
    with pytest.raises(EnvironmentVariableError, match="says machine 1 of 2, this one has 8 accelerators"):
        read_process_info(environ)
    monkeypatch.setattr(planning, "count_devices", lambda: 1)
    assert read_process_info(environ).world_size == 2


# ---- What the user says besides --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_machines": 4}, "num_machines is 4 .*says machine 1 of 2, which makes it 2"),
        ({"num_machines": 1}, "num_machines is 1 .*says machine 1 of 2, which makes it 2"),
        ({"machine_rank": 0}, "machine_rank is 0 .*says machine 1 of 2, which makes it 1"),
        ({"num_processes": 8}, "num_processes is 8 .*which makes it 2"),
    ],
)
def test_settings_that_contradict_the_cluster_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words) as caught:
        planned(TRAINER, **overrides)
    assert "PET_NNODES=2" in caught.value.whose
    assert "unset them" in caught.value.cure


def test_settings_that_agree_are_accepted_and_an_address_goes_first():
    plan = planned(TRAINER, num_machines=2, machine_rank=1, num_processes=2, main_process_ip="10.0.0.1")
    assert (plan.num_machines, plan.machine_rank, plan.rdzv_endpoint) == (2, 1, "10.0.0.1:29400")
    assert planned(TRAINER, main_process_port=1234).rdzv_endpoint == "job-node-0-0.job:1234"


def test_settings_complete_what_a_cluster_says_in_part():
    plan = planned(ELASTIC, machine_rank=2)
    assert (plan.fewest_machines, plan.num_machines, plan.machine_rank) == (1, 3, 2)
    assert (plan.processes_here, plan.rdzv_endpoint) == (2, "job-worker-0:23456")
    job = {**POD, "JOB_COMPLETION_INDEX": "2"}
    plan = planned(job, num_machines=4, main_process_ip="job-0-0.job")
    assert (plan.num_machines, plan.machine_rank) == (4, 2)
    assert planned(job, num_machines=1).num_machines == 1  # said to be alone
    with pytest.raises(ConfigError, match="main_process_ip is not set") as caught:
        planned(job, num_machines=4)
    assert "indexed Job, JobSet says machine 2 of 4" in caught.value.whose


# ---- A launcher in the place of a process ----------------------------------------------------------------------------

BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "1"}
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip
ONE_A_MACHINE = {
    "by_hand": (BY_HAND, "m:1"),
    "srun": (SRUN, "n1:"),
    "azure": ({**AZURE, "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "10.0.0.4:6105"),
    "horovod": (
        {**HOROVOD, "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"},
        "10.0.0.7:",
    ),
}


@pytest.mark.parametrize(("environ", "endpoint"), ONE_A_MACHINE.values(), ids=ONE_A_MACHINE)
def test_a_launcher_that_is_the_only_process_on_its_machine_joins_the_world(environ, endpoint):
    plan = planned(environ)
    assert (plan.num_machines, plan.machine_rank, plan.world_size) == (2, 1, 2)
    assert plan.rdzv_endpoint.startswith(endpoint)


@pytest.mark.parametrize("environ", [AZURE, FLUX, PALS, JSRUN, HOROVOD, OPEN_MPI])
def test_a_launcher_that_is_one_of_several_on_its_machine_is_refused(environ):
    with pytest.raises(EnvironmentVariableError, match="itself one of 8 processes"):
        planned(environ)


@pytest.mark.parametrize(
    ("environ", "overrides", "words"),
    [
        ({"RANK": "1"}, {}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, {}, "RANK is not set"),
        (without(BY_HAND, "MASTER_ADDR"), {}, "MASTER_ADDR is not set"),
        ({**BY_HAND, "RANK": "2"}, {}, "rank 2 does not exist in a world of 2"),
        (BY_HAND, {"num_machines": 1}, "num_machines is 1 .*the environment says machine 1 of 2"),
        (BY_HAND, {"num_machines": 3, "main_process_ip": "m"}, "num_machines is 3"),
        (SRUN, {"machine_rank": 0}, "machine_rank is 0 .*srun says machine 1 of 2"),
    ],
)
def test_a_launcher_never_starts_a_run_of_its_own_by_mistake(environ, overrides, words):
    with pytest.raises((EnvironmentVariableError, ConfigError), match=words):
        planned(environ, **overrides)


def test_flags_that_number_machines_may_stand_beside_a_world_of_processes():
    exported = {"RANK": "0", "WORLD_SIZE": "8"}  # by a batch script, for each machine
    plan = planned(exported, num_machines=2, machine_rank=1, main_process_ip="n1", num_processes=8)
    assert (plan.num_machines, plan.machine_rank, plan.world_size) == (2, 1, 8)


# ---- Two machines on this one ----------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import torch
from drivetrain import Accelerator
from drivetrain.launch.environment import read_process_info
accelerator = Accelerator(cpu=True)
seen = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
facts = {"seen": seen, "local": accelerator.local_process_index, "node": read_process_info().node_rank}
json.dump(facts, open(f"{sys.argv[1]}/{accelerator.process_index}.json", "w"))
"""
LAUNCH = "from drivetrain.cli.main import main; main()"


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])


def pods(kind: str, index: int, port: str) -> dict[str, str]:
    """What two containers on this machine get from a cluster."""
    rank = {"RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {
        "trainer": TRAINER
        | {"PET_NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index)}
        | {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port},
        "pytorch_job": PYTORCH_JOB | rank,
        "lws": LWS | {"LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "localhost", "MASTER_PORT": port},
        "sagemaker": {"SM_HOSTS": '["127.0.0.1","127.0.0.2"]', "SM_CURRENT_HOST": f"127.0.0.{index + 1}"}
        | {"MASTER_PORT": port},
        "flux": {"FLUX_TASK_RANK": str(index), "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "2"}
        | {"FLUX_JOB_NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    }[kind]


def together(commands: list[list[str]], environments: list[dict[str, str]], folder: Path) -> list[tuple[int, str]]:
    """Start the containers' commands at once and wait for all."""
    started = [
        subprocess.Popen(words, env=environ, cwd=folder, stderr=subprocess.PIPE, text=True)
        for words, environ in zip(commands, environments, strict=True)
    ]
    end = time.monotonic() + 200
    return [(each.wait(max(1, end - time.monotonic())), each.communicate()[1]) for each in started]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["trainer", "pytorch_job", "lws", "sagemaker", "flux"])
@pytest.mark.gate("lws")
def test_two_containers_train_together_without_a_launcher(kind, clean_environment, script, tmp_path):
    job, port = script(SCRIPT), free_port()
    environments = [clean_environment(**pods(kind, index, port)) for index in range(2)]
    ended = together([[sys.executable, str(job), str(tmp_path)]] * 2, environments, tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"seen": [0, 1], "local": 0, "node": rank} for rank in range(2)], ended


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "processes"), [("trainer", 2), ("pytorch_job", 1), ("flux", 1)])
@pytest.mark.gate("flux-1")
def test_two_containers_with_a_launcher_are_one_run(kind, processes, clean_environment, script, tmp_path):
    job, port = script(SCRIPT), free_port()
    asked = {"PET_NPROC_PER_NODE": str(processes)} if kind == "trainer" else {}
    environments = [clean_environment(**(pods(kind, index, port) | asked)) for index in range(2)]
    words = [sys.executable, "-c", LAUNCH, "launch", "--cpu", str(job), str(tmp_path)]
    ended = together([words] * 2, environments, tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    world = 2 * processes
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    places = [divmod(rank, processes) for rank in range(world)]
    assert found == [{"seen": list(range(world)), "local": local, "node": node} for node, local in places], ended


def test_a_container_alone_never_trains_in_silence(clean_environment, script, tmp_path):
    job = script(SCRIPT)
    environ = clean_environment(**POD, JOB_COMPLETION_INDEX="1")
    for words in ([str(job)], ["-c", LAUNCH, "launch", "--cpu", str(job)]):
        ((code, said),) = together([[sys.executable, *words, str(tmp_path)]], [environ], tmp_path)
        assert code in (1, 2)  # of Python's, of the command line's
        assert "indexed Job, JobSet started this process, and WORLD_SIZE is not set" in said
        assert "JOB_COMPLETION_INDEX=1" in said
    assert not list(tmp_path.glob("*.json"))


def test_every_row_has_a_source():
    assert all(row.source for row in (*PLATFORMS, *OTHERS))
