from __future__ import annotations

import importlib.util
import io

import pytest

from drivetrain.errors import UsageError
from drivetrain.logging import set_rank
from drivetrain.progress import ProgressBar, _RichView, tqdm


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_it_gives_back_every_item_on_every_process(capsys):
    assert list(tqdm(range(25))) == list(range(25))
    shown = capsys.readouterr().err
    assert "25/25" in shown
    set_rank(1, 2)
    assert list(tqdm(range(25))) == list(range(25))
    assert capsys.readouterr().err == ""
    assert list(tqdm(range(3), main_process_only=False)) == [0, 1, 2]
    assert "3/3" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("tqdm") is None, reason="the optional package tqdm is not installed")
def test_the_real_tqdm_is_preferred():
    from tqdm import tqdm as original

    bar = tqdm(range(3), disable=True)
    assert isinstance(bar, original)


def test_a_log_file_gets_ten_lines_not_a_thousand():
    out = io.StringIO()
    for _ in ProgressBar(range(1000), "epoch 1", file=out, unit="batches"):
        pass
    lines = out.getvalue().splitlines()
    assert lines == [f"epoch 1: {done}/1000 batches" for done in range(100, 1001, 100)]


def test_fewer_items_than_lines():
    out = io.StringIO()
    list(ProgressBar(range(3), file=out))
    assert out.getvalue().splitlines() == ["1/3 it", "2/3 it", "3/3 it"]


def test_an_unknown_total_doubles():
    out = io.StringIO()
    list(ProgressBar(iter(range(20)), file=out))
    assert out.getvalue().splitlines() == ["1 it", "2 it", "4 it", "8 it", "16 it", "20 it"]


def test_moved_by_hand():
    out = io.StringIO()
    with ProgressBar(total=4, file=out) as bar:
        assert len(bar) == 4
        bar.set_description("train")
        bar.set_postfix(loss=0.123456, epoch=3)
        bar.update(2)
        bar.write("a remark")
        bar.update(2)
    bar.close()
    assert out.getvalue().splitlines() == [
        "train: 2/4 it [loss=0.123, epoch=3]",
        "a remark",
        "train: 4/4 it [loss=0.123, epoch=3]",
    ]
    assert bar.n == 4


def test_leave_and_disable():
    out = io.StringIO()
    list(ProgressBar(range(1), leave=False, file=out))
    list(ProgressBar(range(5), disable=True, file=out))
    list(ProgressBar(range(5), disable=None, file=out))
    assert out.getvalue() == ""


def test_a_break_shows_how_far_it_came():
    out = io.StringIO()
    bar = ProgressBar(range(100), file=out)
    for item in bar:
        if item == 4:
            break
    bar.close()
    assert out.getvalue().splitlines() == ["4/100 it"]


def test_the_length_may_be_unknown():
    with pytest.raises(TypeError, match="not known"):
        len(ProgressBar(iter([]), disable=True))
    with pytest.raises(UsageError, match="nothing to iterate over"):
        list(ProgressBar(total=3, disable=True))


def test_styles_are_named_and_strangers_refused(caplog):
    list(ProgressBar(range(1), disable=True, ncols=80, smoothing=0.1))
    assert "a progress bar has no ncols, smoothing" in caplog.text
    with pytest.raises(UsageError, match=r"tqdm has no argument 'ncol'. Did you mean 'ncols'\?"):
        ProgressBar(range(1), ncol=80)


def test_bars_on_a_terminal_share_one_display():
    screen = Terminal()
    for outer in ProgressBar(range(2), "outer", file=screen):
        for _ in ProgressBar(range(3), "inner", file=screen, leave=False):
            assert _RichView.count == 2
        assert _RichView.count == 1
        assert outer in (0, 1)
    assert _RichView.display is None
    assert _RichView.count == 0
    assert "outer" in screen.getvalue()


def test_an_exception_lets_go_of_the_terminal():
    screen = Terminal()

    def failing():
        yield 1
        raise ValueError("broken loader")

    with pytest.raises(ValueError, match="broken loader"):
        list(ProgressBar(failing(), file=screen))
    assert _RichView.display is None
