"""Compares two records of the first steps of a script, for ``drivetrain compare``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.run_record import read_weights

_LOSS_TOLERANCE = 1e-5
_DATA_TOLERANCE = 1e-6
_ROUNDED = 4
"""Units in the last place of a weight by which two runs may round it differently in a step."""

DATA = (
    "The weights are the same before step {step}, and the step reads other numbers: {what}. Each process is given a "
    "share of a batch, and the shares are the batch of one process where the loader is prepared with split_batches, "
    "which this command sets unless the script or the configuration says otherwise. Samples that draw random numbers "
    "when they are read, or a sampler of the script's own, may give each process others."
)
FORWARD = (
    "Up to step {step} weights and data are the same, and in it the loss is {ours:.6g} instead of {theirs:.6g}. "
    "Something in the forward or in the loss depends on which rows a process has: a statistic of the batch (batch "
    "norm, x - x.mean(0), normalised weights, pairs of rows), a mean over some of the rows, or random numbers."
)
GRADIENTS = (
    "Up to step {step} weights, data and loss are the same, and the step leaves other weights. Look at what happens "
    "between the loss and the step: the loss may be a sum or be scaled by a number of this process, gradients may be "
    "read or changed by hand, the optimizer may keep something that differs between processes, or the configuration of "
    "one run alone has a setting of training, such as gradient_clipping in a section."
)
START = (
    "The weights differ before the first step. Call set_seed(...) before the model is made, so that every run begins "
    "with the same ones. A script that goes on from a checkpoint, if there is one, may have found that of the first "
    "run in the second."
)
BETWEEN = (
    "Up to step {step} the runs are the same; before it the weights were changed by other means than a step of a "
    "prepared optimizer, and differently. Look at what the script writes to parameters or buffers, and what it loads."
)
_ROUNDING = (
    "The script computes in {precision}, whose rounding alone may change weights by some hundredths of their change; "
    "Accelerator(mixed_precision='no') tells whether that is all."
)
_PAGE = (
    "The page 'One process and several' of the documentation lists what differs, and the line that means the same on "
    "both."
)


class Record(NamedTuple):
    """A record of a run: see :class:`drivetrain.run_record.RunRecord`.

    Args:
        folder: of it.
        steps: what each step read, and its loss.
        name: of the run, for people.
        precision: in which it computed.
        buffers: names of the weights that are buffers.
        failed: the launch ended with another code than 0 before the last step.
    """

    folder: Path
    steps: Sequence[Mapping[str, float]]
    name: str
    precision: str = "no"
    buffers: AbstractSet[str] = frozenset()
    failed: bool = False


class Comparison:
    """Comparison of two records, step by step.

    Args:
        one: of one process, or of another run that is taken to be right.
        other: of the run that is in question.
        tolerance: share of a step's change by which it may differ.

    Raises:
        UsageError: the runs train other models, or none.
    """

    def __init__(self, one: Record, other: Record, tolerance: float) -> None:
        self._one, self._other, self._tolerance = one, other, tolerance
        self._number = min(len(one.steps), len(other.steps))
        self._changes = list(self._compare_weights())

    def _compare_weights(self) -> Iterator[_Change]:
        """Yield the change of each step, and before it what was done to the weights since the last."""
        left: Mapping[str, Tensor] = {}
        left_there: Mapping[str, Tensor] = {}
        buffers = self._one.buffers
        for step in range(1, self._number + 1):
            before, after = read_weights(self._one.folder, step)
            before_there, after_there = read_weights(self._other.folder, step)
            if before is not None or before_there is not None:
                start, start_there = before or left, before_there or left_there
                yield _difference(step, (left, start), (left_there, start_there), buffers, within=False)
                left, left_there = start, start_there
            yield _difference(step, (left, after), (left_there, after_there), buffers, within=True)
            left, left_there = after, after_there

    @property
    def apart(self) -> bool:
        """Whether weights were changed in different ways."""
        return self._first() is not None

    @property
    def same(self) -> bool:
        """Whether both made as many steps, each of which changed the weights alike."""
        return self._first() is None and len(self._one.steps) == len(self._other.steps)

    def _first(self) -> _Change | None:
        """The change in which the runs come apart first; ``None`` where they do not."""
        return next(filter(self._is_apart, self._changes), None)

    def _is_apart(self, change: _Change) -> bool:
        """Whether weights changed in different ways; a little counts too where the losses differ by no rounding."""
        is_alike = change.within and self._same_loss(change.step)
        return not change.share <= (self._tolerance if is_alike else self._tolerance / 100)

    def table(self) -> list[str]:
        """One line for each step, and for changes of the weights between steps."""
        rows = [("step", "rows", "data", "loss", "change of the weights")]
        for change in self._changes:
            step = change.step
            if not change.within:
                if step == 1 or self._is_apart(change):
                    when = "at the start" if step == 1 else f"before step {step}"
                    rows.append((str(step - 1), "", "", "", f"{self._weights(change)} ({when})"))
                continue
            one, other = self._one.steps[step - 1], self._other.steps[step - 1]
            losses = f"{one['loss']:.6g}"
            if not self._same_loss(step):
                losses += f" / {other['loss']:.6g}"
            numbers = f"{one['rows']:g}" if one["rows"] == other["rows"] else f"{one['rows']:g} / {other['rows']:g}"
            data = "different" if self._other_data(step) else "same"
            rows.append((str(step), numbers, data, losses, self._weights(change)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        return ["", f"{self._one.name} / {self._other.name}", *lines, ""]

    def verdict(self) -> str:
        """Say whether the runs are the same, and where to look if not."""
        change = self._first()
        if change is None:
            return self._all_alike()
        if not change.within:
            text = START if change.step == 1 else BETWEEN.format(step=change.step)
        elif found := self._other_data(change.step):
            text = DATA.format(step=change.step, what=found)
        elif not self._same_loss(change.step):
            one, other = self._one.steps[change.step - 1], self._other.steps[change.step - 1]
            text = FORWARD.format(step=change.step, ours=other["loss"], theirs=one["loss"])
        else:
            text = GRADIENTS.format(step=change.step)
        if self._other.precision != "no":
            text = f"{text} {_ROUNDING.format(precision=self._other.precision)}"
        return f"{text} {_PAGE}"

    def _all_alike(self) -> str:
        if len(self._one.steps) != len(self._other.steps):
            numbers = self._both(len(self._one.steps), len(self._other.steps))
            return f"What both have done is the same, and they end after different numbers of steps: {numbers}."
        broken = next((change.step for change in self._changes if change.broken), None)
        if broken is not None:
            return f"The same, and in both runs weights are not finite after step {broken}."
        many = "1 step changes" if self._number == 1 else f"{self._number} steps change"
        return f"The same: {many} the weights alike."

    def _weights(self, change: _Change) -> str:
        share = f" ({change.share:.0e} of it)" if change.share else ""
        share = " (finite in one run alone)" if math.isinf(change.share) else share
        if not self._is_apart(change):
            return f"same{share}"
        return f"different{share}: {', '.join(change.names)}"

    def _both(self, one: float, other: float) -> str:
        """A number of each run, with the run's name."""
        return f"{one:g} ({self._one.name}) and {other:g} ({self._other.name})"

    def _same_loss(self, step: int) -> bool:
        one, other = (record.steps[step - 1]["loss"] for record in (self._one, self._other))
        both_broken = math.isnan(one) and math.isnan(other)
        return both_broken or math.isclose(one, other, rel_tol=_LOSS_TOLERANCE, abs_tol=1e-7)

    def _other_data(self, step: int) -> str:
        """Describe what differs in the data of a step; empty where nothing does."""
        one, other = self._one.steps[step - 1], self._other.steps[step - 1]
        if one["rows"] != other["rows"]:
            return f"{self._both(one['rows'], other['rows'])} rows"
        if math.isnan(one["sum"]) and math.isnan(other["sum"]):
            return ""
        scale = max(abs(one["sum"]), math.sqrt(one["squares"]))
        alike = math.isclose(one["sum"], other["sum"], rel_tol=0, abs_tol=_DATA_TOLERANCE * scale)
        if alike and math.isclose(one["squares"], other["squares"], rel_tol=_DATA_TOLERANCE):
            return ""
        return f"as many rows ({one['rows']:g}) with other values"


