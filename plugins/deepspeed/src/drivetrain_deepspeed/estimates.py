"""What a rank holds and sends under ZeRO, for a planner. Reads DeepSpeed's settings, and does not import it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import ceil, prod
from typing import Any, final

import torch
from torch import Tensor, nn

from drivetrain_deepspeed.config import MISSING, DeepSpeedConfig, look_up
from drivetrain_deepspeed.engine_config import EngineConfig, hidden_size_of
from drivetrain_planner import Estimate, Ledger, PlanRequest, Traffic, trained_sizes

_ZERO = "zero_optimization"
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
}
"""DeepSpeed's own, in elements."""


def estimates(request: PlanRequest) -> list[Estimate]:
    """ZeRO stages 1 to 3, or the one that the configuration names."""
    given = dict(request.sections.get("deepspeed", {}))
    section = DeepSpeedConfig.model_validate(given)
    written = EngineConfig(section, request.precision, request.world_size).written
    named = section.zero_stage is not None or section.config is not None or section.config_file is not None
    stages = [written.stage] if named or request.mesh is not None else [1, 2, 3]
    return [_estimate(request, section.model_copy(update={"zero_stage": stage}), stage) for stage in stages]


def _estimate(request: PlanRequest, section: DeepSpeedConfig, stage: int) -> Estimate:
    ranks = request.world_size
    accumulation = request.accumulation(ranks)
    refused = _refused(request, section, stage)
    if refused or accumulation is None:
        refused = refused or request.indivisible(ranks)
        return Estimate(f"zero {stage}", "deepspeed", f"zero {stage}", 30 + stage, refused=refused)
    return (_Stage3 if stage == 3 else _Stage12)(request, section, stage, accumulation).estimate()


def _refused(request: PlanRequest, section: DeepSpeedConfig, stage: int) -> str:
    values = EngineConfig(section, request.precision, request.world_size).written.values
    if request.world_size == 1:
        return "it shares out states over processes, and there is one"
    if stage == 0:
        return "stage 0 shares nothing; ddp holds and sends the same"
    for key in ("offload_optimizer", "offload_param"):
        if look_up(values, (_ZERO, key, "device")) not in (MISSING, None, "none"):
            return f"{key} is not modelled; plan without it, or try it with a short run"
    if request.optimizer.elementwise:
        return ""
    return f"{request.optimizer.name} is not element-wise, and ZeRO steps on parts of the parameters"


class _Layout(ABC):
    """What the stages have in common.

    Args:
        request: what is planned.
        section: the configuration.
        stage: of ZeRO.
        accumulation: micro-batches of one optimizer step.
    """

    def __init__(self, request: PlanRequest, section: DeepSpeedConfig, stage: int, accumulation: int) -> None:
        self.request, self.stage, self.accumulation = request, stage, accumulation
        self.ranks = request.world_size
        config = EngineConfig(section, request.precision, self.ranks)
        self.values, _ = config.dictionary(hidden_size_of(request.model))
        self.trace = request.trace(self.watched(), (), None, self.around())
        self.trained = [one for one in request.model.parameters() if one.requires_grad]
        every = sum(one.numel() * one.element_size() for one in request.model.parameters())
        self.frozen = every - sum(trained_sizes(request.model))
        self.buffers = sum(one.numel() * one.element_size() for one in request.model.buffers())
        self.itemsize = self.trained[0].element_size()

    def watched(self) -> list[str]:
        """Modules whose forwards and backwards count."""
        return []

    def around(self) -> Callable[[], AbstractContextManager[object]] | None:
        """Return what replaces operators of the model while it is traced."""
        return None

    def size(self, key: str) -> int:
        """A number of elements that the configuration says, or DeepSpeed's own."""
        value = look_up(self.values, (_ZERO, key))
        return _DEFAULTS[key] if value in (MISSING, None) else int(value)

    def bucket(self) -> int:
        """Bytes of the buffers in which gradients are reduced."""
        overlap = look_up(self.values, (_ZERO, "overlap_comm"))
        doubled = self.stage < 3 and overlap is True
        contiguous = look_up(self.values, (_ZERO, "contiguous_gradients")) is not False
        return self.size("reduce_bucket_size") * self.itemsize * (1 + doubled) if contiguous else 0

    def made(self, ledger: Ledger, held: dict[str, int], stepped: int, traffic: list[Traffic]) -> Estimate:
        """The estimate, after the replay."""
        return Estimate(
            title=f"zero {self.stage}",
            backend="deepspeed",
            family=f"zero {self.stage}",
            rank=30 + self.stage,
            settings={
                "distributed_type": "deepspeed",
                "gradient_accumulation_steps": self.accumulation,
                "deepspeed": {"zero_stage": self.stage},
            },
            memory=ledger.memory,
            resident=held,
            moment=ledger.moment,
            accumulation=self.accumulation,
            trace=self.trace,
            traffic=traffic,
            stepped=stepped,
            remarks=self.remarks(),
        )

    def remarks(self) -> list[str]:
        """What the estimate leaves out."""
        return []

    @abstractmethod
    def estimate(self) -> Estimate:
        """Memory and traffic."""


