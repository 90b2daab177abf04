"""``diloco``: every worker trains its own replica, and an outer optimizer joins them at the end of each round.

The contract of gradients holds in the mean: the average over the workers of their gradients is the contract's gradient.
Until ``synchronous_steps`` are over it holds on each worker, since gradients are averaged there while backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain.api import (
    DistributedBackend,
    LocalGradients,
    PortableState,
    StepResult,
    Topology,
    TorchEngine,
    TorchTrainable,
    Trainable,
    UnsupportedError,
    UsageError,
    collectives,
    place_model,
)
from drivetrain_diloco import state
from drivetrain_diloco.config import DiLoCoConfig
from drivetrain_diloco.plugin import DILOCO
from drivetrain_diloco.rounds import RoundEnd, Rounds

_hooks = attrgetter("_backward_hooks")
"""Those of a tensor; torch has no public way to list them."""


class _Parameters(nn.Module):
    """A model's parameters, for DistributedDataParallel; its forward returns the loss unchanged.

    Torch's reducer is thereby made ready by the loss, whichever way the script came to it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Tensor) -> Tensor:
        return loss


@final
class DiLoCoTrainable(TorchTrainable):
    """A worker's replica. ``DistributedDataParallel`` reduces its gradients while steps are synchronous."""

    settles_buffers = True
    """Within a round each worker has buffers of its own; the end of the round joins them."""

    def __init__(
        self,
        wrapper: DistributedDataParallel | None,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        backend: DiLoCoBackend,
    ) -> None:
        super().__init__(model, (), backend.engine)
        self.wrapper, self._backend = wrapper, backend
        self.rounds: list[Rounds] = []
        self._ran, self._synchronises = False, True
        self._trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._strides = [parameter.stride() for parameter in self._trained]
        self._local = None if wrapper is None else LocalGradients(self.module, lambda: self._synchronises)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._ran = self._ran or torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        # The mean over the workers is taken by DDP of gradients, or at the end of the round of what they led to.
        self._check_trained()
        reduced = [one for one in self._backend.trainables if one.reduces_next and (one is self or one._ran)]  # noqa: SLF001
        for trainable in reduced:
            trainable.check_replica()
            loss = trainable.arm(loss)
        self.engine.backward(loss, scale)
        for trainable in reduced:
            trainable.reduced()
        for trainable in self._backend.trainables:
            trainable._ran = False  # noqa: SLF001

    @property
    def reduces_next(self) -> bool:
        """The next backward averages gradients over the workers."""
        return self.wrapper is not None and self._synchronises

    def arm(self, loss: Tensor) -> Tensor:
        """Make DDP's reducer ready for a backward of this loss."""
        assert self.wrapper is not None
        armed: Tensor = self.wrapper(loss)
        return armed

    def check_replica(self) -> None:
        """Raise where a mean over the workers would not be one process's gradient. Collective over them."""
        for name, parameter in self.module.named_parameters():
            hooks = (_hooks(parameter) or {}).values()
            if not all(map(LocalGradients.keeps, hooks)):
                raise UnsupportedError(
                    f"a hook on {name} would be given the gradient of this worker's samples",
                    cure="Change p.grad between accelerator.backward(loss) and optimizer.step().",
                )
        total = torch.stack([one.detach().double().sum() for one in self._trained]).sum()
        largest, negated_least = self._backend.reduce(torch.stack([total, -total]), "max").tolist()
        if largest != -negated_least:
            raise UsageError(
                "in synchronous steps the parameters are no longer the same on every worker",
                cure="Write the same values on every worker, outside of forward.",
            )

    def _check_trained(self) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if list(map(id, trained)) != list(map(id, self._trained)):
            raise UnsupportedError(
                "parameters were frozen or unfrozen after prepare, and diloco's rounds do not know them",
                cure="Call requires_grad_() before accelerator.prepare(model).",
            )
        if self.wrapper is not None and [parameter.stride() for parameter in trained] != self._strides:
            raise UnsupportedError(
                "a weight was transposed or laid out anew after prepare, and DDP's buckets have its former strides",
                cure="Lay out weights, also as channels_last, before accelerator.prepare(model).",
            )

    def before_unprepared_step(self, optimizer: Optimizer) -> None:
        if self.wrapper is None and self._backend.topology.world_size > 1:
            raise UsageError(
                f"{type(optimizer).__name__} was not prepared, and no round would join what it does on each worker",
                cure="Prepare it with its model: model, optimizer = accelerator.prepare(model, optimizer).",
            )

    def reduced(self) -> None:
        """A backward has averaged gradients over the workers."""
        if self._local is not None:
            self._local.reduced()

    def has_unreduced_gradients(self) -> bool:
        return self.wrapper is not None and self._local is not None and self._local.exist()

    def before_registration(self, parent: nn.Module, name: str, value: Any) -> None:
        if self.rounds and isinstance(value, nn.Module | nn.Parameter):
            raise UnsupportedError(
                f"{name!r} came to the model after prepare, and diloco's outer optimizer does not know it",
                cure="Add layers before accelerator.prepare(model, optimizer).",
            )

    def synchronise_gradients(self, enabled: bool) -> None:
        self._synchronises = enabled

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """One inner step, and the outer one when it was the round's last: then collective over the workers."""
        rounds = next(each for each in self.rounds if each.optimizer is optimizer)
        rounds.before_step()
        result = super().optimizer_step(optimizer, closure)
        self._backend.note(rounds.after_step())
        if self.wrapper is not None and not any(each.synchronous for each in self.rounds):
            self.wrapper = None
        return result

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers.append(optimizer)
        # The first optimizer's rounds take the buffers along.
        floating = [one for one in self.module.buffers() if one.is_floating_point()] if not self.rounds else []
        self.rounds.append(Rounds(optimizer, floating, self._backend.section, self._backend.mean))

    def remove_optimizer(self, optimizer: Optimizer) -> None:
        left = [each for each in self.rounds if each.optimizer is optimizer]
        state.check_joined(left, "an optimizer was replaced", UsageError)
        self.rounds = [each for each in self.rounds if each.optimizer is not optimizer]
        super().remove_optimizer(optimizer)

    def portable_state(self) -> PortableState:
        return state.portable_state(self.module, self.rounds, self._backend.mean)

    def load_portable_state(self, portable: PortableState) -> None:
        state.load_portable_state(self.module, self.rounds, portable)

    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer.

        Raises:
            UsageError: within a round, when there is not one model but one for each worker.
        """
        state.check_joined(self.rounds, "a model's weights were asked for", UsageError)
        return super().full_state_dict()

    def release(self) -> None:
        """Drop the wrapper, whose reducer must be gone before the process group is destroyed."""
        if self._local is not None:
            self._local.release()
        self.wrapper = self._local = None


@final
class DiLoCoBackend(DistributedBackend):
    """One worker a process.

    Attributes:
        section: the configuration.
        engine: precision, clipping and the inner step.
        ended: rounds that nobody has looked at yet.
        num_rounds: rounds that have ended, of all optimizers.
        sent_bytes: that this worker gave to be averaged in rounds.
    """

    capabilities = DILOCO.capabilities

    def start(self) -> Topology:
        self.section: DiLoCoConfig = self.settings.section or DiLoCoConfig()
        self._group = self.join_replicas()
        self.engine = TorchEngine(self.settings.precision, self.topology.device)
        self.ended: list[RoundEnd] = []
        self.num_rounds = self.sent_bytes = 0
        self.trainables: list[DiLoCoTrainable] = []
        return self.topology

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        module = place_model(model, optimizers, self.settings, self.topology)
        wrapper = None
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if self.topology.world_size > 1 and self.section.synchronous_steps and training and trained:
            index = None if self.topology.device == "cpu" else [int(self.topology.device.partition(":")[2] or 0)]
            unused = self.section.find_unused_parameters
            wrapper = DistributedDataParallel(_Parameters(model), device_ids=index, find_unused_parameters=unused)
        elif self.topology.world_size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data.copy_(collectives.broadcast(tensor.data, 0, self.topology))
        made = DiLoCoTrainable(wrapper, model, optimizers, self)
        self.trainables.append(made)
        return made

    def mean(self, tensor: Tensor) -> Tensor:
        """Average over the workers. Collective."""
        return self.reduce(tensor, "mean")

    def note(self, end: RoundEnd | None) -> None:
        """Remember that a round has ended."""
        if end is not None:
            self.ended.append(end)
            self.num_rounds += 1
            self.sent_bytes += end.num_bytes

    def stop(self) -> None:
        self.trainables = []
        self._group.release()


def synchronise(accelerator: Any) -> None:
    """End the rounds that are under way, so that all workers agree: before a save, or an evaluation of one model.

    Collective over all workers; nothing happens when they agree already. The outer optimizer makes its step as at the
    end of a full round.

    Raises:
        UsageError: the accelerator trains with another backend.
    """
    backend = accelerator.backend
    if not isinstance(backend, DiLoCoBackend):
        raise UsageError(
            f"synchronise() ends a round of the backend diloco, this run's is {accelerator.distributed_type}",
            cure="Leave it out, or ask accelerator.distributed_type first.",
        )
    for trainable in backend.trainables:
        for rounds in trainable.rounds:
            backend.note(rounds.finish())
