"""Which optimizers are element-wise is found by a trial that leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import UnsupportedError
from drivetrain_sharding import check_elementwise, elementwise
from drivetrain_sharding.elementwise import why_not_elementwise, why_not_matrixwise


def parameters() -> list[nn.Parameter]:
    """A matrix, a vector, a single row, a single element."""
    shapes = ((200, 170), (7,), (1, 3), (1,))
    return [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in shapes]


class Own(Optimizer):
    """A user's own; what it does with each parameter is in ``update``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                self.update(group, one, one.grad)

    def update(self, group: dict[str, Any], one: Tensor, grad: Tensor) -> None:
        raise NotImplementedError


class Signs(Own):
    def update(self, group, one, grad):
        momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
        one.sub_(torch.sign(momentum + grad), alpha=group["lr"])
        momentum.lerp_(grad, 0.1)


class Layerwise(Own):
    def update(self, group, one, grad):
        one.sub_(grad * (one.norm() / grad.norm()), alpha=group["lr"])


class Rowwise(Own):
    """What only a cut through rows shows."""

    def update(self, group, one, grad):
        one.sub_(grad - grad.mean(-1, keepdim=True) if grad.dim() > 1 else grad, alpha=group["lr"])


class Globally(Own):
    def step(self, closure=None):
        norm = torch.nn.utils.get_total_norm([one.grad for group in self.param_groups for one in group["params"]])
        for group in self.param_groups:
            group["scale"] = 1.0 / norm
        super().step()

    def update(self, group, one, grad):
        one.sub_(grad * group["scale"], alpha=group["lr"])


class Estimates(Own):
    """Gathers a number about whole parameters, and uses it much later."""

    def update(self, group, one, grad):
        group["seen"] = group.get("seen", 0.0) + float((grad * one).sum())
        one.sub_(grad, alpha=group["lr"])


class Preconditions(Own):
    """Gathers matrices from the beginning, and uses them much later."""

    def update(self, group, one, grad):
        if one.dim() == 2:
            self.state[one].setdefault("gram", torch.zeros(len(one), len(one), dtype=one.dtype)).add_(grad @ grad.T)
        one.sub_(grad, alpha=group["lr"])


class Noisy(Own):
    def update(self, group, one, grad):
        one.sub_(grad + torch.randn_like(grad), alpha=group["lr"])


class WithMode(Signs):
    """As schedule-free optimizers: it steps in one of its modes only."""

    training = False

    def train(self):
        self.training = True

    def step(self, closure=None):
        if not self.training:
            raise RuntimeError("call train() first")
        super().step()


class NeedsClosure(Own):
    def step(self, closure=None):
        closure()


class SlowAdamW(torch.optim.AdamW):
    """A subclass may do anything, and this one does nothing more."""


@pytest.mark.parametrize("kind", [Signs, WithMode, SlowAdamW, torch.optim.AdamW, torch.optim.Adagrad])
def test_elementwise_optimizers_pass(kind):
    assert why_not_elementwise(kind(parameters())) is None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Layerwise, "in two parts"),
        (Rowwise, "in two parts"),
        (Globally, "numbers that it keeps"),
        (Estimates, "numbers that it keeps"),
        (Preconditions, ""),
        (Noisy, "in two parts"),
        (NeedsClosure, "its step() calls a closure"),
        (lambda params: torch.optim.Muon([one for one in params if one.dim() == 2]), "in two parts"),
        (torch.optim.Adafactor, ""),
        (torch.optim.LBFGS, "its step() calls a closure"),
    ],
)
def test_others_are_refused_with_what_was_found(kind, why):
    with pytest.raises(UnsupportedError, match="is not element-wise") as caught:
        check_elementwise(kind(parameters()), "fsdp")
    assert why in str(caught.value)
    assert "torch.optim.AdamW" in str(caught.value)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_every_known_class_would_pass_its_trial(kind, monkeypatch):
    monkeypatch.setattr(elementwise, "ELEMENTWISE", frozenset())
    assert why_not_elementwise(kind(parameters())) is None


def test_a_trial_leaves_no_trace():
    optimizer = Signs(parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own on the instance
    for one in optimizer.param_groups[0]["params"]:
        one.grad = torch.ones_like(one)
    optimizer.step()
    scheduler.step()
    before = copy.deepcopy(optimizer.state_dict()), [one.clone() for one in optimizer.param_groups[0]["params"]]
    random = torch.get_rng_state()
    assert why_not_elementwise(optimizer) is None
    assert torch.equal(torch.get_rng_state(), random)
    assert str(optimizer.state_dict()) == str(before[0])
    for one, was in zip(optimizer.param_groups[0]["params"], before[1], strict=True):
        assert torch.equal(one, was)
        assert torch.equal(one.grad, torch.ones_like(one))


def test_a_learning_rate_of_0_hides_nothing():
    """As schedules with a warm-up set it before ``prepare``."""
    with pytest.raises(UnsupportedError, match="in two parts"):
        check_elementwise(Layerwise(parameters(), lr=0.0), "fsdp")


class DecaysMatrices(Own):
    """What only a part with another number of dims shows."""

    def update(self, group, one, grad):
        one.sub_(grad + one * (one.dim() > 1), alpha=group["lr"])


class Blockwise(Own):
    """Rounds what it keeps of large parameters, in blocks of 256 elements in a row."""

    def update(self, group, one, grad):
        momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
        momentum.lerp_(grad, 0.1)
        if one.numel() >= 4096 and one.numel() % 256 == 0:
            blocks = momentum.view(-1, 256)
            scales = blocks.abs().amax(1, keepdim=True) / 127
            blocks.copy_((blocks / scales).round() * scales)
        one.sub_(momentum, alpha=group["lr"])


@pytest.mark.parametrize("shape", [(96, 96), (8192,), (256, 512), (64, 64, 3, 3)])
def test_blocks_that_a_half_would_have_whole(shape):
    """Half of 96 rows of 96 are 18 whole blocks; a quarter, on four ranks, would not be rounded at all."""
    optimizer = Blockwise([nn.Parameter(torch.ones(shape))])
    assert why_not_elementwise(optimizer) is not None
    assert why_not_matrixwise(optimizer) is None


class FactorsSmallDims(Own):
    """As preconditioners that leave large dims alone."""

    def update(self, group, one, grad):
        small = grad.dim() == 2 and min(grad.shape) <= 8
        one.sub_(grad / grad.norm() if small else grad, alpha=group["lr"])


def test_flat_parts_of_small_dims():
    """A row of many parameters has none of their dims."""
    optimizer = FactorsSmallDims([nn.Parameter(torch.ones(shape)) for shape in ((4, 10), (10, 10))])
    assert why_not_elementwise(optimizer, flat=True) is not None
    assert why_not_elementwise(FactorsSmallDims([nn.Parameter(torch.ones(10, 10))]), flat=True) is None


def test_flat_parts_have_one_dim():
    optimizer = DecaysMatrices(parameters())
    assert why_not_elementwise(optimizer) is None
    with pytest.raises(UnsupportedError, match=r"in two parts.*zero_stage: 0"):
        check_elementwise(optimizer, "ZeRO stage 1", flat=True, instead="zero_stage: 0")
