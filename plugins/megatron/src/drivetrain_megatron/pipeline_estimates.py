"""Estimates a layout whose ranks run stages of a pipeline, for its schedule or the one that waits less.

Each stage is traced by itself, one micro-batch forward and backward, in two parts where the schedule splits it; the
schedule's list of actions says how many of them a rank holds at a time.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from drivetrain.api import DrivetrainError, TorchEngine, UnsupportedError, UsageError
from drivetrain.api.engines import autocast
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.layout_estimates import Degrees, LayoutEstimate, PlannedModel
from drivetrain_megatron.module_state import ModuleState
from drivetrain_megatron.pipeline.batches import Dims, Rows, cut
from drivetrain_megatron.pipeline.cutting import Cut
from drivetrain_megatron.pipeline.passage import Crossing, Passage, Stub
from drivetrain_megatron.pipeline.planning import Planner
from drivetrain_megatron.pipeline.running import Interception, StageRun
from drivetrain_megatron.pipeline.schedules import parts_for, rank_of_stage, stages_per_rank, wanted_parts
from drivetrain_megatron.pipeline.skeleton import traced
from drivetrain_megatron.pipeline.transport import can_split
from drivetrain_megatron.pipeline.values import Meta, leaves, rebuilt
from drivetrain_megatron.planner.actions import Action, ActionLists, Kind
from drivetrain_megatron.planner.catalogue import SCHEDULES, find
from drivetrain_megatron.planner.costs import Costs
from drivetrain_megatron.planner.engine_lists import action_lists, messages_asked_for
from drivetrain_megatron.planner.search import Batch, improvements
from drivetrain_megatron.planner.simulate import simulate
from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor_parallel import simulate_tensor_parallel
from drivetrain_planner import Bench, Estimate, Ledger, TimeModel, Trace, TraceEvent, Traffic, Work

_CPU = torch.device("cpu")


_SEARCHED = tuple(name for name, each in SCHEDULES.items() if not each.splits_backward and name != "gpipe")
"""Schedules that are tried where none is named. GPipe takes as long as 1F1B and holds more, where each rank has a
micro-batch. What running the parts of a backward apart costs is not modelled."""

_FLOPS_PER_BYTE = 100
"""Arithmetic intensity below which kernels are memory-bound; used only for the ratio of the stages' times."""


@dataclass(frozen=True)
class _Stages:
    """A model cut into stages for a pipeline.

    Args:
        cut: the stages of the model.
        way: of a micro-batch through the stages.
        rows: how the batch is cut into micro-batches.
        dims: along which dims.
        largest: the number of the largest micro-batch.
    """

    cut: Cut
    way: Passage
    rows: Rows
    dims: Dims
    largest: int


@dataclass(frozen=True)
class _Traced:
    """One micro-batch of one stage, forward and backward.

    Args:
        parts: events of each kind of action that the schedule has for the stage.
        trace: of which they are.
        sent: messages over the axis ``tp``.
        changed: attributes that the forward changes, of modules whose forward several stages run.
        first: of the pipeline.
    """

    parts: Mapping[Kind, Sequence[TraceEvent]]
    trace: Trace
    sent: Sequence[tuple[str, int]]
    changed: AbstractSet[str]
    first: bool

    @property
    def kept(self) -> int:
        """Bytes that a forward leaves for its backward."""
        return self.parts["F"][-1].live

    @property
    def costs(self) -> tuple[float, float, float]:
        """Return the costs of a forward, a backward for the input and one for the weights."""
        if not self.parts.get("W"):
            return _cost(self.trace.forward), _cost(self.trace.backward), 0.0
        return self.split_costs(_cost)

    def split_costs(self, cost: Callable[[Sequence[Work]], float]) -> tuple[float, float, float]:
        """Return the costs of a forward and of both parts of a backward, whether or not the schedule has two."""
        forward, backward = cost(self.trace.forward), cost(self.trace.backward)
        # Of a matrix product both cost the same. The first stage computes all of it with that of the weights.
        share = 0.0 if self.first else 0.5
        return forward, share * backward, (1 - share) * backward


