"""Types of plan requests and of backends' estimates of memory and communication. Imports no torch.

One micro-batch of the model is traced on one process for a :class:`PlanRequest`. A backend returns an
:class:`Estimate` for each layout that it supports: it replays the trace (:attr:`Trace.events`) and adds what its engine
holds beside the model's own tensors at each moment, in a :class:`Ledger`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

if TYPE_CHECKING:
    from torch import Tensor, nn

    from drivetrain.api import PrecisionPolicy, TorchEngine

EventKind = Literal["enter", "leave", "loss", "backward_enter", "backward_leave", "gradient", "end"]

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "host_copy"]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One moment of a micro-batch on one process, in the order of the run.

    Args:
        kind: ``enter`` and ``leave`` of a watched module's forward, ``loss`` between forward and backward,
            ``backward_enter`` and ``backward_leave`` of a watched module's backward, ``gradient`` when the gradient of
            a parameter is complete, and ``end``, when only the batch is left.
        name: of the module or parameter.
        most: most bytes of activations that were alive at a moment since the event before. Parameters, buffers and
            completed gradients are not activations; the batch, temporaries and gradients of activations are.
        live: bytes of activations alive at this event.
    """

    kind: EventKind
    name: str
    most: int
    live: int


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels that are alike.

    Args:
        flops: floating-point operations of one.
        bytes: that one reads and writes.
        itemsize: bytes of an element of its result; 2 where matrix units of half precision are used.
        count: how many there are.
    """

    flops: int
    bytes: int
    itemsize: int
    count: int


@dataclass(frozen=True)
class Trace:
    """One micro-batch of a model, traced on one process.

    Args:
        events: see :class:`TraceEvent`.
        forward: kernels of the forward and of the loss.
        backward: kernels of the backward, recomputation included.
        saved: bytes that autograd keeps for the backward when the forward ends, without parameters.
        gradients: bytes of each parameter's gradient, by name; a parameter that gets none is absent.
        unused: bytes that torch's caching allocator would keep on an accelerator beside activations: rounding,
            fragments, and what was freed and fits nothing that is made later.
    """

    events: Sequence[TraceEvent]
    forward: Sequence[Work]
    backward: Sequence[Work]
    saved: int
    gradients: Mapping[str, int]
    unused: int = 0


class Bench(Protocol):
    """One process without memory, on which a backend runs a micro-batch as its engine would.

    Attributes:
        model: a copy of the model with fake tensors, whose parameters may be exchanged before :meth:`begin`.
        args: positional arguments of a forward, fake tensors too.
        kwargs: its keyword arguments.
        samples: of the micro-batch.
        kept: the script has the output in a variable while backward runs.
        engine: the run's precision.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    kept: bool
    engine: TorchEngine

    def begin(self, *, batch: bool = True, elsewhere: Collection[str] = ()) -> None:
        """Count from now on; the parameters and buffers that the model has now are no activations.

        Args:
            batch: the micro-batch counts as activations.
            elsewhere: names of parameters that another rank has, see :meth:`leave_out`.
        """

    def record(self, kind: EventKind, name: str = "") -> None:
        """Record an event. ``loss`` parts the work of the forward from that of the backward.

        Gradients that autograd accumulates are recorded by themselves. An engine that sets ``parameter.grad`` records
        ``gradient`` with the parameter's name; from then on the gradient is no activation.
        """

    def leave_out(self, tensor: Tensor) -> None:
        """Another rank has this tensor: neither it nor what is computed from it is counted."""

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether this tensor is on another rank, or computed from one that is."""

    def loss(self, output: Any, begin: int = 0, end: int | None = None) -> Tensor:
        """The script's loss, of the samples from ``begin`` to ``end``; of all without ``end``."""


@dataclass(frozen=True)
class OptimizerCosts:
    """Memory of an optimizer: its state, and the needs of a step.

    Args:
        name: its class.
        per_element: bytes of state for each byte of a parameter, for state of the parameter's shape.
        per_parameter: further bytes of state for each parameter, such as a step count.
        step_current: bytes that a step needs for a moment, for each byte of the parameter that it updates.
        step_previous: the same for each byte of the parameter before, whose temporaries are still there.
        step_all: the same for each byte of all parameters together (``foreach`` implementations).
        moved: bytes that the kernels of a step read and write, for each byte of the parameters.
        elementwise: each element's update depends on that element alone, so that the optimizer may step on parts.
    """

    name: str
    per_element: float
    per_parameter: int
    step_current: float
    step_previous: float
    step_all: float
    moved: float
    elementwise: bool

    def state(self, sizes: Sequence[int]) -> int:
        """Bytes of state for parameters of these bytes."""
        return round(self.per_element * sum(sizes)) + self.per_parameter * len(sizes)

    def step(self, sizes: Sequence[int]) -> int:
        """Bytes that a step on parameters of these bytes, in this order, needs for a moment."""
        pairs = zip(sizes, (0, *sizes), strict=False)
        each = max((self.step_current * size + self.step_previous * before for size, before in pairs), default=0)
        return round(each + self.step_all * sum(sizes))


