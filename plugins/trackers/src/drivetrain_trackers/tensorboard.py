"""Tracker for TensorBoard, through ``torch.utils.tensorboard``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drivetrain import GeneralTracker
from drivetrain.api.programs import json_value
from drivetrain_trackers.values import flat, number


class TensorBoardTracker(GeneralTracker):
    """Writes event files to ``<logging_dir>/<run_name>``.

    Args:
        run_name: name of the folder.
        logging_dir: where that folder is made.
        **kwargs: arguments of ``torch.utils.tensorboard.SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True
    main_process_only = True

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__()
        self.directory, self.kwargs = Path(logging_dir) / run_name, kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``; ``None`` before :meth:`start`."""
        return self.writer

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.directory), **self.kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the values as text and to ``config.json``, the simple ones as hyper-parameters to compare too."""
        text = json.dumps(json_value(values), indent=2, allow_nan=False)
        (self.directory / "config.json").write_text(text + "\n", encoding="utf-8")
        self.writer.add_text("config", f"```json\n{text}\n```")
        comparable = {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str))}
        self.writer.add_hparams(comparable, metric_dict={}, run_name="hparams")
        self.writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers become scalars, mappings groups of scalars, the rest text; ``kwargs`` go to ``add_*``."""
        for key, value in values.items():
            simple = value if isinstance(value, (str, dict)) else number(value)
            if isinstance(simple, dict):
                group = {name: number(each) for name, each in flat(simple, "/").items()}
                self.writer.add_scalars(key, group, step, **kwargs)
            elif isinstance(simple, (int, float)):
                self.writer.add_scalar(key, simple, step, **kwargs)
            else:
                self.writer.add_text(key, str(simple), step, **kwargs)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images by name, shape ``[num, ...]``; ``kwargs`` go to ``add_images``."""
        for key, value in values.items():
            self.writer.add_images(key, value, step, **kwargs)

    def finish(self) -> None:
        self.writer.close()
