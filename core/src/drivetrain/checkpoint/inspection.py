"""What a checkpoint holds and whether it is whole, without loading it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drivetrain.checkpoint.folder import check_file
from drivetrain.checkpoint.manifest import Manifest, read_manifest
from drivetrain.errors import CheckpointCorruptError


@dataclass(frozen=True)
class Inspection:
    """A checkpoint at a glance.

    Args:
        path: its folder.
        manifest: everything but the numbers.
        num_bytes: size of all files that the manifest names.
        problems: one sentence for each file that is missing, truncated or altered; empty when it is whole.
    """

    path: Path
    manifest: Manifest
    num_bytes: int
    problems: tuple[str, ...] = ()


def inspect(path: str | Path) -> Inspection:
    """Read a checkpoint's manifest and check every file. Not collective.

    Raises:
        CheckpointNotFoundError: no complete checkpoint there.
        CheckpointCorruptError: the manifest itself is damaged.
        CheckpointError: the manifest is another program's or of a newer format.
    """
    folder = Path(path).absolute()
    manifest = read_manifest(folder)
    problems = []
    for name, entry in manifest.files.items():
        try:
            check_file(folder, name, entry)
        except CheckpointCorruptError as problem:
            problems.append(problem.what)
    return Inspection(folder, manifest, sum(entry.size for entry in manifest.files.values()), tuple(problems))
