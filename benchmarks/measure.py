"""All measurements, one after the other, and the table. ``benchmarks/run.py`` starts it in the right environment."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    async_save,
    checkpoints,
    gathering,
    loaders,
    megatron_core,
    parallel,
    peers,
    pipelines,
    report,
    sharded,
    sharded_saves,
    startup,
    steps,
    watching,
    zero,
)
from benchmarks.megatron_core import LlamaCase
from benchmarks.pairs import Samples
from benchmarks.parallel import ParallelCase
from benchmarks.pipelines import PipelineCase
from benchmarks.report import Section, Target
from benchmarks.sharded import ShardedCase
from benchmarks.steps import StepCase
from benchmarks.zero import ZeroCase

GROUPS = (
    "steps", "loaders", "gather", "watching", "checkpoints", "startup", "fsdp", "saves",
    "deepspeed", "parallel", "core", "pipelines", "gpu",
)  # fmt: skip

ENGINES = {
    "deepspeed": ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"),
    "core": (
        "megatron.core.distributed",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.pipeline_parallel",
        "transformers.models.llama.modeling_llama",
    ),
}
"""Modules of a group that are slow to import."""

STEPS = [
    StepCase(),
    StepCase(accumulation=4),
    StepCase(bf16=True),
    StepCase(accumulation=4, bf16=True),
    StepCase(clip=True),
    StepCase(fused=True),
    StepCase(hidden=512, rows=64),
    StepCase(world=2),
    StepCase(world=2, accumulation=4),
    StepCase(world=2, bf16=True),
    StepCase(world=2, accumulation=4, bf16=True),
    StepCase(world=2, hidden=512, rows=64),
]
SHARDED_STEPS = [
    ShardedCase(),
    ShardedCase(accumulation=4),
    ShardedCase(bf16=True),
    ShardedCase(width=768, blocks=3, rows=64),
    ShardedCase(world=2),
    ShardedCase(world=2, accumulation=4),
    ShardedCase(world=2, width=768, blocks=3, rows=64),
]
PIPELINES = [
    PipelineCase("gpipe"),
    PipelineCase("1f1b"),
    PipelineCase("1f1b", weights=(1.0, 1.5, 1.0, 1.2)),
    PipelineCase("1f1b", weights=(2.0, 1.0, 1.0, 1.0)),
    PipelineCase("interleaved_1f1b"),
    PipelineCase("zero_bubble"),
    PipelineCase("zbv"),
    PipelineCase("dualpipev"),
    PipelineCase("1f1b", trained=True),
    PipelineCase("interleaved_1f1b", trained=True),
    PipelineCase("zbv", trained=True),
]
ZERO_STEPS = [
    *(ZeroCase(stage) for stage in (0, 1, 2, 3)),
    ZeroCase(2, accumulation=4),
    ZeroCase(2, clip=1.0),
    *(ZeroCase(stage, width=768, blocks=6, rows=64) for stage in (1, 2, 3)),
    *(ZeroCase(stage, world=2) for stage in (2, 3)),
]
# What a step may cost beyond the bare engine's: microseconds of a small one, a ratio of one of at least 20 ms.
ZERO_TARGETS = {64: Target("more", 20.0), 768: Target("ratio", 1.01)}
ZERO_LARGE = ZeroCase(2, world=2, width=1024, blocks=8)
SMALL = ShardedCase(world=2)
LARGE = ShardedCase(world=2, width=1024, blocks=16)
# Microseconds of CPU that a step may cost beyond the bare loop. One process and a small network only: the noise of
# waiting ranks, or of a step of milliseconds, is wider than that.
STEP_TARGET = Target("more", 10.0)
# Beside the fastest of the loops that an expert may write.
SHARDED_TARGET = Target("ratio", 1.02)
SAVE_TARGETS = {
    "save": Target("ratio", 1.2),
    "load": Target("ratio", 1.1),
    "wait": Target("ratio", 0.2, sharded_saves.BESIDE),
}
PARALLEL = [ParallelCase("tp"), ParallelCase("pp")]
LLAMA_SMALL: dict[str, Any] = {"width": 32, "layers": 2, "words": 64, "rows": 4, "length": 8, "micro_batches": 2}
LLAMA_LARGE: dict[str, Any] = {"width": 512, "layers": 8, "words": 4096, "rows": 4}
PARALLEL_TARGET = Target("ratio", 1.02)
LOADER_TARGET = Target("ratio", 1.1)
HELP_TARGET = Target("total", 100.0, "drivetrain --help")
IMPORT_TARGET = Target("total", 60.0, "import drivetrain")
# Share of the processor time that others may use before a run is called busy.
BUSY = 0.05
LAUNCH_TARGET = Target("ratio", 1.05, "drivetrain launch")


def _spawn(function: Any, world: int, *args: Any) -> Any:
    """Rank 0's result of a job in fresh processes."""
    return _spawn_all(function, world, *args)[0]


