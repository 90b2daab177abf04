"""Prepares a model for Megatron-Core: describes it, shards its parameters, builds the ``GPTModel`` that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from drivetrain.api import RunSettings, Topology, TorchEngine, dtype_of
from drivetrain_megatron import gradient_hooks
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.core_engine.building import build, with_gradient_buffers
from drivetrain_megatron.core_engine.calls import refuse
from drivetrain_megatron.core_engine.describing import describe
from drivetrain_megatron.core_engine.description import Description
from drivetrain_megatron.core_engine.distributed_optimizer import ShardedStepping
from drivetrain_megatron.core_engine.parallel_state import ParallelState
from drivetrain_megatron.core_engine.running import CorePipeline
from drivetrain_megatron.core_engine.trainable import CoreTrainable
from drivetrain_megatron.core_engine.weights import Weights
from drivetrain_megatron.filling import Filling
from drivetrain_megatron.norms import GlobalNorm
from drivetrain_megatron.pipeline.parting import Share, drop_foreign
from drivetrain_megatron.pipeline.skeleton import Blanks, passing_over
from drivetrain_megatron.remapping import remap
from drivetrain_megatron.stepping import Stepping
from drivetrain_megatron.tensor import packing
from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.packing import Packing, remember
from drivetrain_megatron.tensor.randomness import start_alike
from drivetrain_megatron.tensor_parallel import as_dtensor
from drivetrain_sharding import FormerParameters


@dataclass(frozen=True)
class Job:
    """State of one backend that all of its models share.

    Args:
        settings: of the run.
        section: the configuration.
        topology: ranks and device.
        groups: Megatron-Core's, of ranks.
        mesh: with the axes ``pp``, ``dp`` and ``tp``.
        ring: the ranks of the axis ``tp``.
        engine: precision and loss scaling.
        norm: over all axes.
    """

    settings: RunSettings
    section: MegatronConfig
    topology: Topology
    groups: ParallelState
    mesh: DeviceMesh
    ring: Ring
    engine: TorchEngine
    norm: GlobalNorm


@passing_over
def prepare(
    job: Job, model: nn.Module, module: nn.Module, optimizers: Sequence[Optimizer], filling: Filling, training: bool
) -> CoreTrainable:
    """Make a model trainable. Collective over all ranks; each must hold the same values.

    Args:
        job: see there.
        model: what the user gave.
        module: the same without ``torch.compile``.
        optimizers: of its parameters.
        filling: its tensors without memory.
        training: there will be gradients.

    Raises:
        UnsupportedError: Megatron-Core cannot compute it.
        UsageError: sizes that do not divide.
    """
    hooked = dict(module.named_parameters())
    stage, num_stages = job.mesh["pp"].get_local_rank(), job.mesh["pp"].size()
    device = torch.device(job.topology.device)
    if model is not module or module._compiled_call_impl is not None:  # noqa: SLF001 (torch has no public word)
        raise refuse(module, "its own forward, which torch.compile is for, never runs")
    description = describe(module, job.ring.rank, job.ring.size, num_stages, job.section)
    dtype = _compute_dtype(module, job)
    former = FormerParameters(module)
    start_alike(job.ring, device.type)
    part = _cut(module, description, job)
    if filling:
        filling.fill(module, job.topology, device, part)
    for optimizer in optimizers:
        remap(optimizer, former, module, partial(packing.part, module))
    stages = Share(description.owners(num_stages), {name: 0 for name, _ in module.named_buffers()}, stage)
    drop_foreign(module, stages, Blanks(device), optimizers, device)
    # Transformers' own mark; its method of asking has changed its name.
    recompute = any(vars(each).get("gradient_checkpointing") for each in module.modules())
    shared = job.section.sequence_parallel and job.ring.size > 1
    sharded = training and job.section.data_parallel == "zero1"
    with job.groups.shared():
        computing = build(module, description, dtype, device, sequence_parallel=shared, recompute=recompute)
        weights = Weights(module, computing, description, stage, num_stages, job.ring.rank)
        wrapped = with_gradient_buffers(computing, sharded=sharded)
    weights.share_memory()
    pipeline = CorePipeline(
        module,
        job.groups,
        wrapped,
        description,
        job.mesh["pp"].get_group(),
        job.topology.device,
        job.section.num_micro_batches,
        weights.push,
    )
    stepping: Stepping | ShardedStepping = Stepping(module, job.engine, job.section.gradient_clipping)
    gradients: Weights | ShardedStepping = weights
    if sharded:
        stepping = gradients = ShardedStepping(module, job.engine, job.groups, wrapped, weights, job.mesh, job.norm)
    for optimizer in optimizers:
        stepping.add(optimizer)
    why = "Megatron-Core computes gradients in a buffer of its own, past the parameter"
    gradient_hooks.refuse(hooked, module, why)
    parameters = dict(module.named_parameters())
    job.norm.leave_out(parameters[name] for name, _ in stages.shared() if not stages.mine(name))
    return CoreTrainable(module, former, stepping, job.engine, job.groups, wrapped, gradients, pipeline, stages)


def _cut(module: nn.Module, description: Description, job: Job) -> Callable[[str, Tensor], Tensor]:
    """Let each rank of the axis ``tp`` keep its parts, as DTensors. What is without memory is cut when it is filled."""
    layouts, mesh = description.layouts, job.mesh["tp"]

    def part(name: str, whole: Tensor) -> Tensor:
        layout = layouts.get(name)
        return whole if layout is None else as_dtensor(job.ring.part(whole, layout).clone(), layout, mesh)

    kept: dict[int, nn.Parameter] = {}
    names = {id(one): name for name, one in module.named_parameters()}
    for holder in list(module.modules()):
        for attribute, one in list(holder.named_parameters(recurse=False)):
            if names[id(one)] not in layouts or one.is_meta:
                continue
            if id(one) not in kept:
                kept[id(one)] = nn.Parameter(part(names[id(one)], one.detach()), requires_grad=one.requires_grad)
            holder.register_parameter(attribute, kept[id(one)])
    remember(module, Packing({name: one for name, one in layouts.items() if one.parts is not None}, job.ring.size))
    return part


def _compute_dtype(module: nn.Module, job: Job) -> torch.dtype:
    """Return the compute dtype: that of the precision policy, else that of the parameters."""
    named = job.settings.precision.compute
    if named is not None:
        return dtype_of(named)
    found = {one.dtype for one in module.parameters()}
    if len(found) > 1:
        raise refuse(module, f"its parameters have several dtypes: {', '.join(sorted(map(str, found)))}")
    return found.pop()
