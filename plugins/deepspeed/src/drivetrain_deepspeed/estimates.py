"""Counts what a rank holds and sends under ZeRO, for a planner. Reads DeepSpeed's settings, and does not import it.

What offload keeps in host memory, and what it copies over the link, is read in ``stage_1_and_2.py`` and ``stage3.py``
of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import IntEnum
from math import ceil, prod
from typing import Any, Literal, final

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


class Offload(IntEnum):
    """Tensors that are offloaded to host memory."""

    NOTHING = 0
    OPTIMIZER = 1
    """Optimizer states, this rank's parameters in float32 and their gradients; the optimizer steps there."""
    ALL = 2
    """This rank's parts of the parameters, too."""


_TITLES = {Offload.NOTHING: "", Offload.OPTIMIZER: ", offload", Offload.ALL: ", offload of parameters too"}


def estimates(request: PlanRequest) -> list[Estimate]:
    """ZeRO stages 1 to 3, or the one that the configuration names.

    On an accelerator stages 2 and 3 are offered with offload, too, as a last resort, unless the configuration says what
    is offloaded.
    """
    given = dict(request.sections.get("deepspeed", {}))
    section = DeepSpeedConfig.model_validate(given)
    written = EngineConfig(section, request.precision, request.world_size).written
    named = section.zero_stage is not None or section.config is not None or section.config_file is not None
    stages = [written.stage] if named or request.mesh is not None else [1, 2, 3]
    found = [_estimate(request, section.model_copy(update={"zero_stage": stage}), stage) for stage in stages]
    said = request.mesh is not None or any(look_up(written.values, (_ZERO, key)) is not MISSING for key in _OFFLOAD)
    if request.device_type == "cpu" or said:
        return found
    for stage, keys in ((2, _OFFLOAD[:1]), (3, _OFFLOAD[:1]), (3, _OFFLOAD)):
        if stage in stages:
            offloading = section.model_copy(update={"zero_stage": stage, **dict.fromkeys(keys, "cpu")})
            found.append(replace(_estimate(request, offloading, stage), last_resort=True))
    return found


_OFFLOAD = ("offload_optimizer", "offload_param")


def _estimate(request: PlanRequest, section: DeepSpeedConfig, stage: int) -> Estimate:
    ranks = request.world_size
    accumulation = request.accumulation(ranks)
    values = EngineConfig(section, request.precision, ranks).written.values
    on_host = [look_up(values, (_ZERO, key, "device")) not in (MISSING, None, "none") for key in _OFFLOAD]
    offload = Offload(sum(on_host))
    refused = _refused(request, values, stage, on_host)
    if refused or accumulation is None:
        refused = refused or request.indivisible(ranks)
        return Estimate(f"zero {stage}{_TITLES[offload]}", "deepspeed", f"zero {stage}", 30 + stage, refused=refused)
    return (_Stage3 if stage == 3 else _Stage12)(request, section, stage, accumulation, offload).estimate()


def _refused(request: PlanRequest, values: Mapping[str, Any], stage: int, on_host: list[bool]) -> str:
    optimizer, parameters = on_host
    if request.world_size == 1 and not optimizer:
        return "it shares out states over processes, and there is one"
    if stage == 0:
        return "stage 0 shares nothing; ddp holds and sends the same"
    for key, moved in zip(_OFFLOAD, on_host, strict=True):
        if moved and look_up(values, (_ZERO, key, "device")) != "cpu":
            return f"{key} to another place than the CPU's memory is not counted; plan with {key}: cpu"
    if parameters and not optimizer:
        return "offload_param without offload_optimizer is not counted; plan with both, or with offload_optimizer alone"
    if parameters and stage != 3:
        return f"offload_param is of stage 3, and the stage is {stage}"
    ratio = look_up(values, (_ZERO, "offload_optimizer", "ratio"))
    if optimizer and ratio not in (MISSING, None, 1, 1.0):
        return f"offload_optimizer with ratio: {ratio} is not counted; plan without ratio"
    if look_up(values, (_ZERO, "offload_optimizer", "super_offload")) is True:
        return "offload_optimizer with super_offload is not counted; plan without it"
    if request.optimizer.elementwise:
        return ""
    return f"{request.optimizer.name} is not element-wise, and ZeRO steps on parts of the parameters"


