"""A refusal's advice is executed, and ends as on one process where the script that is refused did not.

What a refusal advises is done by another script, which says so by ``follows=``, or in another place: with the settings
that its words name, as ``zero_stage: 0``, the script itself ends as on one process, or is refused there with advice
that works. Whoever adds a refusal adds a script that follows its words, or a line to ``unfollowed.txt`` that says why
nothing does.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

import parity_worlds as worlds
from parity_common import load
from parity_worlds import Outcome

UNFOLLOWED = Path(__file__).parent / "scripts" / "unfollowed.txt"
"""Refused scripts whose advice no script follows in some place, each with the reason."""

OF_LAYOUTS = UNFOLLOWED.with_name("unfollowed_layouts.txt")
"""Those that are refused in further layouts of the engines alone: who follows, or why nothing does."""


@cache
def followers() -> dict[str, list[str]]:
    """By name of a refused script, those that do what it is told."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, script in load().items():
        for refused in script.follows:
            found[refused].append(name)
    return found


@cache
def refused_in() -> dict[str, list[str]]:
    """By name of a script, the places in which it is refused."""
    found = {
        name: [place for place, cell in row.items() if cell.kind == worlds.REFUSED]
        for name, row in worlds.recorded().items()
    }
    return {name: places for name, places in found.items() if places}


@cache
def ends() -> dict[str, dict[str, Outcome]]:
    """The records of the table and of the settings that refusals advise, together."""
    advised = worlds.recorded(worlds.ADVISED)
    return {name: {**row, **advised.get(name, {})} for name, row in worlds.recorded().items()}


def works(refused: str, place: str) -> bool:
    """Whether following what a script is told in a place, or what it is told then, ends as on one process."""
    record = ends()
    if any(record[name][place].kind == worlds.SAME for name in followers().get(refused, ()) if place in record[name]):
        return True
    return any(works_there(refused, named) for named in worlds.advised_places(record[refused][place], place))


def works_there(refused: str, place: str) -> bool:
    """Whether a refused script works in a place whose settings it was advised."""
    cell = ends()[refused].get(place)
    if cell is None:  # It has no numbers to compare there.
        return False
    return cell.kind == worlds.SAME or (cell.kind == worlds.REFUSED and works(refused, place))


def test_advice_works_wherever_it_is_given() -> None:
    """Scripts of ``unfollowed.txt`` may have followers that work in other places."""
    wrong = [
        f"{refused} ({place}): { {name: ends()[name].get(place) for name in names} }"
        for refused, names in followers().items()
        if refused not in unfollowed()
        for place in refused_in()[refused]
        if not works(refused, place)
    ]
    assert not wrong, "\n".join(wrong)


def test_settings_that_are_advised_work() -> None:
    wrong = [
        f"{refused} ({place}) in {named}: {ends()[refused].get(named)}"
        for refused, places in refused_in().items()
        for place in places
        for named in worlds.advised_places(ends()[refused][place], place)
        if named in ends()[refused] and not works_there(refused, named)
    ]
    assert not wrong, "\n".join(wrong)


def test_scripts_follow_refusals_that_there_are() -> None:
    assert set(followers()) <= set(refused_in())


def unfollowed(listed: Path = UNFOLLOWED) -> dict[str, str]:
    """By name of a script, why no script follows its advice in every place."""
    lines = listed.read_text(encoding="utf-8").splitlines()
    return {name: reason.strip() for name, _, reason in (line.partition(":") for line in lines)}


def test_refusals_whose_advice_nothing_follows_are_listed_with_the_reason() -> None:
    without = [name for name, places in refused_in().items() if not all(works(name, place) for place in places)]
    listed = unfollowed()
    assert list(listed) == sorted(without)
    assert all(listed.values())


def test_refusals_of_further_layouts_alone_are_listed() -> None:
    rows = worlds.recorded(worlds.APART)
    refused = {name for name, row in rows.items() if any(cell.kind == worlds.REFUSED for cell in row.values())}
    listed = unfollowed(OF_LAYOUTS)
    assert list(listed) == sorted(refused - refused_in().keys())
    assert all(listed.values())
