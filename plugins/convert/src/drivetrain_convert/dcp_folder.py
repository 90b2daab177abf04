"""Reads folders of ``torch.distributed.checkpoint`` without executing their pickles.

Their index, ``.metadata``, is a pickle. It is read by an unpickler that allows only the classes of the index, so that
nothing else can be called; the parts are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from drivetrain.api import CheckpointCorruptError, CheckpointError
from drivetrain_convert.foreign import Source

INDEX = ".metadata"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}


class _IndexUnpickler(pickle.Unpickler):
    """Allows only the classes of an index."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name not in _ALLOWED.get(module_name, ()):
            raise CheckpointError(
                f"the index names {module_name}.{global_name}, which is no part of an index; nothing was executed",
                cure="Do not trust this checkpoint.",
            )
        if module_name == "pathlib":
            return PurePosixPath  # A path of another system could not be constructed here, and it is not used.
        return super().find_class(module_name, global_name)


def is_dcp_folder(path: Path) -> bool:
    """Whether this looks like a folder of ``torch.distributed.checkpoint``."""
    return (path / INDEX).is_file()


def read_dcp_folder(folder: Path) -> dict[Any, Any]:
    """Read such a folder as the nested dictionary that was saved. Not collective.

    Tensors are :class:`Source` objects: each is assembled from its parts on access.

    Raises:
        CheckpointCorruptError: the index cannot be read or does not fit the files.
        CheckpointError: the index names a class that is not allowed, or a part is transformed (compressed).
    """
    index = _read_index(folder)
    tree: dict[Any, Any] = {}
    stored: dict[str, list[tuple[Any, Any]]] = {}
    for key, info in index.storage_data.items():
        stored.setdefault(key.fqn, []).append((key, info))
    for name, saved in index.state_dict_metadata.items():
        path = (index.planner_data or {}).get(name) or (name,)
        parts = stored.get(name, [])
        if not parts:
            raise CheckpointCorruptError(f"the index says nowhere where {name} is", whose=str(folder))
        value: Any
        if isinstance(saved, TensorStorageMetadata):
            value = Source(name, saved.properties.dtype, tuple(saved.size), _Assembly(folder, saved, parts))
        else:
            value = _load(folder, parts[0][1])
        here = tree
        for step in path[:-1]:
            here = here.setdefault(step, {})
        here[path[-1]] = value
    listed: dict[Any, Any] = _with_lists(tree)
    return listed


def _read_index(folder: Path) -> Metadata:
    try:
        with (folder / INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
    except CheckpointError as problem:
        raise type(problem)(problem.what, whose=str(folder / INDEX), cure=problem.cure) from problem
    except Exception as problem:  # A damaged pickle can raise anything.
        raise CheckpointCorruptError(f"the index cannot be read: {problem}", whose=str(folder / INDEX)) from problem
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointCorruptError("the index is none", whose=str(folder / INDEX))
    return index


class _Assembly:
    """Assembles one tensor from its parts."""

    def __init__(self, folder: Path, saved: TensorStorageMetadata, parts: list[tuple[Any, Any]]) -> None:
        self._folder, self._saved, self._parts = folder, saved, parts

    def __call__(self) -> Tensor:
        size = tuple(self._saved.size)
        whole = torch.empty(size, dtype=self._saved.properties.dtype)
        filled = 0
        for key, info in self._parts:
            part = _load(self._folder, info)
            if not isinstance(part, Tensor):
                raise CheckpointCorruptError(f"a part of {key.fqn} is no tensor", whose=str(self._folder))
            offsets = tuple(key.offset or (0,) * len(size))
            box = tuple(slice(at, at + length) for at, length in zip(offsets, part.shape, strict=True))
            if whole[box].shape != part.shape:
                raise CheckpointCorruptError(f"a part of {key.fqn} lies outside of it", whose=str(self._folder))
            whole[box] = part
            filled += part.numel()
        if filled != math.prod(size):
            raise CheckpointCorruptError(f"{self._parts[0][0].fqn} is not complete", whose=str(self._folder))
        return whole


def _load(folder: Path, info: Any) -> Any:
    name = PurePosixPath(str(info.relative_path))
    if name.is_absolute() or ".." in name.parts:
        raise CheckpointCorruptError(f"{name} is not a file of this folder", whose=str(folder))
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"the parts in {name} are compressed or otherwise transformed, which is not read here",
            whose=str(folder),
            cure="Save it without extensions: torch.distributed.checkpoint.FileSystemWriter(folder).",
        )
    try:
        with (folder / name).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as problem:
        raise CheckpointCorruptError(f"a part in {name} cannot be read: {problem}", whose=str(folder)) from problem


def _with_lists(node: Any) -> Any:
    """Dictionaries with the keys 0, 1, ... under ``param_groups`` become the lists that they were."""
    if not isinstance(node, dict):
        return node
    made = {key: _with_lists(value) for key, value in node.items()}
    groups = made.get("param_groups")
    if isinstance(groups, dict) and set(groups) == set(range(len(groups))):
        made["param_groups"] = [groups[number] for number in range(len(groups))]
    return made
