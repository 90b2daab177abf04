"""Explains in words why a training run differs from plain torch: the first step whose gradients differ, and how.

A difference of parameters after several steps says that something is wrong. Nearly all of what is wrong in a backend
shows in the gradients of one step, and there it is simple: a factor, the samples of one rank only, a gradient that was
never cleared. So a scenario that failed is run once more by plain gradient descent, whose change of the parameters *is*
the gradient, and each step is compared with plain torch from the very parameters that the step began with.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain_testing import models

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain_testing.scenario import Scenario

Gradients = dict[str, Tensor]
"""Gradients by parameter name; those of frozen and of unused parameters are zero."""

LARGEST_ERROR = 2e-3
"""Tolerance of a gradient against a guess, relative to its norm. The difference of two sets of float32 parameters after
a step of 0.5 has 4 digits; the guesses differ by a factor of 1.1 and more."""

WAIT_SECONDS = 5.0
"""Time for the other ranks to fail as well. They compare the same numbers at nearly the same moment."""

CONTRACT = "the gradient contract: the sum over data-parallel ranks and micro-batches of the loss / denominator"


@contextmanager
def meaning(words: str) -> Iterator[None]:
    """Prefix an assertion that fails inside with the meaning of its failure."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{words}\n{error}") from error


@dataclass(frozen=True)
class Step:
    """One optimizer step of the diagnostic run.

    Args:
        before: parameters and buffers that it began with.
        gradients: by which they were changed, divided by the learning rate.
    """

    before: Mapping[str, Tensor]
    gradients: Gradients


def all_failed(folder: Path, world_size: int, what: str) -> bool:
    """Whether every rank failed. Not collective: only ranks that failed call this, and they wait a few seconds.

    Args:
        folder: that all ranks see.
        world_size: number of ranks.
        what: one word for what failed, the same on all of them.
    """
    (folder / f"failed-{what}-{os.environ.get('RANK', '0')}").touch()
    deadline = time.monotonic() + WAIT_SECONDS
    while len(list(folder.glob(f"failed-{what}-*"))) < world_size:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def explain(scenario: Scenario, accelerator: Accelerator) -> str:
    """Train the scenario again, step by step; what is wrong with the first gradient that is wrong. Collective.

    Returns:
        One sentence: the first step whose gradients are wrong, and how; or that all of them are right.
    """
    from drivetrain_testing.scenario import sgd

    dp_size = accelerator.backend.topology.dp_size
    plain = replace(scenario, optimizer=sgd, scheduler=None, epochs=1)
    steps = trained(plain, accelerator, dp_size)
    said = _first_wrong(plain, steps, dp_size)
    if plain.joined:  # Only ranks that had a sample to the end saw every step; rank 0 is one of them.
        said = accelerator.backend.broadcast_object(said)
    return said


def _first_wrong(plain: Scenario, steps: list[Step], dp_size: int) -> str:
    expected_steps = -(-plain.micro_steps // plain.window)
    for number in range(len(steps)):
        said = judge(plain, steps, number, dp_size)
        if said:
            remark = "" if number == 0 else f"; the {number} before it are right"
            return f"gradients of step {number + 1}{remark}: {said}"
    if len(steps) < expected_steps:
        return f"the optimizer stepped {len(steps)} times, not {expected_steps}"
    return (
        "gradients of every step are right; what differs is what the optimizer makes of them (its state, parameter "
        "groups, learning rates), a later epoch, or buffers"
    )


def trained(scenario: Scenario, accelerator: Accelerator, dp_size: int) -> list[Step]:
    """One epoch through ``Accelerator``; every step with what it began with and its gradients. Collective."""
    from drivetrain_testing.scenario import backward_of, full_state, joined

    model: Any = models.build(scenario.model)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer: Any = scenario.optimizer(model)
    rate = optimizer.param_groups[0]["lr"]
    model, optimizer, loader = accelerator.prepare(model, optimizer, scenario.loader(dp_size))
    model.train()
    found: list[Step] = []
    before = full_state(accelerator, model)
    with joined(scenario, accelerator, model):
        for x, y in loader:
            with accelerator.accumulate(model):
                backward_of(scenario, accelerator, model, x, y)
                if accelerator.sync_gradients and scenario.max_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), scenario.max_norm)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                after = full_state(accelerator, model)
                gradients = {name: (before[name] - after[name]).float() / rate for name in after if name in trainable}
                found.append(Step(before, gradients))
                before = after
    return found