def _cost(kernels: Sequence[Work]) -> float:
    return float(sum(each.count * max(each.flops, _FLOPS_PER_BYTE * each.bytes) for each in kernels))


@final
class PipelineEstimate(LayoutEstimate):
    """Each rank runs some of the stages, on micro-batches that a schedule orders."""

    def __init__(self, made: PlannedModel, degrees: Degrees, section: MegatronConfig | None = None) -> None:
        super().__init__(made, degrees)
        self.section = section = section or made.section
        ranks = degrees.pipeline
        self._stages_per_rank = stages_per_rank(section)
        self._wanted = section.num_micro_batches or ranks * self._stages_per_rank
        # Fewer samples than are wanted make fewer micro-batches, for which training takes a plainer schedule.
        self._parts = max(min(self._wanted, self.request.micro_batch), 1)
        self._schedule, self._fits = section.schedule, False
        try:
            self._parts = parts_for(section, self.request.micro_batch, ranks)
        except UsageError:
            return  # It says why in estimate().
        self._fits = find(section.schedule).takes(ranks, self._stages_per_rank, self._parts)
        if not self._fits and find(section.schedule).stages_per_rank == 1:
            self._schedule, self._fits = "gpipe", True

    @property
    def title(self) -> str:
        several = f" of {self._stages_per_rank} stages a rank" if self._stages_per_rank > 1 else ""
        return f"{super().title}, {self._schedule}{several}, {self._batches}"

    @property
    def _batches(self) -> str:
        return "1 micro-batch" if self._parts == 1 else f"{self._parts} micro-batches"

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        found["megatron"] |= {"schedule": self.section.schedule, "num_micro_batches": self._wanted}
        if find(self.section.schedule).stages_per_rank is None:
            found["megatron"]["stages_per_rank"] = self._stages_per_rank
        return found

    def estimate(self) -> Estimate:
        degrees = self.degrees
        self._check()
        if why := self._how_samples_meet():
            return self._of_whole_batch(why)
        lists = action_lists(self._schedule, degrees.pipeline, self._stages_per_rank, self._parts)
        stages = self._cut()
        each = [self._traced(lists, stages, stage) for stage in range(stages.cut.num_stages)]
        if why := self._how_ranks_differ(lists, each):
            return self._of_whole_batch(why)
        sizes = self.made.sizes(degrees.tensor)
        owners = {
            name: {rank_of_stage(self.section, stage, degrees.pipeline) for stage in holders}
            for name, holders in stages.cut.parameters.items()
        }
        ranks = [
            self._rank(
                lists, each, stages, rank, {name: size for name, size in sizes.items() if rank in owners[name]}, owners
            )
            for rank in range(degrees.pipeline)
        ]
        ledger, held, trained = max(ranks, key=lambda found: found[0].most)
        timeline = simulate(lists, _costs(each))
        variants = partial(self._variants, lists, each, stages, ledger.most)
        busiest = max(range(degrees.pipeline), key=lambda rank: timeline.busy[rank])
        return Estimate(
            title=self.title,
            backend="megatron",
            family=degrees.family,
            rank=45 + 2 * (degrees.tensor > 1),
            settings=self.settings(),
            memory=ledger.memory,
            resident=held,
            moment=ledger.moment,
            accumulation=self.accumulation,
            trace=_of_rank(lists, each, busiest),
            traffic=self._traffic(lists, each, stages, busiest, sum(trained)),
            copied=self.copied(sum(trained)),
            stepped=sum(trained),
            idle=timeline.idle[busiest],
            remarks=["that the model may be computed one micro-batch at a time is tried when training begins"],
            variants=variants if self.request.mesh is None else None,
        )

    def _variants(
        self, lists: ActionLists, each: Sequence[_Traced], stages: _Stages, most: int, time: TimeModel, memory: int
    ) -> Iterator[Estimate]:
        """Yield this layout under schedules and micro-batch counts that the section leaves open and that wait less."""
        said = self.section.model_fields_set
        open_counts = self.section.num_micro_batches is None
        if {"schedule", "stages_per_rank"} <= said and not open_counts:
            return
        costs = _costs_on(time, each, stages)
        timeline = simulate(lists, costs)
        # What is not activations of the simulation stays as it is.
        simulated = memory - (most - max(timeline.peak_bytes))
        found = improvements(
            Batch(costs, self._parts, self.request.micro_batch if open_counts else None),
            self.degrees.pipeline,
            action_lists,
            seconds=timeline.duration if most <= memory else inf,
            memory=simulated,
            schedules=[self._schedule] if "schedule" in said else _SEARCHED,
            counts=None if open_counts else [self._parts],
            stages_per_rank=self.section.stages_per_rank if "stages_per_rank" in said else None,
        )
        for candidate in found:
            changes = {"schedule": candidate.schedule, "num_micro_batches": candidate.num_micro_batches}
            if find(candidate.schedule).stages_per_rank is None:
                changes["stages_per_rank"] = candidate.stages_per_rank
            section = self.section.model_copy(update=changes)
            try:
                estimate = PipelineEstimate(self.made, self.degrees, section).estimate()
            except DrivetrainError:
                continue  # The model cannot be run so: this layout stays as it is.
            yield replace(estimate, rank=estimate.rank + 1, variants=None)

    def _check(self) -> None:
        """Raise what training would, and where a schedule is not replayed."""
        section, ranks = self.section, self.degrees.pipeline
        wanted_parts(section, ranks)
        if not self._fits:
            raise UnsupportedError(
                f"{section.schedule} does not take {self._batches}, and the schedule that training takes "
                "in its place is not modelled",
                cure="Plan with a larger batch, or with the schedule 1f1b.",
            )
        stages = ranks * self._stages_per_rank
        if self._parts < stages and section.pipeline_parallel_size is None:
            raise UsageError(
                f"a batch of {self.request.micro_batch} samples makes fewer micro-batches than the {stages} stages, "
                "which would wait for each other most of the time",
                cure=f"Plan with a batch of {stages} samples or more.",
            )

    def _how_samples_meet(self) -> str:
        """Say which layer computes with all samples of a batch that would be cut; empty where none does."""
        mixing = next((part for part in self.request.model.modules() if isinstance(part, _MIX_SAMPLES)), None)
        if mixing is None or self._parts == 1:
            return ""
        return f"{type(mixing).__name__} computes with all samples of a batch"

    def _of_whole_batch(self, why: str) -> Estimate:
        """Estimate the batch in one piece, in which training keeps it where the section lets it.

        Raises:
            UnsupportedError: it asks for micro-batches, or for no pipeline: one whose stages wait for each other is not
                offered.
        """
        section = self.section
        open_counts = section.num_micro_batches is None and section.data_parallel != "fsdp"
        if not open_counts or section.pipeline_parallel_size is None:
            raise UnsupportedError(
                f"{type(self.request.model).__name__} cannot run on one micro-batch at a time, as a pipeline does: "
                f"{why}",
                cure="Write megatron.num_micro_batches: 1, which keeps the batch in one piece.",
            )
        whole = PipelineEstimate(self.made, self.degrees, section.model_copy(update={"num_micro_batches": 1}))
        found = whole.estimate()
        return replace(found, remarks=[f"the batch stays in one piece, so that the stages wait for each other: {why}"])

    # ---- where it is cut, and what a stage does ---------------------------------------------------------------------

    def _cut(self) -> _Stages:
        request, section = self.request, self.section
        samples = request.micro_batch
        names: list[str | None] = [None] * len(leaves(request.arguments[0]))
        names += [name for name, value in request.arguments[1].items() for _ in leaves(value)]
        rows = Rows.of(samples, self._parts)
        dims: Dims = tuple(
            0
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == samples and name not in section.whole_inputs
            else None
            for leaf, name in zip(leaves(request.arguments), names, strict=True)
        )
        largest = max(range(len(rows)), key=rows.count)
        micro_batch = cut(request.arguments, rows, dims)[largest]
        model = _with_buffers(request.model)
        model.train()
        num_stages = self.degrees.pipeline * self._stages_per_rank
        # As ``balance: time`` measures on the device that trains, bytes decide here.
        planner = Planner(
            model,
            TorchEngine(request.precision, "cpu"),
            section.model_copy(update={"balance": "bytes"}),
            num_stages,
            _CPU,
        )
        planner.look()
        way = planner.passage(micro_batch)
        made = planner.cut
        planner.release()
        assert made is not None, "the first passage cuts"
        return _Stages(made, way, rows, dims, largest)

    def _traced(self, lists: ActionLists, stages: _Stages, stage: int) -> _Traced:
        """One stage, traced once for each way in which the schedule runs its backward."""
        kinds = {action.kind for action in lists.all() if action.stage == stage}
        if "I" not in kinds:
            return self._trace(stages, stage, splits=False)
        found = self._trace(stages, stage, splits=True)
        if "B" not in kinds:
            return found
        return replace(found, parts={**self._trace(stages, stage, splits=False).parts, **found.parts})

    def _trace(self, stages: _Stages, stage: int, *, splits: bool) -> _Traced:
        degree, micro_batches = self.degrees.tensor, len(stages.rows)
        plan, ring = self.made.plan(degree), Ring(None, simulated=degree)
        last = stage == stages.cut.num_stages - 1
        incoming = stages.way.crossings[stage - 1].metas if stage else ()
        elsewhere = [name for name, holders in stages.cut.parameters.items() if stage not in holders]
        begin, end = stages.rows.bounds[stages.largest], stages.rows.bounds[stages.largest + 1]
        changed: set[str] = set()

        def run(bench: Bench) -> None:
            if plan is not None:
                simulate_tensor_parallel(bench.model, plan, ring)
            interception = Interception(bench.model)
            interception.install([name for name, _ in bench.model.named_modules()])
            way = Passage(stages.way.crossings, _stubs(stages.way.stubs, bench), None)
            args, kwargs = cut((bench.args, bench.kwargs), stages.rows, stages.dims)[stages.largest]
            bench.begin(batch=False, elsewhere=elsewhere)
            received = [_received(meta) for meta in incoming]
            staged = StageRun(stage, way, received)
            state = ModuleState(bench.model)

            def forward() -> Any:
                return interception.run(staged, lambda: bench.model(*args, **kwargs))

            with traced(bench.is_elsewhere):
                if last:
                    loss = bench.loss(bench.engine.forward(forward, (), {}), begin, end) / micro_batches
                    outputs: list[Tensor] = [loss]
                    del loss
                else:
                    with autocast(bench.engine.policy, "cpu"):
                        outputs = [one for one in forward() if one.requires_grad]
                bench.record("loss")
                for place, change in state.changes().items():
                    inside = f"{place.path}." if place.path else ""
                    if not change.tensors and any(point.startswith(inside) for point in stages.cut.points):
                        changed.add(str(place))
                gradients = [None if last else torch.empty_like(one) for one in outputs]
                if splits and stage:
                    parts_of = () if plan is None else plan.cuts
                    given = None if last else gradients
                    back = _split_backward(bench, elsewhere, parts_of, outputs, given, received)
                else:
                    if splits:
                        # The first stage has no input to compute a gradient for: it does all of it later.
                        bench.record("backward_leave")
                    torch.autograd.backward(outputs, gradients)
                    back = [one.grad for one in received]
                outputs.clear()
                received.clear()
                bench.record("end")
                del back, gradients

        trace = self.request.run(run)
        kinds = [event.kind for event in trace.events]
        middle = kinds.index("loss") + 1
        forward, backward = trace.events[:middle], trace.events[middle:]
        parts: dict[Kind, Sequence[TraceEvent]] = {"F": forward, "B": backward}
        if splits:
            # A backward that torch cannot split is all computed with that of the input.
            end = kinds.index("backward_leave") + 1 - middle if "backward_leave" in kinds else len(backward)
            parts = {"F": forward, "I": backward[:end], "W": backward[end:]}
        return _Traced(parts, trace, list(ring.sent), changed, not stage)

    def _how_ranks_differ(self, lists: ActionLists, each: Sequence[_Traced]) -> str:
        """Say which attributes only some ranks would change, as the trial of a batch in parts does; empty for none."""
        ranks: list[set[str]] = [set() for _ in lists.ranks]
        for stage, rank in enumerate(lists.owner):
            ranks[rank] |= each[stage].changed
        everywhere, somewhere = set(ranks[0]).intersection(*ranks[1:]), set[str]().union(*ranks)
        uneven = sorted(somewhere - everywhere)
        if not uneven or self._parts == 1:
            return ""
        return f"its forward changes {', '.join(uneven)}, and only some of the stages would do so"

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _rank(
        self,
        lists: ActionLists,
        stages: Sequence[_Traced],
        cut: _Stages,
        rank: int,
        sizes: Mapping[str, int],
        owners: Mapping[str, set[int]],
    ) -> tuple[Ledger, dict[str, int], list[int]]:
        """Memory of one rank: a ledger after a step, permanent bytes by kind, and bytes of each trained parameter."""
        trained = [name for name in sizes if name in self.made.trained]
        # The copy of the model without parameters, by which shapes are known, has buffers of its own.
        held = self.held(list(sizes.values()), [sizes[name] for name in trained], 2 * self.made.buffers)
        ledger = Ledger(held)
        complete: set[str] = set()
        if self.accumulation > 1:
            known = {name: size for one in stages for name, size in one.trace.gradients.items() if name in sizes}
            ledger.add("gradients", sum(known.values()))
            # Of what several stages hold, each batch's gradient is added up over them before it is added here.
            complete = {name for name in known if len(owners[name]) == 1}
        messages = _Messages(self._schedule, lists.owner, cut.way.crossings)
        # Bytes kept by stage and micro-batch until its backward continues.
        waiting: dict[tuple[int, int], int] = {}
        schedule = (self._schedule, self.degrees.pipeline, self._stages_per_rank, self._parts)
        asked = messages_asked_for(*schedule)[rank]
        for action, early in zip(lists.ranks[rank], asked, strict=True):
            stage, key = stages[action.stage], (action.stage, action.micro_batch)
            ledger.phase = "forward" if action.kind == "F" else "backward"
            waiting.pop(key, None)
            others = self.made.batch + sum(waiting.values()) + messages.held(action, early)
            # Activations from a stage of this rank are counted there.
            others -= messages.local(action.stage)
            events = stage.parts[action.kind]
            for event in events:
                ledger.replay(_above(event, others, "leave" if action.kind == "F" else "gradient"))
                if event.kind != "gradient":
                    continue
                size = stage.trace.gradients[event.name]
                if event.name in complete:
                    ledger.during("gradients", size)
                else:
                    ledger.add("gradients", size)
                    complete.add(event.name)
            goes_on = action.kind == "F" or (action.kind == "I" and bool(stage.parts["W"]))
            if goes_on:
                waiting[key] = events[-1].live - messages.local(action.stage)
            messages.follow(action, ends=not goes_on and bool(events))
        ledger.phase = "step"
        for name in trained:
            if len(owners[name]) > 1:
                # The other stages' gradients, all of them side by side, and their sum.
                ledger.during("reduction buffers", 2 * len(owners[name]) * sizes[name])
        self.end_of_window(ledger, trained, sizes)
        return ledger, held, [sizes[name] for name in trained]

    def _traffic(
        self, lists: ActionLists, each: Sequence[_Traced], stages: _Stages, rank: int, trained: int
    ) -> list[Traffic]:
        times = self.accumulation * len(stages.rows)
        mine = [stage for stage, owner in enumerate(lists.owner) if owner == rank]
        crossings = [
            _bytes(stages.way.crossings[place].metas)
            for stage in mine
            for place in (stage - 1, stage)
            if 0 <= place < len(stages.way.crossings) and lists.owner[place] != lists.owner[place + 1]
        ]
        sent = [message for stage in mine for message in each[stage].sent]
        return [
            Traffic("send", 2, times * sum(crossings), times * len(crossings)),
            *self.of_ring(sent, times),
            *self.of_replicas(trained),
        ]


