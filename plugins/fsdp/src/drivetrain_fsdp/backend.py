"""Backend ``fsdp``: shards parameters, gradients and optimizer state with torch's ``fully_shard``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.api import (
    DistributedBackend,
    GradientHook,
    Mesh,
    PortableState,
    StepResult,
    TensorSpec,
    Topology,
    TorchEngine,
    TorchTrainable,
    Trainable,
    UnsupportedError,
    UsageError,
    cast_parameters,
    collectives,
    ensure_process_group,
    original_module,
    pick_device,
    plain_state_dict,
    portable,
)
from drivetrain.api.engines import Buffers, is_taken
from drivetrain_fsdp import hidden, private_names
from drivetrain_fsdp.config import FSDPConfig
from drivetrain_fsdp.filling import Filling
from drivetrain_fsdp.hooks import GradientHooks, refuse_hooks
from drivetrain_fsdp.plugin import FSDP
from drivetrain_fsdp.remapping import parameters_of, remap
from drivetrain_fsdp.sharding import Sharded, check_reshard, gets_gradients, plan, shard
from drivetrain_fsdp.tensors import (
    ShardedTensor,
    Writes,
    as_sharded,
    explain_missing_gradients,
    plain_gradients,
    refuse_plain_gradients,
)
from drivetrain_fsdp.whole import WholeParameters
from drivetrain_sharding import (
    AssignmentRefusal,
    FormerParameters,
    OwnerSteps,
    Recording,
    check_elementwise,
    check_private_names,
    deferred,
    gathered,
    hear_of_backwards,
    is_own,
    joined_extra,
    keep_gathered_memory,
    needs_owners,
    parameter_groups,
    refuse_as_data,
    refuse_max_norm,
    refuse_other_values,
    step_on_parts,
    successors,
    watch_forwards,
)

_USER = "drivetrain-fsdp"


@final
class FSDPTrainable(TorchTrainable):
    """A module with sharded parameters.

    Every forward gathers parameters, so all ranks must run the same number of them, in evaluation too.
    """

    settles_buffers = True
    communicates_in_forward = True

    def __init__(
        self,
        backend: FSDPBackend,
        model: nn.Module,
        sharded: Sharded,
        former: FormerParameters,
        whole: WholeParameters,
        hooks: GradientHooks,
        engine: TorchEngine,
    ) -> None:
        super().__init__(model, (), engine)
        self._backend, self._sharded = backend, sharded
        self._groups = parameter_groups(sharded.modules, _USER)
        self._may_stay_whole = parameter_groups(sharded.stay_whole, _USER)
        sharded.undo.append(AssignmentRefusal(self.module, "fsdp shards").remove)
        self._former, self._whole, self._hooks = former, whole, hooks
        self._groups_known: dict[int, int] = {}
        """Number of parameter groups covered by a trial, by optimizer."""
        self.keeps_whole = bool(whole.parameters)
        """Some trained parameters could not be cut."""
        uncut = set(whole.parameters)
        self._uncut = [(name, one) for name, one in self.module.named_parameters() if one in uncut]
        self._without_sync = backend.section.accumulate_without_sync
        self._spares_all_reduce = not self._without_sync and backend.topology.mesh.sizes["dp_replicate"] > 1
        self._buffers = Buffers(
            self.module, backend.topology, together=True, each_forward=backend.section.broadcast_buffers
        )
        self._known = {id(parameter) for parameter in self.module.parameters()}
        self._syncs = True
        self._driven = False
        """A backward that this backend runs is under way."""
        self._output_type: type = type(None)
        self._reached_through: set[type] = set()
        """Types of outputs through whose tensors a backward has reached this model."""
        self._ran = False
        """A forward with gradients since the last backward of any model: that backward reaches this model."""
        self._unreduced = False
        """FSDP may hold gradients of micro-batches that no backward has reduced yet."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._buffers.matter:
            self._buffers.before_forward()
        if torch.is_grad_enabled():
            self._ran = True
            output = super().forward(*args, **kwargs)
            self._output_type = type(output)
            return output
        # Parameters gathered first in inference mode could never be trained.
        with torch.inference_mode(mode=False), torch.no_grad():
            output = super().forward(*args, **kwargs)
        self.reshard()
        return output

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        self._backend.backward(loss, scale)

    def gradient_hooks(self) -> Iterable[GradientHook]:
        return self._hooks.listed()

    def synchronise_gradients(self, enabled: bool) -> None:
        # A hook sees the gradient of each micro-batch, whole.
        enabled = enabled or self._hooks.active
        if enabled == self._syncs:
            return
        self._syncs = enabled
        if self._without_sync:
            for module in self._sharded.modules:
                module.set_requires_gradient_sync(enabled, recurse=False)
        elif self._spares_all_reduce:
            for module in self._sharded.modules:
                module.set_requires_all_reduce(enabled, recurse=False)

    def before_backward(self) -> None:
        """Prepare for a backward of some model, which may reach this one."""
        self._driven = True
        if self._hooks.active:
            self._hooks.before_backward()
        if self.keeps_whole:
            self._whole.before_backward()

    def after_backward(self) -> None:
        """Finish the backward. Collective if gradients are synchronised and some parameters are replicated."""
        if self._ran:
            self._ran, self._unreduced = False, not self._syncs
            if self._syncs and self._output_type not in self._reached_through:
                self._check_output()
        # Whether a forward ran or not: two of them may come before two backwards.
        if self.keeps_whole and self._syncs:
            self._whole.reduce()
        self._driven = False
        if self._hooks.begun:
            self._hooks.after_backward()

    def _check_output(self) -> None:
        """Refuse an output in which FSDP finds no tensors: it would miss the backward, and nothing would be trained."""
        if hidden.left_behind(self._groups):
            raise UnsupportedError(
                f"{type(self.module).__name__} returns {self._output_type.__name__}, in which fully_shard finds no "
                "tensors, so that it did not take the gradients of this backward",
                cure="Return a tensor, tuple, list, mapping or dataclass from forward.",
            )
        self._reached_through.add(self._output_type)

    def reached(self, unit: Any) -> None:
        """Handle a backward that reaches a unit, which the script may have begun itself."""
        if self._driven:
            return
        for name, parameter in (*gathered(unit), *self._uncut):
            if parameter.requires_grad and is_taken(parameter):
                raise UsageError(
                    f"torch.autograd.grad was asked for the gradient of {name} of {type(self.module).__name__}, and "
                    "would return that of this rank's samples alone, of a parameter that is whole for one forward",
                    cure="Call accelerator.backward(loss), which leaves gradients over all ranks in p.grad of "
                    "model.parameters().",
                )
        if not self._hooks.begun and self._hooks.active:
            self._hooks.before_backward()
            # FSDP's own callback, which reduces what is left, is in the queue before it.
            torch.autograd.Variable._execution_engine.queue_callback(self._hooks.after_backward)  # noqa: SLF001

    def has_unreduced_gradients(self) -> bool:
        """Whether a backward left gradients to a later one, or one that this backend did not run reached parameters."""
        if self._unreduced and hidden.have_unreduced(self._groups):
            return True
        return self.keeps_whole and self._whole.unreduced()

    def check_hook(self) -> None:
        """Refuse a gradient hook in the middle of a window, whose gradients are summed already."""
        if self._unreduced:
            raise UsageError(
                "a gradient hook was set while gradients of earlier micro-batches wait to be reduced",
                cure="Set hooks of parameters before the window's first micro-batch.",
            )

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        parameters = successors(parameters)
        self._backend.check_held(parameters)
        with plain_gradients(parameters):
            return super().clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        parameters = successors(parameters)
        self._backend.check_held(parameters)
        with plain_gradients(parameters):
            super().clip_grad_value(parameters, clip_value)

    def holds(self, parameter: Tensor) -> bool:
        """Whether a gradient of this model can be found at this parameter."""
        return id(parameter) in self._known

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        # A forward without a backward (model.generate) leaves some parameters whole, and their copies would go stale.
        self._backend.reshard()
        self._check_kind(optimizer)
        owners = self._backend.owners.get(id(optimizer))
        with Writes.of_step():
            if owners is None:
                return step_on_parts(self.engine, optimizer, closure, kept_as=as_sharded)
            return owners.step(self.engine, closure)

    def before_unprepared_step(self, optimizer: Optimizer) -> None:
        """An optimizer that was not prepared steps on the shards themselves, which is right if it is element-wise."""
        self._backend.reshard()
        if self._backend.shards and self._groups_known.get(id(optimizer)) != len(optimizer.param_groups):
            check_elementwise(optimizer, "fsdp", instead="prepare it: accelerator.prepare(model, optimizer)")
            self._groups_known[id(optimizer)] = len(optimizer.param_groups)

    def _check_kind(self, optimizer: Optimizer) -> None:
        """Find out again how an optimizer steps after ``add_param_group``; refuse one that couples parameters."""
        if self._backend.shards and self._groups_known.get(id(optimizer)) != len(optimizer.param_groups):
            self._note_kind(optimizer, whole=needs_owners(optimizer, "fsdp"))

    def _note_kind(self, optimizer: Optimizer, *, whole: bool) -> None:
        """Give owners to the parameters of a matrix-wise optimizer. Collective where it has state already."""
        if whole and id(optimizer) not in self._backend.owners:
            self._backend.owners[id(optimizer)] = OwnerSteps(optimizer)
        self._groups_known[id(optimizer)] = len(optimizer.param_groups)

    def _owned(self) -> dict[int, bool]:
        owners = self._backend.owners
        steps = [owners[id(optimizer)] for optimizer in self.optimizers if id(optimizer) in owners]
        return {number: mine for each in steps for number, mine in each.owned().items()}

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        super().zero_grad(optimizer, set_to_none)
        # Of every model: the optimizer may hold parameters of several.
        for trainable in self._backend.trainables:
            if trainable.hides_gradients:
                trainable.forget_gradients(optimizer)

    @property
    def hides_gradients(self) -> bool:
        """Whether some gradients may not be in ``.grad`` yet."""
        return self._unreduced or self.keeps_whole

    def forget_gradients(self, optimizer: Optimizer) -> None:
        """Drop gradients of this optimizer's parameters that are not in ``.grad`` yet."""
        if self._unreduced:
            hidden.drop_unreduced(self._groups, parameters_of(optimizer))
        if self.keeps_whole:
            self._whole.forget(optimizer)

    def shares(self, parameters: Sequence[Tensor]) -> bool:
        return self._former.include(parameters) or any(self.holds(parameter) for parameter in parameters)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self.reshard()
        whole = self._backend.shards and needs_owners(optimizer, "fsdp")
        remap(optimizer, self._former, self.module, self._backend.topology)
        self._note_kind(optimizer, whole=whole)
        self.optimizers.append(optimizer)

    def remove_optimizer(self, optimizer: Optimizer) -> None:
        super().remove_optimizer(optimizer)
        self._backend.owners.pop(id(optimizer), None)
        self._groups_known.pop(id(optimizer), None)

    def portable_state(self) -> PortableState:
        self._settle()
        state = super().portable_state()
        for optimizer in self.optimizers:
            owners = self._backend.owners.get(id(optimizer))
            if owners is not None and owners.group is not None:
                state.extra = joined_extra(state.extra, owners.group)
        return state

    def live_tensors(self) -> dict[str, Any]:
        self.reshard()
        return super().live_tensors()

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        self._settle()
        return portable.portable_template(self.module, self.optimizers, saved, self._owned())

    def load_portable_state(self, state: PortableState) -> None:
        self.reshard()
        portable.load_portable_state(self.module, self.optimizers, state, self._owned())
        self.engine.load_state(state.extra)

    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        self._settle()
        for name, tensor in plain_state_dict(self.module).items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def before_registration(self, parent: nn.Module, name: str, value: Any) -> None:
        """Refuse parameters registered after ``fully_shard``: they would be neither gathered nor reduced."""
        new = [value] if isinstance(value, nn.Parameter) else []
        if isinstance(value, nn.Module):
            new = [one for one in value.parameters() if not self.holds(one)]
        if not new or is_own(self._groups, parent, name, value):
            return
        raise UnsupportedError(
            f"{name!r} of {type(parent).__name__} was set after prepare and has parameters, and fsdp shards "
            "parameters in prepare only",
            cure="Build the whole model before accelerator.prepare(model), with the adapters and heads that it will "
            "need; freeze them by requires_grad_(False) until they train.",
        )

    def before_conversion(self) -> None:
        """Refuse ``.to()``, ``.double()``, ``.half()``: FSDP's buffers and communication are made for what it was."""
        raise UnsupportedError(
            "fsdp cannot change device or dtype of a model that was prepared",
            cure="Call .to(), .half() or .double() before accelerator.prepare(model); mixed_precision says in which "
            "dtype it computes.",
        )

    def before_copy(self) -> None:
        """Refuse copies and pickles of a module whose parameters are this rank's shards."""
        raise UnsupportedError(
            "a model that is sharded by fsdp cannot be copied or pickled (copy.deepcopy, AveragedModel, torch.save)",
            cure="Copy it before accelerator.prepare(model), or average its parameters themselves: "
            "`{name: p.detach().clone() for name, p in model.named_parameters()}`. accelerator.save_model(model, "
            "folder) writes it.",
        )

    def before_state_dict(self, *, replicated: bool) -> None:
        """Allow it: tensors of the state dict represent full ones, and raise if written as shards.

        Raises:
            UsageError: ``save_pretrained`` calls it. It compares addresses of tensors before it writes them, with
                collectives that the other ranks do not join.
        """
        asks: FrameType | None = sys._getframe(1)  # noqa: SLF001
        for _ in range(3):
            if asks is not None and asks.f_code.co_name == "save_pretrained":
                super().before_state_dict(replicated=replicated)
            asks = asks and asks.f_back
        self.reshard()

    def release(self) -> None:
        """Remove what was added to the module; it stays sharded, since no rank may have memory for all of it."""
        self.reshard()
        for undo in self._sharded.undo:
            undo()
        self._sharded.undo.clear()
        self._hooks.release()
        self._backend.forget(self)

    def _settle(self) -> None:
        """Reshard parameters and synchronise buffers. Collective over all ranks."""
        self.reshard()
        self._buffers.agree()

    def reshard(self) -> None:
        """Reshard parameters that a forward left gathered."""
        hidden.reshard(self._may_stay_whole)


