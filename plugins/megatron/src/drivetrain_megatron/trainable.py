"""A model without pipeline: tensor and data parallelism, forward at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.api import (
    GradientHook,
    LocalGradients,
    PortableState,
    StepResult,
    TensorSpec,
    TorchEngine,
    Trainable,
    UnsupportedError,
    UsageError,
    gradients,
    multiply_gradients,
    plain_state_dict,
    portable,
)
from drivetrain_megatron import agreement, gradient_hooks, state, tensor_parallel
from drivetrain_megatron.optimizer_trial import OptimizerTrial
from drivetrain_megatron.remapping import remap
from drivetrain_megatron.replicas import Replicas
from drivetrain_megatron.stepping import Stepping
from drivetrain_megatron.tensor.cut import engine_side
from drivetrain_megatron.tensor.sharded import warn_anew
from drivetrain_megatron.tensor_parallel import whole_tensors
from drivetrain_megatron.whole import WholeState, refuse_pickling
from drivetrain_sharding import FormerParameters


@final
class MegatronTrainable(Trainable):
    """A module of which each rank may hold a part of every layer.

    Gradients are averaged over the data-parallel ranks after the backward that ends a window.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        former: FormerParameters,
        cut: Callable[[Tensor, Tensor], Tensor],
        engine: TorchEngine,
        replicas: Replicas,
        dp_size: int,
        max_norm: float | None,
        trial: OptimizerTrial,
        tensor_group: dist.ProcessGroup | None,
    ) -> None:
        self.communicates_in_forward = tensor_group is not None
        self._inputs = agreement.Inputs(tensor_group, torch.device(engine.device))
        self._model, self.module = model, module
        self._stepping = Stepping(module, engine, max_norm, trial)
        self.optimizers = self._stepping.optimizers
        self._former, self._cut = former, cut
        self._engine, self._replicas, self._dp_size = engine, replicas, dp_size
        self._linear = gradient_hooks.LinearHooks(module)
        self._syncs = True
        self.local: LocalGradients | None = None
        """Notices gradients that no average over the data-parallel ranks has reached, if there are several."""
        self.whole: WholeState | None = None
        """Gathers the full state dict, if this rank holds a part of it."""

    def plain_calls(self) -> AbstractContextManager[None]:
        """Do nothing: the module and its submodules are always called as they are."""
        return nullcontext()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.whole is not None:
            self.whole.check_given()
        self._inputs.given((args, kwargs))
        output = self._engine.forward(self._model, args, kwargs)
        # In training, logits stay sharded over tp up to the loss; without gradients they are gathered.
        return output if torch.is_grad_enabled() else whole_tensors(output)

    def retaining_graph(self) -> AbstractContextManager[Any]:
        return self._engine.retaining_graph()

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        self._inputs.check(loss)
        if self._dp_size > 1:
            self._linear.check()
        self._engine.backward(loss, scale)
        if self._syncs:
            with engine_side():
                self._replicas.average_all(self.module)
        self._engine.show_gradients()

    def has_unreduced_gradients(self) -> bool:
        return self.local is not None and self.local.exist()

    def synchronise_gradients(self, enabled: bool) -> None:
        self._syncs = enabled

    def scale_gradients(self, factor: float | Tensor) -> None:
        with engine_side():
            multiply_gradients(gradients(self.module.parameters()), factor)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return self._stepping.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        self._stepping.clip_grad_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self._stepping.unscale(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        return self._stepping.step(optimizer, closure)

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        self._stepping.zero_grad(optimizer, set_to_none)

    def shares(self, parameters: Sequence[Tensor]) -> bool:
        return self._former.include(parameters) or super().shares(parameters)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        remap(optimizer, self._former, self.module, self._cut)
        self._stepping.add(optimizer)

    def remove_optimizer(self, optimizer: Optimizer) -> None:
        self._stepping.remove(optimizer)

    def lay_out(self, how: str, mesh: DeviceMesh) -> None:
        """See :meth:`drivetrain_megatron.stepping.Stepping.lay_out`."""
        self._stepping.lay_out(how, mesh)
        self.communicates_in_forward = self.communicates_in_forward or how == "fsdp"
        if how != "fsdp":  # whose gradients torch reduces in any backward
            self.local = LocalGradients(self.module, lambda: self._syncs)

    def portable_state(self) -> PortableState:
        return self._stepping.portable_state()

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        return self._stepping.portable_template(saved)

    def load_portable_state(self, portable: PortableState) -> None:
        self._stepping.load_portable_state(portable)

    def live_tensors(self) -> dict[str, Any]:
        return portable.live_tensors(self.module)

    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        return iter(plain_state_dict(self.module).items()) if self.whole is None else self.whole.tensors()

    def before_state_dict(self, *, replicated: bool) -> None:
        """Allow it: :mod:`drivetrain_megatron.whole` returns the full state dict, or raises."""

    def gather(self, entries: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Gather tensors, given by first name. Collective over all ranks."""
        yield from state.full_tensors(self.module, entries)

    def before_registration(self, parent: nn.Module, name: str, value: Any) -> None:
        self._stepping.check_registration(parent, name, value)
        # New parameters are replicated over tp; shards stay shards.
        if isinstance(value, nn.Parameter) and isinstance(parent._parameters.get(name), DTensor):  # noqa: SLF001
            if isinstance(value, DTensor) or tensor_parallel.is_running():
                return
            raise UnsupportedError(
                f"{name!r} of {type(parent).__name__} is cut over ranks and was replaced by a whole parameter",
                cure="Write into it, parent.load_state_dict(...), or exchange it before prepare.",
            )

    def gradient_hooks(self) -> Iterable[GradientHook]:
        return gradient_hooks.listed(self.module)

    def before_conversion(self) -> None:
        self._stepping.check_conversion()

    def before_copy(self) -> None:
        self._stepping.check_copy()
        if self.whole is not None:
            refuse_pickling(self.module)

    def before_unprepared_step(self, optimizer: Optimizer) -> None:
        former = [one for group in optimizer.param_groups for one in group["params"]]
        if self._former.replaced(former, self.module):
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called on parameters that were taken from "
                f"{type(self.module).__name__} before accelerator.prepare, which put cut ones in their place; these "
                "get no gradients",
                cure="Prepare the optimizer with its model, or make it of model.parameters() after prepare.",
            )

    def loaded(self) -> None:
        """The script has loaded values by itself; nothing here depends on them."""

    def release(self) -> None:
        """Do nothing: only the backend's mesh holds the process group."""
        warn_anew()
        self._replicas.forget(self.module)
        if self.local is not None:
            self.local.release()
        if self.whole is not None:
            self.whole.remove()
