"""Collectives on nested structures of tensors and on objects, over any backend.

Each function takes the ``backend`` to run on; without one it is the newest (:mod:`drivetrain.distributed.current`).
``gather``, ``reduce``, ``pad_across_processes`` and ``gather_object`` are collective over the data-parallel ranks,
``broadcast`` and ``broadcast_object_list`` over all ranks.

**What is checked.** Ranks must call the same operation on trees of the same structure, shapes and dtypes. Gloo aborts
the process when sizes differ, and mixes up elements when only shapes do; so on the CPU every call first compares a
64-bit digest, one collective of eight bytes, and raises :class:`CollectiveMismatchError` on every rank. On an
accelerator that comparison would make the host wait for the device, so there it is made in debug mode only
(``debug=True``).

Small tensors are sent together in one collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from drivetrain.backend import Backend, ReduceOp
from drivetrain.distributed.collectives import as_bytes
from drivetrain.distributed.current import current_backend
from drivetrain.distributed.trees import describe, tensors, with_tensors
from drivetrain.distributed.watchdog import check_collective
from drivetrain.errors import CollectiveMismatchError, UsageError

# On 2 gloo ranks a collective of 64 KiB takes as long as one of 256 bytes; one of 1 MiB takes longer.
TOGETHER_BYTES = 1 << 16


def gather(tensor: Any, backend: Backend | None = None, *, debug: bool = False) -> Any:
    """Concatenate each tensor of a tree along dim 0 over the data-parallel ranks, by coordinate; 0-d becomes 1-d.

    Args:
        tensor: a tree of tensors; ``None`` is kept.
        backend: what to run on.
        debug: compare the trees first on every device, see the module.

    Returns:
        A tree of the same structure: shape ``(n, ...)`` has become ``(dp_size * n, ...)``. New tensors, no gradient.

    Raises:
        UsageError: a leaf that is no tensor.
        CollectiveMismatchError: the ranks' trees differ. For uneven ``n`` use ``pad_across_processes`` first; batches
            that the ranks share unevenly need nothing (:func:`drivetrain.data.metrics.gather`).
    """
    check_collective("gather", tensor, compare="all", data_parallel=True)
    backend = backend or current_backend()
    rows = at_least_1d(tensors(tensor))
    _compare("gather", tensor, backend, debug)
    return with_tensors(tensor, [part.flatten(0, 1) for part in gather_parts(rows, backend)])


def at_least_1d(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors without gradient; 0-d ones have one row."""
    return [leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach() for leaf in leaves]


def gather_parts(leaves: Sequence[Tensor], backend: Backend) -> list[Tensor]:
    """Each tensor from all data-parallel ranks, shape ``(dp_size, n, ...)``. Small ones are sent together, as bytes.

    Collective over the data-parallel ranks, which give the same shapes and dtypes.
    """
    size = backend.topology.dp_size
    results: dict[int, Tensor] = {}
    small: list[int] = []
    for index, leaf in enumerate(leaves):
        if len(leaves) > 1 and leaf.numel() * leaf.element_size() <= TOGETHER_BYTES:
            small.append(index)
        else:
            results[index] = backend.gather(leaf).view(size, *leaf.shape)
    if small:
        together = [leaves[index] for index in small]
        received = backend.gather(torch.cat(pack(together, backend))[None])
        results.update(zip(small, unpack(received, together), strict=True))
    return [results[index] for index in range(len(leaves))]


def pack(leaves: Sequence[Tensor], backend: Backend) -> list[Tensor]:
    """The bytes of each tensor on the backend's device, to be sent in one collective. Not collective."""
    return [as_bytes(leaf.to(backend.topology.device)) for leaf in leaves]


