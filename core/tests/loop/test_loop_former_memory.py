"""Tensors where a parameter was before an engine moved it raise where that would be silently wrong, and only there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop.former_memory import FormerMemory


def move(module: nn.Module) -> None:
    """As engines do: other parameters under the same names."""
    for part in module.modules():
        for name, one in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(one.detach().clone(), requires_grad=one.requires_grad))


def prepared(module: nn.Module) -> FormerMemory:
    memory = FormerMemory("Engine", module)
    move(module)
    memory.refuse_those_left()
    return memory


def flat(model: nn.Linear) -> Tensor:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    return vector


TAKEN: dict[str, Callable[[nn.Linear], Any]] = {
    "data": lambda model: model.weight.data,
    "detach": lambda model: model.weight.detach(),
    "row": lambda model: model.weight.data[1],
    "row with a graph": lambda model: model.weight[1],
    "transposed": lambda model: model.weight.detach().t(),
    "state_dict": lambda model: model.state_dict()["weight"],
    "parameter": lambda model: nn.Parameter(model.weight.data),
    "flat": flat,
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda one: one.mul_(2),
    "setitem": lambda one: one.__setitem__(0, 1.0),
    "data": lambda one: one.data.add_(1),
    "view": lambda one: one.detach()[0].zero_(),
    "foreach": lambda one: torch._foreach_mul_([one], 2),
    "out": lambda one: torch.add(torch.ones(one.shape), 1, out=one.detach()),
    "init": nn.init.zeros_,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("taken", TAKEN)
def test_writing_is_refused(taken: str, write: str) -> None:
    model = nn.Linear(4, 4)
    one = TAKEN[taken](model)
    prepared(model)
    words = r"taken from weight of Linear before .*Engine has moved.*(?s:.*)clone"
    with pytest.raises(UsageError, match=words), torch.no_grad():
        WRITES[write](one)


@pytest.mark.parametrize("taken", TAKEN)
def test_reading_is_right_until_the_parameter_changes(taken: str) -> None:
    model = nn.Linear(4, 4)
    one = TAKEN[taken](model)
    before = one.detach().clone()
    memory = prepared(model)
    assert torch.equal(one, before)
    assert copy.deepcopy(one.detach()).__class__ is Tensor
    assert one.shape == before.shape
    assert one.detach()[0].tolist() == before[0].tolist()
    memory.before_step()
    for read in (lambda: one + 1, lambda: one.sum().item(), lambda: list(one), one.detach, one.tolist):
        with pytest.raises(UsageError, match="keeps the first values"):
            read()
    assert one.shape == before.shape
    assert one.dtype is torch.float32
    assert "weight of Linear" in repr(one)
    assert "weight of Linear" in f"{one}"


def test_a_write_of_the_script_changes_a_parameter() -> None:
    model = nn.Linear(4, 4)
    weight, bias = model.weight.data, model.bias.data
    prepared(model)
    with torch.no_grad():
        model.weight.zero_()
    bias.sum()
    with pytest.raises(UsageError, match="keeps the first values"):
        weight.sum()


def test_frozen_parameters_are_read_all_along() -> None:
    vectors = torch.randn(5, 3)
    model = nn.Embedding.from_pretrained(vectors)
    memory = prepared(model)
    memory.before_step()
    assert vectors.sum().isfinite()
    with pytest.raises(UsageError, match="the model does not see"):
        vectors.zero_()
    model.weight.requires_grad_()
    memory.before_step()
    assert not vectors.requires_grad


def test_what_is_left_where_it_is_stays_ordinary() -> None:
    model = nn.Linear(4, 4)
    weight, bias = model.weight.data, model.bias.data
    memory = FormerMemory("Engine", model)
    model.bias = nn.Parameter(bias.clone())
    memory.refuse_those_left()
    memory.before_step()
    weight.zero_()
    assert type(weight) is Tensor
    assert not model.weight.any()
    with pytest.raises(UsageError):
        bias.zero_()


def test_a_pipeline_moves_parameters_later() -> None:
    model = nn.Linear(4, 4)
    memory = FormerMemory("Engine", model, moved_later=True)
    memory.refuse_those_left()
    weight = model.weight.data
    weight.zero_()
    memory.look()
    move(model)
    memory.before_step()
    words = "taken from weight of Linear before its first forward(?s:.*)after its first forward"
    with pytest.raises(UsageError, match=words):
        weight.sum()


def test_a_tensor_that_is_given_other_memory_is_ordinary() -> None:
    model = nn.Linear(4, 4)
    other = nn.Linear(4, 4)
    other.load_state_dict(model.state_dict(), assign=True)
    prepared(model)
    other.weight.data = other.weight.data.double()
    other.weight.data.zero_()
    assert type(other.weight) is nn.Parameter
    with pytest.raises(RuntimeError, match="bias of Linear before"):  # torch puts every error into one
        other.load_state_dict(nn.Linear(4, 4).double().state_dict())


def test_a_model_beside_a_frozen_one_is_prepared_as_any_other() -> None:
    vectors = torch.randn(5, 3)
    first, second = nn.Embedding.from_pretrained(vectors), nn.Embedding.from_pretrained(vectors)
    prepared(first)
    assert type(second.weight) is not nn.Parameter
    FormerMemory("Engine", second)
    assert type(second.weight) is nn.Parameter


def arrays(model: nn.Module) -> dict[str, Any]:
    return {name: one.detach().numpy() for name, one in model.named_parameters()}


TAKES_ARRAY: dict[str, Callable[[nn.Linear], Any]] = {
    "one": lambda model: model.weight.detach().numpy(),
    "row": lambda model: model.weight.detach().numpy()[0],
    "in a dictionary": arrays,
    "in a tuple": lambda model: (model.weight.data.cpu().numpy(),),
}


@pytest.mark.parametrize("takes", TAKES_ARRAY)
def test_arrays_are_refused_at_once(takes: str) -> None:
    model = nn.Linear(4, 4)
    kept = TAKES_ARRAY[takes](model)
    with pytest.raises(UnsupportedError, match=r"array of numpy .* of weight of Linear.*(?s:.*)copy\(\)"):
        FormerMemory("Engine", model)
    del kept
    FormerMemory("Engine", model)


def test_arrays_that_are_gone_or_copies_pass() -> None:
    model = nn.Linear(4, 4)
    taken = model.weight.data
    copied = taken.numpy().copy()
    assert taken.numpy().sum() == pytest.approx(copied.sum())
    FormerMemory("Engine", model)


def test_arrays_that_parameters_were_made_of_pass() -> None:
    array = torch.randn(5, 3).numpy()
    FormerMemory("Engine", nn.Embedding.from_pretrained(torch.from_numpy(array), freeze=False))


def test_nothing_is_kept_alive() -> None:
    model = nn.Linear(4, 4)
    taken = model.weight.data
    memory = prepared(model)
    alive = [weakref.ref(each) for each in (taken, model, memory)]
    del taken, model, memory
    gc.collect()
    assert [each() for each in alive] == [None, None, None]
