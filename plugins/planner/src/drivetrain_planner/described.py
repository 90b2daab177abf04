"""Predicts the layout that a configuration describes: to be checked by a run, or after a device had no memory left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from drivetrain.api import UsageError
from drivetrain.api.programs import LaunchPlan, ResolvedConfig
from drivetrain_planner.auto import MODEL_CURE
from drivetrain_planner.choosing import CUTTING, Candidate, ask, choose, weigh
from drivetrain_planner.estimates import PlanRequest
from drivetrain_planner.machines import Machine
from drivetrain_planner.report import less_lines
from drivetrain_planner.requests import asked_by, machine_of, request


def prediction(resolved: ResolvedConfig, plan: LaunchPlan) -> dict[str, Any]:
    """Return the predicted peak memory of a rank and time of a step, as JSON data.

    Args:
        resolved: the configuration that trains.
        plan: of the launch.

    Returns:
        ``layout``, ``machine``, ``device_type``; ``bytes`` of tensors of the fullest rank and ``memory`` by part,
        ``unused`` bytes of the allocator's beside them; ``seconds`` of an optimizer step; ``micro_batch``,
        ``accumulation`` and ``mixed_precision``, for which this holds.

    Raises:
        UsageError: ``plan:`` lacks a key, the model cannot be traced, or the backend has no estimate for the layout.
    """
    asked, machine = _asked(resolved, plan, "plan.check compares a run with a prediction")
    candidate = described(resolved, plan, asked, machine)
    estimate = candidate.estimate
    return {
        "layout": estimate.title,
        "machine": machine.name,
        "device_type": machine.device_type,
        "bytes": estimate.peak,
        "memory": dict(estimate.memory),
        "unused": candidate.unused,
        "seconds": candidate.time,
        "micro_batch": asked.micro_batch,
        "accumulation": estimate.accumulation,
        "mixed_precision": asked.precision.name,
    }


def advice(resolved: ResolvedConfig, plan: LaunchPlan) -> str:
    """Lines that say what the run's layout holds by part, and which layouts hold less, or how to ask.

    Raises:
        UsageError: as :func:`prediction`, but for a configuration without ``plan.model``.
    """
    if resolved.config.plan.model is None:
        processes = f" --processes {plan.world_size}" if plan.world_size > 1 else ""
        return (
            "Which layouts hold less: drivetrain plan memory train.py:make_model --batch train.py:batch "
            f"--machine NAME{processes}; with plan: {{model, batch}} in the configuration this report shows them."
        )
    asked, machine = _asked(resolved, plan, "")
    own = described(resolved, plan, asked, machine)
    samples = asked.micro_batch * _data_parallel(resolved, plan) * resolved.config.gradient_accumulation_steps
    # Of the same step: what the configuration says of its backend binds no other layout.
    sections = {name: keys for name, keys in asked.sections.items() if name != plan.backend}
    found = choose(replace(asked, mesh=None, windows=None, sections=sections, global_batch=samples), machine)
    return "\n".join(less_lines(own, found))


def described(resolved: ResolvedConfig, plan: LaunchPlan, asked: PlanRequest, machine: Machine) -> Candidate:
    """The layout that a configuration describes.

    Raises:
        UsageError: the backend gives no estimate of it.
    """
    estimates, complaints = ask(asked, plan.backend)
    if complaints:
        raise UsageError(complaints[0], cure="Train without plan.check, and report this to the backend's author.")
    if not estimates:
        raise UsageError(
            f"the backend {plan.backend} does not say what its layouts hold",
            cure="Train without plan.check, or with a backend that drivetrain plan choose shows.",
        )
    fitting = [each for each in estimates if not each.refused and _agrees(each.settings, resolved)]
    if len(fitting) == 1:
        return weigh(fitting[0], asked, machine)
    told = "; ".join(f"{each.title}: {each.refused}" for each in estimates if each.refused and not fitting)
    told = told or f"it offers {', '.join(each.title for each in fitting or estimates)}"
    raise UsageError(
        f"the backend {plan.backend} gives no estimate for what this configuration describes; {told}",
        cure="Train without plan.check, or with one of the layouts that drivetrain plan choose shows.",
    )


def _asked(resolved: ResolvedConfig, plan: LaunchPlan, purpose: str) -> tuple[PlanRequest, Machine]:
    if resolved.config.plan.model is None:
        raise UsageError(f"{purpose}, and the planner does not know the model", cure=MODEL_CURE)
    machine = machine_of(resolved, plan.processes_here, on_cpu=plan.on_cpu)
    given = resolved.config
    made = request(asked_by(resolved, plan.world_size), machine)
    return (
        replace(
            made,
            ranks_per_node=plan.processes_here,
            global_batch=made.micro_batch * _data_parallel(resolved, plan) * given.gradient_accumulation_steps,
            mesh=given.mesh.sizes(),
            windows=given.gradient_accumulation_steps,
        ),
        machine,
    )


def _data_parallel(resolved: ResolvedConfig, plan: LaunchPlan) -> int:
    sizes = resolved.config.mesh.sizes()
    return plan.world_size // prod(sizes.get(axis, 1) for axis in CUTTING)


def _agrees(settings: Mapping[str, Any], resolved: ResolvedConfig) -> bool:
    """Whether a layout's settings agree with the configuration."""
    sections = {**resolved.sections, "mesh": resolved.config.mesh.sizes()}
    return all(
        sections.get(name, {}).get(key, value) == value
        for name, values in settings.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    )
