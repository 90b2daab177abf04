"""Implements the base of backends that use torch's autograd and optimizers: precision, clipping, stepping, state.

A backend holds one :class:`TorchEngine`, and its prepared models are :class:`TorchTrainable`. The engine does not
communicate: the backend reduces gradients before the engine reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from drivetrain.backend import PortableState, PrecisionPolicy, RunSettings, StepResult, TensorSpec, Trainable
from drivetrain.backends import portable
from drivetrain.distributed.dtensors import is_dtensor
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop import precision
from drivetrain.loop.gradient_hooks import GradientHook, hooks_of
from drivetrain.loop.model import plain_state_dict
from drivetrain.loop.wrappers import original_module
from drivetrain.topology import Topology


def place_model(
    model: nn.Module, optimizers: Sequence[Optimizer], settings: RunSettings, topology: Topology
) -> nn.Module:
    """Apply the precision policy and move to the device, in place: parameters stay the objects that optimizers hold.

    Returns:
        The module with the original parameter names.
    """
    module = original_module(model)
    precision.cast_parameters(module, settings.precision)
    if settings.place_on_device:
        module.to(topology.device)
    for optimizer in optimizers:
        move_optimizer_state(optimizer)
    return module


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Move existing optimizer state to the device of its parameters, and moments to their dtype."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue  # A number of the optimizer's own, as `self.state["step"] = 0`.
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = value.to(parameter)


@final
class LossScaler(torch.amp.GradScaler):
    """A ``GradScaler`` that unscales the local shard of each gradient.

    torch's own does not accept a mix of plain tensors and DTensors. The caller has to find out whether another rank's
    part overflowed, and to :meth:`note` it.
    """

    def divide(self, grads: Iterable[Tensor]) -> dict[torch.device, Tensor]:
        """Divide gradients by the scale; returns for each device whether one was not finite. Not collective."""
        scale = torch.as_tensor(self._scale)  # of the device that the loss was scaled on
        return _unscale(map(_values, grads), scale.double().reciprocal().float(), torch.zeros_like(scale))

    def check(self, optimizer: Optimizer, before: Mapping[torch.device, Tensor]) -> None:
        """Unscale gradients that :meth:`divide` has divided: look once more for what is not finite. Not collective."""
        self._checks_only = True
        try:
            self.unscale_(optimizer)
        finally:
            self._checks_only = False
        now: dict[Any, Tensor] = self._found_inf_per_device(optimizer)
        for device in now.keys() & before.keys():
            # The script may have clamped them since.
            torch.maximum(now[device], before[device], out=now[device])

    _checks_only = False

    def note(self, optimizer: Optimizer, device: str, *, overflow: bool) -> None:
        """Record for :meth:`update` whether this optimizer's gradients overflowed on any rank. Not collective."""
        flags: dict[Any, Tensor] = self._found_inf_per_device(optimizer)
        if not flags:  # this rank has none of them
            flags[torch.device(device)] = torch.zeros((), device=device)
        for flag in flags.values():
            flag.fill_(overflow)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        grads: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if grad.dtype == torch.float16 and not allow_fp16:
                    raise ValueError("Attempting to unscale FP16 gradients.")
                if grad.is_sparse:
                    # Duplicates in a sparse gradient may overflow only once they are added up.
                    parameter.grad = grad = grad.coalesce()
                grads.append(_values(grad))
        return _unscale(grads, torch.ones_like(inv_scale) if self._checks_only else inv_scale, found_inf)


def _values(grad: Tensor) -> Tensor:
    """Return the memory in which a gradient's numbers are, for operations that take no sparse tensors."""
    return grad._values() if grad.is_sparse else grad  # noqa: SLF001 (torch's documented name)


def _unscale(grads: Iterable[Tensor], factor: Tensor, found_inf: Tensor) -> dict[torch.device, Tensor]:
    """Multiply gradients in place; returns for each device whether one was not finite, or ``found_inf``."""
    flags: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for (device, _), alike in _local_parts(grads).items():
            flag = flags.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(alike, flag, factor.to(device))
    return flags


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that exist."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def total_norm(grads: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients together as a plain 0-d tensor. Collective over the meshes of DTensors.

    Tensors on different meshes cannot be stacked, so each mesh's norm is taken alone and the norms are combined. Where
    an engine keeps some gradients in CPU memory, the result is on the device of the first.
    """
    if not grads:
        return torch.zeros(())
    by_mesh: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if is_dtensor(grad) else None, []).append(grad)
    norms: list[Tensor] = []
    for group in by_mesh.values():
        norm = get_total_norm(group, norm_type)
        whole = norm.full_tensor() if is_dtensor(norm) else norm
        norms.append(whole.to(norms[0].device) if norms else whole)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


def multiply_gradients(grads: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply each gradient in place by a number or 0-d tensor, one kernel for each device and dtype. Not collective.

    Of DTensors this rank's parts are multiplied, since the operation on a DTensor would cost many times more.
    """
    for alike in _local_parts(grads).values():
        torch._foreach_mul_(alike, factor)


