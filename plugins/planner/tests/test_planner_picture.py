"""The picture of memory per rank: bars as long as their bytes, and the line that no plan may pass."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from drivetrain.api import UsageError
from drivetrain.api.programs import pip_line
from drivetrain_planner import Estimate
from drivetrain_planner.choosing import Candidate, Choice
from drivetrain_planner.machines import find

GIB = 2**30


class Net:
    """A model, as far as a title needs one."""

    def parameters(self):
        return []


@pytest.fixture
def choice():
    def candidate(title, memory, verdict=""):
        estimate = Estimate(title, "x", "x", 0, memory={part: size * GIB for part, size in memory.items()})
        return Candidate(estimate, estimate.peak, {"computation": 0.5}, verdict, GIB)

    fitting = [candidate("small", {"parameters": 6, "activations": 3}), candidate("other", {"parameters": 6})]
    rejected = [candidate("large", {"activations": 30, "buckets": 3}, "too large")]
    request = SimpleNamespace(model=Net(), world_size=2)
    return Choice(fitting, rejected, [], find("rtx4090x2"), request)


def area(pixels, colour):
    wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return int((abs(pixels - wanted).max(axis=2) <= 1).sum())


def test_bars_are_as_long_as_their_bytes(choice, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.image import imread

    from drivetrain_planner.picture import COLOURS, write

    write([*choice.fitting, *choice.rejected], choice, tmp_path / "memory.png")
    pixels = (imread(tmp_path / "memory.png")[:, :, :3] * 255).round().astype(int)
    # 33 and 12 GiB, each with a patch in the legend.
    assert area(pixels, COLOURS["activations"]) / area(pixels, COLOURS["parameters"]) == pytest.approx(33 / 12, rel=0.1)
    # The line of 80 % and the end of the device's memory, both black and as high as the axes.
    black = (pixels.max(axis=2) <= 60).sum(axis=0)
    assert (black > 0.25 * pixels.shape[0]).sum() >= 2


def test_an_svg_says_what_the_bars_are(choice, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    import matplotlib as mpl

    from drivetrain_planner.picture import write

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    write([*choice.fitting, *choice.rejected], choice, tmp_path / "memory.svg")
    text = (tmp_path / "memory.svg").read_text()
    for words in ("-&gt; small", "9.0 GiB, 500.0 ms a step", "does not fit", "80% of 24.0 GiB", "buckets", "context"):
        assert words in text, words


def test_a_picture_of_nothing_is_refused(choice, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from drivetrain_planner.picture import write

    refused = [Candidate(Estimate("no", "x", "x", 0, refused="never"), verdict="never")]
    with pytest.raises(UsageError, match="there is no layout to draw"):
        write(refused, choice, tmp_path / "memory.png")
    with pytest.raises(UsageError, match="has no suffix of a picture"):
        write(choice.fitting, choice, tmp_path / "memory.doc")
    with pytest.raises(UsageError, match="cannot be written"):
        write(choice.fitting, choice, tmp_path / "absent/memory.png")


def test_without_matplotlib_the_error_says_what_to_install(choice, tmp_path, monkeypatch):
    import sys

    from drivetrain_planner.picture import write

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=re.escape(pip_line("planner", "plot"))):
        write(choice.fitting, choice, tmp_path / "memory.png")
