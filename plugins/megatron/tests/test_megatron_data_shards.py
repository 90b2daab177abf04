"""Checks that tensors of ``data_parallel: fsdp`` give one process's numbers, and raise where DTensor would not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError, UsageError
from drivetrain_testing import spawn

FSDP: dict[str, Any] = {"distributed_type": "megatron", "megatron_lm_plugin": {"data_parallel": "fsdp"}}
ZERO1: dict[str, Any] = {"distributed_type": "megatron", "megatron_lm_plugin": {"data_parallel": "zero1"}}


def made(config: dict[str, Any], *, frozen: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **config)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    model[0].requires_grad_(not frozen)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.arange(8.0).view(2, 4)).square().mean())
    optimizer.step()
    return model, optimizer


def numbers(config: dict[str, Any]) -> list[float]:
    """Numbers over all elements of parameters, gradients and states; 2 rows are fewer than 3 ranks."""
    model, optimizer = made(config)
    found = [float(one.detach().sum()) for one in model.parameters()]
    tensors: list[Any] = [(one, one.grad, optimizer.state[one]["exp_avg"]) for one in model.parameters()]
    for several in tensors:
        found += [float(each.detach().abs().max() + each.detach().norm()) for each in several]
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(2).add_(one.grad).clamp_(-1, 1)
    return [*found, *(float(one.detach().square().mean()) for one in model.parameters())]


def test_numbers_over_all_elements_are_those_of_one_process() -> None:
    expected = numbers({"distributed_type": "single"})
    for found in spawn(numbers, 3, FSDP):
        assert found == pytest.approx(expected, abs=1e-5)


def assign(model: Any) -> None:
    model[0].weight.data = torch.zeros(7, 4)


def write_row(model: Any) -> None:
    with torch.no_grad():
        model[0].weight[0] = 1.0


def write_view(model: Any) -> None:
    model[0].weight.data.view(-1).zero_()


def initialise(model: Any) -> None:
    nn.init.normal_(model[0].weight)


def add_plain(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.add_(torch.ones(7, 4))


def penalise(model: Any) -> None:
    sum(one.square().sum() for one in model.parameters()).backward()


def pickle(model: Any) -> None:
    torch.save(model[0].weight, "/dev/null")


def copy_model(model: Any) -> None:
    copy.deepcopy(model)


def convert(model: Any) -> None:
    model.double()


def tie(model: Any) -> None:
    model[2].bias = nn.Parameter(torch.zeros(2))


MISTAKES: list[Callable[[Any], None]] = [
    *(assign, write_row, write_view, initialise, add_plain, penalise, pickle, copy_model, convert, tie)
]


def said() -> list[tuple[str, str]]:
    found = []
    for mistake in MISTAKES:
        model, _ = made(FSDP)
        try:
            mistake(model)
        except UnsupportedError as error:
            found.append((mistake.__name__, str(error)))
    return found


def under_zero1() -> list[Tensor]:
    """Do what these refusals advise; a model is copied, and exchanged, before ``prepare``."""
    model, _ = made(ZERO1)
    for mistake in (assign, write_row, write_view, add_plain, initialise, convert):
        mistake(model)
    return [one.detach() for one in model.parameters()]


def test_what_depends_on_places_is_refused_with_advice_that_works() -> None:
    for found in spawn(said, 2):
        assert [name for name, _ in found] == [mistake.__name__ for mistake in MISTAKES]
        assert all("data_parallel: zero1" in words or "accelerator.save_model" in words for _, words in found)
    first, second = spawn(under_zero1, 2)
    torch.testing.assert_close(first, second)


def penalise_what_was_frozen() -> str:
    model, _ = made(FSDP, frozen=True)
    model[0].requires_grad_(True)
    with pytest.raises(UnsupportedError) as caught:
        model[0].weight.sum().backward()
    return str(caught.value)


def test_what_was_frozen_in_prepare_is_guarded_when_it_trains() -> None:
    for words in spawn(penalise_what_was_frozen, 2):
        assert "to differentiate outside of the model's forward" in words
        assert "data_parallel: zero1" in words


# ---- refusals that name a mesh axis, and hooks -----------------------------------------------------------------------


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def halved(how: str, **overrides: Any) -> dict[str, Tensor]:
    """The weights after a step for which a gradient was halved: by a hook from before or after prepare, or by hand."""
    config = load_config(overrides={"distributed_type": "megatron", "use_cpu": True, **overrides}, environ={})
    accelerator = Accelerator(config=config)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    if how == "before":
        model[2].weight.register_hook(halve)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "after":
        model[2].weight.register_hook(halve)
    accelerator.backward(model(torch.arange(8.0).view(2, 4)).square().mean())
    if how == "by hand":
        model[2].weight.grad.mul_(0.5)
    optimizer.step()
    return accelerator.backend.broadcast_object(dict(accelerator.get_state_dict(model)))


def as_advised() -> list[dict[str, Tensor]]:
    for how in ("before", "after"):
        words = r"2\.weight\.register_hook: data_parallel: fsdp .*\. Change parameter\.grad after .*\(loss\), or "
        with pytest.raises(UnsupportedError, match=rf"{words}use data_parallel: ddp and engine: torch\."):
            halved(how, **{"megatron.data_parallel": "fsdp"})
    found = [halved("by hand", **{"megatron.data_parallel": "fsdp"})]
    found += [halved(how, **{"megatron.data_parallel": "ddp"}) for how in ("before", "after")]
    for which, fitting, other in (
        ("ddp", "dp_replicate", "dp_shard"),
        ("zero1", "dp_replicate", "dp_shard"),
        ("fsdp", "dp_shard", "dp_replicate"),
    ):
        asked = {"megatron.data_parallel": which}
        words = rf"data_parallel: {which} lies along the mesh axis {fitting}, not {other}\. Write mesh\.{fitting}, or"
        with pytest.raises(UsageError, match=rf"{words} leave both out: they take the ranks that tp and pp leave"):
            halved("by hand", **asked, **{f"mesh.{other}": 2})
        found += [halved("by hand", **asked, **{f"mesh.{fitting}": 2}), halved("by hand", **asked)]
    return found


def test_gradients_are_changed_and_axes_are_named_as_refusals_advise() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    plain[2].weight.register_hook(halve)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.arange(8.0).view(2, 4)).square().mean().backward()
    optimizer.step()
    for states in spawn(as_advised, 2, timeout=100):
        assert len(states) == 9
        for state in states:
            for name, tensor in plain.state_dict().items():
                torch.testing.assert_close(state[name], tensor, rtol=0, atol=5e-6)
