"""Hooks that a script sets on parameters: each gets what it gets on one process, the reduced gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain_testing import RankFailedError, spawn

# Sums over ranks are taken in another order than on one process.
TOLERANCE = 2e-5
WORLD = 3


class Net(nn.Module):
    """``spare`` is part of a loss in every other step."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x, spare=False):
        hidden = torch.tanh(self.body(self.frozen(x)))
        return self.head(hidden) + (self.spare(hidden) if spare else 0)


def start(backend, lr=0.1, **arguments):
    torch.manual_seed(0)
    accelerator = Accelerator(distributed_type=backend, cpu=True, **arguments)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    return accelerator, *accelerator.prepare(net, optimizer)


def losses(accelerator, model, steps):
    draws = torch.Generator().manual_seed(1)
    rank, size = accelerator.process_index, accelerator.num_processes
    for step in range(steps):
        x = torch.randn(12, 4, generator=draws)[rank::size]
        yield step, lambda: (model(x, spare=step % 2 == 1) - x.sum(1, keepdim=True)).square().mean()  # noqa: B023


def finish(accelerator, model, *more):
    weights = torch.cat([value.reshape(-1) for value in accelerator.get_state_dict(model).values()])
    accelerator.end_training()
    return [weights.clone(), *more]


def clamp(grad):
    return grad.clamp(-0.01, 0.01)


def halve(grad):
    return grad * 0.5


def train(backend, way):
    """A loop with hooks; returns what it trained, and what hooks saw, in order."""
    accelerator, model, optimizer = start(backend)
    seen, kept = [], []

    def look(name):
        return lambda grad: seen.append((name, float(grad.norm())))

    for name, one in model.named_parameters():
        if one.requires_grad:
            one.register_hook(clamp)
            one.register_hook(look(name))
            if way == "kept":
                one.register_hook(kept.append)
    other = model.head.weight.register_hook(halve)
    if way == "removed by another hook":
        # Called before it, as gradients of the head arrive first.
        model.head.bias.register_hook(lambda grad: other.remove())
    for step, loss in losses(accelerator, model, 6):
        optimizer.zero_grad()
        accelerator.backward(loss())
        if way == "kept":
            accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        if way == "error in backward" and step == 2:
            optimizer.zero_grad()
            broken = loss()
            broken.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                accelerator.backward(broken)
    norms = [norm for _, norm in seen] + [float(grad.norm()) for grad in kept]
    return finish(accelerator, model, [name for name, _ in seen], torch.tensor(norms))


@pytest.mark.parametrize("way", ["plain", "kept", "removed by another hook", "error in backward"])
def test_hooks_get_what_they_get_on_one_process(way):
    [(wanted, names, norms)] = spawn(train, 1, "single", way)
    for weights, found_names, found_norms in spawn(train, WORLD, "ddp", way):
        torch.testing.assert_close(weights, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        assert found_names == names
        torch.testing.assert_close(found_norms, norms, rtol=TOLERANCE, atol=TOLERANCE)


def train_two_models(backend):
    accelerator, model, optimizer = start(backend)
    other = nn.Linear(2, 2)
    other, second = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for one in (*model.head.parameters(), *other.parameters()):
        one.register_hook(clamp)
    for step, loss in losses(accelerator, model, 6):
        optimizer.zero_grad()
        second.zero_grad()
        value = loss()
        if step % 2:
            value = value + other(torch.ones(1, 2)).square().sum() * (1 + value)
        accelerator.backward(value)
        optimizer.step()
        if step % 2:
            second.step()
    more = torch.cat([one.detach().reshape(-1) for one in other.parameters()])
    return finish(accelerator, model, more)


def test_hooks_of_several_models():
    [(wanted, wanted_other)] = spawn(train_two_models, 1, "single")
    for weights, other in spawn(train_two_models, WORLD, "ddp"):
        torch.testing.assert_close(weights, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(other, wanted_other, rtol=TOLERANCE, atol=TOLERANCE)


def decay(grad):
    """Adds a constant: with other parts it is the same, since parts are averaged."""
    return grad + 0.1


def centre(grad):
    return grad - grad.mean()


def accumulate(backend, hook):
    accelerator, model, optimizer = start(backend, gradient_accumulation_steps=2)
    for one in model.head.parameters():
        one.register_hook(hook)
    for _, loss in losses(accelerator, model, 6):
        with accelerator.accumulate(model):
            accelerator.backward(loss())
            optimizer.step()
            optimizer.zero_grad()
    return finish(accelerator, model)


@pytest.mark.parametrize("hook", [halve, decay, centre])
def test_linear_hooks_in_an_accumulation_window(hook):
    [(wanted,)] = spawn(accumulate, 1, "single", hook)
    for (weights,) in spawn(accumulate, WORLD, "ddp", hook):
        torch.testing.assert_close(weights, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def on_one_rank(way):
    accelerator, model, optimizer = start("ddp")
    seen = []
    if accelerator.is_main_process:
        weight = model.head.weight
        if way == "looks":
            weight.register_hook(lambda grad: seen.append(grad.norm()))
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
        else:
            weight.register_hook(clamp)
    for _, loss in losses(accelerator, model, 4):
        optimizer.zero_grad()
        accelerator.backward(loss())
        accelerator.backward(loss())
        optimizer.step()
    return finish(accelerator, model)


def test_the_main_process_may_look_alone():
    first, *others = spawn(on_one_rank, WORLD, "looks")
    assert all(torch.equal(first[0], each[0]) for each in others)


def test_hooks_that_change_gradients_of_one_rank_are_refused():
    with pytest.raises(RankFailedError, match="hooks of parameters of Net changed gradients"):
        spawn(on_one_rank, WORLD, "changes")
