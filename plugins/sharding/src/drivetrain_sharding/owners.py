"""Steps matrix-wise optimizers over sharded parameters: each full parameter is stepped by the rank that owns it.

An optimizer is matrix-wise when it needs full parameters and updates each separately (Muon, Adafactor, Shampoo). Every
sharded parameter gets an owner among the ranks that hold its shards. A step gathers values and gradients to the
owners, runs the optimizer once on what this rank owns, and scatters the new values back. State exists on the owner
only, so memory for it stays near 1/N. The arithmetic is that of one process, to the bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from drivetrain.api import StepResult, TorchEngine, UnsupportedError, UsageError

_BUCKET = 2**26
"""Bytes of shards that this rank sends in one all-to-all, about."""


@final
class OwnerSteps:
    """Owners of one optimizer's sharded parameters.

    Made in the same order on every rank. Parameters that are not cut are stepped by every rank alike.

    Args:
        optimizer: over DTensors, each cut along one dim of one mesh axis; the same on every rank. State that it has is
            gathered to the owners: collective over the ranks that share the parameters out.

    Raises:
        UnsupportedError: a parameter is cut along several mesh axes, or unlike the others.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._group: dist.ProcessGroup | None = None
        self._rank, self._size = 0, 1
        self._cut: dict[int, _Cut] = {}
        self._loads: list[int] = []
        self._assign()
        optimizer.state = _StatesOwned(optimizer, self._cut)
        optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        optimizer.register_load_state_dict_pre_hook(_refuse_state_dict)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks among which parameters are shared out; ``None`` where no parameter is cut."""
        return self._group

    def owned(self) -> dict[int, bool]:
        """Return whether this rank owns each sharded parameter, by ``id``. Not collective."""
        self._assign()
        return {number: cut.here for number, cut in self._cut.items()}

    def step(self, engine: TorchEngine, closure: Callable[[], Any] | None = None) -> StepResult:
        """One update by :meth:`drivetrain.api.TorchEngine.step`. Collective over :attr:`group`."""
        if closure is not None:
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} steps each parameter on the rank that owns it, and a closure would "
                "compute with other tensors than the model has",
                cure="Call optimizer.step() without a closure, after accelerator.backward(loss).",
            )
        return engine.step(self._optimizer, stepping=self.stepping)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context for one step of the optimizer, in which it holds the full parameters that this rank owns.

        Collective over :attr:`group`. Inside, only the optimizer's own step may run, once.
        """
        self._assign()
        optimizer = self._optimizer
        groups: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch has no public word for it)
            cuts = [cut for params in groups for one in params if (cut := self._cut.get(id(one))) is not None]
            trained = [cut for cut in cuts if cut.parameter.grad is not None]
            values = [_Piece(cut, _local(cut.parameter)) for cut in trained]
            grads = [_Piece(cut, _local(cut.parameter.grad)) for cut in trained]
            self._exchange([*values, *grads], to_owners=True)
            whole = {
                id(value.cut.parameter): _parameter(value.whole, grad.whole)
                for value, grad in zip(values, grads, strict=True)
                if value.whole is not None and grad.whole is not None
            }
        before = optimizer.state
        inside: defaultdict[Any, Any] = defaultdict(dict)
        inside.update({whole.get(id(key), key): state for key, state in before.items()})
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            here = [one for one in params if id(one) in whole or id(one) not in self._cut]
            group["params"] = [whole.get(id(one), one) for one in here]
        optimizer.state = inside
        try:
            yield
            stepped = True
        except BaseException:
            stepped = False
            raise
        finally:
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = params
            outside = {id(one): self._cut[number].parameter for number, one in whole.items()}
            before.clear()
            before.update({outside.get(id(key), key): state for key, state in inside.items()})
            optimizer.state = before
            if stepped:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                    self._exchange(values, to_owners=False)

    # ---- who owns what ---------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Give owners to parameters that have none yet: each in turn to the rank with the least work so far."""
        new = [
            one
            for group in self._optimizer.param_groups
            for one in group["params"]
            if isinstance(one, DTensor) and id(one) not in self._cut
        ]
        if not new:
            return
        found = [cut for one in new if (cut := _Cut.of(one)) is not None]
        for cut in found:
            if self._group is None:
                self._group = cut.group
                self._rank, self._size = dist.get_rank(cut.group), dist.get_world_size(cut.group)
                self._loads = [0] * self._size
            elif cut.group is not self._group:
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__} holds parameters that are shared out among different ranks",
                    cure="Make one optimizer for the parameters of each mesh.",
                )
        # Largest first, which keeps the heaviest rank within 4/3 of the best assignment (Graham, 1969).
        for cut in sorted(found, key=lambda cut: -cut.cost):
            cut.owner = min(range(self._size), key=self._loads.__getitem__)
            cut.here = cut.owner == self._rank
            self._loads[cut.owner] += cut.cost
        self._cut |= {id(cut.parameter): cut for cut in found}
        for cut in found:
            self._take_state(cut)

    def _take_state(self, cut: _Cut) -> None:
        """Gather the state of earlier steps on the owner. Collective if there is any, which all ranks agree on."""
        state = self._optimizer.state.pop(cut.parameter, None)
        if state is None:
            return
        taken = {slot: value.full_tensor() if isinstance(value, DTensor) else value for slot, value in state.items()}
        if cut.here:
            self._optimizer.state[cut.parameter] = taken

    # ---- communication ---------------------------------------------------------------------------------------------

    def _exchange(self, pieces: Sequence[_Piece], *, to_owners: bool) -> None:
        """Move shards to the owners, or the parts of what owners have back into the shards. Collective.

        The next bucket is on its way while one is unpacked.
        """
        pending = None
        for bucket in _buckets(pieces):
            started = self._start(bucket, to_owners=to_owners)
            if pending is not None:
                self._finish(*pending, to_owners=to_owners)
            pending = started
        if pending is not None:
            self._finish(*pending, to_owners=to_owners)

    def _start(self, bucket: Sequence[_Piece], *, to_owners: bool) -> tuple[Sequence[_Piece], Tensor, Any]:
        if to_owners:
            for piece in bucket:
                if piece.cut.here:
                    piece.whole = torch.empty(piece.cut.shape, dtype=piece.local.dtype, device=piece.local.device)
        shards, parts = self._shards(bucket), self._parts(bucket)
        sent, received = (shards, parts) if to_owners else (parts, shards)
        buffer = torch.cat([one.reshape(-1) for of_rank in sent for one in of_rank] or [bucket[0].local.new_empty(0)])
        into = buffer.new_empty(sum(one.numel() for of_rank in received for one in of_rank))
        # As bytes: not every communication backend carries every dtype.
        size = buffer.element_size()
        work = dist.all_to_all_single(
            into.view(torch.uint8),
            buffer.view(torch.uint8),
            [size * sum(one.numel() for one in of_rank) for of_rank in received],
            [size * sum(one.numel() for one in of_rank) for of_rank in sent],
            group=self._group,
            async_op=True,
        )
        return bucket, into, (work, buffer)

    def _finish(self, bucket: Sequence[_Piece], into: Tensor, working: Any, *, to_owners: bool) -> None:
        work, _ = working
        work.wait()
        received = self._parts(bucket) if to_owners else self._shards(bucket)
        targets = [one for of_rank in received for one in of_rank]
        for target, values in zip(targets, torch.split(into, [one.numel() for one in targets]), strict=True):
            target.copy_(values.view(target.shape))

    def _shards(self, bucket: Sequence[_Piece]) -> list[list[Tensor]]:
        """This rank's shards, by their owner."""
        found: list[list[Tensor]] = [[] for _ in range(self._size)]
        for piece in bucket:
            found[piece.cut.owner].append(piece.local)
        return found

    def _parts(self, bucket: Sequence[_Piece]) -> list[list[Tensor]]:
        """Return views of the parameters that this rank owns, by the rank of each shard."""
        mine = [piece for piece in bucket if piece.whole is not None]
        return [[piece.part(rank, self._size) for piece in mine] for rank in range(self._size)]


