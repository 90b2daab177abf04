"""Builds plan requests from names and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.api import UsageError, cast_parameters
from drivetrain.api.programs import ResolvedConfig, policy_for
from drivetrain_planner.estimates import PlanRequest
from drivetrain_planner.inputs import build, example
from drivetrain_planner.machines import HERE, Machine, find, kept_file
from drivetrain_planner.optimizers import optimizer_costs
from drivetrain_planner.tracing import Tracer


@dataclass(frozen=True)
class Asked:
    """Settings of the user.

    Args:
        model: see :func:`drivetrain_planner.inputs.build`.
        batch: see :func:`drivetrain_planner.inputs.example`.
        loss: likewise.
        processes: over all machines.
        global_batch: samples of one optimizer step; ``None`` = one micro-batch of each process.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        optimizer: a class of ``torch.optim``.
        optimizer_args: of its constructor.
        samples: of a micro-batch that is made for a Transformers configuration.
        length: of its sequences.
        sections: of backends, from the user's configuration.
    """

    model: str
    processes: int
    batch: str | None = None
    loss: str | None = None
    global_batch: int | None = None
    mixed_precision: str = "no"
    optimizer: str = "AdamW"
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 1
    length: int = 1024
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def asked_by(resolved: ResolvedConfig, processes: int) -> Asked:
    """Return the request of a configuration with ``plan.model``, for a number of processes."""
    config, plan = resolved.config, resolved.config.plan
    assert plan.model is not None
    return Asked(
        model=plan.model,
        batch=plan.batch,
        loss=plan.loss,
        processes=processes,
        global_batch=plan.global_batch,
        mixed_precision=config.mixed_precision,
        optimizer=plan.optimizer,
        optimizer_args=plan.optimizer_args,
        samples=plan.samples,
        length=plan.length,
        sections=resolved.sections,
    )


def machine_of(resolved: ResolvedConfig, devices: int | None, *, on_cpu: bool = False) -> Machine:
    """The machine that a configuration means: the one it names, the CPU, or the one that was measured.

    Args:
        resolved: the configuration.
        devices: on one machine, where it is the CPU.
        on_cpu: there is no accelerator; the configuration may say so, too.

    Raises:
        UsageError: it names none, and none was measured.
    """
    config, plan = resolved.config, resolved.config.plan
    name = plan.machine or ("cpu" if config.use_cpu or on_cpu else HERE if kept_file().exists() else None)
    if name is None:
        raise UsageError(
            "the planner does not know the devices",
            cure="Run drivetrain plan measure once on this machine, or write plan: {machine: h100x8} or a YAML file.",
        )
    return find(name, devices if name == "cpu" else None, plan.memory)


def request(asked: Asked, machine: Machine) -> PlanRequest:
    """Make the model on the meta device and what traces it.

    Raises:
        UsageError: a name leads nowhere, or processes do not fill the machines.
    """
    if asked.processes > machine.devices and asked.processes % machine.devices:
        raise UsageError(
            f"{asked.processes} processes do not fill machines of {machine.devices} devices",
            cure=f"Ask for a multiple of {machine.devices}, or for at most {machine.devices}.",
        )
    policy = policy_for(asked.mixed_precision)
    model = build(asked.model)
    if not any(one.requires_grad for one in model.parameters()):
        raise UsageError(f"{type(model).__name__} has no parameter that is trained", cure="Name the model to train.")
    cast_parameters(model, policy)
    fed = example(asked.batch, asked.loss, asked.model, asked.samples, asked.length)
    if asked.global_batch is not None and asked.global_batch % fed.samples:
        lower = asked.global_batch // fed.samples * fed.samples
        near = [str(each) for each in (lower, lower + fed.samples) if each]
        raise UsageError(
            f"a global batch of {asked.global_batch} is not a multiple of the {fed.samples} samples of a micro-batch",
            cure=f"Ask for {' or '.join(near)}, or let the batch have fewer samples.",
        )
    tracer = Tracer(model, fed, policy, machine.device_type)
    return PlanRequest(
        model=model,
        world_size=asked.processes,
        ranks_per_node=min(machine.devices, asked.processes),
        device_type=machine.device_type,
        precision=policy,
        micro_batch=fed.samples,
        global_batch=asked.global_batch or fed.samples * asked.processes,
        optimizer=optimizer_costs(asked.optimizer, dict(asked.optimizer_args), machine.device_type),
        sections=asked.sections,
        trace=tracer.trace,
        arguments=(fed.args, fed.kwargs),
        run=tracer.run,
    )
