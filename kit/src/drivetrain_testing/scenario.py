"""Describes a training run once and runs it twice: in plain torch on one process, and through ``Accelerator``.

Both runs see the same global batches: step ``i`` of the reference takes rows ``i * G`` to ``(i + 1) * G``, and so do
the ranks together, each its ``G / dp_size`` of them. The reference uses no Drivetrain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from drivetrain_testing import models

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator


def sgd(model: nn.Module) -> Optimizer:
    """Plain gradient descent: the parameters' change is the gradient, so a wrong factor shows."""
    return SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)


def adamw(model: nn.Module) -> Optimizer:
    """AdamW, which has state."""
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05)


@dataclass(frozen=True)
class Scenario:
    """A training run.

    Args:
        model: name in :data:`models.MODELS`.
        ragged: words with ragged labels instead of dense features.
        by_items: the loss is a sum and its items are counted (``num_items``); else each loss is a mean.
        counted: the loss is the mean that the model computes from labels, as a language model of Transformers does, and
            ``count_items`` reads from it how many labels that is.
        global_batch: samples in one micro-step over all ranks; divisible by every world size.
        micro_steps: micro-steps in an epoch.
        last_batch: samples in the last of them, over all ranks, where the epoch does not divide; 0: a full one.
        joined: train inside of ``join_uneven_inputs`` with ``even_batches=False``: ranks without a sample of the last
            micro-step do not take part in it.
        epochs: passes over the data.
        window: micro-steps between two optimizer steps; the last window of an epoch may be shorter.
        max_norm: clip gradients to this norm.
        optimizer: makes the optimizer.
        scheduler: makes the scheduler; called once per micro-step, as scripts do.
        data: overrides the data, full length.
        explicit: use ``train_step`` instead of ``backward``.
        config: further arguments of ``Accelerator``.
    """

    model: str = "dense"
    ragged: bool = False
    by_items: bool = False
    counted: bool = False
    global_batch: int = 12
    micro_steps: int = 4
    last_batch: int = 0
    joined: bool = False
    epochs: int = 1
    window: int = 1
    max_norm: float | None = None
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    scheduler: Callable[[Optimizer], Any] | None = None
    data: tuple[Tensor, Tensor] | None = None
    explicit: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All samples of an epoch, in order."""
        if self.data is not None:
            return self.data
        make = models.ragged_data if self.ragged else models.dense_data
        return make(self.global_batch * self.micro_steps - (self.global_batch - self.last_batch) % self.global_batch)

    def loader(self, dp_size: int) -> DataLoader[Any]:
        """Return the loader for ``prepare``: batches of one rank's size."""
        assert self.global_batch % dp_size == 0, f"{self.global_batch} samples over {dp_size} ranks"
        return DataLoader(TensorDataset(*self.tensors()), batch_size=self.global_batch // dp_size)

    def samples(self, micro_step: int, dp_size: int) -> list[int]:
        """Return the number of samples of a micro-step per data-parallel rank; they differ by at most one."""
        rest = self.last_batch if micro_step == self.micro_steps - 1 and self.last_batch else self.global_batch
        return [rest // dp_size + (rank < rest % dp_size) for rank in range(dp_size)]

    def loss(self, model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of a batch's losses and number of its items, both 0-d, by an ordinary module."""
        if self.counted:
            logits, y = models.shifted(model(x)["logits"], y)
        else:
            logits = model(x)
        return models.loss_sum(logits, y), models.num_items(y)


@dataclass
class Outcome:
    """Results of a run.

    Args:
        state: parameters and buffers at the end, by original name.
        norms: norm before clipping, per optimizer step.
        rates: learning rate after each optimizer step.
        losses: loss of each optimizer step: the sum over its micro-steps and ranks / denominator.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def reference(scenario: Scenario) -> Outcome:
    """Run it in this process by plain torch: every window is one big batch. Nothing of Drivetrain is used."""
    model = models.build(scenario.model)
    optimizer = scenario.optimizer(model)
    scheduler = scenario.scheduler(optimizer) if scenario.scheduler else None
    outcome = Outcome()
    features, labels = scenario.tensors()
    rows = scenario.global_batch
    for _ in range(scenario.epochs):
        for first in range(0, scenario.micro_steps, scenario.window):
            stop = min(first + scenario.window, scenario.micro_steps)
            x, y = features[first * rows : stop * rows], labels[first * rows : stop * rows]
            optimizer.zero_grad()
            total, items = scenario.loss(model, x, y)
            loss = total / items.clamp(min=1)
            backward(loss)
            _finish_reference_step(scenario, model, optimizer, scheduler, outcome, loss)
    outcome.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return outcome


def _finish_reference_step(
    scenario: Scenario, model: nn.Module, optimizer: Optimizer, scheduler: Any, outcome: Outcome, loss: Tensor
) -> None:
    if scenario.max_norm is not None:
        outcome.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), scenario.max_norm)))
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
        outcome.rates.append(scheduler.get_last_lr()[0])
    outcome.losses.append(loss.item())


def backward(loss: Tensor) -> None:
    """Plain torch's backward, which has no type."""
    loss.backward()  # type: ignore[no-untyped-call]


def share(accelerator: Accelerator, *tensors: Tensor) -> list[Tensor]:
    """This data-parallel rank's equal part of each tensor, by coordinate, on its device."""
    topology = accelerator.backend.topology
    assert all(len(tensor) % topology.dp_size == 0 for tensor in tensors), f"rows do not divide by {topology.dp_size}"
    return [tensor.chunk(topology.dp_size)[topology.dp_rank].to(accelerator.device) for tensor in tensors]


def accelerated(scenario: Scenario, accelerator: Accelerator, dp_size: int) -> Outcome:
    """Run it through ``Accelerator``, as a user's script would. Collective over all ranks."""
    model = models.build(scenario.model)
    optimizer = scenario.optimizer(model)
    scheduler = scenario.scheduler(optimizer) if scenario.scheduler else None
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, scenario.loader(dp_size), scheduler)
    outcome = Outcome()
    model.train()
    for _ in range(scenario.epochs):
        if scenario.explicit:
            _explicit_epoch(scenario, accelerator, model, loader, scheduler, outcome)
        else:
            with joined(scenario, accelerator, model):
                _epoch(scenario, accelerator, model, optimizer, loader, scheduler, outcome)
    outcome.state = full_state(accelerator, model)
    return outcome


def _epoch(
    scenario: Scenario,
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    loader: Any,
    scheduler: Any,
    outcome: Outcome,
) -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            backward_of(scenario, accelerator, model, x, y)
            if accelerator.sync_gradients and scenario.max_norm is not None:
                outcome.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), scenario.max_norm)))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
                if accelerator.sync_gradients:
                    outcome.rates.append(scheduler.get_last_lr()[0])
            optimizer.zero_grad()


