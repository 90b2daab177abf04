"""Prints what a launch would run: the commands and environments of all machines, or a batch file for Slurm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.launch.environment import RANKS
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.worker import EXIT_RESUMABLE


@dataclass(frozen=True)
class CommandLine:
    """The parts of a ``drivetrain launch`` command line, to be reassembled for another machine.

    Args:
        flags: names and values, in order; ``--set`` may be there several times.
        switches: flags without a value, such as ``-m``.
        command: the script and its arguments.
    """

    flags: tuple[tuple[str, str], ...]
    switches: tuple[str, ...]
    command: tuple[str, ...]

    def words(self, **changed: str) -> list[str]:
        """The command line, with the flags that number machines replaced."""
        kept = [(name, value) for name, value in self.flags if name not in changed]
        pairs = [*kept, *changed.items()]
        flags = [word for name, value in pairs for word in (f"--{name}", value)]
        return ["drivetrain", "launch", *flags, *self.switches, *self.command]


def machines(
    plan: LaunchPlan, typed: CommandLine, environment: Mapping[str, str], worker: Sequence[str]
) -> Iterator[str]:
    """The commands of each machine with a comment each, and the environment of every process.

    Args:
        plan: as :func:`drivetrain.launch.plan.make_plan` made it.
        typed: the user's command line.
        environment: variables that the launcher adds to those of its workers.
        worker: the command of one worker.
    """
    for machine in range(plan.num_machines):
        first = machine * plan.processes_here
        ranks = f"rank {first}" if plan.processes_here == 1 else f"ranks {first} to {first + plan.processes_here - 1}"
        yield f"# machine {machine} of {plan.machines}: {ranks} of {plan.world_size}"
        yield shlex.join(typed.words(machine_rank=str(machine)) if plan.num_machines > 1 else typed.words())
    host, _, port = plan.rdzv_endpoint.rpartition(":")
    meeting = "at a free port of this machine" if port == "0" else f"at {host}, port {port}"
    yield f"# They meet {meeting}. Every process gets, besides {', '.join(RANKS)},"
    yield "# MASTER_ADDR and MASTER_PORT, which are settled there:"
    for name, value in environment.items():
        yield f"export {name}={shlex.quote(value)}"
    yield shlex.join(worker)


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
        f"# {EXIT_RESUMABLE}: told to end, the run saved itself. The script resumes where it finds that checkpoint.",
        f'if [ "$code" -eq {EXIT_RESUMABLE} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]


def _job_name(command: Sequence[str]) -> str:
    return re.sub(r"\W+", "-", command[0].rpartition("/")[2].removesuffix(".py")) or "drivetrain"
