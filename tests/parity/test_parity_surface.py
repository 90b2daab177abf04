"""Methods of what is prepared end as ``surface.json`` says, and never with other numbers than on one process.

``tests/parity/run_scripts.py --surface --record`` calls every method in every place and renews it. ``make test-all``
calls a part, by turns: every :data:`STEP`-th method, each in one place. ``make test`` calls a few of them.
"""

from __future__ import annotations

from pathlib import Path

import parity_surface as surface
import parity_worlds as worlds
import pytest
import torch
from parity_surface import MATRIX
from torch import nn

_LOCK = Path(__file__).parents[2] / "locks" / "dev.txt"
RECORDED = f"torch=={torch.__version__.partition('+')[0]}" in _LOCK.read_text(encoding="utf-8").split()
"""Whether this torch has the methods that the record was made of: another one has others, besides those."""

ELSEWHERE = [name for name in surface.NAMES if name != "single"]
STEP = 5
"""Every method in each place takes half an hour; a fifth of them, each in one place, half a minute."""

FEW = {"fsdp-2": 6, "tp-2": 6, "pp-2": 4}
"""Places of ``make test``, and how many methods are called in each."""


def known() -> list[str]:
    """What is recorded and this torch has."""
    return [name for name in worlds.recorded(MATRIX) if name in surface.load()]


def chosen(where: str) -> list[str]:
    """The methods of this place: each of those that are called goes to the next one."""
    return known()[::STEP][ELSEWHERE.index(where) :: len(ELSEWHERE)]


def changed(where: str, names: list[str]) -> str:
    """What ends otherwise than recorded, a line each."""
    assert names
    record = worlds.recorded(MATRIX)
    found = worlds.outcomes(MATRIX.places[where], names, worlds.references(names, MATRIX), MATRIX)
    lines = [f"{name}: {cell}" for name, cell in found.items() if cell.kind != record[name][where].kind]
    return "\n".join([f"{where} (run_scripts.py --surface --record)", *lines]) if lines else ""


def test_every_method_has_an_outcome_in_every_place_that_is_no_defect() -> None:
    record = worlds.recorded(MATRIX)
    assert known() == list(surface.load() if RECORDED else known()), "run: run_scripts.py --surface --record"
    assert len(record) > 500
    wrong = [
        f"{name} ({place}): {cell}"
        for name, row in record.items()
        for place, cell in row.items()
        if cell.kind in worlds.DEFECTS or (place == "single" and cell.kind != worlds.SAME)
    ]
    assert not wrong, "\n".join(wrong)
    assert all(list(row) == list(MATRIX.places) for row in record.values())


def test_every_public_method_of_modules_and_optimizers_is_called_or_left_out_for_a_reason() -> None:
    for kind, called, left_out in (
        (nn.Module, surface.MODULE, surface.MODULE_LEFT_OUT),
        (torch.optim.Optimizer, surface.OPTIMIZER, surface.OPTIMIZER_LEFT_OUT),
    ):
        # Libraries that another test of this process has imported may have added methods of their own.
        public = {
            name
            for name in dir(kind)
            if not name.startswith("_")
            and getattr(getattr(kind, name), "__module__", "torch").startswith(("torch", "collections"))
        }
        assert not RECORDED or public <= called.keys() | left_out.keys(), kind
        assert not called.keys() & left_out.keys(), kind


@pytest.mark.slow
def test_arguments_are_found_for_all_other_methods_of_tensors() -> None:
    without = {name for name in surface.METHODS if surface.dims_of(name) is None}
    assert not RECORDED or without == surface.WITHOUT_ARGUMENTS
    assert sum(name.startswith("Tensor.") for name in surface.load()) > 400


@pytest.mark.parametrize("where", FEW)
def test_a_few_end_as_recorded(where: str) -> None:
    names = known()[ELSEWHERE.index(where) :: len(known()) // FEW[where]]
    wrong = changed(where, names)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("where", ELSEWHERE)
def test_some_end_as_recorded(where: str) -> None:
    wrong = changed(where, chosen(where))
    assert not wrong, wrong