@final
class _Messages:
    """Messages of a rank that its schedule holds when computations no longer need them.

    Schedules of several stages a rank, and those that split the backward, wait for their sends when they end, and have
    until then what was sent; GPipe so has the gradients. 1F1B has in variables the gradient that it sent last, and in
    a forward the one that it received last.

    Args:
        schedule: its name.
        owner: which rank has a stage.
        crossings: what goes from each stage to the next.
    """

    def __init__(self, schedule: str, owner: Sequence[int], crossings: Sequence[Crossing]) -> None:
        self._schedule, self._owner = schedule, owner
        self._values = [_bytes(crossing.metas) for crossing in crossings]
        self._gradients = [_bytes([meta for meta in crossing.metas if meta.trained]) for crossing in crossings]
        self._sent = self._received = 0
        self._handed: dict[tuple[int, int], int] = {}
        """Gradients for a stage of the same rank, by stage and micro-batch."""

    def local(self, stage: int) -> int:
        """Bytes that a stage's forward has from another stage of its rank."""
        return self._values[stage - 1] if stage and self._owner[stage - 1] == self._owner[stage] else 0

    def held(self, action: Action, early: Sequence[Action]) -> int:
        """Bytes that are held beside an action's own.

        Args:
            action: which is computed.
            early: later ones, for whose messages there is memory already.
        """
        if action.kind in "BI":
            self._handed.pop((action.stage, action.micro_batch), None)
        received = self._received if action.kind == "F" else 0
        coming = sum(
            self._values[each.stage - 1] if each.kind == "F" else self._gradients[each.stage] for each in early
        )
        return self._sent + received + sum(self._handed.values()) + coming

    def follow(self, action: Action, *, ends: bool) -> None:
        """Note what an action sends.

        Args:
            action: which is over.
            ends: a micro-batch's backward has ended in this stage, which lets go of what it has sent on.
        """
        stage = action.stage
        after = stage + 1 < len(self._owner) and self._owner[stage + 1] != self._owner[stage]
        if action.kind in "BI" and stage and self._owner[stage - 1] == self._owner[stage]:
            self._handed[stage - 1, action.micro_batch] = self._gradients[stage - 1]
        elif action.kind in "BI":
            gradient = self._gradients[stage - 1] if stage else 0
            self._sent = gradient if self._schedule == "1f1b" else self._sent + gradient
            self._received = self._gradients[stage] if after and self._schedule == "1f1b" else 0
        if ends and after and self._schedule not in ("gpipe", "1f1b"):
            self._sent += self._values[stage]


