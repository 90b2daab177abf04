"""``drivetrain plan show``: which part of which parameter each tensor-parallel rank would hold."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from drivetrain.api import UsageError
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.tensor.plan import Row, table


@dataclass(frozen=True)
class Layout:
    """What a model becomes over the axis ``tp``.

    Args:
        source: whose plan it is.
        degree: ranks of the axis.
        rows: one for each parameter.
        element_size: bytes of an element of each parameter, by name.
    """

    source: str
    degree: int
    rows: Sequence[Row]
    element_size: dict[str, int]

    def bytes_of_rank(self, rank: int) -> int:
        """Bytes of the parameters that one rank holds."""
        return sum(prod(row.local_shapes[rank]) * self.element_size[row.name] for row in self.rows)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all parameters in one process."""
        return sum(prod(row.shape) * self.element_size[row.name] for row in self.rows)

    def lines(self) -> list[str]:
        """Return the table for people; ranks that hold less than others are listed."""
        cells = [("parameter", "style", "whole", "on a rank")]
        cells += [(row.name, row.style, _shape(row.shape), _locals(row.local_shapes)) for row in self.rows]
        widths = [max(len(line[column]) for line in cells) for column in range(3)]
        lines = [f"tensor parallel over {self.degree} ranks, by {self.source}", ""]
        for name, style, whole, local in cells:
            lines.append(f"{name:<{widths[0]}}  {style:<{widths[1]}}  {whole:<{widths[2]}}  {local}")
        most = max(self.bytes_of_rank(rank) for rank in range(self.degree))
        share = most / self.whole_bytes if self.whole_bytes else 1.0
        lines += ["", f"a rank holds at most {most:,} of {self.whole_bytes:,} bytes of parameters ({share:.1%})"]
        return lines

    def data(self) -> dict[str, Any]:
        """Return everything, as JSON knows it."""
        return {
            "source": self.source,
            "degree": self.degree,
            "bytes": self.whole_bytes,
            "bytes_by_rank": [self.bytes_of_rank(rank) for rank in range(self.degree)],
            "parameters": [row._asdict() for row in self.rows],
        }


def layout_of(model: nn.Module, degree: int, section: MegatronConfig) -> Layout:
    """Return the layout that training would begin with. Raises ``UsageError`` as training would."""
    source, rows = table(model, degree, section.tp_plan)
    sizes = {name: parameter.element_size() for name, parameter in model.named_parameters()}
    return Layout(source, degree, rows, sizes)


def build(where: str) -> nn.Module:
    """Make a model without its memory.

    Args:
        where: ``package.module:function`` or ``file.py:function``; a class without arguments is a function, too.

    Raises:
        UsageError: there is no such thing, or it does not return a module.
    """
    place, colon, name = where.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{where!r} names no model", cure="Write package.module:function, or train.py:function.")
    function = _function(place, name)
    with torch.device("meta"):
        model = function()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{where!r} returned a {type(model).__name__}, not a model", cure="Name a function that returns a module."
        )
    return model


def _function(place: str, name: str) -> Callable[[], Any]:
    try:
        found = vars(_module(place)).get(name)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise UsageError(f"{place!r} cannot be imported: {error}", cure="Name a module or a file.") from error
    if found is None:
        raise UsageError(f"there is no {name!r} in {place!r}", cure="Name a function that returns the model.")
    if not callable(found):
        raise UsageError(f"{name!r} in {place!r} is of type {type(found).__name__}", cure="Name a function or a class.")
    return found  # type: ignore[no-any-return]


def _module(place: str) -> ModuleType:
    """Import a file, or a module that is installed or lies in this folder, as a script's own neighbours do."""
    if place.endswith(".py"):
        specification = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        return importlib.import_module(place)
    finally:
        sys.path[:] = before


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _locals(shapes: Sequence[Sequence[int]]) -> str:
    """Return the one shape of all ranks, or each rank's where they differ."""
    if len(set(map(tuple, shapes))) == 1:
        return _shape(shapes[0])
    return ", ".join(f"{_shape(shape)} (rank {rank})" for rank, shape in enumerate(shapes))
