"""A model that Megatron-Core runs: training outputs are deferred, and backward runs the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    TorchEngine,
    UnsupportedError,
    UsageError,
    gradients,
    hooks_of,
    multiply_gradients,
)
from drivetrain_megatron import state
from drivetrain_megatron.core_engine.attributes import AttributeWatch
from drivetrain_megatron.core_engine.distributed_optimizer import ShardedStepping
from drivetrain_megatron.core_engine.parallel_state import ParallelState
from drivetrain_megatron.core_engine.running import CorePipeline
from drivetrain_megatron.core_engine.weights import Weights
from drivetrain_megatron.pipeline.deferred_trainable import DeferredTrainable
from drivetrain_megatron.pipeline.parting import Share
from drivetrain_megatron.pipeline.skeleton import is_absent, passing_over
from drivetrain_megatron.remapping import remap
from drivetrain_megatron.stepping import Stepping
from drivetrain_megatron.tensor import packing
from drivetrain_sharding import AssignmentRefusal, FormerParameters


@final
class CoreTrainable(DeferredTrainable):
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

    pipeline: CorePipeline
    _stepping: Stepping | ShardedStepping
    _share: Share

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

    @passing_over
    def _train(self, call: Any, node: Any, scale: float | Tensor) -> None:
        multiplier = self._multiplier(scale)
        if not self._used:
            self._gradients.keep_gradients()
            self._wrapped.zero_grad_buffer()
        self.pipeline.train(call, node, multiplier)
        if self._syncs:
            with self._groups.shared():
                finalize_model_grads([self._wrapped])
            self._gradients.give_gradients()
        # What is not reduced yet stays in the buffer for the window's next micro-batch.
        self._used = not self._syncs

    @passing_over
    def scale_gradients(self, factor: float | Tensor) -> None:
        multiply_gradients(gradients(self._gradients.held), factor)

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

    @passing_over
    def add_optimizer(self, optimizer: Optimizer) -> None:
        remap(optimizer, self._former, self.module, partial(packing.part, self.module))
        self._stepping.add(optimizer)

    @passing_over
    def portable_state(self) -> PortableState:
        return state.of_stage(self._stepping.portable_state(), self._share, self.pipeline.group)

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
