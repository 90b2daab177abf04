"""Each optimizer ends as ``optimizers.json`` says in each place: one process's numbers, or a refusal.

``make optimizers`` runs every optimizer in every place and renews it; here a part runs.
"""

from __future__ import annotations

import parity_optimizers as optimizers
import parity_worlds as worlds
import pytest
from parity_optimizers import MATRIX, OPTIMIZERS, PLACES


def test_the_record() -> None:
    record = worlds.recorded(MATRIX)
    assert list(record) == list(OPTIMIZERS)
    for name, row in record.items():
        assert list(row) == list(PLACES), name
        for place, cell in row.items():
            assert cell.kind in (worlds.SAME, worlds.REFUSED), (name, place, cell)
        assert row["single"].kind == row["ddp x 2"].kind == row["ddp x 4"].kind == worlds.SAME, name


CHEAP = ("torch", "transformers", "")
"""Packages of the optimizers that run where the others have shown nothing of their own."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["fsdp x 4", "HSDP 2 x 2", "ZeRO-1 x 2", "pp 2", "tp 2"])
def test_it_is_measured_again(where: str) -> None:
    packages = {name: OPTIMIZERS[name][0] for name in optimizers.installed()}
    # Those that couple all parameters are of other packages.
    names = [name for name, package in packages.items() if package in CHEAP or where == "pp 2"]
    record = worlds.recorded(MATRIX)
    found = worlds.outcomes(PLACES[where], names, worlds.references(names, MATRIX), MATRIX)
    changed = [f"{name}: {cell}" for name, cell in found.items() if cell.kind != record[name][where].kind]
    assert not changed, "\n".join([f"{where} (if it is meant to be: make optimizers)", *changed])
