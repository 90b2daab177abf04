"""Tracker for Weights & Biases, online or offline; ``wandb`` is imported when it starts."""

from __future__ import annotations

from typing import Any

from drivetrain.tracking import GeneralTracker


class WandBTracker(GeneralTracker):
    """One ``wandb`` run.

    Args:
        run_name: the project in ``wandb``'s words.
        **kwargs: arguments of ``wandb.init``.
    """

    name = "wandb"
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
        import wandb

        self.run = wandb.init(**{"project": self.run_name, **self.kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """As ``wandb.Run.log``, which takes ``kwargs``."""
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name; ``kwargs`` go to ``wandb.Image``."""
        import wandb

        images = {name: [wandb.Image(image, **kwargs) for image in group] for name, group in values.items()}
        self.run.log(images, step=step)

    def finish(self) -> None:
        self.run.finish()