def judge(scenario: Scenario, steps: list[Step], number: int, dp_size: int) -> str:
    """Describe the error of the gradients of one step; empty if they are right."""
    step = steps[number]
    parts = parts_of(scenario, step, number, dp_size)
    if not parts.rows:
        return ""
    whole = parts.of(lambda _: True)
    coefficient = 1.0 if scenario.max_norm is None else min(1.0, scenario.max_norm / (norm_of(whole) + 1e-6))
    expected = scaled(whole, coefficient)
    if close(step.gradients, expected):
        return ""
    if norm_of(step.gradients) == 0.0:
        return "all are zero: optimizer.step() changed no parameter"
    if coefficient < 1.0 and close(step.gradients, whole):
        return (
            f"clip_grad_norm_ had no effect: they are those without clipping, {1 / coefficient:.3g} times as large "
            f"as max_norm = {scenario.max_norm} allows"
        )
    if number and _differ_by(step, expected, steps[number - 1].gradients) == 1.0:
        return "they are the reference plus those of the step before: zero_grad left them in place"
    repeated = parts.repeated()
    if repeated is not None and _differ_by(step, expected, repeated):
        return (
            "they are the reference plus those of repeated samples, which ranks without one of their own are given to "
            "take part in the step: a `scale` of 0 means that this loss weighs nothing"
        )
    for words, guess in parts.guesses(coefficient):
        if (ratio := ratio_of(step.gradients, guess)) is not None and not close(guess, expected):
            return f"they are those of {words}{_times(ratio, parts)}; {CONTRACT}"
    if (ratio := ratio_of(step.gradients, expected)) is not None:
        said = f"{_named(ratio, parts)}{parts.forgotten(ratio)}"
        return f"all gradients are {ratio:.4g} of the reference{said}; {CONTRACT}"
    return _by_parameter(step.gradients, expected, parts)


def _differ_by(step: Step, expected: Gradients, added: Gradients) -> float:
    """The number of times that ``added`` is in a step's gradients beside what is expected; 0.0 for something else."""
    rest = {name: step.gradients[name] - expected[name] for name in expected}
    ratio = ratio_of(rest, added)
    return 0.0 if ratio is None else 1.0 if abs(ratio - 1.0) <= 0.01 else ratio


@dataclass(frozen=True)
class Parts:
    """The gradient of one step in its summands, before they are divided.

    Args:
        rows: by micro-batch and data-parallel rank, what its loss adds: a sum over items, or a mean times its number of
            samples relative to a full batch.
        means: the same, of means that nothing is multiplied with; those of repeated samples are among them.
        weights: items or samples of each micro-batch, over all ranks.
        denominator: what the sum of ``rows`` is to be divided by.
        dp_size: number of data-parallel ranks.
        num_micro: micro-batches of this step.
        window: of a full window.
        items: what the mean is over: ``"items"``, ``"labels"`` or ``"samples"``.
        max_norm: to which the step is clipped.
        scale: with ``num_items``, 1 / what each loss is multiplied with until the denominator is known.
    """

    rows: Mapping[tuple[int, int], Gradients]
    means: Mapping[tuple[int, int], Gradients]
    weights: Sequence[float]
    denominator: float
    dp_size: int
    num_micro: int
    window: int
    items: str
    max_norm: float | None
    scale: float

    def of(self, chosen: Callable[[tuple[int, int]], bool]) -> Gradients:
        """The sum of the chosen summands, divided as all of them are to be."""
        return mean_of([gradients for where, gradients in self.rows.items() if chosen(where)], self.denominator)

    def guesses(self, coefficient: float) -> Iterator[tuple[str, Gradients]]:
        """Yield gradients that a faulty backend may compute instead."""
        alike = f"means that weigh the same {{}}, however many {self.items} each of them is over"
        by_micro = [[each for (at, _), each in self.means.items() if at == which] for which in range(self.num_micro)]
        shared = [scaled(mean_of(each), weight) for each, weight in zip(by_micro, self.weights, strict=True)]
        yield alike.format("on every rank"), mean_of(shared, sum(self.weights))
        yield alike.format("in every micro-batch"), mean_of(list(self.means.values()))
        if self.num_micro > 1:
            last = self.num_micro - 1
            yield "the last micro-batch of the window alone", self.of(lambda at: at[0] == last)
            yield "the first micro-batch of the window alone", self.of(lambda at: at[0] == 0)
        if self.dp_size > 1:
            for rank in sorted({rank for _, rank in self.rows}):
                one = self.of(lambda at, rank=rank: at[1] == rank)  # type: ignore[misc]
                yield f"data-parallel rank {rank}'s samples alone, not reduced over the ranks", one
        if coefficient < 1.0 and self.dp_size > 1:
            yield "ranks that clipped their own gradients each, before they were reduced", self.clipped_by_rank()

    def repeated(self) -> Gradients | None:
        """The sum of what repeated samples would give, where ranks have nothing else."""
        found = [each for where, each in self.means.items() if where not in self.rows]
        return mean_of(found, 1.0) if found else None

    def clipped_by_rank(self) -> Gradients:
        """The mean of what each rank has after it clipped its own mean."""
        assert self.max_norm is not None
        ranks = sorted({rank for _, rank in self.rows})
        own = [scaled(self.of(lambda at, rank=rank: at[1] == rank), self.dp_size) for rank in ranks]  # type: ignore[misc]
        clipped = [scaled(each, min(1.0, self.max_norm / (norm_of(each) + 1e-6))) for each in own]
        return mean_of(clipped, self.dp_size)

    def numbers(self) -> dict[str, float]:
        """Return the factors and divisors of common errors."""
        found: dict[str, float] = {}
        if self.dp_size > 1:
            found["data-parallel size"] = self.dp_size
        if self.num_micro > 1:
            found["micro-batches of the window"] = self.num_micro
        if self.window not in (1, self.num_micro):
            found["gradient_accumulation_steps"] = self.window
        if self.scale and self.denominator > 1:
            found["items of the step"] = self.denominator
        if 1 < len(here := {rank for _, rank in self.rows}) < self.dp_size:
            found["ranks that have a sample"] = len(here)
        return found

    def forgotten(self, ratio: float) -> str:
        """Return the part of the contract whose omission scales gradients by this ratio."""
        # By an engine that adds the ranks' gradients, or by one that averages them.
        unscaled = (self.scale, self.scale / self.dp_size)
        if not _named(ratio, self) and any(abs(each / ratio - 1.0) < 0.01 for each in unscaled):
            return ", as they are when backward() does not multiply the loss by `scale`"
        guessed = self.scale or self.dp_size * self.window
        if abs(self.denominator / guessed / ratio - 1.0) < 0.01:
            return ", as they are when scale_gradients() does nothing"
        return ""


