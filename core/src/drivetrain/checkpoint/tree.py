"""Encodes Python state as JSON and tensors, and decodes it, without executing anything.

What JSON cannot hold is written as an object with the key ``$`` for its kind: tuples, dictionaries with other keys than
strings, non-finite floats, bytes, dtypes, NumPy values, and tensors, which are named here and stored elsewhere.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import CheckpointCorruptError, CheckpointError

_KIND = "$"
_PLAIN = frozenset({type(None), bool, int, str})
"""Types that JSON holds as they are. Checked before a value is looked at any further: most values are of these."""


@dataclass
class Encoder:
    """Encodes values; their tensors are collected in ``tensors`` under unique names."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self, value: Any, path: str) -> Any:
        """JSON for a value.

        Args:
            value: nested dict, list, tuple of None, bool, int, float, str, bytes, torch dtype or device, tensor, NumPy
                array or scalar. Dictionaries of any class come back as plain ones.
            path: name of the value, the beginning of its tensors' names.

        Raises:
            CheckpointError: a value of another type; names the path inside the value and the type.
        """
        if type(value) in _PLAIN:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if isinstance(value, Tensor):
            return {_KIND: "tensor", "key": self._keep(_storable(value, path), path)}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if type(value) in (list, tuple, torch.Size):  # A named tuple would come back as a plain one.
            items = [
                item if type(item) in _PLAIN else self.encode(item, f"{path}[{index}]")
                for index, item in enumerate(value)
            ]
            return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
        return self._rare(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if {type(key) for key in value} <= {str} and _KIND not in value:
            return {
                key: item if type(item) in _PLAIN else self.encode(item, f"{path}.{key}") for key, item in value.items()
            }
        for key in value:
            if key is not None and type(key) not in (bool, int, float, str):
                raise _cannot(f"a key of {path}", key)
        pairs = [[self.encode(key, path), self.encode(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {_KIND: "dict", "items": pairs}

    def _rare(self, value: Any, path: str) -> Any:
        if type(value) is bytes:
            return {_KIND: "bytes", "value": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {_KIND: "device", "value": str(value)}
        numpy = sys.modules.get("numpy")  # No NumPy value exists where NumPy was never imported.
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            try:
                tensor = torch.from_numpy(numpy.array(value, order="C", copy=True))
            except TypeError as problem:
                raise _cannot(path, value, f" of dtype {value.dtype}") from problem
            kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
            return {_KIND: kind, "key": self._keep(tensor, path)}
        raise _cannot(path, value)

    def _keep(self, tensor: Tensor, path: str) -> str:
        key, count = path, 1
        while key in self.tensors:  # A dotted key may look like a nested one.
            count += 1
            key = f"{path}#{count}"
        self.tensors[key] = tensor.detach()
        return key


def decode(node: Any, fetch: Callable[[str], Tensor]) -> Any:
    """Undo :meth:`Encoder.encode`.

    Args:
        node: parsed JSON.
        fetch: gives the tensor of a name; it may be given out as it is.

    Raises:
        CheckpointCorruptError: a kind that no :class:`Encoder` writes.
    """
    if isinstance(node, list):
        return [decode(item, fetch) if isinstance(item, (list, dict)) else item for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get(_KIND)
    if kind is None:
        return {key: decode(item, fetch) if isinstance(item, (list, dict)) else item for key, item in node.items()}
    try:
        return _DECODERS[kind](node, fetch)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise CheckpointCorruptError(f"an encoded value of kind {kind!r} makes no sense: {problem}") from problem


def tensor_keys(node: Any, like: Any = None) -> Iterator[tuple[str, Any]]:
    """Name of each tensor in encoded state, with the value at the same path in ``like`` (``None`` if there is none)."""
    waiting = [(node, like)]
    while waiting:
        node, like = waiting.pop()
        pairs: list[tuple[Any, Any]] = []
        if isinstance(node, list):
            pairs = list(enumerate(node))
        elif isinstance(node, dict):
            kind = node.get(_KIND)
            if kind is None:
                pairs = list(node.items())
            elif kind == "tuple":
                waiting.append((node["items"], like))
            elif kind == "dict":
                pairs = [(decode(key, _no_tensor), item) for key, item in node["items"]]
            elif "key" in node:
                yield str(node["key"]), like
        inner = [(key, item) for key, item in pairs if isinstance(item, (list, dict))]
        waiting += [(item, None if like is None else _child(like, key)) for key, item in reversed(inner)]


def _child(like: Any, key: Any) -> Any:
    if isinstance(like, Mapping):
        return like.get(key)
    if isinstance(like, (list, tuple)) and isinstance(key, int) and key < len(like):
        return like[key]
    return None


def _no_tensor(key: str) -> Tensor:
    raise ValueError(f"a tensor ({key}) where a key was expected")


def _storable(tensor: Tensor, path: str) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _cannot(path, tensor, f" with layout {tensor.layout} on {tensor.device}")
    return tensor


def _cannot(path: str, value: Any, detail: str = "") -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return CheckpointError(
        f"{path} is of type {kind}{detail}, which a checkpoint cannot hold",
        cure="Let state_dict() return dicts, lists and tuples of numbers, strings, bytes, tensors and NumPy arrays.",
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


_DECODERS: dict[str, Callable[[dict[str, Any], Callable[[str], Tensor]], Any]] = {
    "float": lambda node, _: float(node["value"]),
    "bytes": lambda node, _: base64.b64decode(node["value"], validate=True),
    "dtype": lambda node, _: _dtype(node["value"]),
    "device": lambda node, _: torch.device(node["value"]),
    "tensor": lambda node, fetch: fetch(node["key"]),
    "array": lambda node, fetch: fetch(node["key"]).numpy(),
    "scalar": lambda node, fetch: fetch(node["key"]).numpy()[()],
    "tuple": lambda node, fetch: tuple(decode(node["items"], fetch)),
    "dict": lambda node, fetch: {decode(key, _no_tensor): decode(item, fetch) for key, item in node["items"]},
}
