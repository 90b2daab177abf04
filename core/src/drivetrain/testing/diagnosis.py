"""Why a training run did not end where plain torch ends: the first step whose gradients differ, and how, in words.

A difference of parameters after several steps says that something is wrong. Nearly all of what is wrong in a backend
shows in the gradients of one step, and there it is simple: a factor, the samples of one rank only, a gradient that was
never cleared. So a scenario that failed is run once more by plain gradient descent, whose change of the parameters *is*
the gradient, and each step is compared with plain torch from the very parameters that the step began with.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.testing import models

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.testing.scenario import Scenario

Gradients = dict[str, Tensor]
"""By name of the parameter; those of frozen and of unused parameters are zero."""

LARGEST_ERROR = 2e-3
"""Of a gradient against a guess, relative to its norm. The difference of two sets of float32 parameters after a step of
0.5 has 4 digits; the guesses differ by a factor of 1.1 and more."""

WAIT_SECONDS = 5.0
"""For the other ranks to fail as well. They compare the same numbers at nearly the same moment."""

CONTRACT = "the gradient contract: the sum over data-parallel ranks and micro-batches of the loss / denominator"


@contextmanager
def meaning(words: str) -> Iterator[None]:
    """Say in front of an assertion that fails inside what its failure means."""
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
    """Whether every rank came here. Not collective: only ranks that failed come, and they wait a few seconds.

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
    from drivetrain.testing.scenario import sgd

    dp_size = accelerator.backend.topology.dp_size
    plain = replace(scenario, optimizer=sgd, scheduler=None, epochs=1)
    steps = trained(plain, accelerator, dp_size)
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
    from drivetrain.testing.scenario import full_state

    model: Any = models.build(scenario.model)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer: Any = scenario.optimizer(model)
    rate = optimizer.param_groups[0]["lr"]
    model, optimizer, loader = accelerator.prepare(model, optimizer, scenario.loader(dp_size))
    model.train()
    found: list[Step] = []
    before = full_state(accelerator, model)
    for x, y in loader:
        with accelerator.accumulate(model):
            total, items = models.loss_sum(model(x), y), models.num_items(y)
            if scenario.by_items:
                accelerator.backward(total, num_items=items)
            else:
                accelerator.backward(total / items)
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
    """What is wrong with the gradients of one step; empty when they are right."""
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
    if number and (said := _kept(step, steps[number - 1], expected)):
        return said
    for words, guess in parts.guesses(coefficient):
        if (ratio := ratio_of(step.gradients, guess)) is not None and not close(guess, expected):
            return f"they are those of {words}{_times(ratio, parts)}; {CONTRACT}"
    if (ratio := ratio_of(step.gradients, expected)) is not None:
        return f"all gradients are {ratio:.4g} of the reference{_named(ratio, parts)}; {CONTRACT}"
    return _by_parameter(step.gradients, expected, parts)


def _kept(step: Step, last: Step, expected: Gradients) -> str:
    """Whether what the step before applied is still in there."""
    rest = {name: step.gradients[name] - expected[name] for name in expected}
    ratio = ratio_of(rest, last.gradients)
    if ratio is None or abs(ratio - 1.0) > 0.01:
        return ""
    return "they are the reference plus those of the step before: zero_grad left them in place"


@dataclass(frozen=True)
class Parts:
    """The gradient of one step in its summands, before they are divided.

    Args:
        rows: by micro-batch and data-parallel rank, what its loss gives; a sum with ``num_items``, else a mean.
        denominator: what their sum is to be divided by.
        dp_size: number of data-parallel ranks.
        num_micro: micro-batches of this step.
        window: of a full window.
        by_items: losses are sums over items.
        max_norm: to which the step is clipped.
    """

    rows: Mapping[tuple[int, int], Gradients]
    denominator: float
    dp_size: int
    num_micro: int
    window: int
    by_items: bool
    max_norm: float | None

    def of(self, chosen: Callable[[tuple[int, int]], bool]) -> Gradients:
        """The sum of the chosen summands, divided as all of them are to be."""
        picked = [gradients for where, gradients in self.rows.items() if chosen(where)]
        return {name: torch.stack([each[name] for each in picked]).sum(0) / self.denominator for name in picked[0]}

    def guesses(self, coefficient: float) -> Iterator[tuple[str, Gradients]]:
        """What a backend may have taken for the whole."""
        if self.num_micro > 1:
            last = self.num_micro - 1
            yield "the last micro-batch of the window alone", self.of(lambda at: at[0] == last)
            yield "the first micro-batch of the window alone", self.of(lambda at: at[0] == 0)
        if self.dp_size > 1:
            for rank in range(self.dp_size):
                one = self.of(lambda at, rank=rank: at[1] == rank)  # type: ignore[misc]
                yield f"data-parallel rank {rank}'s samples alone, not reduced over the ranks", one
        if coefficient < 1.0 and self.dp_size > 1:
            yield "ranks that clipped their own gradients each, before they were reduced", self.clipped_by_rank()

    def clipped_by_rank(self) -> Gradients:
        """The mean of what each rank has after it clipped its own mean."""
        assert self.max_norm is not None
        own = [scaled(self.of(lambda at, rank=rank: at[1] == rank), self.dp_size) for rank in range(self.dp_size)]  # type: ignore[misc]
        clipped = [scaled(each, min(1.0, self.max_norm / (norm_of(each) + 1e-6))) for each in own]
        return {name: torch.stack([each[name] for each in clipped]).mean(0) for name in clipped[0]}

    def numbers(self) -> dict[str, float]:
        """What a gradient is most often multiplied or divided by in error."""
        found: dict[str, float] = {}
        if self.dp_size > 1:
            found["data-parallel size"] = self.dp_size
        if self.num_micro > 1:
            found["micro-batches of the window"] = self.num_micro
        if self.window not in (1, self.num_micro):
            found["gradient_accumulation_steps"] = self.window
        if self.by_items and self.denominator > 1:
            found["items of the step"] = self.denominator
        return found


def parts_of(scenario: Scenario, step: Step, number: int, dp_size: int) -> Parts:
    """What plain torch computes for each micro-batch and rank of a step, from the parameters that it began with."""
    features, labels = scenario.tensors()
    first = number * scenario.window
    micro = range(first, min(first + scenario.window, scenario.micro_steps))
    share = scenario.global_batch // dp_size
    rows: dict[tuple[int, int], Gradients] = {}
    items = 0.0
    for at, rank in itertools.product(range(len(micro)), range(dp_size)):
        begin = micro[at] * scenario.global_batch + rank * share
        y = labels[begin : begin + share]
        count = float(models.num_items(y))
        model = models.build(scenario.model)
        model.load_state_dict(dict(step.before))
        loss = models.loss_sum(model(features[begin : begin + share]), y)
        (loss if scenario.by_items else loss / count).backward()  # type: ignore[no-untyped-call]
        items += count
        rows[at, rank] = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
    denominator = max(items, 1.0) if scenario.by_items else float(len(rows))
    return Parts(rows, denominator, dp_size, len(micro), scenario.window, scenario.by_items, scenario.max_norm)


def norms(actual: Sequence[float], expected: Sequence[float], max_norm: float | None, dp_size: int) -> str:
    """What is wrong with the norms before clipping that a run returned; empty when nothing simple is."""
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


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """Of all of them together."""
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
