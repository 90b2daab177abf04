"""Reports a choice as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import yaml

from drivetrain.api.programs import get_registry
from drivetrain_planner.choosing import GROUP, SHARE, Candidate, Choice, gib, offered_axes
from drivetrain_planner.estimates import PlanRequest

RUNNERS_UP = 3


def lines(choice: Choice, *, explain: bool = False) -> list[str]:
    """The chosen layout, the next ones, and what rejected each other one."""
    request = choice.request
    precision = "no mixed precision" if request.precision.name == "no" else request.precision.name
    samples = f"{request.micro_batch} samples in a micro-batch, {request.global_batch} in a step"
    found = [
        title(choice),
        f"{samples}, {precision}, {request.optimizer.name}",
        "",
    ]
    shown = choice.fitting[: RUNNERS_UP + 1]
    if shown:
        rows = [("", "layout", "a rank's most", "when", "a step", "micro-batches")]
        rows += [
            (
                "->" if each is shown[0] else "",
                each.estimate.title,
                gib(each.bytes),
                each.estimate.moment,
                as_time(each.time),
                str(each.estimate.accumulation),
            )
            for each in shown
        ]
        found += [*table(rows), *_of_host(shown[0], choice), ""]
    if choice.rejected:
        found += [f"not {each.estimate.title}: {each.verdict}" for each in choice.rejected]
        found.append("")
    if explain:
        for each in shown:
            found += [*explained(each, choice), ""]
        found += [*scope(), ""]
    found += [f"warning: {complaint}" for complaint in choice.complaints]
    found.append(
        "Memory is counted, kernels' own workspace and fragmentation aside; seconds rank layouts and promise nothing."
    )
    return found


def _of_host(best: Candidate, choice: Choice) -> list[str]:
    """Return the host memory that a chosen layout takes."""
    each = sum(best.estimate.host.values())
    if not each:
        return []
    machine = gib(each * choice.request.ranks_per_node)
    told = [f"{best.estimate.title} needs {gib(each)} of host memory for each rank, {machine} on a machine."]
    if best.estimate.last_resort:
        instead = _instead(choice.request)
        told.insert(0, f"Nothing fits without offload, whose steps are slow; {instead} may fit without.")
    return told


def _instead(request: PlanRequest) -> str:
    """Return advice on layouts without offload."""
    found = ["more or larger devices"]
    found += ["a smaller micro-batch"] if request.micro_batch > 1 else []
    found += ["bf16"] if request.precision.name == "no" else []
    return ", ".join(found[:-1]) + (" or " if found[:-1] else "") + found[-1]


def title(choice: Choice) -> str:
    """The model and the devices."""
    request, machine = choice.request, choice.machine
    devices = f"{request.world_size} x {machine.name} with {gib(machine.memory)} each"
    return f"{type(request.model).__name__}, {_parameters(choice)} parameters, on {devices}"


def explained(candidate: Candidate, choice: Choice) -> list[str]:
    """One layout's memory and time by part, with bars."""
    parts = {**candidate.estimate.memory, "context": choice.machine.context}
    whole = max(choice.machine.memory, candidate.bytes)
    rows = [
        (f"  {part}", gib(size), "#" * round(40 * size / whole))
        for part, size in sorted(parts.items(), key=lambda each: -each[1])
        if size
    ]
    times = ", ".join(f"{part} {as_time(value)}" for part, value in candidate.seconds.items())
    remarks = [f"  {remark}" for remark in candidate.estimate.remarks]
    if candidate.unused:
        remarks.insert(
            0, f"  and {gib(candidate.unused)} that the allocator may keep beside these, from the free fifth"
        )
    if candidate.estimate.host:
        host = ", ".join(f"{part} {gib(size)}" for part, size in candidate.estimate.host.items())
        remarks.insert(0, f"  and in host memory {gib(sum(candidate.estimate.host.values()))} of each rank: {host}")
    return [f"{candidate.estimate.title}, in the {candidate.estimate.moment}: {times}", *table(rows), *remarks]


