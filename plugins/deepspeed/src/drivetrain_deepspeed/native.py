"""DeepSpeed's own checkpoints: recognised, read and written without running DeepSpeed. Imports torch, no engine.

What ``engine.save_checkpoint`` writes is a folder with a file ``latest`` and a folder for each tag. ZeRO's tag folders
hold the model's states in one file (stages 0 to 2) or one a rank (stage 3), and the optimizer's in one a rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import final

from drivetrain.api import CheckpointError
from drivetrain_convert import CheckpointFormat, ForeignCheckpoint, SavedModel
from drivetrain_deepspeed.nativereading import read_shards
from drivetrain_deepspeed.nativewriting import OPTIONS, write_shards
from drivetrain_deepspeed.universal import is_universal, read_universal

_STATES = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|layer_\d+.*-model_\d*_?states\.pt")


@final
class DeepSpeedFormat(CheckpointFormat):
    """Reads ZeRO 0 to 3 and universal checkpoints, writes ZeRO 0 to 3 for a world of one's choice."""

    options = OPTIONS

    def recognises(self, path: Path) -> bool:
        folder = _tag_folder(path)
        return folder is not None

    def read(self, path: Path) -> ForeignCheckpoint:
        folder = _tag_folder(path)
        if folder is None:
            raise CheckpointError(
                f"{path} holds no checkpoint of DeepSpeed",
                cure="Give the folder that save_checkpoint wrote, with the file `latest`, or one of its tag folders.",
            )
        return read_universal(folder) if is_universal(folder) else read_shards(folder)

    def write(self, saved: SavedModel, target: Path, options: Mapping[str, str]) -> list[str]:
        return write_shards(saved, target, options)


def _tag_folder(path: Path) -> Path | None:
    """The folder with the states: ``path`` itself or the newest tag in it."""
    if not path.is_dir():
        return None
    if _holds_states(path):
        return path
    for pointer in ("latest", "latest_universal"):
        if (path / pointer).is_file():
            tag = (path / pointer).read_text(encoding="utf-8").strip()
            if tag and "/" not in tag and tag != ".." and (path / tag).is_dir() and _holds_states(path / tag):
                return path / tag
    return None


def _holds_states(folder: Path) -> bool:
    return is_universal(folder) or any(_STATES.fullmatch(each.name) for each in folder.iterdir())
