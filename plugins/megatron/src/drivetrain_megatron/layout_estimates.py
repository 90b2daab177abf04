"""Estimates a layout whose ranks run all layers, each with its share of them; and what every layout shares.

Tensor parallelism is traced as rank 0 of a simulated group that sends nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.values import leaves
from drivetrain_megatron.replicas import buckets
from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.layout import Layout
from drivetrain_megatron.tensor.plan import Plan, make_plan
from drivetrain_megatron.tensor_parallel import simulate_tensor_parallel
from drivetrain_planner import Bench, Estimate, Ledger, PlanRequest, Traffic, replay_whole


@dataclass(frozen=True)
class Degrees:
    """Ranks of each axis."""

    tensor: int
    pipeline: int
    data: int

    @property
    def family(self) -> str:
        """Names of the axes of this layout."""
        return " x ".join(name for name, size in (("tp", self.tensor), ("pp", self.pipeline)) if size > 1)


def refused(title: str, family: str, why: str) -> Estimate:
    """Return the estimate of a layout that cannot be."""
    return Estimate(title, "megatron", family, 40, refused=why)


@final
class PlannedModel:
    """One model that is planned, and what its layouts share.

    Args:
        request: what is planned.
        section: the configuration.
    """

    def __init__(self, request: PlanRequest, section: MegatronConfig) -> None:
        self.request, self.section = request, section
        self._plans: dict[int, Plan] = {}

    def plan(self, degree: int) -> Plan | None:
        """Tensor-parallel plan for a degree, ``None`` for 1. Raises :class:`UsageError` as :func:`make_plan` does."""
        if degree == 1:
            return None
        if degree not in self._plans:
            self._plans[degree] = make_plan(self.request.model, degree, self.section.tp_plan)
        return self._plans[degree]

    def sizes(self, degree: int) -> dict[str, int]:
        """Bytes of each parameter on the first rank of the axis ``tp``, which never holds less than another."""
        plan, found = self.plan(degree), {}
        for name, one in self.request.model.named_parameters():
            shape = tuple(one.shape)
            if plan is not None and name in plan.cuts:
                made = plan.cuts[name]
                shape = Layout(shape, made.dim % len(shape), made.parts).local_shape(0, degree)
            found[name] = prod(shape) * one.element_size()
        return found

    @cached_property
    def trained(self) -> set[str]:
        """Names of the parameters that are trained."""
        return {name for name, one in self.request.model.named_parameters() if one.requires_grad}

    @cached_property
    def buffers(self) -> int:
        """Bytes of all buffers."""
        return sum(one.numel() * one.element_size() for one in self.request.model.buffers())

    @cached_property
    def batch(self) -> int:
        """Bytes of a micro-batch of the script."""
        storages = {
            leaf.untyped_storage()._cdata: int(leaf.untyped_storage().nbytes())  # noqa: SLF001 (its identity)
            for leaf in leaves(self.request.arguments)
            if isinstance(leaf, Tensor)
        }
        return sum(storages.values())


class LayoutEstimate(ABC):
    """Base of the layouts.

    Args:
        made: the model.
        degrees: ranks of each axis.
    """

    def __init__(self, made: PlannedModel, degrees: Degrees) -> None:
        self.made, self.degrees = made, degrees
        self.request, self.section = made.request, made.section

    @property
    def title(self) -> str:
        """Title of the layout."""
        degrees = self.degrees
        axes = (("tp", degrees.tensor), ("pp", degrees.pipeline))
        told = " x ".join(f"{name} {size}" for name, size in axes if size > 1)
        return told + (f", {degrees.data} replicas" if degrees.data > 1 else "")

    @property
    def accumulation(self) -> int:
        """Micro-batches of the script in one optimizer step."""
        found = self.request.accumulation(self.degrees.data)
        assert found is not None, "asked before"
        return found

    @abstractmethod
    def estimate(self) -> Estimate:
        """Memory and traffic."""

    def settings(self) -> dict[str, Any]:
        """Keys of a configuration that gives this layout."""
        section = {
            "tensor_parallel_size": self.degrees.tensor,
            "pipeline_parallel_size": self.degrees.pipeline,
            "data_parallel": "ddp",
        }
        return {
            "distributed_type": "megatron",
            "gradient_accumulation_steps": self.accumulation,
            "megatron": section,
        }

    def held(self, sizes: Sequence[int], trained: Sequence[int], buffers: int) -> dict[str, int]:
        """Bytes that a rank holds all the time, by part."""
        return {
            "parameters": sum(sizes),
            "buffers": buffers,
            "optimizer states": self.request.optimizer.state(trained),
        }

    def end_of_window(self, ledger: Ledger, names: Sequence[str], sizes: Mapping[str, int]) -> None:
        """Average the gradients of replicas, and step."""
        if self.degrees.data > 1:
            each: list[Tensor] = [torch.empty(sizes[name], dtype=torch.uint8, device="meta") for name in names]
            most = max((sum(one.nbytes for one in bucket) for bucket in buckets(each)), default=0)
            ledger.during("reduction buffers", most)
        ledger.during("optimizer step", self.request.optimizer.step([sizes[name] for name in names]))

    def of_replicas(self, gradients: int) -> list[Traffic]:
        """All-reduces of a step over the data-parallel ranks."""
        if self.degrees.data == 1:
            return []
        return [Traffic("all_reduce", self.degrees.data, gradients, max(1, gradients // _BUCKET), overlaps=False)]

    def copied(self, gradients: int) -> int:
        """Bytes that averaging replicas reads and writes: into a bucket, its division, and back from there."""
        return 6 * gradients if self.degrees.data > 1 else 0

    def of_ring(self, sent: Sequence[tuple[str, int]], times: int) -> list[Traffic]:
        """Collectives of the axis ``tp``, for which computation waits."""
        size, calls = Counter[str](), Counter[str]()
        for operation, message in sent:
            size[operation] += message
            calls[operation] += 1
        ranks = self.degrees.tensor
        return [
            Traffic(operation, ranks, times * size[operation], times * calls[operation], overlaps=False)  # type: ignore[arg-type]
            for operation in size
        ]


_BUCKET = 25 << 20
"""Bytes that are averaged in one call."""


@final
class TensorEstimate(LayoutEstimate):
    """Every rank runs all layers, and has its share of each."""

    def estimate(self) -> Estimate:
        request, degree = self.request, self.degrees.tensor
        plan, ring = self.made.plan(degree), Ring(None, simulated=degree)
        assert plan is not None
        if not plan.cuts:
            why = f"no layer of {type(request.model).__name__} can be shared, and each rank would compute all of it"
            return refused(self.title, self.degrees.family, why)

        def run(bench: Bench) -> None:
            simulate_tensor_parallel(bench.model, plan, ring)
            bench.begin()
            output = bench.engine.forward(bench.model, bench.args, bench.kwargs)
            loss = bench.loss(output)
            kept = output if bench.kept else None
            del output
            bench.record("loss")
            loss.backward()  # type: ignore[no-untyped-call]
            del loss, kept
            bench.record("end")

        trace = request.run(run)
        sizes = self.made.sizes(degree)
        trained = [name for name in sizes if name in self.made.trained]
        held = self.held(list(sizes.values()), [sizes[name] for name in trained], self.made.buffers)
        ledger = Ledger(held)
        replay_whole(ledger, trace, self.accumulation)
        self.end_of_window(ledger, trained, sizes)
        gradients = sum(trace.gradients.values())
        return Estimate(
            title=self.title,
            backend="megatron",
            family=self.degrees.family,
            rank=40,
            settings=self.settings(),
            memory=ledger.memory,
            resident=held,
            moment=ledger.moment,
            accumulation=self.accumulation,
            trace=trace,
            traffic=[*self.of_ring(ring.sent, self.accumulation), *self.of_replicas(gradients)],
            copied=self.copied(gradients),
            stepped=sum(sizes[name] for name in trained),
        )
