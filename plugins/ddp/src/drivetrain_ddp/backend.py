"""Backend ``ddp``: a replica in every process; DistributedDataParallel averages gradients during backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain.api import (
    DistributedBackend,
    StepResult,
    Topology,
    TorchEngine,
    TorchTrainable,
    Trainable,
    place_model,
)
from drivetrain_ddp import hooks, private_names
from drivetrain_ddp.config import DDPConfig
from drivetrain_ddp.plugin import DDP
from drivetrain_ddp.reducer import GradientReducer


@final
class DDPTrainable(TorchTrainable):
    """A module whose gradients are averaged over ranks at the end of each accumulation window.

    Forward runs the module itself: it needs no communication, and ranks may evaluate different numbers of batches.
    """

    def __init__(
        self,
        backend: DDPBackend,
        reducer: GradientReducer | None,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
    ) -> None:
        super().__init__(model, optimizers, backend.engine)
        self._backend, self.reducer = backend, reducer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reducer = self.reducer
        if reducer is None or not torch.is_grad_enabled():
            return self.engine.forward(self.model, args, kwargs)
        if reducer.changed:
            reducer.refresh()
        if self.model is self.module and self.module._compiled_call_impl is None:  # noqa: SLF001
            return self.engine.forward(self.model, args, kwargs)
        with reducer.compiling():
            return self.engine.forward(self.model, args, kwargs)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        # The loss may depend on several models.
        reducers = self._backend.reducers
        try:
            for reducer in reducers:
                loss = reducer.before_backward(loss)
            self.engine.backward(loss, scale)
            for reducer in reducers:
                reducer.after_backward()
            self.engine.show_gradients()
        except BaseException:
            for reducer in reducers:
                reducer.restore_hooks()
            raise

    def synchronise_gradients(self, enabled: bool) -> None:
        if self.reducer is not None:
            self.reducer.enabled = enabled

    def has_unreduced_gradients(self) -> bool:
        return self.reducer is not None and self.reducer.local.exist()

    def before_registration(self, parent: nn.Module, name: str, value: Any) -> None:
        # A forward that counts in a buffer registers it anew each time; the reducer has nothing to do with buffers.
        if self.reducer is not None and isinstance(value, nn.Module | nn.Parameter):
            self.reducer.changed = True

    def before_conversion(self) -> None:
        if self.reducer is not None:
            self.reducer.changed = True

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        result = self.engine.step(optimizer, closure)
        # It may update parameters of several models.
        for reducer in self._backend.reducers:
            reducer.stepped()
        return result

    def release(self) -> None:
        if self.reducer is not None:
            self._backend.reducers.remove(self.reducer)
            self.reducer.release()
        self.reducer = None


@final
class DDPBackend(DistributedBackend):
    """One replica per process."""

    capabilities = DDP.capabilities

    def start(self) -> Topology:
        self._group = self.join_replicas()
        self.engine = TorchEngine(self.settings.precision, self.topology.device)
        self.scaler = self.engine.scaler
        self.reducers: list[GradientReducer] = []
        return self.topology

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        module = place_model(model, optimizers, self.settings, self.topology)
        reducer, keep_buffers_apart = None, False
        if self.topology.world_size > 1:
            options = self._options()
            # Unused parameters are always detected.
            options.pop("find_unused_parameters", None)
            keep_buffers_apart = not options.pop("broadcast_buffers", True)
            reducer = GradientReducer(
                module,
                self.topology,
                partial(self._wrap, options),
                static_graph=options.pop("static_graph", False),
                exact=options.get("comm_hook", "no") == "no",
            )
            if not training:
                # Rank 0's values have reached all, which is what a model that is not trained needs.
                reducer.release()
                reducer = None
        if reducer is not None:
            self.reducers.append(reducer)
            if len(self.reducers) > 1:
                for each in self.reducers:
                    each.arm_when_reached()
        trainable = DDPTrainable(self, reducer, model, optimizers)
        trainable.settles_buffers = keep_buffers_apart
        return trainable

    def _wrap(
        self, options: Mapping[str, Any], module: nn.Module, static_graph: bool, starts: bool
    ) -> DistributedDataParallel:
        arguments = {name: value for name, value in options.items() if name not in hooks.OPTIONS}
        # On a device of its own, as torch wants it said; a model spread over several says nothing.
        index = None if self.topology.device == "cpu" else [int(self.topology.device.partition(":")[2] or 0)]
        # The reducer synchronises buffers, not DDP's own forward.
        without_buffers = private_names.without_buffers(DistributedDataParallel)
        arguments |= {"static_graph": static_graph, "init_sync": starts, **without_buffers}
        wrapper = DistributedDataParallel(module, device_ids=index, **arguments)
        private_names.check(wrapper)
        hooks.register(wrapper, **{name: options[name] for name in hooks.OPTIONS if name in options})
        return wrapper

    def _options(self) -> dict[str, Any]:
        """Options that differ from torch's defaults, from the section and, with precedence, the script's handler."""
        section = self.settings.section or DDPConfig()
        options: dict[str, Any] = section.model_dump(exclude_defaults=True)
        handler = self.settings.handlers.get("DistributedDataParallelKwargs")
        return options if handler is None else options | handler.to_kwargs()

    @contextmanager
    def join(self, trainables: Sequence[Trainable]) -> Iterator[None]:
        """Shadow the collectives of ranks that still have batches; gradients are divided by the full world size."""
        reducers = [
            trainable.reducer
            for trainable in trainables
            if isinstance(trainable, DDPTrainable) and trainable.reducer is not None
        ]
        wrappers = [reducer.wrapper for reducer in reducers if reducer.wrapper is not None]
        for reducer in reducers:
            reducer.joined = True
        try:
            with Join(wrappers) if wrappers else nullcontext():  # type: ignore[arg-type]
                yield
        finally:
            for reducer in reducers:
                reducer.left_join()

    def stop(self) -> None:
        self._group.release()
