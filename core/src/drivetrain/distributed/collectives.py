"""Implements collectives on a tensor or an object, as :class:`~drivetrain.api.Backend` has them.

``all_gather``, ``all_reduce`` and ``all_gather_object`` run over the data-parallel group, the others over all ranks.
Every function is collective over the group it names and local when that group has one member. A tensor of any dtype
and device may be given: a dtype that the communication backend does not support is converted without loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from drivetrain.distributed.dtensors import is_dtensor
from drivetrain.errors import CheckpointError, DrivetrainError, UsageError
from drivetrain.topology import DATA_AXES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from drivetrain.backend import Backend, ReduceOp
    from drivetrain.topology import Mesh, Topology

T = TypeVar("T")

# torch 2.13 renamed the function and deprecates the old name; 2.9 to 2.12 have only the old one.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Carried by gloo, nccl and xccl alike; gloo refuses int16, the unsigned types but uint8, and float8.
_CARRIED = frozenset(
    {torch.uint8, torch.int8, torch.int32, torch.int64} | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
_REDUCED = frozenset({torch.int32, torch.int64, torch.float32, torch.float64, torch.complex64, torch.complex128})
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_groups: WeakKeyDictionary[Any, dict[Mesh, dist.ProcessGroup]] = WeakKeyDictionary()


def dp_group(topology: Topology) -> dist.ProcessGroup | None:
    """Process group of the ranks that read different samples; ``None`` stands for the default group.

    Collective over *all* ranks on the first call for a mesh (every rank creates every group), free afterwards. A
    backend with ``tp``, ``cp`` or ``pp`` axes calls it in ``start``, which every rank runs.
    """
    if topology.dp_size == topology.world_size:
        return None
    made = _groups.setdefault(dist.group.WORLD, {})
    mesh = topology.mesh
    if mesh not in made:
        for ranks in mesh.groups(DATA_AXES):
            group = dist.new_group(list(ranks))
            if topology.rank in ranks:
                made[mesh] = group
    return made[mesh]


def all_gather(tensor: Tensor, topology: Topology) -> Tensor:
    """Concatenate along dim 0 over the data-parallel ranks, by coordinate; a new tensor without gradient.

    Collective over the data-parallel group. Shape and dtype must agree on all of its ranks:
    :mod:`drivetrain.distributed.nested` checks that, this function does not (gloo aborts the process on unequal sizes).

    Args:
        tensor: shape ``(n, ...)``.

    Returns:
        Shape ``(dp_size * n, ...)``, on the tensor's device.
    """
    if tensor.dim() == 0:
        raise UsageError("a 0-d tensor cannot be concatenated", cure="Give it a dimension: tensor[None].")
    if topology.dp_size == 1:
        return tensor.detach().clone()
    sent, plain = _as_carried(tensor, topology)
    received = torch.empty((topology.dp_size, *sent.shape), dtype=sent.dtype, device=sent.device)
    _gather_into(received.view(-1), sent.view(-1), group=dp_group(topology))
    shape = (topology.dp_size * tensor.shape[0], *tensor.shape[1:])
    return (received if plain else received.view(tensor.dtype)).view(shape).to(tensor.device)


def all_reduce(tensor: Tensor, op: ReduceOp, topology: Topology) -> Tensor:
    """Reduce over the data-parallel ranks; ``tensor`` itself stays as it was, the result has no gradient.

    Collective over the data-parallel group; shape and dtype agree on all of its ranks. float16 and bfloat16 are added
    in float32 and rounded once. ``"mean"`` is the sum divided by ``dp_size``: of integers and booleans it has the
    default floating dtype, as torch's true division. ``"sum"`` of booleans counts (int64), of integers keeps the dtype
    and wraps as torch's addition does.

    Raises:
        UsageError: an unknown ``op``, or a dtype without an order (complex, uint64) for ``"max"`` and ``"min"``.
    """
    if op not in _OPS:
        raise UsageError(f"unknown reduction {op!r}", cure=f"Choose one of {', '.join(map(repr, _OPS))}.")
    dtype = tensor.dtype
    if op in ("max", "min") and (dtype.is_complex or dtype is torch.uint64):
        raise UsageError(
            f"reduction {op!r} is not defined for {dtype}", cure="Convert the tensor first: tensor.to(torch.float64)."
        )
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if whole and (op == "mean" or dtype not in _REDUCED):
        work = tensor.detach().to(torch.int64, copy=True)
    elif dtype in _REDUCED:
        work = tensor.detach().clone(memory_format=torch.contiguous_format)
    else:
        work = tensor.detach().to(torch.float32, copy=True)
    if topology.dp_size > 1:
        sent = work.to(_wire_device(tensor, topology)).contiguous()
        dist.all_reduce(sent, op=_OPS[op], group=dp_group(topology))
        work = sent.to(tensor.device)
    if op == "mean":
        work = work / topology.dp_size
        return work if whole else work.to(dtype)
    return work if op == "sum" and dtype is torch.bool else work.to(dtype)


def _no_sender(src: int, topology: Topology) -> UsageError:
    last = topology.world_size - 1
    return UsageError(
        f"process {src} cannot send: there are {topology.world_size} processes, counted from 0",
        cure=f"Choose one from 0 to {last}." if last else "Choose process 0.",
    )


def broadcast(tensor: Tensor, src: int, topology: Topology) -> Tensor:
    """Broadcast global rank ``src``'s values in a new tensor. Collective over all ranks; shape and dtype agree."""
    if not 0 <= src < topology.world_size:
        raise _no_sender(src, topology)
    if topology.world_size == 1:
        return tensor.detach().clone()
    sent, plain = _as_carried(tensor, topology)
    received = sent.clone()
    dist.broadcast(received, src=src)
    return (received if plain else received.view(tensor.dtype)).view(tensor.shape).to(tensor.device)