def _spawn_all(function: Any, world: int, *args: Any) -> list[Any]:
    """Every rank's result."""
    from drivetrain_testing import spawn

    return spawn(function, world, *args, timeout=600)


def import_engines(groups: Iterable[str]) -> None:
    """Have these groups' engines imported once, for all jobs to come, instead of by each rank of each job.

    For quick runs: ranks that have more modules than they use start later and hold more memory. Not where there is an
    accelerator, which Megatron-Core would open before the ranks are there.
    """
    from drivetrain_testing import preload

    wanted = [name for group in groups for name in ENGINES.get(group, ())]
    installed = [name for name in wanted if importlib.util.find_spec(name.partition(".")[0]) is not None]
    preload(*installed, opens_accelerators=True)


def measure_steps(quick: bool) -> Iterator[Section]:
    """Training steps. Quick: the first case of each kind."""
    for case in [StepCase(), StepCase(world=2, accumulation=4)] if quick else STEPS:
        micro_batches = 8 if quick or case.hidden > 64 else 40
        rounds = 4 if quick else 100 if case.hidden > 64 else 200 if case.world == 1 else 100
        samples = _spawn(steps.measure, case.world, case, micro_batches, rounds)
        target = STEP_TARGET if case.world == 1 and case.hidden == 64 else None
        per = "step" if case.accumulation == 1 else "micro-batch"
        yield Section(f"Training step: {case.title}", "cpu", "us", per, samples, target)


def measure_loaders(quick: bool) -> Iterator[Section]:
    """Loaders, by one rank of one and of two."""
    cases = [("map", 16, 1), ("iterable", 16, 1), ("map", 16, 2), ("map", 64, 2), ("iterable", 16, 2)]
    for kind, rows, world in cases[:2] if quick else cases:
        samples = _spawn(loaders.measure, world, kind, rows, 10 if quick else 100, 4 if quick else 80)
        ranks = "1 process" if world == 1 else f"{world} processes"
        plain = "DataLoader with DistributedSampler" if kind == "map" else "DataLoader of a hand-sharded stream"
        title = f"Loading a batch of {rows}: {kind} dataset, {ranks}; bare is a {plain}"
        yield Section(title, "cpu", "us", "batch", samples, LOADER_TARGET if kind == "map" else None)


def measure_gather(quick: bool) -> Iterator[Section]:
    """Metrics of a batch from two ranks."""
    samples = _spawn(gathering.measure, 2, 2 if quick else 5, 4 if quick else 300)
    yield Section("gather_for_metrics((x, y)), 2 processes; bare is two all_gathers", "wall", "us", "call", samples)


def measure_watching(quick: bool) -> Iterator[Section]:
    """Steps whose calls are compared over the ranks, and that ask whether the run shall end."""
    samples = _spawn(watching.measure, 2, 4 if quick else 20, 4 if quick else 150)
    yield Section("Step with a watchdog, 2 processes DDP; bare is DDP", "wall", "us", "step", samples)


def measure_checkpoints(quick: bool) -> Iterator[Section]:
    """Saving and loading."""
    megabytes = 1 if quick else 34
    for verb, samples in _spawn(checkpoints.measure, 1, megabytes, 2 if quick else 16).items():
        title = f"{verb}_state: a model of {megabytes} MB with its Adam state; bare is torch.distributed.checkpoint"
        for clock in ("wall", "cpu"):
            yield Section(title, clock, "ms", "call", samples, None if quick else SAVE_TARGETS[verb])


