"""Methods of what is prepared end as ``surface.json`` says, and never with other numbers than on one process.

``tests/parity/run_scripts.py --surface --record`` calls every method in every place and renews it; here a part runs.
"""

from __future__ import annotations

import parity_surface as surface
import parity_worlds as worlds
import pytest
from parity_surface import MATRIX


def test_every_method_has_an_outcome_in_every_place_and_none_differs() -> None:
    record = worlds.recorded(MATRIX)
    assert list(record) == list(surface.load()), "run tests/parity/run_scripts.py --surface --record"
    for name, row in record.items():
        assert list(row) == list(MATRIX.places), name
        assert row["single"].kind == worlds.SAME, name
        assert worlds.DIFFERENT not in {cell.kind for cell in row.values()}, name


def test_arguments_are_found_for_most_methods() -> None:
    assert sum(name.startswith("Tensor.") for name in surface.load()) > 400


@pytest.mark.gate("fsdp-2")
@pytest.mark.parametrize("where", [name for name in surface.NAMES if name != "single"])
def test_some_are_called_again(where: str) -> None:
    names = list(surface.load())[:: 40 if where == "fsdp-2" else 8]
    record = worlds.recorded(MATRIX)
    found = worlds.outcomes(MATRIX.places[where], names, worlds.references(names, MATRIX), MATRIX)
    changed = [f"{name}: {cell}" for name, cell in found.items() if cell.kind != record[name][where].kind]
    assert not changed, "\n".join([where, *changed])
