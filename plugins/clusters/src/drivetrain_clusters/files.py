"""Writes files that submit a launch to a cluster: a Slurm batch file or a Kubernetes manifest. Imports no torch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from drivetrain.api import UsageError

if TYPE_CHECKING:
    from drivetrain.api.programs import CommandLine, LaunchPlan

_RESUMABLE = os.EX_TEMPFAIL
"""Exit code of a launcher whose run saved a checkpoint on a signal and ended."""

_PORT = 29500
"""Default rendezvous port, that of torch."""

_NUMBERS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""Flags that the variables of Kubernetes take the place of."""


def write(
    plan: LaunchPlan, typed: CommandLine, file: str, *, kind: str, image: str, on_cpu: bool, resumable: bool
) -> str:
    """Write the file that a cluster is given.

    Args:
        plan: how many machines and processes.
        typed: what the user typed.
        file: where to.
        kind: ``Slurm``, or one of :data:`KINDS`.
        image: of the container, for Kubernetes.
        on_cpu: no accelerators are asked for.
        resumable: the run saves itself on a signal.

    Returns:
        The command that submits it.
    """
    accelerators = 0 if on_cpu else plan.processes_here
    if kind == "Slurm":
        text, submit = batch_file(plan, typed, accelerators=accelerators, resumable=resumable), "sbatch"
    else:
        text = manifest(plan, typed, kind=kind, image=image, accelerators=accelerators, resumable=resumable)
        submit = "kubectl create -f"
    Path(file).write_text(text, encoding="utf-8")
    return f"{submit} {file}"


def batch_file(plan: LaunchPlan, typed: CommandLine, *, accelerators: int, resumable: bool = False) -> str:
    """Text for ``sbatch``: one launcher on each machine of the allocation, with the rendezvous on the first.

    Args:
        plan: how many machines and processes.
        typed: what the user typed; flags that number machines are filled in by Slurm.
        accelerators: devices to ask for on each machine; 0 asks for none.
        resumable: the run saves itself on a signal, so have Slurm send it in time and requeue the job.
    """
    # The batch shell expands the address, the shell of each task its own number.
    filled = {"num_machines": plan.machines, "machine_rank": "$SLURM_NODEID", "main_process_ip": "$HEAD"}
    filled |= {} if any(name == "main_process_port" for name, _ in typed.flags) else {"main_process_port": "$PORT"}
    line = shlex.join(typed.words(**filled) if plan.num_machines > 1 else typed.words())
    for text in filled.values():
        line = line.replace(f"'{text}'", f'"{text}"')
    start = f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(line)}"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_job_name(typed.command)}",
        f"#SBATCH --nodes={plan.num_machines}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={accelerators}"] if accelerators else []),
        "#SBATCH --output=%x-%j.out",
        *(["#SBATCH --requeue", "#SBATCH --signal=TERM@120", "#SBATCH --open-mode=append"] if resumable else []),
        "# Time, partition, account and cores are yours to add: #SBATCH --time=24:00:00 --cpus-per-task=16",
        "",
        "set -eu",
        'export HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        "# Below the range from which systems lend ports, and another one for every job.",
        "export PORT=$((20000 + SLURM_JOB_ID % 10000))",
        *(_submitted_again(start) if resumable else [start]),
    ]
    return "\n".join(lines) + "\n"


