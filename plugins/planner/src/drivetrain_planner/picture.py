"""Draws what a rank holds under each layout, by part, as a picture. Needs matplotlib, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.api import UsageError
from drivetrain.api.programs import pictures, pip_line
from drivetrain_planner.choosing import SHARE, Candidate, Choice, gib
from drivetrain_planner.report import as_time, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that people who tell red from green badly can tell apart (Okabe and Ito); other parts take the rest in order.
COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#d55e00",
    "optimizer states": "#009e73",
    "activations": "#e69f00",
    "gathered": "#56b4e9",
}
REST = ("#cc79a7", "#f0e442", "#5e4fa2", "#a6761d", "#3b3b3b")
CONTEXT = "#bdbdbd"
ALLOCATOR = "#f0f0f0"


def write(layouts: Sequence[Candidate], choice: Choice, path: Path) -> None:
    """Draw a bar for each layout, the line that no plan may pass, and the end of a device's memory.

    Args:
        layouts: from the top; refused ones have nothing to draw and are left out.
        choice: they are of.
        path: its suffix decides the format.

    Raises:
        UsageError: matplotlib is not installed, there is nothing to draw, or the file cannot be written so.
    """
    pictures.check(path, pip_line("planner", "plot"), "--explain draws bars of characters.")
    shown = [each for each in layouts if not each.estimate.refused]
    if not shown:
        raise UsageError("there is no layout to draw: each is refused", cure="Read why without --plot.")
    figure = pictures.figure(9.0, 2.0 + 0.5 * len(shown))
    axes = figure.add_subplot()
    unit, scale = _unit(choice.machine.memory)
    colours = _draw(axes, shown, choice, scale)
    _decorate(axes, shown, choice, unit, scale)
    handles = _legend(colours, any(each.unused for each in shown))
    figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    pictures.save(figure, path)


def _unit(size: int) -> tuple[str, int]:
    """The unit in which a device's memory is a number from 1, and its bytes."""
    return next((each for each in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if size >= each[1]), ("bytes", 1))


def _draw(axes: Axes, shown: Sequence[Candidate], choice: Choice, scale: int) -> dict[str, str]:
    """The bars; returns the colour of each part, in the order in which they are stacked."""
    parts = dict.fromkeys((*COLOURS, *(part for each in shown for part in each.estimate.memory)))
    rest = cycle(REST)
    colours = {part: COLOURS[part] if part in COLOURS else next(rest) for part in parts}
    colours["context"] = CONTEXT
    used: dict[str, str] = {}
    for row, each in enumerate(shown):
        memory = {**each.estimate.memory, "context": choice.machine.context}
        begin = 0.0
        for part, colour in colours.items():
            size = memory.get(part, 0) / scale
            if size:
                axes.barh(row, size, left=begin, height=0.7, color=colour, edgecolor="white", linewidth=0.6)
                used[part] = colour
                begin += size
        if each.unused:
            outline: dict[str, Any] = {"color": ALLOCATOR, "edgecolor": "#8c8c8c", "linewidth": 0.6, "hatch": "////"}
            axes.barh(row, each.unused / scale, left=begin, height=0.7, **outline)
    return {part: colour for part, colour in colours.items() if part in used}


def _decorate(axes: Axes, shown: Sequence[Candidate], choice: Choice, unit: str, scale: int) -> None:
    memory = choice.machine.memory
    allowed, most = SHARE * memory / scale, max(each.bytes + each.unused for each in shown) / scale
    # A bar far beyond the device, or a device far larger than any bar, must not squeeze the others out of sight.
    right = 1.08 * max(most, allowed if allowed < 3 * most else 0)
    axes.set_xlim(0, right)
    top: dict[str, Any] = {"fontsize": 8, "va": "bottom", "transform": axes.get_xaxis_transform()}
    ends_here = memory / scale <= right
    if allowed <= right:
        axes.axvline(allowed, color="black", linewidth=1.0, linestyle="--")
        limit = f"{SHARE:.0%} of {gib(memory)}: no plan passes it "
        axes.text(allowed, 1.0, limit, ha="right" if ends_here else "center", **top)
    if ends_here:
        axes.axvline(memory / scale, color="black", linewidth=1.0)
        axes.text(memory / scale, 1.0, " all", ha="left", **top)
    if allowed > right:
        axes.text(right, 1.0, f"{SHARE:.0%} of {gib(memory)} lies beyond", ha="right", **top)
    axes.set_title(f"{title(choice)}\n", fontsize=10, loc="left")
    labels = [f"{'-> ' if choice.fitting and each is choice.fitting[0] else ''}{each.estimate.title}" for each in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(f"the most that a rank holds in a step ({unit}); -> the layout to take", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    ends = axes.secondary_yaxis("right")
    verdicts = ["does not fit" if each.verdict else f"{as_time(each.time)} a step" for each in shown]
    told = [f"{gib(each.bytes)}, {verdict}" for each, verdict in zip(shown, verdicts, strict=True)]
    ends.set_yticks(range(len(shown)), told, fontsize=8)
    ends.tick_params(axis="y", length=0)
    ends.spines["right"].set_visible(False)


def _legend(colours: dict[str, str], allocator: bool) -> list[object]:
    from matplotlib.patches import Patch

    patches: list[object] = [Patch(color=colour, label=part) for part, colour in colours.items()]
    if allocator:
        patches.append(Patch(facecolor=ALLOCATOR, edgecolor="#8c8c8c", hatch="////", label="the allocator may keep"))
    return patches
