"""A progress bar on the main process, drawn by ``tqdm`` where it is installed, else by rich or as plain lines."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Self, TextIO

from drivetrain.errors import UsageError, did_you_mean
from drivetrain.logging import current_rank, get_logger

_logger = get_logger(__name__)

_STYLES = frozenset(
    {
        "ascii",
        "bar_format",
        "colour",
        "delay",
        "dynamic_ncols",
        "gui",
        "lock_args",
        "maxinterval",
        "mininterval",
        "miniters",
        "ncols",
        "nrows",
        "position",
        "smoothing",
        "unit_divisor",
        "unit_scale",
        "write_bytes",
    }
)
"""What only tqdm's own bar can honour: looks and timing, nothing that a script computes with."""


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar with tqdm's arguments and methods.

    Args:
        *args: as for ``tqdm.auto.tqdm``: the iterable first.
        main_process_only: the other processes iterate without a bar.
        **kwargs: as for ``tqdm.auto.tqdm``. Without that package a warning lists its styles once.

    Returns:
        tqdm's own object where the package is installed, else a :class:`ProgressBar`.
    """
    if main_process_only and current_rank() != 0:
        kwargs["disable"] = True
    if importlib.util.find_spec("tqdm") is not None:
        return importlib.import_module("tqdm.auto").tqdm(*args, **kwargs)
    return ProgressBar(*args, **kwargs)


class ProgressBar:
    """What :func:`tqdm` gives where the package tqdm is not installed.

    Args:
        iterable: what to iterate over; ``None`` for a bar that is moved by :meth:`update`.
        desc: words before the bar.
        total: number of items; ``None`` = the length of the iterable, if it has one.
        leave: keep the finished bar on the screen.
        file: where to write; ``None`` = stderr.
        disable: show nothing. ``None`` shows only on a terminal.
        unit: what an item is called.
        initial: number of items that are done already.
        postfix: values after the bar.
        **styles: further arguments of tqdm, which have no effect here.

    Attributes:
        n: items done.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: str | None = None,
        total: float | None = None,
        leave: bool | None = True,
        file: TextIO | None = None,
        *,
        disable: bool | None = False,
        unit: str = "it",
        initial: float = 0,
        postfix: Mapping[str, Any] | None = None,
        **styles: Any,
    ) -> None:
        unknown = sorted(set(styles) - _STYLES)
        if unknown:
            raise UsageError(f"tqdm has no argument {unknown[0]!r}", cure=did_you_mean(unknown[0], _STYLES))
        if styles:
            named = ", ".join(sorted(styles))
            _logger.warning_once("Without the package tqdm (pip install tqdm) a progress bar has no %s.", named)
        self.iterable, self.leave, self.unit, self.initial, self.n = iterable, leave, unit, initial, initial
        self.total = total if total is not None or not isinstance(iterable, Sized) else len(iterable)
        self.desc, self.postfix = desc or "", ""
        stream = sys.stderr if file is None else file
        terminal = stream.isatty()
        self.disable = not terminal if disable is None else disable
        self._view: _RichView | _LineView | None = None
        if not self.disable:
            self._view = _RichView(stream) if terminal else _LineView(stream)
            self._view.open(self)
        if postfix:
            self.set_postfix(postfix)

    def __iter__(self) -> Iterator[Any]:
        if self.iterable is None:
            raise UsageError("this progress bar has nothing to iterate over", cure="Pass an iterable, or use update().")
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("the total of this progress bar is not known")
        return int(self.total)

    def __bool__(self) -> bool:
        return self.total is None or self.total > 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def update(self, n: float | None = 1) -> None:
        """Count ``n`` more items."""
        self.n += n or 0
        self.refresh()

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Change the words before the bar."""
        self.desc = desc or ""
        if refresh:
            self.refresh()

    set_description_str = set_description

    def set_postfix(self, ordered_dict: Mapping[str, Any] | None = None, refresh: bool = True, **kwargs: Any) -> None:
        """Change the values after the bar."""
        values = {**(ordered_dict or {}), **kwargs}
        self.set_postfix_str(", ".join(f"{key}={_short(value)}" for key, value in values.items()), refresh)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Change the text after the bar."""
        self.postfix = s
        if refresh:
            self.refresh()

    def reset(self, total: float | None = None) -> None:
        """Start again at nothing, with another total if one is given."""
        self.n, self.total = 0, self.total if total is None else total
        self.refresh()

    def refresh(self) -> None:
        """Show the current state."""
        if self._view is not None:
            self._view.show(self)

    def write(self, s: str, file: TextIO | None = None, end: str = "\n") -> None:
        """Print text without breaking the bar."""
        if self._view is not None and file is None:
            self._view.write(s + end)
        elif not self.disable:
            (file or sys.stdout).write(s + end)

    def close(self) -> None:
        """Show the last state and release the screen; may be called twice."""
        if self._view is not None:
            view, self._view = self._view, None
            view.close(self)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class _LineView:
    """For log files: a line at each tenth of the total; where that is unknown, at each doubling."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.next = stream, 1.0

    def open(self, bar: ProgressBar) -> None:
        self._aim(bar)

    def _aim(self, bar: ProgressBar) -> None:
        """The count at which the next line is due."""
        if bar.total:
            tenth = bar.total / 10
            self.next = min(bar.total, tenth * (bar.n // tenth + 1))
        else:
            self.next = max(1.0, 2.0 * bar.n)

    def show(self, bar: ProgressBar) -> None:
        if bar.n >= self.next and not (bar.total and bar.n >= bar.total):
            self._line(bar)
            self._aim(bar)

    def _line(self, bar: ProgressBar) -> None:
        count = f"{bar.n:g} {bar.unit}" if not bar.total else f"{bar.n:g}/{bar.total:g} {bar.unit}"
        words = [f"{bar.desc.rstrip(': ')}:" if bar.desc else "", count, f"[{bar.postfix}]" if bar.postfix else ""]
        self.stream.write(" ".join(filter(None, words)) + "\n")
        self.stream.flush()

    def write(self, text: str) -> None:
        self.stream.write(text)

    def close(self, bar: ProgressBar) -> None:
        if bar.leave is not False:
            self._line(bar)


class _RichView:
    """For terminals. Open bars share one display, since rich draws only one."""

    display: Any = None
    count: int = 0

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.task: Any = None

    def open(self, bar: ProgressBar) -> None:
        if _RichView.display is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            _RichView.display = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[postfix]}"),
                console=Console(file=self.stream),
            )
            _RichView.display.start()
        _RichView.count += 1
        self.task = _RichView.display.add_task(bar.desc, total=bar.total, completed=bar.n, postfix=bar.postfix)

    def show(self, bar: ProgressBar) -> None:
        _RichView.display.update(self.task, completed=bar.n, total=bar.total, description=bar.desc, postfix=bar.postfix)

    def write(self, text: str) -> None:
        _RichView.display.console.print(text, end="", markup=False, highlight=False)

    def close(self, bar: ProgressBar) -> None:
        self.show(bar)
        if bar.leave is False:
            _RichView.display.remove_task(self.task)
        _RichView.count -= 1
        if _RichView.count == 0:
            _RichView.display.stop()
            _RichView.display = None
