"""Draws what ``drivetrain test --plot`` found: which samples each rank reads, and what it holds. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

OTHERS = "the engine's buffers"

COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#d55e00",
    "optimizer states": "#009e73",
    OTHERS: "#bdbdbd",
}
"""Colours of the parts, in stacking order; the first as in the planner's picture of memory."""

STEPS = ("#9ecae1", "#fdd0a2", "#a1d99b", "#dadaeb")
"""Colours of the batches, light, since each shows its number; further ones repeat them."""

AGAIN = "////"
"""Hatches samples that another data-parallel rank has read before."""

MEGABYTE = 1e6

BELOW = 32.0
"""Points between a panel's axis and its legend: room for the axis' numbers and name, however high the panel is."""

SMALLEST = 0.005
"""Minimum share of the largest rank's memory: parts that are smaller on each rank are not drawn."""


@dataclass(frozen=True)
class RankReport:
    """Data of one rank.

    Args:
        dp_rank: its data-parallel rank; ranks that share it read the same samples.
        coordinates: its place on each mesh axis that has more than one.
        batches: the numbers of the samples of each batch that it reads in an epoch.
        held: bytes, by part.
    """

    dp_rank: int
    coordinates: Mapping[str, int]
    batches: Sequence[Sequence[int]]
    held: Mapping[str, int]


def write(reports: Sequence[RankReport], path: Path, *, backend: str, settings: Sequence[str]) -> None:
    """Draw a row for each rank in two panels: samples and memory.

    Args:
        reports: by rank.
        path: its suffix decides the format.
        backend: what trained, for the title.
        settings: of the loader, for the title.

    Raises:
        UsageError: the file cannot be written.
    """
    figure = pictures.figure(9.0, 2.4 + 0.6 * len(reports))
    samples, memory = figure.subplots(2, 1)
    names = [_name(rank, report) for rank, report in enumerate(reports)]
    _draw_samples(samples, reports)
    title = f"Samples that each rank reads, with the number of its batch: {', '.join(settings)}"
    samples.set_title(title, fontsize=10, loc="left")
    samples.set_xlabel("sample", fontsize=8)
    _draw_memory(memory, reports)
    memory.set_title(f"What each rank holds between backward and step: {backend}", fontsize=10, loc="left")
    memory.set_xlabel("MB", fontsize=8)
    for axes in (samples, memory):
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    pictures.save(figure, path)


def _draw_samples(axes: Axes, reports: Sequence[RankReport]) -> None:
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    again = repeated(reports)
    last = max((number for report in reports for batch in report.batches for number in batch), default=0)
    for row, report in enumerate(reports):
        for step, batch in enumerate(report.batches):
            for start, length, repeat in _runs(batch, again[row][step]):
                # Repeated samples lie below the others, since a rank may read one of its own again.
                place, height = (row + 0.28, 0.24) if repeat else (row - 0.14, 0.56)
                look: dict[str, Any] = {"color": STEPS[step % len(STEPS)], "hatch": AGAIN if repeat else ""}
                axes.barh(place, length, left=start - 0.5, height=height, edgecolor="white", linewidth=1.0, **look)
                if repeat:  # beside its piece, which is often as narrow as the number
                    axes.text(start + length - 0.4, place, str(step + 1), fontsize=7, ha="left", va="center_baseline")
                else:
                    axes.text(start + (length - 1) / 2, place, str(step + 1), fontsize=8, ha="center", va="center")
    axes.set_xlim(-0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(map(any, (batch for rank in again for batch in rank))):
        told = "read once more, and weighs nothing: each rank takes part in every step"
        patch = Patch(facecolor=STEPS[0], edgecolor="white", hatch=AGAIN, label=told)
        _legend(axes, [patch])


def repeated(reports: Sequence[RankReport]) -> list[list[list[bool]]]:
    """Return for each rank, batch and sample whether a data-parallel rank has read the sample before.

    Before is in an earlier batch, or in the same one on a lower data-parallel rank.
    """
    first: dict[int, tuple[int, int]] = {}
    for report in reports:
        for step, batch in enumerate(report.batches):
            for number in batch:
                first[number] = min(first.get(number, (step, report.dp_rank)), (step, report.dp_rank))
    return [
        [[first[number] != (step, each.dp_rank) for number in batch] for step, batch in enumerate(each.batches)]
        for each in reports
    ]


def _runs(numbers: Sequence[int], again: Sequence[bool]) -> list[tuple[int, int, bool]]:
    """Samples as pieces of consecutive ones: the first, how many, and whether they are repeated."""
    runs: list[tuple[int, int, bool]] = []
    for number, repeat in zip(numbers, again, strict=True):
        if runs and (runs[-1][0] + runs[-1][1], runs[-1][2]) == (number, repeat):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, repeat)
        else:
            runs.append((number, 1, repeat))
    return runs


def _draw_memory(axes: Axes, reports: Sequence[RankReport]) -> None:
    from matplotlib.patches import Patch

    # Some engines allocate buckets of a fixed size, beside which a small model would not be seen.
    room = max(sum(size for part, size in report.held.items() if part != OTHERS) for report in reports)
    shown = [part for part in COLOURS if any(report.held.get(part, 0) >= SMALLEST * room for report in reports)]
    for row, report in enumerate(reports):
        begin = 0.0
        for part in shown:
            size = report.held.get(part, 0) / MEGABYTE
            cut = part == OTHERS and size > room / MEGABYTE
            length = room / MEGABYTE if cut else size
            axes.barh(row, length, left=begin, height=0.7, color=COLOURS[part], edgecolor="white", linewidth=0.6)
            if cut:
                axes.text(begin + length / 2, row, f"... {size:.1f} MB ...", ha="center", va="center", fontsize=8)
            begin += length
    ends = axes.secondary_yaxis("right")
    totals = [f"{sum(report.held.values()) / MEGABYTE:.1f} MB" for report in reports]
    ends.set_yticks(range(len(reports)), totals, fontsize=8)
    ends.tick_params(axis="y", length=0)
    ends.spines["right"].set_visible(False)
    patches = [Patch(color=COLOURS[part], label=part) for part in shown]
    _legend(axes, patches)


def _legend(axes: Axes, patches: Sequence[Patch]) -> None:
    from matplotlib.transforms import ScaledTranslation

    place = axes.transAxes + ScaledTranslation(0, -BELOW / 72, axes.figure.dpi_scale_trans)
    look: dict[str, Any] = {"loc": "upper left", "ncols": len(COLOURS), "fontsize": 8, "frameon": False}
    axes.legend(handles=patches, bbox_to_anchor=(0, 0), bbox_transform=place, borderaxespad=0, **look)


def _name(rank: int, report: RankReport) -> str:
    places = ", ".join(f"{axis} {place}" for axis, place in report.coordinates.items())
    return f"rank {rank}: {places}" if places else f"rank {rank}"
