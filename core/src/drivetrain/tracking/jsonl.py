"""A tracker without dependencies that writes one line of JSON for each call of ``log``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from drivetrain.tracking import GeneralTracker


def json_value(value: Any) -> Any:
    """``value`` in JSON types; only the exact type may be lost.

    Tensors and arrays become numbers or nested lists (a 0-d tensor a number; waits for the device). ``nan`` and the
    infinities, which JSON does not have, become ``"nan"``, ``"inf"``, ``"-inf"``. Anything else becomes text.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    if callable(getattr(value, "tolist", None)):
        return json_value(value.tolist())
    if isinstance(value, (Sequence, AbstractSet)):
        return [json_value(each) for each in value]
    return str(value)


class JSONLTracker(GeneralTracker):
    """Appends to ``<logging_dir>/<run_name>/metrics.jsonl``; the run's configuration goes to ``config.json`` beside it.

    A line holds ``step`` (or null), ``time`` (seconds since 1970) and the values. A resumed run goes on in the same
    file. Each line is flushed, so that a crash loses none.

    Args:
        run_name: name of the folder.
        logging_dir: where that folder is made.
    """

    name = "jsonl"
    requires_logging_directory = True
    main_process_only = True

    def __init__(self, run_name: str, logging_dir: str | Path) -> None:
        super().__init__()
        self.path = Path(logging_dir) / run_name / "metrics.jsonl"

    @property
    def tracker(self) -> Path:
        """Path of the file."""
        return self.path

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(json_value(values), indent=2, allow_nan=False)
        (self.path.parent / "config.json").write_text(text + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append one line; ``kwargs`` become keys of it too."""
        line = {"step": step, "time": round(time.time(), 3), **json_value({**values, **kwargs})}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