@dataclass(eq=False)
class _Cut:
    """Describes the sharding and the owner of one parameter.

    Args:
        parameter: a DTensor.
        group: the ranks.
        dim: that is cut.
        owner: rank in `group` that steps it.
        here: the owner is this rank.
    """

    parameter: DTensor
    group: dist.ProcessGroup
    dim: int
    owner: int = 0
    here: bool = False

    @classmethod
    def of(cls, parameter: DTensor) -> _Cut | None:
        """``None`` where every rank has all of it."""
        mesh, placements = parameter.device_mesh, parameter.placements
        axes = [axis for axis, each in enumerate(placements) if not isinstance(each, Replicate) and mesh.size(axis) > 1]
        if not axes:
            return None
        placement = placements[axes[0]]
        # Subclasses of Shard cut in other ways.
        if len(axes) > 1 or type(placement) is not Shard:
            raise UnsupportedError(
                f"a parameter of shape {tuple(parameter.shape)} is laid out as {placements}, and an optimizer that "
                "needs whole parameters can step those that are cut along one dim of one mesh axis",
                cure="Use an element-wise optimizer, such as torch.optim.AdamW, or a mesh with one axis.",
            )
        assert isinstance(placement, Shard)
        return cls(parameter, mesh.get_group(axes[0]), placement.dim)

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def cost(self) -> int:
        """Work of a step, about: products of a matrix with its transpose outweigh what is done to each element."""
        shape = self.shape
        return self.parameter.numel() * (min(shape[0], shape[1:].numel()) if len(shape) > 1 else 1)


