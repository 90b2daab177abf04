"""Asks for the values of a configuration file, except those that can be detected on the machine."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drivetrain.cli.prompts import Asker, Choice, NoAnswerError, Question, explain_blocked
from drivetrain.config import load_config
from drivetrain.config.locate import write
from drivetrain.config.schema import MeshConfig
from drivetrain.errors import BackendError, DrivetrainError
from drivetrain.launch.devices import Inventory, take_inventory
from drivetrain.launch.environment import DEFAULT_PORT, available_cores
from drivetrain.launch.machines import first_host
from drivetrain.registry import Registry, known_extras, pip_line
from drivetrain.topology import DATA_AXES
from drivetrain.wording import sentences

_ALL, _SOME, _CPU = "all accelerators", "some accelerators", "the CPU"
_PRECISIONS = {
    "no": "Everything in float32.",
    "bf16": "Computes in bfloat16; parameters stay float32.",
    "fp16": "Computes in float16 with a scaled loss; parameters stay float32.",
}

# ---- detection ------------------------------------------------------------------------------------------------------

BEST = "best"
"""The answer that leaves the backend to the core."""


@dataclass(frozen=True)
class Machine:
    """Properties detected on this machine.

    Args:
        inventory: accelerators that the environment does not hide.
        cores: that this process may use.
        machines: of the Slurm allocation in which the wizard runs; 1 elsewhere.
        first: name of the allocation's first machine; empty elsewhere.
    """

    inventory: Inventory
    cores: int
    machines: int = 1
    first: str = ""

    def __str__(self) -> str:
        slurm = f"; Slurm gives {self.machines} machines" if self.machines > 1 else ""
        return f"{self.inventory}, and {self.cores} cores{slurm}"


def detect(environ: Mapping[str, str] | None = None) -> Machine:
    """Detect this machine's devices. Takes about as long as ``import torch``, which another process does."""
    environ = os.environ if environ is None else environ
    listed = environ.get("SLURM_JOB_NODELIST", "")
    return Machine(
        inventory=take_inventory((), environ),
        cores=available_cores(),
        machines=int(environ.get("SLURM_JOB_NUM_NODES") or 1),
        first=first_host(listed) if listed else "",
    )


def backend_choices(registry: Registry, world_size: int) -> tuple[Choice, ...]:
    """Every backend that is installed or could be, each with the reason why it cannot train here.

    Args:
        registry: of the backends.
        world_size: processes over all machines.
    """
    try:
        taken = registry.default(world_size).name
        choices = [Choice(BEST, f"What fits the number of processes: now {taken}.")]
    except BackendError as error:
        choices = [Choice(BEST, blocked="none fits", cure=str(error))]
    for report in registry.reports():
        blocked = cure = ""
        if not report.ready:
            why = report.why.removeprefix(f"backend {report.name!r} cannot run here: ")
            blocked, cure = "cannot run here", sentences(f"{why}.", report.cure)
        elif world_size > 1 and report.capabilities is not None and not report.capabilities.multi_process:
            blocked = f"trains in one process, not in {world_size}"
        choices.append(Choice(report.name, report.summary, blocked, cure))
    present = {choice.value for choice in choices}
    choices += [
        Choice(extra, blocked="not installed", cure=f"It is not installed. Run: {pip_line(extra)}")
        for extra in known_extras()
        if extra not in present
    ]
    return tuple(choices)


# ---- the wizard -----------------------------------------------------------------------------------------------------


