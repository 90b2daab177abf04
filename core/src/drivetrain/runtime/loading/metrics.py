"""``gather_for_metrics``: every rank's values, each sample once, in the order of the dataset."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from drivetrain.backend import Backend
from drivetrain.data.active import BatchInfo
from drivetrain.data.align import rows_to_keep
from drivetrain.errors import CollectiveMismatchError, UsageError
from drivetrain.runtime import trees
from drivetrain.runtime.loading.context import LoadingContext

# Below this, tensors travel together as bytes: a collective on 2 gloo ranks costs its latency, not its size.
_TOGETHER_BYTES = 1 << 16
# Sizes of so many tensors fit into the first exchange.
_HEADER = 14


def gather_for_metrics(data: Any, context: LoadingContext, use_gather_object: bool = False) -> Any:
    """Gather values of the current batch, leaving out those of repeated samples. Collective over data-parallel ranks.

    Tensors are concatenated along dim 0 by coordinate, which is the order of the dataset, and keep the structure they
    come in; 0-d becomes 1-d. Their sizes along dim 0 may differ from rank to rank. A list of other things becomes the
    list of all ranks' elements, inside a dict or tuple too; anything else becomes a list with one element per rank.

    What is cut is what the current batch of the innermost loop repeats; outside of a loop nothing is. The sizes, and a
    digest of the structure, are exchanged first, so that all ranks raise together and none is left waiting; on an
    accelerator this waits for the device.

    Args:
        data: a tree of tensors, lists, objects.
        context: the run.
        use_gather_object: treat tensors as objects too: a list of tensors of any shapes is a list of rows.

    Raises:
        UsageError: the batch holds repeated samples and a value cannot be aligned with its rows; or some ranks gave a
            list and others did not.
        CollectiveMismatchError: the ranks' structures, dtypes or shapes beyond dim 0 differ.
    """
    info = context.active.current
    found: list[Tensor] = []
    objects: list[Any] = []

    def note(leaf: Any) -> Any:
        (found if isinstance(leaf, Tensor) and not use_gather_object else objects).append(leaf)
        return leaf

    _walk(data, note, use_gather_object, top=True)
    results: dict[bool, list[Any]] = {True: [], False: []}
    with torch.no_grad():
        if found:
            results[True] = _gather_tensors(found, info, context.backend)
    if objects:
        columns = zip(*context.backend.gather_object(objects), strict=True)
        results[False] = [_join_objects(list(column), info) for column in columns]
    following = {kind: iter(values) for kind, values in results.items()}
    return _walk(
        data,
        lambda leaf: next(following[isinstance(leaf, Tensor) and not use_gather_object]),
        use_gather_object,
        top=True,
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
    if not as_objects and _holds_tensor(node):
        return True
    if isinstance(node, (Mapping, tuple)) and node:
        parts = list(node.values()) if isinstance(node, Mapping) else node
        return all(
            isinstance(part, list) or (isinstance(part, Mapping) and _is_structure(part, True)) for part in parts
        )
    return False


def _holds_tensor(node: Any) -> bool:
    return isinstance(node, Tensor) or any(_holds_tensor(child) for _, child in trees.children(node) or ())


# ---- objects --------------------------------------------------------------------------------------------------------


def _join_objects(column: Sequence[Any], info: BatchInfo | None) -> list[Any]:
    """One value from each rank: lists are joined and cut, other things listed."""
    rows = [_as_rows(value) for value in column]
    if any(value is not None for value in rows):
        kinds = ", ".join(type(value).__name__ for value in column)
        listed = [value for value in rows if value is not None]
        if len(listed) < len(rows):
            raise UsageError(f"gather_for_metrics was given lists by some ranks and not by others ({kinds} by rank)")
        keep = rows_to_keep([len(value) for value in listed], info, f"a {type(column[0]).__name__}")
        return list(chain.from_iterable(value[:count] for value, count in zip(listed, keep, strict=True)))
    keep = rows_to_keep([1] * len(column), info, "an object", scalar=True)
    return [value for value, count in zip(column, keep, strict=True) if count]


def _as_rows(value: Any) -> list[Any] | None:
    if isinstance(value, (list, tuple)):
        return list(value)
    # Tensors given as objects, and arrays of numpy: a row is what indexing gives.
    return list(value) if getattr(value, "ndim", 0) else None


# ---- tensors --------------------------------------------------------------------------------------------------------


def _gather_tensors(leaves: list[Tensor], info: BatchInfo | None, backend: Backend) -> list[Tensor]:
    # What a lazy device has recorded so far is the same for every batch; what is cut below is not.
    backend.sync()
    scalar = [leaf.dim() == 0 for leaf in leaves]
    flat = [leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach() for leaf in leaves]
    sizes = _exchange_sizes(flat, backend)
    keeps = [
        rows_to_keep(size, info, trees.describe(leaf), scalar=is_scalar)
        for leaf, size, is_scalar in zip(leaves, sizes, scalar, strict=True)
    ]
    rows = None if info is None else info.rows
    if any(scalar) and rows is not None and rows.padded and not rows.whole and not rows.filled:
        warnings.warn(
            "gather_for_metrics was given one number for each rank while the current batch repeats samples; they weigh "
            "in it. Pass one value for each sample to leave them out.",
            UserWarning,
            stacklevel=4,
        )
    if backend.topology.dp_size == 1:
        return [leaf if keep == leaf.shape[0] else leaf[:keep] for leaf, (keep,) in zip(flat, keeps, strict=True)]
    filled = [_fill(leaf, max(size)) for leaf, size in zip(flat, sizes, strict=True)]
    parts = _gather_parts(filled, backend)
    return [_cut(part, keep) for part, keep in zip(parts, keeps, strict=True)]


def _exchange_sizes(leaves: list[Tensor], backend: Backend) -> list[list[int]]:
    """Size of dim 0 of each tensor on each rank, after making sure that everything else agrees."""
    if backend.topology.dp_size == 1:
        return [[leaf.shape[0]] for leaf in leaves]
    text = trees.describe(leaves, lambda tensor: ["*", *tensor.shape[1:]])
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    mine = [leaf.shape[0] for leaf in leaves]
    # Of fixed size, so that ranks with other numbers of tensors still understand each other.
    header = [digest, len(leaves), *mine[:_HEADER]]
    table = _exchange(header + [0] * (_HEADER + 2 - len(header)), backend)
    if len({(row[0], row[1]) for row in table}) > 1:
        seen = "\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(backend.gather_object(text)))
        raise CollectiveMismatchError(
            f"ranks gave different things to gather_for_metrics (* is free):\n{seen}",
            cure="Give every rank the same structure; pad_across_processes(dim=1) evens out another dim than dim 0.",
        )
    rows = [row[2 : 2 + len(leaves)] for row in table]
    if len(leaves) > _HEADER:
        rest = _exchange(mine[_HEADER:], backend)
        rows = [row + more for row, more in zip(rows, rest, strict=True)]
    return [list(column) for column in zip(*rows, strict=True)]


def _exchange(numbers: list[int], backend: Backend) -> list[list[int]]:
    sent = torch.tensor([numbers], dtype=torch.int64, device=backend.topology.device)
    table: list[list[int]] = backend.gather(sent).tolist()
    return table


def _fill(leaf: Tensor, size: int) -> Tensor:
    if leaf.shape[0] == size:
        return leaf
    filled = leaf.new_zeros((size, *leaf.shape[1:]))
    filled[: leaf.shape[0]] = leaf
    return filled


def _gather_parts(leaves: list[Tensor], backend: Backend) -> list[Tensor]:
    """Each tensor from all ranks, shape ``(dp_size, n, ...)``; small ones travel in one collective."""
    size = backend.topology.dp_size
    results: dict[int, Tensor] = {}
    packed: list[tuple[int, Tensor]] = []
    for index, leaf in enumerate(leaves):
        if len(leaves) > 1 and 0 < leaf.numel() * leaf.element_size() <= _TOGETHER_BYTES:
            packed.append((index, leaf.to(backend.topology.device).contiguous().view(-1).view(torch.uint8)))
        else:
            results[index] = backend.gather(leaf).view(size, *leaf.shape)
    if packed:
        received = backend.gather(torch.cat([data for _, data in packed])[None])
        begin = 0
        for index, data in packed:
            leaf = leaves[index]
            part = received[:, begin : begin + data.numel()].clone(memory_format=torch.contiguous_format)
            results[index] = part.view(-1).view(leaf.dtype).view(size, *leaf.shape).to(leaf.device)
            begin += data.numel()
    return [results[index] for index in range(len(leaves))]


def _cut(part: Tensor, keep: Sequence[int]) -> Tensor:
    """Real rows of each rank, one after the other."""
    if all(count == part.shape[1] for count in keep):
        return part.reshape(part.shape[0] * part.shape[1], *part.shape[2:])
    return torch.cat([rows[:count] for rows, count in zip(part, keep, strict=True)])
