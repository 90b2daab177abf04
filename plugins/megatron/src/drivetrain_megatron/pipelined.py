"""A pipelined model: training outputs are deferred, and backward runs the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from drivetrain.api import (
    GradientHook,
    PortableState,
    StepResult,
    TorchEngine,
    UnsupportedError,
    UsageError,
    gradients,
    multiply_gradients,
)
from drivetrain_megatron import gradient_hooks, state
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.norms import GlobalNorm
from drivetrain_megatron.optimizer_trial import OptimizerTrial
from drivetrain_megatron.pipeline.calls import ModelCall
from drivetrain_megatron.pipeline.deferred import Deferred, Node
from drivetrain_megatron.pipeline.deferred_trainable import DeferredTrainable
from drivetrain_megatron.pipeline.parting import Share, add_shared_gradients, drop_foreign, without_absent
from drivetrain_megatron.pipeline.pipeline import Pipeline
from drivetrain_megatron.pipeline.skeleton import Elsewhere, StatesHere, passing_over
from drivetrain_megatron.pipeline.windows import deferred_loss
from drivetrain_megatron.remapping import remap
from drivetrain_megatron.replicas import Replicas
from drivetrain_megatron.stepping import Stepping
from drivetrain_megatron.tensor.sharded import warn_anew
from drivetrain_megatron.whole import WholeState
from drivetrain_sharding import AssignmentRefusal, FormerParameters


@final
class PipelinedTrainable(DeferredTrainable):
    """A module of which each rank holds some stages.

    Before its first forward every rank holds all of it; that forward's inputs show in which order modules are called,
    and where it can be cut. ``forward`` in training mode returns what will be known after :meth:`backward`.
    """

    pipeline: Pipeline
    _stepping: Stepping

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        former: FormerParameters,
        cut: Callable[[Tensor, Tensor], Tensor],
        engine: TorchEngine,
        replicas: Replicas,
        dp_size: int,
        section: MegatronConfig,
        group: dist.ProcessGroup,
        device: str | None,
        norm: GlobalNorm,
        mesh: DeviceMesh,
        trial: OptimizerTrial,
    ) -> None:
        self.module = module
        self._stepping = Stepping(module, engine, section.gradient_clipping, trial)
        self.optimizers = self._stepping.optimizers
        self._former, self._part, self._engine = former, cut, engine
        self._replicas, self._dp_size, self._group = replicas, dp_size, group
        self._device, self._norm, self._mesh, self._how = device, norm, mesh, section.data_parallel
        self._share: Share | None = None
        self.whole: WholeState | None = None
        """Gathers the full state dict."""
        self._linear = gradient_hooks.LinearHooks(module)
        self._assignment = AssignmentRefusal(module, "a pipeline has on several stages")
        self._syncs, self._dividing = True, False
        self._held: list[nn.Parameter] = []
        self._absent: list[Elsewhere] = []
        self._shared: dict[str, nn.Parameter] = {}
        in_shards = self._how == "fsdp" and dp_size > 1
        self.pipeline = Pipeline(
            model,
            module,
            engine,
            section,
            group,
            engine.device,
            self._divide,
            mesh["tp"].get_group() if mesh["tp"].size() > 1 else None,
            mesh["dp"].get_group() if in_shards else None,
            mesh["dp"].get_local_rank(),
        )

    @passing_over
    def _divide(self, share: Share) -> None:
        self._dividing = True
        device = None if self._device is None else torch.device(self._device)
        drop_foreign(self.module, share, self.pipeline.planner.skeleton.blanks, self.optimizers, device)
        self._share = share
        if self._dp_size > 1:
            shared = [self.module.get_parameter(name) for name, _ in share.shared()]
            with self.plain_calls():  # attributes and hooks that torch sets on units are not the script's
                self._stepping.lay_out(self._how, self._mesh, shared)
        what = "the pipeline put one without values, which belongs to another stage,"
        self._former.close(self.module, what, "the first forward of the prepared model")
        parameters = dict(self.module.named_parameters())
        self._held = [parameters[name] for name in parameters if share.holds(name)]
        self._absent = [one for one in parameters.values() if isinstance(one, Elsewhere)]
        self._shared = {name: parameters[name] for name, _ in share.shared()}
        self._norm.leave_out([parameters[name] for name in self._shared if not share.mine(name)])
        self._dividing = False

    def plain_calls(self) -> AbstractContextManager[None]:
        """Call the module and its submodules as without a pipeline."""
        return self.pipeline.planner.interception.plain()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.whole is not None:
            self.whole.check_given()
        self._check_values()
        return self.pipeline.forward(*args, **kwargs)

    def _check_values(self) -> None:
        """Raise where a call replaces parameters by other tensors: stages run later, with what the module has then."""
        for part in self.module.modules():
            for name, one in part._parameters.items():  # noqa: SLF001
                if one is not None and not isinstance(one, nn.Parameter):
                    raise UnsupportedError(
                        f"{type(part).__name__} was called with another tensor as its {name} "
                        "(torch.func.functional_call), and a pipeline computes with its own",
                        cure="Compute with other values in a second model that is not prepared, or use "
                        "distributed_type: ddp.",
                    )

    def example_loss(self, loss: Tensor, rows: int) -> tuple[Tensor, int] | None:
        if not isinstance(loss, Deferred) or loss.node.value is not None:
            return loss, rows
        found = self.pipeline.example(*deferred_loss(loss))
        # Where the pipeline does not cut batches, it is of all rows.
        return None if found is None else (found[0], found[1] if found[1] > 1 else rows)

    def retaining_graph(self) -> NoReturn:
        raise UnsupportedError(
            "backward() does not take retain_graph with a pipelined model, of which forward and backward run together",
            cure="Add up the losses of one forward: accelerator.backward(first + second). pipeline_parallel_size: 1 "
            "takes it.",
        )

    @passing_over
    def _train(self, call: ModelCall[Any, Any], node: Node, scale: float | Tensor) -> None:
        if self._dp_size > 1:
            self._linear.check()
        multiplier = self._multiplier(scale)
        shared = {name: one for name, one in self._shared.items() if one.requires_grad}
        with gradient_hooks.put_off(self._held, self._dp_size, shared.values(), self._absent):
            self.pipeline.train(call, node, multiplier)
            if shared and self._share is not None:
                add_shared_gradients(shared, self._share, self._group)
        if self._syncs:
            self._replicas.average(self._held)

    @passing_over
    def scale_gradients(self, factor: float | Tensor) -> None:
        multiply_gradients(gradients(self.module.parameters()), factor)

    @passing_over
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if closure is not None:
            raise UnsupportedError(
                "step() was given a closure, which a pipeline cannot run while it steps",
                cure="Call accelerator.backward(loss) first, and step() without a closure.",
            )
        self.pipeline.changed()
        with self.pipeline.script_writes.of_engine(), without_absent(optimizer):
            result = self._stepping.step(optimizer, None)
        if type(optimizer.state) is defaultdict:  # what a script has loaded replaces it
            optimizer.state = StatesHere(optimizer.state)
        return result

    @passing_over
    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        self._stepping.zero_grad(optimizer, set_to_none)

    @passing_over
    def add_optimizer(self, optimizer: Optimizer) -> None:
        remap(optimizer, self._former, self.module, self._part)
        self._stepping.add(optimizer)

    @passing_over
    def portable_state(self) -> PortableState:
        return state.of_stage(self._stepping.portable_state(), self._share, self._group)

    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        assert self.whole is not None, "set where the model is prepared"
        return self.whole.tensors()

    def before_state_dict(self, *, replicated: bool) -> None:
        """Allow it: :mod:`drivetrain_megatron.whole` returns the full state dict, or raises."""

    def gather(self, entries: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Gather tensors, given by first name. Collective over all ranks."""
        if self._share is None:
            yield from state.full_tensors(self.module, entries)
        else:
            device = torch.device(self._engine.device)
            yield from state.tensors_of_stages(self.module, entries, self._share, self._group, device)

    def before_registration(self, parent: nn.Module, name: str, value: Any) -> None:
        interception = self.pipeline.planner.interception
        if interception.running or self._dividing:
            return
        before = parent._buffers.get(name)  # noqa: SLF001 (by name it may be anything)
        if before is not None and isinstance(value, Tensor) and value.shape == before.shape:
            interception.written(parent, name, value)
            return
        raise UnsupportedError(
            f"{name!r} was set on {type(parent).__name__} after prepare, which has cut {type(self.module).__name__} "
            "into pipeline stages: no stage would compute it",
            cure="Set it before accelerator.prepare(model, optimizer).",
        )

    def before_conversion(self) -> None:
        self._stepping.check_conversion()
        self.pipeline.converted = True

    @passing_over
    def gradient_hooks(self) -> Iterable[GradientHook]:
        return list(gradient_hooks.listed(self.module))

    def before_unprepared_step(self, optimizer: Optimizer) -> None:
        raise UsageError(
            f"{type(optimizer).__name__} was not prepared, and holds parameters of a pipelined "
            f"{type(self.module).__name__}, of which each process has some stages",
            cure="Step with what accelerator.prepare(optimizer) returned.",
        )

    def loaded(self) -> None:
        """The script has loaded values by itself: outputs of calls before are not to be had any more."""
        self.pipeline.changed()
        self.pipeline.script_writes.leave()

    def load_portable_state(self, portable: PortableState) -> None:
        super().load_portable_state(portable)
        self.pipeline.script_writes.leave()

    def release(self) -> None:
        """Give the module its own classes back; the stages of other ranks stay without values."""
        warn_anew()
        self.pipeline.release()
        self._assignment.remove()
        if self.whole is not None:
            self.whole.remove()
