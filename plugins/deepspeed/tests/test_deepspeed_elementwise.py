"""Which optimizers may step flat parts of parameters: known ones, and strangers by trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.api import UnsupportedError
from drivetrain_deepspeed import elementwise

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow


class Own(Optimizer):
    """A stranger's, by what it does with a gradient."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.factor = 2.0

    def updates(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, float]]:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    yield each, each.grad * self.factor, group["lr"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each, update, rate in self.updates():
            each.sub_(self.of(each, update), alpha=rate)

    def of(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Sign(Own):
    def of(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class Normalised(Own):
    def of(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class TrustRatio(Own):
    def of(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * parameter.norm() / gradient.norm()


class Centralised(Own):
    def of(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient - gradient.mean(dim=0, keepdim=True) if gradient.dim() > 1 else gradient


class BlockWise(Own):
    """As optimizers of 8 bits: large parameters by blocks."""

    def of(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.numel() < 4096:
            return gradient
        blocks = gradient.flatten().split(256)
        return torch.cat([each / each.abs().max() for each in blocks]).view_as(gradient)


class OneNorm(Own):
    """One norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = torch.stack([update.norm() for _, update, _ in self.updates()]).norm()
        for each, update, rate in self.updates():
            each.sub_(update / norm, alpha=rate)


class Native(Own):
    """Frees what it has made in another language, as DeepSpeed's own Adam does."""

    freed = 0

    def __del__(self) -> None:
        Native.freed += 1


class Around(Own):
    """Steps another optimizer."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.AdamW(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


ELEMENTWISE: list[Callable[[Any], Optimizer]] = [
    torch.optim.AdamW,
    torch.optim.Adagrad,
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    Own,
    Sign,
    Around,
    type("AdamOfMine", (torch.optim.Adam,), {}),
    type("SgdOfMine", (torch.optim.SGD,), {}),
]
NOT: list[Callable[[Any], Optimizer]] = [
    Normalised,
    TrustRatio,
    Centralised,
    BlockWise,
    OneNorm,
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    type("LambOfMine", (TrustRatio,), {}),
]


@pytest.mark.parametrize("make", ELEMENTWISE)
@pytest.mark.turns(2)
def test_element_wise(make: Callable[[Any], Optimizer]) -> None:
    trained = model()
    before = [each.detach().clone() for each in trained.parameters()]
    optimizer = make(trained.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)  # starts at 0, and replaces `step` on the object
    state = len(optimizer.state)
    elementwise.check(optimizer, 2)
    assert all(torch.equal(*pair) for pair in zip(before, trained.parameters(), strict=True))
    assert len(optimizer.state) == state
    assert all(each.grad is None for each in trained.parameters())


@pytest.mark.parametrize("make", NOT)
@pytest.mark.turns(2)
def test_not_element_wise(make: Callable[[Any], Optimizer]) -> None:
    optimizer = make(model().parameters())
    for stage in (1, 2, 3):
        # Without ZeRO, DeepSpeed's step takes no closure either.
        instead = "distributed_type: ddp" if make is torch.optim.LBFGS else "zero_stage: 0"
        with pytest.raises(UnsupportedError, match=f"{type(optimizer).__name__} is not element-wise.*{instead}"):
            elementwise.check(optimizer, stage)
    elementwise.check(optimizer, 0)


def test_a_trial_frees_nothing() -> None:
    optimizer = Native(model().parameters())
    elementwise.check(optimizer, 2)
    assert Native.freed == 0


def test_matrices_only() -> None:
    muon = torch.optim.Muon([nn.Parameter(torch.ones(4, 3))])
    with pytest.raises(UnsupportedError, match="Muon is not element-wise"):
        elementwise.check(muon, 1)


def test_of_the_section() -> None:
    elementwise.check_described("AdamW", 3)
    elementwise.check_described("OneBitAdam", 0)
    for kind in ("Muon", "Lamb", "OneBitAdam", "Adagrad"):
        with pytest.raises(UnsupportedError, match=f"names the optimizer {kind}"):
            elementwise.check_described(kind, 1)
