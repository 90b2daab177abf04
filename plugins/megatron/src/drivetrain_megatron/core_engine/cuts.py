"""Computes along which dims parameters are sharded over ``tp``, and checks their sizes. Integers only."""

from __future__ import annotations

from typing import final

from torch import nn

from drivetrain.api import UsageError
from drivetrain_megatron.core_engine.description import Correspondence
from drivetrain_megatron.core_engine.rearranging import padded_rows
from drivetrain_megatron.tensor.layout import Layout


@final
class Cuts:
    """The cuts of one model, collected while its parameters are described.

    Args:
        model: whose parameters they are.
        rank: on the axis.
        degree: size of the axis.
    """

    def __init__(self, model: nn.Module, rank: int, degree: int) -> None:
        self._shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        self._rank, self.degree, self.layouts = rank, degree, dict[str, Layout]()

    def divides(self, **sizes: int) -> None:
        """Check that a degree divides sizes, by what they are called in the model's configuration.

        Raises:
            UsageError: it does not, with the degrees that do.
        """
        for name, size in sizes.items():
            if size % self.degree:
                fits = [one for one in range(1, size + 1) if size % one == 0]
                raise UsageError(
                    f"tensor_parallel_size {self.degree} does not divide {name} {size} of the model",
                    cure=f"Degrees that do: {', '.join(map(str, fits))}.",
                )

    def along(self, dim: int, *names: str, parts: int = 1) -> None:
        """These parameters are cut along a dim, which may consist of several equal parts."""
        for name in names:
            if self.degree > 1:
                shape = self._shapes[name]
                sizes = None if parts == 1 else (shape[dim] // parts,) * parts
                self.layouts[name] = Layout(shape, dim, sizes)

    def vocabulary(self, name: str, theirs: str) -> Correspondence:
        """An embedding or output layer, cut by rows, which need not divide."""
        rows = self._shapes[name][0]
        self.along(0, name)
        padded = -(-rows // self.degree)
        mine = Layout(self._shapes[name], 0).local_length(self._rank, self.degree)
        return Correspondence((name,), (theirs,), padded_rows(mine, padded))

    def padded_vocabulary(self, rows: int) -> int:
        """Rows of Megatron-Core's embedding."""
        return -(-rows // self.degree) * self.degree
