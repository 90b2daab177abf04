from __future__ import annotations

from tqdm import tqdm as original

from drivetrain.logging import set_rank
from drivetrain.progress import tqdm


def test_it_gives_back_every_item_on_every_process(capsys):
    assert list(tqdm(range(25))) == list(range(25))
    assert "25/25" in capsys.readouterr().err
    set_rank(1, 2)
    assert list(tqdm(range(25))) == list(range(25))
    assert capsys.readouterr().err == ""
    assert list(tqdm(range(3), main_process_only=False)) == [0, 1, 2]
    assert "3/3" in capsys.readouterr().err


def test_it_is_tqdms_own_object():
    with tqdm(total=4, desc="train", disable=True) as bar:
        bar.update(2)
    assert isinstance(bar, original)
