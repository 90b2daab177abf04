"""``megatron``: layers shared over ``tp``, depth over ``pp``, replicas or shards over what is left."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.api import (
    DistributedBackend,
    Mesh,
    ProcessInfo,
    ReduceOp,
    Topology,
    TorchEngine,
    Trainable,
    UnsupportedError,
    UsageError,
    collectives,
    ensure_process_group,
    original_module,
    pick_device,
    place_model,
)
from drivetrain_megatron import gradient_hooks
from drivetrain_megatron.compiled import leave_uncompiled
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.filling import Filling
from drivetrain_megatron.meeting import Meeting
from drivetrain_megatron.norms import GlobalNorm
from drivetrain_megatron.optimizer_trial import OptimizerTrial
from drivetrain_megatron.pipeline.deferred import settled
from drivetrain_megatron.pipeline.skeleton import Elsewhere
from drivetrain_megatron.pipelined import PipelinedTrainable
from drivetrain_megatron.plugin import MEGATRON
from drivetrain_megatron.replicas import Replicas
from drivetrain_megatron.tensor import numbers, packing
from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.sharded import full_tensor
from drivetrain_megatron.trainable import MegatronTrainable
from drivetrain_megatron.whole import WholeState
from drivetrain_sharding import FormerParameters, Recording, check_private_names, deferred

logger = logging.getLogger(__name__)


@final
class MegatronBackend(DistributedBackend):
    """Ranks on a grid: ``tp`` varies fastest, so that it stays inside a machine, then data, then ``pp``."""

    capabilities = MEGATRON.capabilities

    def start(self) -> Topology:
        settings = self.settings
        check_private_names("drivetrain-megatron")
        self.section: MegatronConfig = settings.section or MegatronConfig()
        device = pick_device(settings.device_type, settings.process)
        kind = device.partition(":")[0]
        mesh = Mesh(_sizes(settings.mesh, self.section, settings.process.world_size))
        self.topology = Topology(settings.process, mesh, device)
        core = self.section.engine == "megatron_core"
        self.capabilities = replace(self.capabilities, pipelined=core or mesh.sizes["pp"] > 1)
        _warn_of_nodes(mesh.sizes["tp"], settings.process)
        _warn_of_replicas(mesh.dp_size, self.section, settings.process)
        if core:
            from drivetrain_megatron.core_engine import parallel_state

            parallel_state.check(self.section)
        self._group = ensure_process_group(settings.process, kind, settings.process_group, alone=True)
        self.topology = replace(self.topology, communication_backend=self._group.communication_backend)
        sizes = mesh.sizes
        # All axes in every layout: a size of 1 costs nothing, and no code depends on which of them exist.
        self.mesh = init_device_mesh(kind, (sizes["pp"], mesh.dp_size, sizes["tp"]), mesh_dim_names=("pp", "dp", "tp"))
        # Collective over all ranks, which are sure to be here now.
        dp_group = collectives.dp_group(self.topology)
        self._replicas = Replicas(dp_group, mesh.dp_size)
        self._pipeline = self.mesh["pp"].get_group() if sizes["pp"] > 1 else None
        self._norm = GlobalNorm(self._pipeline, device)
        agree = self._any if settings.precision.loss_scaling and mesh.world_size > 1 else None
        self._engine = TorchEngine(settings.precision, device, agree, self._norm)
        self.scaler = self._engine.scaler
        in_shards = mesh.dp_size > 1 and self.section.data_parallel != "ddp"
        cut = [self.mesh[axis] for axis, is_cut in (("tp", sizes["tp"] > 1), ("dp", in_shards)) if is_cut]
        self._trial = OptimizerTrial(cut, pipelined=self._pipeline is not None)
        self._meeting = Meeting(self.topology, settings.process_group.timeout_seconds)
        self._wholes: weakref.WeakValueDictionary[int, WholeState] = weakref.WeakValueDictionary()
        """By number of the model, the same on every rank."""
        self._models = count()
        if any(sizes[axis] > 1 for axis in ("tp", "dp_shard")):
            numbers.read_whole_numbers()
        self._ring = Ring(self.mesh["tp"].get_group() if sizes["tp"] > 1 else None)
        self._parallel_state = parallel_state.ParallelState(self.topology, self._ring) if core else None
        return self.topology

    def init_context(self) -> AbstractContextManager[Any]:
        """Construct without memory; ``prepare`` gives each rank its parts of what an ordinary construction gives."""
        return deferred(Recording())

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        settings = self.settings
        _refuse_stages(original_module(model))
        if self._pipeline is not None or self._parallel_state is not None:
            # The full model may not fit on the device; each rank moves its own stages once they are known.
            settings = replace(settings, place_on_device=False)
        home = torch.device(self.topology.device if settings.place_on_device else "cpu")
        filling = Filling(original_module(model))
        if filling:
            settings = replace(settings, place_on_device=False)
        module = place_model(model, optimizers, settings, self.topology)
        self._start_alike(module)
        if self._parallel_state is not None:
            from drivetrain_megatron.core_engine.preparing import Job, prepare

            job = Job(
                self.settings,
                self.section,
                self.topology,
                self._parallel_state,
                self.mesh,
                self._ring,
                self._engine,
                self._norm,
            )
            return prepare(job, model, module, optimizers, filling, training)
        former = FormerParameters(module)
        self._refuse_hooks(module)
        # Torch has no public way to list hooks.
        hooked = {name: one for name, one in module.named_parameters() if one._backward_hooks}  # noqa: SLF001
        cut_by_tensor = self.topology.mesh.sizes["tp"] > 1
        before = dict(module.named_parameters()) if cut_by_tensor else hooked
        trainable: MegatronTrainable | PipelinedTrainable
        cut = partial(packing.part, module)
        common = (model, module, former, cut, self._engine, self._replicas, self.topology.dp_size)
        if self._pipeline is None:
            trainable = MegatronTrainable(*common, self.section.gradient_clipping, self._trial, self._ring.group)
        else:
            at = self.topology.device if self.settings.place_on_device else None
            trainable = PipelinedTrainable(
                *common, self.section, self._pipeline, at, self._norm, self.mesh, self._trial
            )
        keep: Callable[[str, Tensor], Tensor] = _whole
        if cut_by_tensor:
            from drivetrain_megatron.tensor_parallel import apply_tensor_parallel

            leave_uncompiled(model)
            with trainable.plain_calls():
                keep = apply_tensor_parallel(module, self.mesh["tp"], self.section).part
        if filling:
            filling.fill(module, self.topology, home, keep)
            module.to(home)
        packed = packing.packing_of(module)
        gradient_hooks.carry(before, module, lambda name, one: packed.whole(f"model.{name}", one), cut)
        if self.topology.dp_size > 1:
            gradient_hooks.refuse_accumulated(module)
        for optimizer in optimizers:
            trainable.add_optimizer(optimizer)
        if cut_by_tensor:
            former.close(module, "megatron put one that is cut over tensor-parallel ranks")
        if isinstance(trainable, MegatronTrainable):
            self._add_replica(trainable, training=training)
        if self._in_parts:
            part = partial(_part_by_name, module)
            number = next(self._models)
            trainable.whole = WholeState(module, trainable.gather, part, self._meeting, number, trainable.loaded)
            self._wholes[number] = trainable.whole
        return trainable

    def _add_replica(self, trainable: MegatronTrainable, *, training: bool) -> None:
        """Lay a model out over the data-parallel ranks. Called last, since one that is refused is never released."""
        if self.topology.dp_size > 1 and training:
            trainable.lay_out(self.section.data_parallel, self.mesh)
        self._replicas.add(trainable.module, trainable.local)

    def _refuse_hooks(self, module: nn.Module) -> None:
        """Hooks that run when a gradient is accumulated are right where each stage has its parameters for itself."""
        alone = self._pipeline is not None and self.topology.mesh.sizes["tp"] == 1 and self.topology.dp_size == 1
        if not alone:
            gradient_hooks.refuse_steps_in_backward(module)

    def _start_alike(self, module: nn.Module) -> None:
        """Every rank begins with rank 0's values. Collective over all ranks."""
        if self.topology.world_size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_meta:
                    continue
                # One that an earlier prepare has cut, and free_memory has left so.
                values = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.data
                tensor.data.copy_(collectives.broadcast(values, 0, self.topology))

    def gather(self, tensor: Tensor) -> Tensor:
        """As every backend's; logits that are shared over ``tp`` are made whole first, deferred values are read."""
        return super().gather(full_tensor(settled(tensor)))

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """As every backend's; logits that are shared over ``tp`` are made whole first, deferred values are read."""
        return super().reduce(full_tensor(settled(tensor)), op)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """As every backend's; deferred values are read first."""
        return super().broadcast(full_tensor(settled(tensor)), src)

    def barrier(self) -> None:
        """Block until all ranks arrive; meanwhile take part in gathering models if other ranks request it."""
        if self._in_parts:
            self._meeting.wait(self._serve)
        super().barrier()

    def _serve(self, asked: str) -> None:
        number, _, path = asked.partition(":")
        whole = self._wholes.get(int(number))
        if whole is None:
            raise UsageError(
                "another rank reads the parameters of a model, whose parts this rank has released",
                cure="Keep the model on every rank until none reads it any more.",
            )
        whole.join(path)

    @property
    def _in_parts(self) -> bool:
        """Whether a rank holds only a part of each model."""
        sizes = self.topology.mesh.sizes
        return sizes["tp"] > 1 or sizes["pp"] > 1 or sizes["dp_shard"] > 1

    def _any(self, verdict: bool) -> bool:
        flag = torch.tensor([int(verdict)], device=self.topology.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def stop(self) -> None:
        if self._parallel_state is not None:
            self._parallel_state.release()
        self._group.release()


def _refuse_stages(module: nn.Module) -> None:
    if any(isinstance(parameter, Elsewhere) for parameter in module.parameters()):
        raise UnsupportedError(
            f"this {type(module).__name__} was prepared before: it has the parameters of one pipeline stage, and "
            "free_memory() does not give it the others back",
            cure="Prepare a model once, together with its optimizer, even if it is only evaluated at first. Or "
            "construct it again, and on the main process load the state that accelerator.get_state_dict(model) "
            "returned before: every rank starts from its values.",
        )


def _part_by_name(module: nn.Module, name: str, whole: Tensor, parameter: Tensor) -> Tensor:
    return packing.packing_of(module).part_like(f"model.{name}", whole, parameter)


def _whole(name: str, whole: Tensor) -> Tensor:  # noqa: ARG001 (as TensorParallel.part)
    return whole


def _warn_of_nodes(degree: int, process: ProcessInfo) -> None:
    """Warn if ranks that communicate within every layer are on different machines."""
    if process.num_nodes > 1 and process.local_world_size % degree and process.rank == 0:
        logger.warning(
            "tensor_parallel_size %d crosses machines of %d processes: its ranks exchange activations in every layer, "
            "which is slow between machines. Choose a degree that divides %d.",
            degree,
            process.local_world_size,
            process.local_world_size,
        )


def _warn_of_replicas(replicas: int, section: MegatronConfig, process: ProcessInfo) -> None:
    """Warn if no axis cuts anything, as where ``distributed_type: tensor_parallel`` stands without a degree."""
    if process.rank == 0 and replicas == process.world_size > 1 and section.data_parallel == "ddp":
        logger.warning(
            "megatron trains %d whole replicas and cuts no model, since neither `mesh:` nor `megatron:` says how. "
            "Write `megatron: {tensor_parallel_size: %d}` or `megatron: {pipeline_parallel_size: %d}`; replicas are "
            "what distributed_type: ddp is for.",
            replicas,
            replicas,
            replicas,
        )


def _sizes(asked: object, section: MegatronConfig, world_size: int) -> dict[str, int]:
    """Axis sizes from ``mesh:`` and the section; the data-parallel axis takes what is left.

    Raises:
        UsageError: the two contradict each other, or the degrees do not divide the world.
    """
    sizes = dict(asked) if isinstance(asked, dict) else {}
    for axis, key, wanted in (
        ("tp", "tensor_parallel_size", section.tensor_parallel_size),
        ("pp", "pipeline_parallel_size", section.pipeline_parallel_size),
    ):
        if wanted is not None and sizes.setdefault(axis, wanted) != wanted:
            raise UsageError(
                f"megatron.{key}: {wanted} contradicts mesh.{axis}: {sizes[axis]}", cure="Write it in one place."
            )
    if section.data_parallel == "fsdp" and section.schedule in {"zero_bubble", "zbv", "dualpipev"}:
        raise UsageError(
            f"the schedule {section.schedule} computes the gradients of weights by themselves, which parameters in "
            "shards do not allow",
            cure="Use data_parallel: zero1, or schedule: 1f1b or interleaved_1f1b.",
        )
    data_axis, other = "dp_replicate", "dp_shard"
    if section.data_parallel == "fsdp":
        data_axis, other = other, data_axis
    if sizes.get(other, 1) > 1:
        raise UsageError(
            f"data_parallel: {section.data_parallel} lies along the mesh axis {data_axis}, not {other}",
            cure=f"Write mesh.{data_axis}, or leave both out: they take the ranks that tp and pp leave.",
        )
    model_size = sizes.get("tp", 1) * sizes.get("pp", 1)
    if world_size % model_size:
        raise UsageError(
            f"tensor_parallel_size x pipeline_parallel_size = {model_size} does not divide {world_size} processes",
            cure=f"Start a multiple of {model_size} processes, or make the degrees smaller.",
        )
    sizes.setdefault(data_axis, world_size // model_size)
    return sizes
