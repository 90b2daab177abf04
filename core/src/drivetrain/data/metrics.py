"""Gathers values of the current batch: ``gather_for_metrics`` returns each sample once, in the order of the dataset."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from drivetrain.backend import Backend
from drivetrain.data.active import ActiveLoaders, Pass, loaders_on
from drivetrain.data.loader import LoadingContext
from drivetrain.distributed import nested, trees
from drivetrain.distributed.current import current_backend
from drivetrain.distributed.watchdog import check_collective
from drivetrain.errors import CollectiveMismatchError, UnsupportedError, UsageError


def rows_to_keep(sizes: Sequence[int], info: Pass | None, what: str, *, scalar: bool = False) -> list[int]:
    """Number of leading rows of each rank's part that are not padding or repeats.

    A part is aligned with the batch when it has a row for each row loaded. Where every rank gives as many rows as a
    full batch has while the current batch is shorter (``loss.repeat(batch_size)``), each keeps one for each sample.
    A rank that holds repeated samples only is left out whatever it gives, if these are a whole batch.

    Args:
        sizes: rows of each coordinate's part.
        info: the current batch; ``None`` outside of a loop, where nothing is cut.
        what: the value in words, for the error.
        scalar: each part is one number per rank, not rows: kept, unless its rank holds repeated rows only.

    Raises:
        UsageError: the current batch holds repeated rows and the parts cannot be aligned with it.
    """
    rows = None if info is None else info.rows
    if info is None or rows is None:
        return list(sizes)
    if scalar or not rows.counted:
        return [size if real else 0 for size, real in zip(sizes, rows.real, strict=True)]
    if tuple(sizes) == rows.loaded:
        return list(rows.real)
    if info.nominal_rows and all(size == info.nominal_rows for size in sizes):
        return [min(size, real) for size, real in zip(sizes, rows.real, strict=True)]
    if rows.whole or not rows.padded:
        return [size if real else 0 for size, real in zip(sizes, rows.real, strict=True)]
    raise UsageError(
        f"gather_for_metrics cannot tell which rows of {what} repeat samples: the parts have {_list(sizes)} rows by "
        f"rank, the current batch has {_list(rows.loaded)}, of which {_list(rows.real)} count",
        cure="Pass values with one row per sample of the batch. Gather tensors that have others with "
        "accelerator.gather(accelerator.pad_across_processes(values)), and objects with "
        "drivetrain.utils.gather_object(values).",
    )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


# Sizes of so many tensors fit into the first exchange.
_HEADER = 11
_NOWHERE = (-1, -1, -1)

_Parts = list[Tensor] | None

_ROOM: WeakKeyDictionary[Backend, int] = WeakKeyDictionary()
"""Bytes of values that the next exchange of sizes has room for, by backend: those of the largest that ranks had alike.

