"""Draws the curves of runs, a panel for each logged value, the runs beside each other. Needs matplotlib, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.api import UsageError
from drivetrain.api.programs import pictures, pip_line
from drivetrain_trackers.curves import SPEED, Curve, Run, with_speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("-", "--", ":", "-.")
"""Line styles of runs, if there are more runs than colours."""

DECADES = 2
"""A panel whose values span this many powers of ten, none of them negative, is drawn on a logarithmic scale."""

MARKED = 40
"""A curve of at most this many values shows a mark for each."""

WIDTH, WIDER, WIDEST = 1.3, 1.8, 8.5
"""Width of a line in points, its increment for each later curve that would hide it, and the largest width."""

SAME = 1e-3
"""Values lie on each other where they differ by less than this part of them, on either scale."""


def write(
    runs: Sequence[Run],
    path: Path,
    *,
    metrics: Sequence[str] = (),
    over: str = "step",
    scale: str = "auto",
    smooth: int = 1,
) -> list[str]:
    """Draw a panel for each logged value, with a line for each run that logged it, and return the panels' names.

    Args:
        runs: their names stand in the legend.
        path: its suffix decides the format.
        metrics: which values, in this order; all of them by default, losses first and speed last.
        over: ``"step"``, or ``"time"`` for minutes since each run's first value.
        scale: of the values: ``"linear"``, ``"log"``, or ``"auto"``, which is ``"log"`` where none of a panel's
            values is negative and they span a factor of 100.
        smooth: draw means over this many neighbouring values, with the values themselves pale behind them; a curve of
            fewer than four times as many is drawn as it is.

    Raises:
        UsageError: matplotlib is not installed, no run logged one of ``metrics``, nothing was logged at all, or the
            file cannot be written so.
    """
    pictures.check(path, pip_line("plot"))
    curves = [with_speed(run.curves) for run in runs]
    names = _chosen(list(dict.fromkeys(name for each in curves for name in each)), metrics)
    columns = 2 if len(names) == 4 else min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure = pictures.figure(4.2 * columns if columns > 1 else 6.4, 0.6 + 2.9 * rows)
    styles = [{"color": colour, "linestyle": style} for style in STYLES for colour in pictures.COLOURS]
    looks: list[dict[str, Any]] = list(islice(cycle(styles), len(runs)))
    for place, name in enumerate(names, start=1):
        axes = figure.add_subplot(rows, columns, place, sharex=figure.axes[0] if figure.axes else None)
        shown = [(each[name], look) for each, look in zip(curves, looks, strict=True) if name in each]
        for number, (curve, look) in enumerate(shown):
            hidden = sum(_lie_on_each_other(curve, later) for later, _ in shown[number + 1 :])
            _draw(axes, curve, look, over=over, smooth=smooth, width=min(WIDTH + WIDER * hidden, WIDEST))
        _decorate(axes, name, [curve for curve, _ in shown], over=over, scale=scale)
    _legend(figure, [run.name for run in runs], looks)
    pictures.save(figure, path)
    return names


def _chosen(logged: list[str], metrics: Sequence[str]) -> list[str]:
    """Names of panels in their order."""
    if not logged:
        raise UsageError("these runs logged no numbers", cure="Call accelerator.log({...}, step=n) while they train.")
    for name in metrics:
        if name not in logged:
            raise UsageError(f"no run logged {name!r}", cure=f"There are: {', '.join(logged)}.")
    return list(metrics) or sorted(logged, key=lambda name: 0 if "loss" in name.lower() else 2 if name == SPEED else 1)


def _lie_on_each_other(one: Curve, other: Curve) -> bool:
    """Whether a picture shows one line for two curves."""
    if one.steps != other.steps:
        return False
    pairs = zip(one.values, other.values, strict=True)
    return all(math.isclose(*pair, rel_tol=SAME) or all(map(math.isnan, pair)) for pair in pairs)


def _draw(axes: Axes, curve: Curve, look: dict[str, Any], *, over: str, smooth: int, width: float = WIDTH) -> None:
    places = curve.steps if over == "step" else [(time - curve.times[0]) / 60 for time in curve.times]
    mark = "o" if len(places) <= MARKED else ""
    if 1 < smooth <= len(places) // 4:
        axes.plot(places, curve.values, color=look["color"], linewidth=0.6, alpha=0.3)
        axes.plot(places, _means(curve.values, smooth), linewidth=width, **look)
    else:
        axes.plot(places, curve.values, linewidth=width, marker=mark, markersize=width + 1.7, **look)
    for place, value in zip(places, curve.values, strict=True):
        if not math.isfinite(value):
            axes.axvline(place, color=look["color"], linewidth=0.8, linestyle=":")
            # The first alone: where a run diverges, thousands follow.
            where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top"}
            axes.annotate(str(value), (place, 1), fontsize=7, color=look["color"], **where)
            break


def _means(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and of its neighbours, as many before as behind; at the ends of those that there are."""
    half = width // 2
    windows = (values[max(0, place - half) : place + half + 1] for place in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _decorate(axes: Axes, name: str, curves: Sequence[Curve], *, over: str, scale: str) -> None:
    from matplotlib.ticker import MaxNLocator

    finite = [value for curve in curves for value in curve.values if math.isfinite(value)]
    above = [value for value in finite if value > 0]
    wide = bool(above) and min(finite) >= 0 and max(above) >= 10**DECADES * min(above)
    if scale == "log" or (scale == "auto" and wide):
        # A value that such a scale has no place for leads the line out at the bottom, in place of a gap.
        axes.set_yscale("log", nonpositive="clip")
    axes.set_title(name, fontsize=10, loc="left")
    axes.set_xlabel("step" if over == "step" else "minutes", fontsize=8)
    if over == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, names: Sequence[str], looks: Sequence[dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **look) for look in looks]
    figure.legend(lines, list(names), loc="outside lower left", ncols=4, fontsize=8, frameon=False)
