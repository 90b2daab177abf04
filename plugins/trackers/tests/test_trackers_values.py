"""What trackers are told, and which of them there are."""

from __future__ import annotations

import math

from drivetrain_trackers import plugin
from drivetrain_trackers.values import flat, number, without_tensors


def test_values_become_what_trackers_take():
    import torch

    nested = {"loss": torch.tensor([0.5]), "group": {"a": 1, "deep": {"b": math.inf}}}
    assert flat(nested, "/") == {"loss": nested["loss"], "group/a": 1, "group/deep/b": math.inf}
    assert [number(each) for each in (torch.tensor([[2.0]]), math.nan, "text")][::2] == [2.0, "text"]
    assert math.isnan(number(torch.tensor(math.nan)))
    image = object()
    assert without_tensors({"x": torch.ones(2), "y": [image, torch.tensor(3)]}) == {"x": [1.0, 1.0], "y": [image, 3]}


def test_a_folder_called_like_a_package_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugin, "TRACKERS", {"only_a_folder": "a:A", "json": "b:B", "no_such_module": "c:C"})
    assert plugin.drivetrain_trackers() == {"json": "b:B"}