All ranks have seen the sizes of every exchange before, and so send as many bytes in the next one, whatever each has.
"""

_LARGEST_ROOM = 1 << 13
"""Values beyond so many bytes travel apart: every later exchange is as large, also one of a single number."""


def gather_for_metrics(data: Any, context: LoadingContext, use_gather_object: bool = False) -> Any:
    """Gather values of the current batch, leaving out those of repeated samples. Collective over data-parallel ranks.

    Tensors are concatenated along dim 0 by coordinate, which is the order of the dataset, and keep the structure they
    come in; 0-d becomes 1-d. Their sizes along dim 0 may differ from rank to rank. A list of other things becomes the
    list of all ranks' elements, inside a dict or tuple too; anything else becomes a list with one element per rank.

    Rows that the current batch of the innermost loop repeats are cut; outside of a loop none are. The sizes, a
    digest of the structure and each rank's current batch are exchanged first, so that all ranks raise together and
    none hangs; on an accelerator this waits for the device. Small values travel with them, so that from the second
    call on there is one collective.

    Args:
        data: a tree of tensors, lists, objects.
        context: the run.
        use_gather_object: treat tensors as objects too: a list of tensors of any shapes is a list of rows.

    Raises:
        UsageError: the batch holds repeated samples and a value cannot be aligned with its rows; or some ranks gave a
            list and others did not; or a rank has no batch where this one is.
        CollectiveMismatchError: the ranks' structures, dtypes or shapes beyond dim 0 differ, or their batches.
    """
    info = current_batch(context.active, "gather_for_metrics")
    found: list[Tensor] = []
    objects: list[Any] = []

    def keep(leaf: Any) -> Any:
        (found if isinstance(leaf, Tensor) and not use_gather_object else objects).append(leaf)
        return leaf

    _walk(data, keep, use_gather_object, top=True)
    results: dict[bool, list[Any]] = {True: [], False: []}
    with torch.no_grad():
        if found:
            results[True] = _gather_tensors(found, info, context.backend)
    if objects:
        sent = context.backend.gather_object((None if info is None else info.place, objects))
        _check_batches([place for place, _ in sent])
        columns = zip(*(values for _, values in sent), strict=True)
        results[False] = [_join_objects(list(column), info) for column in columns]
    following = {kind: iter(values) for kind, values in results.items()}
    return _walk(
        data,
        lambda leaf: next(following[isinstance(leaf, Tensor) and not use_gather_object]),
        use_gather_object,
        top=True,
    )


def gather(tensor: Any, backend: Backend | None = None, *, debug: bool = False, gradients: bool = False) -> Any:
    """Concatenate each tensor of a tree along dim 0 over the data-parallel ranks, by coordinate; 0-d becomes 1-d.

    As :func:`drivetrain.distributed.nested.gather`. In a loop whose current batch the ranks do not share in full, equal
    parts, rows of samples come first, in order, and what is beyond them after those, so that cutting the end leaves
    each sample once.
    A tensor is taken to have rows of samples by their number: one for each row of the batch on every rank, the same
    after ``pad_across_processes``, or one number repeated for each row of a full batch (``loss.repeat(batch_size)``).
    Any other tensor must be of one size on all ranks, and is concatenated as it is.

    Args:
        tensor: a tree of tensors; ``None`` is kept.
        backend: what to run on; ``None`` = the newest started.
        debug: compare the trees first on every device, see :mod:`drivetrain.distributed.nested`.
        gradients: keep the graph. A backward through the result gives each row the sum of what all ranks have for it,
            and is collective too. Since engines average gradients over ranks, a loss of all rows that each rank
            computes trains as on one process.

    Raises:
        UsageError: a rank has no batch where this one is; a leaf that is no tensor.
        UnsupportedError: ``gradients`` over several data-parallel ranks of a pipeline.
        CollectiveMismatchError: the ranks' structures, dtypes or shapes differ, or their batches.
    """
    backend = backend or current_backend()
    size = backend.topology.dp_size
    gradients = gradients and torch.is_grad_enabled()
    if gradients and size == 1:
        check_collective("gather", tensor, compare="all", data_parallel=True)
        alone = [leaf.reshape(1) if leaf.dim() == 0 else leaf for leaf in trees.tensors(tensor)]
        return trees.with_tensors(tensor, alone)
    if gradients and backend.capabilities.pipelined:
        raise UnsupportedError(
            "gather(gradients=True) of a pipeline's output, whose values are not known before backward, cannot join it "
            f"with that of {size - 1} other data-parallel rank(s)",
            cure="Compute the loss of each rank's own rows; or use as many ranks for the pipeline as there are, or "
            "pipeline_parallel_size: 1.",
        )
    info = _unequal_batch(backend) if size > 1 else None
    if info is None:
        gathered = nested.gather(tensor, backend, debug=debug)
        spans = [_by_rank([len(leaf) // size] * size) for leaf in trees.tensors(gathered)] if gradients else []
    else:
        check_collective("gather", tensor, compare="dtypes", data_parallel=True)
        with torch.no_grad():
            gathered, spans = _gather_unequal(tensor, backend, info)
    if not gradients:
        return gathered
    joined = zip(trees.tensors(tensor), trees.tensors(gathered), spans, strict=True)
    return trees.with_tensors(
        gathered,
        [
            GatherWithGradients.apply(*each, backend)  # type: ignore[no-untyped-call]
            for each in joined
        ],
    )


def _unequal_batch(backend: Backend) -> Pass | None:
    """The current batch of the script's loop if the ranks hold unequal or incomplete parts of it."""
    active = loaders_on(backend)
    info = None if active is None else active.current
    if active is None or info is None or info.rows is None:
        return None
    rows, size = info.rows, info.nominal_rows or info.rows.loaded[0]
    equal = not info.is_last if not rows.counted else all(loaded == size for loaded in rows.loaded)
    return None if equal and not rows.missing else current_batch(active, "gather")


