"""Base of trainables whose training output is deferred until backward runs the schedule, on either engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.api import PortableState, TensorSpec, TorchEngine, Trainable, portable
from drivetrain_megatron import state
from drivetrain_megatron.pipeline.parting import Share
from drivetrain_megatron.pipeline.skeleton import passing_over
from drivetrain_megatron.pipeline.windows import deferred_loss, run_window
from drivetrain_megatron.whole import refuse_pickling
from drivetrain_sharding import FormerParameters


class DeferredTrainable(Trainable):
    """A module that a pipeline computes, whose optimizers a ``Stepping`` steps.

    Attributes:
        pipeline: its ``call`` gives a deferred output, its ``changed`` ends outputs of calls before.
    """

    pipeline: Any
    _stepping: Any
    _engine: TorchEngine
    _former: FormerParameters
    _share: Share | None
    _syncs: bool = True

    @abstractmethod
    def _train(self, call: Any, node: Any, scale: float | Tensor) -> None:
        """Run the schedule for a call and its loss, and add the gradients. Collective over the stages."""

    def _multiplier(self, scale: float | Tensor) -> Callable[[Tensor], Tensor]:
        """Count a backward; returns what multiplies its loss by ``scale``, and by the loss scaler's scale."""
        self._engine.count_backward()
        scaler = self._engine.scaler
        if scaler is None:
            return lambda value: value * scale
        # The scaler makes its scale when it is first used, which the stages before the last do not.
        scaler.scale(torch.zeros((), device=self._engine.device))
        return lambda value: scaler.scale(value * scale)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        self._train(*deferred_loss(loss), scale)

    def forward_backward(
        self,
        micro_batches: Sequence[tuple[tuple[Any, ...], dict[str, Any], Any]],
        loss_fn: Callable[[Any, Any], Tensor],
        scale: float | Tensor,
    ) -> Tensor:
        """See :func:`drivetrain_megatron.pipeline.windows.run_window`."""
        train = lambda call, node: self._train(call, node, scale)  # noqa: E731 (one argument bound)
        return run_window(self, self.pipeline.call, train, micro_batches, loss_fn, self._engine.device)

    def synchronise_gradients(self, enabled: bool) -> None:
        self._syncs = enabled

    @passing_over
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm: Tensor = self._stepping.clip_grad_norm(parameters, max_norm, norm_type)
        return norm

    @passing_over
    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        self._stepping.clip_grad_value(parameters, clip_value)

    @passing_over
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self._stepping.unscale(optimizer)

    def before_copy(self) -> None:
        self._stepping.check_copy()
        refuse_pickling(self.module)

    def shares(self, parameters: Sequence[Tensor]) -> bool:
        return self._former.include(parameters) or super().shares(parameters)

    def remove_optimizer(self, optimizer: Optimizer) -> None:
        self._stepping.remove(optimizer)

    @passing_over
    def live_tensors(self) -> dict[str, Any]:
        return state.held(PortableState(portable.live_tensors(self.module)), self._share).tensors

    @passing_over
    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        return state.held(self._stepping.portable_template(saved), self._share)

    @passing_over
    def load_portable_state(self, portable: PortableState) -> None:
        self.pipeline.changed()
        self._stepping.load_portable_state(portable)
