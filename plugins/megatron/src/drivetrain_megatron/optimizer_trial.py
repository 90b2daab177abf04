"""Checks whether an optimizer updates shards of parameters as it updates the full parameters.

Most optimizers treat each element by itself. Those that do not (a norm over a layer or over all parameters, factored
second moments, orthogonalised updates) are right only if every rank holds all the elements that they read. The check
is a trial: a copy of the optimizer steps a few small parameters, sharded as the model's will be, and full ones.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from drivetrain.api import UnsupportedError
from drivetrain_sharding import NEEDS_CLOSURE, STEPPED_LOCALLY, needs_closure, why_not_matrixwise

_STEPS = 2
_MOST_DIMS = 4


@final
class OptimizerTrial:
    """Refuses optimizers that would update parts in another way than the whole.

    Args:
        meshes: each of one axis along which parameters, or what optimizers hold of them, are cut.
        pipelined: ranks hold some of the parameters.
    """

    def __init__(self, meshes: Sequence[DeviceMesh], *, pipelined: bool) -> None:
        self._meshes, self._pipelined = meshes, pipelined

    def check(self, optimizer: Optimizer) -> None:
        """Try an optimizer; its parameters and state stay as they are. Collective over the meshes.

        Raises:
            UnsupportedError: it would compute something else than in one process.
        """
        if type(optimizer) in STEPPED_LOCALLY or not (self._meshes or self._pipelined):
            return
        inner = [name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
        if inner:
            raise self._refused(optimizer, f"it steps another optimizer, {inner[0]!r}, which cannot be tried")
        with torch.random.fork_rng(devices=[]):
            if self._pipelined and (problem := why_not_matrixwise(optimizer)):
                raise self._refused(optimizer, problem)
            for mesh in self._meshes:
                problem = _differs(optimizer, mesh)
                failed = torch.tensor([int(bool(problem))], device=mesh.device_type)
                dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=mesh.get_group())
                if failed.item():
                    raise self._refused(optimizer, problem or "it does so on another rank")

    def _refused(self, optimizer: Optimizer, problem: str) -> UnsupportedError:
        held = "some of the parameters" if self._pipelined else "parts of the parameters"
        return UnsupportedError(
            f"{type(optimizer).__name__} cannot step where each rank holds {held}: {problem}",
            cure="Use an optimizer that treats each element by itself (AdamW, SGD, ...), or another layout: "
            "data_parallel: ddp, without tensor_parallel_size and pipeline_parallel_size.",
        )


def _shapes(optimizer: Optimizer, size: int, *, uneven: bool) -> list[list[tuple[int, ...]]]:
    """Return the shapes to try for each group, with as many dims as its parameters; `uneven`: shards differ in size."""
    found = []
    for group in optimizer.param_groups:
        dims = sorted({min(one.dim(), _MOST_DIMS) for one in group["params"] if one.dim()})
        # Optimizers that quantise the states of large parameters take those with 4,096 elements for large.
        large = 32 if any(one.numel() >= 4096 for one in group["params"]) else 2
        found.append([(large * size - uneven, 2 * large * size - uneven, 2, 2)[:each] for each in dims])
    return found


def _differs(optimizer: Optimizer, mesh: DeviceMesh) -> str:
    """Describe how updates of shards and of full parameters differ; empty if they agree. Collective over the mesh."""
    shapes = _shapes(optimizer, mesh.size(), uneven=mesh.mesh_dim_names == ("dp",))
    try:
        for dim in (0, 1):
            several = [[shape for shape in group if len(shape) > dim] for group in shapes]
            if not any(several):
                continue
            # Parameters that are not sharded along the mesh are stepped beside those that are.
            both = [[*group, *group] for group in several]
            parts = _stepped(optimizer, both, mesh, dim)
            whole = _stepped(optimizer, both, None, dim, device=mesh.device_type)
            for group, (mine, theirs) in enumerate(zip(parts, whole, strict=True)):
                for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                    expected = _part(other, mesh, dim) if index < len(several[group]) else other
                    if not _close(one, expected):
                        return "the update of an element depends on elements that other ranks hold"
    except Exception as problem:  # noqa: BLE001 (an optimizer raises anything; it is reported)
        return _told(optimizer, problem)
    return ""


def _told(optimizer: Optimizer, problem: BaseException) -> str:
    if needs_closure(optimizer):
        return f"{NEEDS_CLOSURE}, which cannot be tried"
    first_line = (str(problem).splitlines() or [""])[0]
    return f"it cannot be tried on small parameters ({type(problem).__name__}: {first_line})"


def _stepped(
    optimizer: Optimizer,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    mesh: DeviceMesh | None,
    dim: int,
    *,
    device: str = "cpu",
) -> list[list[Tensor]]:
    """Return the updates that a copy of the optimizer makes to small parameters, this rank's shards.

    Args:
        optimizer: what is copied, with its options.
        shapes: for each of its groups; of a mesh's the first half of them is cut.
        mesh: over which they are cut.
        dim: along which.
        device: where to compute without a mesh.
    """
    generator = torch.Generator().manual_seed(0)
    device = device if mesh is None else mesh.device_type

    def laid_out(whole: Tensor, index: int, count: int) -> Tensor:
        if mesh is None or index >= count // 2:
            return whole.to(device)
        own = _part(whole, mesh, dim).to(device)
        return DTensor.from_local(own, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())

    groups: list[list[Any]] = []
    before: list[list[Tensor]] = []
    gradients: list[tuple[Tensor, list[Tensor]]] = []
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for group, several in zip(optimizer.param_groups, shapes, strict=True):
        groups.append([])
        before.append([])
        for index, shape in enumerate(several):
            values = [torch.randn(shape, generator=generator) for _ in range(_STEPS + 1)]
            made = torch.nn.Parameter(laid_out(values[0], index, len(several)))
            before[-1].append(_local(made).detach().clone())
            groups[-1].append(made)
            gradients.append((made, [laid_out(one, index, len(several)) for one in values[1:]]))
            _begin_state(optimizer, group, made, state)
    clone = object.__new__(type(optimizer))
    clone.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    clone.state = state
    clone.param_groups = [
        {**group, **{how: False for how in ("foreach", "fused") if how in group}, "params": params}
        for group, params in zip(optimizer.param_groups, groups, strict=True)
    ]
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    train = getattr(clone, "train", None)
    if callable(train):
        train()  # Optimizers with modes step in this one only.
    for step in range(_STEPS):
        torch.manual_seed(step)
        for parameter, drawn in gradients:
            parameter.grad = drawn[step]
        clone.step()
    return [
        [_local(one).detach() - old for one, old in zip(params, olds, strict=True)]
        for params, olds in zip(groups, before, strict=True)
    ]


def _begin_state(optimizer: Optimizer, group: dict[str, Any], made: Tensor, state: dict[Tensor, Any]) -> None:
    """State that an optimizer made with itself, as Adagrad does."""
    known = next((one for one in group["params"] if optimizer.state.get(one)), None)
    if known is None:
        return
    state[made] = {
        slot: (
            torch.full_like(made.detach(), float(_local(value).flatten()[0]) if _local(value).numel() else 0.0)
            if isinstance(value, Tensor) and value.dim() and value.shape == known.shape
            else value.clone()
            if isinstance(value, Tensor)
            else value
        )
        for slot, value in optimizer.state[known].items()
    }


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _part(whole: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    return whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()


def _close(one: Tensor, other: Tensor) -> bool:
    # Sums in another order; another optimizer's update differs in the first digits.
    return torch.allclose(one, other.to(one.device), rtol=0, atol=1e-4 * float(other.abs().max()) + 1e-8)
