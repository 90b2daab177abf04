from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from drivetrain.distributed.process_control import share, split
from drivetrain.errors import UsageError


@given(st.integers(0, 200), st.integers(1, 9))
def test_shares_are_a_partition_in_order_that_differs_by_one_at_most(length: int, count: int) -> None:
    shares = [share(length, index, count) for index in range(count)]
    assert [item for one in shares for item in one] == list(range(length))
    sizes = [len(one) for one in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 200), st.integers(1, 9))
def test_padding_evens_the_shares_out_behind_the_real_items(length: int, count: int) -> None:
    for index in range(count):
        bare, padded = share(length, index, count), share(length, index, count, padded=True)
        assert padded[: len(bare)] == bare
        assert set(padded[len(bare) :]) <= {bare[-1] if bare else length - 1}
        assert len(padded) == -(-length // count)


class Table:
    """A table of the ``datasets`` package, as far as it is used."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: list[int]) -> Table:
        return Table([self.rows[index] for index in indices])


def test_every_kind_of_container_is_cut_alike_and_left_alone() -> None:
    data: dict[str, Any] = {
        "list": [0, 1, 2, 3, 4],
        "tuple": (0, 1, 2, 3, 4),
        "range": range(5),
        "tensor": torch.arange(5),
        "array": np.arange(5),
        "deep": {"ids": [0, 1, 2, 3, 4]},
    }
    before = dict(data)
    for padded, wanted in ((False, [3, 4]), (True, [3, 4, 4])):
        mine = split(data, 1, 2, padded)
        assert mine["list"] == wanted
        assert mine["tuple"] == tuple(wanted)
        assert list(mine["range"]) == wanted
        assert mine["tensor"].tolist() == wanted
        assert mine["array"].tolist() == wanted
        assert mine["deep"] == {"ids": wanted}
        table = split(Table([0, 1, 2, 3, 4]), 1, 2, padded)
        assert table.rows == wanted
        dataset = split(TensorDataset(torch.arange(5)), 1, 2, padded)
        assert [row[0].item() for row in dataset] == wanted
    assert data == before
    assert data["list"] == [0, 1, 2, 3, 4]


def test_a_process_without_items_gets_none_or_a_copy() -> None:
    assert split([7], 1, 3) == []
    assert split([7], 1, 3, padded=True) == [7]
    assert split(torch.tensor([[7]]), 2, 3).shape == (0, 1)
    assert split([], 0, 2, padded=True) == []
    assert split({}, 0, 2) == {}


def test_alone_everything_is_mine() -> None:
    thing = object()
    assert split(thing, 0, 1) is thing


def test_what_has_no_items_to_share_out_is_refused() -> None:
    with pytest.raises(UsageError, match=r"different length.*\['a'\]: 2, \['b'\]\['c'\]: 3"):
        split({"a": [1, 2], "b": {"c": [1, 2, 3]}}, 0, 2)
    for wrong in ("text", 5, {"a": {1, 2}}, torch.tensor(1), iter([1])):
        with pytest.raises(UsageError, match="cannot be split between processes"):
            split(wrong, 0, 2)