def measure_startup(quick: bool) -> Iterator[Section]:
    """Whole programs. Quick: each once, with nothing warmed up."""
    often = (1, 0) if quick else (12, 1)
    for what, target in (("help", HELP_TARGET), ("import", IMPORT_TARGET)):
        title = {"help": "Command line: --help", "import": "Import"}[what] + ", a whole program"
        yield Section(title, "cpu", "ms", "start", startup.measure(what, *often), target)
    for until in startup.UNTIL:
        title = f"Launching {startup.PROCESSES} processes: to {until}; bare is torchrun"
        yield Section(title, "wall", "ms", "launch", startup.launches(*often, until), LAUNCH_TARGET)


def measure_fsdp(quick: bool) -> Iterator[Section]:
    """Training in shards: steps, checkpoints, memory."""
    for case in [ShardedCase(accumulation=4)] if quick else SHARDED_STEPS:
        # What one process adds to a short step is looked for among differences that are wider than it.
        rounds = 4 if quick else 200 if case.world == 1 and case.width == 64 else 60
        micro_batches = 4 if quick else 1 if case.width > 64 else 24
        samples, missing = _spawn(sharded.measure, case.world, case, micro_batches, rounds)
        target = SHARDED_TARGET if case.world == 1 else None
        per = "step" if case.accumulation == 1 else "micro-batch"
        title = f"fsdp, training step: {case.title}; bare is fully_shard"
        yield Section(title, "cpu", "us", per, samples, target, missing, sharded.BARE_TOO)
    case = SMALL if quick else LARGE
    words = {
        "save": "save_state; bare is torch.distributed.checkpoint",
        "load": "load_state; bare is torch.distributed.checkpoint",
        "wait": "what the loop waits for a save",
    }
    found, missing = _spawn(sharded_saves.measure, case.world, case, 2 if quick else 12)
    for verb, samples in found.items():
        title = f"fsdp, {words[verb]}: {case.title}, with its Adam state"
        for clock in ("wall",) if verb == "wait" else ("wall", "cpu"):
            target = None if quick else SAVE_TARGETS[verb]
            yield Section(title, clock, "ms", "call", samples, target, missing if verb != "wait" else ())
    title = f"fsdp, memory that training adds to a rank: {case.title}; bare is fully_shard"
    peaks, missing = _peaks(case, 1 if quick else 5)
    yield Section(title, "memory", "MB", "rank", peaks, remarks=missing)


def _peaks(case: ShardedCase, rounds: int) -> tuple[dict[str, Samples], list[str]]:
    """The fullest rank's growth, each contender in fresh processes; and why contenders are missing."""
    found: dict[str, Samples] = {}
    missing: dict[str, str] = {}
    for _ in range(rounds):
        for name in (peers.BARE, peers.OURS, peers.AGAIN, *peers.present()):
            if name in missing:
                continue
            grown = _spawn_all(sharded.peak, case.world, name, case, 3)
            if isinstance(grown[0], str):
                missing[name] = grown[0]
            else:
                found.setdefault(name, Samples([], [])).memory.append(max(grown))
    return found, list(missing.values())


def measure_deepspeed(quick: bool) -> Iterator[Section]:
    """Training under DeepSpeed: steps, set-up, checkpoints."""
    for case in [ZeroCase(2)] if quick else ZERO_STEPS:
        micro_batches, rounds = (4, 4) if quick else (1, 60) if case.width > 64 else (20, 100)
        samples, missing = _spawn(zero.measure, case.world, case, micro_batches, rounds)
        target = ZERO_TARGETS[case.width] if case.world == 1 else None
        per = "step" if case.accumulation == 1 else "micro-batch"
        title = f"deepspeed, training step: {case.title}; bare is DeepSpeed by hand"
        yield Section(title, "cpu", "us", per, samples, target, missing)
    case = ZeroCase(2, world=2) if quick else ZERO_LARGE
    samples, missing = _spawn(zero.set_up, case.world, case, 1 if quick else 8)
    title = f"deepspeed, prepare(model, optimizer): {case.title}; bare is deepspeed.initialize"
    yield Section(title, "wall", "ms", "call", samples, remarks=missing)
    found, missing = _spawn(zero.checkpoints, case.world, case, 2 if quick else 8)
    for verb, samples in found.items():
        title = f"deepspeed, {verb}_state: {case.title}, with its Adam state; bare is {verb}_checkpoint"
        yield Section(title, "wall", "ms", "call", samples, remarks=missing)