_MIX_SAMPLES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _bytes(metas: Sequence[Meta]) -> int:
    return sum(prod(meta.shape) * meta.dtype.itemsize for meta in metas)


def _received(meta: Meta) -> Tensor:
    return meta.empty(_CPU).requires_grad_(meta.trained)


def _split_backward(
    bench: Bench,
    elsewhere: Sequence[str],
    parts: Collection[str],
    outputs: list[Tensor],
    given: Any,
    received: list[Tensor],
) -> Sequence[Tensor | None]:
    """The backward of a stage in two parts, as torch's stages run it; in one where they do.

    Args:
        bench: which runs it.
        elsewhere: names of parameters of other stages.
        parts: names of those that are parts of matrices, which training knows by their class.
        outputs: of the stage, or its loss.
        given: gradients of the outputs; ``None`` for a loss.
        received: the inputs of the stage.

    Returns:
        The gradients of what was received.
    """
    named = bench.model.named_parameters()
    weights = {name: one for name, one in named if one.requires_grad and name not in elsewhere}
    if any(name in parts for name in weights) or not can_split(outputs, received, list(weights.values())):
        torch.autograd.backward(outputs, given)
        return [one.grad for one in received]
    left = dict(weights)
    back, groups = stage_backward_input(outputs, given, received, iter(weights.values()))
    bench.record("backward_leave")
    for group in groups:
        stage_backward_weight(iter(weights.values()), [group])
        for name in [name for name, one in left.items() if one.grad is not None]:
            bench.record("gradient", name)
            del left[name]
    return back


