"""Which library wrote this? Reads Accelerate's folders, files of ``torch.save`` and safetensors, and DCP folders.

What Lightning Fabric saves is a file of ``torch.save`` or, when sharded, a folder of ``torch.distributed.checkpoint``.
Formats that belong to one engine are read by that engine's plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from drivetrain.checkpoint.acceleratefolder import add_rest, read_accelerate
from drivetrain.checkpoint.dcpfolder import is_dcp_folder, read_dcp_folder
from drivetrain.checkpoint.foreign import Foreign, add_safetensors, load_pickle, try_pickle
from drivetrain.checkpoint.formats import format_names, load_format
from drivetrain.errors import CheckpointError, CheckpointNotFoundError

KINDS = ("auto", "accelerate", "torch", "fabric")
"""What ``convert`` knows without a plugin."""


def read_foreign(path: Path, kind: str) -> Foreign:
    """Read another library's checkpoint.

    Args:
        path: file or folder.
        kind: ``"accelerate"``, ``"torch"``, ``"fabric"``, the name of a plugin's format, or ``"auto"``, which looks.

    Raises:
        CheckpointNotFoundError: nothing there.
        CheckpointError: not of this kind, or nothing in it can be read safely.
    """
    if not path.exists():
        raise CheckpointNotFoundError(f"there is nothing at {path}")
    if (path / "manifest.json").is_file():
        raise CheckpointError(f"{path} is a Drivetrain checkpoint already", cure="Load it as it is.")
    if kind not in KINDS:
        found = load_format(kind, KINDS).read(path)
    elif kind == "auto" and (of_plugin := _recognised(path)) is not None:
        found = of_plugin
    elif kind == "accelerate" or (kind == "auto" and path.is_dir() and not is_dcp_folder(path)):
        found = read_accelerate(path)
    elif path.is_dir():
        if not is_dcp_folder(path):
            raise CheckpointError(f"{path} is no folder of torch.distributed.checkpoint", cure="Try --from auto.")
        found = Foreign("a folder of torch.distributed.checkpoint")
        found.add_tree(read_dcp_folder(path), "the folder")
        if (path / "meta.pt").is_file():
            found.kind = "a sharded checkpoint of Lightning Fabric"
            try_pickle(found, path / "meta.pt", lambda tree: found.add_tree(tree, "meta.pt"))
    else:
        found = _read_file(path)
    if not found.models:
        raise CheckpointError(
            f"no model was found in {path}" + "".join(f"; {sentence}" for sentence in found.left_out),
            cure="Give --from accelerate, torch or fabric, and the file or folder that the library wrote.",
        )
    return found


def _recognised(path: Path) -> Foreign | None:
    """What a plugin makes of it, ``None`` when none knows it. Accelerate wraps what some engines write themselves."""
    for name in format_names():
        reader = load_format(name)
        if reader.recognises(path):
            found = reader.read(path)
            if path.is_dir() and any(path.glob("random_states_*.pkl")):
                add_rest(found, path)
                found.kind = f"Accelerate's folder with {found.kind}"
            return found
    return None


def _read_file(path: Path) -> Foreign:
    if path.suffix == ".safetensors":
        found = Foreign("a safetensors file")
        add_safetensors(found, [path])
        return found
    found = Foreign("a file of torch.save")
    tree = load_pickle(path)
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}, not a dictionary")
    found.add_tree(tree, path.name)
    return found
