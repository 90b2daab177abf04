"""Makes figures of matplotlib and writes them as files, for every command that draws.

matplotlib is imported when the first function is called. No pyplot: nothing global is touched, and no window system is
asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours that people who tell red from green badly can tell apart (Okabe and Ito)."""

DOTS_PER_INCH = 150


def check(path: Path, install: str, otherwise: str = "") -> None:
    """Refuse a picture that could not be written, before the work for it begins. Not collective.

    Args:
        path: of the picture; its suffix decides the format.
        install: the command that installs matplotlib, as :func:`drivetrain.api.programs.pip_line` returns it.
        otherwise: a sentence on what the caller can do without a picture.

    Raises:
        UsageError: matplotlib is not installed, the suffix is that of no picture, or there is no such folder.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # noqa: F401 (whoever has the one can lack the other)
    except ImportError as error:
        cure = f"Type: {install}" if not otherwise else f"Type: {install}. {otherwise}"
        raise UsageError("a picture needs matplotlib, which is not installed", cure=cure) from error
    if path.suffix.lstrip(".").lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise UsageError(f"{path.name!r} has no suffix of a picture", cure="Use .png or .svg.")
    if not path.parent.is_dir():
        raise UsageError(
            f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}",
            cure="Make it, or name a file elsewhere.",
        )


def figure(width: float, height: float) -> Figure:
    """Return an empty figure of a width and a height in inches, whose parts are moved to where they have room."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(made: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix.

    Raises:
        UsageError: the file cannot be written there.
    """
    try:
        made.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}", cure="Name a file elsewhere.") from error
