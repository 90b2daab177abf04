"""The classes of loaders that scripts for Accelerate ask about by ``isinstance``: what a prepared loader is of them."""

from __future__ import annotations

from typing import Any, Never

from drivetrain.data.loader import PreparedDataLoader
from drivetrain.errors import UsageError


class _Kind(type):
    """A class that has instances without having made them."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, PreparedDataLoader) and instance.is_dispatched == cls._dispatched

    def __call__(cls, *_: Any, **__: Any) -> Never:
        raise UsageError(
            f"a {cls.__name__} is not made by hand",
            cure="Write accelerator.prepare(loader), or accelerator.prepare_data_loader(loader).",
        )

    _dispatched = False


class DataLoaderShard(metaclass=_Kind):
    """A prepared loader of which every rank reads its own share. For ``isinstance``."""


class DataLoaderDispatcher(metaclass=_Kind):
    """A prepared loader that the main process reads for all (``dispatch_batches``). For ``isinstance``."""

    _dispatched = True
