"""The torch half of the data room: loaders that follow the plans of :mod:`drivetrain.data`."""

from drivetrain.runtime.loading.context import LoadingContext, already_sharded
from drivetrain.runtime.loading.loader import PreparedDataLoader, even_batches_as
from drivetrain.runtime.loading.metrics import current_batch, gather_for_metrics, gather_shared
from drivetrain.runtime.loading.prepare import is_loader, prepare_data_loader
from drivetrain.runtime.loading.skipping import skip_first_batches

__all__ = [
    "LoadingContext",
    "PreparedDataLoader",
    "already_sharded",
    "current_batch",
    "even_batches_as",
    "gather_for_metrics",
    "gather_shared",
    "is_loader",
    "prepare_data_loader",
    "skip_first_batches",
]