def joined(scenario: Scenario, accelerator: Accelerator, model: Any) -> AbstractContextManager[None]:
    """Context in which the scenario's epochs run. Collective over all ranks at the end."""
    return accelerator.join_uneven_inputs([model], even_batches=False) if scenario.joined else nullcontext()


def backward_of(scenario: Scenario, accelerator: Accelerator, model: Any, x: Tensor, y: Tensor) -> None:
    """Forward and ``accelerator.backward`` of one micro-batch, with the loss that the scenario names."""
    if scenario.counted:
        accelerator.backward(model(x, labels=y)["loss"])
        return
    total, items = models.loss_sum(model(x), y), models.num_items(y)
    if scenario.by_items:
        accelerator.backward(total, num_items=items)
    else:
        accelerator.backward(total / items)


def _explicit_epoch(
    scenario: Scenario,
    accelerator: Accelerator,
    model: Any,
    loader: Any,
    scheduler: Any,
    outcome: Outcome,
) -> None:
    batches = list(loader)
    for first in range(0, len(batches), scenario.window):
        result = accelerator.train_step(
            model,
            batches[first : first + scenario.window],
            _explicit_loss_sum if scenario.by_items else _explicit_loss_mean,
            num_items=_explicit_items if scenario.by_items else None,
            max_norm=scenario.max_norm,
        )
        outcome.losses.append(float(result.loss))
        if result.grad_norm is not None:
            outcome.norms.append(float(result.grad_norm))
        if scheduler is not None:
            scheduler.step()
            outcome.rates.append(scheduler.get_last_lr()[0])


def _explicit_loss_sum(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return models.loss_sum(output, batch[1])


def _explicit_loss_mean(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return models.loss_sum(output, batch[1]) / models.num_items(batch[1])


def _explicit_items(batch: Sequence[Tensor]) -> Tensor:
    return models.num_items(batch[1])


def full_state(accelerator: Accelerator, model: Any) -> dict[str, Tensor]:
    """Every parameter and buffer in full by original name, on the CPU; asked for on every rank."""
    state = accelerator.get_state_dict(model)
    if not accelerator.backend.capabilities.replicated:
        state = accelerator.backend.broadcast_object(state)  # Only the main process was given it.
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    """Same names, shapes and values."""
    missing, added = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    assert not missing + added, f"names differ from the user's: {missing} are missing, {added} are not the user's"
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].to(tensor.dtype), tensor, rtol=0, atol=atol, msg=functools.partial("{}: {}".format, name)
        )


def assert_same(actual: Outcome, expected: Outcome, atol: float) -> None:
    """Same parameters, norms, learning rates and, where both know them, losses."""
    assert_same_numbers("learning rate", actual.rates, expected.rates, 1e-12)
    assert_same_numbers("norm before clipping", actual.norms, expected.norms, max(atol, 1e-5))
    if actual.losses:
        assert_same_numbers("loss", actual.losses, expected.losses, max(atol, 1e-5))
    assert_same_state(actual.state, expected.state, atol)


def assert_same_numbers(what: str, actual: Sequence[float], expected: Sequence[float], atol: float) -> None:
    """Same length and values."""
    assert len(actual) == len(expected), f"{what}: {len(actual)} values, not {len(expected)}: {actual}"
    torch.testing.assert_close(
        torch.tensor(actual, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-5,
        atol=atol,
        msg=lambda text: f"{what}: {text}\nactual {list(actual)}\nexpected {list(expected)}",
    )
