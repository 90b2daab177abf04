"""Backends that are wrong in gradients, clipping, stepping or precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from toy_backend import CAPABILITIES, ToyTrainable
from wrong_base import Mistake

from drivetrain.api import StepResult, gradients, multiply_gradients

# ---- gradients ------------------------------------------------------------------------------------------------------


class ForgetsWorldSize(Mistake):
    """Adds the ranks' gradients and does not divide by their number."""

    caught_by = ("gradients.dense", "gradients.ragged_labels")

    class trainable(ToyTrainable):  # noqa: N801 - the toy's attribute of this name
        def average(self) -> None:
            super().average()
            multiply_gradients(gradients(self.module.parameters()), self.backend.topology.dp_size)


class KeepsNoAccount(Mistake):
    """Steps with whatever gradients there are, those of one rank alone included."""

    caught_by = ("scripts.steps_without_the_accelerator",)

    class trainable(ToyTrainable):  # noqa: N801
        def has_unreduced_gradients(self) -> bool:
            return False


class KnowsFirstParametersOnly(Mistake):
    """Averages the gradients of the parameters that were trained in ``prepare``, and of no others."""

    caught_by = ("scripts.layers_that_come_later", "scripts.parameters_that_are_unfrozen")

    class trainable(ToyTrainable):  # noqa: N801
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.flat.lay_out = lambda: None  # type: ignore[method-assign]


class ReducesItsOwnForward(Mistake):
    """Averages gradients only where its own forward led to them."""

    caught_by = ("scripts.methods_that_do_not",)

    class trainable(ToyTrainable):  # noqa: N801
        ran = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.ran = True
            return super().forward(*args, **kwargs)

        def average(self) -> None:
            if self.ran:
                super().average()
            self.local.reduced()


class TrainsACopy(Mistake):
    """Trains copies of the parameters: what a script writes to the model is undone by the next step."""

    caught_by = ("scripts.parameters_that_are_written",)

    class trainable(ToyTrainable):  # noqa: N801
        kept: list[Tensor] | None = None

        def optimizer_step(self, optimizer: Optimizer, closure: Any = None) -> StepResult:
            if self.kept is not None:
                for parameter, value in zip(self.module.parameters(), self.kept, strict=True):
                    parameter.data.copy_(value)
            result = super().optimizer_step(optimizer, closure)
            self.kept = [parameter.detach().clone() for parameter in self.module.parameters()]
            return result


class ReadsMemory(Mistake):
    """Averages gradients as they lie in memory, and takes the means for values in the order that ``prepare`` found."""

    caught_by = ("scripts.weights_of_other_strides",)

    class trainable(ToyTrainable):  # noqa: N801
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.strides = [each.stride() for each in self.flat.held]

        def average(self) -> None:
            for parameter, strides in zip(self.flat.held, self.strides, strict=True):
                if parameter.grad is not None:
                    mean = self.backend.reduce(parameter.grad.as_strided((parameter.numel(),), (1,)).clone(), "mean")
                    parameter.grad.copy_(mean.as_strided(parameter.shape, strides))
            self.local.reduced()


class LaysOutByRows(Mistake):
    """Lays weights out row by row, and lets random numbers for them come in that order."""

    caught_by = ("scripts.weights_of_other_strides",)

    class trainable(ToyTrainable):  # noqa: N801
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for parameter in self.flat.held:
                part = parameter.detach().as_strided((parameter.numel(),), (1,), parameter.storage_offset())
                parameter.data = part.copy_(parameter.detach().flatten().clone()).view(parameter.shape)


class KeepsEveryOptimizer(Mistake):
    """Does not forget an optimizer that a later one replaces."""

    caught_by = ("scripts.later_optimizers",)

    class trainable(ToyTrainable):  # noqa: N801
        def remove_optimizer(self, optimizer: Optimizer) -> None:
            pass


class RunsHooksOnParts(Mistake):
    """Lets autograd call the script's hooks on parameters with the gradient of one rank's samples."""

    caught_by = ("scripts.hooks_of_parameters",)

    class trainable(ToyTrainable):  # noqa: N801
        def refuse_hooks(self) -> None:
            pass


class LetsReplicasPart(Mistake):
    """Never finds out that parameters differ between ranks."""

    caught_by = ("scripts.forwards_that_write",)

    class trainable(ToyTrainable):  # noqa: N801
        def compare_replicas(self) -> None:
            pass


class StepsItsOwnGradients(Mistake):
    """Steps with the averages that it has kept, whatever the script has made of ``p.grad``."""

    caught_by = ("scripts.gradients_that_are_edited",)

    class trainable(ToyTrainable):  # noqa: N801
        def average(self) -> None:
            super().average()
            self.kept = [(each, each.grad.clone()) for each in self.flat.held if each.grad is not None]

        def optimizer_step(self, optimizer: Optimizer, closure: Any = None) -> StepResult:
            for parameter, gradient in self.kept:
                parameter.grad = gradient
            return super().optimizer_step(optimizer, closure)


class TakesAnyTensor(Mistake):
    """Says that every tensor is of its model, and reduces the gradients of those that are."""

    caught_by = ("scripts.tensors_of_no_model",)

    class trainable(ToyTrainable):  # noqa: N801
        def shares(self, parameters: Sequence[Tensor]) -> bool:
            return True


class ScalesItsOwnLosses(Mistake):
    """Multiplies losses by more than the number of ranks, and takes it out of the model's gradients alone."""

    caught_by = ("loose.in_the_optimizer_of_a_model", "loose.in_an_optimizer_of_their_own")

    class trainable(ToyTrainable):  # noqa: N801
        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            super().backward(loss, scale * 8)

        def average(self) -> None:
            super().average()
            multiply_gradients(gradients(self.module.parameters()), 1 / 8)


