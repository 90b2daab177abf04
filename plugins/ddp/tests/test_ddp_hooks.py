"""Gradient hooks of the script's own on parameters: what they get under ``ddp``, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator, DistributedDataParallelKwargs, GradientAccumulationPlugin, load_config
from drivetrain.api import UsageError
from drivetrain_testing import spawn

BATCH, STEPS, RANKS = 12, 4, 3


class Net(nn.Module):
    """``last`` is reached by samples of the last rank alone, and ``never`` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)
        self.last, self.never = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.second(hidden)
        late = at >= BATCH - BATCH // RANKS
        if bool(late.any()):
            out = out + self.last(hidden) * late[:, None]
        return out


def clamp(model: nn.Module, _seen: list[Any]) -> None:
    for one in model.parameters():
        one.register_hook(lambda grad: grad.clamp(-0.05, 0.05))


def rectify(model: nn.Module, _seen: list[Any]) -> None:
    for one in model.parameters():
        one.register_hook(lambda grad: grad.relu())


def halve_all(model: nn.Module, _seen: list[Any]) -> None:
    for one in model.parameters():
        one.register_hook(lambda grad: grad * 0.5)


def write(model: nn.Module, _seen: list[Any]) -> None:
    """In place, which torch advises against and scripts do."""
    for one in model.parameters():
        one.register_hook(_clamp)


def _clamp(grad: Tensor) -> None:
    grad.clamp_(-0.05, 0.05)


def look(model: nn.Module, seen: list[Any]) -> None:
    for name, one in model.named_parameters():
        one.register_hook(lambda grad, name=name: seen.append((name, float(grad.norm()))))


def look_and_leave(model: nn.Module, seen: list[Any]) -> None:
    """Hooks after one another, of which the first removes itself when called."""
    weight = next(model.parameters())

    def once(grad: Tensor) -> Tensor:
        handle.remove()
        seen.append(("once", float(grad.norm())))
        return grad.sign()

    handle = weight.register_hook(once)
    weight.register_hook(lambda grad: grad.clamp(-0.03, 0.02))


def after_accumulation(model: nn.Module, _seen: list[Any]) -> None:
    def normalise(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= parameter.grad.norm() + 0.1

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(normalise)


def data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(STEPS, 2, BATCH, 5, generator=generator),
        torch.randn(STEPS, 2, BATCH, 4, generator=generator),
        torch.arange(BATCH),
    )


def train(
    ranks: int, hooks: Callable[..., None], how: str, *, early: bool = False, **arguments: Any
) -> tuple[list[Tensor], list[Any]]:
    """Two backwards a step. ``how``: ``twice`` reduces in each, ``accumulate`` in the last, ``none`` is plain torch."""
    torch.manual_seed(3)
    model: Any = Net()
    seen: list[Any] = []
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if early:
        hooks(model, seen)
    accelerator: Any = None
    if how != "none":
        overrides = {"distributed_type": "ddp", "use_cpu": True}
        accelerator = Accelerator(config=load_config(overrides=overrides, environ={}), **arguments)
        model, optimizer = accelerator.prepare(model, optimizer)
    if not early:
        hooks(model, seen)
    handle = model.second.bias.register_hook(torch.zeros_like)
    rank = 0 if accelerator is None else accelerator.process_index
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    xs, ys, at = data()
    for step in range(STEPS):
        if step == 2:
            handle.remove()
        optimizer.zero_grad()
        for part in range(2):
            x, y = xs[step, part, share], ys[step, part, share]
            if how == "accumulate":
                with accelerator.accumulate(model):
                    accelerator.backward((model(x, at[share]) - y).pow(2).mean() * 2)
            else:
                loss = (model(x, at[share]) - y).pow(2).mean()
                loss.backward() if how == "none" else accelerator.backward(loss)
        optimizer.step()
    found = [one.detach().clone() for one in model.parameters()]
    if accelerator is not None:
        accelerator.end_training()
    return found, seen


def job(hooks: Callable[..., None], how: str, early: bool, arguments: dict[str, Any]) -> Any:
    return train(RANKS, hooks, how, early=early, **arguments)


