"""What a loader needs to know of the run, and how data says that it is sharded already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain.backend import Backend
from drivetrain.data.active import ActiveLoaders
from drivetrain.errors import UsageError
from drivetrain.kwargs import DataLoaderConfiguration

if TYPE_CHECKING:
    from drivetrain.runtime.interruption import Interruption

Data = TypeVar("Data")


@dataclass(frozen=True)
class LoadingContext:
    """The run, as far as loaders are concerned.

    Args:
        backend: started; its topology says which share is this rank's.
        config: how samples are shared out.
        base_seed: the same on every rank; each loader's order is derived from it.
        put_on_device: move batches to the backend's device.
        active: notes which loader's batch is current.
        rng_types: random states to synchronise at the beginning of each pass, at the cost of a collective; the order of
            samples needs none (``"generator"`` therefore costs nothing).
        interruption: is told where a training step has ended; ``None`` where nobody wants to stop there.
    """

    backend: Backend
    config: DataLoaderConfiguration
    base_seed: int
    put_on_device: bool
    active: ActiveLoaders
    rng_types: tuple[str, ...] = ()
    interruption: Interruption | None = None

    @property
    def dp_rank(self) -> int:
        return self.backend.topology.dp_rank

    @property
    def dp_size(self) -> int:
        return self.backend.topology.dp_size


def already_sharded(data: Data) -> Data:
    """Mark a dataset or a loader whose every rank already yields its own share, so that it is not cut a second time.

    The mark is the attribute ``drivetrain_sharded = True``, which a class may also set for itself. Without it every
    dataset and loader is taken to hold all samples on every rank. (What ``datasets.distributed.split_dataset_by_node``
    returns is recognised without a mark.)

    Returns:
        The same object.

    Raises:
        UsageError: the object takes no attributes.
    """
    try:
        data.drivetrain_sharded = True  # type: ignore[attr-defined]
    except AttributeError as error:
        raise UsageError(
            f"{type(data).__name__} cannot be marked as already sharded",
            cure="Wrap it in a class of your own with the attribute drivetrain_sharded = True.",
        ) from error
    return data


def is_sharded(data: Any) -> bool:
    """Whether this dataset or loader yields only this rank's share."""
    mark = getattr(data, "drivetrain_sharded", None)
    if mark is not None:
        return bool(mark)
    # datasets.IterableDataset keeps rank and world size of split_dataset_by_node here.
    return getattr(getattr(data, "_distributed", None), "world_size", 1) > 1
