"""``ddp``: a replica in every process, gradients averaged by torch's DistributedDataParallel while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain.api import (
    Backend,
    Mesh,
    PortableState,
    StepResult,
    TensorSpec,
    Topology,
    TorchEngine,
    Trainable,
    clipping,
    collectives,
    ensure_process_group,
    pick_device,
    place_model,
)
from drivetrain_ddp import hooks, state
from drivetrain_ddp.config import DDPConfig
from drivetrain_ddp.plugin import DDP


@final
class DDPTrainable(Trainable):
    """A module behind DistributedDataParallel.

    DDP averages over ranks, so a loss is multiplied by ``scale * dp_size``. A forward without gradients runs the module
    itself: it needs no communication, and ranks may evaluate different numbers of batches.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel | None,
        model: nn.Module,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        engine: TorchEngine,
        dp_size: int,
    ) -> None:
        self.wrapper, self._model, self.module = wrapper, model, module
        self.optimizers, self._engine, self._dp_size = list(optimizers), engine, dp_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        replica = self.wrapper
        if replica is None or not torch.is_grad_enabled():
            return self._engine.forward(self._model, args, kwargs)
        return self._engine.forward(replica, args, kwargs)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        self._engine.backward(loss, scale * self._dp_size)

    def synchronise_gradients(self, enabled: bool) -> None:
        if self.wrapper is not None:
            self.wrapper.require_backward_grad_sync = enabled

    def scale_gradients(self, factor: float | Tensor) -> None:
        clipping.multiply(clipping.gradients(self.module.parameters()), factor)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return self._engine.clip_grad_norm(parameters, max_norm, norm_type, self.optimizers)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        self._engine.clip_grad_value(parameters, clip_value, self.optimizers)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self._engine.unscale(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        return self._engine.step(optimizer, closure)

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        optimizer.zero_grad(set_to_none)

    def portable_state(self) -> PortableState:
        return state.portable_state(self.module, self.optimizers, self._engine)

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        return state.portable_template(self.module, self.optimizers, saved)

    def load_portable_state(self, portable: PortableState) -> None:
        state.load_portable_state(self.module, self.optimizers, self._engine, portable)

    def release(self) -> None:
        """Drop the wrapper, whose reducer must be gone before the process group is destroyed."""
        self.wrapper = None


@final
class DDPBackend(Backend):
    """One replica a process."""

    capabilities = DDP.capabilities

    def start(self) -> Topology:
        settings = self.settings
        device = pick_device(settings.device_type, settings.place)
        self._group = ensure_process_group(settings.place, device.partition(":")[0], settings.process_group)
        mesh = Mesh(settings.mesh or {"dp_replicate": settings.place.world_size})
        self.topology = Topology(settings.place, mesh, device, self._group.communication_backend)
        self._engine = TorchEngine(settings.precision, device)
        self.scaler = self._engine.scaler
        return self.topology

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        module = place_model(model, optimizers, self.settings, self.topology)
        wrapper = None
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if self.topology.world_size > 1 and training and trained:
            wrapper = self._wrap(model)
        elif self.topology.world_size > 1:
            # DDP refuses a module without trained parameters; all ranks start from rank 0's values all the same.
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data.copy_(collectives.broadcast(tensor.data, 0, self.topology))
        return DDPTrainable(wrapper, model, module, optimizers, self._engine, self.topology.dp_size)

    def _wrap(self, model: nn.Module) -> DistributedDataParallel:
        options = self._options()
        hook = {name: options.pop(name) for name in hooks.OPTIONS if name in options}
        index = None if self.topology.device == "cpu" else [int(self.topology.device.partition(":")[2] or 0)]
        wrapper = DistributedDataParallel(model, device_ids=index, **options)
        hooks.register(wrapper, **hook)
        return wrapper

    def _options(self) -> dict[str, Any]:
        """What differs from torch's defaults: in the section, overridden by the script's own handler."""
        section = self.settings.section or DDPConfig()
        options: dict[str, Any] = section.model_dump(exclude_defaults=True)
        handler = self.settings.handlers.get("DistributedDataParallelKwargs")
        return options if handler is None else options | handler.to_kwargs()

    def join(self, trainables: Sequence[Trainable]) -> AbstractContextManager[Any]:
        """Shadow the collectives of ranks that still have batches; gradients are divided by the full world size."""
        wrappers = [
            trainable.wrapper
            for trainable in trainables
            if isinstance(trainable, DDPTrainable) and trainable.wrapper is not None
        ]
        return Join(wrappers) if wrappers else nullcontext()  # type: ignore[arg-type]

    def stop(self) -> None:
        self._group.release()
