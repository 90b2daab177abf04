"""Inputs of the planner: numbers, lists and sizes on the command line, and the file of measured costs. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drivetrain.api import UsageError
from drivetrain_megatron.planner.costs import Costs, costs

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


SINGLE = {"weight_share", "transfer", "gap", "overhead", "kept_for_weights", "split"}
"""Costs that are one number for the whole pipeline."""


class CostsFile(BaseModel):
    """A JSON file of measured costs. Each list holds one number for each stage, or a single one for all.

    ``backward`` is the backward in one piece, of which ``weight_share`` is for the weights; its two parts, where they
    were measured, are ``backward_input`` and ``backward_weight``. With all three given, ``split`` follows from them.
    ``num_micro_batches`` is the count into which the batch was cut when the costs were measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    forward: list[float] = Field([1.0], min_length=1)
    backward: list[float] | None = None
    backward_input: list[float] | None = None
    backward_weight: list[float] | None = None
    activations: list[float] = [0.0]
    resident: list[float] = [0.0]
    transfer: float = Field(0.0, ge=0)
    gap: float = Field(0.0, ge=0)
    overhead: float = Field(0.0, ge=0)
    weight_share: float = Field(0.5, ge=0, le=1)
    kept_for_weights: float = Field(1.0, ge=0, le=1)
    split: float = Field(1.0, gt=0)
    num_micro_batches: int | None = Field(None, ge=1)
    unit: str = ""

    def costs(self) -> Costs:
        """Return the costs of the file."""
        common: dict[str, Any] = {
            "activations": self.activations,
            "resident": self.resident,
            "transfer": self.transfer,
            "gap": self.gap,
            "kept_for_weights": self.kept_for_weights,
            "overhead": self.overhead,
        }
        inputs, weights = self.backward_input, self.backward_weight
        if inputs is None and weights is None:
            share: dict[str, Any] = {"weight_share": self.weight_share, "split": self.split}
            return costs(self.forward, backward=self.backward, **share, **common)
        if inputs is None or weights is None or len(inputs) != len(weights):
            raise UsageError(
                "a backward has two parts, given for the same stages",
                cure="Give both 'backward_input' and 'backward_weight', or only 'backward'.",
            )
        both = [first + second for first, second in zip(inputs, weights, strict=True)]
        shares = [second / whole if whole else 0.5 for second, whole in zip(weights, both, strict=True)]
        if self.backward is None:
            return costs(self.forward, backward=both, weight_share=shares, split=self.split, **common)
        apart, whole = sum(both) / max(len(both), 1), sum(self.backward) / max(len(self.backward), 1)
        split = apart / whole if whole else float("inf") if apart else self.split
        return costs(self.forward, backward=self.backward, weight_share=shares, split=split, **common)


def costs_from(flags: Mapping[str, str]) -> CostsFile:
    """Read costs as flags of the command line give them, by the same names as in the file.

    Raises:
        UsageError: a number, a list or a size that is none, or one out of its range.
    """
    sizes = {"activations", "resident"}
    lists = {name: (size_list if name in sizes else number_list)(text) for name, text in flags.items()}
    values = {name: found[0] if name in SINGLE and len(found) == 1 else found for name, found in lists.items()}
    return _validated(values, "the command line")


def read_costs(path: Path) -> CostsFile:
    """Read a file of measured costs.

    Raises:
        UsageError: no such file, no JSON, or keys and values that are not costs; all mistakes at once.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be read as JSON: {error}",
            cure='Give a file of JSON whose keys are those of the flags, such as "forward".',
        ) from error
    return _validated(values, str(path))


def _validated(values: Any, source: str) -> CostsFile:
    try:
        return CostsFile.model_validate(values)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, each['loc'])) or 'all of it'}: {each['msg']}" for each in error.errors()]
        unknown = any(each["type"] == "extra_forbidden" for each in error.errors())
        cure = f"There are {', '.join(CostsFile.model_fields)}." if unknown else "Give values as these words say."
        raise UsageError(f"costs of {source}: {'; '.join(found)}", cure=cure) from error


def number_list(text: str) -> list[float]:
    """Read ``"1"`` or ``"1, 1.5, 2"``.

    Raises:
        UsageError: something else.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{text!r} is no list of numbers", cure="Write 2, or several as in 1,1.5,2.") from error


def count_list(text: str) -> list[int]:
    """Read ``"4,8,16"``: whole numbers from 1.

    Raises:
        UsageError: something else.
    """
    numbers = number_list(text)
    if any(number < 1 or not number.is_integer() for number in numbers):
        raise UsageError(f"{text!r} is no list of whole numbers from 1", cure="Write 8, or several as in 4,8,16.")
    return [int(number) for number in numbers]


def size(text: str) -> float:
    """Read a size in bytes: ``512MiB``, ``1.5 GB``, ``4096``.

    Raises:
        UsageError: something else.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", text)
    try:
        return float(found[1]) * _UNITS[found[2].upper()] if found else _no_size(text)
    except (ValueError, KeyError):
        return _no_size(text)


def size_list(text: str) -> list[float]:
    """Read one size, or several with commas between. Raises as :func:`size`."""
    return [size(part) for part in text.split(",")]


def _no_size(text: str) -> float:
    raise UsageError(f"{text!r} is no size", cure="Write 512MiB, 40GiB, 1.5GB, or a number of bytes.")
