"""Estimates memory and communication of a rank under ``fsdp``, for a planner, by replaying torch's collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import final

import torch
from torch import nn

from drivetrain.api import UsageError, dtype_of
from drivetrain_fsdp.config import FSDPConfig
from drivetrain_fsdp.sharding import plan
from drivetrain_fsdp.units import owners
from drivetrain_planner import Estimate, Ledger, PlanRequest, Trace, TraceEvent, Traffic

ROOT = ""
"""The root's name among the modules of a model."""


@dataclass(frozen=True)
class Unit:
    """A module that is gathered by itself, in bytes.

    Args:
        sharded: this rank's shards, in the dtype in which they are trained.
        message: whole parameters with their padding, in the dtype in which they are computed with.
        reduced: whole gradients with their padding, in the dtype in which they are reduced.
        copied: what is made of this rank's shards before they are gathered: they are cast, or come from host memory.
    """

    sharded: int
    message: int
    reduced: int
    copied: int


def estimates(request: PlanRequest) -> list[Estimate]:
    """Shards over all ranks and, on several nodes, over the ranks of each; activations kept, and recomputed.

    Shards in host memory are offered over all ranks, as a last resort, unless the configuration says where they are.
    """
    section = FSDPConfig.model_validate(request.sections.get("fsdp", {}))
    ranks = request.world_size
    accumulation = request.accumulation(ranks)
    if accumulation is None:
        return [Estimate("fsdp", "fsdp", "fsdp", 20, refused=request.indivisible(ranks))]
    meshes = [(1, ranks)]
    recomputing = [False, True]
    if request.mesh is not None:
        replicas = request.mesh.get("dp_replicate") or ranks // request.mesh.get("dp_shard", ranks)
        meshes = [(replicas, ranks // replicas)]
    elif 1 < request.ranks_per_node < ranks:
        meshes.append((ranks // request.ranks_per_node, request.ranks_per_node))
    if request.mesh is not None or "activation_checkpointing" in request.sections.get("fsdp", {}):
        recomputing = [section.activation_checkpointing]
    layouts = [(mesh, each, section.cpu_offload) for mesh in meshes for each in recomputing]
    said = request.mesh is not None or "cpu_offload" in request.sections.get("fsdp", {})
    if not said and request.device_type != "cpu":
        layouts += [(meshes[0], each, True) for each in recomputing]
    found = []
    for mesh, each, offload in layouts:
        keys = {"activation_checkpointing": each, "cpu_offload": offload}
        layout = _Layout(request, section.model_copy(update=keys), mesh, accumulation)
        try:
            made = layout.estimate()
        except UsageError as problem:  # a module that cannot be computed twice
            made = Estimate(layout.title, "fsdp", "fsdp", 20 + each, refused=problem.what)
        found.append(replace(made, last_resort=offload and not said))
    return found


@final
class _Layout:
    """One layout.

    Args:
        request: what is planned.
        section: the configuration.
        mesh: replicas, and ranks that share each replica's parameters.
        accumulation: micro-batches of one optimizer step.
    """

    def __init__(self, request: PlanRequest, section: FSDPConfig, mesh: tuple[int, int], accumulation: int) -> None:
        self._request, self._section, self._accumulation = request, section, accumulation
        self._replicas, self._ranks = mesh
        model = request.model
        names = {id(module): name for name, module in model.named_modules()}
        cut = plan(model, section, request.precision)
        home = owners(model, cut.units)
        whole = set(map(id, cut.whole))
        self._order = [names[id(unit)] for unit in cut.units]
        self._blocks = [names[id(block)] for block in cut.blocks] or [ROOT]
        self._unit_of: dict[str, str] = {}
        held: dict[str, list[nn.Parameter]] = {ROOT: [], **{name: [] for name in self._order}}
        self._whole: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            owner = home[id(model.get_submodule(name.rpartition(".")[0]))]
            if id(parameter) in whole:
                self._whole.append(parameter)
                continue
            self._unit_of[name] = names[id(owner)]
            held[names[id(owner)]].append(parameter)
        self._units = {name: self._unit(parameters) for name, parameters in held.items() if parameters}
        self._shards = [
            self._part(parameter) * parameter.element_size()
            for parameters in held.values()
            for parameter in parameters
            if parameter.requires_grad
        ]
        self._rest = [one.numel() * one.element_size() for one in self._whole if one.requires_grad]

    def _part(self, parameter: nn.Parameter) -> int:
        """Elements of the first rank's shard, which is the largest; torch pads the others to it."""
        rows, *rest = parameter.shape
        return -(-rows // self._ranks) * prod(rest)

    def _unit(self, parameters: Sequence[nn.Parameter]) -> Unit:
        policy = self._request.precision
        compute = None if policy.compute is None else dtype_of(policy.compute)
        reduce = None if policy.reduce is None else dtype_of(policy.reduce)

        def bytes_in(dtype: torch.dtype | None, trained: bool) -> int:
            return sum(
                self._part(one) * (one.dtype if dtype is None else dtype).itemsize
                for one in parameters
                if one.requires_grad or not trained
            )

        sharded, message = bytes_in(None, False), bytes_in(compute, False) * self._ranks
        return Unit(
            sharded=sharded,
            message=message,
            reduced=bytes_in(reduce, True) * self._ranks,
            copied=message // self._ranks if compute is not None else sharded if self.apart else 0,
        )

    @property
    def title(self) -> str:
        """Title of the layout."""
        replicated = "" if self._replicas == 1 else f", {self._replicas} replicas of {self._ranks} shards"
        recompute = ", recompute" if self._section.activation_checkpointing else ""
        return f"fsdp{replicated}{recompute}{', offload' if self._section.cpu_offload else ''}"

    @property
    def apart(self) -> bool:
        """Shards are in host memory, which is not the device's."""
        return self._section.cpu_offload and self._request.device_type != "cpu"

    # ---- memory -----------------------------------------------------------------------------------------------------

    def estimate(self) -> Estimate:
        """Memory and traffic of this layout."""
        request, section = self._request, self._section
        recomputed = self._blocks if section.activation_checkpointing else []
        trace = request.trace((ROOT, *self._order), recomputed, request.precision.compute)
        sharded = {
            "parameters": sum(unit.sharded for unit in self._units.values()),
            "optimizer states": request.optimizer.state(self._shards),
        }
        held = {
            "parameters": sum(one.numel() * one.element_size() for one in self._whole),
            "buffers": sum(one.numel() * one.element_size() for one in request.model.buffers()),
            "optimizer states": request.optimizer.state(self._rest),
        }
        host: dict[str, int] = {}
        stepped = [*self._shards, *self._rest]
        if self.apart:
            stepped = self._rest
            host = {**sharded, "gradients": sum(self._shards)}
        else:
            held = {part: size + sharded.get(part, 0) for part, size in held.items()}
        ledger = Ledger(held)
        _Replay(self, ledger, trace).run()
        ledger.during("optimizer step", request.optimizer.step(stepped))
        keys = {"activation_checkpointing": section.activation_checkpointing}
        settings: dict[str, object] = {
            "distributed_type": "fsdp",
            "gradient_accumulation_steps": self._accumulation,
            "fsdp": {**keys, "cpu_offload": True} if section.cpu_offload else keys,
        }
        if self._replicas > 1:
            settings["mesh"] = {"dp_replicate": self._replicas, "dp_shard": self._ranks}
        return Estimate(
            title=self.title,
            backend="fsdp",
            family="fsdp",
            rank=20 + 2 * (self._replicas > 1) + section.activation_checkpointing,
            settings=settings,
            memory=ledger.memory,
            resident=held,
            moment=ledger.moment,
            host=host,
            accumulation=self._accumulation,
            trace=trace,
            traffic=self._traffic(),
            copied=self._copied(),
            stepped=sum(stepped),
            stepped_in_host=sum(self._shards) if self.apart else 0,
            remarks=self._remarks(),
        )

    def _remarks(self) -> list[str]:
        if self.apart:
            return ["seconds of copies and of the step in host memory follow host and host_bandwidth of the machine"]
        if self._section.cpu_offload:
            return ["here the host's memory is the device's, so that offload frees nothing"]
        return []

    def _gathered(self) -> int:
        """Whole bytes of all gathers of a step."""
        inner = sum(unit.message for name, unit in self._units.items() if not self.freed_after_forward(name))
        outer = sum(unit.message for name, unit in self._units.items() if self.freed_after_forward(name))
        return self._accumulation * (2 * outer + inner)

    def _copied(self) -> int:
        """Bytes that are read and written to make messages of shards and gradients, and parameters of messages."""
        if self._ranks == 1:
            return 0
        reductions = 1 if self._section.accumulate_without_sync else self._accumulation
        arranged = reductions * sum(unit.reduced for unit in self._units.values())
        return 2 * (self._gathered() + self._gathered() // self._ranks + arranged)

    def _traffic(self) -> list[Traffic]:
        steps = self._accumulation
        calls = len(self._units)
        reduced = sum(unit.reduced for unit in self._units.values())
        reductions = 1 if self._section.accumulate_without_sync else steps
        traffic = [
            Traffic("all_gather", self._ranks, self._gathered(), steps * (2 * calls - 1)),
            Traffic("reduce_scatter", self._ranks, reductions * reduced, reductions * calls),
        ]
        if self._replicas > 1:
            share = reduced // self._ranks
            traffic.append(Traffic("all_reduce", self._replicas, reductions * share, reductions * calls))
        if self.apart:
            gathers = {name: 1 + self.freed_after_forward(name) for name in self._units}
            copied = steps * sum(gathers[name] * unit.sharded for name, unit in self._units.items())
            copies = (steps * 2 + reductions) * len(self._unit_of)
            moved = copied + reductions * reduced // self._ranks
            traffic.append(Traffic("host_copy", 1, moved, copies, overlaps=self._section.pin_memory))
        return traffic

    # ---- what the replay asks ---------------------------------------------------------------------------------------

    @property
    def request(self) -> PlanRequest:
        """The request that is planned."""
        return self._request

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._accumulation

    @property
    def without_sync(self) -> bool:
        """Whether micro-batches before the last keep unsharded gradients."""
        return self._section.accumulate_without_sync

    @property
    def ranks(self) -> int:
        """Ranks that share parameters."""
        return self._ranks

    def unit(self, name: str) -> Unit | None:
        """A unit by name; ``None`` for one without parameters of its own."""
        return self._units.get(name)

    def owner(self, parameter: str) -> str | None:
        """Return the unit of a parameter; ``None`` for a replicated one."""
        return self._unit_of.get(parameter)

    def freed_after_forward(self, name: str) -> bool:
        """Whether a unit's gathered parameters are freed after its forward."""
        after = self._section.reshard_after_forward
        return name != ROOT if after is None else bool(after)


@final
class _Replay:
    """Torch's gathers and reductions along a trace."""

    def __init__(self, layout: _Layout, ledger: Ledger, trace: Trace) -> None:
        self._layout, self._ledger, self._trace = layout, ledger, trace
        self._gathered: set[str] = set()
        self._message: tuple[str, int] | None = None
        """A unit whose message has arrived, or was copied out, and is kept; with its bytes."""
        self._forwards: list[str] = []
        """Units in the order in which their forwards ended, for the prefetch of backward."""
        self._whole: dict[str, int] = {}
        """Unsharded gradients by unit."""
        self._kept: int = 0
        """Bytes of the last reduction's input, which lives until the next one."""
        self._reduced: set[str] = set()

    def run(self) -> None:
        """Replay the last micro-batch of a window."""
        layout, ledger = self._layout, self._ledger
        if layout.accumulation > 1 and layout.without_sync:
            reduce = layout.request.precision.reduce
            for name, size in self._trace.gradients.items():
                owner = layout.owner(name)
                if owner is not None:
                    whole = size if reduce is None else size * dtype_of(reduce).itemsize // self._itemsize(name)
                    self._whole[owner] = self._whole.get(owner, 0) + whole
            ledger.add("gradients", sum(self._whole.values()))
        elif layout.accumulation > 1 and not layout.apart:
            ledger.add(
                "gradients", sum(unit.reduced // layout.ranks for unit in map(layout.unit, self._names()) if unit)
            )
        for event in self._trace.events:
            ledger.replay(event)
            self._at(event)

    def _names(self) -> set[str]:
        return {owner for name in self._trace.gradients if (owner := self._layout.owner(name)) is not None}

    def _itemsize(self, parameter: str) -> int:
        compute = self._layout.request.precision.compute
        own = self._layout.request.model.get_parameter(parameter).dtype
        return (own if compute is None else dtype_of(compute)).itemsize

    def _at(self, event: TraceEvent) -> None:
        name = event.name
        if event.kind == "enter":
            self._gather(name, forward=True)
        elif event.kind == "leave":
            self._forwards.append(name)
            if self._layout.freed_after_forward(name):
                self._free(name)
            if name == ROOT:
                self._drop_message()
        elif event.kind == "backward_enter":
            self._gather(name, forward=False)
            if self._forwards and name in self._forwards:
                place = self._forwards.index(name)
                if place:
                    self._send(self._forwards[place - 1])
        elif event.kind == "gradient":
            self._hold(name)
        elif event.kind == "backward_leave" and name != ROOT:
            self._reduce(name)
        elif event.kind == "end":
            for each in [*self._gathered, *self._whole]:
                self._reduce(each)
            self._drop_message()
            self._ledger.add("reduction buffers", -self._kept)
            self._kept = 0

    # ---- parameters -------------------------------------------------------------------------------------------------

    def _send(self, name: str) -> None:
        """Begin a gather: its message is there from now on."""
        unit = self._layout.unit(name)
        if unit is None or name in self._gathered or (self._message is not None and self._message[0] == name):
            return
        if self._message is not None:
            # In forward the message before is kept until this one has arrived.
            self._ledger.during("gathered", unit.message + unit.copied)
            self._drop_message()
        self._ledger.add("gathered", unit.message)
        self._ledger.during("gathered", unit.copied)
        self._message = (name, unit.message)

    def _gather(self, name: str, *, forward: bool) -> None:
        """Complete a gather: the message is copied to the parameters, and in forward kept until the next one."""
        unit = self._layout.unit(name)
        if unit is None or name in self._gathered:
            return
        self._send(name)
        self._ledger.add("gathered", unit.message)
        self._gathered.add(name)
        if not forward:
            self._drop_message()

    def _drop_message(self) -> None:
        if self._message is not None:
            self._ledger.add("gathered", -self._message[1])
            self._message = None

    def _free(self, name: str) -> None:
        unit = self._layout.unit(name)
        if unit is not None and name in self._gathered:
            self._gathered.remove(name)
            self._ledger.add("gathered", -unit.message)

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _hold(self, name: str) -> None:
        """A parameter's gradient is complete."""
        size, owner = self._trace.gradients[name], self._layout.owner(name)
        if owner is None:
            if self._layout.accumulation == 1:
                self._ledger.add("gradients", size)
        elif self._layout.accumulation == 1 or not self._layout.without_sync:
            self._ledger.add("gradients", size)
            self._whole[owner] = self._whole.get(owner, 0) + size

    def _reduce(self, name: str) -> None:
        """Free a unit's parameters, then reduce its gradients to this rank's shards."""
        self._free(name)
        unit = self._layout.unit(name)
        whole = self._whole.pop(name, 0)
        if unit is None or not whole:
            return
        ledger = self._ledger
        ledger.add("reduction buffers", -self._kept)
        ledger.add("reduction buffers", unit.reduced)
        self._kept = unit.reduced
        ledger.add("gradients", -whole)
        part = unit.reduced // self._layout.ranks
        if self._layout.request.device_type == "cpu":
            # gloo reduces a copy of the whole message.
            ledger.during("reduction buffers", unit.reduced + part)
        if not self._layout.apart and (self._layout.accumulation == 1 or self._layout.without_sync):
            ledger.add("gradients", part)
        else:
            ledger.during("gradients", part)
