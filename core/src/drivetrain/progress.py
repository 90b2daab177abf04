"""The progress bar of ``tqdm``, on the main process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from time import perf_counter
from typing import Any

from drivetrain.logging import current_rank


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, with its arguments and methods.

    Over a prepared loader the bar also shows what a slow run is asked first: samples per second of all processes, the
    time of a batch, the share of it that the loop waited for data, and the most memory that this process has held so
    far (of its accelerator; on the CPU, of the process).

    Args:
        *args: as for tqdm: the iterable first.
        main_process_only: the other processes have a bar with the same methods and attributes, which counts as the main
            process's does and shows nothing.
        **kwargs: as for tqdm.
    """
    from tqdm.auto import tqdm as bar

    if main_process_only and current_rank() != 0:
        if kwargs.get("disable", False) is False:
            return _quiet()(*args, **kwargs)
        kwargs["disable"] = True
    iterable = args[0] if args else kwargs.get("iterable")
    samples = getattr(iterable, "total_batch_size", None)
    if kwargs.get("disable") or not isinstance(samples, int):
        return bar(*args, **kwargs)
    return _measuring(bar)(*args, **kwargs)


@cache
def _measuring(bar: Any) -> Any:
    """A class of tqdm, the terminal's or the notebook's, that also measures the loop around it."""

    class MeasuringBar(bar):  # type: ignore[misc]
        """A bar over a prepared loader."""

        iterable: Any
        _begun: float | None = None
        _ended = _waited = 0.0

        def __iter__(self) -> Iterator[Any]:
            loader, self.iterable = self.iterable, self._timed(self.iterable)
            try:
                yield from super().__iter__()
            finally:
                self.iterable = loader

        def _timed(self, loader: Any) -> Iterator[Any]:
            self._samples = loader.total_batch_size
            self._begun = asked = perf_counter()
            for batch in loader:
                self._ended = perf_counter()
                self._waited += self._ended - asked
                yield batch
                self._ended = asked = perf_counter()

        @property
        def format_dict(self) -> dict[str, Any]:
            parts: dict[str, Any] = super().format_dict
            batches = parts["n"] - (parts["initial"] or 0)
            if self._begun is None or batches < 1 or self._ended <= self._begun:
                return parts
            took = self._ended - self._begun
            each = took / batches
            told = (
                f"{_short(self._samples / each)} samples/s",
                f"{_short(1000 * each)} ms/batch",
                f"{self._waited / took:.0%} waiting for data",
                f"{_most_memory() / 2**20:.0f} MiB",
            )
            return {**parts, "postfix": ", ".join((*told, *filter(None, (parts["postfix"],))))}

    return MeasuringBar


_FILE = 4
"""Place of ``file`` among the arguments of tqdm."""


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        """Return the number of characters, which are dropped."""
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is kept."""


@cache
def _quiet() -> Any:
    """A class of tqdm that counts and shows nothing.

    A bar with ``disable=True`` has neither counts nor most attributes: a script that stops at ``bar.n`` would go on.
    """
    from tqdm.asyncio import tqdm as bar  # tqdm.auto's is a widget in a notebook

    class QuietBar(bar):  # type: ignore[misc]
        """The bar of a process whose progress is not shown."""

        monitor_interval = 0  # no thread that redraws it

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if len(args) > _FILE:
                args = (*args[:_FILE], _Nowhere(), *args[_FILE + 1 :])
            else:
                kwargs["file"] = _Nowhere()
            super().__init__(*args, **kwargs)

        def display(self, *_: Any, **__: Any) -> bool:
            """Show nothing."""
            return True

    return QuietBar


def _short(number: float) -> str:
    """At least two digits, and never an exponent."""
    return f"{number:.{0 if number >= 10 else 1}f}"


def _most_memory() -> int:
    """Bytes: the peak of this process's accelerator where it has one, else its largest resident set."""
    torch = sys.modules["torch"]  # imported by whoever prepared the loader; this module is one that does without
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
