"""Number checkpoints, find the newest one, and choose which to delete. No torch, not collective.

A number is given out once in a folder, above all that lie there, so the order of the numbers is the order of the saves,
whichever run made them.

On a shared file system every rank sees the same folders, yet not at the same instant: let the main process ask and
broadcast the answer.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from drivetrain.checkpoint import owner
from drivetrain.checkpoint.files import discard, sweep
from drivetrain.checkpoint.manifest import Manifest, read_manifest
from drivetrain.errors import CheckpointError, CheckpointNotFoundError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True, slots=True)
class Named:
    """One complete checkpoint.

    Args:
        number: in its folder's name.
        run: which run saved it, as its manifest says; empty when it was saved without.
        path: its folder.
    """

    number: int
    run: str
    path: Path


class Naming:
    """``<folder>/checkpoint_{iteration}``.

    Args:
        folder: where the checkpoints lie, usually ``<project_dir>/checkpoints``; need not exist yet.
        total_limit: how many of this run's to keep, at least 1; ``None`` keeps all.
        iteration: number of the next one, or higher where that is taken.
        run: tells this run and those that it continues from others that saved in the same folder.
    """

    def __init__(
        self, folder: str | Path, total_limit: int | None = None, iteration: int = 0, run: str = ""
    ) -> None:
        if total_limit is not None and total_limit < 1:
            raise CheckpointError(f"total_limit must be at least 1, not {total_limit}", cure="None keeps all of them.")
        self.folder, self.total_limit, self.iteration, self.run = Path(folder), total_limit, iteration, run

    def complete(self) -> list[Named]:
        """The complete checkpoints, oldest first. Strangers (another name, no manifest, not ours) are passed over."""
        found = []
        for path, number in self._numbered():
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                # Half-written by a dead process, damaged, or not ours: it can neither be the newest nor be pruned.
                continue
            found.append(Named(number, str(manifest.info.get("run", "")), path))
        return sorted(found, key=lambda one: (one.number, one.path.name))

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
        """Claim the folder and return that of the next save, whose number :attr:`iteration` then is.

        For the main process.

        Raises:
            CheckpointError: another living process saves in the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        owner.claim(self.folder, beside=True)
        self.iteration = max(self.iteration, self._highest() + 1)
        return self.path

    @property
    def path(self) -> Path:
        """Folder of the checkpoint with the number :attr:`iteration`."""
        return self.folder / f"checkpoint_{self.iteration}"

    def warn_of_others(self) -> None:
        """Say that a run that was begun anew finds checkpoints in its folder."""
        complete = self.complete()
        if complete:
            kept = "" if self.total_limit is None else ", and total_limit removes this run's only"
            logger.warning(
                "%s holds checkpoints of an earlier run, up to %s, and this run was begun anew: its own go on from "
                "checkpoint_%d%s. Call load_state() first to continue that run, or choose another project_dir.",
                self.folder,
                complete[-1].path.name,
                self.iteration,
                kept,
            )

    def saved(self, newest: Path) -> list[Path]:
        """Count a complete save: move on to the next number, and :meth:`prune`."""
        self.iteration += 1
        return self.prune(newest)

    def prune(self, newest: Path) -> list[Path]:
        """Delete this run's oldest complete checkpoints beyond ``total_limit``; returns those.

        Only what is older than ``newest``, which was just written, can be deleted, and nothing of other runs.

        Raises:
            CheckpointError: another process has taken the folder over, or ``newest`` is gone.
        """
        if self.total_limit is None:
            return []
        if owner.holds(self.folder):
            owner.check(self.folder)
        complete = self.complete()
        if newest.name not in (one.path.name for one in complete):
            raise CheckpointError(f"{newest}, which was just saved, is gone", cure="Look for what else removes it.")
        names = [one.path.name for one in complete]
        older = [one.path for one in complete[: names.index(newest.name)] if one.run == self.run]
        removed = older[: max(len(older) + 1 - self.total_limit, 0)]
        for path in removed:
            discard(path)
        return removed

    def resumed(self, manifest: Manifest) -> None:
        """Continue numbering after a loaded checkpoint, and after everything that already lies in the folder."""
        saved = manifest.info.get("iteration")
        self.iteration = 1 + max(self._highest(), saved if isinstance(saved, int) else -1, self.iteration - 1)
        self.run = str(manifest.info.get("run", ""))
        sweep(self.folder)

    def _highest(self) -> int:
        return max((number for _, number in self._numbered()), default=-1)

    def _numbered(self) -> list[tuple[Path, int]]:
        if not self.folder.is_dir():
            return []
        names = ((path, _NAME.fullmatch(path.name)) for path in self.folder.iterdir() if path.is_dir())
        return [(path, int(match[1])) for path, match in names if match]
