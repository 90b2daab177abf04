from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.backend import Capabilities, RunSettings
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.topology import Mesh, ProcessInfo, Topology
from drivetrain_testing import spawn

STEPS, EVERY, RATE = 5, 2, 0.1


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 3, generator=generator), torch.randn(6, 1, generator=generator)


def by_hand(size: int) -> list[torch.Tensor]:
    """The same in one process: as many models as ranks, averaged by hand."""
    models = [make_model() for _ in range(size)]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            x, y = batch(step, rank)
            nn.functional.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(RATE * parameter.grad)  # type: ignore[operator]
            model.zero_grad()
        if (step + 1) % EVERY == 0 or step == STEPS - 1:
            averaged = copy.deepcopy(models[0].state_dict())
            for name, value in averaged.items():
                if value.is_floating_point():
                    averaged[name] = sum(model.state_dict()[name] for model in models) / size
            for model in models:
                model.load_state_dict(averaged)
    return [value for value in models[0].state_dict().values() if value.is_floating_point()]


def trains(accumulates: bool, enabled: bool = True) -> list[Any]:
    from drivetrain import Accelerator, LocalSGD

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if accumulates else 1)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    rank = accelerator.process_index
    apart = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=EVERY, enabled=enabled) as local_sgd:
        for step in range(STEPS):
            x, y = batch(step, rank)
            # Two halves of one batch, each a micro-batch; batch statistics are over the whole, so they are left out.
            for _ in range(2 if accumulates else 1):
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
            weights = accelerator.gather(model[0].weight.detach().reshape(1, -1))
            apart.append(bool((weights != weights[0]).any()))
    values = [value.tolist() for value in model.state_dict().values() if value.is_floating_point()]
    accelerator.end_training()
    return [values, apart]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_train_alone_and_meet_every_few_steps(size: int) -> None:
    wanted = by_hand(size)
    for values, apart in spawn(trains, size, False):
        for value, reference in zip(values, wanted, strict=True):
            # Sums over ranks in another order: a few units in the last place of float32, over five steps.
            torch.testing.assert_close(torch.tensor(value), reference, rtol=1e-5, atol=1e-6)
        assert apart == [size > 1 and (step + 1) % EVERY > 0 for step in range(STEPS)]


def test_open_accumulation_windows_are_not_counted() -> None:
    for _, apart in spawn(trains, 2, True):
        assert apart == [(step + 1) % EVERY > 0 for step in range(STEPS)]


def test_disabled_it_changes_nothing() -> None:
    (values, apart), (others, _) = spawn(trains, 2, False, enabled=False)
    assert not any(apart), "gradients are reduced at every step"
    # The running statistics of the batch norm are each rank's own.
    assert values[0] == others[0]


def trains_otherwise(how: str) -> list[Any]:
    from drivetrain import Accelerator, LocalSGD

    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))

    def one_step(step: int) -> None:
        x, y = batch(step, accelerator.process_index)
        if how == "train_step":
            accelerator.train_step(model, [(x, y)], lambda out, pair: nn.functional.mse_loss(out, pair[1]))
        else:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    with LocalSGD(accelerator, model, EVERY) as local_sgd:
        for step in range(STEPS):
            one_step(step)
            local_sgd.step()
    values = [value.tolist() for value in model.state_dict().values() if value.is_floating_point()]
    one_step(STEPS)
    weights = accelerator.gather(model[0].weight.detach().reshape(1, -1))
    accelerator.end_training()
    return [values, bool((weights == weights[0]).all())]


@pytest.mark.parametrize("how", ["without accumulate", "train_step"])
def test_other_forms_of_the_loop_train_alone_too_and_reduce_again_behind_the_block(how: str) -> None:
    wanted = by_hand(2)
    for values, together_again in spawn(trains_otherwise, 2, how):
        for value, reference in zip(values, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(value), reference, rtol=1e-5, atol=1e-6)
        assert together_again


def test_a_backend_that_shards_parameters_is_refused() -> None:
    from drivetrain.loop.local_sgd import LocalSGD

    # As much of an accelerator as is looked at before anything happens.
    topology = Topology(ProcessInfo(0, 2, 0, 2), Mesh({"dp_shard": 2}), "cpu", "gloo")
    settings = RunSettings(name="fsdp")
    backend = SimpleNamespace(topology=topology, capabilities=Capabilities(replicated=False), settings=settings)
    accelerator = SimpleNamespace(backend=backend)
    with pytest.raises(UnsupportedError, match="under fsdp a rank does not hold all parameters"):
        LocalSGD(accelerator, nn.Linear(1, 1), 2)
    assert not LocalSGD(accelerator, nn.Linear(1, 1), 2, enabled=False).enabled
    accelerator.backend.capabilities = Capabilities()
    with pytest.raises(UsageError, match="this Linear was not prepared"):
        LocalSGD(accelerator, nn.Linear(1, 1), 2)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        LocalSGD(accelerator, nn.Linear(1, 1), 0)