def measure_parallel(quick: bool) -> Iterator[Section]:
    """Tensor and pipeline parallelism against torch's own calls: steps, memory."""
    for case in [ParallelCase(axis, width=32, rows=16) for axis in ("tp", "pp")] if quick else PARALLEL:
        samples = _spawn(parallel.measure, 2, case, 3 if quick else 60)
        title = f"megatron, training step: {case.title}; bare is torch by hand"
        target = None if quick else PARALLEL_TARGET
        yield Section(title, "cpu", "ms", "step", samples, target, bare=parallel.BARE_TOO)
        peaks: dict[str, Samples] = {}
        for _ in range(1 if quick else 5):
            for name in (peers.BARE, peers.OURS, parallel.SINGLE):
                grown = _spawn_all(parallel.peak, 2, name, case, 3)
                peaks.setdefault(name, Samples([], [])).memory.append(max(grown))
        title = f"megatron, memory that training adds to a rank: {case.title}; bare is torch by hand"
        yield Section(title, "memory", "MB", "rank", peaks)


def measure_core(quick: bool) -> Iterator[Section]:
    """The engine Megatron-Core against Megatron-Core by hand: steps; memory of both engines beside one process."""
    of = LlamaCase(**(LLAMA_SMALL if quick else {})).model
    if not megatron_core.present():
        yield Section(f"megatron_core, training step: {of}", "wall", "ms", "step", {}, remarks=[megatron_core.MISSING])
        return
    for axis in ("tp", "pp"):
        case = LlamaCase(axis, **(LLAMA_SMALL if quick else {}))
        samples = _spawn(megatron_core.measure, 2, case, 3 if quick else 60)
        title = f"megatron_core, training step: {case.title}"
        for clock in ("wall", "cpu"):
            yield Section(title, clock, "ms", "step", samples, None if quick else PARALLEL_TARGET)
    sizes = LLAMA_SMALL if quick else LLAMA_LARGE
    peaks: dict[str, Samples] = {}
    for _ in range(1 if quick else 3):
        for axis, name in megatron_core.MEMORY:
            grown = _spawn_all(megatron_core.peak, 2 if axis else 1, name, LlamaCase(axis, **sizes), 3)
            row = f"{name}, {axis} over 2" if axis else name
            peaks.setdefault(row, Samples([], [])).memory.append(max(grown))
    title = f"megatron, memory that training adds to a rank: {LlamaCase(**sizes).model}; the first line is one process"
    yield Section(title, "memory", "MB", "rank", peaks)


def measure_pipelines(quick: bool) -> Iterator[Section]:
    """Idle time of real pipelines beside what the planner predicts."""
    in_small = [PipelineCase("1f1b", (1.0, 1.0), 0.005, 4, trained) for trained in (False, True)]
    for case in in_small if quick else PIPELINES:
        samples, meaning = _spawn(pipelines.measure, case.world, case, 2 if quick else 8)
        title = f"Pipeline, idle time: {case.title}; the first line is the real one"
        yield Section(title, "wall", "ms", "rank and step", samples, remarks=meaning)


def measure_saves(quick: bool) -> Iterator[Section]:
    """What a loop waits for saves beside it, of several sizes."""
    for backend in ("ddp", "fsdp"):
        for megabytes in (16,) if quick else (16, 64, 256):
            with tempfile.TemporaryDirectory(prefix="drivetrain-bench-") as folder:
                times = _spawn(async_save.measure, 2, backend, megabytes, 2 if quick else 20, folder)
            samples = {
                sharded_saves.BLOCKING: Samples([], times["blocking"]),
                sharded_saves.BESIDE: Samples([], times["waits"]),
            }
            first = f"The first one, which makes room for the copy: {1000 * times['first'][0]:.1f} ms"
            title = f"{backend}, what the loop waits for a save of {megabytes} MB: 2 processes"
            yield Section(title, "wall", "ms", "call", samples, SAVE_TARGETS["wait"], [first])