def parts_of(scenario: Scenario, step: Step, number: int, dp_size: int) -> Parts:
    """Compute each micro-batch and rank of a step in plain torch, from the parameters at its beginning."""
    features, labels = scenario.tensors()
    first = number * scenario.window
    micro = range(first, min(first + scenario.window, scenario.micro_steps))
    by_items = scenario.by_items or scenario.counted
    rows: dict[tuple[int, int], Gradients] = {}
    means: dict[tuple[int, int], Gradients] = {}
    weights: list[float] = []
    for at, which in enumerate(micro):
        begin, weight, repeated = which * scenario.global_batch, 0.0, 0
        for rank, samples in enumerate(scenario.samples(which, dp_size)):
            if not samples and scenario.joined:
                continue
            # A rank without a sample is given one from the head of the epoch, which weighs nothing.
            chosen = slice(begin, begin + samples) if samples else slice(repeated, repeated + 1)
            gradients, items = _gradients(scenario, step, features[chosen], labels[chosen])
            means[at, rank] = scaled(gradients, 1 / max(items, 1.0))
            if samples:
                summand = samples * dp_size / sum(scenario.samples(first, dp_size))
                rows[at, rank] = gradients if by_items else scaled(means[at, rank], summand)
                weight += items if by_items else summand
            begin, repeated = begin + samples, repeated + (not samples)
        weights.append(weight)
    denominator = max(sum(weights), 1.0) if by_items else sum(weights)
    return Parts(
        rows,
        means,
        weights,
        denominator,
        dp_size,
        len(micro),
        scenario.window,
        "items" if scenario.by_items else "labels" if scenario.counted else "samples",
        scenario.max_norm,
        _divisor(scenario, first, len(micro), denominator) if scenario.by_items else 0.0,
    )


def _gradients(scenario: Scenario, step: Step, x: Tensor, y: Tensor) -> tuple[Gradients, float]:
    """Return gradients of the sum of a batch's losses, at the parameters before a step, and the number of its items."""
    model = models.build(scenario.model)
    model.load_state_dict(dict(step.before))
    total, items = scenario.loss(model, x, y)
    total.backward()  # type: ignore[no-untyped-call]
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return found, float(items)


def _divisor(scenario: Scenario, first: int, num_micro: int, denominator: float) -> float:
    """Return the number by which losses of a window are divided until its items are known.

    The denominator where one backward is the window. Else a power of two near the items of the window before; in a
    run's first window, of its first batch.
    """
    if num_micro == 1:
        return denominator
    rows = scenario.global_batch
    labels = scenario.tensors()[1][max(first - scenario.window, 0) * rows : max(first, 1) * rows]
    return 2.0 ** round(math.log2(max(float(models.num_items(labels)), 1.0)))


