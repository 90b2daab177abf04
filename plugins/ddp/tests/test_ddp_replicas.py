"""Replicas that drift apart where torch counts no write: found in the first steps, and by powers of two afterwards."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError, UsageError
from drivetrain_testing import spawn

RANKS = 3


class Noisy(torch.optim.SGD):
    """Adds noise to what it writes, as Langevin dynamics and stochastic rounding do.

    Args:
        params: the parameters.
        scale: of the noise.
        since: the step that noise begins with, counted from 0.
        seed: of the noise.
    """

    def __init__(self, params: Any, *, scale: float, since: int, seed: int) -> None:
        super().__init__(params, lr=0.1)
        self.scale, self.since, self.at = scale, since, 0
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for one in group["params"]:
                if self.at >= self.since:
                    one.add_(torch.randn(one.shape, generator=self.generator) * self.scale * one.norm())
        self.at += 1
        return result


def noisy(model: nn.Module, rank: int, *, scale: float = 0.1, since: int = 0, alike: bool = False) -> Any:
    return Noisy(model.parameters(), scale=scale, since=since, seed=0 if alike else rank)


def stepped_on_one_rank(model: nn.Module, rank: int) -> Any:
    """Its moments are from before ``prepare``, on rank 1 alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if rank == 1:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train(
    make: Any, steps: int, options: dict[str, Any] | None = None, section: dict[str, Any] | None = None
) -> tuple[int, list[str], list[Tensor]]:
    """Steps that were done, what was logged or raised, and the parameters at the end."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain_ddp").addHandler(handler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    overrides = {"distributed_type": "ddp", "ddp": section or {}}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    optimizer = make(model, accelerator.process_index, **(options or {}))
    model, optimizer = accelerator.prepare(model, optimizer)
    done = 0
    try:
        for step in range(steps):
            torch.manual_seed(accelerator.process_index + 10 * step)
            accelerator.backward(model(torch.randn(4, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    except UsageError as error:
        said.append(str(error))
    return done, said, [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("make", [noisy, stepped_on_one_rank])
def test_an_optimizer_that_steps_otherwise_on_each_rank_is_refused_in_the_second_step(make: Any) -> None:
    for done, said, _ in spawn(train, RANKS, make, 4):
        assert done == 1
        assert len(said) == 1
        assert "drifted apart" in said[0]
        assert "0.weight differs" in said[0] or "2.weight differs" in said[0] or "bias differs" in said[0]


def test_a_later_drift_is_found_by_the_next_power_of_two() -> None:
    for done, said, _ in spawn(train, RANKS, noisy, 12, {"since": 4}):
        assert done == 8
        assert "drifted apart" in said[0]


def test_rounding_is_warned_of_once() -> None:
    results = spawn(train, RANKS, noisy, 6, {"scale": 1e-7})
    for done, said, _ in results:
        assert done == 6
        assert not any("drifted apart" in each for each in said)
    assert sum("differ by rounding" in each for each in results[0][1]) == 1


def test_noise_that_is_alike_on_every_rank_is_nobodys_business() -> None:
    results = spawn(train, RANKS, noisy, 6, {"alike": True})
    for done, said, parameters in results:
        assert (done, said) == (6, [])
        assert all(map(torch.equal, parameters, results[0][2]))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight.T).abs() + self.bias


def train_complex(drifts: bool) -> tuple[str, list[Tensor]]:
    torch.manual_seed(0)
    model = Complex()
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "ddp"}, environ={}))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 12 * 4).view(12, 4).sin()
    said = ""
    try:
        for _ in range(3):
            mine = x.chunk(accelerator.num_processes)[accelerator.process_index]
            accelerator.backward(model(mine).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if drifts:
                model.weight.data += 0.1j * accelerator.process_index
    except UsageError as error:
        said = str(error)
    weights = [one.detach().clone() for one in model.parameters()]
    accelerator.end_training()
    return said, weights


def test_complex_parameters_are_trained_and_compared() -> None:
    ((_, expected),) = spawn(train_complex, 1, False)
    for said, weights in spawn(train_complex, RANKS, False):
        assert said == ""
        torch.testing.assert_close(weights, expected)
    for said, _ in spawn(train_complex, RANKS, True):
        assert "weight differs from rank 0's" in said


STATIC = {"static_graph": True}


def test_with_a_static_graph_replicas_are_compared_too() -> None:
    for done, said, _ in spawn(train, RANKS, stepped_on_one_rank, 4, None, STATIC):
        assert done == 1
        assert "drifted apart" in said[0]
    for done, said, _ in spawn(train, RANKS, noisy, 12, {"since": 4}, STATIC):
        assert done == 8
        assert "drifted apart" in said[0]
    for done, said, _ in spawn(train, RANKS, noisy, 6, {"alike": True}, STATIC):
        assert (done, said) == (6, [])


def joined(since: int) -> list[str]:
    """A drift that begins inside ``join_uneven_inputs``, where nothing is compared."""
    model = nn.Linear(4, 1)
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "ddp"}, environ={}))
    optimizer = noisy(model, accelerator.process_index, since=since)
    model, optimizer = accelerator.prepare(model, optimizer)
    said = []
    for inside in (True, False):
        with accelerator.join_uneven_inputs([model]) if inside else nullcontext():
            for _ in range(6):
                try:
                    accelerator.backward(model(torch.ones(2, 4)).square().mean())
                except UsageError as error:
                    said.append(f"{inside}: {error}")
                    return said
                optimizer.step()
                optimizer.zero_grad()
    return said


def test_what_was_not_compared_inside_join_is_compared_right_after_it() -> None:
    for said in spawn(joined, RANKS, 2):
        assert len(said) == 1
        assert said[0].startswith("False: ")
        assert "not the same on all ranks" in said[0] or "drifted apart" in said[0]


def left_out(*, frozen: bool, inside: bool) -> str:
    """Train where the ranks have 1, 2 and 3 batches, by a model one of whose layers no forward calls."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 1), nn.Linear(4, 1))
    model[1].requires_grad_(not frozen)
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "ddp"}, environ={}))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    first = accelerator.unwrap_model(model)[0]
    with accelerator.join_uneven_inputs([model]) if inside else nullcontext():
        for _ in range(accelerator.process_index + 1 if inside else RANKS):
            try:
                accelerator.backward(first(torch.ones(2, 4)).square().mean())
            except UnsupportedError as refused:
                return str(refused)
            optimizer.step()
            optimizer.zero_grad()
    return ""


def joined_and_not() -> list[str]:
    return [left_out(frozen=frozen, inside=inside) for frozen, inside in ((True, True), (False, False))]


def test_a_layer_that_no_forward_calls_inside_join_is_frozen_or_join_left_out() -> None:
    """Refuse it where ranks without batches cannot tell whether it was reached; as advised, both train."""
    for said in spawn(left_out, 2, frozen=False, inside=True):
        assert "inside join_uneven_inputs a backward did not reach 2 trained parameter(s), and ranks" in said
        assert "Freeze them with requires_grad_(False), or use even_batches=True without join_uneven_inputs." in said
    assert spawn(joined_and_not, 2) == [["", ""]] * 2
