"""The reference backend: one process, the user's module and optimizer as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import Tensor, nn
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
    pick_device,
    place_model,
    portable,
)
from drivetrain.backends.plugin import SINGLE


@final
class SingleTrainable(Trainable):
    """The user's module and optimizers, nothing wrapped."""

    def __init__(
        self, model: nn.Module, module: nn.Module, optimizers: Sequence[Optimizer], engine: TorchEngine
    ) -> None:
        self._model, self.module, self.optimizers, self._engine = model, module, list(optimizers), engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine.forward(self._model, args, kwargs)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        self._engine.backward(loss, scale)

    def synchronise_gradients(self, enabled: bool) -> None:
        """Nothing to reduce in one process; autograd accumulates either way."""

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
        state = portable.portable_state(self.module, self.optimizers)
        state.extra |= self._engine.state()
        return state

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        return portable.portable_template(self.module, self.optimizers, saved)

    def load_portable_state(self, state: PortableState) -> None:
        portable.load_portable_state(self.module, self.optimizers, state)
        self._engine.load_state(state.extra)

    def release(self) -> None:
        """Nothing is held."""


@final
class SingleBackend(Backend):
    """One process on one device."""

    capabilities = SINGLE.capabilities

    def start(self) -> Topology:
        device = pick_device(self.settings.device_type, self.settings.process)
        self.topology = Topology(self.settings.process, Mesh(), device)
        self._engine = TorchEngine(self.settings.precision, device)
        self.scaler = self._engine.scaler
        return self.topology

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        module = place_model(model, optimizers, self.settings, self.topology)
        return SingleTrainable(model, module, optimizers, self._engine)

    def join(self, trainables: Sequence[Trainable]) -> AbstractContextManager[Any]:
        """One process never waits for another."""
        return nullcontext()

    def stop(self) -> None:
        """Nothing was formed."""