def norms(actual: Sequence[float], expected: Sequence[float], max_norm: float | None, dp_size: int) -> str:
    """Describe the error of a run's norms before clipping; empty if there is no simple one."""
    if len(actual) != len(expected) or not expected or max_norm is None:
        return ""
    if all(abs(mine - min(its, max_norm)) <= 0.01 * mine for mine, its in zip(actual, expected, strict=True)):
        return "clip_grad_norm_ returned the norm after clipping, not the one before"
    ratios = [mine / its for mine, its in zip(actual, expected, strict=True) if its]
    if ratios and max(ratios) - min(ratios) <= 0.01 * abs(ratios[0]):
        words = {float(dp_size): " = data-parallel size", 1.0 / dp_size: " = 1 / data-parallel size"}
        named = next((said for value, said in words.items() if dp_size > 1 and abs(ratios[0] / value - 1) < 0.01), "")
        return f"every norm is {ratios[0]:.4g} of the reference{named}"
    return "no norm is that of the whole gradient: is it one rank's own?"


def order_of(actual: Sequence[Any], parts: Sequence[Any]) -> str:
    """``"in the order [1, 0]"`` when these are the parts of the ranks, permuted; else empty."""
    rest = list(actual)
    if len(rest) != len(parts) or rest == list(parts):
        return ""
    order = [parts.index(each) for each in rest if each in parts]
    if sorted(order) != list(range(len(parts))):
        return ""
    return f"the ranks' parts are all there, in the order {order} instead of by rank"


def mean_of(each: Sequence[Gradients], denominator: float | None = None) -> Gradients:
    """The sum of these divided by their number, or by another one."""
    by = len(each) if denominator is None else denominator
    return {name: torch.stack([one[name] for one in each]).sum(0) / by for name in each[0]}


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """Return the norm of all gradients together."""
    return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())


def scaled(gradients: Gradients, factor: float) -> Gradients:
    """Each times a number."""
    return {name: gradient * factor for name, gradient in gradients.items()}


def close(these: Gradients, those: Gradients) -> bool:
    """Whether they are the same but for the digits that a difference of parameters has."""
    error = norm_of({name: these[name].double() - those[name].double() for name in those})
    return error <= LARGEST_ERROR * norm_of(those) + 1e-6


def ratio_of(these: Gradients, those: Gradients) -> float | None:
    """The number by which all of ``those`` must be multiplied to be ``these``; ``None`` when there is none."""
    square = norm_of(those) ** 2
    if square == 0.0:
        return None
    ratio = float(sum((these[name].double() * those[name].double()).sum() for name in those)) / square
    return ratio if abs(ratio) > 1e-6 and close(these, scaled(those, ratio)) else None


def _times(ratio: float, parts: Parts) -> str:
    return "" if abs(ratio - 1.0) < 0.01 else f", times {ratio:.4g}{_named(ratio, parts)}"


def _named(ratio: float, parts: Parts) -> str:
    """``" = 1 / data-parallel size"``: products of few known numbers that give this ratio, the simplest one."""
    numbers = parts.numbers()
    found: list[tuple[int, str]] = []
    for powers in itertools.product((0, 1, -1), repeat=len(numbers)):
        value = 1.0
        for number, power in zip(numbers.values(), powers, strict=True):
            value *= number**power
        if any(powers) and abs(value / ratio - 1.0) < 0.01:
            above = [name for name, power in zip(numbers, powers, strict=True) if power == 1]
            below = [name for name, power in zip(numbers, powers, strict=True) if power == -1]
            said = " x ".join(above) or "1"
            found.append((len(above) + len(below), f"{said}{''.join(f' / {name}' for name in below)}"))
    fewest = min((count for count, _ in found), default=0)
    return "".join(f" = {said}" for count, said in found if count == fewest)


def _by_parameter(actual: Gradients, expected: Gradients, parts: Parts) -> str:
    """No one word fits all parameters: each in its own."""
    said: dict[str, list[str]] = {}
    for name, gradient in expected.items():
        mine = {name: actual[name]}
        if close(mine, {name: gradient}):
            words = "right"
        elif norm_of(mine) == 0.0:
            words = "zero"
        else:
            ratio = ratio_of(mine, {name: gradient})
            words = "no multiple of the reference" if ratio is None else f"{ratio:.4g} of it{_named(ratio, parts)}"
        said.setdefault(words, []).append(name)
    return "they differ by parameter from the reference: " + "; ".join(
        f"{', '.join(names)} {words}" for words, names in said.items()
    )