Span = tuple[int, int, int]
"""Rows of one data-parallel rank: its coordinate, the first row, and the one after the last."""


def _by_rank(sizes: Sequence[int]) -> list[Span]:
    return [(rank, 0, size) for rank, size in enumerate(sizes)]


class GatherWithGradients(torch.autograd.Function):
    """Gathered rows, whose gradients go to the ranks that have the rows. Checks of losses know it by its name."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, gathered: Tensor, spans: Sequence[Span], backend: Backend) -> Tensor:
        """Return what was gathered, which consists of these spans."""
        ctx.shape, ctx.spans, ctx.backend = mine.shape, spans, backend
        return gathered.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Add up gradients over the data-parallel ranks, and take those of this rank's rows. Collective."""
        total = ctx.backend.reduce(gradients[0].contiguous())
        parts = torch.split(total, [stop - start for _, start, stop in ctx.spans])
        own = [
            part for part, (rank, _, _) in zip(parts, ctx.spans, strict=True) if rank == ctx.backend.topology.dp_rank
        ]
        return torch.cat(own).view(ctx.shape), None, None, None


def _gather_unequal(data: Any, backend: Backend, info: Pass) -> tuple[Any, list[list[Span]]]:
    """Return the gathered tree, and of what rows each tensor consists."""
    leaves = trees.tensors(data)
    flat = nested.at_least_1d(leaves)
    sizes, parts = _exchange_sizes(flat, backend, info)
    if not leaves:
        return data, []
    before = list(zip(*_exchange([_rows_before_padding(leaf) for leaf in leaves], backend), strict=True))
    parts = parts or _gather_filled(flat, sizes, backend)
    spans = [_samples_first(part, size, padded, info) for part, size, padded in zip(parts, sizes, before, strict=True)]
    gathered = [
        torch.cat([part[rank, start:stop] for rank, start, stop in span])
        for part, span in zip(parts, spans, strict=True)
    ]
    return trees.with_tensors(data, gathered), spans


def _samples_first(part: Tensor, size: Sequence[int], padded: Sequence[int], info: Pass) -> list[Span]:
    rows = info.rows
    assert rows is not None
    if tuple(size) == rows.loaded or not rows.counted:
        return _by_rank(size)
    if len(set(size)) > 1:
        raise CollectiveMismatchError(
            f"ranks gave {', '.join(map(str, size))} rows to gather, and their batches have "
            f"{', '.join(map(str, rows.loaded))}",
            cure="pad_across_processes evens out sizes: gather what it returns.",
        )
    padded_rows = tuple(before or count for before, count in zip(padded, size, strict=True))
    whole = [each[:count] for each, count in zip(part, size, strict=True)]
    repeated = size[0] == info.nominal_rows and all(bool((each == each[:1]).all()) for each in whole)
    if padded_rows != rows.loaded and not repeated:
        return _by_rank(size)
    samples = _by_rank(rows.real)
    return [*samples, *((rank, count, size[rank]) for rank, _, count in samples)]


def _rows_before_padding(leaf: Tensor) -> int:
    # Attribute that `pad_across_processes` sets on a tensor to which it has added rows at the end.
    return int(getattr(leaf, "_drivetrain_rows", 0))


def current_batch(active: ActiveLoaders, call: str) -> Pass | None:
    """The batch that a collective of the data-parallel ranks concerns; ``None`` outside of every loop.

    Raises:
        UsageError: a rank has no such batch, and cannot take part; or several loaders of one loop repeat samples on
            different ranks.
    """
    info = active.current
    if info is None or info.rows is None:
        return info
    if info.rows.missing:
        raise UsageError(
            f"{call} was called in a loop over a loader whose batches have come to an end on rank "
            f"{', '.join(map(str, info.rows.missing))} (by data-parallel coordinate): even_batches=False gives ranks "
            "different numbers of batches",
            cure=f"Set even_batches=True, or call {call} after the loop.",
        )
    if len({each.rows.real if each.rows.padded else None for each in active.in_one_loop() if each.rows}) > 1:
        raise UsageError(
            f"{call} was called in a loop over several loaders whose batches repeat samples on different ranks",
            cure="Give the DataLoaders drop_last=True, or evaluate them one after the other.",
        )
    return info


