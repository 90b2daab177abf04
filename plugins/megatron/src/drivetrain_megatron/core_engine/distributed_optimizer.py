"""ZeRO-1 by Megatron-Core's distributed optimizer: each rank reduces and steps its shard of the gradient buffer.

The shards do not respect the bounds of parameters, so a checkpoint gets the state as parts of the user's parameters:
one parameter at a time is made whole over the data-parallel ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer

from drivetrain.api import PortableState, StepResult, TensorSpec, TorchEngine, UnsupportedError, UsageError
from drivetrain_megatron import state
from drivetrain_megatron.core_engine import private_names
from drivetrain_megatron.core_engine.parallel_state import ParallelState
from drivetrain_megatron.core_engine.weights import Pair, Weights
from drivetrain_megatron.norms import GlobalNorm
from drivetrain_megatron.replicas import local_part
from drivetrain_megatron.zero1 import Parts
from drivetrain_sharding import laid_out_as


@final
class ShardedStepping:
    """The optimizer of one model, behind the words of :class:`drivetrain_megatron.stepping.Stepping`.

    The script's optimizer stays the object that steps; its parameters become this rank's shards.

    Args:
        module: the user's.
        engine: precision, loss scaling, skipped steps.
        groups: Megatron-Core's, of ranks.
        wrapped: Megatron-Core's model with its buffers.
        weights: the user's parameters and Megatron-Core's.
        mesh: of the job.
        norm: gets to know the shards.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: TorchEngine,
        groups: ParallelState,
        wrapped: DistributedDataParallel,
        weights: Weights,
        mesh: DeviceMesh,
        norm: GlobalNorm,
    ) -> None:
        self._module, self._engine, self._wrapped, self._weights = module, engine, wrapped, weights
        self._groups, self._mesh, self._norm, self._group = groups, mesh, norm, mesh["dp"].get_group()
        self._distributed: DistributedOptimizer | None = None
        self._ours: list[list[Tensor]] = []
        self._shards: dict[Tensor, Tensor] = {}
        self._earlier: list[tuple[Tensor, Tensor]] = []
        self.optimizers: list[Optimizer] = []

    # ---- the optimizer ----------------------------------------------------------------------------------------------

    def add(self, optimizer: Optimizer) -> None:
        """Take the optimizer, whose parameters are the module's. Not collective.

        Raises:
            UnsupportedError: what Megatron-Core's distributed optimizer cannot do.
            UsageError: parameters that lie in one of Megatron-Core's are in several groups.
        """
        cure = "Write data_parallel: ddp."
        if self.optimizers:
            raise UnsupportedError("Megatron-Core's distributed optimizer is the only one of its model", cure=cure)
        if type(optimizer) is not AdamW:
            raise UnsupportedError(
                f"Megatron-Core's distributed optimizer steps torch's AdamW, not {type(optimizer).__name__}",
                cure=cure,
            )
        if optimizer.state:
            raise UnsupportedError("the optimizer has stepped before prepare, and its state would be lost", cure=cure)
        self._ours = [list(group["params"]) for group in optimizer.param_groups]
        for group, theirs in zip(optimizer.param_groups, self._grouped(), strict=True):
            group["params"] = theirs
        wrapped = self._wrapped
        options = OptimizerConfig(use_distributed_optimizer=True, bf16=wrapped.config.bf16)
        # Without gradients, so that shards of float32 parameters are leaves, which have a `.grad`.
        with self._groups.shared(), self._as_on_cuda(), torch.no_grad():
            self._distributed = DistributedOptimizer(
                optimizer=optimizer,
                config=options,
                grad_scaler=None,
                init_state_fn=None,
                model_chunks=[wrapped],
                per_model_buffers={0: [*wrapped.buffers, *wrapped.expert_parallel_buffers]},
                data_parallel_group=parallel_state.get_data_parallel_group(),
                data_parallel_group_gloo=None,
                data_parallel_group_idx=parallel_state.get_model_parallel_group().rank(),
                distributed_optimizer_instance_id=0,
            )
        held = self._distributed
        private_names.check_distributed_optimizer(held)
        for theirs in held.model_param_gbuf_map:
            group, order = held.model_param_group_index_map[theirs]
            self._shards[theirs] = optimizer.param_groups[group]["params"][order]
        self._norm.add_shards((shard, self._weights.counts(theirs)) for theirs, shard in self._shards.items())
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        self.optimizers.append(optimizer)

    def remove(self, optimizer: Optimizer) -> None:
        """Keep it: Megatron-Core has laid out its buffers for this one, so that :meth:`add` refuses a later one."""

    def _grouped(self) -> Iterator[list[nn.Parameter]]:
        """Megatron-Core's parameters for each group of the user's."""
        index_of = {id(one): index for index, group in enumerate(self._ours) for one in group}
        groups: list[list[nn.Parameter]] = [[] for _ in self._ours]
        for pair in self._weights.pairs:
            if not pair.theirs[0].requires_grad:
                continue
            indices = {index_of.get(id(one)) for one in pair.ours}
            index = indices.pop()
            if indices:
                raise UsageError(
                    f"{', '.join(pair.names)} lie in one parameter of Megatron-Core, and not in one parameter group",
                    cure="Give them to one group, or write data_parallel: ddp.",
                )
            if index is None:
                raise UsageError(
                    f"{', '.join(pair.names)} require gradients, and Megatron-Core's distributed optimizer does not "
                    "have them",
                    cure="Give them to the optimizer, or freeze them, or write data_parallel: ddp.",
                )
            groups[index] += pair.theirs
        yield from groups

    def _as_on_cuda(self) -> AbstractContextManager[Any]:
        if self._engine.device != "cpu":
            return nullcontext()
        from drivetrain_megatron.core_engine.device import Here

        return Here()

    @torch.no_grad()
    def _stepped(self) -> None:
        """The shards have stepped: every rank gets all of them. Collective over the data-parallel ranks."""
        assert self._distributed is not None, "a hook of the optimizer that it has"
        with self._groups.shared():
            self._distributed._copy_main_params_to_model_params()  # noqa: SLF001 (its step() would clip and scale too)
            self._wrapped.start_param_sync(force_sync=True)
        self._weights.pull()

    # ---- gradients --------------------------------------------------------------------------------------------------

    def keep_gradients(self) -> None:
        """Put gradients that are reduced already aside, before the buffer is used again."""
        self._earlier = [(one, one.grad.clone()) for one in self._shards.values() if one.grad is not None]

    def give_gradients(self) -> None:
        """Give the shards what the buffer holds for them, and what was put aside. Not collective."""
        if self._distributed is not None:
            self._distributed._copy_model_grads_to_main_grads()  # noqa: SLF001 (as above)
        for shard, grad in self._earlier:
            shard.grad = grad if shard.grad is None else shard.grad + grad
        self._earlier = []

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Discard the gradients in the buffer."""
        self._wrapped.zero_grad_buffer()

    @property
    def held(self) -> Sequence[Tensor]:
        """Return the tensors that have gradients on this rank."""
        return list(self._shards.values())

    def _of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shards of the user's parameters."""
        wanted = {id(one) for one in parameters}
        found = []
        for pair in self._weights.pairs:
            inside = [id(one) in wanted for one in pair.ours]
            if any(inside) and not all(inside):
                raise UsageError(
                    f"of {', '.join(pair.names)}, which lie in one parameter of Megatron-Core, some are to be clipped",
                    cure="Clip all of them together, or write data_parallel: ddp.",
                )
            found += [self._shards[one] for one in pair.theirs if all(inside) and one in self._shards]
        return found

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """See :meth:`drivetrain.api.Trainable.clip_grad_norm`."""
        return self._engine.clip_grad_norm(self._of(parameters), max_norm, norm_type, self.optimizers)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """See :meth:`drivetrain.api.Trainable.clip_grad_value`."""
        self._engine.clip_grad_value(self._of(parameters), clip_value, self.optimizers)

    def unscale(self, optimizer: Optimizer) -> None:
        """Take the loss scale out of the shards' gradients."""
        self._engine.unscale(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> StepResult:
        """One update, or none. Collective over the data-parallel ranks."""
        self._take_in_writes()
        return self._engine.step(optimizer, closure)

    @torch.no_grad()
    def _take_in_writes(self) -> None:
        """Copy values written to parameters since the last step into the optimizer's shards. Not collective.

        Shards of float32 parameters are views of them; those of others are copies in float32, which keep their digits
        where nothing was written.
        """
        self._weights.push()
        if self._distributed is None:
            return
        halves, copies = self._distributed.shard_float16_groups, self._distributed.shard_fp32_from_float16_groups
        for low, high in zip(itertools.chain(*halves), itertools.chain(*copies), strict=True):
            if low is not None and high is not None:
                high.copy_(torch.where(high.to(low.dtype) == low, high, low.to(high.dtype)))

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Drop the shards' gradients."""
        optimizer.zero_grad(set_to_none)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def portable_state(self) -> PortableState:
        """Return this rank's part of a checkpoint. Collective over the data-parallel ranks."""
        parts, written = self._in_parts()
        names, steps = self._slots()
        for pair in filter(self._trains, self._weights.pairs):
            if pair.one_memory:
                continue
            # In low precision the numbers that count are those of the shards.
            for mine, value in zip(pair.ours, pair.how.split(self._whole(pair.theirs, None)), strict=True):
                local_part(mine.detach()).copy_(value)
        for pair in filter(self._trains, self._weights.pairs if steps else ()):
            slots = {name: pair.how.split(self._whole(pair.theirs, name)) for name in names}
            for index, mine in enumerate(pair.ours):
                written[0].state[mine] = {"step": torch.tensor(steps)} | {
                    name: parts.cut(laid_out_as(mine, each[index]), mine) for name, each in slots.items()
                }
        with parts.in_checkpoint(written):
            return state.portable_state(self._module, written, self._engine)

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        """Return the tensors that this rank loads from a checkpoint. Not collective."""
        parts, written = self._in_parts()
        with parts.in_checkpoint(written):
            return state.portable_template(self._module, written, saved)

    @torch.no_grad()
    def load_portable_state(self, portable: PortableState) -> None:
        """Take it over. Collective over the data-parallel ranks."""
        parts, written = self._in_parts()
        with parts.in_checkpoint(written):
            state.load_portable_state(self._module, written, self._engine, portable)
        parts.gather(written)
        self._weights.push()
        for optimizer, read in zip(self.optimizers, written, strict=True):
            for group, saved in zip(optimizer.param_groups, read.param_groups, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
            optimizer.state.clear()
            for pair in filter(self._trains, self._weights.pairs):
                self._fill(pair.theirs, None, pair.how.join([local_part(one.detach()) for one in pair.ours]))
                slots = [read.state.get(one, {}) for one in pair.ours]
                for name in slots[0]:
                    values = [_local(one[name]) for one in slots]
                    whole = pair.how.join(values) if values[0].dim() else values[:1] * len(pair.theirs)
                    self._fill(pair.theirs, name, whole)

    def _trains(self, pair: Pair) -> bool:
        return bool(self.optimizers) and pair.theirs[0].requires_grad

    def _in_parts(self) -> tuple[Parts, list[Optimizer]]:
        """Parts of the user's parameters, and an optimizer of these in the groups of the real one, without state."""
        parts = Parts(self._mesh, self._module)
        written = [
            Optimizer(
                [{**group, "params": ours} for group, ours in zip(each.param_groups, self._ours, strict=True)], {}
            )
            for each in self.optimizers
        ]
        return parts, written

    def _slots(self) -> tuple[list[str], float]:
        """Names of the state that is shaped like its parameter, and how often the optimizer has stepped.

        Collective over the data-parallel ranks: one may hold no shard at all.
        """
        here = list(self.optimizers[0].state.values()) if self.optimizers else []
        names = sorted({name for slots in here for name, one in slots.items() if one.dim()})
        everyones: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyones, (names, max((float(one["step"]) for one in here), default=0.0)), self._group)
        return max((each[0] for each in everyones), key=len), max(each[1] for each in everyones)

    def _whole(self, theirs: Sequence[Tensor], slot: str | None) -> list[Tensor]:
        """Gather optimizer state shaped like these Megatron-Core parameters, or their values, for this ``tp`` rank.

        Collective over the data-parallel ranks.
        """
        found = []
        for one in theirs:
            flat = torch.zeros(one.numel(), dtype=torch.float32, device=one.device)
            shard = self._shards.get(one)
            if shard is not None:
                start, end = self._range(one)
                value = shard if slot is None else self.optimizers[0].state[shard][slot]
                flat[start:end] = value.detach()
            dist.all_reduce(flat, group=self._group)  # The other ranks add zeros.
            found.append(flat.view(one.shape))
        return found

    def _fill(self, theirs: Sequence[Tensor], slot: str | None, values: Sequence[Tensor]) -> None:
        """Copy this rank's shards out of values gathered for this ``tp`` rank. Not collective."""
        for one, value in zip(theirs, values, strict=True):
            shard = self._shards.get(one)
            if shard is None:
                continue
            start, end = self._range(one)
            own = value.reshape(-1)[start:end] if value.dim() else value
            if slot is None:
                shard.detach().copy_(own)
            else:
                self.optimizers[0].state[shard][slot] = own.clone()

    def _range(self, theirs: Tensor) -> tuple[int, int]:
        assert self._distributed is not None, "there are shards"
        bounds = self._distributed._get_model_param_range_map(theirs)["param"]  # noqa: SLF001 (as above)
        return bounds.start, bounds.end


def _local(tensor: Any) -> Tensor:
    """All-gather a tensor that is sharded over the data-parallel ranks, for this ``tp`` rank. Collective over them."""
    if isinstance(tensor, DTensor) and "dp" in (tensor.device_mesh.mesh_dim_names or ()):
        tensor = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return local_part(tensor)