@dataclass(eq=False)
class _Piece:
    """A parameter's values or gradient, on their way.

    Args:
        cut: how it is shared out.
        local: this rank's shard.
        whole: all of it, on the owner.
    """

    cut: _Cut
    local: Tensor
    whole: Tensor | None = None

    def part(self, rank: int, size: int) -> Tensor:
        """Return the view of one rank's shard in the full parameter. Chunks have equal size, the last ones less."""
        assert self.whole is not None
        length = self.whole.shape[self.cut.dim]
        chunk = -(-length // size)
        start = min(rank * chunk, length)
        return self.whole.narrow(self.cut.dim, start, min(chunk, length - start))


def _buckets(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one dtype and moderate size together, the same on every rank."""
    alike: dict[torch.dtype, list[_Piece]] = {}
    for piece in pieces:
        alike.setdefault(piece.local.dtype, []).append(piece)
    for group in alike.values():
        bucket: list[_Piece] = []
        size = 0
        for piece in group:
            numel = piece.cut.shape.numel() // dist.get_world_size(piece.cut.group)
            if bucket and size + numel * piece.local.element_size() > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(piece)
            size += numel * piece.local.element_size()
        yield bucket


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor.detach()  # noqa: SLF001 (to_local records for autograd)
    return local


def _parameter(values: Tensor, grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values)
    parameter.grad = grad
    return parameter


class _StatesOwned(defaultdict[Any, Any]):
    """State of an optimizer by parameter, from which that of a parameter of another owner is asked for by mistake."""

    def __init__(self, optimizer: Optimizer, cuts: Mapping[int, _Cut]) -> None:
        super().__init__(dict, optimizer.state)
        self._kind, self._cuts = type(optimizer).__name__, cuts

    def __missing__(self, key: Any) -> Any:
        cut = self._cuts.get(id(key))
        if cut is not None and not cut.here:
            raise UnsupportedError(
                f"`state` of {self._kind} was asked for that of a parameter of shape {tuple(key.shape)}, which is "
                "kept by the rank that owns the parameter",
                cure="accelerator.save_state(folder) writes the states of all ranks. AdamW and other optimizers that "
                "treat each element by itself keep a part on every rank.",
            )
        return super().__missing__(key)

    def __reduce_ex__(self, _: Any) -> Any:
        return defaultdict, (dict, dict(self))


def _refuse_state_dict(optimizer: Optimizer, *_: Mapping[str, Any]) -> NoReturn:
    raise UsageError(
        f"the state of {type(optimizer).__name__} is spread over the ranks, each of which has that of the parameters "
        "that it owns",
        cure="Write accelerator.save_state(folder) and accelerator.load_state(folder).",
    )
