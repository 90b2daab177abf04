"""One model that Megatron-Core computes: every training output is deferred, and backward runs the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.api import (
    GradientHook,
    PortableState,
    StepResult,
    TensorSpec,
    TorchEngine,
    Trainable,
    UnsupportedError,
    UsageError,
    gradients,
    hooks_of,
    multiply_gradients,
    portable,
)
from drivetrain_megatron import state
from drivetrain_megatron.core_engine.attributes import AttributeWatch
from drivetrain_megatron.core_engine.distributed_optimizer import ShardedStepping
from drivetrain_megatron.core_engine.parallel_state import ParallelState
from drivetrain_megatron.core_engine.running import CorePipeline
from drivetrain_megatron.core_engine.weights import Weights
from drivetrain_megatron.pipeline.parting import Share
from drivetrain_megatron.pipeline.skeleton import is_absent, passing_over
from drivetrain_megatron.pipeline.windows import deferred_loss, run_window
from drivetrain_megatron.remapping import remap
from drivetrain_megatron.stepping import Stepping
from drivetrain_megatron.tensor import packing
from drivetrain_megatron.whole import refuse_pickling
from drivetrain_sharding import AssignmentRefusal, FormerParameters


@final
class CoreTrainable(Trainable):
    """A module whose parameters lie in Megatron-Core's; its own forward never runs.

    Args:
        module: the user's.
        former: its parameters before they were cut.
        stepping: its optimizers.
        engine: precision and loss scaling.
        groups: Megatron-Core's, of ranks.
        wrapped: Megatron-Core's model, whose buffer gathers gradients.
        gradients: brings them from the buffer to what the optimizers hold.
        pipeline: runs the model.
        share: which pipeline rank holds what.
    """

    def __init__(
        self,
        module: nn.Module,
        former: FormerParameters,
        stepping: Stepping | ShardedStepping,
        engine: TorchEngine,
        groups: ParallelState,
        wrapped: DistributedDataParallel,
        gradients: Weights | ShardedStepping,
        pipeline: CorePipeline,
        share: Share,
    ) -> None:
        self.module = module
        self._former, self._stepping, self._engine = former, stepping, engine
        self._groups, self._wrapped, self._gradients, self.pipeline = groups, wrapped, gradients, pipeline
        self._share = share
        self.optimizers = stepping.optimizers
        self._whole_only = state.WholeOnly(module)
        self._watch = AttributeWatch(module, self._computed_elsewhere)
        self._assignment = AssignmentRefusal(module, "Megatron-Core holds")
        self._syncs = True
        self._used = False
        """Megatron-Core's buffer holds gradients of this window that are not reduced yet."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.module.training:
            return self.pipeline.call(args, kwargs)
        return self.pipeline.evaluate(args, kwargs)

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

    @passing_over
    def _train(self, call: Any, node: Any, scale: float | Tensor) -> None:
        self._engine.count_backward()
        scaler = self._engine.scaler
        if scaler is not None:
            # The scaler makes its scale when it is first used, which the stages before the last do not.
            scaler.scale(torch.zeros((), device=self._engine.device))
        if not self._used:
            self._gradients.keep_gradients()
            self._wrapped.zero_grad_buffer()
        self.pipeline.train(
            call, node, lambda value: value * scale if scaler is None else scaler.scale(value * scale)
        )
        if self._syncs:
            with self._groups.shared():
                finalize_model_grads([self._wrapped])
            self._gradients.give_gradients()
        # What is not reduced yet stays in the buffer for the window's next micro-batch.
        self._used = not self._syncs

    def synchronise_gradients(self, enabled: bool) -> None:
        self._syncs = enabled

    @passing_over
    def scale_gradients(self, factor: float | Tensor) -> None:
        multiply_gradients(gradients(self._gradients.held), factor)

    @passing_over
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return self._stepping.clip_grad_norm(parameters, max_norm, norm_type)

    @passing_over
    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        self._stepping.clip_grad_value(parameters, clip_value)

    @passing_over
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self._stepping.unscale(optimizer)

    @passing_over
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if closure is not None:
            raise UnsupportedError(
                "an optimizer closure cannot be combined with megatron.engine: megatron_core",
                cure="Call accelerator.backward(loss) first, and step() without a closure.",
            )
        self.pipeline.changed()
        return self._stepping.step(optimizer, None)

    @passing_over
    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        if self._used:
            self._gradients.drop(one for group in optimizer.param_groups for one in group["params"])
        self._stepping.zero_grad(optimizer, set_to_none)

    def before_copy(self) -> None:
        refuse_pickling(self.module)

    def shares(self, parameters: Sequence[Tensor]) -> bool:
        return self._former.include(parameters) or super().shares(parameters)

    @passing_over
    def add_optimizer(self, optimizer: Optimizer) -> None:
        remap(optimizer, self._former, self.module, partial(packing.part, self.module))
        self._stepping.add(optimizer)

    def remove_optimizer(self, optimizer: Optimizer) -> None:
        self._stepping.remove(optimizer)

    @passing_over
    def portable_state(self) -> PortableState:
        return state.of_stage(self._stepping.portable_state(), self._share, self.pipeline.group)

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

    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        # Megatron-Core's layers have entries for Transformer Engine beside their tensors, which are empty.
        entries = {name: one for name, one in self._whole_only.entries().items() if isinstance(one, Tensor)}
        device = torch.device(self._engine.device)
        yield from state.tensors_of_stages(self.module, entries, self._share, self.pipeline.group, device)

    def gradient_hooks(self) -> Iterable[GradientHook]:
        return hooks_of(self.module)

    def before_state_dict(self, *, replicated: bool) -> None:
        entries = self._whole_only.entries().values()
        super().before_state_dict(replicated=not any(is_absent(one) or isinstance(one, DTensor) for one in entries))

    def before_registration(self, parent: nn.Module, name: str, value: Any) -> None:
        raise self._computed_elsewhere(f"{name!r} was set on {type(parent).__name__} after prepare")

    def before_conversion(self) -> None:
        raise self._computed_elsewhere("the model was converted or moved after prepare")

    def before_unprepared_step(self, optimizer: Optimizer) -> None:
        raise UsageError(
            f"{type(optimizer).__name__} was not prepared, and Megatron-Core computes with parameters of its own",
            cure="Step with what accelerator.prepare(optimizer) returned.",
        )

    def _computed_elsewhere(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{what}; Megatron-Core computes {type(self.module).__name__} as it was, and its own forward never runs",
            cure="Do it before accelerator.prepare(model, optimizer), or use megatron.engine: torch.",
        )

    def release(self) -> None:
        """Let go of Megatron-Core's model; the module keeps this rank's values, and its forward does not run."""
        self._whole_only.remove()
        self._watch.remove()
        self._assignment.remove()
