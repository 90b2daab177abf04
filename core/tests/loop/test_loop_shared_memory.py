"""Parameters that share memory are found, whatever way they came to share it, and nothing else is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.errors import UnsupportedError
from drivetrain.loop.shared_memory import SharedMemory, check_still_frozen


def moving() -> SharedMemory:
    return SharedMemory("Engine", moves=True)


def pair() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})


def by_data(model: nn.ModuleDict) -> None:
    model["b"].weight.data = model["a"].weight.data  # type: ignore[assignment]


def transposed(model: nn.ModuleDict) -> None:
    model["b"].weight = nn.Parameter(model["a"].weight.t())  # type: ignore[operator]


def some_rows(model: nn.ModuleDict) -> None:
    model["b"].weight = nn.Parameter(model["a"].weight[:3])  # type: ignore[index]


def buffer(model: nn.ModuleDict) -> None:
    model["b"].register_buffer("seen", model["a"].weight.data[0])  # type: ignore[index]


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (by_data, r"a.weight and b.weight .* two parameters in one memory.*b.weight = a.weight"),
        (transposed, r"a.weight and b.weight .* two parameters in one memory.*F.linear\(h, a.weight.t\(\)\)"),
        (some_rows, r"a.weight and b.weight .* two parameters in one memory.*weight\[:4\]"),
        (buffer, r"a.weight and b.seen .* a parameter and a buffer in one memory"),
    ],
)
def test_what_shares_memory_is_refused(share, words: str) -> None:
    model = pair()
    share(model)
    with pytest.raises(UnsupportedError, match=f"(?s){words}"):
        moving().check([model])


def test_a_model_that_was_prepared_before_counts() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight.data = first.weight.data
    memory = moving()
    memory.check([first])
    memory.add(first)
    first.weight = nn.Parameter(torch.zeros(6, 6))  # as an engine that replaces parameters
    with pytest.raises(UnsupportedError, match=r"weight of Linear and weight of Linear .*(?s:.*)into one module"):
        memory.check([second])
    memory.clear()
    memory.check([second])


def test_a_parameter_beside_the_model_counts() -> None:
    model = nn.Linear(6, 6)
    with pytest.raises(UnsupportedError, match="weight of Linear and the parameter that no model holds are two"):
        moving().check([model], [nn.Parameter(model.weight.data[:2])])


def test_what_shares_nothing_passes() -> None:
    tied = pair()
    tied["b"].weight = tied["a"].weight
    columns = pair()
    wide = torch.randn(6, 12)
    columns["a"].weight.data, columns["b"].weight.data = wide[:, ::2], wide[:, 1::2]
    del wide
    packed = pair()
    vector = nn.utils.parameters_to_vector(packed.parameters()).detach()
    nn.utils.vector_to_parameters(vector, packed.parameters())
    with torch.device("meta"):
        absent = pair()
    memory = moving()
    memory.check([tied, columns, packed, absent, nn.LSTM(4, 4)])
    assert not memory.add(tied)
    memory.check([tied])


def test_tensors_on_meta_share_memory_too() -> None:
    with torch.device("meta"):
        model = pair()
    by_data(model)
    with pytest.raises(UnsupportedError, match=r"a.weight and b.weight .* in one memory"):
        moving().check([model])


def test_frozen_parameters_pass_until_one_is_trained() -> None:
    vectors = torch.randn(5, 4)
    model = nn.ModuleDict({name: nn.Embedding.from_pretrained(vectors) for name in "ab"})
    memory = moving()
    memory.check([model])
    names = memory.add(model)
    assert names == ["a.weight", "b.weight"]
    check_still_frozen(model, names)
    model["b"].requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"b.weight of ModuleDict was frozen .* its memory"):
        check_still_frozen(model, names)
    with pytest.raises(UnsupportedError, match="in one memory"):
        moving().check([model])


def test_an_engine_that_says_it_keeps_memory_is_looked_at_again() -> None:
    model = pair()
    by_data(model)
    memory = SharedMemory("Engine", moves=False)
    pairs = memory.pairs(model)
    memory.check_kept(model, pairs)
    model["b"].weight.data = model["b"].weight.data.clone()  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match="no longer share it"):
        memory.check_kept(model, pairs)


def test_lazy_parameters_have_no_memory_yet() -> None:
    model = nn.ModuleDict({"a": nn.LazyLinear(3), "b": nn.Linear(6, 6)})
    moving().check([model])
    assert not SharedMemory("Engine", moves=False).pairs(model)
