"""A refusal's advice is executed: a script does what it says, and ends as on one process where another was refused.

A script says so by ``follows=``. Refused scripts that none follows are listed, and the list only gets shorter: whoever
adds a refusal adds a script that follows its words.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import parity_worlds as worlds
from parity_common import load

UNFOLLOWED = Path(__file__).parent / "scripts" / "unfollowed.txt"
"""Names of refused scripts whose advice no script of this kind follows: tests of plugins do, or nothing does yet."""


def followers() -> dict[str, list[str]]:
    """By name of a refused script, those that do what it is told."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, script in load().items():
        for refused in script.follows:
            found[refused].append(name)
    return found


def refused_in() -> dict[str, list[str]]:
    """By name of a script, the places in which it is refused."""
    found = {
        name: [place for place, cell in row.items() if cell.kind == worlds.REFUSED]
        for name, row in worlds.recorded().items()
    }
    return {name: places for name, places in found.items() if places}


def test_advice_works_wherever_it_is_given() -> None:
    record, wrong = worlds.recorded(), []
    for refused, names in followers().items():
        for place in refused_in()[refused]:
            ends = {name: record[name][place] for name in names if place in record[name]}
            if not any(cell.kind == worlds.SAME for cell in ends.values()):
                wrong.append(f"{refused} ({place}): {ends}")
    assert not wrong, "\n".join(wrong)


def test_scripts_follow_refusals_that_there_are() -> None:
    assert set(followers()) <= set(refused_in())


def test_refusals_whose_advice_nothing_follows_get_fewer() -> None:
    listed = UNFOLLOWED.read_text(encoding="utf-8").split()
    assert listed == sorted(refused_in().keys() - followers().keys())