def measure_gpu(quick: bool) -> Iterator[Section]:
    """A billion parameters on one accelerator, where there is one."""
    import torch

    from benchmarks import llama, zero_offload

    model = "a Llama-shaped model of 1.1 billion parameters in bf16, activation checkpointing, one device"
    gigabytes = f"{zero_offload.LIMIT_BYTES / 1e9:.0f} GB"
    offloaded = f"deepspeed, ZeRO-3 with CPU offload: {model} held to {gigabytes}; bare is DeepSpeed by hand"
    # A step with offload takes seconds.
    parts: list[tuple[str, Any, llama.Shape, tuple[int, int]]] = [
        (f"fsdp, {model}", llama, llama.Shape(), (3, 10)), (offloaded, zero_offload, zero_offload.SHAPE, (1, 6)),
    ]
    for title, part, shape, full in parts:
        reason = part.unable()
        if reason is not None:
            yield Section(title, "wall", "ms", "step", {}, remarks=[f"skipped: {reason}"])
            continue
        device = torch.accelerator.current_accelerator()
        assert device is not None
        size = (1, 2) if quick else full
        samples, meaning = _spawn(part.measure, 1, shape, device.type, *size)
        yield Section(title, "wall", "ms", "step", samples, remarks=meaning)


def conditions() -> list[str]:
    """What the numbers hold for."""
    import torch

    where = f"and {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU only, gloo"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    found = ", ".join(f"{name} {version}" for name, version in peers.versions().items())
    missing = [name for name in peers.PEERS if name not in peers.present()]
    lines = [
        f"{found}, Python {platform.python_version()}",
        f"{os.cpu_count()} cores ({platform.machine()}), {where}; load average at the start {load}",
    ]
    return lines + ([f"Not installed here, so not measured: {', '.join(missing)}"] if missing else [])


def used_by_others(seconds: float = 1.0) -> float | None:
    """Share of the machine's processor time that is used while this program waits; ``None`` where nothing tells."""

    def read() -> tuple[int, int]:
        ticks = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]

    try:
        total, idle = read()
        time.sleep(seconds)
        later, idle_later = read()
    except OSError:
        return None
    return 1.0 - (idle_later - idle) / max(later - total, 1)


def busy(shares: Sequence[float | None]) -> str:
    """What other programs used of the machine before each group, as a line for the head of the tables."""
    known = [share for share in shares if share is not None]
    if not known:
        return "What other programs did meanwhile is not known on this system"
    judged = "A BUSY MACHINE, whose figures have more noise than the targets allow" if max(known) > BUSY else "quiet"
    return f"Other programs used up to {max(known):.0%} of the processor time before a group: {judged}"


def write(options: argparse.Namespace, head: list[str], sections: list[Section]) -> None:
    """Write the files that were asked for, with what has been measured so far."""
    if options.json:
        data = {"conditions": head, "sections": [report.record(section) for section in sections]}
        options.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    if options.markdown:
        blocks = ["\n".join(f"- {line}" for line in head), *map(report.markdown, sections)]
        options.markdown.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description="Medians and ratios, side by side.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; none means all")
    parser.add_argument("--quick", action="store_true", help="a few rounds: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and all samples")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--here", action="store_true", help="in this interpreter, with the peers that it has")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.groups) - set(GROUPS))
    if unknown:
        parser.error(f"there is no group {unknown[0]!r}; there are {', '.join(GROUPS)}")
    head = conditions()
    print("\n".join(head), flush=True)
    shares = []
    sections: list[Section] = []
    groups = options.groups or GROUPS
    if options.quick:
        import_engines(groups)
    for group in groups:
        measure = globals()[f"measure_{group}"]
        shares.append(used_by_others())
        for section in measure(options.quick):
            sections.append(section)
            print("\n" + report.text(section), flush=True)
            # At once: what fails later takes nothing along.
            write(options, [*head, busy(shares)], sections)
    print("\n" + busy(shares), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
