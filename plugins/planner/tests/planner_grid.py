"""Predicted against counted bytes of a rank, for many models and layouts: run as a program, it writes the record.

    python plugins/planner/tests/planner_grid.py [--all | --predict | PART ...]

runs the combinations that the record lacks, or those whose names hold one of the parts, or all, on real ranks on the
CPU, and writes ``planner_memory.json`` beside this file. The documentation shows it. ``--predict`` keeps what was
counted and predicts anew.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from math import prod
from pathlib import Path

import torch
from planner_jobs import censused
from planner_models import MODELS
from planner_preload import preload_models

from drivetrain.api import cast_parameters
from drivetrain.api.programs import policy_for
from drivetrain_planner import PlanRequest
from drivetrain_planner.choosing import GROUP
from drivetrain_planner.optimizers import optimizer_costs
from drivetrain_planner.tracing import Example, Tracer
from drivetrain_testing import spawn

RECORD = Path(__file__).with_name("planner_memory.json")

ZERO = {"deepspeed": {"reduce_bucket_size": 1_000_000}}
"""Of DeepSpeed's own, 500 million elements, 2 GB would hide everything else in models of this size."""


@dataclass(frozen=True)
class Combination:
    """One model under one layout.

    Args:
        model: of ``planner_models``.
        title: of the estimate.
        ranks: processes.
        precision: ``mixed_precision``.
        windows: micro-batches of a step.
        optimizer: of ``planner_jobs``.
    """

    model: str
    title: str
    ranks: int
    precision: str = "no"
    windows: int = 1
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        """As the record has it."""
        told = [self.model, self.title, f"{self.ranks} ranks"]
        told += [self.precision] if self.precision != "no" else []
        told += [f"{self.windows} micro-batches"] if self.windows > 1 else []
        told += [self.optimizer] if self.optimizer != "adamw" else []
        return "; ".join(told)

    @property
    def sections(self):
        """What the configuration says of backends."""
        if self.title.startswith("zero"):
            return ZERO
        if self.title.endswith("offload"):
            return {"fsdp": {"cpu_offload": True}}
        return {"megatron": megatron_section(self.title)} if self.title.startswith(("tp", "pp")) else {}

    @property
    def replicas(self):
        """Ranks that read samples of their own."""
        return self.ranks // prod(degrees_of(self.title).values())

    def request(self):
        """What is planned."""
        return request_for(
            self.model,
            self.ranks,
            replicas=self.replicas,
            precision=self.precision,
            accumulation=self.windows,
            optimizer=self.optimizer,
            sections=self.sections,
        )

    def estimate(self):
        """What is predicted."""
        return estimates_of(self.request(), self.title)

    def count(self, estimate, measure=censused):
        """What the fullest of real ranks holds at its most, in bytes."""
        settings = {**estimate.settings, "mixed_precision": self.precision}
        for name, section in self.sections.items():
            settings[name] = {**section, **settings.get(name, {})}
        ranks = spawn(measure, self.ranks, settings, self.model, self.optimizer, timeout=400)
        return max(each["most"] for each in ranks)


OFFLOADED = (("gpt2", "no"), ("llama", "bf16"))
"""On the CPU, where shards stay in the memory in which they are used; test_planner_memory.py keeps the two apart."""


