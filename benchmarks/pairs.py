"""Measure several contenders in one process so that the machine's moods cancel out.

Blocks of a few milliseconds alternate; each round runs every contender once, in an order that rotates and turns round.
A contender is compared with the first one *within* a round, and the median of these differences is what counts: load
from elsewhere lasts longer than a round, so it hits both sides.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Block = Callable[[], object]
Meter = Callable[[Block], tuple[float, float]]


@dataclass(frozen=True)
class Samples:
    """Seconds per unit (step, batch, call), one per round; or bytes.

    Args:
        cpu: of this process's threads, or of its child for programs that were started.
        wall: on the clock.
        memory: instead of both, bytes at the peak.
    """

    cpu: list[float]
    wall: list[float]
    memory: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """A contender beside the best bare one.

    Args:
        median: seconds per unit, or bytes.
        more: median over the rounds of (this - bare), likewise.
        low: lower quartile of the same.
        high: upper quartile of the same.
        ratio: median over the rounds of (this / bare).
    """

    median: float
    more: float
    low: float
    high: float
    ratio: float


def here(block: Block) -> tuple[float, float]:
    """CPU and wall seconds of a block in this process, all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    block()
    return time.process_time() - cpu, time.perf_counter() - wall


def children(block: Block) -> tuple[float, float]:
    """CPU seconds of the programs that a block starts and waits for, and wall seconds."""
    wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    block()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.perf_counter() - wall


def alternate(
    blocks: Mapping[str, Block], *, units: int, rounds: int, warmup: int = 2, meter: Meter = here
) -> dict[str, Samples]:
    """Run the blocks in turn. With several ranks every rank calls this likewise, so that they stay in step.

    Args:
        blocks: what each contender does, by name.
        units: steps, batches or calls in a block.
        rounds: how often each block runs.
        warmup: rounds that do not count.
        meter: measures a block.
    """
    names = list(blocks)
    found = {name: Samples([], []) for name in names}
    for name in names * warmup:
        meter(blocks[name])
    # What the set-up left behind is not searched again for each contender's garbage.
    gc.collect()
    gc.freeze()
    for turn in range(rounds):
        start = turn % len(names)
        order = names[start:] + names[:start]
        for name in order if turn // len(names) % 2 == 0 else reversed(order):
            cpu, wall = meter(blocks[name])
            found[name].cpu.append(cpu / units)
            found[name].wall.append(wall / units)
    return found


def best(found: Mapping[str, Samples], clock: str, bare: Sequence[str] = ()) -> str:
    """Name of the contender that the others are compared with: the first, or one of ``bare`` that is faster."""
    names = [next(iter(found)), *(name for name in bare if name in found)]
    return min(names, key=lambda name: statistics.median(getattr(found[name], clock)))


def compare(found: Mapping[str, Samples], clock: str, bare: Sequence[str] = ()) -> dict[str, Comparison]:
    """Each contender beside the :func:`best` bare one, by ``"cpu"``, ``"wall"`` or ``"memory"``."""
    series: dict[str, list[float]] = {name: getattr(samples, clock) for name, samples in found.items()}
    reference = series[best(found, clock, bare)]
    compared = {}
    for name, values in series.items():
        differences = [mine - other for mine, other in zip(values, reference, strict=True)]
        low, high = differences[0], differences[0]
        if len(differences) > 1:
            low, _, high = statistics.quantiles(differences, n=4, method="inclusive")
        ratios = [mine / other for mine, other in zip(values, reference, strict=True)]
        compared[name] = Comparison(
            statistics.median(values), statistics.median(differences), low, high, statistics.median(ratios)
        )
    return compared
