"""Ordinary scripts end as ``scripts/outcomes.json`` says under every backend: one process's numbers, or a refusal.

A cell that is a defect there is expected to be one: this fails as soon as it is none, so that the record is renewed.

They are the suite's only scripts of this kind: a plugin's own tests hold what its engine alone has. ``make parity``
runs every script in every place, and some in further layouts, and renews the records. ``make test-all`` runs a part, by
a rule: every script under one of the four engines that cut models, which take turns, as do ZeRO's stages among
themselves; a third of them under ``ddp`` too, with 2, 3 and 4 ranks by turns; see :func:`places_of`. ``make test`` runs
a smaller part, see :data:`SOME`.
"""

from __future__ import annotations

import os
import re

import parity_worlds as worlds
import pytest
import torch
from parity_common import load
from parity_worlds import DIFFERENT, PLACES, RAW, REFUSED, SAME, Outcome

from drivetrain.errors import UsageError
from drivetrain_testing import RankFailedError, preload

preload("transformers.models.llama.modeling_llama")
SCRIPTS = load()


def places_of(name):
    """The places in which ``make test-all`` runs this script."""
    number = list(SCRIPTS).index(name)
    if SCRIPTS[name].whole_batch:
        return {"single", "tp-2", "pp-2"}
    engines = ("fsdp-2", f"deepspeed-{1 + number // 4 % 3}", "tp-2", "pp-2")
    places = {engines[number % 4]}
    places |= {f"ddp-{2 + number // 3 % 3}"} if number % 3 == 0 else set()
    return places | {"single"} if number % 4 == 0 else places


def chosen(place):
    """The scripts of this place; all that run there with PARITY=all."""
    if os.environ.get("PARITY") == "all":
        return [name for name, script in SCRIPTS.items() if worlds.runs(script, PLACES[place])]
    return [name for name in SCRIPTS if place in places_of(name)]


def layouts_of(name):
    """The further layouts in which ``make test-all`` runs this script: one of ZeRO's, and another engine's."""
    if SCRIPTS[name].whole_batch:
        return {"tp-2-sequence", "pp-3", "pp-2-zbv"}
    number = list(worlds.load_parts()).index(name)
    zero = [place for place in worlds.LAYOUTS if place.startswith("deepspeed")]
    others = [place for place in worlds.LAYOUTS if place not in zero]
    return {zero[number % len(zero)], others[number % len(others)]}


def chosen_of_layout(place):
    names = [name for name, script in worlds.load_parts().items() if worlds.runs(script, worlds.LAYOUTS[place])]
    return names if os.environ.get("PARITY") == "all" else [name for name in names if place in layouts_of(name)]


SOME = {"ddp-2": (0, 11), "fsdp-2": (1, 36), "deepspeed-3": (3, 36), "tp-2": (3, 36), "pp-2": (4, 36)}
"""Places of ``make test``, one for each engine: the first of its scripts, and which of those that follow. Under ZeRO
stage 3 none that compiles, which takes a minute of a busy machine."""


def some(place):
    begin, step = SOME[place]
    return [name for name in SCRIPTS if worlds.runs(SCRIPTS[name], PLACES[place])][begin::step]


@pytest.fixture(scope="session")
def expected():
    return worlds.references(list(SCRIPTS))


@pytest.fixture(scope="session")
def expected_of_some():
    return worlds.references(sorted({name for place in SOME for name in some(place)}))


def changed(where, names, expected, matrix=worlds.ORDINARY):
    """What ended otherwise than recorded, a line each."""
    record = worlds.recorded(matrix)
    found = worlds.outcomes(matrix.places[where], names, expected, matrix)
    lines = [
        f"{name}: recorded {before.kind} {before.text!r}, found {cell.kind} {cell.text!r}"
        for name, cell in found.items()
        if not agrees(cell, before := record[name][where], stages=where.startswith("pp"))
    ]
    return "\n".join([f"{where} (if it is meant to be: make parity)", *lines]) if lines else ""


@pytest.mark.parametrize("where", SOME)
def test_some_scripts_end_as_recorded(where, expected_of_some):
    names = some(where)
    assert names
    wrong = changed(where, names, expected_of_some)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", PLACES)
def test_scripts_end_as_recorded(where, expected):
    wrong = changed(where, chosen(where), expected)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", worlds.LAYOUTS)
def test_scripts_end_as_recorded_in_other_layouts(where, expected):
    wrong = changed(where, chosen_of_layout(where), expected, worlds.APART)
    assert not wrong, wrong


def chosen_of_advised(place):
    """A sixth of the scripts that are advised to run there; all with PARITY=all."""
    matrix = worlds.ADVISED
    names = [name for name, script in SCRIPTS.items() if worlds.runs(script, matrix.places[place], matrix)]
    return names if os.environ.get("PARITY") == "all" else names[list(matrix.places).index(place) % 6 :: 6]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", worlds.ADVISED_PLACES)
def test_scripts_end_as_recorded_with_advised_settings(where, expected):
    wrong = changed(where, chosen_of_advised(where), expected, worlds.ADVISED)
    assert not wrong, wrong


def test_every_script_meets_ranks_that_hold_parts():
    """The rule above, counted: no script runs without one of these engines, and none of them runs a few."""
    engines = [{"fsdp-2"}, {"deepspeed-1", "deepspeed-2", "deepspeed-3"}, {"tp-2"}, {"pp-2"}]
    shares = [{name for name in SCRIPTS if places & places_of(name)} for places in engines]
    assert set().union(*shares) == set(SCRIPTS)
    assert all(len(share) > 0.2 * len(SCRIPTS) for share in shares)
    for name, script in SCRIPTS.items():
        assert all(worlds.runs(script, PLACES[place]) for place in places_of(name))


