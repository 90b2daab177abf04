"""Backends with one mistake each, of the kinds that have been made in public. The kit must catch every one.

Each class says in its docstring what is wrong, and in ``caught_by`` which cases see it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from toy_backend import CAPABILITIES, Plugin, ToyBackend, ToyTrainable

from drivetrain.api import BackendInfo, PortableState, StepResult, TensorSpec, Topology, clipping
from drivetrain.registry import get_registry

MISTAKES: dict[str, type[Mistake]] = {}
"""By name of the backend."""


class Mistake(ToyBackend):
    """A toy backend gone wrong."""

    caught_by: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        MISTAKES[cls.__name__.lower()] = cls


# ---- gradients ------------------------------------------------------------------------------------------------------


class ForgetsWorldSize(Mistake):
    """Adds the ranks' gradients and does not divide by their number."""

    caught_by = ("gradients.dense", "gradients.ragged_labels")

    class trainable(ToyTrainable):  # noqa: N801 - the toy's attribute of this name
        def average(self) -> None:
            super().average()
            clipping.multiply(clipping.gradients(self.module.parameters()), self.backend.topology.dp_size)


class AveragesTwice(Mistake):
    """Divides by the number of ranks once more."""

    caught_by = ("gradients.dense", "gradients.explicit_step")

    class trainable(ToyTrainable):  # noqa: N801
        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            super().backward(loss, scale / self.backend.topology.dp_size)


class IgnoresScale(Mistake):
    """Back-propagates the loss as it is."""

    caught_by = ("windows.full_windows", "gradients.ragged_labels")

    class trainable(ToyTrainable):  # noqa: N801
        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            super().backward(loss, 1.0 / self.backend.topology.dp_size)


class IgnoresCorrection(Mistake):
    """Does nothing in ``scale_gradients``."""

    caught_by = ("windows.partial_window", "gradients.ragged_labels", "windows.ragged_windows")

    class trainable(ToyTrainable):  # noqa: N801
        def scale_gradients(self, factor: float | Tensor) -> None:
            pass


class DropsMicroBatches(Mistake):
    """Gradients of micro-batches before the last one are lost (seen with ZeRO-2)."""

    caught_by = ("windows.full_windows", "windows.ragged_windows")

    class trainable(ToyTrainable):  # noqa: N801
        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            if self.synchronising:
                for parameter in self.module.parameters():
                    parameter.grad = None
            super().backward(loss, scale)


class CountsByItself(Mistake):
    """Keeps a counter of its own and steps at every second backward only: the last, short window is dropped."""

    caught_by = ("windows.partial_window", "gradients.dense")

    class trainable(ToyTrainable):  # noqa: N801
        count = 0

        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            self.count += 1
            super().backward(loss, scale)

        def optimizer_step(self, optimizer: Optimizer, closure: Any = None) -> StepResult:
            return super().optimizer_step(optimizer, closure) if self.count % 2 == 0 else StepResult()


class NeverZeroes(Mistake):
    """``zero_grad`` keeps the gradients."""

    caught_by = ("gradients.dense",)

    class trainable(ToyTrainable):  # noqa: N801
        def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
            pass


class TrainsOwnStart(Mistake):
    """Every rank starts from its own parameters."""

    caught_by = ("gradients.rank_zero_starts",)

    def share(self, module: nn.Module) -> None:
        pass


class OneRateForAll(Mistake):
    """Steps every parameter group with the first group's settings."""

    caught_by = ("gradients.parameter_groups",)

    class trainable(ToyTrainable):  # noqa: N801
        def optimizer_step(self, optimizer: Optimizer, closure: Any = None) -> StepResult:
            for group in optimizer.param_groups[1:]:
                group.update({name: value for name, value in optimizer.param_groups[0].items() if name != "params"})
            return super().optimizer_step(optimizer, closure)


class AlwaysReduces(Mistake):
    """Reduces at every backward although it declares that it can wait."""

    caught_by = ("honesty.no_sync_keeps_gradients_local",)

    class trainable(ToyTrainable):  # noqa: N801
        def synchronise_gradients(self, enabled: bool) -> None:
            pass


# ---- clipping and stepping ------------------------------------------------------------------------------------------


class ClipsPerRank(Mistake):
    """Clips each rank's own gradients before they are averaged."""

    caught_by = ("clipping.clips_as_one_process_does", "clipping.same_norm_everywhere")

    class trainable(ToyTrainable):  # noqa: N801
        def average(self) -> None:
            pass

        def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
            norm = super().clip_grad_norm(parameters, max_norm, norm_type)
            super().average()
            return norm


class NormAfterClipping(Mistake):
    """Returns the norm that is left."""

    caught_by = ("clipping.clips_as_one_process_does", "clipping.same_norm_everywhere")

    class trainable(ToyTrainable):  # noqa: N801
        def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
            return super().clip_grad_norm(parameters, max_norm, norm_type).clamp(max=max_norm)


class StepsOnOverflow(Mistake):
    """Applies gradients that are not finite."""

    caught_by = ("clipping.not_finite_is_skipped",)

    class trainable(ToyTrainable):  # noqa: N801
        def optimizer_step(self, optimizer: Optimizer, closure: Any = None) -> StepResult:
            optimizer.step()
            return StepResult()


class HidesTheSkip(Mistake):
    """Skips, but says that it stepped: the scheduler moves."""

    caught_by = ("clipping.not_finite_is_skipped", "precision.overflow_is_skipped")

    class trainable(ToyTrainable):  # noqa: N801
        def optimizer_step(self, optimizer: Optimizer, closure: Any = None) -> StepResult:
            return replace(super().optimizer_step(optimizer, closure), skipped=False)


