"""A right backend that is nothing like DDP: all parameters lie in one flat buffer, and one flat gradient is averaged.

It is registered by the tests, not installed. The wrong backends next door derive from it, one mistake each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import (
    BackendInfo,
    Capabilities,
    DistributedBackend,
    LocalGradients,
    Topology,
    TorchEngine,
    TorchTrainable,
    Trainable,
    UnsupportedError,
    UsageError,
    hookimpl,
    place_model,
)
from drivetrain.registry import get_registry

CAPABILITIES = Capabilities(
    averages_gradients=True, mesh_axes=frozenset({"dp_replicate"}), join_uneven_inputs=True
)


def in_memory_order(value: Tensor, parameter: Tensor) -> Tensor:
    """Flatten a value in the order in which its parameter lies in memory, in which random numbers are drawn for it."""
    laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
    return laid_out.copy_(value).as_strided((value.numel(),), (1,))


class FlatParameters:
    """The trainable parameters of a module, laid one after the other into one buffer that they become views of."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.lay_out()

    def lay_out(self) -> None:
        """Follow the module's trained parameters; nothing happens while they are the same."""
        trained = [each for each in self.module.parameters() if each.requires_grad]
        if list(map(id, trained)) == list(map(id, getattr(self, "held", [None]))):
            return
        self.held = trained
        assert len({each.dtype for each in self.held}) <= 1, "one buffer has one dtype"
        self.values = torch.cat([in_memory_order(each.detach(), each) for each in self.held] or [torch.zeros(0)])
        for each, part in zip(self.held, self.parts(self.values), strict=True):
            each.data = part

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a buffer that is laid out as this one, with the strides of the parameter."""
        parts = flat.split([each.numel() for each in self.held])
        return [part.as_strided(each.shape, each.stride()) for part, each in zip(parts, self.held, strict=True)]

    def gradient(self) -> Tensor:
        """One flat gradient; zero where a parameter has none."""
        self.lay_out()
        home = self.values.untyped_storage().data_ptr()
        if any(each.untyped_storage().data_ptr() != home for each in self.held):
            raise UnsupportedError(
                "a parameter was given other memory after prepare, and no step would reach it in the flat buffer",
                cure="Write into the parameter: `with torch.no_grad(): p.copy_(values)`.",
            )
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.held]
        flat = [in_memory_order(gradient, each) for gradient, each in zip(gradients, self.held, strict=True)]
        return torch.cat(flat or [torch.zeros(0)])


class ToyTrainable(TorchTrainable):
    """A module whose flat gradient is averaged after the backward that synchronises."""

    def __init__(self, backend: ToyBackend, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(model, optimizers, backend.engine)
        self.backend = backend
        self.flat = FlatParameters(self.module)
        self.synchronising = True
        self.local = LocalGradients(self.module, lambda: self.synchronising and backend.topology.dp_size > 1)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        self.refuse_hooks()
        self.engine.backward(loss, scale)
        self.backend.average()

    def refuse_hooks(self) -> None:
        """Hooks of the script on parameters would see the gradient of this rank's samples."""
        for parameter in self.module.parameters() if self.backend.topology.dp_size > 1 else ():
            hooks = (parameter._backward_hooks or {}).values()  # torch has no public way to list them
            if not all(map(LocalGradients.keeps, hooks)):
                raise UnsupportedError(
                    "a hook on a parameter would be given the gradient of this rank's samples",
                    cure="Change p.grad between accelerator.backward(loss) and optimizer.step().",
                )

    def average(self) -> None:
        """Give every rank the mean of the ranks' gradients."""
        self.compare_replicas()
        mean = self.backend.reduce(self.flat.gradient(), "mean")
        for each, part in zip(self.flat.held, self.flat.parts(mean), strict=True):
            if each.grad is not None:
                each.grad.copy_(part)
        self.local.reduced()

    def compare_replicas(self) -> None:
        """Refuse to go on where a forward, say, has written other values to the parameters of each rank."""
        total = self.flat.values.double().sum()
        largest, negated_least = self.backend.reduce(torch.stack([total, -total]), "max").tolist()
        if largest != -negated_least:
            raise UsageError(
                "the parameters are no longer the same on every rank",
                cure="Write the same values on every rank, outside of forward.",
            )

    def has_unreduced_gradients(self) -> bool:
        return self.backend.topology.dp_size > 1 and self.local.exist()

    def synchronise_gradients(self, enabled: bool) -> None:
        self.synchronising = enabled

    def release(self) -> None:
        self.backend.trainables = []


class ToyBackend(DistributedBackend):
    """One replica a process."""

    capabilities = CAPABILITIES
    trainable: type[ToyTrainable] = ToyTrainable

    def start(self) -> Topology:
        self.group = self.join_replicas()
        self.engine = TorchEngine(self.settings.precision, self.topology.device)
        self.scaler = self.engine.scaler
        self.trainables: list[ToyTrainable] = []
        self.joining, self.training, self.rounds = False, 0, 0
        return self.topology

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        module = place_model(model, optimizers, self.settings, self.topology)
        self.share(module)
        trainable = self.trainable(self, model, optimizers)
        self.trainables.append(trainable)
        return trainable

    def share(self, module: nn.Module) -> None:
        """Start from rank 0's values."""
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.copy_(self.broadcast(tensor.data))

    def average(self) -> None:
        """Average the gradients of all models: one loss may reach several. What is equal already stays as it is."""
        waiting = [trainable for trainable in self.trainables if trainable.synchronising]
        if self.joining and waiting:
            self.announce(1)
        for trainable in waiting:
            trainable.average()

    def announce(self, trains: int) -> int:
        """How many ranks still train; said before each round of averages inside of ``join``."""
        self.training = int(self.reduce(torch.tensor(trains)))
        self.rounds += trains
        return self.training

    @contextmanager
    def join(self, trainables: Sequence[Trainable]) -> Iterator[None]:
        """Ranks that have run out of batches take part in the others' means with nothing, and end where they end."""
        self.joining, self.rounds = True, 0
        yield
        while self.announce(0):
            for trainable in self.trainables:
                trainable.module.zero_grad()
                trainable.average()
        self.joining = False
        rounds = self.gather(torch.tensor([self.rounds])).tolist()
        self.share_all(rounds.index(max(rounds)))

    def share_all(self, source: int) -> None:
        """Go on with what this rank has."""
        for trainable in self.trainables:
            for tensor in (*trainable.module.parameters(), *trainable.module.buffers()):
                tensor.data.copy_(self.broadcast(tensor.data, source))

    def stop(self) -> None:
        self.group.release()


class Plugin:
    """Stands for the module of an installed plugin."""

    def __init__(self, *infos: BackendInfo) -> None:
        self.infos = list(infos)

    @hookimpl
    def drivetrain_backends(self) -> list[BackendInfo]:
        return self.infos


TOY = BackendInfo(
    name="toy",
    summary="Keeps parameters in one flat buffer and averages one flat gradient.",
    backend="toy_backend:ToyBackend",
    capabilities=CAPABILITIES,
)


def register() -> None:
    """Make ``toy`` known to this process."""
    if "toy" not in get_registry().names():
        get_registry().register(Plugin(TOY), name="toy")
