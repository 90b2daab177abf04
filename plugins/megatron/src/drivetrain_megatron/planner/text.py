"""Draws a schedule as text: one row for each rank, columns are time. No torch."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor

from drivetrain_megatron.planner.simulate import Bar, Timeline

FILL = {"F": ">", "B": "<", "I": "<", "W": "="}
"""Fill character of a bar after its label: the direction of the data flow."""

LEGEND = """F forward, B backward, I backward for the input, W for the weights, each with its micro-batch;
small letters: a rank's later stages; . idle"""
MOST_COLUMNS = 2000
"""Maximum width of a drawing; a longer one is drawn with narrower bars."""

Paint = Callable[[str, Bar], str]


def label(bar: Bar) -> str:
    """Return what stands in a bar: kind and micro-batch; small for a rank's second and later stages."""
    kind = bar.action.kind if bar.chunk == 0 else bar.action.kind.lower()
    return f"{kind}{bar.action.micro_batch}"


def columns_per_unit(timeline: Timeline, room: int) -> float:
    """Return a scale at which every bar has room for its label, with a gap unless ``room`` is short of that."""
    bars = [bar for bars in timeline.bars for bar in bars if bar.end > bar.start]
    tight = max(len(label(bar)) / (bar.end - bar.start) for bar in bars)
    loose = max((len(label(bar)) + 1) / (bar.end - bar.start) for bar in bars)
    fitting = room / timeline.duration
    return min(max(tight, min(loose, fitting)) if tight <= fitting else loose, MOST_COLUMNS / timeline.duration)


def draw(timeline: Timeline, *, width: int = 100, scale: float | None = None, paint: Paint | None = None) -> str:
    """Return the drawing, in several blocks of rows below each other when it is wider than ``width`` columns.

    Args:
        timeline: what to draw.
        width: of a line, the rank's name included.
        scale: columns for one unit of time; ``None`` = :func:`columns_per_unit`.
        paint: gets each piece of a bar and the bar, returns it with colours that take no columns.
    """
    names = [f"rank {rank}" for rank in range(len(timeline.bars))]
    margin = max(map(len, names)) + 1
    room = max(width - margin, 10)
    scale = columns_per_unit(timeline, room) if scale is None else scale
    rows = [_row(bars, timeline.duration, scale) for bars in timeline.bars]
    total = len(rows[0])
    # Blocks of one length: a last one of three columns says nothing.
    length = ceil(total / ceil(total / room))
    blocks = []
    for start in range(0, total, length):
        pieces = [_piece(row[start : start + length], paint) for row in rows]
        blocks.append("\n".join(f"{name:<{margin}}{piece}" for name, piece in zip(names, pieces, strict=True)))
    return "\n\n".join(blocks)


Cell = tuple[str, Bar | None]


def _row(bars: tuple[Bar, ...], duration: float, scale: float) -> list[Cell]:
    """Return a rank's cells, one for each column of the whole drawing."""
    cells: list[Cell] = [(".", None)] * _column(duration, scale)
    for bar in bars:
        start, end = _column(bar.start, scale), _column(bar.end, scale)
        text = label(bar) if len(label(bar)) <= end - start else label(bar)[: end - start]
        body = text + FILL[bar.action.kind] * (end - start - len(text))
        cells[start:end] = [(letter, bar) for letter in body]
    return cells


def _column(time: float, scale: float) -> int:
    """Return the column of a time; bars that are adjacent in time are adjacent here."""
    return floor(time * scale + 0.5)


def _piece(cells: list[Cell], paint: Paint | None) -> str:
    """Return a stretch of a row as text, painted bar by bar."""
    text, run, owner = "", "", None
    for letter, bar in [*cells, ("", None)]:
        if bar is not owner or not letter:
            text += paint(run, owner) if paint and owner else run
            run, owner = "", bar
        run += letter
    return text