def _check_batches(places: Sequence[tuple[int, ...] | None]) -> None:
    """Raise the same error on every rank where ranks are at different batches."""
    if len(set(places)) > 1:
        told = "\n".join(
            f"  rank {rank}: outside of a loop"
            if place is None
            else f"  rank {rank}: batch {place[2]} of epoch {place[1]}, loader number {place[0]}"
            for rank, place in enumerate(places)
        )
        raise CollectiveMismatchError(
            f"ranks are at different batches:\n{told}",
            cure="Give every rank the same number of batches (even_batches=True), and call it in every one of them.",
        )


def _walk(node: Any, visit: Callable[[Any], Any], as_objects: bool, *, top: bool = False) -> Any:
    """Rebuild a tree with each leaf visited: tensors, lists of objects, objects. ``None`` inside a tree is kept."""
    if node is None and not top:
        return None
    if isinstance(node, Tensor) or not _is_structure(node, as_objects):
        return visit(node)
    inner = trees.children(node) or []
    return trees.honor_type(node, [_walk(child, visit, as_objects) for _, child in inner])


def _is_structure(node: Any, as_objects: bool) -> bool:
    """Whether a node is a container of values to gather, rather than a value or a list of rows."""
    if not as_objects and any(isinstance(leaf, Tensor) for _, leaf in trees.leaves(node)):
        return True
    if isinstance(node, (Mapping, tuple)) and node:
        parts = list(node.values()) if isinstance(node, Mapping) else node
        return all(
            isinstance(part, list) or (isinstance(part, Mapping) and _is_structure(part, True)) for part in parts
        )
    return False


def _join_objects(column: Sequence[Any], info: Pass | None) -> list[Any]:
    """One value from each rank: lists are joined and cut, other things listed."""
    rows = [_as_rows(value) for value in column]
    if any(value is not None for value in rows):
        kinds = ", ".join(type(value).__name__ for value in column)
        listed = [value for value in rows if value is not None]
        if len(listed) < len(rows):
            raise UsageError(
                f"gather_for_metrics was given a list on some ranks and something else on others (by rank: {kinds})",
                cure="Give it a list on every rank, an empty one where a rank has nothing.",
            )
        keep = rows_to_keep([len(value) for value in listed], info, f"a {type(column[0]).__name__}")
        return list(chain.from_iterable(value[:count] for value, count in zip(listed, keep, strict=True)))
    keep = rows_to_keep([1] * len(column), info, "an object", scalar=True)
    return [value for value, count in zip(column, keep, strict=True) if count]


def _as_rows(value: Any) -> list[Any] | None:
    if isinstance(value, (list, tuple)):
        return list(value)
    # Tensors given as objects, and arrays of numpy: a row is what indexing gives.
    return list(value) if getattr(value, "ndim", 0) else None


def _gather_tensors(leaves: list[Tensor], info: Pass | None, backend: Backend) -> list[Tensor]:
    # Run the operations that a lazy device has recorded: they are the same for every batch, the cuts below are not.
    backend.sync()
    scalar = [leaf.dim() == 0 for leaf in leaves]
    flat = nested.at_least_1d(leaves)
    sizes, parts = _exchange_sizes(flat, backend, info)
    keeps = [
        rows_to_keep(size, info, trees.describe(leaf), scalar=is_scalar)
        for leaf, size, is_scalar in zip(leaves, sizes, scalar, strict=True)
    ]
    rows = None if info is None else info.rows
    if any(scalar) and rows is not None and rows.counted and len(set(filter(None, rows.real))) > 1:
        warnings.warn(
            "gather_for_metrics was given one number for each rank while the ranks have "
            f"{', '.join(map(str, rows.real))} samples: their mean is not the mean over samples. Pass one value for "
            "each sample, or loss.repeat(batch_size).",
            UserWarning,
            stacklevel=4,
        )
    if backend.topology.dp_size == 1:
        return [leaf if keep == leaf.shape[0] else leaf[:keep] for leaf, (keep,) in zip(flat, keeps, strict=True)]
    parts = parts or _gather_filled(flat, sizes, backend)
    return [_cut(part, keep) for part, keep in zip(parts, keeps, strict=True)]