@final
class FSDPBackend(DistributedBackend):
    """Each rank holds its shard of every parameter."""

    capabilities = FSDP.capabilities

    def start(self) -> Topology:
        settings = self.settings
        check_private_names("drivetrain-fsdp")
        self.section: FSDPConfig = settings.section or FSDPConfig()
        device = pick_device(settings.device_type, settings.process)
        kind = device.partition(":")[0]
        group = settings.process_group
        if self.section.cpu_offload and kind != "cpu" and group.communication_backend is None:
            # Norms and checkpoints of offloaded shards communicate from CPU memory.
            both = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
            group = replace(group, communication_backend=both)
        sizes = dict(settings.mesh)
        rest = settings.process.world_size // Mesh({**sizes, "dp_shard": 1}).world_size
        sizes.setdefault("dp_shard", max(rest, 1))
        mesh = Mesh(sizes)
        self.topology = Topology(settings.process, mesh, device)
        check_reshard(self.section, sizes["dp_shard"])
        self._group = ensure_process_group(settings.process, kind, group, alone=True)
        self.topology = replace(self.topology, communication_backend=self._group.communication_backend)
        axes = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis == "dp_shard" or mesh.sizes[axis] > 1)
        self._mesh = init_device_mesh(kind, tuple(mesh.sizes[axis] for axis in axes), mesh_dim_names=axes)
        agree = self._any if settings.precision.loss_scaling else None
        self._engine = TorchEngine(settings.precision, device, agree)
        self.scaler = self._engine.scaler
        self.trainables: list[FSDPTrainable] = []
        self.shards = sizes["dp_shard"] > 1
        """Parameters are cut."""
        self.owners: dict[int, OwnerSteps] = {}
        """Owner steps of matrix-wise optimizers, by optimizer."""
        return self.topology

    def init_context(self) -> AbstractContextManager[Any]:
        """Construct without memory; ``prepare`` gives each rank its shards of the ordinary initial values."""
        return deferred(Recording())

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        module, settings = original_module(model), self.settings
        self._refuse(module)
        if training:
            refuse_max_norm(module, "fsdp")
        filling = Filling(module, self.section.weights)
        former = FormerParameters(module)
        hooks = GradientHooks(module)
        cast_parameters(module, settings.precision)
        filling.fill_buffers(module, self.topology)
        Buffers.place(module, self.topology)
        cut = plan(module, self.section, settings.precision)
        scaled = list(filter(gets_gradients, cut.whole)) if settings.precision.loss_scaling else []
        if scaled:
            raise UnsupportedError(
                f"{type(module).__name__} has {len(scaled)} parameter(s) that cannot be cut, such as 0-d ones, "
                "which torch's loss scaler does not take beside sharded ones",
                cure="Give them the shape (1,), or use mixed_precision='bf16'.",
            )
        sharded = shard(module, cut, self.section, settings.precision, self._mesh, self.topology)
        at = torch.device("cpu" if self.section.cpu_offload else self.topology.device)
        filling.fill_parameters(module, self.topology, at)
        groups = parameter_groups(sharded.modules, _USER)
        private_names.check(groups)
        hidden.give_sharded_tensors(groups)
        keep_gathered_memory(groups, _USER, refuse_hooks)
        whole = [parameter for parameter in module.parameters() if parameter in set(cut.whole)]
        trained = WholeParameters([each for each in whole if each.requires_grad], self.topology)
        trainable = FSDPTrainable(self, model, sharded, former, trained, hooks, self._engine)
        hooks.watch(module, trainable.check_hook)
        hear_of_backwards(groups, "fsdp", trainable.reached)
        hidden.compare_first_steps(module, groups, self.topology)
        refuse_other_values(groups, "fsdp")
        watch_forwards(module, groups, "fsdp")
        explain_missing_gradients()
        refuse_as_data(ShardedTensor)
        for optimizer in optimizers:
            trainable.add_optimizer(optimizer)
        former.close(module, "fsdp put a sharded one")
        self.trainables.append(trainable)
        return trainable

    def _refuse(self, module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            raise UnsupportedError(
                f"this {type(module).__name__} is sharded already, by an earlier prepare or by fully_shard, and cannot "
                "be sharded again; free_memory() does not make its parameters whole",
                cure="Prepare a model once, together with its optimizer, even if it is only evaluated at first. Or "
                "construct it again, and on the main process load the state that accelerator.get_state_dict(model) "
                "returned before: every rank starts from its values.",
            )
        for name, parameter in module.named_parameters():
            if hasattr(parameter, "quant_state") or type(parameter).__module__.partition(".")[0] == "bitsandbytes":
                raise UnsupportedError(
                    f"{name} is a quantised {type(parameter).__name__}, whose packed bytes and scales fsdp cannot cut",
                    cure="Use distributed_type: ddp for a quantised base model, or load it without quantisation.",
                )
        if not self.settings.place_on_device and self.topology.device != "cpu":
            raise UsageError(
                "device_placement=False leaves a model where it is, and fsdp needs its shards on the device",
                cure="Leave device_placement at True; cpu_offload in the section `fsdp:` keeps shards in CPU memory.",
            )
        parameters = list(module.parameters())
        if any(trainable.shares(parameters) for trainable in self.trainables):
            raise UsageError(
                f"{type(module).__name__} shares parameters with a model that was prepared before",
                cure="Make one nn.Module of both with one optimizer, and prepare that: its forward returns the outputs "
                "of both.",
            )

    def backward(self, loss: Tensor, factor: float | Tensor) -> None:
        """Back-propagate through every prepared model that the loss depends on."""
        for trainable in self.trainables:
            trainable.before_backward()
        try:
            self._engine.backward(loss, factor)
        except AssertionError as problem:
            for trainable in self.trainables:
                refuse_plain_gradients(trainable.module.parameters(), problem)
            raise
        for trainable in self.trainables:
            trainable.after_backward()
        self._engine.show_gradients()

    def check_held(self, parameters: Sequence[Tensor]) -> None:
        """Raise :class:`UsageError` for tensors that never get a gradient: gathered parameters of one forward."""
        for parameter in parameters:
            if not any(trainable.holds(parameter) for trainable in self.trainables):
                raise UsageError(
                    "clipping was given tensors that are not parameters of a sharded model: they were taken from the "
                    "model before prepare, or between a forward and its backward, while they are gathered",
                    cure="Call model.parameters() of the model that prepare returned, after accelerator.backward.",
                )

    def reshard(self) -> None:
        """Reshard the parameters of every model; an optimizer may hold those of several."""
        for trainable in self.trainables:
            trainable.reshard()

    def forget(self, trainable: FSDPTrainable) -> None:
        """Remove a released model."""
        self.trainables = [each for each in self.trainables if each is not trainable]
        held = {id(optimizer) for each in self.trainables for optimizer in each.optimizers}
        self.owners = {number: owners for number, owners in self.owners.items() if number in held}

    def _any(self, verdict: bool) -> bool:
        flag = torch.tensor([int(verdict)], device=self.topology.device)
        return bool(collectives.all_reduce(flag, "max", self.topology).item())

    def stop(self) -> None:
        self._group.release()
