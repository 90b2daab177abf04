"""Accesses the gradients of one accumulation window where each ZeRO stage keeps them.

DeepSpeed takes gradients out of ``parameter.grad`` while backward runs (stages 1 to 3), reduces them, and keeps this
rank's part until its optimizer steps. This module accesses that part between the last backward and the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

from torch import Tensor, nn

from drivetrain.api import gradients, multiply_gradients, total_norm


class Gradients(ABC):
    """Gradients accumulated on this rank since the last step.

    Attributes:
        factor: what the gathered gradients are still to be multiplied by; applied by the step where that is free.
        partitioned: each rank holds a part, so that norms are sums over ranks.
    """

    partitioned: bool
    factor: float | Tensor = 1.0

    @abstractmethod
    def before_backward(self) -> None:
        """Another backward begins; what is gathered must still be there after it."""

    @abstractmethod
    def after_backward(self, closing: bool) -> None:
        """It is over, and reduced when ``closing``."""

    @abstractmethod
    def pieces(self, wanted: frozenset[int] | None = None) -> list[Tensor]:
        """This rank's reduced gradients, live, without :attr:`factor`.

        Args:
            wanted: identities of the requested parameters; ``None`` for all, which may be few large buffers.
        """

    def norm(self, wanted: frozenset[int] | None, norm_type: float) -> Tensor:
        """Norm of this rank's pieces, without :attr:`factor`, 0-d float32."""
        pieces = [piece for piece in self.pieces(wanted) if piece.numel()]
        return total_norm(pieces, norm_type).float()

    @abstractmethod
    def drop(self) -> None:
        """Drop the accumulated gradients."""

    @abstractmethod
    def end_window(self) -> None:
        """Reset the records after a step of the engine, which has dropped its gradients."""

    @abstractmethod
    def multiply(self, factor: float | Tensor) -> None:
        """Multiply all by a positive number or 0-d tensor, now or at the step."""

    @abstractmethod
    def keep(self) -> Any:
        """Return copies of the gradients that a step of the engine drops, for :meth:`give_back`."""

    @abstractmethod
    def give_back(self, kept: Any) -> None:
        """Restore gradients that another optimizer will step with."""

    def forget(self, wanted: frozenset[int]) -> None:
        """Set the reduced gradients of these parameters to zero, and keep those of others for their step."""
        for piece in self.pieces(wanted):
            piece.zero_()

    def settle(self) -> None:
        """Apply :attr:`factor` to the pieces."""
        if isinstance(self.factor, Tensor) or self.factor != 1.0:
            multiply_gradients(self.pieces(), self.factor)
            self.factor = 1.0


@final
class WholeGradients(Gradients):
    """Stage 0: averaged by all-reduce and kept in ``parameter.grad``, whole on every rank."""

    partitioned = False

    def __init__(self, module: nn.Module) -> None:
        self._all = list(module.parameters())

    def before_backward(self) -> None:
        """Autograd accumulates, and averaging an average again changes nothing."""

    def after_backward(self, closing: bool) -> None:
        """Nothing is kept elsewhere."""

    def pieces(self, wanted: frozenset[int] | None = None) -> list[Tensor]:
        return gradients(each for each in self._all if wanted is None or id(each) in wanted)

    def drop(self) -> None:
        """Do nothing: the script drops them by ``optimizer.zero_grad``."""

    def end_window(self) -> None:
        """Nothing is kept elsewhere."""

    def multiply(self, factor: float | Tensor) -> None:
        multiply_gradients(self.pieces(), factor)

    def keep(self) -> None:
        """Do nothing: a step drops no gradients."""

    def give_back(self, kept: None) -> None:
        """Do nothing: a step drops no gradients."""
