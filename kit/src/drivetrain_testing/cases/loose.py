"""Checks loose parameters, which no prepared model holds: they train as on one process, or are refused.

The core averages the gradients of such parameters by what the engine multiplies a loss with, so an engine that scales
losses in a way of its own trains its model right and these wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

from drivetrain.errors import UnsupportedError, UsageError
from drivetrain_testing import models
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import backward, share

STEPS, ROWS, RATE = 4, 12, 0.5
ROUNDING = 2e-5
"""Tolerance of values of the order of 1 after some steps in float32."""

Optimizers = Callable[[nn.Module, list[Tensor]], list[Optimizer]]


def _together(model: nn.Module, loose: list[Tensor]) -> list[Optimizer]:
    groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": loose, "lr": RATE / 2}]
    return [SGD(groups, lr=RATE, momentum=0.5)]


def _apart(model: nn.Module, loose: list[Tensor]) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=RATE), SGD(loose, lr=RATE / 2, momentum=0.5)]


def _parts(device: Any) -> tuple[nn.Module, list[Tensor]]:
    """A model; a temperature and a shift of the logits beside it."""
    with models.seeded(3):
        model = nn.Sequential(nn.Linear(models.FEATURES, 8), nn.Tanh(), nn.Linear(8, models.CLASSES))
    return model, [
        nn.Parameter(torch.tensor(0.3, device=device)),
        nn.Parameter(torch.linspace(-1, 1, models.CLASSES, device=device)),
    ]


def _loss(model: Any, loose: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x) * loose[0].exp() + loose[1], y)


def _plainly(optimizers: Optimizers, max_norm: float | None) -> tuple[list[Tensor], list[float]]:
    model, loose = _parts("cpu")
    steps, norms = optimizers(model, loose), list[float]()
    for x, y in _batches():
        backward(_loss(model, loose, x, y))
        if max_norm is not None:
            norms.append(float(clip_grad_norm_([*model.parameters(), *loose], max_norm)))
        for each in steps:
            each.step()
            each.zero_grad()
    return loose, norms


def _batches() -> list[tuple[Tensor, Tensor]]:
    x, y = models.dense_data(STEPS * ROWS)
    return list(zip(torch.split(x, ROWS), torch.split(y, ROWS), strict=True))


def _compare(kit: Kit, what: str, optimizers: Optimizers, *, max_norm: float | None = None, start: float = 0.0) -> None:
    accelerator = kit.accelerator()
    expected, norms = _plainly(optimizers, max_norm)
    model: Any
    model, loose = _parts(accelerator.device)
    with torch.no_grad():
        loose[0].add_(start * accelerator.process_index)
    found: list[float] = []
    try:
        model, *steps = accelerator.prepare(model, *optimizers(model, loose))
        for x, y in _batches():
            accelerator.backward(_loss(model, loose, *share(accelerator, x, y)))
            if max_norm is not None:
                found.append(float(accelerator.clip_grad_norm_([*model.parameters(), *loose], max_norm)))
            for each in steps:
                each.step()
                each.zero_grad()
    except (UnsupportedError, UsageError):  # By its layout an engine may not be able to.
        return
    for rank, values in enumerate(accelerator.backend.gather_object([each.detach().cpu() for each in loose])):
        apart = max(float((one - other.detach()).abs().max()) for one, other in zip(values, expected, strict=True))
        assert apart <= max(kit.atol, ROUNDING), f"{what}: no error, and rank {rank} is {apart:.1e} off"
    apart = max([abs(one - other) for one, other in zip(found, norms, strict=True)], default=0.0)
    assert apart <= max(kit.atol, ROUNDING), f"{what}: the norm before clipping is {apart:.1e} off"


@case()
def in_the_optimizer_of_a_model(kit: Kit) -> None:
    """A temperature and a shift beside the model, in its optimizer."""
    _compare(kit, "parameters beside the model in its optimizer", _together)


@case()
def in_an_optimizer_of_their_own(kit: Kit) -> None:
    """They have a prepared optimizer of their own."""
    _compare(kit, "parameters beside the model in an optimizer of their own", _apart)


@case()
def clipped_with_a_model(kit: Kit) -> None:
    """One clipping norm is that of the model's gradients and of theirs."""
    _compare(kit, "one clipping norm over model and parameters beside it", _together, max_norm=0.05)


@case()
def start_from_rank_zero(kit: Kit) -> None:
    """They begin with the values of rank 0, as parameters of a model do."""
    _compare(kit, "parameters beside the model that each rank drew for itself", _apart, start=0.5)
