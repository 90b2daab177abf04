"""``gather_for_metrics`` between real processes on gloo: each sample once, in order, or an error on every rank."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from gloo_cases import WORLDS, Pair, Stream, gathered, numbers, run, same
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.data.loader import prepare_data_loader, skip_first_batches
from drivetrain.data.metrics import gather, gather_for_metrics
from drivetrain.distributed.current import set_current_backend
from drivetrain.distributed.nested import gather_object, pad_across_processes
from drivetrain.errors import CollectiveMismatchError, UsageError
from drivetrain_testing import spawn


def run_case(name: str, kwargs: dict[str, Any]) -> Any:
    return run(CASES[name], kwargs)


def on(world: int, name: str, **kwargs: Any) -> list[Any]:
    return spawn(run_case, world, name, kwargs)


# ---- gather_for_metrics ---------------------------------------------------------------------------------------------


def kinds(context, size):
    """Tensors, dicts, tuples, named tuples, lists and objects, in one loop."""
    found: dict[str, list] = {name: [] for name in ("tensor", "dict", "named", "ids", "strings", "lists", "mixed")}
    found |= {"dtypes": [], "objects": [], "wide": []}
    for batch in numbers(context, size):
        words = [f"w{value}" for value in batch.tolist()]
        found["tensor"] += gather_for_metrics(batch, context).tolist()
        found["wide"] += gather_for_metrics(batch[:, None].repeat(1, 3), context)[:, 2].tolist()
        nested = gather_for_metrics({"a": batch, "b": [batch * 2, (batch * 3,)]}, context)
        columns = (nested["a"], nested["b"][0], nested["b"][1][0])
        found["dict"] += list(zip(*(column.tolist() for column in columns), strict=True))
        pair = gather_for_metrics(Pair(batch, None), context)
        assert isinstance(pair, Pair)
        found["named"] += pair.x.tolist()
        merged = gather_for_metrics({"ids": words}, context)
        assert list(merged) == ["ids"]
        found["ids"] += merged["ids"]
        found["strings"] += gather_for_metrics(words, context)
        one, two = gather_for_metrics((words, [[value] for value in batch.tolist()]), context)
        found["lists"] += list(zip(one, two, strict=True))
        mixed = gather_for_metrics({"loss": batch.float(), "text": words, "none": None}, context)
        assert mixed["none"] is None
        found["mixed"] += list(zip(mixed["loss"].tolist(), mixed["text"], strict=True))
        found["objects"] += gather_for_metrics([torch.zeros(value) for value in batch], context, use_gather_object=True)
        small = (batch > 3, batch.to(torch.bfloat16), batch.to(torch.int16), batch.to(torch.complex64))
        found["dtypes"].append([str(each.dtype) for each in gather_for_metrics(small, context)])
        assert gather_for_metrics(small, context)[0].tolist() == [value > 3 for value in found["tensor"][-len(two) :]]
    found["objects"] = [len(each) for each in found["objects"]]
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.gate("*-4")
def test_every_kind_of_value_each_sample_once_in_order(world, even_batches):
    # With uneven batches a rank without a last batch could not call; 22 samples leave every rank some.
    found = same(on(world, "kinds", size=22, even_batches=even_batches))
    whole = list(range(22))
    assert found["tensor"] == found["wide"] == found["named"] == found["objects"] == whole
    assert found["dict"] == [(value, 2 * value, 3 * value) for value in whole]
    assert found["ids"] == found["strings"] == [f"w{value}" for value in whole]
    assert found["lists"] == [(f"w{value}", [value]) for value in whole]
    assert found["mixed"] == [(float(value), f"w{value}") for value in whole]
    assert set(map(tuple, found["dtypes"])) == {("torch.bool", "torch.bfloat16", "torch.int16", "torch.complex64")}


def sizes(context):
    """Every length of a dataset, shuffled or not: as many come back, and those."""
    results = []
    for size in range(18):
        loader = numbers(context, size, shuffle=size > 0 and size % 2 == 0)
        results.append(gathered(loader, context))
    return results


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.gate("1", "4")
def test_any_length_of_dataset(world):
    for size, shown in enumerate(same(on(world, "sizes"))):
        assert sorted(shown) == list(range(size))


def loops(context):
    """After a skip, a break, in nested loops: accelerate#2007 and its kin."""
    first, second = numbers(context, 13, 2), numbers(context, 11, 2)
    skipped = []
    for batch in skip_first_batches(first, 2):
        skipped += gather_for_metrics(batch, context).tolist()
    for batch in first:
        last = batch
        if first.end_of_dataloader:
            break
    del last
    world = context.backend.topology.dp_size
    unrelated = gather_for_metrics(torch.arange(10), context).tolist()
    nested: list[list[int]] = []
    for outer in first:
        inner: list[int] = []
        for batch in second:
            inner += gather_for_metrics(batch, context).tolist()
        nested.append(inner)
        nested.append(gather_for_metrics(outer, context).tolist())
    ends = len(gather_for_metrics(torch.zeros(3), context))
    return skipped, unrelated == list(range(10)) * world, nested, ends == 3 * world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.gate("1", "4")
