"""``skip_first_batches``: begin an epoch in its middle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from drivetrain.errors import UsageError
from drivetrain.runtime.loading.loader import PreparedDataLoader
from drivetrain.runtime.loading.source import clone


@final
class SkippedLoader:
    """A plain loader without its first batches, in the first pass only; its other attributes are the loader's own."""

    def __init__(self, loader: Any, num_batches: int) -> None:
        self.base_dataloader, self._pending = loader, num_batches

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self._pending, 0)

    def __iter__(self) -> Iterator[Any]:
        loader, skip = self.base_dataloader, self._pending
        self._pending = 0
        if not skip:
            yield from loader
        elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            # Only indices are passed over, no sample is fetched. A second pass needs no persistent workers of this one.
            indices = islice(iter(getattr(loader, name)), skip, None)
            yield from clone(loader, {name: indices, "persistent_workers": False})
        else:
            yield from islice(loader, skip, None)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """A view of a loader whose next pass begins at batch ``num_batches`` of the current epoch.

    The number counts from the beginning of the epoch: after ``load_state`` has restored the position behind that batch,
    nothing is skipped twice. Passes after the first show full epochs, and so does the loader itself. A prepared loader
    and its views share one position, so a checkpoint saved while the view is iterated is right.

    Args:
        loader: a prepared loader, or any other iterable.
        num_batches: batches of this rank.

    Raises:
        UsageError: a negative number.
    """
    if num_batches < 0:
        raise UsageError(f"cannot skip {num_batches} batches")
    if isinstance(loader, PreparedDataLoader):
        return loader.skipping(num_batches)
    return SkippedLoader(loader, num_batches)
