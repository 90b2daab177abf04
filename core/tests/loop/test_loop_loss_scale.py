"""One loss scale for several optimizers: each divides gradients by the scale that they have, and skips by itself."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain.backend import PrecisionPolicy
from drivetrain.backends.torch_engine import TorchEngine, TorchTrainable

SCALER = {"init_scale": 1024.0, "growth_interval": 2}
HUGE = 1e37
STEPS = 8


class Pair(nn.Module):
    """Two parameters, each of which sees one half of the input; linear, so that gradients are the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.head = nn.Parameter(torch.tensor([0.25, 0.75]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:2] * self.body).sum() + (x[2:] * self.head).sum()


def optimizers_of(model: Pair) -> list[SGD]:
    return [SGD([model.body], lr=0.1), SGD([model.head], lr=0.2, momentum=0.5)]


def inputs(huge: tuple[int, ...], features: slice) -> torch.Tensor:
    x = torch.linspace(-1, 1, 4 * STEPS).view(STEPS, 4) + 1.25
    for step in huge:
        x[step, features] *= HUGE
    return x


class Trained:
    """A model that is trained by one engine."""

    def __init__(self) -> None:
        self.engine = TorchEngine(PrecisionPolicy("fp16", loss_scaling=True, scaler=SCALER), "cpu")
        self.model: Any = Pair()
        self.optimizers = optimizers_of(self.model)
        self.trainable = TorchTrainable(self.model, self.optimizers, self.engine)

    def backward(self, x: torch.Tensor) -> None:
        self.trainable.backward(self.model(x), 1.0)

    def clip(self, max_norm: float) -> float:
        return float(self.trainable.clip_grad_norm([self.model.body, self.model.head], max_norm))

    def step(self, *which: int) -> list[bool]:
        return [self.trainable.optimizer_step(self.optimizers[each]).skipped for each in which]

    def drop(self, *which: int) -> None:
        for each in which:
            self.trainable.zero_grad(self.optimizers[each])

    @property
    def scale(self) -> float:
        assert self.engine.scaler is not None
        return self.engine.scaler.get_scale()


def assert_same(found: Pair, expected: Pair) -> None:
    torch.testing.assert_close(found.body, expected.body, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.head, expected.head, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("huge", "features", "skipped"),
    [
        ((2, 5), slice(0, 2), {(2, 0), (5, 0)}),
        ((2,), slice(2, 4), {(2, 1)}),
        ((1, 2, 3), slice(0, 4), {(step, each) for step in (1, 2, 3) for each in (0, 1)}),
    ],
)
def test_two_optimizers_step_as_in_a_plain_loop(huge: Any, features: slice, skipped: Any) -> None:
    plain, scaler = Pair(), torch.amp.GradScaler("cpu", **SCALER)  # type: ignore[arg-type]
    steps, trained = optimizers_of(plain), Trained()
    found = set()
    for number, x in enumerate(inputs(huge, features)):
        scaler.scale(plain(x)).backward()
        for each in steps:
            scaler.step(each)
        scaler.update()
        plain.zero_grad()
        trained.backward(x)
        found |= {(number, each) for each, skips in enumerate(trained.step(0, 1)) if skips}
        trained.drop(0, 1)
        assert trained.scale == scaler.get_scale(), number
    assert found == skipped
    assert_same(trained.model, plain)


def test_gradients_of_two_optimizers_that_are_clipped_together_lose_the_scale_once() -> None:
    plain, trained = Pair(), Trained()
    steps = optimizers_of(plain)
    for x in inputs((), slice(0)):
        plain(x).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for each in steps:
            each.step()
        plain.zero_grad()
        trained.backward(x)
        assert trained.clip(1.0) == pytest.approx(float(norm), abs=1e-5)
        trained.step(1, 0)
        trained.drop(0, 1)
    assert trained.scale == 1024.0 * 2 ** (STEPS // 2)
    assert_same(trained.model, plain)


def test_gradients_that_wait_follow_the_scale() -> None:
    plain, trained = Pair(), Trained()
    steps = optimizers_of(plain)
    for number, x in enumerate(inputs((), slice(0))):
        which = (1,) if number % 3 else (1, 0)
        plain(x).backward()
        trained.backward(x)
        for each in which:
            steps[each].step()
            steps[each].zero_grad()
        trained.step(*which)
        trained.drop(*which)
    assert_same(trained.model, plain)


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_that_were_clipped_and_not_stepped_are_added_to(keeps: bool) -> None:
    """Or dropped: neither leaves the scale in what comes."""
    plain, trained = Pair(), Trained()
    steps = optimizers_of(plain)
    for number, x in enumerate(inputs((), slice(0))):
        plain(x).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 2.0)
        trained.backward(x)
        assert trained.clip(2.0) == pytest.approx(float(norm), abs=1e-4)
        if number % 2 == 0:
            for each in steps:
                each.step()
            trained.step(0, 1)
        if number % 2 == 0 or not keeps:
            plain.zero_grad()
            trained.drop(0, 1)
    assert_same(trained.model, plain)


def test_a_norm_that_is_not_finite_lowers_the_scale_although_the_script_leaves_out_the_step() -> None:
    trained = Trained()
    for x in inputs((0, 1), slice(0, 4))[:3]:
        trained.backward(x)
        if math.isfinite(trained.clip(1.0)):
            trained.step(0, 1)
        trained.drop(0, 1)
    assert trained.scale == 256.0


def test_a_second_step_of_one_backward_uses_the_gradients_as_they_are() -> None:
    plain, trained = Pair(), Trained()
    steps = optimizers_of(plain)
    for x in inputs((), slice(0)):
        plain(x).backward()
        trained.backward(x)
        for _ in range(2):
            for each in steps:
                each.step()
            trained.step(0, 1)
        plain.zero_grad()
        trained.drop(0, 1)
    assert_same(trained.model, plain)


def test_an_optimizer_that_has_stepped_is_not_kept():
    trained = Trained()
    trained.backward(inputs((), slice(0, 4))[0])
    trained.clip(1.0)
    trained.step(0, 1)
    engine, kept = trained.engine, [weakref.ref(each) for each in trained.optimizers]
    del trained
    gc.collect()
    assert engine.scaler is not None
    assert [each() for each in kept] == [None, None]
