"""Prints what a launch would run: the commands and environments of all machines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.launch.environment import RANKS
from drivetrain.launch.plan import LaunchPlan


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

    def words(self, **changed: str | None) -> list[str]:
        """The command line, with other values of these flags; ``None`` leaves one out."""
        pairs = [(name, value) for name, value in self.flags if name not in changed]
        pairs += [(name, value) for name, value in changed.items() if value is not None]
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
