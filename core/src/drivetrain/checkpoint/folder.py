"""Numbers a run's checkpoints, keeps the newest of them, and inspects one.

No torch, and nothing is collective. Atomic commits are in
:mod:`drivetrain.checkpoint.storage`.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from drivetrain.checkpoint.manifest import Manifest, read_manifest
from drivetrain.checkpoint.remote import Folder, folder_of
from drivetrain.checkpoint.storage import check_file, storage_of
from drivetrain.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

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
    path: Folder


class Naming:
    """``<folder>/checkpoint_{iteration}``.

    Args:
        folder: where the checkpoints lie, usually ``<project_dir>/checkpoints``; need not exist yet.
        total_limit: how many of this run's to keep, at least 1; ``None`` keeps all.
        iteration: number of the next one, or higher where that is taken.
        run: distinguishes this run and those that it continues from others that saved in the same folder.
    """

    def __init__(
        self, folder: str | Folder, total_limit: int | None = None, iteration: int = 0, run: str = ""
    ) -> None:
        if total_limit is not None and total_limit < 1:
            raise CheckpointError(f"total_limit must be at least 1, not {total_limit}", cure="None keeps all of them.")
        self.folder, self.total_limit, self.iteration, self.run = folder_of(folder), total_limit, iteration, run
        self._storage = storage_of(self.folder)

    def complete(self) -> list[Named]:
        """The complete checkpoints, oldest first. Folders with another name or without our manifest are skipped."""
        return self._complete(self._numbered())

    def latest(self) -> Folder:
        """Folder of the newest complete checkpoint. Raises :class:`CheckpointNotFoundError` when there is none."""
        for path, number in reversed(self._numbered()):
            if self._named(path, number) is not None:
                return path
        raise CheckpointNotFoundError(
            f"{self.folder} holds no complete checkpoint",
            cure="Save one first, or give load_state the folder of another run's checkpoint.",
        )

    def claim_next(self, *, begun_anew: bool = False) -> int:
        """Claim the folder and return the number of the next save, which :attr:`iteration` then is.

        For the main process. A folder is claimed where its storage has owners.

        Args:
            begun_anew: the run goes on from no checkpoint; warn where the folder holds another's.

        Raises:
            CheckpointError: another living process saves in the folder.
        """
        self._storage.claim(self.folder)
        self.iteration = max(self.iteration, self._highest() + 1)
        complete = self.complete() if begun_anew else []
        if complete:
            logger.warning(
                "%s holds checkpoints of an earlier run, up to %s, and this run was begun anew: its own go on from "
                "checkpoint_%d%s. Call load_state() first to continue that run, or choose another project_dir.",
                self.folder,
                complete[-1].path.name,
                self.iteration,
                "" if self.total_limit is None else ", and total_limit removes this run's only",
            )
        return self.iteration

    @property
    def path(self) -> Folder:
        """Folder of the checkpoint with the number :attr:`iteration`."""
        return self.folder / f"checkpoint_{self.iteration}"

    def prune(self, newest: Folder) -> list[Folder]:
        """Delete this run's oldest complete checkpoints beyond ``total_limit``; returns those.

        Only what is older than ``newest``, which was just written, can be deleted, and nothing of other runs. Where an
        interrupted save has its final name, older numbers without a manifest are deleted, too.

        Raises:
            CheckpointError: another process has taken the folder over, or ``newest`` is gone.
        """
        if self.total_limit is None:
            return []
        self._storage.check_claim(self.folder)
        numbered = self._numbered()
        complete = self._complete(numbered)
        if newest.name not in (one.path.name for one in complete):
            raise CheckpointError(f"{newest}, which was just saved, is gone", cure="Look for what else removes it.")
        names = [one.path.name for one in complete]
        older = [one.path for one in complete[: names.index(newest.name)] if one.run == self.run]
        removed = older[: max(len(older) + 1 - self.total_limit, 0)]
        for path in removed:
            self._storage.discard(path)
        number = complete[names.index(newest.name)].number
        self._storage.clear_interrupted(path for path, other in numbered if other < number and path not in removed)
        return removed

    def resumed(self, manifest: Manifest) -> int:
        """Return the next number after a loaded checkpoint and after all entries of the folder."""
        saved = manifest.info.get("iteration")
        self.iteration = 1 + max(self._highest(), saved if isinstance(saved, int) else -1, self.iteration - 1)
        self.run = str(manifest.info.get("run", ""))
        self._storage.sweep(self.folder)
        return self.iteration

    def _highest(self) -> int:
        return max((number for _, number in self._numbered()), default=-1)

    def _complete(self, numbered: list[tuple[Folder, int]]) -> list[Named]:
        return [named for path, number in numbered if (named := self._named(path, number)) is not None]

    def _named(self, path: Folder, number: int) -> Named | None:
        """The complete checkpoint in a folder; ``None`` where there is none."""
        try:
            manifest = read_manifest(path)
        except CheckpointError as problem:
            no_answer = isinstance(problem.__cause__, OSError) and not isinstance(problem, CheckpointNotFoundError)
            if no_answer and self._storage.may_not_answer:
                raise  # Else a storage that is out of reach for a moment would make an older checkpoint the newest.
            # Half-written by a dead process, damaged, or not ours: it can neither be the newest nor be pruned.
            return None
        return Named(number, str(manifest.info.get("run", "")), path)

    def _numbered(self) -> list[tuple[Folder, int]]:
        """The folders with a number, lowest first."""
        names = ((path, _NAME.fullmatch(path.name)) for path in self._storage.subfolders(self.folder))
        found = [(path, int(match[1])) for path, match in names if match]
        return sorted(found, key=lambda one: (one[1], one[0].name))


@dataclass(frozen=True)
class Inspection:
    """A checkpoint at a glance.

    Args:
        path: its folder.
        manifest: everything but the numbers.
        num_bytes: size of all files that the manifest names.
        problems: one sentence for each file that is missing, truncated or altered; empty when it is whole.
    """

    path: Folder
    manifest: Manifest
    num_bytes: int
    problems: tuple[str, ...] = ()


def inspect(path: str | Folder) -> Inspection:
    """Read a checkpoint's manifest and check every file. Not collective.

    Raises:
        CheckpointNotFoundError: no complete checkpoint there.
        CheckpointCorruptError: the manifest itself is damaged.
        CheckpointError: the manifest is another program's or of a newer format.
    """
    folder = folder_of(path).absolute()
    manifest = read_manifest(folder)
    problems = []
    for name, entry in manifest.files.items():
        try:
            check_file(folder, name, entry)
        except CheckpointCorruptError as problem:
            problems.append(problem.what)
    return Inspection(folder, manifest, sum(entry.size for entry in manifest.files.values()), tuple(problems))
