"""Reads what runs logged: ``metrics.jsonl`` of the core's tracker, event files of TensorBoard. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.api import UsageError
from drivetrain_trackers.values import flat

SPEED = "steps per second"
"""A curve that no script logs: it follows from the steps and the times of all others."""

EVENTS = "events.out.tfevents."


@dataclass
class Curve:
    """One logged value.

    Attributes:
        steps: where each value stands; numbers of lines where a script logged without a step.
        times: when each was logged, in seconds since 1970.
        values: the numbers, ``nan`` and infinities among them.
    """

    steps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: float, time: float, value: float) -> None:
        """Add a value; those of the same and later steps are of a run that was resumed from before them, and go."""
        while self.steps and self.steps[-1] >= step:
            for each in (self.steps, self.times, self.values):
                each.pop()
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)


@dataclass(frozen=True)
class Run:
    """Logged values of one run.

    Attributes:
        name: as the picture calls it.
        path: its folder.
        curves: by the name that the script logged; of nested mappings ``group/name``.
    """

    name: str
    path: Path
    curves: dict[str, Curve]


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read all runs at or below some paths, in the order of the paths, those of one path by name.

    Args:
        paths: a file, a folder of a run, or a folder with runs at any depth below it.

    Raises:
        UsageError: a path is not there, holds no run, or a file in it cannot be read.
    """
    found: dict[Path, dict[str, Curve]] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {str(path)!r}", cure=_looked_for())
        before = len(found)
        for folder in _folders(path):
            if folder.resolve() not in found:
                found[folder.resolve()] = _curves(folder, path if path.is_file() else None)
            else:
                before -= 1
        if len(found) == before:
            raise UsageError(f"no run is at or below {str(path)!r}", cure=_looked_for())
    names = _names(list(found))
    return [Run(name, path, curves) for name, (path, curves) in zip(names, found.items(), strict=True)]


def with_speed(curves: dict[str, Curve]) -> dict[str, Curve]:
    """Add steps per second: at each logged step, over the last twentieth of the time, at least 50 ms.

    From one step to the next would show the resolution of the clock, and every pause of the machine.
    """
    seen: dict[float, float] = {}
    for curve in curves.values():
        for step, time in zip(curve.steps, curve.times, strict=True):
            seen[step] = min(time, seen.get(step, time))
    points = sorted(seen.items())
    if len(points) < 2:
        return dict(curves)
    span = max(0.05, (points[-1][1] - points[0][1]) / 20)
    speed, first = Curve(), 0
    for step, time in points[1:]:
        while first + 1 < len(points) and points[first + 1][1] <= time - span and points[first + 1][0] < step:
            first += 1
        begin, begun = points[first]
        if time - begun >= span:
            speed.add(step, time, (step - begin) / (time - begun))
    return {**curves, SPEED: speed} if speed.steps else dict(curves)


def _looked_for() -> str:
    return f"Name a folder with metrics.jsonl (log_with: jsonl) or {EVENTS}* (log_with: tensorboard), or one above."


def _folders(path: Path) -> Iterator[Path]:
    """Folders of runs. What lies below a run belongs to it: TensorBoard keeps groups of scalars in such folders."""
    if path.is_file():
        yield path.parent
        return
    for folder, below, files in os.walk(path):
        below.sort()
        if any(_is_log(each) for each in files):
            below.clear()
            yield Path(folder)


def _is_log(name: str) -> bool:
    return name == "metrics.jsonl" or name.startswith(EVENTS)


def _curves(folder: Path, file: Path | None) -> dict[str, Curve]:
    """All curves of a run; of one file of it where that is what was named."""
    if file is not None:
        return _of_events(file) if file.name.startswith(EVENTS) else _of_lines(file)
    curves: dict[str, Curve] = {}
    lines = folder / "metrics.jsonl"
    if lines.is_file():
        curves |= _of_lines(lines)
    for part in sorted({event.parent for event in folder.rglob(f"{EVENTS}*")}):
        group = part.relative_to(folder).as_posix()
        for tag, curve in _of_events(part).items():
            # `add_scalars("loss", {"train": ...})` writes the tag "loss" below a folder "loss_train".
            head = f"{tag.replace('/', '_')}_"
            inside = tag if group == "." else f"{tag}/{group.removeprefix(head)}"
            curves.setdefault(inside, curve)
    return curves


def _of_lines(file: Path) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            step, time = row.pop("step"), float(row.pop("time"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):
                break  # a run that writes it now, or that ended while it wrote it
            raise UsageError(
                f"line {number} of {str(file)!r} is none that the jsonl tracker writes",
                cure='It writes objects such as {"step": 1, "time": 0.5, "loss": 2}. Remove that line.',
            ) from error
        for name, value in flat(row, "/").items():
            if (plain := _plain(value)) is not None:
                curves.setdefault(name, Curve()).add(number if step is None else step, time, plain)
    return curves


def _plain(value: Any) -> float | None:
    """A number, also one that JSON writes as text; ``None`` for what no curve can hold."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _of_events(path: Path) -> dict[str, Curve]:
    """Scalars of one event file, or of all of a folder but those below it."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        from drivetrain.api.programs import pip_line

        raise UsageError(
            f"{str(path)!r} holds TensorBoard's files, and tensorboard is not installed",
            cure=f"Type: {pip_line('tensorboard')}",
        ) from error
    events = EventAccumulator(str(path), size_guidance={SCALARS: 0, TENSORS: 0})
    events.Reload()
    curves: dict[str, Curve] = {}
    for tag in events.Tags()[SCALARS]:
        for event in events.Scalars(tag):
            curves.setdefault(tag, Curve()).add(event.step, event.wall_time, event.value)
    for tag in events.Tags()[TENSORS]:  # what newer writers make of a scalar
        for event in events.Tensors(tag):
            value = make_ndarray(event.tensor_proto)
            if value.size == 1 and value.dtype.kind in "fiu":
                curves.setdefault(tag, Curve()).add(event.step, event.wall_time, float(value.reshape(())))
    return curves


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as distinguish all of them."""
    for parts in range(1, max((len(each.parts) for each in folders), default=0) + 1):
        names = ["/".join(each.parts[-parts:]) for each in folders]
        if len(set(names)) == len(names):
            return names
    return [str(each) for each in folders]
