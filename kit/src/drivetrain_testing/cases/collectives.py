"""Checks collectives on nested structures, odd shapes, empty tensors, every dtype, and objects."""

from __future__ import annotations

import time
from collections import namedtuple
from typing import Any

import pytest
import torch

from drivetrain.errors import UsageError
from drivetrain_testing import diagnosis
from drivetrain_testing.kit import Kit, case

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - the plain kind, as scripts have it


def _ranks(accelerator: Any) -> tuple[int, int]:
    return accelerator.backend.topology.dp_rank, accelerator.backend.topology.dp_size


@case()
def gather_nested(kit: Kit) -> None:
    """Tensors in dicts, lists, tuples and namedtuples come back in the same shape of structure, by rank."""
    accelerator = kit.accelerator()
    rank, size = _ranks(accelerator)
    mine = torch.tensor([float(rank)], device=accelerator.device)
    found = accelerator.gather({"a": [mine, (mine + 10,)], "pair": Pair(mine + 20, mine + 30)})
    expected = torch.arange(size, dtype=torch.float32, device=accelerator.device)
    order = diagnosis.order_of(found["a"][0].tolist(), expected.tolist())
    assert not order, f"gather: {order}"
    assert torch.equal(found["a"][0], expected)
    assert isinstance(found["a"][1], tuple)
    assert torch.equal(found["a"][1][0], expected + 10)
    assert isinstance(found["pair"], Pair)
    assert torch.equal(found["pair"].right, expected + 30)


@case()
def gather_shapes_and_dtypes(kit: Kit) -> None:
    """0-d tensors become 1-d; booleans, integers, halves and empty tensors survive; inputs stay as they are."""
    accelerator = kit.accelerator()
    rank, size = _ranks(accelerator)
    scalar = torch.tensor(rank, device=accelerator.device)
    gathered = accelerator.gather(scalar).tolist()
    assert gathered == list(range(size)), f"gather: {diagnosis.order_of(gathered, list(range(size))) or gathered}"
    assert scalar.shape == ()
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        rows = torch.full((2, 3), rank, device=accelerator.device).to(dtype)
        found = accelerator.gather(rows)
        assert found.dtype == dtype, f"{dtype} became {found.dtype}"
        assert torch.equal(found, torch.cat([torch.full_like(rows, other) for other in range(size)])), f"{dtype}"
    assert accelerator.gather(torch.empty(0, 3, device=accelerator.device)).shape == (0, 3)
    transposed = torch.arange(6.0, device=accelerator.device).view(2, 3).t()
    assert torch.equal(accelerator.gather(transposed), torch.cat([transposed] * size)), "not contiguous"


@case()
def uneven_shapes(kit: Kit) -> None:
    """``pad_across_processes`` makes ranks' tensors gatherable: at the end or the front, in any dim."""
    accelerator = kit.accelerator()
    rank, size = _ranks(accelerator)
    mine = torch.full((rank + 1, 2), rank + 1.0, device=accelerator.device)
    padded = accelerator.pad_across_processes(mine, pad_index=-1)
    assert padded.shape == (size, 2)
    assert torch.equal(padded[: rank + 1], mine)
    assert bool((padded[rank + 1 :] == -1).all())
    assert accelerator.gather(padded).shape == (size * size, 2)
    front = accelerator.pad_across_processes({"x": mine.t()}, dim=1, pad_index=-1, pad_first=True)["x"]
    assert torch.equal(front[:, size - rank - 1 :], mine.t())


@case(guards="accelerate: an unknown reduction silently sums")
def reductions(kit: Kit) -> None:
    """Sum and mean over the ranks, on nested values, the input untouched; an unknown reduction is refused."""
    accelerator = kit.accelerator()
    rank, size = _ranks(accelerator)
    mine = torch.tensor([rank + 1.0, 2.0], device=accelerator.device)
    total = sum(range(1, size + 1))
    found = accelerator.reduce({"x": [mine]})["x"][0]
    averaged = found.tolist() == [total / size, 2.0]
    means = ": the mean, 1 / data-parallel size of the sum" if averaged else ""
    assert found.tolist() == [total, 2.0 * size], f"the sum is {found.tolist()}{means}"
    assert accelerator.reduce(mine, reduction="mean").tolist() == [total / size, 2.0]
    assert mine.tolist() == [rank + 1.0, 2.0], "reduce changed its input"
    assert accelerator.reduce(torch.tensor(rank, device=accelerator.device)).item() == total - size
    with pytest.raises(UsageError, match="medium"):
        accelerator.reduce(mine, reduction="medium")


@case()
def broadcasts(kit: Kit) -> None:
    """Every rank gets the source rank's tensors and objects, for each source."""
    from drivetrain.utils import broadcast, broadcast_object_list

    accelerator = kit.accelerator()
    rank, last = accelerator.process_index, accelerator.num_processes - 1
    for sender in {0, last}:
        mine = {"x": torch.full((2,), rank, device=accelerator.device)}
        assert broadcast(mine, from_process=sender)["x"].tolist() == [sender, sender]
    objects = [rank, {"name": f"rank {rank}"}]
    broadcast_object_list(objects, from_process=last)
    assert objects == [last, {"name": f"rank {last}"}]


@case(guards="accelerate: gather_object turns a dict into its keys")
def objects(kit: Kit) -> None:
    """Lists are joined by rank; a dict stays a dict."""
    from drivetrain.utils import gather_object

    accelerator = kit.accelerator()
    rank, size = accelerator.backend.topology.dp_rank, accelerator.backend.topology.dp_size
    assert gather_object([f"rank {rank}", rank]) == [item for other in range(size) for item in (f"rank {other}", other)]
    assert gather_object([{"rank": rank}]) == [{"rank": other} for other in range(size)]


@case()
def main_process_goes_first(kit: Kit) -> None:
    """``main_process_first`` and ``wait_for_everyone`` order what ranks do."""
    accelerator = kit.accelerator()
    mark = kit.shared / "mark"
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.3)  # so that who does not wait is there first
            mark.write_text("written", encoding="utf-8")
        else:
            assert mark.exists(), "another process was let in before the main process was done"
    own = kit.shared / f"rank-{accelerator.process_index}"
    time.sleep(0.3 if accelerator.is_last_process else 0.0)
    own.write_text("here", encoding="utf-8")
    accelerator.wait_for_everyone()
    found = len(list(kit.shared.glob("rank-*")))
    assert found == accelerator.num_processes, f"{found} of {accelerator.num_processes} had arrived"


@case()
def splits_between_processes(kit: Kit) -> None:
    """Every process gets its share, in order, nothing lost; padding repeats the last element."""
    accelerator = kit.accelerator()
    items = list(range(7))
    with accelerator.split_between_processes(items) as mine:
        parts = accelerator.gather(torch.tensor([len(mine)], device=accelerator.device)).tolist()
        held = list(mine)
    topology = accelerator.backend.topology
    assert sum(parts) == 7
    assert held == items[sum(parts[: topology.dp_rank]) :][: len(held)]
    with accelerator.split_between_processes(items, apply_padding=True) as mine:
        assert len(mine) == -(-7 // topology.dp_size)


@case()
def triggers(kit: Kit) -> None:
    """A flag set by one process is seen by all, once."""
    accelerator = kit.accelerator()
    assert not accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