@torch.no_grad()
def broadcast_in_place(tensors: Iterable[Tensor], topology: Topology) -> None:
    """Give these tensors the values of the first data-parallel rank, in one message.

    Collective over the data-parallel group; number, shapes and dtypes agree on all of its ranks. Of DTensors this
    rank's part is exchanged. The write is not counted as one by autograd: a graph may have saved the values.
    """
    if topology.dp_size == 1:
        return
    local = [tensor.to_local() if is_dtensor(tensor) else tensor.data for tensor in tensors]
    # The largest elements first, so that each tensor's bytes begin at a multiple of its element size.
    local = sorted((each for each in local if each.numel()), key=lambda each: -each.element_size())
    if not local:
        return
    device = _wire_device(local[0], topology)
    parts = [as_bytes(each.to(device)) for each in local]
    flat = torch.cat(parts)
    dist.broadcast(flat, group=dp_group(topology), group_src=0)
    for each, part in zip(local, torch.split(flat, [part.numel() for part in parts]), strict=True):
        each.copy_(part.view(each.dtype).view(each.shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as bytes, shape ``(bytes,)``. Not collective."""
    # A dim of one element has any stride, also where memory is contiguous, and bytes need the last to be 1.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def all_gather_object(obj: Any, topology: Topology) -> list[Any]:
    """One object from every data-parallel rank, by coordinate. Collective over the data-parallel group.

    Objects are pickled, among the ranks of one job only.
    """
    if topology.dp_size == 1:
        return [obj]
    received: list[Any] = [None] * topology.dp_size
    dist.all_gather_object(received, obj, group=dp_group(topology))
    return received


def broadcast_object(obj: Any, src: int, topology: Topology) -> Any:
    """Broadcast global rank ``src``'s object, pickled. Collective over all ranks; ``obj`` is ignored elsewhere."""
    if not 0 <= src < topology.world_size:
        raise _no_sender(src, topology)
    if topology.world_size == 1:
        return obj
    box = [obj if topology.rank == src else None]
    dist.broadcast_object_list(box, src=src)
    return box[0]


def barrier(topology: Topology) -> None:
    """Wait until every rank of the job has made this call. Collective over all ranks."""
    if topology.world_size == 1:
        return
    device = torch.device(topology.device)
    # Without an index NCCL guesses the device from the rank, which is wrong when devices are hidden, and warns.
    dist.barrier(device_ids=None if device.type == "cpu" or device.index is None else [device.index])


def _as_carried(tensor: Tensor, topology: Topology) -> tuple[Tensor, bool]:
    """Contiguous, on the device of the group, and whether the dtype could stay; otherwise flat bytes."""
    sent = tensor.detach().to(_wire_device(tensor, topology)).contiguous()
    if sent.dtype in _CARRIED:
        return sent, True
    return as_bytes(sent), False


def _wire_device(tensor: Tensor, topology: Topology) -> torch.device:
    """The device on which a tensor is sent: NCCL cannot send a CPU tensor, so it is copied to the accelerator."""
    device = torch.device(topology.device)
    return tensor.device if tensor.device.type == device.type else device


class TorchCollectives:
    """Implements the collectives of :class:`~drivetrain.api.Backend` by the functions of this module."""

    topology: Topology

    def gather(self, tensor: Tensor) -> Tensor:
        return all_gather(tensor, self.topology)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return all_reduce(tensor, op, self.topology)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return broadcast(tensor, src, self.topology)

    def gather_object(self, obj: Any) -> list[Any]:
        return all_gather_object(obj, self.topology)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return broadcast_object(obj, src, self.topology)

    def barrier(self) -> None:
        barrier(self.topology)


class Ranks:
    """Collectives over every rank of the job, by global rank, that raise on every rank when one of them fails.

    A backend's own object collectives span the data-parallel ranks; where the mesh has other axes too, the default
    process group spans them all.

    Args:
        backend: of the ranks.
        alone: only the main process calls; nothing is communicated.
        group: another process group of all ranks, for a background thread.
    """

    def __init__(self, backend: Backend, *, alone: bool = False, group: Any = None) -> None:
        self._backend, self._group = backend, group
        topology = backend.topology
        self.rank, self.world_size = topology.rank, 1 if alone else topology.world_size
        self.is_main = self.rank == 0
        self._data_parallel_only = topology.dp_size == topology.world_size

    def gather(self, value: T) -> list[T]:
        """One picklable value from every rank, on every rank. Collective over all ranks."""
        if self.world_size == 1:
            return [value]
        if self._data_parallel_only and self._group is None:
            return self._backend.gather_object(value)
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def agree(self, action: str, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank, and raise on all of them when one failed. Collective over all ranks.

        Args:
            action: what ``work`` does, as in "rank 1 could not <action>".
            work: not collective; what it returns is picklable.

        Returns:
            What each rank's work returned, by rank.

        Raises:
            CheckpointError: (or the subclass that was raised) on every rank, with the number of the first that failed.
        """
        value: T | None = None
        failure: CheckpointError | None = None
        cause: Exception | None = None
        try:
            value = work()
        except CheckpointError as problem:
            failure = problem
        except Exception as problem:  # noqa: BLE001  Whatever it is, the other ranks wait to hear of it.
            what = f"could not {action}: {type(problem).__name__}: {problem}".rstrip(".")
            told = isinstance(problem, DrivetrainError)
            failure = CheckpointError(what, cure="" if told else "The traceback of the rank that failed says where.")
            cause = problem
        outcomes = self.gather((value, failure))
        failed = [(rank, error) for rank, (_, error) in enumerate(outcomes) if error is not None]
        if failed:
            raise self._joined(failed) from cause
        return [cast("T", outcome) for outcome, _ in outcomes]

    def on_main(self, action: str, work: Callable[[], T]) -> T:
        """Run ``work`` on the main process only, and return its result. Collective as :meth:`agree`."""
        return cast("T", self.agree(action, lambda: work() if self.is_main else None)[0])

    def _joined(self, failed: list[tuple[int, CheckpointError]]) -> CheckpointError:
        rank, error = failed[0]
        everyone = len(failed) == self.world_size and len({other.what for _, other in failed}) == 1
        if self.world_size == 1 or everyone:
            return error
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        whose = ", ".join(part for part in (error.whose, f"rank {rank}{others}") if part)
        return type(error)(f"rank {rank} of {self.world_size}: {error.what}", whose=whose, cure=error.cure)
