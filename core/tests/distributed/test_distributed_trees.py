from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from drivetrain.distributed import trees
from drivetrain.errors import UsageError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    logits: Any
    loss: Any = None


class Output(OrderedDict[str, Any]):
    """Keys that are attributes too, as a model output of Transformers has."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class Batch(UserDict[str, Any]):
    pass


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def test_containers_keep_their_type_and_what_they_carry() -> None:
    one = torch.ones(2)
    grouped: defaultdict[str, Any] = defaultdict(list, a=one)
    output = Output(logits=one)
    batch = Batch(x=one)
    batch.encodings = "kept"  # type: ignore[attr-defined]
    tree = {
        "list": [one, (one, None)],
        "pair": Pair(one, {"n": 3}),
        "frozen": Frozen(one),
        "output": output,
        "grouped": grouped,
        "batch": batch,
        "size": torch.Size([2]),
    }
    made = trees.recursively_apply(double, tree)
    assert type(made["list"][1]) is tuple
    assert made["list"][1][1] is None
    assert isinstance(made["pair"], Pair)
    assert made["pair"].right == {"n": 3}
    assert made["frozen"].logits.tolist() == [2.0, 2.0]
    assert made["frozen"].loss is None
    assert type(made["output"]) is Output
    assert made["output"].logits is made["output"]["logits"]
    assert made["grouped"].default_factory is list
    assert made["batch"].encodings == "kept"
    assert made["size"] == torch.Size([2])
    for leaf in (made["list"][0], made["pair"].left, made["output"].logits, made["grouped"]["a"], made["batch"]["x"]):
        assert leaf.tolist() == [2.0, 2.0]
    # The argument is as it was.
    assert output.logits is one
    assert batch["x"] is one
    assert grouped["a"] is one


def test_recursively_apply_passes_arguments_and_asks_the_test_before_entering() -> None:
    assert trees.recursively_apply(lambda x, y, z: x + y + z, [1, "a"], 2, test_type=lambda x: x == 1, z=3) == [6, "a"]
    assert trees.recursively_apply(len, [(1, 2)], test_type=lambda x: isinstance(x, tuple)) == [2]


def test_a_foreign_leaf_is_named_with_its_place() -> None:
    with pytest.raises(UsageError, match=r"float at \['a'\]\[1\] is neither a tensor"):
        trees.tensors({"a": [torch.ones(1), 0.5]})
    with pytest.raises(UsageError, match=r"^str is neither"):
        trees.tensors("text")
    with pytest.raises(UsageError, match=r"int at \.loss"):
        trees.tensors(Frozen(torch.ones(1), 3))


def test_describe_tells_structure_shape_and_dtype() -> None:
    tree = {"x": torch.ones(8, 3), "y": (torch.tensor(1), None), "z": [True]}
    assert trees.describe(tree) == "{'x': float32[8, 3], 'y': (int64[], None), 'z': [bool]}"


def test_find_batch_size_takes_the_first_tensor_that_has_one() -> None:
    assert trees.find_batch_size({"scale": torch.tensor(2.0), "x": [torch.ones(5, 2)], "y": torch.ones(9)}) == 5
    assert trees.find_batch_size(Frozen(torch.ones(4, 1))) == 4
    for empty in ({}, [], torch.tensor(1), {"n": 3}, None):
        with pytest.raises(UsageError, match="no tensor with a batch dimension"):
            trees.find_batch_size(empty)


def test_slice_and_concatenate_are_inverse() -> None:
    tree = {"x": torch.arange(6).reshape(3, 2), "y": Pair(torch.arange(3), None)}
    parts = [trees.slice_tensors(tree, slice(0, 1)), trees.slice_tensors(tree, slice(1, 3))]
    assert parts[1]["y"].left.tolist() == [1, 2]
    joined = trees.concatenate(parts)
    assert torch.equal(joined["x"], tree["x"])
    assert isinstance(joined["y"], Pair)
    assert torch.equal(joined["y"].left, tree["y"].left)
    assert trees.concatenate([torch.ones(2, 1), torch.ones(2, 3)], dim=1).shape == (2, 4)


def test_concatenate_refuses_what_does_not_fit() -> None:
    with pytest.raises(UsageError, match="an empty sequence"):
        trees.concatenate([])
    with pytest.raises(UsageError, match="different structure"):
        trees.concatenate([{"x": torch.ones(1)}, {"y": torch.ones(1)}])


class Movable:
    def __init__(self) -> None:
        self.places: list[Any] = []

    def to(self, device: Any) -> Movable:
        self.places.append(device)
        return self


def test_send_to_device_moves_tensors_and_movable_objects() -> None:
    movable = Movable()
    tree = {"x": torch.ones(1), "kept": torch.ones(1), "deep": [movable, {"kept": torch.ones(1)}], "n": 3, "t": Movable}
    moved = trees.send_to_device(tree, "meta", skip_keys="kept")
    assert moved["x"].device.type == "meta"
    assert moved["kept"].device.type == "cpu"
    assert moved["deep"][1]["kept"].device.type == "cpu"
    assert movable.places == ["meta"]
    assert moved["n"] == 3
    assert moved["t"] is Movable
    assert tree["x"].device.type == "cpu"  # type: ignore[union-attr]
    both = trees.send_to_device({"a": torch.ones(1), "b": torch.ones(1)}, "meta", skip_keys=["a", "b"])
    assert {tensor.device.type for tensor in both.values()} == {"cpu"}


def test_a_read_only_mapping_cannot_be_filled_but_is_rebuilt() -> None:
    made = trees.recursively_apply(double, MappingProxyType({"a": torch.ones(1)}))
    assert made["a"].item() == 2.0