def _above(event: TraceEvent, base: int, kind: Any) -> TraceEvent:
    return replace(event, kind=kind, most=event.most + base, live=event.live + base)


def _with_buffers(model: nn.Module) -> nn.Module:
    """Copy a model with shared parameters and buffers that have values: no stage sends what depends on buffers only."""
    copied = copy.deepcopy(model, {id(one): one for one in model.parameters()})
    for part in copied.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_meta:
                # Assigning by name asks whether it is saved.
                part._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)  # noqa: SLF001
    return copied


def _stubs(stubs: Mapping[str, Stub], bench: Bench) -> dict[str, Stub]:
    """The same outputs as tensors of a bench."""

    def here(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = torch.empty(leaf.shape, dtype=leaf.dtype).requires_grad_(leaf.requires_grad)
        bench.leave_out(made)
        return made

    return {
        name: Stub(stub.stage, rebuilt(stub.output, [here(leaf) for leaf in leaves(stub.output)]), stub.loss)
        for name, stub in stubs.items()
    }


def _costs(stages: Sequence[_Traced]) -> Costs:
    forward, backward, weights = zip(*(stage.costs for stage in stages), strict=True)
    nothing = (0.0,) * len(stages)
    return Costs(forward, backward, weights, tuple(float(stage.kept) for stage in stages), nothing)


def _costs_on(time: TimeModel, stages: Sequence[_Traced], cut: _Stages) -> Costs:
    """Return the stages' costs in seconds; what kernels' launches take of them does not shrink with a micro-batch."""
    forward, backward, weights = zip(*(stage.split_costs(time.work) for stage in stages), strict=True)
    launches = (replace(each, flops=0, bytes=0) for stage in stages for each in stage.trace.forward)
    sent = max((_bytes(crossing.metas) for crossing in cut.way.crossings), default=0)
    nothing = (0.0,) * len(stages)
    return Costs(
        forward,
        backward,
        weights,
        tuple(float(stage.kept) for stage in stages),
        nothing,
        transfer=time.traffic(Traffic("send", 2, sent, 1)),
        overhead=time.work(list(launches)) / len(stages),
    )


def _of_rank(lists: ActionLists, stages: Sequence[_Traced], rank: int) -> Trace:
    """Return the computation of a rank in a step as one trace; its events are those of its first stage."""
    runs = Counter(action.stage for action in lists.ranks[rank] if action.kind == "F")

    def work(of: Callable[[Trace], Sequence[Work]]) -> list[Work]:
        return [
            replace(each, count=each.count * times)
            for stage, times in sorted(runs.items())
            for each in of(stages[stage].trace)
        ]

    first = stages[min(runs)].trace
    return replace(
        first,
        forward=work(lambda trace: trace.forward),
        backward=work(lambda trace: trace.backward),
        unused=max(stages[stage].trace.unused for stage in runs),
    )
