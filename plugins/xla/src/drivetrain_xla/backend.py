"""``xla``: lazy tensors of torch_xla, run once per optimizer step, on one device, on several processes or on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
import torch_xla
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import (
    DistributedBackend,
    Mesh,
    PortableState,
    ReduceOp,
    StepResult,
    TensorSpec,
    Topology,
    TorchEngine,
    TorchTrainable,
    Trainable,
    UnsupportedError,
    cast_parameters,
    collectives,
    ensure_process_group,
    gradients,
    original_module,
)
from drivetrain.api.engines import register_device_generator
from drivetrain_xla import moving, randomness, starting, state, stepping
from drivetrain_xla.config import XLAConfig
from drivetrain_xla.placement import BatchPlacement
from drivetrain_xla.plugin import XLA
from drivetrain_xla.processes import OverProcesses
from drivetrain_xla.reduction import DeviceReduction, HostReduction, Reduction
from drivetrain_xla.spmd import DeviceMesh
from drivetrain_xla.watch import CompileWatch

_APPLIED = StepResult()


@final
class XLATrainable(TorchTrainable):
    """A module on an XLA device.

    Nothing here waits for the device: a loss, a norm, whether a step is skipped are tensors until somebody reads them.
    Gradients stay local in a window and are summed over processes after its last backward, so a loss is multiplied by
    ``scale``.
    """

    settles_buffers = True

    def __init__(
        self, backend: XLABackend, model: nn.Module, optimizers: Sequence[Optimizer], engine: TorchEngine
    ) -> None:
        super().__init__(model, optimizers, engine)
        self._backend = backend
        self._over_processes = OverProcesses(self.module, backend.reduction) if backend.reduction is not None else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        backend = self._backend
        backend.watch.saw(args, kwargs)
        if torch.is_grad_enabled():
            if self._over_processes is not None:
                self._over_processes.ran()
        else:
            # Nothing else ends the graph of an evaluation, which would grow by each of its batches.
            backend.sync()
        output = super().forward(*args, **kwargs)
        if backend.mesh is not None:
            backend.mesh.produced(output)
        return output

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        self._backend.backward(loss, scale)

    def before_backward(self) -> None:
        """A backward of some model begins; it may reach this one."""
        if self._over_processes is not None:
            self._over_processes.before_backward()

    def after_backward(self) -> None:
        """End the backward. Collective over the processes where gradients are synchronised."""
        if self._over_processes is not None:
            self._over_processes.after_backward()

    def has_unreduced_gradients(self) -> bool:
        return self._over_processes is not None and self._over_processes.unreduced()

    def synchronise_gradients(self, enabled: bool) -> None:
        if self._over_processes is not None:
            self._over_processes.enabled = enabled

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm = stepping.clip(gradients(parameters), max_norm, norm_type, self._backend.topology.device)
        finite = torch.isfinite(norm)
        held = {id(parameter) for parameter in parameters}
        for optimizer in self.optimizers:
            if any(id(one) in held for group in optimizer.param_groups for one in group["params"]):
                self._backend.finite[id(optimizer)] = norm, finite
        return norm

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        for grad in gradients(parameters):
            grad.clamp_(-clip_value, clip_value)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        self.engine.check_reached(optimizer, closure)
        self._backend.watch.stepped()
        norm, finite = self._backend.finite.pop(id(optimizer), (None, None))
        if finite is None:
            optimizer.step(closure)
            return _APPLIED
        step = stepping.GuardedStep(optimizer, finite)
        step.run(closure)
        return StepResult(grad_norm=norm, pending=step.was_skipped)

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        super().zero_grad(optimizer, set_to_none)
        if self._over_processes is not None:
            self._over_processes.forget(optimizer)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._backend.place_state([optimizer])
        self.optimizers.append(optimizer)

    def portable_state(self) -> PortableState:
        self._backend.sync()
        return state.portable_state(self.module, self.optimizers)

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        return state.portable_template(self.module, self.optimizers, saved)

    def load_portable_state(self, portable: PortableState) -> None:
        self._backend.finite.clear()
        state.load_portable_state(self.module, self.optimizers, portable)
        self._backend.place_again(self.module, self.optimizers)

    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        self._backend.sync()
        yield from state.full_tensors(self.module)

    def release(self) -> None:
        """Run what is recorded; the module stays on its device."""
        self._backend.sync()
        self._backend.forget(self)


@final
class XLABackend(DistributedBackend):
    """This process's XLA device, or all of them as one mesh."""

    capabilities = XLA.capabilities

    def start(self) -> Topology:
        settings = self.settings
        self.section: XLAConfig = settings.section or XLAConfig()
        started = starting.start(settings, self.section)
        process = started.process
        group = settings.process_group
        if process.launcher == starting.LAUNCHER:
            group = replace(group, init_method=group.init_method or starting.meet())
        # Objects and gathered metrics are sent between hosts; gradients as in `reduction`.
        self._group = ensure_process_group(process, "cpu", group)
        mesh = Mesh({"dp_replicate": process.world_size})
        self.topology = Topology(process, mesh, started.device, self._group.communication_backend)
        self._host = replace(self.topology, device="cpu")
        self.reduction: Reduction | None = None
        if process.world_size > 1:
            self.reduction = DeviceReduction(self._host) if started.spans_processes else HostReduction(self._host)
        self.mesh = None if started.mesh is None else DeviceMesh(started.mesh, self.section)
        self.watch = self._new_watch()
        filler = self.section.ignore_index if self.section.fill_last_batch else None
        self._placement = BatchPlacement(self._send, ahead=self.section.transfer_ahead, filler=filler)
        register_device_generator("xla", randomness.generator())
        self._engine = TorchEngine(settings.precision, started.device)
        self._trainables: list[XLATrainable] = []
        self.finite: dict[int, tuple[Tensor, Tensor]] = {}
        """Norm before clipping, and whether it is finite, by optimizer; a non-finite norm skips the step."""
        return self.topology

    def _new_watch(self) -> CompileWatch:
        return CompileWatch(self.section.warmup_steps, self.section.max_recompiles)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        module = original_module(model)
        cast_parameters(module, self.settings.precision)
        with torch.no_grad():
            for tensor in moving.each_tensor(module) if self.topology.world_size > 1 else ():
                tensor.copy_(collectives.broadcast(tensor, 0, self._host))
        if self.settings.place_on_device:
            moving.move(module, self.topology.device)
        if self.mesh is not None:
            self.mesh.place(module)
            self.mesh.separate_backwards(module)
        self.place_state(optimizers)
        if training:
            # Its graphs are compiled from now on, whatever was trained before.
            self.watch = self._new_watch()
        trainable = XLATrainable(self, model, optimizers, self._engine)
        self._trainables.append(trainable)
        return trainable

    def synchronise_batch_norm(self, model: nn.Module) -> None:
        """Refused over several processes: what a forward exchanges would end the graph at each layer.

        In one process a mesh of devices computes with global batches, so that statistics are global already.
        """
        if self.reduction is not None:
            raise UnsupportedError(
                "xla over several processes cannot take the statistics of batch norms over all of them",
                cure="Let one process drive its devices as a mesh, or leave sync_batch_norm out.",
            )

    def place_batch(
        self, batch: Any, rows: int, full_rows: int, move: Callable[[Any], Any] | None
    ) -> tuple[Callable[[], Any], int]:
        """Copy a batch to the device ahead of the script, sharded over the mesh and padded, as configured."""
        return self._placement.place(batch, rows, full_rows, move)

    def _send(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of a batch to the device, in the placement's thread."""
        sharding = None if self.mesh is None else self.mesh.batch_sharding(tensor)
        return moving.send(tensor, self.topology.device, sharding)

    def place_state(self, optimizers: Sequence[Optimizer]) -> None:
        """Move existing optimizer state to the device and sharding of its parameter.

        torch has no fused kernels for this device, whose compiler fuses an update anyhow: `fused` is switched off.
        """
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if group.get("fused"):
                group["fused"] = False
        moving.move_state(optimizers)
        if self.mesh is not None:
            self.mesh.place_state(optimizers)

    def place_again(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Annotate loaded tensors: new values have no sharding."""
        if self.mesh is not None:
            self.mesh.place(module)
        self.place_state(optimizers)
        self.sync()

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        """Back-propagate through every model that the loss depends on. Collective where they synchronise."""
        for trainable in self._trainables:
            trainable.before_backward()
        self._engine.backward(loss, scale)
        for trainable in self._trainables:
            trainable.after_backward()

    def forget(self, trainable: XLATrainable) -> None:
        """Remove a trainable."""
        if trainable in self._trainables:
            self._trainables.remove(trainable)

    def sync(self) -> None:
        """Submit the recorded graph to the device, which runs it asynchronously."""
        torch_xla.sync()

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather over the host: results are read there, and compiling a graph for each shape costs more."""
        return collectives.all_gather(tensor, self._host)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce in the graph if XLA's collectives span the processes, else over the host."""
        if self.reduction is None:
            return collectives.all_reduce(tensor, op, self._host)
        return self.reduction.reduce(tensor, op)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Broadcast over the host."""
        return collectives.broadcast(tensor, src, self._host)

    def barrier(self) -> None:
        """Wait on the hosts; the devices may lag behind."""
        collectives.barrier(self._host)

    def stop(self) -> None:
        """Run what is recorded and leave the process group; the runtime stays, since it cannot be started twice."""
        self._placement.close()
        self.sync()
        self._group.release()
