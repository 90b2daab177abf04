"""Losses that join sharded parameters, outside of a forward, with plain tensors that differ from rank to rank.

Scripts of tests/parity show the usual ones: penalties before a forward, scaled by the loss, on one vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator, load_config
from drivetrain_testing import spawn
from drivetrain_testing.processes import RankFailedError

WORLD = 3

ROWS = torch.arange(WORLD * 2 * 4.0).reshape(-1, 4).sin()


def built() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 5)


def rows_of_a_weight(model: Any, x: Tensor) -> Tensor:
    """A penalty that reads plain rows of the batch beside a part of a sharded matrix."""
    penalty = (model.weight[1] * x).sum(-1).mean() + (model.weight * 2 - torch.ones(5, 4)).pow(2).mean()
    return model(x).pow(2).mean() + penalty


def other_layout(model: Any, x: Tensor) -> Tensor:
    """A penalty alone, whose gradient has another layout than the parameters."""
    del x
    vector = torch.cat([model.weight.reshape(-1), model.bias])
    total: Tensor = (vector * vector.detach().roll(1)).sum()
    return total


def chosen(model: Any, x: Tensor) -> Tensor:
    """The loss of the batch counts where a norm of the weights says so."""
    norm = (model.weight * 1).norm()
    loss = model(x).pow(2).mean()
    return torch.where(norm > 0, loss * norm.detach(), loss) + torch.maximum(norm, loss.detach() * 0)


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    each.__name__: each for each in (rows_of_a_weight, other_layout, chosen)
}


def gradients(loss: str) -> dict[str, Tensor]:
    """Return the full gradients that two backwards add up."""
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    model: Any = accelerator.prepare(built())
    mine = ROWS.chunk(WORLD)[accelerator.process_index]
    for _ in range(2):
        accelerator.backward(LOSSES[loss](model, mine))
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_one_process(loss: str) -> None:
    reference = built()
    for _ in range(2):
        LOSSES[loss](reference, ROWS).backward()
    for found in spawn(gradients, WORLD, loss):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-5, atol=1e-6, msg=name)


def changed_in_place() -> None:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    model: Any = accelerator.prepare(built())
    total = model.weight.pow(2).sum()
    total.add_(model(ROWS).pow(2).mean())
    accelerator.backward(total)


def test_what_became_plain_in_place_is_refused_where_it_is_used() -> None:
    with pytest.raises(RankFailedError, match=r"Write `total = total \+ loss`"):
        spawn(changed_in_place, 2)