class Tracing(Protocol):
    """Traces a micro-batch; a trace that was made before is returned again."""

    def __call__(
        self,
        watched: Sequence[str],
        recomputed: Sequence[str],
        dtype: str | None,
        around: Callable[[], AbstractContextManager[object]] | None = None,
        /,
    ) -> Trace:
        """Run forward and backward on fake tensors.

        Args:
            watched: names of modules whose forwards and backwards are told.
            recomputed: names of modules whose activations are recomputed in backward.
            dtype: in which parameters are computed with; ``None`` = their own.
            around: makes a context for the run, in which an engine's own operators take the place of torch's.

        Raises:
            UsageError: the model cannot be traced.
        """


@dataclass(frozen=True)
class PlanRequest:
    """Model, batch and machines of a plan.

    Args:
        model: the user's module on the meta device, its parameters in the dtypes that are trained.
        world_size: processes over all machines.
        ranks_per_node: processes on one machine.
        device_type: ``"cpu"``, ``"cuda"``, ...
        precision: the run's policy.
        micro_batch: samples in a micro-batch of one process.
        global_batch: samples of one optimizer step.
        optimizer: see :class:`OptimizerCosts`.
        sections: what the user's configuration says about each backend, by its name; layouts keep to it.
        trace: traces a micro-batch, see :class:`Tracing`.
        arguments: positional and keyword arguments of a micro-batch's forward, with values.
        run: traces what a function does on a :class:`Bench`, for engines that exchange parameters or run a part of the
            model; raises as ``trace`` does.
        mesh: sizes of the mesh axes that a configuration names, where one layout is asked for: the one that
            ``sections`` and these axes describe, what they lack with its default. ``None`` = all layouts that keep to
            ``sections``.
        windows: micro-batches of one optimizer step, where a configuration says them; ``None`` = as many as make the
            global batch.
    """

    model: nn.Module
    world_size: int
    ranks_per_node: int
    device_type: str
    precision: PrecisionPolicy
    micro_batch: int
    global_batch: int
    optimizer: OptimizerCosts
    sections: Mapping[str, Mapping[str, Any]]
    trace: Tracing
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    run: Callable[[Callable[[Bench], None]], Trace]
    mesh: Mapping[str, int] | None = None
    windows: int | None = None

    def accumulation(self, data_parallel: int) -> int | None:
        """Micro-batches of one optimizer step over so many data-parallel ranks; ``None`` if they do not divide it."""
        if self.windows is not None:
            return self.windows
        steps, rest = divmod(self.global_batch, self.micro_batch * data_parallel)
        return None if rest or not steps else steps

    def indivisible(self, data_parallel: int) -> str:
        """Why so many data-parallel ranks cannot be: the sentence beside an :meth:`accumulation` of ``None``."""
        each = f"{self.micro_batch} samples on each of {data_parallel} data-parallel ranks"
        return f"a global batch of {self.global_batch} is not a multiple of {each}"


@dataclass(frozen=True)
class Traffic:
    """Communication of one optimizer step by one rank.

    Args:
        operation: the collective, ``send`` between two ranks, or ``host_copy`` between device and host memory, over the
            link that each device has to it.
        ranks: in the group.
        bytes: whole size of what all calls together work on: the gathered or the reduced tensors.
        calls: how many there are.
        overlaps: runs beside computation.
    """

    operation: Operation
    ranks: int
    bytes: int
    calls: int
    overlaps: bool = True


class TimeModel(Protocol):
    """Seconds of kernels and of communication on the machine that is planned for."""

    def work(self, kernels: Sequence[Work]) -> float:
        """Seconds of these kernels, one after the other."""

    def traffic(self, one: Traffic) -> float:
        """Seconds of one kind of communication in a step."""


class Variants(Protocol):
    """Estimates other ways to run a layout, once the machine is known."""

    def __call__(self, time: TimeModel, memory: int, /) -> Iterator[Estimate]:
        """Yield estimates, the most promising first; no more are asked for once one is better.

        Args:
            time: seconds on the machine.
            memory: bytes of tensors that a rank may hold.
        """