def test_after_a_skip_a_break_and_nested_loops(world):
    skipped, unrelated, nested, after = same(on(world, "loops"))
    assert skipped == list(range(13))[2 * 2 * world :]
    assert unrelated
    assert after
    assert all(inner == list(range(11)) for inner in nested[::2])
    assert list(chain.from_iterable(nested[1::2])) == list(range(13))


def alignment(context):
    """On a last batch of one sample for two ranks: what can be aligned is, what cannot raises on every rank."""
    seen: dict[str, Any] = {}
    loader = numbers(context, 9, 4)
    for batch in loader:
        if not loader.end_of_dataloader:
            # Nothing is repeated, so nothing needs to be aligned.
            assert len(gather_for_metrics(torch.zeros(7), context)) == 7 * context.backend.topology.dp_size
            assert gather_for_metrics(batch.sum(), context).shape == (context.backend.topology.dp_size,)
            continue
        for name, value in {
            "tensor": torch.zeros(7),
            "list": ["a"] * 7,
            "nested": {"x": batch, "y": torch.zeros(7)},
        }.items():
            with pytest.raises(UsageError) as caught:
                gather_for_metrics(value, context)
            seen[name] = str(caught.value)
        mine = torch.zeros(6 + context.dp_rank)
        with pytest.raises(UsageError, match="Gather tensors that have others with"):
            gather_for_metrics(mine, context)
        seen["padded"] = len(gather(pad_across_processes(mine, backend=context.backend), context.backend))
        seen["objects"] = gather_object(["a"] * 7, context.backend)
        seen["repeat"] = gather_for_metrics(torch.ones(()).repeat(loader.batch_size), context).shape[0]
        seen["scalar"] = gather_for_metrics(batch.sum(), context).shape[0]
        seen["dicts"] = len(gather_for_metrics({"metric": 1.0}, context))
        seen["object"] = len(gather_for_metrics("text", context))
    return seen


def test_what_cannot_be_aligned_raises_on_every_rank():
    seen = same(on(2, "alignment"))
    assert "float32[7]" in seen["tensor"]
    assert "the parts have 7, 7 rows by rank, the current batch has 1, 1, of which 1, 0 count" in seen["tensor"]
    assert "rows of a list repeat samples" in seen["list"]
    assert "accelerator.gather(accelerator.pad_across_processes(values)), and objects" in seen["list"]
    assert seen["padded"] == 14
    assert seen["objects"] == ["a"] * 14
    assert "float32[7]" in seen["nested"]
    assert seen["repeat"] == 1
    # The other rank holds nothing but a repeated sample.
    assert seen["scalar"] == seen["dicts"] == seen["object"] == 1