def _submitted_again(start: str) -> list[str]:
    """A command that requeues the job depending on its exit code."""
    return [
        "code=0",
        f"{start} || code=$?",
        f"# {_RESUMABLE}: told to end, the run saved itself. The script resumes where it finds that checkpoint.",
        f'if [ "$code" -eq {_RESUMABLE} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]


def _job_name(command: Sequence[str]) -> str:
    return re.sub(r"\W+", "-", command[0].rpartition("/")[2].removesuffix(".py")) or "drivetrain"


KINDS = ("JobSet", "TrainJob")
"""Kubernetes kinds that :func:`manifest` writes."""

_NODE = "node"
"""Name of the replicated job and of its container, as in Kubeflow's own runtimes."""

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_GRACE = 120
"""Seconds between SIGTERM and SIGKILL for a run that saves itself; Kubernetes' default is 30."""

_RESTARTS = 100
"""Maximum number of restarts of a run that saves a checkpoint on a signal."""


def manifest(
    plan: LaunchPlan, typed: CommandLine, *, kind: str, image: str, accelerators: int, resumable: bool = False
) -> str:
    """Text for ``kubectl create -f``: one launcher in each pod, numbered by the variables of ``torchrun``.

    Args:
        plan: how many machines and processes.
        typed: what the user typed; flags that number machines are left to the variables.
        kind: one of :data:`KINDS`. A JobSet needs only its own controller, a TrainJob Kubeflow Trainer.
        image: of the container; it has to hold Drivetrain, the script and the configuration file.
        accelerators: NVIDIA GPUs to ask for in each pod; 0 asks for none.
        resumable: the run saves itself on a signal, so give it time, and start it again.

    Raises:
        UsageError: an elastic TrainJob.
    """
    name = re.sub(r"[^a-z0-9]+", "-", _job_name(typed.command).lower()).strip("-")[:40].strip("-") or "drivetrain"
    name = name if name[0].isalpha() else f"run-{name}"
    command = typed.words(**dict.fromkeys(_NUMBERS))
    container: dict[str, Any] = {"image": image, "command": command}
    resources = {"limits": {"nvidia.com/gpu": str(accelerators)}} if accelerators else None
    if kind == "TrainJob":
        if plan.fewest_machines:
            raise UsageError(
                f"a TrainJob has a fixed number of nodes, and num_machines is {plan.machines}",
                cure="Write one number of machines, or --kubernetes_kind JobSet.",
            )
        trainer = {**container, "numNodes": plan.num_machines, "numProcPerNode": plan.processes_here}
        spec: dict[str, Any] = {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer | ({"resourcesPerNode": resources} if resources else {}),
        }
        version = "trainer.kubeflow.org/v1alpha1"
    else:
        pod = _pod(plan, name, container | ({"resources": resources} if resources else {}))
        if resumable:
            pod["terminationGracePeriodSeconds"] = _GRACE
        job = {
            "parallelism": plan.num_machines,
            "completions": plan.num_machines,
            "completionMode": "Indexed",
            "backoffLimit": plan.max_restarts,  # a pod that is started again joins the others, which wait for it
            "template": {"spec": pod},
        }
        spec = {"failurePolicy": {"maxRestarts": _RESTARTS}} if resumable else {}
        spec["replicatedJobs"] = [{"name": _NODE, "replicas": 1, "template": {"spec": job}}]
        version = "jobset.x-k8s.io/v1alpha2"
    text = yaml.safe_dump(
        {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}, sort_keys=False, width=100
    )
    return f"# Volumes, node selectors, queues and CPU and memory requests are yours to add.\n{text}"


def _pod(plan: LaunchPlan, name: str, container: dict[str, Any]) -> dict[str, Any]:
    """The pod of a JobSet, with the variables that Kubeflow Trainer would set."""
    port = int(plan.rdzv_endpoint.rpartition(":")[2]) or _PORT
    values = {
        "PET_NNODES": plan.machines,
        "PET_NPROC_PER_NODE": str(plan.processes_here),
        "PET_MASTER_ADDR": f"{name}-{_NODE}-0-0.{name}",
        "PET_MASTER_PORT": str(port),
    }
    env: list[dict[str, Any]] = [{"name": variable, "value": value} for variable, value in values.items()]
    env.append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}})
    whole = {"name": _NODE, **container, "env": env, "ports": [{"containerPort": port, "protocol": "TCP"}]}
    return {"restartPolicy": "Never", "containers": [whole]}