@dataclass(frozen=True)
class Estimate:
    """One layout of one backend.

    Args:
        title: what is chosen, in a few words, such as ``"fsdp, recompute"``.
        backend: the value of ``distributed_type``.
        family: layouts of one family are compared with each other first, such as ``"zero 2"``.
        rank: where two layouts are as fast, the smaller rank is simpler and wins.
        settings: the keys of a configuration file that give this layout.
        refused: why this layout cannot be; then nothing below means anything.
        memory: bytes of a rank by part, at the moment at which they are most.
        resident: bytes by part that a rank holds between two steps.
        moment: when memory is most: ``"forward"``, ``"backward"`` or ``"step"``.
        host: bytes of host memory that are used for offloading, by part.
        accumulation: micro-batches of one optimizer step.
        trace: of one micro-batch.
        traffic: of one optimizer step.
        copied: bytes that the engine reads and writes on the device in one optimizer step beside the model and the
            optimizer: into and out of buckets and gathered tensors, and for norms.
        stepped: bytes of parameters that this rank's optimizer updates on the device.
        stepped_in_host: bytes of parameters that it updates in host memory.
        last_resort: nobody asked for it; it is offered in case that no other layout fits.
        idle: share of the time between a step's first forward and its last backward in which a rank waits for others.
        remarks: what the estimate leaves out, if anything.
        variants: estimates other ways to run this layout, such as other schedules of a pipeline. They are asked for
            when one of them could be chosen: this estimate without waiting is faster than what fits. The better takes
            its place. ``None`` = there are none.
    """

    title: str
    backend: str
    family: str
    rank: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)
    resident: Mapping[str, int] = field(default_factory=dict)
    moment: str = ""
    host: Mapping[str, int] = field(default_factory=dict)
    accumulation: int = 1
    trace: Trace | None = None
    traffic: Sequence[Traffic] = ()
    copied: int = 0
    stepped: int = 0
    stepped_in_host: int = 0
    last_resort: bool = False
    idle: float = 0.0
    remarks: Sequence[str] = ()
    variants: Variants | None = None

    @property
    def peak(self) -> int:
        """Most bytes of a rank at a moment."""
        return sum(self.memory.values())


@final
class Ledger:
    """Bytes of one rank by part while a trace is replayed, and those of the moment at which they are most.

    Args:
        held: what is held all the time, by part.
    """

    def __init__(self, held: Mapping[str, int]) -> None:
        self._held = dict(held)
        self._activations = 0
        self.most = 0
        self.memory: dict[str, int] = {}
        self.moment = ""
        self.phase = "forward"

    def add(self, part: str, size: int) -> None:
        """Hold so many bytes more (or less) of a part; the sum of a part is never negative."""
        self._held[part] = self._held.get(part, 0) + size
        assert self._held[part] >= 0, (part, self._held[part], size)
        self._note(self._activations)

    def replay(self, event: TraceEvent) -> None:
        """Take over the activations of the time up to an event, and the phase that begins with it."""
        self._note(event.most)
        self._activations = event.live
        if event.kind == "loss":
            self.phase = "backward"
        elif event.kind == "end":
            self.phase = "step"

    def during(self, part: str, size: int) -> None:
        """Note a moment at which so many bytes of a part are held beside everything else."""
        self._held[part] = self._held.get(part, 0) + size
        self._note(self._activations)
        self._held[part] -= size

    def held(self) -> dict[str, int]:
        """Bytes by part that are held now, without activations."""
        return {part: size for part, size in self._held.items() if size}

    def _note(self, activations: int) -> None:
        total = activations + sum(self._held.values())
        if total > self.most:
            self.most, self.moment = total, self.phase
            self.memory = {part: size for part, size in (*self._held.items(), ("activations", activations)) if size}


def held_whole(request: PlanRequest) -> dict[str, int]:
    """Bytes of a rank that holds the whole model, by part: parameters, buffers and the optimizer's state."""
    trained = trained_sizes(request.model)
    return {
        "parameters": sum(one.numel() * one.element_size() for one in request.model.parameters()),
        "buffers": sum(one.numel() * one.element_size() for one in request.model.buffers()),
        "optimizer states": request.optimizer.state(trained),
    }


def trained_sizes(model: nn.Module) -> list[int]:
    """Bytes of each parameter that is trained."""
    return [one.numel() * one.element_size() for one in model.parameters() if one.requires_grad]


def replay_whole(ledger: Ledger, trace: Trace, accumulation: int) -> None:
    """Replay micro-batches after which every gradient stays whole on the rank, up to the optimizer's step.

    From the second micro-batch on gradients are there from the start, and new ones are added to them and freed.
    """
    if accumulation > 1:
        ledger.add("gradients", sum(trace.gradients.values()))
    for event in trace.events:
        ledger.replay(event)
        if event.kind == "gradient" and accumulation == 1:
            ledger.add("gradients", trace.gradients[event.name])