class ClampsNothing(Mistake):
    """Declares ``clip_by_value`` and does not do it."""

    caught_by = ("clipping.clips_by_value",)

    class trainable(ToyTrainable):  # noqa: N801
        def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
            pass


# ---- precision ------------------------------------------------------------------------------------------------------


class LowPrecisionParameters(Mistake):
    """Trains bfloat16 parameters under ``mixed_precision: bf16``."""

    caught_by = ("precision.bf16_policy",)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Any:
        prepared = super().prepare(model, optimizers, training=training)
        if self.settings.precision.name == "bf16":
            model.to(torch.bfloat16)
        return prepared


class FullPrecisionCompute(Mistake):
    """Computes in float32 whatever the policy says."""

    caught_by = ("precision.bf16_policy", "precision.fp16_policy")

    class trainable(ToyTrainable):  # noqa: N801
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)


# ---- state ----------------------------------------------------------------------------------------------------------


class ForgetsMoments(Mistake):
    """Loads the parameters but not the optimizer's state."""

    caught_by = ("state.resumed_equals_uninterrupted", "state.load_undoes")

    class trainable(ToyTrainable):  # noqa: N801
        def load_portable_state(self, state: PortableState) -> None:
            before = [dict(optimizer.state) for optimizer in self.optimizers]
            kept = [{parameter: dict(slots) for parameter, slots in each.items()} for each in before]
            super().load_portable_state(state)
            for optimizer, states in zip(self.optimizers, kept, strict=True):
                optimizer.state.clear()
                optimizer.state.update(states)


class ForgetsBuffers(Mistake):
    """Neither saves nor restores buffers."""

    caught_by = ("state.load_undoes",)

    class trainable(ToyTrainable):  # noqa: N801
        def portable_state(self) -> PortableState:
            return self.without_buffers(super().portable_state())

        def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
            return self.without_buffers(super().portable_template(saved))

        def without_buffers(self, state: PortableState) -> PortableState:
            for name, _ in self.module.named_buffers():
                state.tensors.pop(f"model.{name}", None)
            return state

        def load_portable_state(self, state: PortableState) -> None:
            for name, tensor in self.module.named_buffers():
                state.tensors[f"model.{name}"] = tensor
            super().load_portable_state(state)


class SavesPart(Mistake):
    """Leaves the last parameter out of what it saves."""

    caught_by = ("state.load_undoes", "state.resumed_equals_uninterrupted")

    class trainable(ToyTrainable):  # noqa: N801
        def portable_state(self) -> PortableState:
            state = super().portable_state()
            state.tensors.pop([name for name in state.tensors if name.startswith("model.")][-1])
            return state


class ForgetsLossScale(Mistake):
    """Does not save the loss scaler's state."""

    caught_by = ("state.loss_scale_travels",)

    class trainable(ToyTrainable):  # noqa: N801
        def portable_state(self) -> PortableState:
            return replace(super().portable_state(), extra={})


class PrefixesNames(Mistake):
    """Lets its wrapper's name into the state dict."""

    caught_by = ("honesty.parameter_names_are_the_users", "gradients.dense")

    class trainable(ToyTrainable):  # noqa: N801
        def full_state_dict(self) -> Any:
            for name, tensor in super().full_state_dict():
                yield f"module.{name}", tensor


# ---- collectives and manners ----------------------------------------------------------------------------------------


class NoBarrier(Mistake):
    """``barrier`` waits for nobody: files are read before they are written."""

    caught_by = ("collectives.main_process_goes_first",)

    def barrier(self) -> None:
        pass


class GathersBackwards(Mistake):
    """Concatenates the ranks in the wrong order."""

    caught_by = ("collectives.gather_nested", "evaluation.each_sample_once_in_order")

    def gather(self, tensor: Tensor) -> Tensor:
        parts = super().gather(tensor).chunk(self.topology.dp_size)
        return torch.cat(parts[::-1])


class MeansForSums(Mistake):
    """``reduce`` averages whatever it is asked for."""

    caught_by = ("collectives.reductions", "gradients.ragged_labels")

    def reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        return super().reduce(tensor, "mean" if op == "sum" else op)


class LeavesVariables(Mistake):
    """Sets an environment variable and leaves it."""

    caught_by = ("gradients.dense", "gradients.start_stop_start")

    def start(self) -> Topology:
        os.environ["WRONG_BACKEND_WAS_HERE"] = "1"
        return super().start()


class LeavesDtype(Mistake):
    """Changes the process's default dtype."""

    caught_by = ("gradients.dense", "clipping.leaves_small_gradients")

    def stop(self) -> None:
        super().stop()
        torch.set_default_dtype(torch.float64)


class LeavesProcessGroup(Mistake):
    """Forms a process group and never destroys it."""

    caught_by = ("gradients.dense",)

    def stop(self) -> None:
        pass


class ServesOneModel(Mistake):
    """Declares several models but reduces the first one's gradients only."""

    caught_by = ("gradients.several_models", "gradients.one_loss_through_two_models")

    class trainable(ToyTrainable):  # noqa: N801
        def average(self) -> None:
            if self is self.backend.trainables[0]:
                super().average()


def register() -> None:
    """Make all of them known to this process."""
    registry = get_registry()
    if "averagestwice" in registry.names():
        return
    infos = [
        BackendInfo(
            name=name, summary=kind.__doc__ or "", backend=f"wrong_backends:{kind.__name__}", capabilities=CAPABILITIES
        )
        for name, kind in MISTAKES.items()
    ]
    registry.register(Plugin(*infos), name="wrong")
