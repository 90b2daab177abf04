"""Clips gradients and steps optimizers, with and without a pipeline, with and without ZeRO-1."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.api import PortableState, StepResult, TensorSpec, TorchEngine, UnsupportedError, UsageError, gradients
from drivetrain_megatron import gradient_hooks, state
from drivetrain_megatron.data_shards import DataShard, as_shard, plain_shards
from drivetrain_megatron.optimizer_trial import OptimizerTrial
from drivetrain_megatron.remapping import remap
from drivetrain_megatron.sharding import part, shard
from drivetrain_megatron.tensor.cut import CutTensor, as_cut_like, engine_side
from drivetrain_megatron.zero1 import Parts
from drivetrain_sharding import FormerParameters, check_step_hooks, is_own, on_local_parts, step_on_parts, successors


@final
class Stepping:
    """The optimizers of one model.

    Args:
        module: the user's module.
        engine: precision, loss scaling, skipped steps.
        max_norm: to which each step clips by the section's word, where the script does not.
        trial: refuses optimizers that cannot step on parts.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: TorchEngine,
        max_norm: float | None = None,
        trial: OptimizerTrial | None = None,
    ) -> None:
        self._trial = trial
        engine.serve(self)
        self._module, self._engine, self._max_norm = module, engine, max_norm
        self._clipped = False
        """The script has clipped since the last time gradients were dropped."""
        self._parts: Parts | None = None
        self._former: FormerParameters | None = None
        self._groups: list[Any] = []
        """Groups of parameters in shards."""
        self.optimizers: list[Optimizer] = []
        self._step_hooks: set[int] = set()
        self._seen_state: dict[int, int] = {}
        """Number of parameters with state at the last check, by optimizer."""

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer of the module's parameters. Collective over the axes along which these are sharded.

        Raises:
            UnsupportedError: it reads more elements than one rank has.
        """
        if self._trial is not None:
            self._trial.check(optimizer)
        self.optimizers.append(optimizer)
        if self._former is not None:
            remap(optimizer, self._former, self._module, part)

    def remove(self, optimizer: Optimizer) -> None:
        """Remove an optimizer that a later one replaces."""
        self.optimizers[:] = [each for each in self.optimizers if each is not optimizer]
        self._seen_state.pop(id(optimizer), None)

    def lay_out(self, how: str, mesh: DeviceMesh, shared: Collection[nn.Parameter] = ()) -> None:
        """Share state or parameters out over the data-parallel ranks. Collective over them.

        Args:
            how: ``"ddp"``, ``"zero1"`` or ``"fsdp"``.
            mesh: of the job.
            shared: parameters that other pipeline stages hold too, which stay whole on each.
        """
        if how == "zero1":
            self._parts = Parts(mesh, self._module)
        elif how == "fsdp":
            before = dict(self._module.named_parameters())
            self._former, self._groups = shard(self._module, mesh, self.optimizers, shared)
            why = "data_parallel: fsdp reduces gradients into shards past autograd, which calls hooks"
            gradient_hooks.refuse(before, self._module, why)

    def check_registration(self, parent: nn.Module, name: str, value: Any) -> None:
        """Refuse another parameter in the place of one in shards, which would still be gathered. Not collective."""
        held = isinstance(parent._parameters.get(name), DataShard)  # noqa: SLF001 (asking by name gathers nothing)
        if held and not is_own(self._groups, parent, name, value):
            raise UnsupportedError(
                f"{name!r} of {type(parent).__name__} is in shards over data-parallel ranks (data_parallel: fsdp) and "
                "was replaced",
                cure="Write into it, accelerator.unwrap_model(model).load_state_dict(...), exchange or tie it before "
                "prepare, or write `data_parallel: zero1`.",
            )

    def check_conversion(self) -> None:
        """Refuse ``.to()``, ``.double()``, ``.half()`` of a module in shards, which torch gathers in one dtype."""
        if self._groups:
            raise UnsupportedError(
                "data_parallel: fsdp cannot change dtype or memory format of a model that was prepared",
                cure="Call .to(), .half() or .double() before accelerator.prepare(model), or write "
                "`data_parallel: zero1`.",
            )

    def check_copy(self) -> None:
        """Refuse copies of a module in shards, which torch hooks. Not collective."""
        if self._groups:
            raise UnsupportedError(
                "a model in shards over data-parallel ranks (data_parallel: fsdp) cannot be copied or pickled "
                "(copy.deepcopy, AveragedModel, torch.save)",
                cure="Copy it before accelerator.prepare(model), or write `data_parallel: zero1`. "
                "accelerator.save_model(model, folder) writes it.",
            )

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """See :meth:`drivetrain.api.Trainable.clip_grad_norm`. A call with an infinite norm only measures."""
        if math.isfinite(max_norm):
            self._clipped = True
            if self._max_norm not in (None, max_norm):
                raise UsageError(
                    f"megatron.gradient_clipping: {self._max_norm:g} contradicts the script, which calls "
                    f"clip_grad_norm_ with {max_norm:g}",
                    cure="Write it in one place.",
                )
        with engine_side(), plain_shards():
            return self._engine.clip_grad_norm(successors(parameters), max_norm, norm_type, self.optimizers)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """See :meth:`drivetrain.api.Trainable.clip_grad_value`."""
        with engine_side(), plain_shards():
            self._engine.clip_grad_value(successors(parameters), clip_value, self.optimizers)

    def kept_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients of what this optimizer holds, of those that are cut this rank's parts."""
        with engine_side():
            found = gradients(one for group in optimizer.param_groups for one in group["params"])
            return [one.to_local() if isinstance(one, DTensor) else one for one in found]

    def unscale(self, optimizer: Optimizer) -> None:
        """Take the loss scale out of what this optimizer will step with."""
        with engine_side():
            self._engine.unscale(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> StepResult:
        """One update, or none. Collective over all ranks where it clips or the state is in parts."""
        if self._max_norm is not None and not self._clipped:
            self.clip_grad_norm(list(self._module.parameters()), self._max_norm, 2.0)
        if self._parts is None:
            # The optimizer was tried on DTensors; a closure is the script's.
            with plain_shards() if closure is None else nullcontext():
                result = step_on_parts(self._engine, optimizer, closure)
            self._show_state(optimizer)
            return result
        if closure is not None:
            raise UnsupportedError(
                "an optimizer closure cannot be combined with data_parallel: zero1", cure="Use data_parallel: ddp."
            )
        check_step_hooks(optimizer, self._step_hooks, "this rank's parts of parameters by data_parallel: zero1")
        result = self._engine.step(optimizer, stepping=partial(_on_parts, self._parts, optimizer))
        if not result.skipped:
            self._parts.gather([optimizer])
        return result

    def _show_state(self, optimizer: Optimizer) -> None:
        """Make new optimizer state read in the script as the parameters do."""
        if self._seen_state.get(id(optimizer)) == len(optimizer.state):
            return
        self._seen_state[id(optimizer)] = len(optimizer.state)
        with engine_side():
            for parameter, state in optimizer.state.items():
                for value in state.values():
                    if isinstance(parameter, CutTensor):
                        as_cut_like(parameter, value)
                    elif isinstance(parameter, DataShard) and isinstance(value, DTensor):
                        as_shard(value)

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Drop the gradients of this optimizer's parameters."""
        self._clipped = False
        with engine_side():
            optimizer.zero_grad(set_to_none)

    def portable_state(self) -> PortableState:
        """Return this rank's part of a checkpoint."""
        with self._names():
            return state.portable_state(self._module, self.optimizers, self._engine)

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        """Return the tensors that this rank loads from a checkpoint."""
        with self._names():
            return state.portable_template(self._module, self.optimizers, saved)

    def load_portable_state(self, portable: PortableState) -> None:
        """Take it over. Collective over the data-parallel ranks where the state is in parts."""
        with self._names():
            state.load_portable_state(self._module, self.optimizers, self._engine, portable)
        self._seen_state.clear()
        if self._parts is not None:
            self._parts.gather(self.optimizers)

    def _names(self) -> AbstractContextManager[None]:
        return nullcontext() if self._parts is None else self._parts.in_checkpoint(self.optimizers)


@contextmanager
def _on_parts(parts: Parts, optimizer: Optimizer) -> Iterator[None]:
    with parts.in_optimizers([optimizer]), on_local_parts(optimizer):
        yield
