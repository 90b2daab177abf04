"""Forwards that write to parameters under stages 0 to 2: the same on every rank, as on one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator, load_config
from drivetrain.api import DrivetrainError, UsageError
from drivetrain_deepspeed import same_writes
from drivetrain_testing import spawn

RANKS, ROWS, STEPS = 3, 12, 10
TOLERANCE = 2e-5
"""Float32: gradients are added in another order."""


class Centred(nn.Module):
    """Its forward writes to ``centre``, which is trained or frozen."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.step = how, 0
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.centre = nn.Parameter(torch.zeros(4), requires_grad=how != "frozen")

    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        mean = x.mean(0)
        if self.how == "data":
            self.centre.data = self.centre.data.lerp(mean, 0.1)
        elif self.how == "data in place":
            self.centre.data.lerp_(mean, 0.1)
        elif self.how in {"alike", "rounded"}:
            self.centre.clamp_(-0.01, 0.01)
        elif self.how == "one rank":
            if torch.distributed.get_rank() == 1 and self.step == 5:
                self.centre.add_(0.1)
        elif self.how in {"forward", "frozen"} or (self.how == "once" and self.step == 5):
            self.centre.lerp_(mean, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        output: Tensor = self.head(torch.tanh(self.body(x - self.centre)))
        self.step += 1
        return output


def train(how: str, section: dict[str, Any] | None, unlike: bool = False) -> tuple[int, str | list[Tensor]]:
    """How many steps were done, and what was refused or the parameters; in plain torch without a section.

    With ``unlike`` each rank says that it computes on a card of its own.
    """
    torch.manual_seed(0)
    model: Any = Centred(how)
    if unlike:
        same_writes.device_kind = lambda device: f"{device} of rank {torch.distributed.get_rank()}"
    optimizer: Any = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    accelerator: Any = None
    if section is not None:
        overrides = {"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section}
        accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
        model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    done = 0
    try:
        for _ in range(STEPS):
            x = torch.randn(ROWS, 4, generator=generator)
            if accelerator is not None:
                x = x.chunk(RANKS)[accelerator.process_index]
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            if how == "rounded" and accelerator is not None and accelerator.process_index == 1:
                # What another kind of card makes of the same step.
                for one in model.parameters():
                    one.data.mul_(1 + 2**-23)
            optimizer.zero_grad()
            done += 1
        return done, [one.detach().clone() for one in model.parameters()]
    except UsageError as error:
        return done, str(error)
    finally:
        if accelerator is not None:
            accelerator.end_training()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("how", "steps"), [("forward", 0), ("data", 0), ("data in place", 0), ("frozen", 0), ("once", 8), ("one rank", 8)]
)
@pytest.mark.gate("*-0", "*-2")
@pytest.mark.gate("forward-*-2", "data-*-0", "data in place-*-2", "frozen-*-0", "once-*-2", "one rank-*-0")
def test_what_each_rank_writes_from_its_own_samples_is_refused(how: str, steps: int, stage: int) -> None:
    for done, said in spawn(train, RANKS, how, {"zero_stage": stage}):
        assert done == steps
        assert "the parameters of Centred are not the same on all ranks" in said
        # Stages 1 and 2 have given every rank the owner's values since.
        assert ("centre differ" if stage == 0 or not steps else "before an earlier step") in said


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.gate("2")
def test_what_all_ranks_write_alike_trains_as_on_one_process(stage: int) -> None:
    _, expected = train("alike", None)
    for done, found in spawn(train, RANKS, "alike", {"zero_stage": stage}):
        assert done == STEPS
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.gate("2")
def test_rounding_of_unlike_cards_is_no_write(stage: int) -> None:
    _, expected = train("alike", None)
    for done, found in spawn(train, RANKS, "rounded", {"zero_stage": stage}, True):
        assert done == STEPS
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    for done, said in spawn(train, RANKS, "rounded", {"zero_stage": 0}):
        assert done == 1, "bits are compared where cards are alike"
        assert "the parameters of Centred are not the same on all ranks" in said


@pytest.mark.parametrize(("how", "stage", "steps"), [("forward", 0, 0), ("once", 1, 8)])
def test_other_values_are_refused_on_unlike_cards_too(how: str, stage: int, steps: int) -> None:
    for done, said in spawn(train, RANKS, how, {"zero_stage": stage}, True):
        assert done == steps
        assert "the parameters of Centred are not the same on all ranks" in said


def reset_momentum(stage: int, ranks: int) -> str:
    """Zero the momentum after the second step on the first ranks alone; what was refused."""
    config = load_config(
        overrides={"distributed_type": "deepspeed", "use_cpu": True, "deepspeed.zero_stage": stage}, environ={}
    )
    accelerator = Accelerator(config=config)
    model: Any = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    try:
        for step in range(STEPS):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            states = [state["momentum_buffer"] for state in optimizer.state.values()]
            if step == 1 and accelerator.process_index < ranks:
                for state in states:
                    state.zero_()
        accelerator.end_training()
    except DrivetrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.gate("3")
def test_states_of_the_optimizer_are_written_on_all_ranks_or_none(stage: int) -> None:
    for said in spawn(reset_momentum, 2, stage, 1):
        assert "write to an optimizer's state at test_deepspeed_same_writes.py" in said
    assert spawn(reset_momentum, 2, stage, 2) == ["", ""]
