"""Reads weights from safetensors files; each rank reads its own shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from drivetrain.api import CheckpointMismatchError, UsageError
from drivetrain_fsdp.shards import Box, box_of, local_device

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """One safetensors file, or several with an index. Tensors are read on request, in parts.

    Args:
        path: the file, the index (``*.index.json``), or the folder with ``model.safetensors`` or its index.

    Raises:
        UsageError: nothing of the kind is there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[Path, Any] = {}
        self._places = self._find()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def names(self) -> set[str]:
        """Every tensor's name."""
        return set(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return tuple(self._file(self._places[name]).get_slice(name).get_shape())

    def read(self, name: str, box: Box) -> Tensor:
        """The part of one tensor in a box, on the CPU."""
        file = self._file(self._places[name])
        if not box:
            whole: Tensor = file.get_tensor(name)
            return whole
        if any(side.start == side.stop for side in box):
            return torch.empty([side.stop - side.start for side in box])
        part: Tensor = file.get_slice(name)[box]
        return part

    def _find(self) -> dict[str, Path]:
        path = self.path
        if path.is_dir():
            path = path / (_INDEX if (path / _INDEX).exists() else _SINGLE)
        if not path.exists():
            raise UsageError(
                f"{self.path} holds no safetensors",
                cure=f"Name a .safetensors file, an index, or a folder with {_SINGLE}.",
            )
        if path.suffix == ".json":
            places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            return {name: path.parent / file for name, file in places.items()}
        return dict.fromkeys(self._file(path).keys(), path)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as problem:
                raise UsageError(
                    f"{path} cannot be read as safetensors: {problem}",
                    cure="Fetch the file again, or write it with save_pretrained or accelerator.save_model.",
                ) from problem
        return self._open[path]


def saved_name(files: WeightFiles, names: list[str]) -> str | None:
    """The one of a tied parameter's names that the files have."""
    return next((name for name in names if name in files), None)


def check_shape(files: WeightFiles, name: str, tensor: Tensor) -> None:
    """Raise :class:`CheckpointMismatchError` when the file's tensor has another shape."""
    found = files.shape(name)
    if found != tuple(tensor.shape):
        raise CheckpointMismatchError(
            f"{name} is {list(found)} in {files.path} and {list(tensor.shape)} in the model",
            cure="Build the model as it was when its weights were saved.",
        )


def complain_about_missing(files: WeightFiles, missing: list[str]) -> None:
    """Raise :class:`CheckpointMismatchError` when parameters have no value in the files."""
    if missing:
        raise CheckpointMismatchError(
            f"{files.path} lacks {len(missing)} parameter(s) of the model, such as {', '.join(missing[:4])}",
            cure="Name the files of this model; names must be those of its own state_dict.",
        )


@torch.no_grad()
def load_weights(model: Any, path: str | Path) -> None:
    """Read weights into a prepared model, or into a plain module. Each rank reads its own part; not collective.

    Args:
        model: what ``prepare`` returned, or the module in it.
        path: a safetensors file, its index, or the folder of either.

    Raises:
        CheckpointMismatchError: a parameter is missing there or has another shape; nothing was changed then.
    """
    module: nn.Module = getattr(model, "module", model)
    files = WeightFiles(path)
    found: list[tuple[Tensor, str]] = []
    missing = []
    for names, tensor in names_of(dict(module.state_dict(keep_vars=True))).values():
        name = saved_name(files, names)
        if name is None:
            if isinstance(tensor, nn.Parameter):
                missing.append(names[0])
            continue
        check_shape(files, name, tensor)
        found.append((tensor, name))
    complain_about_missing(files, missing)
    for tensor, name in found:
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local.copy_(files.read(name, box_of(tensor)).to(local_device(tensor)))


def names_of(tensors: Mapping[str, Tensor]) -> dict[int, tuple[list[str], Tensor]]:
    """Each tensor once, by identity, with all of its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return found
