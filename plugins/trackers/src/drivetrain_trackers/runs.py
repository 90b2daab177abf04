"""Trackers for libraries that keep runs of a project: Weights & Biases, online or offline, and Trackio, locally."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from drivetrain import GeneralTracker
from drivetrain_trackers.values import without_tensors


class _RunTracker(GeneralTracker):
    """One run of a project. The library, which has the tracker's name, is imported when it starts.

    Args:
        run_name: the project in the library's words.
        **kwargs: arguments of its ``init``.
    """

    name: str
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.kwargs = run_name, kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run object; ``None`` before :meth:`start`."""
        return self.run

    def start(self) -> None:
        self.run = import_module(self.name).init(**{"project": self.run_name, **self.kwargs})

    def finish(self) -> None:
        self.run.finish()


class WandBTracker(_RunTracker):
    """One ``wandb`` run, online or offline. Arguments as :class:`_RunTracker`."""

    name = "wandb"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Call ``wandb.Run.log`` with ``kwargs``."""
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name; ``kwargs`` go to ``wandb.Image``."""
        import wandb

        images = {name: [wandb.Image(image, **kwargs) for image in group] for name, group in values.items()}
        self.run.log(images, step=step)


class TrackioTracker(_RunTracker):
    """One ``trackio`` run, in a local database (``TRACKIO_DIR``). Arguments as :class:`_RunTracker`."""

    name = "trackio"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the values; ``trackio`` writes them with what is logged first."""
        self.run.config.update(without_tensors(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Call ``trackio.Run.log`` with ``kwargs``; its images and tables are passed unchanged."""
        self.run.log(without_tensors(values), step=step, **kwargs)