class Batches(IterableDataset):
    """Yields whole batches of 4."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        yield from torch.arange(self.size).split(4)


class Foreign:
    """Nobody's DataLoader."""

    batch_size = 4

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        yield from torch.arange(self.size).split(4)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


LOADERS = {
    "map": lambda size: DataLoader(range(size), batch_size=4),
    "stream": lambda size: DataLoader(Stream(size), batch_size=4),
    "workers": lambda size: DataLoader(Stream(size), batch_size=4, num_workers=1, multiprocessing_context="fork"),
    "batches": lambda size: DataLoader(Batches(size), batch_size=None),
    "sampler": lambda size: DataLoader(range(size), batch_sampler=torch.arange(size).split(4)),
    "foreign": Foreign,
}


def repeated(context, size):
    """A loss for each batch, repeated for its rows, and cut at its end; predictions and their cut."""
    found = {}
    set_current_backend(context.backend)
    for kind, build in LOADERS.items():
        loader, losses, cut, rows = prepare_data_loader(build(size), context), [], [], []
        for batch in loader:
            loss = batch.float().mean()
            losses += gather_for_metrics(loss.repeat(4), context).tolist()
            cut += gather(loss.repeat(4), context.backend).tolist()
            rows += gather(pad_across_processes(batch, backend=context.backend), context.backend).tolist()
            assert len(gather(loss, context.backend)) == context.backend.topology.dp_size
        found[kind] = losses, cut[:size], rows[:size], len(losses)
    return found


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(("world", "size"), [(1, 13), (2, 13), (3, 13), (4, 13), (3, 26), (4, 2)])
@pytest.mark.gate("3-13-*", "4-2-*")
def test_a_repeated_loss_has_a_row_for_each_sample_gathered_for_metrics_or_cut_at_its_end(world, size, dispatch):
    kwargs = {"dispatch_batches": True} if dispatch else {}
    found = same(on(world, "repeated", size=size, **kwargs))
    if size < len(LOADERS):
        # A loader that declares no batch size, and whose only batch is a short one, does not say what a full one has.
        del found["batches"], found["sampler"]
    for kind, (losses, cut, rows, count) in found.items():
        assert count == size, kind
        assert rows == list(range(size)), kind
        # Each batch's mean, once for each of its samples: together the mean over all.
        assert sum(losses) == pytest.approx(sum(range(size))), kind
        assert cut == losses or world == 1, kind


def with_gradients(context, size, padded):
    """The gradient of a sum over all rows, each by its place, over ranks whose parts have different sizes."""
    backend = context.backend
    set_current_backend(backend)
    factor = torch.tensor(2.0, requires_grad=True)
    for batch in numbers(context, size, 4):
        rows = batch.double()
        if padded:
            rows = pad_across_processes(rows, backend=backend)
        found = gather({"rows": rows * factor, "labels": rows.clone(), "mean": factor * 3}, gradients=True)
        every = gather(rows)
        torch.testing.assert_close(found["rows"], 2 * every, rtol=0, atol=0)
        assert found["labels"].tolist() == every.tolist()
        assert not found["labels"].requires_grad
        places = torch.arange(1.0, 1 + len(every), dtype=torch.float64)
        ((found["rows"] * places).sum() + found["mean"].sum()).backward()
        mean = backend.reduce(factor.grad.double(), "mean")
        assert float(mean) == float((every * places).sum()) + 3 * backend.topology.dp_size
        factor.grad = None
    with torch.no_grad():
        assert not gather(factor, gradients=True).requires_grad
    return True


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("world", "size"), [(1, 13), (2, 13), (3, 13), (3, 26)])
@pytest.mark.gate("3-13-*")
def test_gradients_of_gathered_rows_go_to_the_ranks_that_have_them(world, size, padded):
    assert all(on(world, "with_gradients", size=size, padded=padded))


