"""Local SGD: averages parameters over the ranks after every few steps, in which each rank trains independently.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from drivetrain.backend import Backend, name_of
from drivetrain.distributed import nested
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop.model import prepared_model


@final
class LocalSGD:
    """Within the block, gradients stay on their rank; parameters are averaged every few optimizer steps and at the end.

    Wrap the loop in it and call :meth:`step` after ``optimizer.step()``; the loop itself stays as it is. What is
    averaged are trainable parameters and floating buffers; the optimizers' state stays on its rank, so momenta differ
    between ranks, as in the paper. Gradients are the mean over this rank's own samples.

    Args:
        accelerator: the accelerator that prepared the model.
        model: the prepared model.
        local_sgd_steps: optimizer steps between two averages.
        enabled: ``False`` makes the block and :meth:`step` do nothing, as they do with one process.

    Raises:
        UnsupportedError: the backend does not hold all parameters on every rank, or cannot leave gradients unreduced.
        UnsupportedError: a prepared optimizer holds parameters of no prepared model.
        UsageError: fewer than one step, or a model that was not prepared.
    """

    def __init__(self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise UsageError(
                f"local_sgd_steps must be at least 1, not {local_sgd_steps}",
                cure="Give the number of steps after which models are averaged.",
            )
        self.accelerator, self.local_sgd_steps = accelerator, local_sgd_steps
        self.model: Any = model
        self._backend: Backend = accelerator.backend
        self.enabled = enabled and self._backend.topology.dp_size > 1
        self.num_steps = 0
        """Optimizer steps since the block was entered."""
        if not self.enabled:
            return
        if not self._backend.capabilities.replicated:
            raise UnsupportedError(
                f"LocalSGD lets each rank step by itself for a while, and under {name_of(self._backend)} a rank does "
                "not hold all parameters",
                cure="Use distributed_type: ddp, or LocalSGD(..., enabled=False).",
            )
        prepared = prepared_model(model)
        if prepared is None:
            raise UsageError(
                f"this {type(model).__name__} was not prepared", cure="Pass what accelerator.prepare(model) returned."
            )
        self._prepared = prepared
        accelerator._loop.loose.refuse_in("LocalSGD")  # noqa: SLF001

    def __enter__(self) -> Self:
        self.num_steps = 0
        if self.enabled:
            self._prepared.steps_alone = True
            trainable = self._prepared.trainable
            trainable.synchronise_gradients(False)
            # Accumulation windows and train_step switch the reduction on where a window ends; here it stays off.
            trainable.synchronise_gradients = lambda enabled: None  # type: ignore[method-assign]  # noqa: ARG005
        return self

    def step(self) -> None:
        """Count an optimizer step; every ``local_sgd_steps``-th averages. Collective over the data-parallel ranks then.

        A micro-batch that does not complete an accumulation window is not counted.
        """
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._prepared.steps_alone = False
            del self._prepared.trainable.synchronise_gradients
            self._prepared.trainable.synchronise_gradients(self._prepared.reduces)
        # After an error the other ranks may be at another point.
        if self.enabled and kind is None and self.num_steps % self.local_sgd_steps:
            self._average()

    def _average(self) -> None:
        parameters: list[Tensor] = [one for one in self.model.parameters() if one.requires_grad]
        buffers = [one for one in self.model.buffers() if one.is_floating_point()]
        values = parameters + buffers
        means = nested.reduce(values, "mean", backend=self._backend)
        with torch.no_grad():
            for value, mean in zip(values, means, strict=True):
                value.copy_(mean)
