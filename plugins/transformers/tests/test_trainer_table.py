"""The table of Trainer's page: the record is whole and within its tolerances, and a part of it is measured again."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import trainer_table as table

if any(find_spec(name) is None for name in ("accelerate", "transformers", "peft")):
    pytest.skip("Transformers, Accelerate and PEFT are not installed", allow_module_level=True)

REFUSED = {("pp 2", "generate"), ("pp 2, ddp x 2", "generate")}
"""An encoder that ``generate`` calls by itself lies on one stage."""


def assert_within(name: str, feature: str, found: float | str) -> None:
    if (name, feature) in REFUSED:
        assert "calls the encoder of T5ForConditionalGeneration by itself" in str(found)
        return
    assert not isinstance(found, str), (name, feature, found)
    tolerance = {"bf16": table.TOLERANCE_BF16, "generate": 0.0}.get(feature, table.TOLERANCE)
    assert found <= tolerance, (name, feature)


def test_the_record() -> None:
    record = json.loads(table.RECORD.read_text(encoding="utf-8"))
    assert list(record) == list(table.BACKENDS)
    for name, cells in record.items():
        assert list(cells) == list(table.FEATURES)
        for feature, found in cells.items():
            assert_within(name, feature, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp x 3", "fsdp x 2", "tp 2", "pp 2"])
def test_it_is_measured_again(name: str, tmp_path: Path) -> None:
    features = ("ragged labels", "evaluation", "resume", "bf16")
    expected = table.expected(str(tmp_path), features)
    for feature, found in table.measure(name, expected, str(tmp_path), features).items():
        assert_within(name, feature, found)
