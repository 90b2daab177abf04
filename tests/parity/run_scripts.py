"""Run the scripts of ``scripts/`` and show how each ends: ``python tests/parity/run_scripts.py --backend ddp gan``."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time

import parity_optimizers
import parity_surface
import parity_worlds as worlds

from drivetrain_testing import preload


def main() -> None:
    """Run, print each outcome that is not "same", and with ``--record`` keep them in ``outcomes.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", help="names of scripts; none means all")
    parser.add_argument("--optimizers", action="store_true", help="the matrix of optimizers instead of the scripts")
    parser.add_argument("--layouts", action="store_true", help="the scripts of PARTS in further layouts of the engines")
    parser.add_argument("--advised", action="store_true", help="refused scripts, with the settings that they are told")
    parser.add_argument("--surface", action="store_true", help="every method of tensors, modules, optimizers")
    parser.add_argument("--backend", action="append", help="ddp, ddp-3, deepspeed, ...; repeatable; none means all")
    parser.add_argument("--record", action="store_true", help="keep the outcomes")
    parser.add_argument("--traceback", action="store_true", help="show where each failure was raised")
    arguments = parser.parse_args()
    matrix = worlds.APART if arguments.layouts else worlds.ORDINARY
    matrix = parity_optimizers.MATRIX if arguments.optimizers else matrix
    matrix = parity_surface.MATRIX if arguments.surface else matrix
    matrix = worlds.ADVISED if arguments.advised else matrix
    scripts = matrix.load()
    names = arguments.scripts or (parity_optimizers.installed() if arguments.optimizers else list(scripts))
    wanted = tuple(arguments.backend or [""])
    places = [place for place in matrix.places.values() if place.name.startswith(wanted)]
    if any(place.config["distributed_type"] == "deepspeed" for place in places):
        preload("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", opens_accelerators=True)
    preload("transformers.models.llama.modeling_llama")
    with contextlib.redirect_stdout(io.StringIO()):
        expected = worlds.references(names, matrix)
    found: dict[str, dict[str, worlds.Outcome]] = {}
    for place in places:
        begun = time.monotonic()
        mine = [name for name in names if worlds.runs(scripts[name], place, matrix)]
        with contextlib.redirect_stdout(io.StringIO() if not arguments.traceback else sys.stdout):  # what ranks print
            cells = worlds.outcomes(place, mine, expected, matrix)
        kinds = [cell.kind for cell in cells.values()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        print(f"{place.name}: {counts} ({time.monotonic() - begun:.0f} s)", flush=True)
        for name, cell in cells.items():
            found.setdefault(name, {})[place.name] = cell
            if cell.kind != worlds.SAME:
                print(f"  {name}: {cell.kind}: {cell.text}", flush=True)
                if arguments.traceback and cell.traceback:
                    print(cell.traceback, flush=True)
        if arguments.record:
            worlds.record(found, matrix)


if __name__ == "__main__":
    main()
