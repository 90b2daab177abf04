"""A schedule drawn as a picture, PNG or SVG or whatever else matplotlib writes. Needs matplotlib, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.api.programs import pictures, pip_line
from drivetrain_megatron.planner.simulate import Bar, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that are distinct for red-green colour-blind readers (Okabe and Ito), and a lighter one for later stages.
COLOURS = {
    "F": ("#56b4e9", "#b3dcf4"),
    "B": ("#009e73", "#8fd6bf"),
    "I": ("#e69f00", "#f5d48a"),
    "W": ("#cc79a7", "#e8c3d7"),
}
NAMES = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
IDLE = "#eeeeee"

# In inches: what a label of two characters needs, and how wide a picture may become before labels are left out.
LABEL_WIDTH, WIDEST = 0.17, 24.0
# Narrower pictures set their legend in two lines.
WIDE_LEGEND = 9.0


def write(timeline: Timeline, path: Path, *, title: str, unit: str = "") -> None:
    """Draw rows for ranks, columns for time; idle time is grey, its share stands at the end of each row.

    Args:
        timeline: what to draw.
        path: its suffix decides the format.
        title: one or two lines.
        unit: of the time axis; empty for that of the costs.

    Raises:
        UsageError: matplotlib is not installed, or cannot write this kind of file or to this place.
    """
    pictures.check(path, pip_line("megatron", "plot"), "The drawing on the terminal needs nothing.")
    shortest = min(bar.end - bar.start for bars in timeline.bars for bar in bars if bar.end > bar.start)
    width = min(max(7.0, timeline.duration / shortest * LABEL_WIDTH + 2.5), WIDEST)
    figure = pictures.figure(width, 1.5 + 0.38 * len(timeline.bars))
    axes = figure.add_subplot()
    inches_per_unit = (width - 2.5) / timeline.duration
    for rank, bars in enumerate(timeline.bars):
        axes.barh(rank, timeline.duration, height=0.86, color=IDLE, linewidth=0)
        for bar in bars:
            _draw_bar(axes, bar, labelled=(bar.end - bar.start) * inches_per_unit >= LABEL_WIDTH * 0.8)
    _decorate(figure, axes, timeline, title, unit)
    pictures.save(figure, path)


def _draw_bar(axes: Axes, bar: Bar, *, labelled: bool) -> None:
    colour = COLOURS[bar.action.kind][min(bar.chunk, 1)]
    axes.barh(
        bar.rank, bar.end - bar.start, left=bar.start, height=0.86, color=colour, edgecolor="white", linewidth=0.8
    )
    if labelled:
        centre: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": "black"}
        axes.text((bar.start + bar.end) / 2, bar.rank, str(bar.action.micro_batch), **centre)


def _decorate(figure: Figure, axes: Axes, timeline: Timeline, title: str, unit: str) -> None:
    from matplotlib.patches import Patch

    axes.set_title(title, fontsize=10, loc="left")
    axes.set_yticks(range(len(timeline.bars)), [f"rank {rank}" for rank in range(len(timeline.bars))], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.duration)
    axes.set_xlabel(f"time ({unit or 'in the unit of the costs'}); the numbers are micro-batches", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(timeline.bars)), [f"{share:.1%} idle" for share in timeline.idle], fontsize=8)
    right.tick_params(axis="y", length=0)
    right.spines["right"].set_visible(False)
    bars = [bar for row in timeline.bars for bar in row]
    shown = sorted({bar.action.kind for bar in bars}, key="FBIW".index)
    patches = [Patch(color=COLOURS[kind][0], label=NAMES[kind]) for kind in shown]
    if any(bar.chunk for bar in bars):
        patches.append(Patch(color=COLOURS["F"][1], label="lighter: a later stage of the rank"))
    patches.append(Patch(color=IDLE, label="idle"))
    columns = 3 if figure.get_figwidth() < WIDE_LEGEND else 6
    figure.legend(handles=patches, loc="outside lower left", ncols=columns, fontsize=8, frameon=False)
