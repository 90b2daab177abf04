"""Backends that misdescribe themselves, or leave something behind in the process."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import Any

import torch
from toy_backend import CAPABILITIES, ToyTrainable
from wrong_base import Mistake

from drivetrain.api import Topology

# ---- memory ----------------------------------------------------------------------------------------------------------


class TearsMemory(Mistake):
    """Moves parameters into its own flat memory in the first forward, those that shared memory apart."""

    caught_by = ("scripts.parameters_in_one_memory",)

    class trainable(ToyTrainable):  # noqa: N801
        def __init__(self, backend: Any, model: Any, optimizers: Any) -> None:
            together = [parameter.data for parameter in model.parameters()]
            super().__init__(backend, model, optimizers)
            self.moved = [parameter.data for parameter in model.parameters()]
            for parameter, data in zip(model.parameters(), together, strict=True):
                parameter.data = data

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            for parameter, data in zip(self.module.parameters(), self.moved, strict=True):
                parameter.data = data
            return super().forward(*args, **kwargs)


# ---- random numbers --------------------------------------------------------------------------------------------------


class SeedsEachForward(Mistake):
    """Seeds torch before each forward, so that all ranks draw one mask."""

    caught_by = ("randomness.masks_of_each_rank", "randomness.masks_of_an_explicit_step")

    class trainable(ToyTrainable):  # noqa: N801
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            torch.manual_seed(self.calls)
            return super().forward(*args, **kwargs)


class DrawsInBackward(Mistake):
    """Draws from the script's generator in the backward of one rank."""

    caught_by = ("randomness.masks_of_each_rank",)

    class trainable(ToyTrainable):  # noqa: N801
        def backward(self, loss: Any, scale: Any) -> None:
            super().backward(loss, scale)
            if self.backend.topology.rank:
                torch.rand(1)


class DrawsAlike(Mistake):
    """Draws a number from the script's generator in every backward, the same on all ranks."""

    caught_by = ("order.follows_the_plain_loader",)

    class trainable(ToyTrainable):  # noqa: N801
        def backward(self, loss: Any, scale: Any) -> None:
            super().backward(loss, scale)
            torch.rand(1)


class SeedsByTheRank(Mistake):
    """Seeds the script's generators when it prepares a model, by the rank."""

    caught_by = ("randomness.masks_of_each_rank",)

    class trainable(ToyTrainable):  # noqa: N801
        def __init__(self, backend: Any, model: Any, optimizers: Any) -> None:
            super().__init__(backend, model, optimizers)
            torch.manual_seed(backend.topology.rank)


class KeepsAStream(Mistake):
    """Draws masks from a generator of its own, which no checkpoint holds."""

    caught_by = ("randomness.masks_go_on_after_a_load",)

    class trainable(ToyTrainable):  # noqa: N801
        def __init__(self, backend: Any, model: Any, optimizers: Any) -> None:
            super().__init__(backend, model, optimizers)
            self.stream = torch.Generator().manual_seed(backend.topology.rank)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            torch.manual_seed(int(torch.randint(1 << 60, (1,), generator=self.stream)))
            return super().forward(*args, **kwargs)


# ---- what is declared -----------------------------------------------------------------------------------------------


class ClaimsPipeline(Mistake):
    """Declares ``pipelined`` although every forward runs at once."""

    capabilities = replace(CAPABILITIES, pipelined=True)
    caught_by = ("honesty.pipelined_means_deferred",)


class ClaimsAnAxis(Mistake):
    """Declares ``tp``, takes it, and lays every rank along ``dp_replicate``."""

    capabilities = replace(CAPABILITIES, mesh_axes=frozenset({"dp_replicate", "tp"}))
    caught_by = ("mesh.tp",)

    def start(self) -> Topology:
        self.settings = replace(self.settings, mesh={})
        return super().start()


class SaysOneDoesAnother(Mistake):
    """Is described as joining uneven inputs and, once it runs, says that it cannot."""

    caught_by = ("honesty.a_run_can_what_is_described",)

    def start(self) -> Topology:
        self.capabilities = replace(self.capabilities, join_uneven_inputs=False)
        return super().start()


class ClaimsToWait(Mistake):
    """Declares that gradients can stay on their rank, and reduces them whenever backward runs."""

    caught_by = ("honesty.trains_alone_and_averages",)

    class trainable(Mistake.trainable):  # noqa: N801
        @property
        def synchronising(self) -> bool:
            return True

        @synchronising.setter
        def synchronising(self, _: bool) -> None:
            """Is told and does not listen."""


# ---- what is left behind --------------------------------------------------------------------------------------------


class LeavesThread(Mistake):
    """Starts a thread that nobody ends; as a daemon it does not even keep the process alive."""

    caught_by = ("gradients.dense",)

    def start(self) -> Topology:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().start()


class TakesSignals(Mistake):
    """Puts itself in the place of who handles SIGTERM."""

    caught_by = ("gradients.dense",)

    def start(self) -> Topology:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().start()


class LeavesDefaultDevice(Mistake):
    """Makes its device everybody's default."""

    caught_by = ("clipping.leaves_small_gradients",)

    def stop(self) -> None:
        super().stop()
        torch.set_default_device("meta")


# ---- what is not shared or not restored -----------------------------------------------------------------------------


class KeepsOwnBuffers(Mistake):
    """Shares rank 0's parameters, but every rank goes on with its own buffers."""

    caught_by = ("gradients.buffers_start_alike",)

    def share(self, module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data.copy_(self.broadcast(parameter.data))


class KeepsOwnStatistics(Mistake):
    """Says that it gives every rank the same buffers before they are used, and does not."""

    caught_by = ("evaluation.statistics_are_alike", "evaluation.buffers_of_a_batch")

    class trainable(Mistake.trainable):  # noqa: N801
        settles_buffers = True


class SynchronisesNothing(Mistake):
    """Is asked to take the statistics of batch norms over all ranks, and leaves them as they are."""

    caught_by = ("evaluation.synchronised_statistics",)

    def synchronise_batch_norm(self, model: torch.nn.Module) -> None:
        pass


class CastsEverything(Mistake):
    """Casts whatever is a parameter when the policy is a reduced one."""

    caught_by = ("gradients.parameters_that_are_no_floats",)

    def prepare(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare(model, *args, **kwargs)
        if self.settings.precision.name != "no":
            for parameter in model.parameters():
                parameter.data = parameter.data.float()
        return prepared


class ForgetsRates(Mistake):
    """Loads parameters and moments, and leaves the parameter groups as the script has set them since."""

    caught_by = ("state.parameter_groups_come_back",)

    class trainable(Mistake.trainable):  # noqa: N801
        def load_portable_state(self, state: Any) -> None:
            before = [[dict(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
            super().load_portable_state(state)
            for optimizer, groups in zip(self.optimizers, before, strict=True):
                for group, kept in zip(optimizer.param_groups, groups, strict=True):
                    group.update(kept)
