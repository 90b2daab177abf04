"""Which modules become units."""

from __future__ import annotations

import logging

import pytest
from pydantic import ValidationError
from torch import nn

from drivetrain.api import UsageError
from drivetrain_fsdp.config import FSDPConfig
from drivetrain_fsdp.units import choose_units


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.short = nn.ModuleList([nn.Linear(4, 4)])
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)


def names(model: nn.Module, **section: object) -> list[str]:
    by_identity = {id(module): name for name, module in model.named_modules()}
    return [by_identity[id(unit)] for unit in choose_units(model, FSDPConfig(**section))]


def every_second(model: nn.Module) -> list[nn.Module]:
    return [model.blocks[1], model.embed]


def blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.blocks)


def a_list(model: nn.Module) -> list[nn.Module]:
    return [model.blocks]


def a_stranger(model: nn.Module) -> list[nn.Module]:
    return [nn.Linear(1, 1)]


def test_default_is_the_longest_list() -> None:
    assert names(Net()) == ["blocks.2", "blocks.1", "blocks.0"]


def test_the_models_own_word_comes_first() -> None:
    model = Net()
    model._no_split_modules = ["Embedding", "NotThere"]
    assert names(model) == ["embed"]


def test_by_class() -> None:
    assert names(Net(), transformer_layer_cls="Block") == ["blocks.2", "blocks.1", "blocks.0"]
    # Children stand before their parents.
    assert names(Net(), transformer_layer_cls=["Block", "Linear"])[:4] == [
        "head", "blocks.2.second", "blocks.2.first", "blocks.2",
    ]  # fmt: skip


def test_by_size() -> None:
    # A block has 40 parameters, the embedding and the head 40 each, a linear layer 20.
    assert names(Net(), min_num_params=40) == ["head", "blocks.2", "blocks.1", "blocks.0", "embed"]
    assert names(Net(), min_num_params=20)[-2:] == ["short.0", "embed"]
    assert names(Net(), min_num_params=10**6) == []


def test_by_function() -> None:
    assert names(Net(), wrap=f"{__name__}:every_second") == ["blocks.1", "embed"]
    for wrong in (f"{__name__}:a_list", f"{__name__}:a_stranger", f"{__name__}:absent", "no_such_module:f"):
        with pytest.raises(UsageError):
            names(Net(), wrap=wrong)


def test_an_unknown_class_is_guessed() -> None:
    with pytest.raises(UsageError, match=r"transformer_layer_cls names Blok, which Net has not\. Did you mean Block\?"):
        names(Net(), transformer_layer_cls="Blok")
    assert names(Net(), transformer_layer_cls="Block")
    with pytest.raises(UsageError, match=r"names Zzz, which Net has not\. Its modules are of the classes Block"):
        names(Net(), transformer_layer_cls=["Zzz", "Block"])
    assert names(Net(), transformer_layer_cls=["Linear", "Block"])


@pytest.mark.parametrize(
    ("wrong", "told", "advised"),
    [
        ("no_such_module:f", r"fsdp\.wrap: no_such_module:f cannot be imported: .*\. Write 'module", "blocks"),
        ("absent", r"cannot be imported: .*absent.*\. Write 'module:function'", "blocks"),
        ("a_stranger", r"must return modules of the model that it is given\. Return list\(model\.layers\)", "blocks"),
        ("a_list", r"a ModuleList cannot be a unit, since it is never called\. Choose the modules", "every_second"),
    ],
)
def test_a_function_that_names_no_units_is_refused_until_it_does(wrong: str, told: str, advised: str) -> None:
    with pytest.raises(UsageError, match=told):
        names(Net(), wrap=wrong if ":" in wrong else f"{__name__}:{wrong}")
    assert "blocks.1" in names(Net(), wrap=f"{__name__}:{advised}")


def test_a_model_without_lists_is_one_unit() -> None:
    assert names(nn.Linear(3, 3)) == []
    assert names(nn.Sequential(nn.Linear(3, 3), nn.ReLU())) == []


def test_tied_units_are_merged(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    model.head.weight = model.embed.weight
    assert names(model) == ["blocks.2", "blocks.1", "blocks.0"]
    with caplog.at_level(logging.WARNING):
        assert names(model, transformer_layer_cls="Embedding, Block") == ["blocks.2", "blocks.1", "blocks.0"]
    assert "embed.weight" in caplog.text
    model.blocks[2].first.weight = model.blocks[0].first.weight
    assert names(model) == ["blocks.1"]


def test_a_module_used_twice_is_one_unit() -> None:
    model = Net()
    model.blocks[2] = model.blocks[0]
    assert names(model) == ["blocks.1", "blocks.0"]


def test_config_mistakes() -> None:
    for wrong in (
        {"min_num_params": 5, "transformer_layer_cls": "Block"},
        {"min_num_params": True},
        {"min_num_params": 0},
        {"wrap": "module.function"},
        {"forward_prefetch": -1},
        {"backward_prefetch": 0},
        {"reshard": True},
    ):
        with pytest.raises(ValidationError):
            FSDPConfig(**wrong)
    assert FSDPConfig(reshard_after_forward=True).reshard_after_forward is True
    assert FSDPConfig(reshard_after_forward=2).reshard_after_forward == 2
