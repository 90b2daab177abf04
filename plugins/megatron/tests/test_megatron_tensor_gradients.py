"""Code of a model that sees gradients of cut activations gets whole ones, as on one process.

Tolerance 1e-5 of gradients of the order of 1: float32 sums over ranks are added in another order.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain_testing import spawn

FEATURES, LENGTH, ROWS = 8, 4, 6


class Touched(nn.Module):
    """A network of which ``touch`` sees the hidden activations ``(B, T, F)`` that a plan may cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.touch(self.first(x).tanh()))


def normed(gradient: Tensor) -> Tensor:
    return gradient / (0.01 + gradient.norm(dim=-1, keepdim=True))


class Moved(Touched):
    def touch(self, hidden: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.second(hidden).pow(2).sum(), hidden, create_graph=True)
        return hidden - 0.1 * slope / (1 + slope.norm(dim=-1, keepdim=True))


class Hooked(Touched):
    def touch(self, hidden: Tensor) -> Tensor:
        hidden.register_hook(normed)
        hidden.register_hook(lambda gradient: None)
        return hidden


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return normed(gradient)


class OfAFunction(Touched):
    def touch(self, hidden: Tensor) -> Tensor:
        return Normed.apply(hidden)


class OfAModule(Touched):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_pre_hook(lambda module, made: tuple(map(normed, made)))
        self.second.register_full_backward_hook(lambda module, given, made: tuple(map(normed, given)))

    def touch(self, hidden: Tensor) -> Tensor:
        return hidden


KINDS = {kind.__name__: kind for kind in (Moved, Hooked, OfAFunction, OfAModule)}


def gradients_follow(name: str, folder: str, section: str) -> None:
    Path(folder, "drivetrain.yaml").write_text(f"distributed_type: megatron\nmegatron: {section}\n")
    accelerator = Accelerator(config=Path(folder, "drivetrain.yaml"))
    torch.manual_seed(0)
    plain = KINDS[name]()
    model = copy.deepcopy(plain)
    x, y = torch.randn(ROWS, LENGTH, FEATURES), torch.randn(ROWS, LENGTH, FEATURES)
    F.mse_loss(plain(x), y).backward()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(F.mse_loss(model(x), y))
    for key, parameter in plain.named_parameters():
        found = dict(model.named_parameters())[key].grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-5)
    accelerator.end_training()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("ranks", "section"),
    [
        (2, "{tensor_parallel_size: 2}"),
        (4, "{tensor_parallel_size: 4}"),
        (2, "{tensor_parallel_size: 2, sequence_parallel: true}"),
    ],
    ids=["two", "four", "sequence"],
)
@pytest.mark.gate("two-Hooked", "two-OfAFunction", "two-OfAModule", "two-Moved")
def test_gradients_of_cut_activations_are_whole(name: str, ranks: int, section: str, tmp_path: Path) -> None:
    spawn(gradients_follow, ranks, name, str(tmp_path), section)
