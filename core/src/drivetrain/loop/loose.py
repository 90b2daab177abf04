"""Averages the gradients of loose parameters: those that prepared optimizers step and no prepared model holds.

Examples are the temperature of CLIP, learned loss weights, a soft prompt, a head outside of the model. An engine
reduces the gradients of its models only; a loose parameter gets the gradient of this rank's samples. The loss of an
engine that averages over ranks was multiplied by ``dp_size``, so the mean over the data-parallel ranks is the gradient
that the model's parameters have: the same weights, the same denominator. A mean also leaves what was averaged before
as it is, so that any number of backwards may add to it. Where an engine sums, gradients of loose parameters are
multiplied by ``dp_size`` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from drivetrain.backend import name_of
from drivetrain.errors import CheckpointMismatchError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.backend import Backend
    from drivetrain.loop.model import PreparedModel
    from drivetrain.loop.optimizer import PreparedOptimizer

INTO_A_MODULE = "put them into an nn.Module whose forward computes with them, and prepare that with its optimizer"


@final
class LooseParameters:
    """The loose parameters of one accelerator, in the order of their optimizers.

    Args:
        backend: the started backend.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._averages = backend.topology.dp_size > 1
        self.parameters: list[Tensor] = []
        """All of them; the same list on every rank."""
        self._known: dict[int, Tensor] = {}
        self._hooks: dict[int, list[Any]] = {}
        self._local: set[int] = set()
        """Identities of those whose gradient holds contributions of this rank only."""
        self._optimizers: list[PreparedOptimizer] = []
        self._alone: list[PreparedOptimizer] = []
        self._not_finite: set[int] = set()
        """Identities of optimizers of only loose parameters whose last clipping norm was not finite."""
        self._driven = False
        """A backward that the accelerator runs is under way."""

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._known

    def update(self, optimizers: Sequence[PreparedOptimizer], models: Sequence[PreparedModel]) -> None:
        """Find the loose parameters of these optimizers. Collective over all ranks where there are new ones.

        New ones get rank 0's values, as parameters of a model do.

        Raises:
            UnsupportedError: an optimizer of loose parameters alone together with loss scaling.
        """
        if not models:
            return
        held = {id(each) for model in models for each in model.trainable.module.parameters()}
        found: dict[int, Tensor] = {}
        self._optimizers = []
        for optimizer in optimizers:
            mine = [
                each
                for each in optimizer.given
                if id(each) not in held and not any(model.trainable.shares([each]) for model in models)
            ]
            optimizer.given = mine
            if mine:
                self._optimizers.append(optimizer)
                found.update((id(each), each) for each in mine)
        self._alone = [each for each in self._optimizers if not each.models]
        if self._alone and self._backend.settings.precision.loss_scaling:
            raise UnsupportedError(
                f"{type(self._alone[0].source).__name__} holds no parameter of a prepared model, and the loss is "
                f"scaled (mixed_precision: fp16) by {name_of(self._backend)} for the optimizers of its models",
                cure=f"Add the parameters to the optimizer of a model, or {INTO_A_MODULE}.",
            )
        for gone in self._known.keys() - found.keys():
            del self._known[gone]
            for handle in self._hooks.pop(gone, ()):
                handle.remove()
        for number, parameter in found.items():
            if number in self._known:
                continue
            self._known[number] = parameter
            if self._backend.topology.world_size > 1:
                with torch.no_grad():
                    parameter.copy_(self._backend.broadcast(parameter.detach()))
            if self._averages and parameter.requires_grad:
                reached = parameter.register_post_accumulate_grad_hook(self._reached)  # type: ignore[no-untyped-call]
                self._hooks[number] = [reached]
                if not self._backend.capabilities.averages_gradients:
                    self._hooks[number].append(parameter.register_hook(self._scaled))  # type: ignore[no-untyped-call]
        self.parameters = list(found.values())

    def _reached(self, parameter: Tensor) -> None:
        self._local.add(id(parameter))

    def _scaled(self, grad: Tensor) -> Tensor | None:
        return grad * self._backend.topology.dp_size if self._driven else None

    # ---- one step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward that the accelerator runs."""
        self._driven = True
        try:
            yield
        finally:
            self._driven = False

    def reduce(self, factor: float | Tensor = 1.0) -> None:
        """Average gradients, multiplied by ``factor``. Collective over the data-parallel ranks.

        Every rank takes part with all loose parameters; one that no rank's loss reached keeps no gradient.
        """
        if self._averages:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for parameter in self.parameters:
                if parameter.requires_grad:
                    by_dtype.setdefault(parameter.dtype, []).append(parameter)
            for alike in by_dtype.values():
                self._average(alike)
            self._local.clear()
        if isinstance(factor, Tensor) or factor != 1.0:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _average(self, parameters: Sequence[Tensor]) -> None:
        device = self._backend.topology.device
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UnsupportedError(
                    f"a parameter of shape {tuple(parameter.shape)} that no prepared model holds has a sparse gradient",
                    cure=f"Leave sparse=True out, or {INTO_A_MODULE}.",
                )
        parts = [
            (torch.zeros_like(one) if one.grad is None else one.grad).detach().to(device).reshape(-1)
            for one in parameters
        ]
        reached = torch.tensor([one.grad is not None for one in parameters], device=device).to(parts[0].dtype)
        mean_of_all = self._backend.reduce(torch.cat([*parts, reached]), "mean")
        *means, reached = torch.split(mean_of_all, [*map(len, parts), len(parameters)])
        for number, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view_as(parameter))
            elif bool(reached[number]):
                parameter.grad = mean.view_as(parameter).to(parameter.device, copy=True)

    def check_reduced(self, optimizer: PreparedOptimizer, models: Iterable[PreparedModel]) -> None:
        """Raise if ``optimizer`` would step with unreduced gradients, unless the script intends it."""
        if not self._local or any(model.held for model in models):
            return
        for group in optimizer.source.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._local and parameter.grad is not None:
                    raise UsageError(
                        f"{type(optimizer.source).__name__} would step a parameter of shape {tuple(parameter.shape)} "
                        "that no prepared model holds with the gradient of this rank's samples alone: it came from "
                        "loss.backward(), or from a backward that reduces nothing",
                        cure="Call accelerator.backward(loss), and step where a window ends.",
                    )

    def refuse_in(self, block: str) -> None:
        """Raise in a context in which ranks train apart, where there are loose parameters."""
        if self._averages and self.parameters:
            raise UnsupportedError(
                f"{block} follows the parameters of models, and {type(self._optimizers[0].source).__name__} holds some "
                "that are of no prepared model",
                cure=f"{INTO_A_MODULE[0].upper()}{INTO_A_MODULE[1:]}.",
            )

    def refuse_pipelined(self, optimizer: PreparedOptimizer) -> None:
        """Raise if pipeline stages would step differently, since only the last one computes a loss."""
        if self._backend.capabilities.pipelined and optimizer in self._optimizers:
            raise UnsupportedError(
                f"{type(optimizer.source).__name__} holds parameters of no prepared model, and of the ranks of a "
                "pipeline at most one computes with them",
                cure="Make them parameters of the pipelined model, whose forward computes with them (layers belong "
                "into an nn.ModuleList), and make the optimizer of model.parameters().",
            )

    def steps_alone(self, optimizer: PreparedOptimizer) -> bool:
        """Whether an optimizer holds loose parameters and no others."""
        return optimizer in self._alone

    def not_finite(self, optimizer: PreparedOptimizer) -> bool:
        """Whether the last clipping norm skips the step of such an optimizer; called once per step."""
        found = id(optimizer) in self._not_finite
        self._not_finite.discard(id(optimizer))
        return found

    def clipped(self, parameters: Sequence[Tensor], norm: Tensor | None, max_norm: float, norm_type: float) -> Tensor:
        """Clip those of ``parameters`` that are loose, by the norm of them and of a model's gradients together.

        Args:
            parameters: given to ``clip_grad_norm_``.
            norm: of the model's gradients among them; ``None`` where there are none.
            max_norm: of all of them.
            norm_type: of the norm.

        Returns:
            The norm of all of them before clipping.
        """
        grads = [each.grad for each in parameters if each in self and each.grad is not None]
        total = get_total_norm(grads, norm_type)
        if norm is not None:
            total = torch.linalg.vector_norm(torch.stack([norm.to(total), total]), norm_type)
        if not torch.isfinite(total):
            self._not_finite.update(map(id, self._alone))
        elif total > max_norm:
            for grad in grads:
                grad.mul_(max_norm / (total + 1e-6))
        return total

    def drop_gradients(self) -> None:
        """Drop the gradients of a window that is abandoned."""
        for parameter in self.parameters:
            parameter.grad = None
        self._local.clear()

    def release(self) -> None:
        """Stop watching; the parameters stay usable."""
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        for kept in (self._hooks, self._known, self._local, self.parameters, self._optimizers, self._alone):
            kept.clear()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Values in order, and of each optimizer that holds some their state and its groups' settings."""
        return {
            "parameters": [each.detach() for each in self.parameters],
            "optimizers": [_state_of(each.optimizer, self._known) for each in self._optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state_dict`.

        Raises:
            CheckpointMismatchError: it is of other parameters or optimizers.
        """
        saved, here = state["parameters"], self.parameters
        if [tuple(each.shape) for each in saved] != [tuple(each.shape) for each in here] or len(
            state["optimizers"]
        ) != len(self._optimizers):
            raise CheckpointMismatchError(
                f"the checkpoint has {len(saved)} parameters beside its models, this run {len(here)} of other shapes",
                cure="Build the optimizers as they were built for the run that saved.",
            )
        with torch.no_grad():
            for parameter, value in zip(here, saved, strict=True):
                parameter.copy_(value)
        for optimizer, slots in zip(self._optimizers, state["optimizers"], strict=True):
            _load_state(optimizer.optimizer, self._known, slots)


_NOT_OF_THE_RUN = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
"""Keys of a parameter group that select an implementation on this device."""


def _state_of(optimizer: Optimizer, known: Mapping[int, Tensor]) -> dict[str, Any]:
    parameters = [each for group in optimizer.param_groups for each in group["params"] if id(each) in known]
    settings = [
        {key: value for key, value in group.items() if key not in _NOT_OF_THE_RUN}
        for group in optimizer.param_groups
        if any(id(each) in known for each in group["params"])
    ]
    return {"state": [dict(optimizer.state.get(each, {})) for each in parameters], "groups": settings}


def _beside(value: Tensor, parameter: Tensor, before: Any) -> Tensor:
    """A tensor of an optimizer's state where it belongs: a step count may be on the CPU."""
    if isinstance(before, Tensor):
        return value.to(before.device, copy=True)
    return value.to(parameter.device if value.dim() else "cpu", copy=True)


def _load_state(optimizer: Optimizer, known: Mapping[int, Tensor], saved: Mapping[str, Any]) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"] if id(each) in known]
    groups = [group for group in optimizer.param_groups if any(id(each) in known for each in group["params"])]
    for parameter, slots in zip(parameters, saved["state"], strict=True):
        before = optimizer.state.pop(parameter, {})
        if slots:
            optimizer.state[parameter] = {
                name: _beside(value, parameter, before.get(name)) if isinstance(value, Tensor) else value
                for name, value in slots.items()
            }
    for group, settings in zip(groups, saved["groups"], strict=True):
        group.update(settings)
