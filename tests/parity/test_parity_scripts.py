"""Ordinary scripts end as ``scripts/outcomes.json`` says under every backend: one process's numbers, or a refusal.

A cell that is a defect there is expected to be one: this fails as soon as it is none, so that the record is renewed.
``make parity`` runs every script in every place and renews it; here a part runs, see :func:`chosen`, and in
``make test`` a smaller one, see :data:`SOME`.
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
STRIPES = 4


def chosen(place):
    """All scripts under ``ddp-2``, and a quarter of them elsewhere, another one in each place; all with PARITY=all."""
    names = [name for name, script in SCRIPTS.items() if worlds.runs(script, PLACES[place])]
    if place == "ddp-2" or os.environ.get("PARITY") == "all":
        return names
    return names[list(PLACES).index(place) % STRIPES :: STRIPES]


SOME = {"ddp-2": (0, 6), "fsdp-2": (1, 30), "deepspeed-3": (2, 30), "tp-2": (3, 30), "pp-2": (4, 30)}
"""Places of ``make test``, one for each engine: the first of its scripts, and which of those that follow."""


def some(place):
    begin, step = SOME[place]
    return [name for name in SCRIPTS if worlds.runs(SCRIPTS[name], PLACES[place])][begin::step]


@pytest.fixture(scope="session")
def expected():
    return worlds.references(list(SCRIPTS))


@pytest.fixture(scope="session")
def expected_of_some():
    return worlds.references(sorted({name for place in SOME for name in some(place)}))


def changed(where, names, expected):
    """What ended otherwise than recorded, a line each."""
    record = worlds.recorded()
    found = worlds.outcomes(PLACES[where], names, expected)
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


def test_some_scripts_learn(expected_of_some):
    test_every_script_learns(expected_of_some)


@pytest.mark.slow
def test_every_script_learns(expected):
    """A script whose weights do not move, or whose losses are all alike, would be the same anywhere."""
    for name, (losses, weights) in expected.items():
        assert weights, name
        assert all(value.isfinite().all() for value in weights.values()), name
        assert len(losses) < 2 or max(losses) - min(losses) > 1e-3, name


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
