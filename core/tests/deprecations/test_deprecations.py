"""What is deprecated is on one list, is warned of with its cure, and is gone in the release that the list names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import drivetrain
import drivetrain_testing
from drivetrain.deprecations import DEPRECATIONS, Deprecation, ended, warn
from drivetrain_testing import selection
from drivetrain_testing.requirements import BaseRequirements

SOURCES = [Path(package.__file__).parent for package in (drivetrain, drivetrain_testing)]
CALL = re.compile(r"deprecations\.warn\(\s*\"([^\"]+)\"")


def test_what_has_ended_is_gone():
    over = ended(DEPRECATIONS.values(), drivetrain.__version__)
    assert over == [], "remove each, its line in deprecations.py, and whatever warned of it"


def test_an_ended_one_is_noticed():
    old = Deprecation("the old way", "0.1", "0.3", "Write the new one.")
    assert [ended([old], version) for version in ("0.2.9", "0.3", "1.0")] == [[], [old], [old]]


def test_every_line_is_warned_of_and_every_warning_has_a_line():
    texts = (path.read_text(encoding="utf-8") for folder in SOURCES for path in folder.rglob("*.py"))
    called = {key for text in texts for key in CALL.findall(text)}
    assert called == set(DEPRECATIONS)


def test_every_line_says_when_and_what_instead():
    for each in DEPRECATIONS.values():
        assert each.since < each.ends, each
        assert each.instead.endswith("."), each


def test_the_warning_names_the_release_and_the_cure_at_the_callers_line():
    with pytest.warns(FutureWarning, match=r"is deprecated since 0\.1 and ends in 0\.2\. Write gaps = ") as caught:
        warn("unused_parameters", stacklevel=1)
    assert caught[0].filename == __file__


def test_requirements_of_yesterday_still_declare_their_gap():
    class Requirements(BaseRequirements):
        backend = "single"
        world_sizes = (1,)
        unused_parameters = None

    with pytest.warns(FutureWarning, match="unused_parameters = None"):
        chosen = selection.cases(Requirements)
    (unused,) = [each for each in chosen if each.values[0] == "gradients.unused_parameters"]
    assert [mark.name for mark in unused.marks] == ["xfail"]