def combinations() -> list[Combination]:
    """All of the record."""
    layouts = ("ddp", "fsdp", "fsdp, recompute", "zero 1", "zero 2", "zero 3")
    found = [
        Combination(model, title, ranks)
        for model in MODELS
        for title in layouts
        # Uneven shares show in a transformer, a mixture of experts and a convolutional net as well as in six models.
        for ranks in ((2, 3) if model in ("llama", "qwen3_moe", "resnet") else (2,))
        # T5 keeps a cache that its blocks write, so that they cannot be computed twice; test_planner_choice.py.
        if (model, title) != ("t5", "fsdp, recompute")
    ]
    found += [Combination("llama", title, 2, precision="bf16") for title in layouts]
    found += [Combination("gpt2", title, 2, windows=2) for title in layouts]
    found += [Combination("resnet", title, 2, windows=3) for title in layouts if title != "fsdp, recompute"]
    found += [Combination("gpt2", title, 2, precision="bf16", windows=2) for title in ("ddp", "zero 1", "zero 2")]
    found += [Combination(model, "ddp", 2, optimizer="sgd") for model in ("gpt2", "resnet")]
    found += [Combination("gpt2", title, 4) for title in ("fsdp", "zero 2", "zero 3")]
    found += [Combination(model, "single", 1) for model in ("gpt2", "qwen3_moe", "vit")]
    # Queries, keys and values in one matrix; grouped heads; three heads, which two ranks do not divide.
    found += [Combination(model, "tp 2", 2, windows=2) for model in ("gpt2", "llama")]
    found += [Combination("vit", "tp 3", 3, windows=3)]
    found += [
        Combination(model, f"pp 2, {schedule}, 4 micro-batches", 2, windows=2)
        for model in ("gpt2", "llama", "qwen3_moe")
        for schedule in ("gpipe", "1f1b")
    ]
    found += [Combination("gpt2", "tp 2, 2 replicas", 4, windows=2)]
    found += [Combination("llama", "pp 2, 2 replicas, 1f1b, 4 micro-batches", 4)]
    found += [Combination(model, "tp 2 x pp 2, 1f1b, 4 micro-batches", 4) for model in ("gpt2", "llama")]
    found += [Combination("llama", "tp 2 x pp 2, gpipe, 4 micro-batches", 4, windows=2)]
    found += [Combination("gpt2", "tp 2 x pp 2, 2 replicas, 1f1b, 4 micro-batches", 8)]
    # Several stages on a rank, backwards in two parts, and both ways round; a stage of a rank then follows another.
    found += [
        Combination(model, f"pp 2, {schedule} of 2 stages a rank, 4 micro-batches", 2, windows=windows)
        for model, windows in (("gpt2", 2), ("llama", 1))
        for schedule in ("interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
    ]
    found += [Combination("llama", f"pp 3, {schedule}, 4 micro-batches", 3) for schedule in ("1f1b", "zero_bubble")]
    found += [Combination("gpt2", "pp 4, zero_bubble, 4 micro-batches", 4)]
    found += [Combination("llama", "pp 2, 2 replicas, interleaved_1f1b of 2 stages a rank, 4 micro-batches", 4)]
    found += [Combination("llama", "tp 2 x pp 2, zero_bubble of 2 stages a rank, 4 micro-batches", 4)]
    found += [Combination(model, "tp 2", 2, precision="bf16", windows=2) for model in ("gpt2", "llama")]
    found += [
        Combination(model, title, 2, precision="bf16", windows=2)
        for model, title in (
            ("gpt2", "pp 2, 1f1b, 4 micro-batches"),
            ("llama", "pp 2, gpipe, 4 micro-batches"),
            ("llama", "pp 2, zero_bubble of 2 stages a rank, 4 micro-batches"),
        )
    ]
    found += [Combination("llama", "tp 2 x pp 2, 1f1b, 4 micro-batches", 4, precision="bf16", windows=2)]
    found += [Combination(model, "fsdp, offload", 2, precision=precision) for model, precision in OFFLOADED]
    return found


def degrees_of(title):
    """Ranks of each axis along which samples are the same."""
    if not title.startswith(("tp", "pp")):
        return {}
    return {name: int(size) for name, size in (each.split() for each in title.split(", ")[0].split(" x "))}


def megatron_section(title):
    """The degrees and the schedule that a title tells, so that no other layout is traced."""
    degrees, rest = degrees_of(title), title.split(", ")[1:]
    found = {"tensor_parallel_size": degrees.get("tp", 1), "pipeline_parallel_size": degrees.get("pp", 1)}
    for told in rest:
        if told.endswith("micro-batches"):
            found["num_micro_batches"] = int(told.split()[0])
        elif not told.endswith("replicas"):
            name, _, stages = told.partition(" of ")
            found["schedule"] = name
            if name in ("interleaved_1f1b", "zero_bubble"):
                found["stages_per_rank"] = int(stages.split()[0]) if stages else 1
    return found


@cache
def tracer_for(model, precision):
    """The model on meta, and what traces its micro-batches of 4 samples; traces are made once."""
    make, batches = MODELS[model]
    with torch.device("meta"):
        network = make()
    policy, batch = policy_for(precision), batches()
    cast_parameters(network, policy)
    return network, batch, Tracer(network, Example((), batch, batch, kept=False), policy)


def request_for(model, ranks, *, replicas=None, precision="no", accumulation=1, optimizer="adamw", sections=None):
    """What is planned for a model of ``planner_models``, with micro-batches of 4 samples for each of the replicas."""
    network, batch, tracer = tracer_for(model, precision)
    return PlanRequest(
        model=network,
        world_size=ranks,
        ranks_per_node=ranks,
        device_type="cpu",
        precision=policy_for(precision),
        micro_batch=4,
        global_batch=4 * (replicas or ranks) * accumulation,
        optimizer=optimizer_costs(optimizer),
        sections=sections or {},
        trace=tracer.trace,
        arguments=((), batch),
        run=tracer.run,
    )


def estimates_of(request, title):
    """The estimate with this title, of its backend alone: others would trace layouts that nobody compares."""
    word = title.split()[0].rstrip(",")
    name = {"zero": "deepspeed", "tp": "megatron", "pp": "megatron"}.get(word, word)
    (backend,) = entry_points(group=GROUP, name=name)
    return next(each for each in backend.load()(request) if each.title == title)


def record() -> dict[str, dict[str, int]]:
    """Bytes ``predicted`` and ``counted``, by name."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def keep(name: str, predicted: int, counted: int) -> None:
    """Write one result into the record."""
    found = {**record(), name: {"predicted": predicted, "counted": counted}}
    ordered = {each.name: found[each.name] for each in combinations() if each.name in found}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    told = f"{predicted} / {counted} = {predicted / counted - 1:+.3%}"
    sys.stdout.write(f"\n{time.strftime('%H:%M:%S')} {name}: {told}\n")
    sys.stdout.flush()


def main(asked: list[str]) -> None:
    """Run and record."""
    preload_models()
    for one in combinations():
        counted = record().get(one.name)
        if asked == ["--predict"]:
            if counted is not None:
                keep(one.name, one.estimate().peak, counted["counted"])
        elif asked == ["--all"] or any(part in one.name for part in asked) or not (asked or counted):
            estimate = one.estimate()
            assert not estimate.refused, (one.name, estimate.refused)
            keep(one.name, estimate.peak, one.count(estimate))


if __name__ == "__main__":
    main(sys.argv[1:])
