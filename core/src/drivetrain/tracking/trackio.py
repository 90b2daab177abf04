"""Tracker for Trackio, which writes to a local database; ``trackio`` is imported when it starts."""

from __future__ import annotations

from typing import Any

from drivetrain.tracking import GeneralTracker
from drivetrain.tracking.values import without_tensors


class TrackioTracker(GeneralTracker):
    """One ``trackio`` run, in ``TRACKIO_DIR``.

    Args:
        run_name: the project in ``trackio``'s words.
        **kwargs: arguments of ``trackio.init``.
    """

    name = "trackio"
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
        import trackio

        self.run = trackio.init(**{"project": self.run_name, **self.kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the values; ``trackio`` writes them with what is logged first."""
        self.run.config.update(without_tensors(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """As ``trackio.Run.log``, which takes ``kwargs``; its images and tables go through as they are."""
        self.run.log(without_tensors(values), step=step, **kwargs)

    def finish(self) -> None:
        self.run.finish()