def short_rank(context):
    """Ranks with different numbers of batches."""
    seen = []
    set_current_backend(context.backend)
    for batch in numbers(context, 9, 2):
        last = 8 // (2 * context.backend.topology.dp_size) * 2 * context.backend.topology.dp_size <= int(batch[0])
        if not last:
            gather_for_metrics(batch, context)
            continue
        with pytest.raises(UsageError) as caught:
            gather_for_metrics(batch, context)
        with pytest.raises(UsageError) as also:
            gather(batch, context.backend)
        seen += [str(caught.value), str(also.value)]
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_where_a_rank_has_no_batch_the_others_do_not_wait_for_its_next_epoch(world):
    results = on(world, "short_rank", even_batches=False)
    assert len(results[0]) == 2
    assert all("come to an end on rank" in text for text in results[0])
    assert results[-1] == []


class Share(IterableDataset):
    """One rank's own share, of another length on each rank."""

    drivetrain_sharded = True

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        yield from range(self.size)


def epochs_apart(context):
    loader = prepare_data_loader(DataLoader(Share(2 + 2 * (context.dp_rank > 0)), batch_size=2), context)
    for _ in range(2):
        for batch in loader:
            try:
                gather_for_metrics(batch, context)
            except CollectiveMismatchError as error:
                return str(error)
    return ""


@pytest.mark.parametrize("world", [2, 3])
def test_batches_of_different_epochs_are_not_paired(world):
    text = same(on(world, "epochs_apart"))
    assert "rank 0: batch 0 of epoch 1, loader number 0" in text
    assert "rank 1: batch 1 of epoch 0, loader number 0" in text


def uneven(context):
    """Sizes that differ by rank, in a loop and outside: masked tokens, ragged shards."""
    rank = context.dp_rank
    ragged = gather_for_metrics({"x": torch.full((rank + 1, 2), float(rank)), "y": [rank] * rank}, context)
    many = gather_for_metrics([torch.full((rank + index,), rank) for index in range(20)], context)
    found = []
    for batch in numbers(context, 16, 4):
        found += gather_for_metrics(batch[batch % 3 == 0], context).tolist()
    empty = gather_for_metrics((torch.zeros(0, 3), []), context)
    return ragged["x"][:, 0].tolist(), ragged["y"], [len(each) for each in many], found, empty[0].shape


def test_sizes_that_differ_by_rank():
    x, y, many, found, empty = same(on(2, "uneven"))
    assert x == [0.0, 1.0, 1.0]
    assert y == [1]
    assert many == [1 + 2 * index for index in range(20)]
    assert found == [0, 3, 6, 9, 12, 15]
    assert empty == (0, 3)


def carried(context):
    """Collectives of each call, whose values are what every rank gave; and those of calls in which ranks disagree."""
    backend, rank, world = context.backend, context.dp_rank, context.backend.topology.dp_size
    real, calls = backend.gather, []
    backend.gather = lambda tensor: calls.append(tensor.nbytes) or real(tensor)
    found = []
    for rows, columns in ((5, 3), (5, 3), (2, 3), (7, 3), (7, 3), (1, 5000), (7, 3), (1, 0)):
        calls.clear()
        numbers = torch.arange(rows * columns).view(rows, columns)
        scores, flags = gather_for_metrics((numbers + 1e4 * rank, torch.full((rows,), rank > 0)), context)
        assert scores.equal(torch.cat([numbers + 1e4 * each for each in range(world)]))
        assert flags.tolist() == [each > 0 for each in range(world) for _ in range(rows)]
        found.append(len(calls))
    for ragged in (1, 200):
        calls.clear()
        assert gather_for_metrics(torch.full((1 + rank * ragged,), rank), context).sum() == sum(
            each * (1 + each * ragged) for each in range(world)
        )
        found.append(len(calls))
    calls.clear()
    with pytest.raises(CollectiveMismatchError):
        gather_for_metrics(torch.zeros(2 + rank * 500, 1 + rank), context)
    assert gather_for_metrics(torch.ones(4), context).sum() == 4 * world
    return [*found, len(calls)]