class Wizard:
    """Asks the questions and collects values by dotted key.

    Args:
        asker: asks the questions.
        machine: what was detected.
        registry: of the backends.
    """

    def __init__(self, asker: Asker, machine: Machine, registry: Registry) -> None:
        self._asker, self._machine, self._registry = asker, machine, registry
        self.values: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """Ask everything; when the input ends, the rest keeps its defaults.

        Returns:
            Values by dotted key, typed as the configuration has them: what was answered and is no default.
        """
        try:
            machines = self._machines()
            here = self._devices(machines)
            world = here * machines
            backend = self._backend(world)
            self._mesh(backend, world)
            self._training(backend)
            self._settings(backend)
        except NoAnswerError:
            click.echo("no more answers: the rest are defaults")
        loaded = load_config(overrides=dict(self.values), environ={})
        values = loaded.config.model_dump() | loaded.sections
        return {key: functools.reduce(operator.getitem, key.split("."), values) for key in self.values}

    def confirm(self, text: str) -> bool:
        """Ask for confirmation; no answer counts as yes."""
        with contextlib.suppress(NoAnswerError):
            return self._asker.ask(Question(text, "yes", (Choice("yes"), Choice("no")))) == "yes"
        return True

    # ---- the questions ------------------------------------------------------------------------------------------

    def _machines(self) -> int:
        found = self._machine.machines
        # A range, for elastic jobs, is written by hand.
        machines = int(self._asker.ask(Question("How many machines?", str(found), complaint=_not_a_count)))
        if machines > 1:
            self.values["num_machines"] = str(machines)
            text = "Address of machine 0, where the others meet it?"
            self._ask("main_process_ip", text, self._machine.first, unwritten=None)
            self._ask("main_process_port", "A free port there?", str(DEFAULT_PORT), unwritten=None)
        return machines

    def _devices(self, machines: int) -> int:
        """Ask for the devices; returns the processes on one machine."""
        devices = self._machine.inventory.devices
        if not devices:
            return self._processes(machines)
        answers = [Choice(_ALL, f"One process for each of the {len(devices)} on a machine.")]
        answers += [Choice(_SOME, "One process for each of those that you mark.")] * (len(devices) > 1)
        chosen = self._asker.ask(Question("What computes?", _ALL, (*answers, Choice(_CPU))))
        if chosen == _CPU:
            self.values["use_cpu"] = "true"
            return self._processes(machines)
        if chosen == _ALL:
            return len(devices)
        marks = tuple(Choice(str(each.index), str(each)) for each in devices)
        all_of_them = ",".join(each.value for each in marks)
        question = Question("Which of them?", all_of_them, marks, several=True, complaint=_nothing_marked)
        marked = self._asker.ask(question)
        self.values["accelerator_ids"] = f"[{marked}]"
        return len(marked.split(","))

    def _processes(self, machines: int) -> int:
        """Ask for the number of processes on one machine without accelerators."""
        text = "How many processes on each machine?" if machines > 1 else "How many processes?"
        here = int(self._asker.ask(Question(text, "1", complaint=_not_a_count)))
        self.values["num_processes"] = str(here * machines)
        return here

    def _backend(self, world: int) -> str | None:
        """Ask for the backend; returns its name, or ``None`` to let the core choose."""
        choices = backend_choices(self._registry, world)
        processes = "one process" if world == 1 else f"{world} processes"
        if all(choice.blocked for choice in choices):
            explain_blocked(choices)
            raise click.ClickException(f"no backend can train {processes} here; the lines above say what to do")
        answer = self._asker.ask(Question(f"Which backend trains the {processes}?", BEST, choices))
        if answer == BEST:
            return None
        self.values["distributed_type"] = answer
        return answer

    def _mesh(self, backend: str | None, world: int) -> None:
        """Sizes of the axes that are no data parallelism, which the processes left over are for."""
        axes = self._registry.info(backend).capabilities.mesh_axes if backend is not None else frozenset()
        left = world
        for axis, info in MeshConfig.model_fields.items():
            if axis in axes and axis not in DATA_AXES and left > 1:
                sizes = [str(size) for size in range(1, left + 1) if left % size == 0]
                text, choices = f"How many along mesh.{axis}?", tuple(map(Choice, sizes))
                left //= int(self._ask(f"mesh.{axis}", text, "1", choices, unwritten="1", about=info.description))

    def _training(self, backend: str | None) -> None:
        known = set(_PRECISIONS)
        if backend is not None:
            known = set(self._registry.info(backend).capabilities.precisions)
        choices = tuple(
            Choice(name, about, "" if name in known else f"not under {backend}") for name, about in _PRECISIONS.items()
        )
        self._ask("mixed_precision", "Mixed precision?", "no", choices, unwritten="no")
        text = "Micro-batches between two optimizer steps?"
        self._ask("gradient_accumulation_steps", text, "1", unwritten="1")

    def _settings(self, backend: str | None) -> None:
        """The backend's own keys, of which the user marks those to change."""
        model = None if backend is None else self._registry.load_section(self._registry.info(backend))
        if backend is None or model is None or not model.model_fields:
            return
        # Nested sections are written by hand.
        named = {info.alias or key: info for key, info in model.model_fields.items()}
        fields = {key: info for key, info in named.items() if not isinstance(_default(info), BaseModel)}
        choices = tuple(Choice(key, info.description or "") for key, info in fields.items())
        text = f"Which settings of {backend} do you want to change?"
        marked = self._asker.ask(Question(text, "", choices, several=True))
        for key in map(str.strip, filter(None, marked.split(","))):
            info, name = fields[key], f"{backend}.{key}"
            default, options = write(_default(info)), tuple(map(Choice, _options(info.annotation)))
            self._ask(name, f"{name}?", default, options, unwritten=default, about=info.description)

    def _ask(
        self,
        key: str,
        text: str,
        default: str,
        choices: tuple[Choice, ...] = (),
        *,
        unwritten: str | None,
        about: str | None = None,
    ) -> str:
        """Ask for the value of a key, which the answer ``unwritten`` leaves out of the file."""
        complaint = functools.partial(self._complaint, key)
        answer = self._asker.ask(Question(text, default, choices, complaint=complaint, about=about or ""))
        if answer != unwritten:
            self.values[key] = answer
        return answer

    def _complaint(self, key: str, answer: str) -> str:
        """Validate an answer together with the earlier ones; returns the error, if any."""
        if not answer:
            return "an answer is needed here"
        try:
            load_config(overrides={**self.values, key: answer}, environ={})
        except DrivetrainError as error:
            return str(error).splitlines()[0].removeprefix(f"flag {key}: ")
        return ""


def _not_a_count(answer: str) -> str:
    return "" if answer.isdecimal() and int(answer) > 0 else f"expected a number from 1, not {answer!r}"


def _nothing_marked(answer: str) -> str:
    return "" if answer else "mark one at least"


def _options(annotation: Any) -> list[str]:
    """The values of a setting that has few: truth values and literals, ``null`` where it may be left open."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [write(value) for value in get_args(annotation)]
    parts = [each for each in get_args(annotation) if each is not type(None)]
    if len(parts) == 1 and len(get_args(annotation)) == 2 and (options := _options(parts[0])):
        return [*options, "null"]
    return []


def _default(info: FieldInfo) -> Any:
    value = info.get_default(call_default_factory=True, validated_data={})
    return None if value is PydanticUndefined else value
