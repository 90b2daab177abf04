"""Names of successive checkpoints, which of them is the newest, and how many are kept. No torch, not collective.

On a shared file system every rank sees the same folders, yet not at the same instant: let the main process ask and
broadcast the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from drivetrain.checkpoint.files import discard, sweep
from drivetrain.checkpoint.manifest import Manifest, read_manifest
from drivetrain.errors import CheckpointError, CheckpointNotFoundError

_NAME = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True, slots=True)
class Named:
    """One complete checkpoint: its iteration and time as its manifest says, and its folder."""

    iteration: int
    created: float
    path: Path


class Naming:
    """``<folder>/checkpoint_{iteration}``.

    Args:
        folder: where the checkpoints lie, usually ``<project_dir>/checkpoints``; need not exist yet.
        total_limit: how many to keep, at least 1; ``None`` keeps all.
        iteration: number of the next one.
    """

    def __init__(self, folder: str | Path, total_limit: int | None = None, iteration: int = 0) -> None:
        if total_limit is not None and total_limit < 1:
            raise CheckpointError(f"total_limit must be at least 1, not {total_limit}", cure="None keeps all of them.")
        self.folder, self.total_limit, self.iteration = Path(folder), total_limit, iteration

    def complete(self) -> list[Named]:
        """The complete checkpoints, oldest first. Strangers (another name, no manifest, not ours) are passed over.

        Order and number are what the manifests say (``info["iteration"]``, then the time); the folder's own number
        counts only for a checkpoint that was saved without one.
        """
        found = []
        for path, number in self._numbered():
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                # Half-written by a dead process, damaged, or not ours: it can neither be the newest nor be pruned.
                continue
            iteration = manifest.info.get("iteration", number)
            found.append(Named(iteration if isinstance(iteration, int) else number, manifest.created, path))
        return sorted(found, key=lambda one: (one.iteration, one.created))

    def latest(self) -> Path:
        """Folder of the newest complete checkpoint. Raises :class:`CheckpointNotFoundError` when there is none."""
        complete = self.complete()
        if not complete:
            raise CheckpointNotFoundError(
                f"{self.folder} holds no complete checkpoint",
                cure="Save one first, or give load_state the folder of another run's checkpoint.",
            )
        return complete[-1].path

    def next_path(self) -> Path:
        """Folder of the next save.

        Raises:
            CheckpointError: something already lies there, so that another run's checkpoint would be replaced.
        """
        path = self.folder / f"checkpoint_{self.iteration}"
        if path.exists():
            raise CheckpointError(
                f"{path} exists already: another run saved there",
                cure=f"Resume that run with load_state(), choose another project_dir, or set iteration="
                f"{self._highest() + 1} in ProjectConfiguration.",
            )
        return path

    def saved(self) -> list[Path]:
        """Count a complete save: move on to the next number, and :meth:`prune`."""
        self.iteration += 1
        return self.prune()

    def prune(self) -> list[Path]:
        """Delete the oldest complete checkpoints beyond ``total_limit``; returns those."""
        removed = []
        if self.total_limit is not None:
            for old in self.complete()[: -self.total_limit]:
                discard(old.path)
                removed.append(old.path)
        return removed

    def resumed(self, manifest: Manifest) -> None:
        """Continue numbering after a loaded checkpoint, and after everything that already lies in the folder."""
        saved = manifest.info.get("iteration")
        self.iteration = 1 + max(self._highest(), saved if isinstance(saved, int) else -1, self.iteration - 1)
        sweep(self.folder)

    def _highest(self) -> int:
        return max((number for _, number in self._numbered()), default=-1)

    def _numbered(self) -> list[tuple[Path, int]]:
        if not self.folder.is_dir():
            return []
        names = ((path, _NAME.fullmatch(path.name)) for path in self.folder.iterdir() if path.is_dir())
        return [(path, int(match[1])) for path, match in names if match]