@pytest.mark.parametrize("world", [2, 3])
def test_small_values_travel_with_their_sizes(world):
    # The first call, larger ones up to 8 KiB and those of unequal sizes need a second collective, others do not.
    assert same(on(world, "carried")) == [2, 1, 1, 2, 1, 2, 1, 1, 2, 2, 2]


def mismatch(context):
    rank = context.dp_rank
    seen = []
    for value in (
        torch.zeros(2, 3 + rank),
        torch.zeros(2, dtype=torch.int64 if rank else torch.float32),
        [torch.zeros(2)] * (1 + rank * 20),
    ):
        with pytest.raises(CollectiveMismatchError) as caught:
            gather_for_metrics(value, context)
        seen.append(str(caught.value))
    with pytest.raises(UsageError, match="a list on some ranks") as listed:
        gather_for_metrics([1] if rank else 1, context)
    return [*seen, str(listed.value)]


def test_ranks_that_disagree_are_told_so():
    seen = same(on(2, "mismatch"))
    assert "rank 0: " in seen[0]
    assert "*, 4" in seen[0]


def evened_out(context):
    rank = context.dp_rank
    for value in (torch.zeros(2, 3 + rank), [torch.zeros(2)] * (1 + rank)):
        with pytest.raises(CollectiveMismatchError, match=r"different things to gather_for_metrics \(\* is free\)"):
            gather_for_metrics(value, context)
    padded = pad_across_processes(torch.zeros(2, 3 + rank), dim=1, backend=context.backend)
    same_structure = gather_for_metrics([torch.zeros(2)] * 2, context)
    return tuple(gather_for_metrics(padded, context).shape), [len(each) for each in same_structure]


def test_what_ranks_disagree_in_can_be_evened_out():
    assert same(on(2, "evened_out")) == ((4, 4), [4, 4])


def uneven_rows(context):
    """Rows by rank that are not those of the last batch, gathered as the refusal advises."""
    set_current_backend(context.backend)
    mine = torch.full((2 + context.dp_rank,), float(context.dp_rank))
    for batch in numbers(context, 9, 4):
        last = len(batch) == 1
        if last:
            words = r"ranks gave 2, 3 rows to gather, and their batches have 1, 1\. pad_across_processes evens"
            with pytest.raises(CollectiveMismatchError, match=words):
                gather(mine, context.backend)
            found = gather(pad_across_processes(mine, backend=context.backend), context.backend).tolist()
    assert last
    return found


def test_rows_that_are_not_the_last_batchs_are_gathered_once_they_are_padded():
    assert same(on(2, "uneven_rows")) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def rounds(context):
    """Batches that are repeated whole: nothing needs to be aligned."""
    sampler = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    shown, objects = [], []
    for batch in prepare_data_loader(DataLoader(range(11), batch_sampler=sampler), context):
        shown += gather_for_metrics(batch.repeat_interleave(2), context).tolist()
        objects += gather_for_metrics({"rows": len(batch)}, context)
    return shown[::2], [each["rows"] for each in objects]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.gate("1", "4")
def test_repeated_batches_are_left_out(world):
    shown, lengths = same(on(world, "rounds"))
    assert shown == list(range(11))
    assert lengths == [3, 1, 2, 4, 1]


def streams(context, dispatch):
    loader = prepare_data_loader(DataLoader(Stream(11), batch_size=2), context)
    assert bool(context.config.dispatch_batches) == dispatch
    return [gathered(loader, context) for _ in range(2)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.gate("*-4")
def test_iterable_datasets(world, dispatch):
    kwargs = {"dispatch_batches": True} if dispatch else {}
    assert same(on(world, "streams", dispatch=dispatch, **kwargs)) == [list(range(11))] * 2


CASES = {
    function.__name__: function
    for function in (
        kinds,
        sizes,
        loops,
        alignment,
        uneven,
        carried,
        mismatch,
        evened_out,
        uneven_rows,
        rounds,
        streams,
        repeated,
        with_gradients,
        short_rank,
        epochs_apart,
    )
}