def test_every_part_runs_in_several_layouts():
    """The rule of the further layouts, counted as well."""
    parts = worlds.load_parts()
    for place in worlds.LAYOUTS:
        assert sum(place in layouts_of(name) for name in parts) > 0.08 * len(parts), place
    for name, script in parts.items():
        assert len(layouts_of(name)) == (3 if script.whole_batch else 2), name
        assert all(worlds.runs(script, worlds.LAYOUTS[place]) for place in layouts_of(name)), name
        zero = sum(place.startswith("deepspeed") for place in layouts_of(name))
        assert zero == (0 if script.whole_batch else 1), name


def agrees(found, before, *, stages=False):
    """The same kind of end; a refusal in the same words.

    Stages of a pipeline lack other parameters than their neighbours and come to other lines of a script first, so that
    which of them refuses first, and for which parameter, is up to timing.
    """
    if found.kind != before.kind:
        return False
    return found.kind != REFUSED or stages or unnamed(found.text) == unnamed(before.text)


def unnamed(text):
    # Of several ranks that read other samples the first two to say so are named.
    samples = r"samples with digest \w+", r"\d+ in an epoch, which begins [\d, ]*\d", r"[\d, ]*\d, \.{3} from place \d+"
    text = re.sub(rf"rank \d+: ({'|'.join(samples)})", "RANK", text)
    return re.sub(r"\b\w+(\.\w+)*\.(weight|bias)\b", "PARAMETER", text)


def test_every_script_has_an_outcome_in_every_place():
    wanted = {name: {place for place in PLACES if worlds.runs(SCRIPTS[name], PLACES[place])} for name in SCRIPTS}
    assert {name: set(row) for name, row in worlds.recorded().items()} == wanted, "run: make parity"
    wanted = {
        name: {place for place in worlds.LAYOUTS if worlds.runs(script, worlds.LAYOUTS[place])}
        for name, script in worlds.load_parts().items()
    }
    assert {name: set(row) for name, row in worlds.recorded(worlds.APART).items()} == wanted, "run: make parity"
    places = worlds.ADVISED_PLACES
    advised = {
        name: {each for each in places if worlds.runs(script, places[each], worlds.ADVISED)}
        for name, script in SCRIPTS.items()
    }
    recorded = {name: set(row) for name, row in worlds.recorded(worlds.ADVISED).items()}
    assert recorded == {name: places for name, places in advised.items() if places}, "run: make parity"


def test_some_scripts_learn(expected_of_some):
    test_every_script_learns(expected_of_some)


@pytest.mark.slow
def test_every_script_learns(expected):
    """A script whose weights do not move, or whose losses are all alike, would be the same anywhere."""
    still = [
        name
        for name, (losses, weights) in expected.items()
        if not weights
        or not all(value.isfinite().all() for value in weights.values())
        or (len(losses) > 1 and max(losses) - min(losses) <= 1e-3)
    ]
    assert not still


WEIGHTS = {"w": torch.ones(3)}


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ([([1.0], WEIGHTS), ([1.0], WEIGHTS)], ""),
        ([([1.0], WEIGHTS), ([1.0], {})], ""),
        ([([1.0 + 3e-5], WEIGHTS)], "3.0e-05 in losses"),
        ([([1.0], WEIGHTS), ([1.0], {"w": torch.zeros(3)})], "1.0e+00 in w of rank 1"),
        ([([1.0], {})], "weights missing: ['w'], not expected: []"),
        ([([1.0], {**WEIGHTS, "v": torch.ones(1)})], "weights missing: [], not expected: ['v']"),
        ([([1.0], {"w": torch.ones(1)})], "w has shape (1,)"),
        ([([1.0, 2.0], WEIGHTS)], "2 losses instead of 1"),
        ([([float("nan")], WEIGHTS)], "inf in losses"),
    ],
)
def test_a_difference_is_told(results, text):
    assert worlds.compared(results, ([1.0], WEIGHTS)) == (Outcome(DIFFERENT, text) if text else Outcome(SAME))


def failure(cause, what="rank 1 of 2 failed in job: RuntimeError: no"):
    error = RankFailedError(what)
    error.cause = cause
    return error


def test_only_an_error_of_our_own_is_a_refusal():
    refused = worlds.failed(failure(UsageError("no", cure="Write yes.")))
    assert refused == Outcome(REFUSED, "UsageError: no. Write yes.")
    assert worlds.failed(failure(RuntimeError("no"))) == Outcome(RAW, "RuntimeError: no")
    assert worlds.failed(failure(None)) == Outcome(RAW, "RuntimeError: no")


def test_a_defect_that_gets_better_is_noticed():
    assert agrees(Outcome(DIFFERENT, "3e-1 in losses"), Outcome(DIFFERENT, "2e-1 in losses"))
    assert not agrees(Outcome(SAME), Outcome(DIFFERENT, "2e-1 in losses"))
    assert not agrees(Outcome(REFUSED, "UsageError: no."), Outcome(RAW, "RuntimeError: no"))
    assert not agrees(Outcome(REFUSED, "UsageError: no."), Outcome(REFUSED, "UsageError: never."))
