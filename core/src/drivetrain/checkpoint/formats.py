"""Checkpoint formats of other programs that plugins bring: what such a plugin implements, and how one is found."""

from __future__ import annotations

import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.errors import CheckpointError, UnsupportedError, did_you_mean, sentences
from drivetrain.registry import get_registry, known_extras, pip_line

if TYPE_CHECKING:
    from drivetrain.checkpoint.foreign import Foreign
    from drivetrain.checkpoint.saved import SavedModel


class CheckpointFormat(ABC):
    """Reads another program's checkpoints, perhaps writes them. The hook ``drivetrain_checkpoint_formats`` names it.

    One process works alone, on the CPU, with one tensor in memory at a time; the other program need not be installed.
    Nothing that is read may be executed: pickles are read by ``drivetrain.api.load_pickle``.

    Attributes:
        options: what :meth:`write` can be told, each with one sentence.
    """

    options: Mapping[str, str] = {}

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Whether this is such a checkpoint, by the names of its files; opens none that is large."""

    @abstractmethod
    def read(self, path: Path) -> Foreign:
        """What is in it; tensors are read when they are asked for. Raises :class:`CheckpointError`."""

    def write(self, saved: SavedModel, target: Path, options: Mapping[str, str]) -> list[str]:
        """Write a Drivetrain checkpoint's model as such a checkpoint.

        Args:
            saved: what to write.
            target: a new, empty folder; renamed to its final name when this returns.
            options: as the user wrote them; names are checked to be in :attr:`options`.

        Returns:
            Sentences about what could not be carried over.
        """
        raise UnsupportedError(f"{type(self).__name__} reads checkpoints and writes none")


def format_names() -> list[str]:
    """Names of the formats that installed plugins bring."""
    return sorted(get_registry().checkpoint_formats())


def load_format(name: str, also: tuple[str, ...] = ()) -> CheckpointFormat:
    """The format of this name.

    Args:
        name: as the plugin calls it.
        also: names that are known without a plugin, for the message.

    Raises:
        CheckpointError: no installed plugin brings it.
    """
    targets = get_registry().checkpoint_formats()
    if name not in targets:
        known = [*also, *sorted(targets)]
        raise CheckpointError(
            sentences(f"no installed plugin brings the checkpoint format {name!r}.", did_you_mean(name, known)),
            cure=f"Type: {pip_line(name)}." if name in known_extras() else f"Known here: {', '.join(known) or 'none'}.",
        )
    module, _, attribute = targets[name].partition(":")
    kind: Any = getattr(import_module(module), attribute)
    if not issubclass(kind, CheckpointFormat):
        raise CheckpointError(f"{targets[name]} is no CheckpointFormat", cure="Tell the plugin's author.")
    made: CheckpointFormat = kind()
    return made


def convert_to(
    source: str | Path, target: str | Path, name: str, options: Mapping[str, str] | None = None, *, index: int = 0
) -> list[str]:
    """Write one of our checkpoints in a plugin's format. Not collective.

    Args:
        source: folder that ``save_state`` wrote; every file is checked first.
        target: folder of the other program's checkpoint; must not exist, and appears whole or not at all.
        name: of the format.
        options: see the format's ``options``.
        index: which of the run's models.

    Returns:
        Sentences about what could not be carried over.

    Raises:
        CheckpointError: nothing to read, nobody to write it, an unknown option, or ``target`` exists.
    """
    from drivetrain.checkpoint.saved import read_saved

    path, given = Path(target).absolute(), dict(options or {})
    if path.exists():
        raise CheckpointError(f"{path} exists already", cure="Name a folder that does not; nothing was written.")
    writer = load_format(name)
    for option in given:
        if option not in writer.options:
            known = "; ".join(f"{key}: {text}" for key, text in writer.options.items())
            raise CheckpointError(
                sentences(f"the format {name} has no option {option!r}.", did_you_mean(option, writer.options)),
                cure=f"Its options: {known or 'none'}.",
            )
    saved = read_saved(source, index)
    staging = path.with_name(f".{path.name}.unfinished-{secrets.token_hex(6)}")
    staging.mkdir(parents=True)
    try:
        left_out = writer.write(saved, staging, given)
        staging.rename(path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return left_out
