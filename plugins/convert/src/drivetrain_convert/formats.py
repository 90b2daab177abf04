"""The base class of checkpoint formats that plugins add, and their lookup by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.api import CheckpointError, UnsupportedError
from drivetrain.api.programs import pip_line

if TYPE_CHECKING:
    from drivetrain_convert.foreign import ForeignCheckpoint
    from drivetrain_convert.writing import SavedModel


GROUP = "drivetrain.checkpoint_formats"
"""Entry points named after formats: each a :class:`CheckpointFormat`, whose module does not need the other program."""


class CheckpointFormat(ABC):
    """Reads another program's checkpoints, perhaps writes them. An entry point of :data:`GROUP` names it.

    One process works alone, on the CPU, with one tensor in memory at a time; the other program need not be installed.
    Nothing that is read may be executed: pickles are read by :func:`drivetrain_convert.load_pickle`.

    Attributes:
        options: options of :meth:`write`, each with one sentence.
    """

    options: Mapping[str, str] = {}

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Whether this is such a checkpoint, by the names of its files; opens none that is large."""

    @abstractmethod
    def read(self, path: Path) -> ForeignCheckpoint:
        """Read its content; tensors are read when they are used. Raises :class:`CheckpointError`."""

    def write(self, saved: SavedModel, target: Path, options: Mapping[str, str]) -> list[str]:
        """Write a Drivetrain checkpoint's model as such a checkpoint.

        Args:
            saved: what to write.
            target: a new, empty folder; renamed to its final name when this returns.
            options: as the user wrote them; names are checked to be in :attr:`options`.

        Returns:
            Sentences about what could not be carried over.
        """
        raise UnsupportedError(
            f"{type(self).__name__} reads checkpoints and writes none",
            cure="`drivetrain convert --help` lists the formats that can be written.",
        )


def installed_formats() -> dict[str, metadata.EntryPoint]:
    """The formats that installed plugins bring, sorted by name. Imports none of them.

    Raises:
        CheckpointError: two plugins bring one name.
    """
    found: dict[str, metadata.EntryPoint] = {}
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        if point.name in found:
            owners = " and ".join(_owner(each) for each in (found[point.name], point))
            raise CheckpointError(
                f"two plugins bring a checkpoint format named {point.name!r}: {owners}",
                cure="Uninstall one of the two.",
            )
        found[point.name] = point
    return found


def _owner(point: metadata.EntryPoint) -> str:
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load_format(name: str, also: tuple[str, ...] = ()) -> CheckpointFormat:
    """The format of this name.

    Args:
        name: as the plugin calls it.
        also: names that are known without a plugin, for the message.

    Raises:
        CheckpointError: no installed plugin provides it.
    """
    formats = installed_formats()
    if name not in formats:
        known = [*also, *formats]
        can_install = name in (metadata.metadata("drivetrain").get_all("Provides-Extra") or ())
        raise CheckpointError(
            f"no installed plugin brings the checkpoint format {name!r}.{did_you_mean(name, known)}",
            cure=f"Type: {pip_line(name)}" if can_install else f"Known here: {', '.join(known) or 'none'}.",
        )
    kind: Any = formats[name].load()
    if not (isinstance(kind, type) and issubclass(kind, CheckpointFormat)):
        raise CheckpointError(f"{formats[name].value} is no CheckpointFormat", cure="Tell the plugin's author.")
    made: CheckpointFormat = kind()
    return made


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with a space before it, empty when nothing is near."""
    near = get_close_matches(word, list(candidates), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
