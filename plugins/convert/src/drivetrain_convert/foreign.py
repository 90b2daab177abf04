"""The content of another library's checkpoint, whose pickles are read without executing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.api import CheckpointError
from drivetrain.api.programs import checkpoint

Source = checkpoint.Source
TensorFile = checkpoint.TensorFile
Tensors = dict[str, Source]

_WRAPPERS = ("module.", "_forward_module.")
"""Prefixes of wrappers; removed only if every name has one."""
_WITHIN_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass
class ForeignCheckpoint:
    """Content of another library's checkpoint.

    Args:
        kind: a description of the checkpoint's format.
        models: tensors of each model by name.
        ordered: for each model whether its tensors are in the model's own order; safetensors do not keep it.
        tied: for each model the further names of tied tensors, with their first.
        optimizers: ``state_dict`` of each optimizer; tensors in it may be :class:`Source` objects.
        objects: state of further objects, under the names that a run gives them (``scheduler.0``, ``custom.0``).
        scaler: state of the loss scaler.
        rng: random state of each process, as a run captures it.
        notes: other plain values.
        ungrouped: frozen parameters of the first model, of which it is unknown whether an optimizer held them.
        left_out: sentences about what is not carried over.
    """

    kind: str
    models: list[Tensors] = field(default_factory=list)
    ordered: list[bool] = field(default_factory=list)
    tied: list[dict[str, str]] = field(default_factory=list)
    optimizers: list[Mapping[str, Any]] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    rng: dict[int, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    ungrouped: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add_model(
        self, tensors: Mapping[str, Any], tied: Mapping[str, str] | None = None, *, ordered: bool = True
    ) -> None:
        """Add a model's state dict: wrappers' prefixes are removed, tensors that share memory become tied."""
        for wrapper in _WRAPPERS:
            if tensors and all(str(name).startswith(wrapper) for name in tensors):
                tensors = {str(name).removeprefix(wrapper): value for name, value in tensors.items()}
        known = {clean(alias): clean(first) for alias, first in (tied or {}).items()}
        found: Tensors = {}
        seen: dict[tuple[Any, ...], str] = {}
        for raw, value in tensors.items():
            name = clean(str(raw))
            if isinstance(value, Tensor) and value.numel():
                place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
                if place in seen:
                    known[name] = seen[place]
                    continue
                seen[place] = name
            found[name] = _source(name, value)
        self.models.append(found)
        self.ordered.append(ordered)
        self.tied.append(known)

    def add_tree(self, tree: Mapping[Any, Any], of: str) -> None:
        """Add the entries of a dictionary by their type, regardless of their names."""
        if tree and all(isinstance(value, (Tensor, Source)) for value in tree.values()):
            self.add_model(tree)
            return
        for key, value in tree.items():
            if isinstance(value, Mapping) and "param_groups" in value:
                self.optimizers.append(value)
            elif isinstance(value, Mapping) and {"last_epoch", "base_lrs"} & set(value):
                self.objects[f"scheduler.{sum(name.startswith('scheduler.') for name in self.objects)}"] = value
            elif isinstance(value, Mapping) and {"scale", "growth_factor"} <= set(value):
                self.scaler = dict(value)
            elif isinstance(value, Mapping) and _is_model(value):
                tensors = {name: each for name, each in value.items() if isinstance(each, (Tensor, Source))}
                self.add_model(tensors)
                self._skip(f"{of}: {key}.{name} is no tensor" for name in value if name not in tensors)
            elif value is None or isinstance(value, (bool, int, float, str)):
                self.notes[str(key)] = value
            else:
                self.left_out.append(f"{of}: {key!r} is neither a model, an optimizer, a scheduler nor a number")

    def _skip(self, sentences: Iterable[str]) -> None:
        self.left_out.extend(sentences)


def load_pickle(path: Path, stand_ins: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """``torch.load(weights_only=True)`` on the CPU, which builds tensors and plain values and calls nothing else.

    Args:
        path: the file; tensors in it are mapped, not read, where its form allows.
        stand_ins: classes of ours to build in the place of others, by full name, such as ``"package.module.Class"``.

    Raises:
        CheckpointError: there is something else in it, or it is damaged.
    """
    rebuild: Any = np.empty(0).__reduce__()[0]
    arrays: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    # As NumPy 1 and NumPy 2 spell it.
    arrays += [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    arrays += [(ours, name) for name, ours in (stand_ins or {}).items()]
    try:
        with torch.serialization.safe_globals(arrays):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_can_be_mapped(path))
    except Exception as problem:  # A damaged pickle can raise anything.
        reason = str(problem).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path.name} cannot be read as weights only: {reason}",
            whose=str(path),
            cure="Nothing in it was executed. Let the program that wrote it save tensors and plain values only.",
        ) from problem


def _can_be_mapped(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"  # torch's zip format; the one before it cannot.


def try_pickle(found: ForeignCheckpoint, path: Path, take: Callable[[Any], object]) -> None:
    """Return the content of a pickle, or record why it is left out."""
    try:
        take(load_pickle(path))
    except CheckpointError as problem:
        found.left_out.append(problem.what)


def add_safetensors(found: ForeignCheckpoint, paths: list[Path]) -> None:
    """Add one model from its safetensors files."""
    tensors: dict[str, Source] = {}
    tied: dict[str, str] = {}
    for path in paths:
        file = TensorFile(path)
        tensors |= file.sources()
        tied |= {alias: first for alias, first in file.metadata.items() if first in tensors and alias not in tensors}
    found.add_model(tensors, tied, ordered=False)


def _is_model(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(each, (Tensor, Source)) for each in value.values()) and all(
        isinstance(name, str) for name in value
    )


def _source(name: str, value: Any) -> Source:
    if isinstance(value, Source):
        return Source(name, value.dtype, value.shape, value.produce)
    assert isinstance(value, Tensor)
    return Source.of(name, value)


def clean(name: str) -> str:
    """A name without the prefixes of torch's module wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WITHIN_NAMES)