def compare(hooks: Callable[..., None], how: str, early: bool = False, **arguments: Any) -> None:
    weights, seen = train(1, hooks, "none", early=early)
    for found, looked in spawn(job, RANKS, hooks, how, early, arguments):
        for one, other in zip(found, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        # In which order gradients come within a backward is nobody's.
        assert sorted(name for name, _ in looked) == sorted(name for name, _ in seen)
        torch.testing.assert_close(sorted(x for _, x in looked), sorted(x for _, x in seen), rtol=0, atol=2e-5)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("hooks", [clamp, rectify, write, look, look_and_leave, after_accumulation])
@pytest.mark.gate("*-True")
def test_hooks_are_called_with_what_each_backward_adds(hooks: Callable[..., None], early: bool) -> None:
    compare(hooks, "twice", early)


@pytest.mark.parametrize("hooks", [clamp, look])
def test_gradients_in_buckets(hooks: Callable[..., None]) -> None:
    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    compare(hooks, "twice", kwargs_handlers=[handler])


def test_linear_hooks_in_a_window() -> None:
    compare(halve_all, "accumulate", gradient_accumulation_steps=2)


@pytest.mark.parametrize("hooks", [clamp, rectify, look])
@pytest.mark.gate("clamp")
def test_windows_that_reduce_each_micro_batch(hooks: Callable[..., None]) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    compare(hooks, "accumulate", gradient_accumulation_plugin=plugin)


def refused(hooks: Callable[..., None]) -> str:
    with pytest.raises(UsageError, match="sync_each_batch") as raised:
        train(RANKS, hooks, "accumulate", gradient_accumulation_steps=2)
    return str(raised.value)


@pytest.mark.parametrize("hooks", [clamp, rectify, write, look, after_accumulation])
def test_other_hooks_in_a_window_are_refused(hooks: Callable[..., None]) -> None:
    for said in spawn(refused, RANKS, hooks):
        assert "first.weight of Net" in said


def drifting() -> str:
    def noise(model: nn.Module, _seen: list[Any]) -> None:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for one in model.parameters():
            one.register_hook(lambda grad: grad + torch.randn(grad.shape, generator=generator))

    with pytest.raises(UsageError, match="hooks of parameters") as raised:
        train(RANKS, noise, "twice")
    return str(raised.value)


def test_hooks_that_do_otherwise_on_each_rank_are_noticed() -> None:
    for said in spawn(drifting, RANKS):
        assert "same on all ranks" in said


def counted(ranks: int, how: str) -> list[Tensor]:
    """Ragged numbers of samples, summed losses, and hooks that clamp: one backward a step."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    clamp(model, [])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    accelerator: Any = None
    rank = 0
    if how != "none":
        overrides = {"distributed_type": how, "use_cpu": True}
        accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
        model, optimizer = accelerator.prepare(model, optimizer)
        rank = accelerator.process_index
    xs, ys, _ = data()
    for step in range(STEPS):
        number = BATCH - step
        bounds = [0, *(number * (part + 1) // ranks - (part + 1 < ranks) for part in range(ranks))]
        share = slice(bounds[rank], bounds[rank + 1])
        x, y = xs[step, 0, share], ys[step, 0, share]
        loss = (model(x) - y).pow(2).sum()
        if accelerator is None:
            (loss / number).backward()
        else:
            accelerator.backward(loss, num_items=len(x))
        optimizer.step()
        optimizer.zero_grad()
    found = [one.detach().clone() for one in model.parameters()]
    if accelerator is not None:
        accelerator.end_training()
    return found


@pytest.mark.parametrize(("ranks", "how"), [(1, "single"), (RANKS, "ddp")])
def test_hooks_are_given_gradients_of_the_true_number_of_items(ranks: int, how: str) -> None:
    expected = counted(1, "none")
    for found in spawn(counted, ranks, ranks, how):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def stepped(hook: Callable[[Tensor], Any] | None = None, **options: Any) -> str:
    """One step with a hook after accumulation, or options of DistributedDataParallel; what is refused of them."""
    accelerator = Accelerator(
        config=load_config(overrides={"distributed_type": "ddp", "use_cpu": True}, environ={}),
        kwargs_handlers=[DistributedDataParallelKwargs(**options)],
    )
    model: Any = nn.Linear(5, 4)
    if hook is not None:
        model.weight.register_post_accumulate_grad_hook(hook)
    said = ""
    try:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(3, 5)).mean())
        optimizer.step()
    except UsageError as refused_here:
        said = str(refused_here)
    accelerator.end_training()
    return said


def options_and_hooks() -> list[str]:
    """Return what is refused of two options and two hooks, each followed by what was advised."""
    return [
        stepped(comm_hook="no", comm_wrapper="fp16"),
        stepped(comm_hook="power_sgd", comm_wrapper="fp16"),
        stepped(comm_hook="no"),
        stepped(lambda parameter: parameter.grad.mul_(2)),
        stepped(_double),
    ]


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def test_what_options_and_hooks_are_refused_for_and_what_they_may_do() -> None:
    """Refuse a wrapper without its hook, and a hook that returns something; as advised, both step."""
    for wrapper, powered, left_out, returned, in_place in spawn(options_and_hooks, 2):
        assert "comm_wrapper='fp16' and comm_state_option={} belong to a power_sgd hook, comm_hook is 'no'" in wrapper
        assert "Set comm_hook to 'power_sgd' or 'batched_power_sgd', or leave the other two out." in wrapper
        assert "a post accumulate grad hook of weight of Linear returned something" in returned
        assert "Return None from it, and change p.grad in place." in returned
        assert (powered, left_out, in_place) == ("", "", "")