class _Layout(ABC):
    """Base of the layouts of ZeRO stages.

    Args:
        request: what is planned.
        section: the configuration.
        stage: of ZeRO.
        accumulation: micro-batches of one optimizer step.
        offload: tensors in host memory.
    """

    def __init__(
        self, request: PlanRequest, section: DeepSpeedConfig, stage: int, accumulation: int, offload: Offload
    ) -> None:
        self.request, self.stage, self.accumulation, self.offload = request, stage, accumulation, offload
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
        """Modules whose forwards and backwards are traced."""
        return []

    def around(self) -> Callable[[], AbstractContextManager[object]] | None:
        """Return what replaces operators of the model while it is traced."""
        return None

    def size(self, key: str) -> int:
        """Return a number of elements from the configuration, or DeepSpeed's default."""
        value = look_up(self.values, (_ZERO, key))
        return _DEFAULTS[key] if value in (MISSING, None) else int(value)

    def bucket(self) -> int:
        """Bytes of the buffers in which gradients are reduced."""
        overlap = look_up(self.values, (_ZERO, "overlap_comm"))
        doubled = self.stage < 3 and overlap is True
        contiguous = look_up(self.values, (_ZERO, "contiguous_gradients")) is not False
        return self.size("reduce_bucket_size") * self.itemsize * (1 + doubled) if contiguous else 0

    @property
    def apart(self) -> bool:
        """Host memory is another than the device's."""
        return self.request.device_type != "cpu"

    def pinned(self, key: str) -> bool:
        """Whether copies of what ``key`` offloads run beside computation, as they do unless the memory is pageable."""
        return look_up(self.values, (_ZERO, key, "pin_memory")) is not False

    def placed(self, held: dict[str, int], offloaded: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """Parts that are held on the device, and in host memory, if that is another."""
        if self.apart:
            return held, offloaded
        return {part: held.get(part, 0) + offloaded.get(part, 0) for part in {**held, **offloaded}}, {}

    def made(
        self,
        ledger: Ledger,
        held: dict[str, int],
        host: dict[str, int],
        stepped: int,
        traffic: list[Traffic],
        copied: int,
    ) -> Estimate:
        """The estimate, after the replay."""
        in_host = self.offload > Offload.NOTHING and self.apart
        keys = dict.fromkeys(_OFFLOAD[: self.offload], "cpu")
        return Estimate(
            title=f"zero {self.stage}{_TITLES[self.offload]}",
            backend="deepspeed",
            family=f"zero {self.stage}",
            rank=30 + self.stage,
            settings={
                "distributed_type": "deepspeed",
                "gradient_accumulation_steps": self.accumulation,
                "deepspeed": {"zero_stage": self.stage, **keys},
            },
            memory=ledger.memory,
            resident=held,
            moment=ledger.moment,
            host=host,
            accumulation=self.accumulation,
            trace=self.trace,
            traffic=traffic,
            copied=copied,
            stepped=0 if in_host else stepped,
            stepped_in_host=stepped if in_host else 0,
            remarks=[*self.remarks(), *self.of_host()],
        )

    def _normed(self, part: int) -> int:
        """Bytes that the norm of a rank's gradients reads and writes: it is of a copy in float64."""
        return part + 2 * part * 8 // self.itemsize

    def of_host(self) -> list[str]:
        """Return what is to be known of offload."""
        if self.offload == Offload.NOTHING:
            return []
        if not self.apart:
            return ["here the host's memory is the device's, so that offload frees nothing"]
        return ["seconds of copies and of the step in host memory follow host and host_bandwidth of the machine"]

    def remarks(self) -> list[str]:
        """Costs that the estimate leaves out."""
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
        held = {"parameters": flat + self.frozen, "buffers": self.buffers}
        states = request.optimizer.state([part])
        host: dict[str, int] = {}
        if self.offload:
            held, host = self.placed(*self._offloaded(held, part, states))
        else:
            held["optimizer states"] = states
        ledger = Ledger(held)
        whole = self._whole_in_part(part)
        if self.stage == 1:
            self._keep_whole(ledger, part)
        elif self.offload:
            self._keep_part(ledger, 0, part)
        else:
            self._keep_part(ledger, whole, part)
        if not self.offload:
            # One flat copy of the part's slices, for the optimizer.
            ledger.add("gradients", part)
        if not (self.offload and self.apart):
            ledger.during("optimizer step", request.optimizer.step([part]))
        gradients = sum(trace.gradients.values())
        reductions = 1 if self.stage == 1 else self.accumulation
        calls = max(1, gradients // max(1, self.bucket()))
        traffic = [
            Traffic(self._reduces_by, ranks, reductions * gradients, reductions * calls, overlaps=self._overlaps),
            Traffic("all_gather", ranks, flat, 1, overlaps=False),
        ]
        if self.offload and self.apart:
            traffic += self._copies(part, whole)
        # Each reduction copies gradients into the bucket, divides it, joins the slices of all ranks, and copies this
        # rank's back, and out. A step joins these.
        copied = reductions * (6 * gradients + 4 * part) + 2 * part + self._normed(part)
        return self.made(ledger, held, host, part, traffic, copied)

    @property
    def _reduces_by(self) -> Literal["all_reduce", "reduce_scatter"]:
        """Collective that reduces a bucket: unless the configuration says otherwise every rank gets all of it."""
        said = [look_up(self.values, (_ZERO, key)) for key in ("reduce_scatter", "use_multi_rank_bucket_allreduce")]
        return "reduce_scatter" if said[0] is not False and said[1] is False else "all_reduce"

    @property
    def _overlaps(self) -> bool:
        """Whether backward goes on while a bucket is reduced."""
        return look_up(self.values, (_ZERO, "overlap_comm")) is True

    def _offloaded(self, held: dict[str, int], part: int, states: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes by kind on the device, and those in host memory.

        The engine's optimizer has a copy of this rank's part, whose gradient is kept, and a buffer from which the part
        is copied back. Each place has room for the largest gradient, in which those of several micro-batches are added
        up; under stage 2 they wait in host memory, each whole. In the order of ``__init__`` and
        ``async_accumulate_grad_in_cpu_via_gpu``.
        """
        largest = max(one.numel() for one in self.trained) * self.itemsize
        gathered = self._whole_in_part(part) if self._adds_up else 0
        host = {
            "parameters": 2 * part,
            "gradients": part + gathered,
            "optimizer states": states,
            "reduction buffers": largest,
        }
        return {**held, "reduction buffers": largest}, host

    @property
    def _adds_up(self) -> bool:
        """Gradients of several micro-batches are added up in host memory; stage 1 does it on the device."""
        return self.accumulation > 1 and self.stage == 2

    def _copies(self, part: int, whole: int) -> list[Traffic]:
        """Copies of a step: the part's gradients to host memory, and parameters back, for which the ranks wait.

        Where gradients are added up in host memory, every backward copies them whole, and all but the first read back
        what was copied before.
        """
        between = (2 * self.accumulation - 1) * whole if self._adds_up else 0
        calls = (2 * self.accumulation if self._adds_up else 1) * max(1, len(self.trained) // self.ranks)
        return [
            Traffic("host_copy", 1, part + between, calls, overlaps=self.pinned("offload_optimizer")),
            Traffic("host_copy", 1, part, 1, overlaps=False),
        ]

    def _keep_whole(self, ledger: Ledger, part: int) -> None:
        """Record full gradients under stage 1, which are reduced after the last backward.

        Args:
            ledger: what is held.
            part: bytes of the gradients of this rank's part.
        """
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
        if self.offload:
            # While a gradient is reduced, its place in the bucket is all there is of it, and its norm is computed.
            largest = max(trace.gradients.values(), default=0)
            ledger.during("reduction buffers", max(0, self._norm(largest, part) - largest))
        ledger.add("reduction buffers", -self.bucket())
        ledger.add("gradients", -sum(trace.gradients.values()))

    def _norm(self, size: int, part: int) -> int:
        """Bytes of the copy in float64 of which the norm of a gradient's slice is computed, before it is offloaded."""
        return min(size, part) * 8 // self.itemsize

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

    def _keep_part(self, ledger: Ledger, kept_whole: int, part: int) -> None:
        """Stage 2: gradients are copied to a bucket; when it is full it is reduced, and this rank's are kept.

        Args:
            ledger: what is held.
            kept_whole: bytes of the gradients that a rank keeps on the device, each of them whole.
            part: bytes of the gradients of its part.
        """
        trace = self.trace
        first, filled, widest = True, 0, 0
        if self.accumulation > 1:
            ledger.add("gradients", kept_whole)
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
                ledger.during("reduction buffers", size + max(filled, self._norm(widest, part) * bool(self.offload)))
                if not kept:
                    ledger.add("gradients", kept_whole)
                    kept = True
                filled = widest = 0
            ledger.during("gradients", size)
            filled, widest = filled + size, max(widest, size)
        ledger.during("reduction buffers", max(filled, self._norm(widest, part) * bool(self.offload)))
        if not kept:
            ledger.add("gradients", kept_whole)
        ledger.add("reduction buffers", -self.bucket())
        ledger.add("gradients", -kept_whole * (2 if self.accumulation > 1 else 1))


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

    @property
    def gathers(self) -> bool:
        """Whether a whole parameter takes memory beside its parts: one process uses its part, or copies it."""
        return self.ranks > 1 or (self.offload == Offload.ALL and self.apart)

    def remarks(self) -> list[str]:
        return ["parameters are counted as gathered from their first use in a micro-batch to their last"]

    def estimate(self) -> Estimate:
        request, trace, ranks = self.request, self.trace, self.ranks
        threshold = self.size("stage3_param_persistence_threshold")
        parts = [self._part(one) for one in self.trained]
        part = sum(parts)
        small = [one for one in self.trained if one.numel() <= threshold]
        always = sum(one.numel() * one.element_size() for one in small) * self.gathers
        held = {"buffers": self.buffers, "gathered": always, "reduction buffers": self.bucket()}
        parameters, states = part + self.frozen, request.optimizer.state([part])
        host: dict[str, int] = {}
        if self.offload:
            # The engine's optimizer has a copy of this rank's parts and their gradients, beside the buffer that
            # gradients are added up in.
            offloaded = {"parameters": part, "gradients": 2 * part, "optimizer states": states}
            (offloaded if self.offload == Offload.ALL else held)["parameters"] = parameters
            if self.offload == Offload.ALL:
                offloaded["parameters"] += part
            held, host = self.placed(held, offloaded)
        else:
            held |= {"parameters": parameters, "gradients": part, "optimizer states": states}
        ledger = Ledger(held)
        self._replay(ledger, threshold)
        # A step begins by releasing all parameters, and gathers those that stay gathered when it ends.
        ledger.add("gathered", -always)
        if not self.offload:
            ledger.add("gradients", part)
        if not (self.offload and self.apart):
            ledger.during("optimizer step", request.optimizer.step([part]))
        gathered = sum(one.numel() * one.element_size() for one in self.trained)
        gradients = sum(trace.gradients.values())
        calls = len(self.trained)
        gathers = self.accumulation * 2 * (gathered - always) + always
        traffic = [
            Traffic("all_gather", ranks, gathers, 2 * calls),
            Traffic(
                "reduce_scatter",
                ranks,
                self.accumulation * gradients,
                self.accumulation * max(1, gradients // max(1, self.bucket())),
            ),
        ]
        if self.offload and self.apart:
            traffic += self._copies(part, always // ranks)
        # Gradients are copied into the bucket, arranged by rank, and divided, and this rank's parts copied out; a step
        # joins and scales these. Shards are joined for a message, and parameters are made of it. Of those that stay
        # gathered, the rank's parts are copied when a script may have written them.
        copied = self.accumulation * (6 * gradients + 2 * part) + 4 * part + self._normed(part)
        copied += 2 * ((gathers - always) * (ranks + 1) + always) // ranks
        return self.made(ledger, held, host, part, traffic, copied)

    def _copies(self, part: int, always: int) -> list[Traffic]:
        """Copies of a step over the link to host memory.

        Each backward copies the gradients of this rank's parts, and all but the first read back what was copied before;
        the last copies them once more, in the optimizer's dtype. Parameters come back after the step, or from host
        memory with each gather.

        Args:
            part: bytes of this rank's parts.
            always: bytes of those of parameters that stay gathered.
        """
        calls, steps = len(self.trained), self.accumulation
        gradients = 2 * steps * part
        overlaps = self.pinned("offload_optimizer")
        found = [Traffic("host_copy", 1, gradients, 2 * steps * calls, overlaps=overlaps)]
        if self.offload == Offload.ALL:
            gathered = 2 * steps * (part - always) + always
            return [*found, Traffic("host_copy", 1, gathered, 2 * steps * calls, overlaps=self.pinned("offload_param"))]
        return [*found, Traffic("host_copy", 1, part, 1, overlaps=False)]

    def _part(self, parameter: nn.Parameter) -> int:
        return ceil(prod(parameter.shape) / self.ranks) * parameter.element_size()

    def _replay(self, ledger: Ledger, threshold: int) -> None:
        model = self.request.model
        most = self.size("stage3_max_live_parameters") * self.itemsize
        gathered: dict[str, int] = {}
        # A full bucket is rearranged by rank, while the next gradient waits; gloo reduces a copy of it.
        copies = 2 if self.request.device_type == "cpu" else 1
        filled = widest = 0
        for event in self.trace.events:
            ledger.replay(event)
            if event.kind in ("enter", "backward_enter") and event.name not in gathered:
                own = model.get_submodule(event.name).parameters(recurse=False)
                size = sum(one.numel() * one.element_size() for one in own if one.numel() > threshold) * self.gathers
                if sum(gathered.values()) + size > most:
                    ledger.add("gathered", -sum(gathered.values()))
                    gathered.clear()
                gathered[event.name] = size
                ledger.add("gathered", size)
                if self.offload == Offload.ALL and self.apart and self.ranks > 1:
                    # This rank's shards are copied from host memory first.
                    ledger.during("gathered", size // self.ranks)
            elif event.kind == "backward_leave" and event.name in gathered:
                ledger.add("gathered", -gathered.pop(event.name))
            elif event.kind == "gradient":
                size = self.trace.gradients[event.name]
                if filled + size > self.bucket() and filled:
                    ledger.during("reduction buffers", size + max(filled * copies, self._offloading(filled, widest)))
                    filled = widest = 0
                ledger.during("gradients", size)
                filled, widest = filled + size, max(widest, size)
        ledger.during("reduction buffers", max(filled * copies, self._offloading(filled, widest)))
        ledger.add("gathered", -sum(gathered.values()))

    def _offloading(self, filled: int, widest: int) -> int:
        """Bytes beside a bucket that is offloaded: all of its parts, a copy of one, and one in float64 for its norm."""
        if not self.offload:
            return 0
        part = ceil(widest / self.ranks)
        return filled // self.ranks + part * self.apart + part * 8 // self.itemsize


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