@final
class _Stage12(_Layout):
    """Whole parameters in one flat buffer; each rank has the optimizer states of one part of it."""

    def estimate(self) -> Estimate:
        request, trace, ranks = self.request, self.trace, self.ranks
        elements = sum(one.numel() for one in self.trained)
        flat = ceil(elements / (2 * ranks)) * 2 * ranks * self.itemsize
        part = flat // ranks
        held = {
            "parameters": flat + self.frozen,
            "buffers": self.buffers,
            "optimizer states": request.optimizer.state([part]),
        }
        ledger = Ledger(held)
        if self.stage == 1:
            self._keep_whole(ledger)
        else:
            self._keep_part(ledger, self._whole_in_part(part))
        # One flat copy of the part's slices, for the optimizer.
        ledger.add("gradients", part)
        ledger.during("optimizer step", request.optimizer.step([part]))
        gradients = sum(trace.gradients.values())
        reductions = 1 if self.stage == 1 else self.accumulation
        calls = max(1, gradients // max(1, self.bucket()))
        traffic = [
            Traffic("reduce_scatter", ranks, reductions * gradients, reductions * calls, overlaps=self.stage == 2),
            Traffic("all_gather", ranks, flat, 1, overlaps=False),
        ]
        return self.made(ledger, held, part, traffic)

    def _keep_whole(self, ledger: Ledger) -> None:
        """Stage 1: gradients are whole until the last backward has ended, and are reduced then."""
        trace = self.trace
        first = self.accumulation == 1
        if not first:
            # The bucket is made in the first backward of a window and released after the last.
            ledger.add("gradients", sum(trace.gradients.values()))
            ledger.add("reduction buffers", self.bucket())
        for event in trace.events:
            ledger.replay(event)
            if event.kind == "gradient":
                if first:
                    ledger.add("reduction buffers", self.bucket())
                    first = False
                if self.accumulation == 1:
                    ledger.add("gradients", trace.gradients[event.name])
        ledger.add("reduction buffers", -self.bucket())
        ledger.add("gradients", -sum(trace.gradients.values()))

    def _whole_in_part(self, part: int) -> int:
        """Bytes of the parameters that lie in a rank's part, with those that reach beyond it; of the fullest rank."""
        most = [0] * self.ranks
        begin = 0
        for one in self.trained:
            size = one.numel() * one.element_size()
            for rank in range(begin // part, min((begin + size - 1) // part + 1, self.ranks)):
                most[rank] += size
            begin += size
        return max(most)

    def _keep_part(self, ledger: Ledger, part: int) -> None:
        """Stage 2: gradients are copied to a bucket; when it is full it is reduced, and this rank's are kept.

        Args:
            ledger: what is held.
            part: bytes of the gradients that a rank keeps, each of them whole.
        """
        trace = self.trace
        first, filled = True, 0
        if self.accumulation > 1:
            ledger.add("gradients", part)
        kept = False
        for event in trace.events:
            ledger.replay(event)
            if event.kind != "gradient":
                continue
            size = trace.gradients[event.name]
            if first:
                ledger.add("reduction buffers", self.bucket())
                first = False
            if filled + size > self.bucket() and filled:
                # The slices of a full bucket are made flat once more, while the next gradient waits.
                ledger.during("reduction buffers", size + filled)
                if not kept:
                    ledger.add("gradients", part)
                    kept = True
                filled = 0
            ledger.during("gradients", size)
            filled += size
        ledger.during("reduction buffers", filled)
        if not kept:
            ledger.add("gradients", part)
        ledger.add("reduction buffers", -self.bucket())
        ledger.add("gradients", -part * (2 if self.accumulation > 1 else 1))


@final
class _Stage3(_Layout):
    """Parameters in parts too; a module's are gathered when its forward or backward begins."""

    def watched(self) -> list[str]:
        return [
            name
            for name, module in self.request.model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]

    def around(self) -> Callable[[], AbstractContextManager[object]] | None:
        efficient = look_up(self.values, (_ZERO, "memory_efficient_linear")) is not False
        return _linear_of_stage_3 if efficient else None

    def remarks(self) -> list[str]:
        return ["parameters are counted as gathered from their first use in a micro-batch to their last"]

    def estimate(self) -> Estimate:
        request, trace, ranks = self.request, self.trace, self.ranks
        threshold = self.size("stage3_param_persistence_threshold")
        parts = [self._part(one) for one in self.trained]
        part = sum(parts)
        always = sum(one.numel() * one.element_size() for one in self.trained if one.numel() <= threshold)
        held = {
            "parameters": part + self.frozen,
            "buffers": self.buffers,
            "gradients": part,
            "optimizer states": request.optimizer.state([part]),
            "gathered": always,
            "reduction buffers": self.bucket(),
        }
        ledger = Ledger(held)
        self._replay(ledger, threshold)
        # A step begins by releasing all parameters, and gathers those that stay gathered when it ends.
        ledger.add("gathered", -always)
        ledger.add("gradients", part)
        ledger.during("optimizer step", request.optimizer.step([part]))
        gathered = sum(one.numel() * one.element_size() for one in self.trained)
        gradients = sum(trace.gradients.values())
        calls = len(self.trained)
        traffic = [
            Traffic("all_gather", ranks, self.accumulation * 2 * (gathered - always) + always, 2 * calls),
            Traffic(
                "reduce_scatter",
                ranks,
                self.accumulation * gradients,
                self.accumulation * max(1, gradients // max(1, self.bucket())),
            ),
        ]
        return self.made(ledger, held, part, traffic)

    def _part(self, parameter: nn.Parameter) -> int:
        return ceil(prod(parameter.shape) / self.ranks) * parameter.element_size()

    def _replay(self, ledger: Ledger, threshold: int) -> None:
        model = self.request.model
        most = self.size("stage3_max_live_parameters") * self.itemsize
        gathered: dict[str, int] = {}
        # A full bucket is laid out anew by ranks, while the next gradient waits; gloo reduces a copy of that.
        copies = 2 if self.request.device_type == "cpu" else 1
        filled = 0
        for event in self.trace.events:
            ledger.replay(event)
            if event.kind in ("enter", "backward_enter") and event.name not in gathered:
                own = model.get_submodule(event.name).parameters(recurse=False)
                size = sum(one.numel() * one.element_size() for one in own if one.numel() > threshold)
                if sum(gathered.values()) + size > most:
                    ledger.add("gathered", -sum(gathered.values()))
                    gathered.clear()
                gathered[event.name] = size
                ledger.add("gathered", size)
            elif event.kind == "backward_leave" and event.name in gathered:
                ledger.add("gathered", -gathered.pop(event.name))
            elif event.kind == "gradient":
                size = self.trace.gradients[event.name]
                if filled + size > self.bucket() and filled:
                    ledger.during("reduction buffers", size + filled * copies)
                    filled = 0
                ledger.during("gradients", size)
                filled += size
        ledger.during("reduction buffers", filled * copies)
        ledger.add("gathered", -sum(gathered.values()))


class _Linear(torch.autograd.Function):
    """Saves what DeepSpeed's linear of stage 3 saves: input and weight as they are given.

    Torch's own saves what autocast has made of them, among it a copy of each weight in half precision.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.biased = bias is not None
        ctx.dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        if bias is not None and inputs.dim() == 2:
            return torch.addmm(bias, inputs, weight.t())
        output = inputs.matmul(weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = of_bias = None
        with torch.autocast("cpu", dtype=ctx.dtype, enabled=ctx.dtype is not None):
            if ctx.needs_input_grad[0]:
                of_inputs = gradient.matmul(weight)
            if ctx.needs_input_grad[1]:
                of_weight = gradient.flatten(end_dim=-2).t().matmul(inputs.flatten(end_dim=-2))
            if ctx.biased and ctx.needs_input_grad[2]:
                of_bias = gradient.flatten(end_dim=-2).sum(0)
        return of_inputs, of_weight, of_bias


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(inputs, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def _linear_of_stage_3() -> Iterator[None]:
    """Put it in the place of torch's, as DeepSpeed does in the forwards of a run."""
    functional: Any = nn.functional
    before, functional.linear = functional.linear, _linear
    try:
        yield
    finally:
        functional.linear = before
