"""Implements the base of backends that keep a replica of each model in every process and average gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.backend import Trainable, name_of
from drivetrain.backends.base import DistributedBackend
from drivetrain.backends.local_gradients import LocalGradients
from drivetrain.backends.torch_engine import TorchEngine, TorchTrainable, place_model
from drivetrain.distributed import collectives
from drivetrain.errors import BackendBrokenError, UnsupportedError, UsageError
from drivetrain.loop.gradient_hooks import hooks_of, try_hook
from drivetrain.topology import Topology


class ReplicatedBackend(DistributedBackend):
    """Forms the process group, starts all replicas from rank 0's values and averages gradients by :meth:`average`.

    A backend implements :meth:`average` and sets ``capabilities``: ``averages_gradients`` and ``mesh_axes`` of
    ``dp_replicate``; ``async_save`` and ``join_uneven_inputs`` work as well.
    """

    def start(self) -> Topology:
        self._group = self.join_replicas()
        self.engine = TorchEngine(self.settings.precision, self.topology.device)
        self.scaler = self.engine.scaler
        self._trained: list[ReplicatedTrainable] = []
        self._joining, self._rounds = False, 0
        self._averaged: list[int] = []
        """The parameters of the last means, by identity."""
        self._means = torch.zeros(0, dtype=torch.float64)
        """The sum of each of these means."""
        return self.topology

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        module = place_model(model, optimizers, self.settings, self.topology)
        collectives.broadcast_in_place([*module.parameters(), *module.buffers()], self.topology)
        trainable = ReplicatedTrainable(self, model, optimizers)
        if training and self.topology.dp_size > 1:
            self._trained.append(trainable)
        return trainable

    @abstractmethod
    def average(self, gradients: Sequence[Tensor]) -> None:
        """Write the mean over the data-parallel ranks into each of these gradients.

        Collective over all ranks. Called with several processes after each backward that ends an accumulation window,
        once for all models.

        Args:
            gradients: dense tensors on the device, of the same shapes and dtypes in the same order on every rank.
        """

    def average_all(self) -> None:
        """Average the gradients of all models outside of a window: one loss may reach several. Collective."""
        waiting = [one for one in self._trained if one.synchronises]
        if not waiting:
            return
        if self._joining:
            self._announce(trains=True)
        self._average(waiting)

    def _average(self, waiting: Sequence[ReplicatedTrainable]) -> None:
        parameters = list(
            dict.fromkeys(each for one in waiting for each in one.module.parameters() if each.requires_grad)
        )
        reached = self._reached(parameters)
        for each in reached:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        gradients = [each.grad for each in reached if each.grad is not None]
        self.average(gradients)
        self._averaged, self._means = [id(each) for each in reached], _sums(gradients)
        for one in waiting:
            one.local.reduced()

    def _reached(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return those that have a gradient on some rank; the others keep none, as on one process. Collective.

        Raises:
            BackendBrokenError: the last means are not the same on all ranks.
            UnsupportedError: a gradient is sparse.
            UsageError: the replicas differ.
        """
        if not parameters:
            return []
        flags = torch.tensor([each.grad is not None for each in parameters], dtype=torch.float64)
        sparse = any(each.grad is not None and each.grad.layout != torch.strided for each in parameters)
        # A rank that has run out of batches does not follow the others' steps.
        total = 0.0 if self._joining else float(_sums(parameters).sum())
        told = torch.tensor([total, -total, float(sparse)], dtype=torch.float64)
        means = self._means
        said = self.reduce(torch.cat([told, means, -means, flags]), "max")
        told, largest, negated_least, somewhere = torch.split(said, [len(told), len(means), len(means), len(flags)])
        self._refuse_means(largest != -negated_least)
        most, negated_most, some_sparse = told.tolist()
        if some_sparse:
            raise UnsupportedError(
                f"a parameter has a sparse gradient, and {name_of(self)} averages dense ones",
                cure="Leave sparse=True out of nn.Embedding, and step it by a dense optimizer.",
            )
        if most != -negated_most:
            raise UsageError(
                "the script, a hook or a forward has written to parameters after prepare, and their values are not "
                "the same on all ranks",
                cure="Write the same values on every rank, outside of forward: call drivetrain.utils.set_seed(0) "
                "before drawing random ones, or use drivetrain.utils.broadcast.",
            )
        return [each for each, some in zip(parameters, somewhere.tolist(), strict=True) if some]

    def _refuse_means(self, differ: Tensor) -> None:
        """Raise where :meth:`average` left a rank with other gradients than the others, which their steps then took."""
        if not differ.any():
            return
        names = {id(each): name for one in self._trained for name, each in one.module.named_parameters()}
        wrong = [names.get(key, "?") for key, other in zip(self._averaged, differ.tolist(), strict=True) if other]
        raise BackendBrokenError(
            f"average left gradients that are not the same on all ranks: of {', '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} others' if wrong[3:] else ''}",
            whose=f"{type(self).__module__}.{type(self).__qualname__}",
            cure="Let it write the mean over the ranks into every gradient that it is given.",
        )

    @contextmanager
    def join(self, trainables: Sequence[Trainable]) -> Iterator[None]:
        """Let ranks without further batches take part in the other ranks' reductions with zero contributions."""
        if self.topology.dp_size == 1:
            yield
            return
        self._joining, self._rounds = True, 0
        try:
            yield
            while self._announce(trains=False):
                for one in self._trained:
                    one.module.zero_grad()
                self._average(self._trained)
        finally:
            self._joining = False
        rounds = self.gather(torch.tensor([self._rounds])).tolist()
        source = rounds.index(max(rounds))
        for one in self._trained:
            for tensor in (*one.module.parameters(), *one.module.buffers()):
                tensor.data.copy_(self.broadcast(tensor.data, source))

    def _announce(self, *, trains: bool) -> int:
        """Count the ranks that still train, before each round of means inside of :meth:`join`. Collective."""
        self._rounds += trains
        return int(self.reduce(torch.tensor(int(trains))))

    def forget(self, trainable: ReplicatedTrainable) -> None:
        """Average this model's gradients no more. Not collective."""
        self._trained = [each for each in self._trained if each is not trainable]

    def stop(self) -> None:
        self._trained = []
        self._group.release()


