"""The table: rows of contenders beside the bare one, as text, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import peers
from benchmarks.pairs import Comparison, Samples, best, compare

UNITS = {"us": 1e6, "ms": 1e3, "MB": 1e-6}
CLOCKS = {"cpu": "CPU", "wall": "wall", "memory": "peak"}


@dataclass(frozen=True)
class Target:
    """A promise about one contender.

    Args:
        kind: ``"more"`` bounds the difference from the bare one, ``"ratio"`` the ratio, ``"total"`` the median.
        bound: in the section's unit.
        contender: whose.
    """

    kind: str
    bound: float
    contender: str = peers.OURS


@dataclass(frozen=True)
class Section:
    """One measurement.

    Args:
        title: what was done.
        clock: ``"cpu"``, ``"wall"`` or ``"memory"``.
        unit: ``"us"``, ``"ms"`` or ``"MB"``, per ``per``.
        per: step, batch, call, start, rank.
        samples: of each contender, the one that the others are compared with first; none where it cannot be measured.
        target: what was promised, if anything.
        remarks: lines below the table, such as why a contender is missing.
        bare: contenders beside the first that are bare too; the fastest of all these is what others are compared with.
    """

    title: str
    clock: str
    unit: str
    per: str
    samples: Mapping[str, Samples]
    target: Target | None = None
    remarks: Sequence[str] = ()
    bare: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    """A line of the table: see :class:`~benchmarks.pairs.Comparison`; times in the section's unit."""

    name: str
    median: float
    more: float
    low: float
    high: float
    ratio: float
    target: str = ""
    met: bool | None = None


def rows(section: Section) -> list[Row]:
    """The lines of one section."""
    if not section.samples:
        return []
    factor = UNITS[section.unit]
    return [
        _row(name, found, factor, section)
        for name, found in compare(section.samples, section.clock, section.bare).items()
    ]


def _row(name: str, found: Comparison, factor: float, section: Section) -> Row:
    row = Row(name, found.median * factor, found.more * factor, found.low * factor, found.high * factor, found.ratio)
    target = section.target
    if target is None or target.contender != name:
        return row
    value = {"more": row.more, "ratio": row.ratio, "total": row.median}[target.kind]
    bound = f"{target.bound:g}" + ("" if target.kind == "ratio" else f" {section.unit}")
    words = {"more": f"at most +{bound}", "ratio": f"ratio at most {bound}", "total": f"at most {bound}"}[target.kind]
    return replace(row, target=words, met=value <= target.bound)


def cells(section: Section) -> list[list[str]]:
    """Lines as words: name, median, more, spread, ratio, target."""
    lines = []
    reference = best(section.samples, section.clock, section.bare) if section.samples else ""
    for row in rows(section):
        verdict = "" if row.met is None else f"{row.target}: {'met' if row.met else 'MISSED'}"
        beside = ["", "", ""]
        if row.name != reference:
            spread = f"{_number(row.low, '+')} to {_number(row.high, '+')}"
            beside = [_number(row.more, "+"), spread, f"{row.ratio:.2f}"]
        lines.append([row.name, _number(row.median), *beside, verdict])
    return lines


def _number(value: float, sign: str = "-") -> str:
    digits = 0 if abs(value) >= 1000 else 1
    return f"{value:{sign}.{digits}f}"


def header(section: Section) -> list[str]:
    """Column names."""
    measured = f"{CLOCKS[section.clock]} {section.unit} per {section.per}"
    return ["contender", measured, "more than bare", "quartiles", "ratio", "target"]


def text(section: Section) -> str:
    """For a terminal."""
    lines = [header(section), *cells(section)]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    shown = [section.title]
    for line in lines if section.samples else []:
        name, *numbers, verdict = line
        middle = "  ".join(word.rjust(width) for word, width in zip(numbers, widths[1:5], strict=True))
        shown.append(f"  {name.ljust(widths[0])}  {middle}  {verdict}".rstrip())
    return "\n".join(shown + [f"  {remark}" for remark in section.remarks])


def markdown(section: Section) -> str:
    """For RESULTS.md."""
    lines = [f"### {section.title}"]
    if section.samples:
        lines += ["", "| " + " | ".join(header(section)) + " |", "|---|--:|--:|--:|--:|---|"]
        lines += ["| " + " | ".join(line) + " |" for line in cells(section)]
    for remark in section.remarks:
        lines += ["", remark]
    return "\n".join(lines)


def record(section: Section) -> dict[str, Any]:
    """For ``--json``: the rows and every sample in seconds."""
    return {
        "title": section.title,
        "clock": section.clock,
        "unit": section.unit,
        "per": section.per,
        "remarks": list(section.remarks),
        "rows": [asdict(row) for row in rows(section)],
        "samples": {name: asdict(samples) for name, samples in section.samples.items()},
    }