def _local_parts(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """This rank's parts of tensors, by device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        alike.setdefault((local.device, local.dtype), []).append(local)
    return alike


def _held(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_APPLIED = StepResult()


class OwnerOfOptimizers(Protocol):
    """Steps its optimizers by a :class:`TorchEngine`."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return those that step; the same on every rank."""

    def kept_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients of an optimizer's parameters; of DTensors this rank's parts will do."""


@final
class TorchEngine:
    """Precision, loss scaling and the optimizer step for all trainables of one backend.

    The loss scaler is shared by all of them, since one loss may reach several models. Its scale moves once for all
    optimizers that step after one backward, as in a plain loop: with the last of them, or before the next backward.
    Gradients that wait for a later step are brought to the new scale.

    Args:
        policy: the run's precision policy.
        device: this process's device.
        agree: combines a boolean over ranks (logical or); identity when gradients are replicated.
        norm: ``norm(gradients, norm_type)``, global over every axis along which gradients are shared out.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        device: str,
        agree: Callable[[bool], bool] | None = None,
        norm: Callable[[list[Tensor], float], Tensor] = total_norm,
    ) -> None:
        self.policy, self.device = policy, device
        self._agree, self._norm = agree, norm
        self.scaler = LossScaler(torch.device(device).type, **policy.scaler) if policy.loss_scaling else None
        self._compute = None if policy.compute is None else precision.dtype_of(policy.compute)
        self._output = None if policy.output is None else precision.dtype_of(policy.output)
        # Looked up once; the context itself is made anew, since a forward may run inside another.
        self._autocast = (
            None
            if self._compute is None
            else partial(torch.autocast, torch.device(device).type, self._compute, cache_enabled=policy.autocast_cache)
        )
        self.retains_graph = False
        """:meth:`backward` keeps the graph; for engines that run a backward by other means, too."""
        self._owners: WeakSet[OwnerOfOptimizers] = WeakSet()
        self._unscaled: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()
        """Holds, by identity, the optimizers whose gradients have been unscaled since the last backward."""
        self._shown: WeakKeyDictionary[Optimizer, Mapping[torch.device, Tensor]] = WeakKeyDictionary()
        """Whether gradients were not finite, by device, for those that are divided by the scale for scripts to see."""
        self._stepped: dict[int, bool] = {}
        """Whether gradients were non-finite on any rank, by optimizer that has stepped since the last backward."""
        self._scale_is_due = False
        self._norms: dict[int, tuple[Tensor, bool]] = {}
        self._num_backwards = 0
        self._backwards_at_step: dict[int, int] = {}
        """Number of backwards before the last step, by optimizer."""

    def serve(self, owner: OwnerOfOptimizers) -> None:
        """Step the optimizers of this owner from now on, under one loss scale with those of others."""
        self._owners.add(owner)

    def forward(self, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module under the policy."""
        if self._autocast is None:
            return module(*args, **kwargs)
        with self._autocast():
            output = module(*args, **kwargs)
        # One tensor, the common output, needs no tree traversal.
        if type(output) is Tensor and self._output is not None:
            return output.to(self._output) if output.dtype is self._compute else output
        return precision.cast_output(output, self.policy)

    def backward(self, loss: Tensor, factor: float | Tensor) -> None:
        """Back-propagate ``loss * factor``; a factor of 1 adds no node to the graph."""
        if self.scaler is None:  # the rest of `count_backward`, inlined since it runs in each step
            self._num_backwards += 1
        else:
            self.count_backward()
        if isinstance(factor, Tensor) or factor != 1.0:
            loss = loss * factor
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(retain_graph=self.retains_graph)  # type: ignore[no-untyped-call]

    @contextmanager
    def retaining_graph(self) -> Iterator[None]:
        """Keep the graph in :meth:`backward`, so that another loss of the same forward can follow."""
        before, self.retains_graph = self.retains_graph, True
        try:
            yield
        finally:
            self.retains_graph = before

    def count_backward(self) -> None:
        """Count a backward, as :meth:`backward` does; before one that an engine runs by other means.

        A step with no gradients at all is refused where there was none since the step before. Under a loss scaler
        gradients that are there get the scale of this backward, which adds to them.
        """
        self._num_backwards += 1
        if self.scaler is None:
            return
        plain = [*self._shown, *self._unscaled.values()]
        for number, optimizer in self._unscaled.items():
            if number not in self._stepped:
                # Clipped or measured, and not stepped: dropped, or kept to be added to.
                self.scaler.note(optimizer, self.device, overflow=not self._norms.pop(number, (None, True))[1])
                self._scale_is_due = True
        self._move_scale()
        for optimizer in plain:
            owner = next((owner for owner, each in self._owned() if each is optimizer), None)
            kept = gradients(_held(optimizer)) if owner is None else owner.kept_gradients(optimizer)
            if kept:
                multiply_gradients(kept, self.scaler.get_scale())
        self._unscaled.clear()
        self._shown.clear()
        self._stepped.clear()

    def show_gradients(self) -> None:
        """Take the loss scale out of all gradients, since scripts clip, edit and log what they see.

        Called where a backward is over and its gradients are reduced, so that ranks agree about what overflowed, which
        is remembered for :meth:`unscale`. Not collective.
        """
        if self.scaler is None:
            return
        for owner, optimizer in self._owned():
            if grads := owner.kept_gradients(optimizer):
                self._shown[optimizer] = self.scaler.divide(grads)

    def _owned(self) -> Iterator[tuple[OwnerOfOptimizers, Optimizer]]:
        return ((owner, each) for owner in self._owners for each in owner.optimizers)

    def _move_scale(self) -> None:
        """Move the loss scale where it is due, and bring gradients that wait for a step to it. Not collective."""
        if self.scaler is None or not self._scale_is_due:
            return
        self._scale_is_due = False
        waiting = [
            gradient
            for owner, each in self._owned()
            if not (id(each) in self._stepped or id(each) in self._unscaled or each in self._shown)
            for gradient in owner.kept_gradients(each)
        ]
        before = self.scaler.get_scale() if waiting else 1.0
        self.scaler.update()
        ratio = self.scaler.get_scale() / before if waiting else 1.0
        if ratio != 1.0:
            multiply_gradients(waiting, ratio)

    def unscale(self, optimizer: Optimizer) -> None:
        """Take the loss scale out of this optimizer's gradients, once for a backward."""
        if self.scaler is None or id(optimizer) in self._unscaled:
            return
        self._unscaled[id(optimizer)] = optimizer
        before = self._shown.pop(optimizer, None)
        # The scaler refuses an optimizer without a single gradient.
        if all(parameter.grad is None for parameter in _held(optimizer)):
            return
        if before is None:
            self.scaler.unscale_(optimizer)
        else:
            self.scaler.check(optimizer, before)

    def clip_grad_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float, optimizers: Sequence[Optimizer]
    ) -> Tensor:
        """Clip and return the norm before clipping; a non-finite one stops the steps of all whose parameters these are.

        ``optimizers`` are those of the model that is asked; the parameters may be of other models of this engine too.
        """
        optimizers = self._holders(parameters, optimizers)
        if self.scaler is not None:
            for optimizer in optimizers:
                self.unscale(optimizer)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = self._norm(grads, norm_type)
        # Reading the value here costs one device synchronisation a step, the price of never applying a NaN.
        value = norm.item()
        finite = math.isfinite(value)
        if finite and value > max_norm:
            multiply_gradients(grads, max_norm / (value + 1e-6))
        for optimizer in optimizers:
            self._norms[id(optimizer)] = (norm, finite)
        return norm

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float, optimizers: Sequence[Optimizer]) -> None:
        """Clamp gradient elements, loss scale taken out first."""
        for optimizer in self._holders(parameters, optimizers):
            self.unscale(optimizer)
        for grad in gradients(parameters):
            grad.clamp_(-clip_value, clip_value)

    def _holders(self, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Return the optimizers that hold one of these parameters; the only one of the model is taken for granted."""
        found = optimizers if len(optimizers) <= 1 else _holding(parameters, optimizers)
        if len(self._owners) > 1:
            mine = set(map(id, optimizers))
            found = [*found, *_holding(parameters, [each for _, each in self._owned() if id(each) not in mine])]
        return found

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
        stepping: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> StepResult:
        """One update, or none when gradients are not finite.

        Args:
            optimizer: of a model of this engine.
            closure: as ``optimizer.step`` takes it.
            stepping: makes a context that is entered around the optimizer's own step, if there is one.
        """
        self.check_reached(optimizer, closure)
        norm, finite = self._norms.pop(id(optimizer), (None, True))
        if self.scaler is None:
            if finite:
                with stepping():
                    optimizer.step(closure)
            return _APPLIED if norm is None else StepResult(skipped=not finite, grad_norm=norm)
        if closure is not None:
            raise UnsupportedError(
                "an optimizer closure cannot be combined with loss scaling",
                cure="Use mixed_precision='bf16' or 'no' with this optimizer.",
            )
        self.unscale(optimizer)
        # torch has no public way to ask, and guessing from the scale misses a user's backoff_factor.
        flags = list(self.scaler._found_inf_per_device(optimizer).values())  # noqa: SLF001
        overflow = not finite or any(flag.item() > 0 for flag in flags)
        if self._agree is not None:
            overflow = self._agree(overflow)
        first = id(optimizer) not in self._stepped
        overflow = overflow or self._stepped.get(id(optimizer), False)
        if overflow or not flags:
            self.scaler.note(optimizer, self.device, overflow=overflow)
        with stepping():
            if flags and first:
                self.scaler.step(optimizer)
            elif not overflow:
                optimizer.step()
        self._stepped[id(optimizer)] = overflow
        self._scale_is_due = True
        if all(id(each) in self._stepped for _, each in self._owned()):
            self._move_scale()
        return StepResult(skipped=overflow, grad_norm=norm)

    def check_reached(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Refuse a step without any gradient that no backward came before; :meth:`step` does. Not collective.

        Raises:
            UsageError: there is no gradient, and was no backward since this optimizer's last step.
        """
        if closure is None and self._backwards_at_step.get(id(optimizer), 0) == self._num_backwards:
            parameters = (one for group in optimizer.param_groups for one in group["params"])
            if all(parameter.grad is None for parameter in parameters):
                raise UsageError(
                    f"{type(optimizer).__name__}.step() was called, and no backward since its last step gave its "
                    "parameters a gradient",
                    cure="Call accelerator.backward(loss) before optimizer.step().",
                )
        # After a backward that left this optimizer out a step does nothing, as in torch.
        self._backwards_at_step[id(optimizer)] = self._num_backwards

    def state(self) -> dict[str, Any]:
        """JSON-able state for the portable checkpoint."""
        self._move_scale()
        return {} if self.scaler is None else {"loss_scaler": self.scaler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over :meth:`state`; a checkpoint without loss scaling leaves the scaler as it is."""
        self._move_scale()
        if self.scaler is not None and state.get("loss_scaler"):
            self.scaler.load_state_dict(state["loss_scaler"])


def _holding(parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return those of the optimizers that hold at least one of the parameters."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        optimizer
        for optimizer in optimizers
        if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"])
    ]


class TorchTrainable(Trainable):
    """One prepared model of a backend that keeps torch's autograd and optimizers. Complete for one process.

    A backend over several processes overrides what it does differently: :meth:`backward` to reduce gradients,
    :meth:`synchronise_gradients` to leave them local within an accumulation window, :meth:`release` to take its hooks
    off. Where it replaces parameters, :meth:`add_optimizer` and :meth:`full_state_dict` too.

    Args:
        model: what the script calls: its module, or what ``torch.compile`` put around that.
        optimizers: those that hold parameters of the model.
        engine: precision, loss scaling, clipping and the step; one for all models of a backend.

    Attributes:
        model: what :meth:`forward` calls. A wrapper of the engine may take its place.
        engine: as given.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], engine: TorchEngine) -> None:
        self.model, self.module = model, original_module(model)
        self.optimizers, self.engine = list(optimizers), engine
        engine.serve(self)

    def kept_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """See :class:`OwnerOfOptimizers`."""
        return gradients(_held(optimizer))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine.forward(self.model, args, kwargs)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        self.engine.backward(loss, scale)
        self.engine.show_gradients()

    def retaining_graph(self) -> AbstractContextManager[Any]:
        return self.engine.retaining_graph()

    def synchronise_gradients(self, enabled: bool) -> None:
        """Autograd accumulates either way, and one process has nothing to reduce."""

    def scale_gradients(self, factor: float | Tensor) -> None:
        multiply_gradients(gradients(self.module.parameters()), factor)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return self.engine.clip_grad_norm(parameters, max_norm, norm_type, self.optimizers)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        self.engine.clip_grad_value(parameters, clip_value, self.optimizers)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self.engine.unscale(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        return self.engine.step(optimizer, closure)

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        optimizer.zero_grad(set_to_none)

    def portable_state(self) -> PortableState:
        """Tensors are the live ones, not copies; DTensors stay this rank's shards. Not collective."""
        state = portable.portable_state(self.module, self.optimizers)
        state.extra |= self.engine.state()
        return state

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        return portable.portable_template(self.module, self.optimizers, saved)

    def load_portable_state(self, state: PortableState) -> None:
        portable.load_portable_state(self.module, self.optimizers, state)
        self.engine.load_state(state.extra)

    def live_tensors(self) -> dict[str, Any]:
        return portable.live_tensors(self.module)

    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        yield from plain_state_dict(self.module).items()

    def gradient_hooks(self) -> Iterable[GradientHook]:
        return hooks_of(self.module)

    def release(self) -> None:
        """Do nothing: no resources are held."""