def scope() -> list[str]:
    """Return the scope of a plan with the installed backends: what it counts, and what it does not."""
    registry = get_registry()
    estimating = {point.name for point in entry_points(group=GROUP)}
    silent = sorted(set(registry.names()) - estimating)
    found = [
        "counted: parameters, buffers, gradients, optimizer states, activations, what engines gather, reduce and send",
        "not counted: what kernels allocate inside of themselves, and what gathers leave in an accelerator's cache",
    ]
    if silent:
        found.append(f"not asked: {', '.join(silent)}, which give{'s' * (len(silent) == 1)} no estimates")
    if "cp" not in offered_axes():
        found.append("not offered: context parallelism, since no installed backend has the mesh axis cp")
    return [*found, "not offered: expert parallelism, since a mesh has no axis for experts"]


def memory_lines(choice: Choice) -> list[str]:
    """One line a layout, whether it fits or not."""
    found = table([_HEAD, *(_row(each, choice) for each in by_rank(choice))])
    found += [f"not {each.estimate.title}: {each.verdict}" for each in choice.rejected if each.estimate.refused]
    return found


def by_rank(choice: Choice) -> list[Candidate]:
    """All layouts but the refused ones, the simplest first."""
    every = sorted((*choice.fitting, *choice.rejected), key=lambda one: one.estimate.rank)
    return [each for each in every if not each.estimate.refused]


def less_lines(own: Candidate, choice: Choice) -> list[str]:
    """Return lines on the memory of a layout, and on layouts that hold less, the fullest first.

    Args:
        own: the layout that had too little memory.
        choice: all layouts for the same model, machine and samples.
    """
    others = [*choice.fitting, *choice.rejected]
    less = [each for each in others if not each.estimate.refused and each.bytes < own.bytes]
    less.sort(key=lambda each: -each.bytes)
    rows = [("", *_HEAD), ("->", *_row(own, choice)), *(("", *_row(each, choice)) for each in less)]
    request = choice.request
    device = f"{choice.machine.name} ({gib(choice.machine.memory)} each, of which a plan may use {SHARE:.0%})"
    samples = f"{request.micro_batch} samples in a micro-batch on {request.world_size} x {device}"
    told = [f"What a rank holds at its most, predicted for {samples}; this run is ->:", *table(rows)]
    fastest = next((each for each in choice.fitting if each in less), None)
    if fastest is not None:
        written = yaml.safe_dump(dict(fastest.estimate.settings), default_flow_style=True, width=1000).strip()
        told.append(f"{fastest.estimate.title} is the fastest that fits; write it as {written[1:-1]}")
    elif less:
        told.append("The others hold less, and none of them fits: a smaller micro-batch, bf16 or more devices, too.")
    else:
        told.append("No other layout holds less: take a smaller micro-batch, bf16, or more devices.")
    return told


_HEAD = ("layout", "parameters", "gradients", "optimizer", "activations", "other", "all", "when", "fits")


def _row(one: Candidate, choice: Choice) -> tuple[str, ...]:
    memory = dict(one.estimate.memory)
    shown = [memory.pop(part, 0) for part in ("parameters", "gradients", "optimizer states", "activations")]
    other = sum(memory.values()) + choice.machine.context
    cells = [gib(size) for size in (*shown, other, one.bytes)]
    return one.estimate.title, *cells, one.estimate.moment, "no" if one.verdict else "yes"


def data(choice: Choice) -> dict[str, Any]:
    """Return the choice as JSON data."""
    return {
        "machine": choice.machine.name,
        "world_size": choice.request.world_size,
        "fitting": [_candidate(each) for each in choice.fitting],
        "rejected": [_candidate(each) for each in choice.rejected],
        "complaints": list(choice.complaints),
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "title": one.estimate.title,
        "backend": one.estimate.backend,
        "settings": dict(one.estimate.settings),
        "bytes": one.bytes,
        "memory": dict(one.estimate.memory),
        "resident": dict(one.estimate.resident),
        "host": dict(one.estimate.host),
        "moment": one.estimate.moment,
        "allocator": one.unused,
        "seconds": one.seconds,
        "last_resort": one.estimate.last_resort,
        "verdict": one.verdict,
    }


def _parameters(choice: Choice) -> str:
    count = sum(one.numel() for one in choice.request.model.parameters())
    for unit, power in (("B", 9), ("M", 6), ("k", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.2f}{unit}"
    return str(count)


def as_time(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