class StepsOnNothing(Mistake):
    """Takes each step for one that a backward came before."""

    caught_by = ("scripts.steps_without_a_backward",)

    class trainable(ToyTrainable):  # noqa: N801
        def optimizer_step(self, optimizer: Optimizer, closure: Any = None) -> StepResult:
            self.engine.count_backward()
            return super().optimizer_step(optimizer, closure)


class KnowsTensorsInTrees(Mistake):
    """Trains only where it finds the tensors of a forward's output, as an engine does that puts hooks on them."""

    caught_by = ("scripts.outputs_of_any_type",)

    class trainable(ToyTrainable):  # noqa: N801
        found = True

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            self.found = any(isinstance(leaf, Tensor) for leaf in tree_leaves(output))
            return output

        def average(self) -> None:
            super().average()
            if not self.found:
                multiply_gradients(gradients(self.module.parameters()), 0.0)


class AddsForTwo(Mistake):
    """Takes the mean of two ranks for that of any number: right by luck where there are two."""

    caught_by = ("scripts.three_ranks",)

    class trainable(ToyTrainable):  # noqa: N801
        def average(self) -> None:
            super().average()
            size = self.backend.topology.dp_size
            multiply_gradients(gradients(self.module.parameters()), size / 2 if size > 1 else 1.0)


class AveragesTwice(Mistake):
    """Divides by the number of ranks once more."""

    caught_by = ("gradients.dense", "gradients.explicit_step")

    class trainable(ToyTrainable):  # noqa: N801
        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            super().backward(loss, scale / self.backend.topology.dp_size)


class ClaimsToSum(Mistake):
    """Averages gradients, and does not declare it."""

    capabilities = replace(CAPABILITIES, averages_gradients=False)
    caught_by = ("gradients.dense",)


class NeverReduces(Mistake):
    """Every rank trains on its own samples, and the main process's parameters are saved."""

    caught_by = ("gradients.dense",)

    class trainable(ToyTrainable):  # noqa: N801
        def average(self) -> None:
            pass


class IgnoresScale(Mistake):
    """Back-propagates the loss as it is."""

    caught_by = ("windows.full_windows", "gradients.ragged_labels")

    class trainable(ToyTrainable):  # noqa: N801
        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            super().backward(loss, 1.0)


class IgnoresCorrection(Mistake):
    """Does nothing in ``scale_gradients``."""

    caught_by = ("windows.partial_window", "windows.ragged_windows")

    class trainable(ToyTrainable):  # noqa: N801
        def scale_gradients(self, factor: float | Tensor) -> None:
            pass


class BakesInTheScale(Mistake):
    """Reads a scale that is a number once and takes it for all later losses, as a compiled graph takes a constant."""

    caught_by = ("uneven.last_batch", "uneven.fewer_samples_than_ranks", "uneven.three_ranks")

    class trainable(ToyTrainable):  # noqa: N801
        first: float | Tensor | None = None

        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            self.first = scale if self.first is None else self.first
            super().backward(loss, scale if isinstance(scale, Tensor) else self.first)


class NeverWeighsNothing(Mistake):
    """Takes a scale of 0 for none at all, and uses the one before."""

    caught_by = ("uneven.fewer_samples_than_ranks", "uneven.three_ranks")

    class trainable(ToyTrainable):  # noqa: N801
        before: float | Tensor = 1.0

        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            self.before = scale or self.before
            super().backward(loss, self.before)


class TakesOneScaleForAll(Mistake):
    """Gives all ranks the mean of their scales, where these are on the device."""

    caught_by = ("gradients.counted_labels",)

    class trainable(ToyTrainable):  # noqa: N801
        def backward(self, loss: Tensor, scale: float | Tensor) -> None:
            super().backward(loss, self.backend.reduce(scale, "mean") if isinstance(scale, Tensor) else scale)


class DividesByThePresent(Mistake):
    """Where ranks have run out of batches, averages over those that have not."""

    caught_by = ("uneven.ranks_that_end_early", "uneven.three_ranks")

    class trainable(ToyTrainable):  # noqa: N801
        def average(self) -> None:
            super().average()
            if self.backend.joining:
                factor = self.backend.topology.dp_size / self.backend.training
                multiply_gradients(gradients(self.module.parameters()), factor)


class LeavesThoseThatEndBehind(Mistake):
    """Ranks that have run out of batches keep the parameters that they had then."""

    caught_by = ("honesty.joins_uneven_inputs",)

    def share_all(self, source: int) -> None:
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


class CapturesRates(Mistake):
    """Steps with the rates of its first step, as a compiled step does that takes them for constants."""

    caught_by = ("scheduling.moves_before_training",)

    class trainable(ToyTrainable):  # noqa: N801
        rates: list[float] | None = None

        def optimizer_step(self, optimizer: Optimizer, closure: Any = None) -> StepResult:
            present = [group["lr"] for group in optimizer.param_groups]
            self.rates = self.rates or present
            for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate
            try:
                return super().optimizer_step(optimizer, closure)
            finally:
                for group, rate in zip(optimizer.param_groups, present, strict=True):
                    group["lr"] = rate


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


class ClipsNothing(Mistake):
    """Returns the right norm and leaves the gradients as they are."""

    caught_by = ("clipping.clips_as_one_process_does",)

    class trainable(ToyTrainable):  # noqa: N801
        def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
            return super().clip_grad_norm(parameters, float("inf"), norm_type)


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
    """Clips nothing by value."""

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