def _sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of each tensor, in float64 on the CPU; ``nan`` becomes 0, which can be compared over ranks."""
    whole = [torch.view_as_real(each.detach()) if each.is_complex() else each.detach() for each in tensors]
    empty = torch.zeros(0, dtype=torch.float64)
    return torch.stack([each.double().sum() for each in whole]).nan_to_num().cpu() if whole else empty


@final
class ReplicatedTrainable(TorchTrainable):
    """This rank's replica of a model."""

    def __init__(self, backend: ReplicatedBackend, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(model, optimizers, backend.engine)
        self._backend, self.synchronises = backend, True
        self._several = backend.topology.dp_size > 1
        self._linear: set[int] = set()
        """Numbers of the script's hooks that were tried."""
        self.local = LocalGradients(self.module, lambda: self.synchronises and self._several)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        if self._several:
            self._refuse_hooks()
        self.engine.backward(loss, scale)
        self._backend.average_all()
        self.engine.show_gradients()

    def _refuse_hooks(self) -> None:
        """Raise where a hook of the script is not linear: autograd gives it the gradient of this rank's samples."""
        for number, name, parameter, hook, accumulated in hooks_of(self.module):
            if number in self._linear:
                continue
            if accumulated or try_hook(hook, parameter) != "linear":
                raise UnsupportedError(
                    f"a hook on {name} would be given the gradient of this rank's samples",
                    cure="Change p.grad between accelerator.backward(loss) and optimizer.step().",
                )
            self._linear.add(number)

    def synchronise_gradients(self, enabled: bool) -> None:
        self.synchronises = enabled

    def has_unreduced_gradients(self) -> bool:
        return self._several and self.local.exist()

    def release(self) -> None:
        self.local.release()
        self._backend.forget(self)