class _Change(NamedTuple):
    """Difference of what two runs did to their weights, as a share of what the first did.

    Args:
        step: in which, or before which, it was.
        within: it is what the step itself did.
        share: the larger one of parameters and buffers; infinite where one run alone has elements that are not finite.
        names: of the three weights that differ most.
        broken: elements are not finite, in both runs.
    """

    step: int
    within: bool
    share: float
    names: list[str]
    broken: bool


def _check_names(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    unlike = sorted(one.keys() ^ other.keys())
    unlike += sorted(name for name in one.keys() & other.keys() if one[name].shape != other[name].shape)
    if unlike:
        raise UsageError(
            f"the runs train models of other weights, such as {_shown(unlike[0])}",
            cure="Let the script make the same model however many processes there are.",
        )
    if not one:
        raise UsageError(
            "the models that accelerator.prepare was given have no weights to compare",
            cure="Prepare the model that the script trains.",
        )


def _difference(
    step: int,
    one: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    other: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    buffers: AbstractSet[str],
    *,
    within: bool,
) -> _Change:
    """Compare what two runs did to their weights, each given before and after.

    What is new, or of another shape than before, began at zero.

    Raises:
        UsageError: the weights after are of other names or shapes.
    """
    apart: dict[str, float] = {}
    moved: dict[str, float] = {}
    broken = False
    (before, after), (before_there, after_there) = one, other
    _check_names(after, after_there)
    for name, value in after.items():
        end, end_there = value.double(), after_there[name].double()
        start, start_there = (
            each[name].double() if name in each and each[name].shape == value.shape else torch.zeros_like(end)
            for each in (before, before_there)
        )
        change, change_there = end - start, end_there - start_there
        finite, finite_there = change.isfinite(), change_there.isfinite()
        broken = broken or not bool(finite.all())
        difference = torch.where(finite & finite_there, change_there - change, 0.0)
        # Less than the last digits of the weights is rounding, however small the step.
        digits = _ROUNDED * torch.finfo(value.dtype).eps * torch.maximum(end.abs(), start.abs())
        difference = difference.where(difference.abs() > digits, 0.0)
        apart[name] = math.inf if bool((finite != finite_there).any()) else float(difference.norm())
        moved[name] = float(change.where(finite, 0.0).norm())
    shares = [_share(apart, moved, names) for names in (after.keys() - buffers, after.keys() & buffers)]
    names = sorted(apart, key=lambda name: apart[name] / (moved[name] or 1e-300), reverse=True)
    share = max(shares)
    broken = broken and not math.isinf(share)
    return _Change(step, within, share, [_shown(name) for name in names if apart[name]][:3], broken)


def _share(apart: Mapping[str, float], moved: Mapping[str, float], names: AbstractSet[str]) -> float:
    difference = math.hypot(*(apart[name] for name in names))
    return difference and difference / (math.hypot(*(moved[name] for name in names)) or 1e-300)


def _shown(name: str) -> str:
    """A weight's own name, without the number of its model where that is the first."""
    return name.removeprefix("0.")
