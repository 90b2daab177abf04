"""Tracker for MLflow, with a server or a local database; ``mlflow`` is imported when it starts."""

from __future__ import annotations

import os
from typing import Any

from drivetrain import GeneralTracker, get_logger
from drivetrain.api.programs import json_value
from drivetrain_trackers.values import flat, number

_logger = get_logger(__name__)

_PARAMETERS = 100
"""Parameters that MLflow takes in one call."""
_LENGTH = 6000
"""Characters of a parameter's value that MLflow's databases take."""


class MLflowTracker(GeneralTracker):
    """One run of MLflow, at ``MLFLOW_TRACKING_URI``; without that variable in ``mlflow.db`` of the working folder.

    Args:
        experiment_name: the experiment, made when there is none; ``MLFLOW_EXPERIMENT_NAME`` wins over it.
        logging_dir: folder or address of the artifacts of an experiment that is made; ``None`` = MLflow's choice.
        run_id: a run to go on with.
        run_name: name of a new run.
        nested_run: begin the run inside of the one that is active.
        tags: of the run.
        description: of the run.
    """

    name = "mlflow"
    requires_logging_directory = False
    main_process_only = True

    def __init__(
        self,
        experiment_name: str,
        logging_dir: str | os.PathLike[str] | None = None,
        *,
        run_id: str | None = None,
        run_name: str | None = None,
        nested_run: bool = False,
        tags: dict[str, Any] | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = None if logging_dir is None else str(logging_dir)
        self._options: dict[str, Any] = {
            "run_id": run_id,
            "run_name": run_name,
            "nested": nested_run,
            "tags": tags,
            "description": description,
        }
        self.active_run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``mlflow.ActiveRun``; ``None`` before :meth:`start`."""
        return self.active_run

    def start(self) -> None:
        import mlflow

        experiment = mlflow.get_experiment_by_name(self.experiment_name)
        number = (
            mlflow.create_experiment(self.experiment_name, artifact_location=self.logging_dir)
            if experiment is None
            else experiment.experiment_id
        )
        self.active_run = mlflow.start_run(experiment_id=number, **self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the values as parameters, dotted where they are nested, and whole in the artifact ``config.json``."""
        import mlflow

        mlflow.log_dict(json_value(values), "config.json", run_id=self.active_run.info.run_id)
        texts = {key: str(value) for key, value in flat(json_value(values), ".").items()}
        short = [(key, text) for key, text in texts.items() if len(text) <= _LENGTH]
        for first in range(0, len(short), _PARAMETERS):
            mlflow.log_params(dict(short[first : first + _PARAMETERS]), run_id=self.active_run.info.run_id)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, nested ones as ``group/name``; ``kwargs`` go to ``mlflow.log_metrics``."""
        import mlflow

        found = {key: number(value) for key, value in flat(values, "/").items()}
        numbers = {key: value for key, value in found.items() if isinstance(value, (int, float))}
        for key in found.keys() - numbers.keys():
            _logger.warning_once("mlflow keeps numbers; %s is a %s and is left out.", key, type(found[key]).__name__)
        mlflow.log_metrics(numbers, step=step, **{"run_id": self.active_run.info.run_id, **kwargs})

    def finish(self) -> None:
        import mlflow

        mlflow.end_run()
