"""One safetensors file, written as a stream and read by slices.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes, little endian, the length of a JSON header;
the header, which may end in spaces; the tensors' bytes without holes. ``safetensors.torch.save_file`` copies every
tensor before it writes the first; here one tensor at a time is in memory, and none is copied that already lies
contiguous on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.checkpoint.folder import CheckedFile
from drivetrain.checkpoint.manifest import FileEntry
from drivetrain.errors import CheckpointCorruptError, CheckpointError

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in _CODES.items()}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # Stored with a last dim of 2.


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Source:
    """One tensor to be written.

    Args:
        key: its name in the file.
        dtype: its dtype.
        shape: its shape.
        produce: gives the tensor, on any device, when its turn comes; it is let go of right after.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    produce: Callable[[], Tensor]

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> Source:
        """A tensor that is in memory already."""
        return cls(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def header(self, start: int) -> dict[str, Any]:
        """Its entry in the header. Raises :class:`CheckpointError` for a dtype that safetensors does not know."""
        real = _REAL.get(self.dtype)
        code = _CODES.get(dtype_name(real or self.dtype))
        if code is None:
            raise CheckpointError(
                f"{self.key} has dtype {dtype_name(self.dtype)}, which safetensors cannot hold",
                cure=f"Convert it to one of {', '.join(_CODES)}.",
            )
        shape = [*self.shape, 2] if real else list(self.shape)
        return {"dtype": code, "shape": shape, "data_offsets": [start, start + self.num_bytes]}


def header_bytes(entries: Mapping[str, Any], metadata: Mapping[str, str], length: int | None = None) -> bytes:
    """The head of a file: length and JSON, padded with spaces to ``length`` bytes in all (or to a multiple of 8)."""
    text = json.dumps({"__metadata__": dict(metadata), **entries}, separators=(",", ":")).encode()
    padded = (len(text) + 7) // 8 * 8 if length is None else length - 8
    if len(text) > padded:
        raise CheckpointError(f"a safetensors header of {len(text)} bytes does not fit into {padded}")
    return padded.to_bytes(8, "little") + text.ljust(padded)


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order; a view when it lies contiguous on the CPU, else a copy."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    plain = plain.resolve_neg().to("cpu").contiguous()
    flat = plain.reshape(-1)
    if flat.stride(0) != 1:  # A single element counts as contiguous whatever its stride, and cannot be seen as bytes.
        flat = flat.clone(memory_format=torch.contiguous_format)
    view: Any = flat.view(torch.uint8).numpy()
    return memoryview(view)


def write_tensors(path: Path, sources: Sequence[Source], metadata: Mapping[str, str] | None = None) -> FileEntry:
    """Write a new file, one tensor in memory at a time, and put it on the disk.

    Raises:
        CheckpointError: a dtype that safetensors does not know; nothing is written then.
        OSError: from the disk; ``FileExistsError`` when ``path`` exists.
    """
    # Widest elements first: then every tensor begins at a multiple of its element size, as readers by mmap need.
    ordered = sorted(sources, key=lambda source: -_REAL.get(source.dtype, source.dtype).itemsize)
    entries, end = {}, 0
    for source in ordered:
        entries[source.key] = source.header(end)
        end += source.num_bytes
    assert len(entries) == len(ordered), "two tensors of one file have the same key"
    with CheckedFile(path) as file:
        file.write(header_bytes(entries, metadata or {}))
        for source in ordered:
            data = raw_bytes(source.produce())
            if len(data) != source.num_bytes:
                raise CheckpointError(f"{source.key} changed its size while it was being saved")
            file.write(data)
    return file.entry


class TensorFile:
    """A safetensors file open for reading; the bytes are mapped, not read, until they are copied.

    Raises:
        CheckpointCorruptError: not a safetensors file. Nothing in it is executed, whatever it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        untyped: Any = safe_open
        try:
            self._file = untyped(path, framework="pt")
            self._keys = frozenset(map(str, self._file.keys()))
        except (SafetensorError, OSError) as problem:
            raise CheckpointCorruptError(
                f"{path.name} cannot be read as safetensors: {problem}",
                whose=str(path.parent),
                cure="Load an older checkpoint.",
            ) from problem

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self._file.metadata() or {})

    def read(self, key: str, dtype: torch.dtype, shape: Sequence[int], box: Sequence[slice] | None = None) -> Tensor:
        """A tensor, or the box of it; may share the mapped file, so copy it before it is changed.

        Raises:
            CheckpointCorruptError: no such key, or not of this dtype and shape.
        """
        part = self.check(key, dtype, shape)
        whole = box is None or all(cut == slice(0, size) for cut, size in zip(box, shape, strict=True))
        tensor: Tensor = self._file.get_tensor(key) if whole or box is None else part[tuple(box)]
        return torch.view_as_complex(tensor) if dtype in _REAL else tensor

    def check(self, key: str, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """The library's handle of a tensor of this dtype and shape, which is not read. Raises as :meth:`read`."""
        if key not in self._keys:
            raise CheckpointCorruptError(f"{self.path.name} holds no {key}", whose=str(self.path.parent))
        part = self._file.get_slice(key)
        stored = [*shape, 2] if dtype in _REAL else list(shape)
        code = _CODES.get(dtype_name(_REAL.get(dtype, dtype)))
        if list(part.get_shape()) != stored or part.get_dtype() != code:
            raise CheckpointCorruptError(
                f"{key} in {self.path.name} is {part.get_dtype()} {part.get_shape()}, not {code} {stored}",
                whose=str(self.path.parent),
            )
        return part

    def copy(self, key: str) -> Tensor:
        """A tensor by its name alone, in memory of its own. Raises :class:`CheckpointCorruptError` for no such key."""
        if key not in self._keys:
            raise CheckpointCorruptError(f"{self.path.name} holds no {key}", whose=str(self.path.parent))
        tensor: Tensor = self._file.get_tensor(key)
        return tensor.clone()

    def sources(self) -> dict[str, Source]:
        """Every tensor in the file by name; each is read when it is asked for."""
        found = {}
        for key in sorted(self._keys):
            part = self._file.get_slice(key)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise CheckpointError(f"{key} in {self.path.name} has the dtype {part.get_dtype()}, which is not read")
            found[key] = Source(key, dtype, tuple(part.get_shape()), partial(self._file.get_tensor, key))
        return found