def unpack(received: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor from all ranks, shape ``(ranks, n, ...)``, of which all have sent the bytes. Not collective.

    Args:
        received: bytes of shape ``(ranks, m)``, which begin with those of :func:`pack`.
        leaves: this rank's own, which are of the same shapes on all ranks.
    """
    results: list[Tensor] = []
    begin = 0
    for leaf in leaves:
        end = begin + leaf.numel() * leaf.element_size()
        whole = received[:, begin:end].clone(memory_format=torch.contiguous_format)
        results.append(whole.view(-1).view(leaf.dtype).view(len(received), *leaf.shape).to(leaf.device))
        begin = end
    return results


def reduce(
    tensor: Any,
    reduction: ReduceOp | Literal["none"] = "mean",
    scale: float = 1.0,
    backend: Backend | None = None,
    *,
    debug: bool = False,
) -> Any:
    """Reduce each tensor of a tree over the data-parallel ranks; every rank gets the result, arguments are unchanged.

    Args:
        tensor: a tree of tensors of any shape; ``None`` is kept.
        reduction: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``; ``"none"`` leaves every rank its own values. The mean of
            integers is a number of the default floating dtype.
        scale: factor on the result.
        backend: what to run on.
        debug: compare the trees first on every device, see the module.

    Raises:
        UsageError: another reduction, or a leaf that is no tensor.
        CollectiveMismatchError: the ranks' trees differ.
    """
    if reduction not in ("sum", "mean", "max", "min", "none"):
        raise UsageError(f"unknown reduction {reduction!r}", cure="Choose 'sum', 'mean', 'max', 'min' or 'none'.")
    check_collective(f"reduce {reduction}", tensor, compare="all", data_parallel=True)
    backend = backend or current_backend()
    leaves = [leaf.detach() for leaf in tensors(tensor)]
    _compare(f"reduce {reduction}", tensor, backend, debug)
    if reduction == "none":
        results = [leaf.clone() for leaf in leaves]
    else:
        chosen, operation = backend, reduction
        results = _elementwise(leaves, lambda leaf: chosen.reduce(leaf, operation))
    return with_tensors(tensor, results if scale == 1.0 else [result * scale for result in results])


def broadcast(tensor: Any, from_process: int = 0, backend: Backend | None = None, *, debug: bool = False) -> Any:
    """Fill each tensor of a tree, in place, with the values that one process has; the same tree is returned.

    Args:
        tensor: a tree of tensors, of the same shapes and dtypes on all ranks; ``None`` is kept.
        from_process: global rank that sends.
        backend: what to run on.
        debug: compare the trees first on every device, see the module.

    Raises:
        UsageError: a leaf that is no tensor, or no such process.
        CollectiveMismatchError: the ranks' trees differ.
    """
    check_collective(f"broadcast from {from_process}", tensor, compare="all")
    backend = backend or current_backend()
    leaves = tensors(tensor)
    _compare(f"broadcast from {from_process}", tensor, backend, debug)
    chosen = backend
    received = _elementwise([leaf.detach() for leaf in leaves], lambda leaf: chosen.broadcast(leaf, from_process))
    if backend.topology.rank != from_process:
        for leaf, value in zip(leaves, received, strict=True):
            leaf.detach().copy_(value)
    return tensor


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    backend: Backend | None = None,
    *,
    debug: bool = False,
) -> Any:
    """Pad each tensor of a tree along one dim to the largest size that a data-parallel rank has, for ``gather``.

    Args:
        tensor: a tree of tensors; a tensor without that dim, and ``None``, are kept.
        dim: which dim; negative counts from the end.
        pad_index: value of the padding.
        pad_first: pad at the start instead of the end.
        backend: what to run on.
        debug: compare the trees first on every device, see the module.

    Raises:
        UsageError: a leaf that is no tensor.
        CollectiveMismatchError: the ranks' trees differ in more than sizes.
    """
    check_collective("pad_across_processes", tensor, compare="dtypes", data_parallel=True)
    backend = backend or current_backend()
    leaves = tensors(tensor)
    _compare(f"pad_across_processes dim {dim}", tensor, backend, debug, sizes=False)
    affected = [index for index, leaf in enumerate(leaves) if -leaf.dim() <= dim < leaf.dim()]
    if not affected:
        return tensor
    mine = torch.tensor([leaves[index].shape[dim] for index in affected], device=backend.topology.device)
    results: list[Tensor] = list(leaves)
    for index, size in zip(affected, backend.reduce(mine, "max").tolist(), strict=True):
        leaf = leaves[index]
        if leaf.shape[dim] < size:
            shape = list(leaf.shape)
            shape[dim] = size
            results[index] = leaf.new_full(shape, pad_index)
            start = size - leaf.shape[dim] if pad_first else 0
            if not start and dim in (0, -leaf.dim()):
                # A gather within a loop puts these rows after those of all ranks' samples.
                results[index]._drivetrain_rows = leaf.shape[0]  # type: ignore[attr-defined] # noqa: SLF001
            results[index].narrow(dim, start, leaf.shape[dim]).copy_(leaf)
    return with_tensors(tensor, results)


def gather_object(object: Any, backend: Backend | None = None) -> list[Any]:  # noqa: A002 (Accelerate's name)
    """Every data-parallel rank's object, by coordinate; lists and tuples are joined to one list.

    Anything else, a dict too, becomes one element. The same rule holds for one process. Objects are pickled among the
    ranks of the job.

    Raises:
        UsageError: some ranks gave a list or tuple and others did not.
    """
    check_collective("gather_object", data_parallel=True)
    objects = (backend or current_backend()).gather_object(object)
    sequences = [isinstance(one, (list, tuple)) for one in objects]
    if all(sequences):
        return list(chain.from_iterable(objects))
    if any(sequences):
        kinds = ", ".join(f"rank {rank}: {type(one).__name__}" for rank, one in enumerate(objects))
        raise UsageError(
            f"gather_object was given a list on some ranks and something else on others ({kinds})",
            cure="Give it a list on every rank, an empty one where a rank has nothing.",
        )
    return objects


def broadcast_object_list(object_list: list[Any], from_process: int = 0, backend: Backend | None = None) -> list[Any]:
    """Replace the contents of a list, in place, by those that one process has; the same list is returned.

    Objects are pickled among the ranks of the job. Collective over all ranks.

    Raises:
        UsageError: ``object_list`` is no list, or there is no such process.
    """
    if not isinstance(object_list, list):
        raise UsageError(
            f"broadcast_object_list fills a list in place, and was given a {type(object_list).__name__}",
            cure="Put the object into a list, [object], on every rank, and read it from there afterwards.",
        )
    check_collective("broadcast_object_list")
    object_list[:] = (backend or current_backend()).broadcast_object(object_list, from_process)
    return object_list


def _compare(operation: str, tree: Any, backend: Backend, debug: bool, sizes: bool = True) -> None:
    topology = backend.topology
    if topology.dp_size == 1 or not (debug or topology.device == "cpu"):
        return
    shape = describe(tree) if sizes else describe(tree, lambda tensor: "*" * tensor.dim())
    text = f"{operation} of {shape}"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
    digests = backend.gather(torch.tensor([digest], device=topology.device)).tolist()
    if any(other != digest for other in digests):
        # Every rank sees all digests, so all come here, and the descriptions can be exchanged.
        lines = [
            f"  rank {rank}: {line}" for rank, line in zip(topology.dp_ranks, backend.gather_object(text), strict=True)
        ]
        raise CollectiveMismatchError(
            "ranks call a collective with different shapes or structures:\n" + "\n".join(lines),
            cure="Give every rank the same structure and shapes: pad_across_processes evens out one dim.",
        )


def _together(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Indices of tensors sent in one collective: small ones by dtype and device, large ones separately."""
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        small = leaf.numel() * leaf.element_size() <= TOGETHER_BYTES
        groups.setdefault((leaf.dtype, leaf.device) if small else index, []).append(index)
    return list(groups.values())


def _elementwise(leaves: Sequence[Tensor], collective: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run a collective that works element by element on each leaf."""
    results: dict[int, Tensor] = {}
    for indices in _together(leaves):
        if len(indices) == 1:
            results[indices[0]] = collective(leaves[indices[0]])
            continue
        flat = torch.cat([leaves[index].reshape(-1) for index in indices])
        received = collective(flat)
        parts = torch.split_with_sizes(received, [leaves[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            results[index] = part.clone().view(leaves[index].shape)
    return [results[index] for index in range(len(leaves))]
