"""``drivetrain plot``: what is read is what trackers wrote, and the picture shows each run and each value."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

from drivetrain import Accelerator
from drivetrain.api import UsageError
from drivetrain_trackers.commands import plot
from drivetrain_trackers.curves import SPEED, Curve, read_runs, with_speed

VALUES = {0: 2.0, 10: 1.0, 20: 0.5}


def logged(folder, rows, trackers="jsonl"):
    """Log rows, each with its step, as a script does."""
    accelerator = Accelerator(cpu=True, log_with=trackers, project_dir=str(folder.parent))
    accelerator.init_trackers(folder.name)
    for step, row in rows:
        accelerator.log(row, step=step)
    accelerator.end_training()
    return folder


def jsonl(folder, values=VALUES, name="loss"):
    return logged(folder, [(step, {name: value, "note": "text is no curve"}) for step, value in values.items()])


def drawn(*arguments):
    done = CliRunner().invoke(plot, [str(each) for each in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_lines_are_read_as_they_were_logged(tmp_path):
    (run,) = read_runs([jsonl(tmp_path / "one")])
    assert run.name == "one"
    assert list(run.curves) == ["loss"]
    assert dict(zip(run.curves["loss"].steps, run.curves["loss"].values, strict=True)) == VALUES
    assert run.curves["loss"].times == sorted(run.curves["loss"].times)


def test_tensorboards_files_are_read_like_lines(tmp_path):
    pytest.importorskip("tensorboard", reason="event files are read by TensorBoard")
    rows = [
        (step, {"train/loss": value, "accuracy": {"test": 1 - value, "train": 1.0}}) for step, value in VALUES.items()
    ]
    logged(tmp_path / "lines", rows)
    logged(tmp_path / "events", rows, "tensorboard")
    events, lines = read_runs([tmp_path])
    assert [events.name, lines.name] == ["events", "lines"]
    assert sorted(events.curves) == sorted(lines.curves) == ["accuracy/test", "accuracy/train", "train/loss"]
    for name, curve in lines.curves.items():
        assert (events.curves[name].steps, events.curves[name].values) == (curve.steps, curve.values)


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path):
    folder = jsonl(tmp_path / "run", {1: 5.0, 2: 4.0, 3: 3.0})
    jsonl(folder, {2: 40.0})
    (run,) = read_runs([folder])
    assert (run.curves["loss"].steps, run.curves["loss"].values) == ([1, 2], [5.0, 40.0])


def test_values_without_a_step_stand_in_their_order(tmp_path):
    logged(tmp_path / "run", [(None, {"loss": value}) for value in (3.0, 2.0, math.nan)])
    (run,) = read_runs([tmp_path])
    assert run.curves["loss"].steps == [1, 2, 3]
    assert math.isnan(run.curves["loss"].values[2])


def test_a_line_that_is_not_finished_is_left_out(tmp_path):
    folder = jsonl(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 30, "ti')
    (run,) = read_runs([folder])
    assert run.curves["loss"].steps == [0, 10, 20]


def test_speed_follows_from_steps_and_times():
    curve = Curve()
    for step in range(0, 1000, 10):
        # Twice as fast from step 500 on.
        curve.add(step, step / 10 if step < 500 else 50 + (step - 500) / 20, 1.0)
    speed = with_speed({"loss": curve})[SPEED]
    found = dict(zip(speed.steps, speed.values, strict=True))
    assert found[490] == pytest.approx(10)
    assert found[990] == pytest.approx(20)


def test_names_tell_runs_of_one_name_apart(tmp_path):
    for parent in ("monday", "tuesday"):
        jsonl(tmp_path / parent / "run")
    assert [run.name for run in read_runs([tmp_path])] == ["monday/run", "tuesday/run"]
    assert [run.name for run in read_runs([tmp_path / "monday", tmp_path / "monday/run"])] == ["run"]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda folder: folder / "nowhere", "there is no .*nowhere"),
        (lambda folder: folder, "no run is at or below"),
        (
            lambda folder: damaged(folder / "metrics.jsonl"),
            r"line 1 of .*metrics\.jsonl.* is none that the jsonl tracker writes",
        ),
    ],
    ids=["absent", "empty", "damaged"],
)
def test_what_holds_no_run_is_an_error(build, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        read_runs([build(tmp_path)])


def test_what_is_named_instead_of_what_holds_no_run_is_read(tmp_path):
    jsonl(tmp_path / "runs" / "one")
    with pytest.raises(UsageError, match=r"there is no '.*nowhere'\. Name a folder with metrics\.jsonl .* above"):
        read_runs([tmp_path / "nowhere"])
    for named in (tmp_path / "runs" / "one", tmp_path / "runs", tmp_path):
        assert [run.path.name for run in read_runs([named])] == ["one"]


def damaged(file):
    file.write_text('["loss", 1]\n{"step": 1, "time": 2, "loss": 1}\n', encoding="utf-8")
    return file.parent


def lines(curve, *, over="step", smooth=1):
    """What is drawn of one curve."""
    from matplotlib.figure import Figure

    from drivetrain_trackers.picture import _draw

    axes = Figure().add_subplot()
    _draw(axes, curve, {"color": "#000000"}, over=over, smooth=smooth)
    return axes.get_lines()


def test_losses_come_first_and_the_speed_last():
    from drivetrain_trackers.picture import _chosen

    assert _chosen([SPEED, "rate", "test/Loss", "accuracy"], ()) == ["test/Loss", "rate", "accuracy", SPEED]


class TestPicture:
    @pytest.fixture(autouse=True)
    def matplotlib(self, monkeypatch):
        pytest.importorskip("matplotlib", reason="pictures need matplotlib")
        import matplotlib as mpl

        with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text, so that a test can find it
            yield

    def test_it_shows_each_run_and_each_value(self, tmp_path):
        jsonl(tmp_path / "runs/first")
        jsonl(tmp_path / "runs/second", {0: 1.0, 10: math.inf, 20: 1e-3})
        jsonl(tmp_path / "runs/second", {0: 0.1}, name="learning rate")
        told = drawn(tmp_path / "runs", "-o", tmp_path / "curves.svg")
        assert f"{tmp_path / 'curves.svg'}: loss, learning rate" in told
        text = (tmp_path / "curves.svg").read_text(encoding="utf-8")
        for word in (">first<", ">second<", ">loss<", ">learning rate<", ">inf<", ">step<"):
            assert word in text

    def test_the_values_that_are_asked_for_over_time(self, tmp_path):
        jsonl(jsonl(tmp_path / "run"), name="accuracy")
        told = drawn(tmp_path, "--metric", "accuracy", "--over", "time", "--smooth", 2, "-o", tmp_path / "one.svg")
        assert "one.svg: accuracy of 1 run\n" in told
        text = (tmp_path / "one.svg").read_text(encoding="utf-8")
        assert ">minutes<" in text
        assert ">loss<" not in text

    def test_a_png_holds_the_colour_of_each_run(self, tmp_path):
        from matplotlib.image import imread

        from drivetrain.api.programs import pictures

        for name in ("one", "two", "three"):
            jsonl(tmp_path / name)
        drawn(tmp_path, "-o", tmp_path / "curves.png")
        pixels = (imread(tmp_path / "curves.png")[:, :, :3] * 255).round().astype(int)
        for colour in pictures.COLOURS[:3]:
            wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
            assert (abs(pixels - wanted).max(axis=2) <= 1).sum() > 20
        assert not (abs(pixels - [0xCC, 0x79, 0xA7]).max(axis=2) <= 1).any()

    @pytest.mark.parametrize(("over", "places"), [("step", [0, 10, 20, 30]), ("time", [0, 1, 2, 3])])
    def test_a_line_stands_over_steps_or_over_minutes_since_its_first(self, over, places):
        curve = Curve([0, 10, 20, 30], [500, 560, 620, 680], [4.0, 3.0, 2.0, 1.0])
        (line,) = lines(curve, over=over)
        assert list(line.get_xdata()) == places
        assert list(line.get_ydata()) == curve.values

    def test_smoothing_draws_means_over_the_values(self):
        curve = Curve(list(range(8)), list(range(8)), [0.0, 3.0, 0.0, 3.0, 0.0, 3.0, 0.0, 3.0])
        values, means = lines(curve, smooth=2)
        assert list(values.get_ydata()) == curve.values
        assert values.get_alpha() < 1
        assert list(means.get_ydata()) == [1.5, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.5]
        # Too few values for means over three of them.
        assert len(lines(curve, smooth=3)) == 1

    def test_curves_that_lie_on_each_other_are_all_seen(self, tmp_path, monkeypatch):
        from matplotlib.figure import Figure

        seen = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.append(figure))
        for name in ("a", "b"):
            jsonl(tmp_path / name)
        jsonl(tmp_path / "c", {0: 2.0, 10: 1.01, 20: 0.5})
        drawn(tmp_path, "--metric", "loss", "-o", tmp_path / "curves.png")
        below, above, apart = (line.get_linewidth() for line in seen[0].axes[0].get_lines())
        assert below > above + 1
        assert above == apart

    def test_more_runs_than_colours_differ_by_their_lines(self, tmp_path, monkeypatch):
        from matplotlib.figure import Figure

        seen = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.append(figure))
        for number in range(8):
            jsonl(tmp_path / f"run{number}")
        drawn(tmp_path, "-o", tmp_path / "curves.png")
        looks = {(line.get_color(), line.get_linestyle()) for line in seen[0].axes[0].get_lines()}
        assert len(looks) == 8

    @pytest.mark.parametrize("scale", ["linear", "log"])
    def test_a_scale_that_is_asked_for_is_taken(self, scale, tmp_path, monkeypatch):
        from matplotlib.figure import Figure

        seen = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.append(figure))
        wide = {"linear": {0: 1.0, 10: 1e6}, "log": {0: 1.0, 10: 2.0}}[scale]
        drawn(jsonl(tmp_path / "run", wide), "--metric", "loss", "--scale", scale, "-o", tmp_path / "curves.png")
        assert seen[0].axes[0].get_yscale() == scale

    @pytest.mark.parametrize(
        ("values", "scale"),
        [
            ([1.0, 99.0], "linear"),
            ([1.0, 100.0], "log"),
            ([0.0, 1.0, 1e17], "log"),
            ([-1.0, 1e9], "linear"),
            ([math.nan], "linear"),
        ],
    )
    def test_wide_values_stand_on_a_logarithmic_scale(self, values, scale):
        from matplotlib.figure import Figure

        from drivetrain_trackers.picture import _decorate

        axes = Figure().add_subplot()
        curve = Curve(list(range(len(values))), list(range(len(values))), values)
        _decorate(axes, "loss", [curve], over="step", scale="auto")
        assert axes.get_yscale() == scale

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--metric", "los"), "no run logged 'los'. There are: loss"),
            (("-o", "curves.pict"), "'curves.pict' has no suffix of a picture. Use .png or .svg."),
            (("-o", "nowhere/curves.png"), "'nowhere/curves.png' cannot be written"),
        ],
    )
    def test_what_cannot_be_drawn_is_an_error(self, arguments, words, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError, match=words):
            drawn(jsonl(tmp_path / "run"), *arguments)

    def test_what_is_advised_instead_is_drawn(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        drawn(jsonl(tmp_path / "run"), "--metric", "loss", "-o", "curves.svg")
        assert (tmp_path / "curves.svg").read_bytes()


def test_a_run_without_numbers_says_what_to_log(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 2, "note": "x"}) + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="these runs logged no numbers"):
        drawn(tmp_path)
