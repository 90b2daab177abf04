"""A tracker without dependencies that writes one line of JSON for each call of ``log``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from drivetrain.tracking import GeneralTracker
from drivetrain.tracking.values import plain


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
        text = json.dumps(plain(values), indent=2, allow_nan=False)
        (self.path.parent / "config.json").write_text(text + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append one line; ``kwargs`` become keys of it too."""
        line = {"step": step, "time": round(time.time(), 3), **plain({**values, **kwargs})}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
