"""``deepspeed``: DeepSpeed's engine with ZeRO, driven by the core's windows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import (
    DistributedBackend,
    FileConfiguredBackend,
    Mesh,
    Topology,
    TorchEngine,
    Trainable,
    UnsupportedError,
    UsageError,
    cast_parameters,
    collectives,
    ensure_process_group,
    original_module,
    pick_device,
)
from drivetrain.api.accelerate import DummyScheduler
from drivetrain_deepspeed import effects, private_names, quiet, schedules
from drivetrain_deepspeed.config import DeepSpeedConfig
from drivetrain_deepspeed.engine_config import EngineConfig
from drivetrain_deepspeed.loss_scale import LossScale
from drivetrain_deepspeed.plugin import DEEPSPEED

if TYPE_CHECKING:
    # These import DeepSpeed, whose accelerator must be set before: `start` does.
    from drivetrain_deepspeed.making import MadeEngine
    from drivetrain_deepspeed.trainable import DeepSpeedTrainable

logger = logging.getLogger(__name__)

_PARTED: WeakSet[nn.Module] = WeakSet()
"""Models that ZeRO stage 2 or 3 has prepared in this process."""


@final
class DeepSpeedBackend(FileConfiguredBackend, DistributedBackend):
    """One engine for each model that is trained."""

    capabilities = DEEPSPEED.capabilities

    def start(self) -> Topology:
        settings = self.settings
        self.section: DeepSpeedConfig = settings.section or DeepSpeedConfig()
        device = pick_device(settings.device_type, settings.process)
        kind = device.partition(":")[0]
        self.deepspeed = quiet.load(kind)
        private_names.check_package(self.deepspeed)
        self._group = ensure_process_group(settings.process, kind, settings.process_group, alone=True)
        mesh = Mesh(settings.mesh or {"dp_shard": settings.process.world_size})
        self.topology = Topology(settings.process, mesh, device, self._group.communication_backend)
        self.config = EngineConfig(self.section, settings.precision, mesh.dp_size, settings.origins)
        self.capabilities = replace(self.capabilities, sharded_save=self.config.stage > 0)
        effects.check(self.config.written, kind)
        idle = effects.without_effect(self.config.written)
        if idle and settings.process.rank == 0:
            logger.warning("What the section `deepspeed:` says without effect: %s", "; ".join(idle))
        scaling = settings.precision.loss_scaling
        self.loss_scale = LossScale(self.config.loss_scaling()) if scaling else None
        self.precision = TorchEngine(replace(settings.precision, loss_scaling=False), device)
        self._trainables: list[DeepSpeedTrainable] = []
        quiet.hold(settings.process)
        with quiet.surroundings(settings.process):
            self.deepspeed.init_distributed(dist_backend=self._group.communication_backend, verbose=False)
        self._stopped = False
        return self.topology

    def set_batches(self, sizes: Sequence[int], accumulation_steps: int) -> None:
        """Check the section's batch sizes and accumulation steps against the script's."""
        self.config.set_batches(sizes, accumulation_steps)
        if self._trainables:
            # Before that, the training loader may not be prepared yet.
            self.config.check_batches()

    def file_scheduler(self, scheduler: Any, optimizers: Sequence[Optimizer]) -> Any | None:
        """Return the file's schedule in place of a ``DummyScheduler``; raises for a scheduler of the script."""
        written = self.config.written
        if not schedules.names_one(written):
            return None
        if not isinstance(scheduler, DummyScheduler):
            schedules.refuse_two(written, type(scheduler).__name__)
        if not optimizers:
            raise UsageError(
                "DummyScheduler stands for a schedule of an optimizer that is not prepared",
                cure="Prepare them together: optimizer, scheduler = accelerator.prepare(optimizer, scheduler).",
            )
        for trainable in self._trainables:
            trainable.schedules.follow_script(optimizers)
        return schedules.of_placeholder(written, scheduler, optimizers[0])

    def init_context(self) -> AbstractContextManager[Any]:
        """Under stage 3, partition each layer as soon as it is built, with rank 0's values; else do nothing."""
        from drivetrain_deepspeed.building import partitioned_construction

        return partitioned_construction(self)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        from drivetrain_deepspeed.trainable import DeepSpeedTrainable

        if training:
            self.config.check_batches()
        module = original_module(model)
        self._refuse(module)
        cast_parameters(module, self.settings.precision)
        place(module, self.topology)
        if self.config.stage == 3:
            model = compiled_in_place(model, module)
        trainable = DeepSpeedTrainable(self, model, optimizers)
        self.takes_apart(module)
        self._trainables.append(trainable)
        return trainable

    def takes_apart(self, module: nn.Module) -> None:
        """Note that this model cannot be prepared again: an engine has it, or begins to change it."""
        if self.config.stage >= 2:
            _PARTED.add(module)

    def _refuse(self, module: nn.Module) -> None:
        if module in _PARTED:
            raise UnsupportedError(
                f"this {type(module).__name__} was prepared before, and still has hooks and partitions of DeepSpeed, "
                "which free_memory() does not remove",
                cure="Prepare a model once, together with its optimizer, even if it is only evaluated at first. Or "
                "construct it again, and on the main process load the state that accelerator.get_state_dict(model) "
                "returned before: every rank starts from its values.",
            )
        if not self.settings.place_on_device and self.topology.device != "cpu":
            raise UsageError(
                "device_placement=False leaves a model where it is, and DeepSpeed needs it on the device",
                cure="Leave device_placement at True; offload_param in the section `deepspeed:` keeps parameters in "
                "CPU memory.",
            )
        parameters = list(module.parameters())
        if any(each.is_complex() for each in parameters):
            raise UnsupportedError(
                f"{type(module).__name__} has complex parameters, which DeepSpeed makes real",
                cure="Keep real and imaginary part as one parameter (torch.view_as_complex(p) in forward), or use "
                "distributed_type: ddp.",
            )
        if any(trainable.shares(parameters) for trainable in self._trainables):
            raise UsageError(
                f"{type(module).__name__} shares parameters with a model that was prepared before",
                cure="Make one nn.Module of both with one optimizer, and prepare that: its forward returns the outputs "
                "of both.",
            )

    def engine(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> MadeEngine:
        """Make the engine of one model. Collective over all ranks."""
        from drivetrain_deepspeed.making import make_engine

        return make_engine(self, model, optimizers)

    def backward(self, loss: Tensor, factor: float | Tensor) -> None:
        """Back-propagate through every engine that the loss depends on."""
        from drivetrain_deepspeed.driving import backward

        if isinstance(factor, Tensor) or factor != 1.0:
            loss = loss * factor
        drivers = [trainable.driver for trainable in self._trainables if trainable.driver is not None]
        backward(loss, drivers, self.loss_scale, retain_graph=self.precision.retains_graph)

    def forget(self, trainable: DeepSpeedTrainable) -> None:
        """Drop a trainable that was released."""
        if trainable in self._trainables:
            self._trainables.remove(trainable)

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        for trainable in list(self._trainables):
            trainable.release()
        quiet.let_go()
        self._group.release()


def compiled_in_place(model: Any, module: nn.Module) -> nn.Module:
    """The user's module; where ``torch.compile`` was put around it or a part, compiled as by ``module.compile()``.

    Stage 3 gives every module a dictionary of its own for parameters. torch's wrapper would hand its one, which is
    empty, on to the module that it wraps.
    """
    if model is not module:
        module._compiled_call_impl = model.dynamo_ctx(module._call_impl)  # noqa: SLF001
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            inner = original_module(part)
            if inner is not part:
                inner._compiled_call_impl = part.dynamo_ctx(inner._call_impl)  # type: ignore[operator]  # noqa: SLF001
                setattr(parent, name, inner)
    return module


def place(module: nn.Module, topology: Topology) -> None:
    """Move to the device and give every rank rank 0's values; parameters in parts are both already. Collective."""
    whole = [parameter for parameter in module.parameters() if "ds_tensor" not in vars(parameter)]
    for tensor in (*whole, *module.buffers()):
        tensor.data = tensor.data.to(topology.device)
        if topology.world_size > 1:
            tensor.data.copy_(collectives.broadcast(tensor.data, 0, topology))