def _exchange_sizes(leaves: list[Tensor], backend: Backend, info: Pass | None) -> tuple[list[list[int]], _Parts]:
    """Size of dim 0 of each tensor on each rank, after making sure that everything else and the batch agree.

    Returns:
        The sizes, and the tensors themselves from all ranks, shape ``(dp_size, n, ...)``, where they are of one size
        on all ranks and have travelled with the sizes; else ``None``.
    """
    if backend.topology.dp_size == 1:
        return [[leaf.shape[0]] for leaf in leaves], None
    text = trees.describe(leaves, lambda tensor: ["*", *tensor.shape[1:]])
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    mine = [leaf.shape[0] for leaf in leaves]
    # Of fixed size, so that ranks with different numbers of tensors can exchange it.
    place = _NOWHERE if info is None else info.place
    header = [*place, digest, len(leaves), *mine[:_HEADER]]
    numbers = torch.tensor(header + [0] * (_HEADER + 5 - len(header)), device=backend.topology.device)
    room = _ROOM.get(backend, 0)
    bytes_here = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    values = nested.pack(leaves, backend) if bytes_here <= room else []
    rest = numbers.new_zeros(room - bytes_here if values else room, dtype=torch.uint8)
    received = backend.gather(torch.cat([numbers.view(torch.uint8), *values, rest])[None].view(torch.int64))
    table = received[:, : len(numbers)].tolist()
    _check_batches([None if (read := tuple(row[:3])) == _NOWHERE else read for row in table])
    table = [row[3:] for row in table]
    if len({(row[0], row[1]) for row in table}) > 1:
        seen = "\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(backend.gather_object(text)))
        raise CollectiveMismatchError(
            f"ranks gave different things to gather_for_metrics (* is free):\n{seen}",
            cure="Give every rank the same structure; pad_across_processes(dim=1) evens out another dim than dim 0.",
        )
    rows = [row[2 : 2 + len(leaves)] for row in table]
    if len(leaves) > _HEADER:
        others = _exchange(mine[_HEADER:], backend)
        rows = [row + more for row, more in zip(rows, others, strict=True)]
    sizes = [list(column) for column in zip(*rows, strict=True)]
    if any(len(set(size)) > 1 for size in sizes):
        return sizes, None
    if room < bytes_here <= _LARGEST_ROOM:
        _ROOM[backend] = -(-bytes_here // numbers.itemsize) * numbers.itemsize
    return sizes, nested.unpack(received.view(torch.uint8)[:, numbers.nbytes :], leaves) if values else None


def _exchange(numbers: list[int], backend: Backend) -> list[list[int]]:
    sent = torch.tensor([numbers], dtype=torch.int64, device=backend.topology.device)
    table: list[list[int]] = backend.gather(sent).tolist()
    return table


def _gather_filled(leaves: list[Tensor], sizes: Sequence[Sequence[int]], backend: Backend) -> list[Tensor]:
    """Each tensor from all ranks, filled up to the rows of the rank that has most. Collective."""
    return nested.gather_parts([_fill(leaf, max(size)) for leaf, size in zip(leaves, sizes, strict=True)], backend)


def _fill(leaf: Tensor, size: int) -> Tensor:
    if leaf.shape[0] == size:
        return leaf
    filled = leaf.new_zeros((size, *leaf.shape[1:]))
    filled[: leaf.shape[0]] = leaf
    return filled


def _cut(part: Tensor, keep: Sequence[int]) -> Tensor:
    """Real rows of each rank, one after the other."""
    if all(count == part.shape[1] for count in keep):
        return part.reshape(part.shape[0] * part.shape[1], *part.shape[2:])
    return torch.cat([rows[:count] for rows, count in zip(part, keep, strict=True)])
