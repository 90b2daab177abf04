"""Constructs a model on the meta device and later materializes each parameter with its ordinary initial value.

Inside :func:`deferred` every tensor of some size is made on the meta device, and each operation on it is recorded:
operation, arguments, and for random operations the state of the generator. :meth:`Recording.value` replays the
operations that one tensor depends on. Random operations also run once on temporary memory, so that the generator
advances as in an ordinary construction: parameters, small tensors and every number drawn afterwards are the same.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from drivetrain.api import UnsupportedError


def temporary(num_bytes: int) -> Tensor:
    """Zeroed ``uint8`` CPU memory from its own mapping; pages are allocated when they are written.

    The C allocator would fragment: the holes that whole parameters leave between the remaining shards fit no further
    parameter, and a rank would end up holding as much as the whole model (seen with parameters of 4 MiB).
    """
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]


def temporary_like(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same as a tensor of this shape, stride and dtype."""
    extent = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
    return temporary(extent * dtype.itemsize).view(dtype).as_strided(shape, stride)


SMALL = 1 << 12
"""Tensors of fewer elements are made for real: scripts read values from them, and 16 KiB are no burden."""

_CPU, _META = torch.device("cpu"), torch.device("meta")
_OVERWRITES = ("uniform_", "normal_", "zero_", "fill_", "copy_", "exponential_", "random_", "log_normal_", "cauchy_")
_LOOKS: dict[Any, Any] = {torch.Tensor.is_meta.__get__: False, torch.Tensor.device.__get__: _CPU}  # type: ignore[attr-defined]
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}  # noqa: SLF001 (an operator's name)


@dataclass(frozen=True)
class _Ref:
    """A reference to a tensor on recorded memory: the number of its storage, and its layout."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Step:
    """One operation on recorded memory.

    Args:
        function: the operator.
        args: its arguments, refs in place of recorded tensors.
        kwargs: the same.
        results: what it returned, refs in place of tensors.
        reads: memory whose former content matters.
        writes: memory that it changes or makes.
        overwrites: nothing that was in ``writes`` is left.
        random: state of the generator before it.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: bool
    random: Tensor | None


@dataclass(eq=False)
class Recording:
    """The operations on meta tensors, in order. It lives as long as a tensor that was recorded, or its context."""

    steps: list[_Step] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    """Bytes of every storage."""
    _writers: dict[int, list[int]] = field(default_factory=dict)

    def knows(self, tensor: Tensor) -> bool:
        """Whether this tensor's memory was recorded here."""
        return recording_of(tensor) is self

    def value(self, tensor: Tensor) -> Tensor:
        """The tensor's current value, on the CPU, in newly allocated memory. Replays what it depends on too."""
        return self._replay(self.ref(tensor))

    def ref(self, tensor: Tensor, *, new: bool = False) -> _Ref:
        """A recorded meta tensor's ref; ``new`` begins to record its memory."""
        if new and not self.knows(tensor):
            _RECORDED[tensor.untyped_storage()] = self, len(self._sizes)
            self._sizes.append(tensor.untyped_storage().nbytes())
        elif not self.knows(tensor):
            raise UnsupportedError(
                "a meta tensor made elsewhere has no value that could be given to it later",
                cure="Make every tensor of the model inside of init_empty_weights, without device='meta'.",
            )
        _, key = _RECORDED[tensor.untyped_storage()]
        return _Ref(key, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def covers(self, ref: _Ref) -> bool:
        """Whether a ref spans all of its memory."""
        return prod(ref.size) * ref.dtype.itemsize == self._sizes[ref.key]

    def add(self, step: _Step) -> None:
        """Append one operation."""
        for key in step.writes:
            self._writers.setdefault(key, []).append(len(self.steps))
        self.steps.append(step)

    @torch.no_grad()
    def _replay(self, wanted: _Ref) -> Tensor:
        memory: dict[int, Any] = {}

        def real(value: Any) -> Any:
            if not isinstance(value, _Ref):
                return value
            if value.key not in memory:
                memory[value.key] = temporary(self._sizes[value.key]).untyped_storage()
            return torch.empty(0, dtype=value.dtype).set_(memory[value.key], value.offset, value.size, value.stride)

        for number in self._needed(wanted.key):
            step = self.steps[number]
            with nullcontext() if step.random is None else torch.random.fork_rng(devices=[]):
                if step.random is not None:
                    torch.set_rng_state(step.random)
                results = step.function(*tree_map(real, step.args), **tree_map(real, step.kwargs))
            for ref, result in zip(step.results, tree_flatten(results)[0], strict=True):
                if isinstance(ref, _Ref) and ref.key in step.writes:
                    place = real(ref)
                    if place.data_ptr() != result.data_ptr():
                        place.copy_(result)
        final: Tensor = real(wanted)
        return final

    def _needed(self, key: int) -> list[int]:
        """Numbers of the steps that the content of this memory depends on, in order."""
        needed: set[int] = set()
        asked = [(key, len(self.steps))]
        done: set[tuple[int, int]] = set()
        while asked:
            now = asked.pop()
            if now in done:
                continue
            done.add(now)
            memory, before = now
            for number in reversed(self._writers.get(memory, ())):
                if number >= before:
                    continue
                step = self.steps[number]
                needed.add(number)
                asked.extend((other, number) for other in step.reads if other != memory)
                if step.overwrites:
                    break
        return sorted(needed)


_RECORDED: WeakKeyDictionary[torch.UntypedStorage, tuple[Recording, int]] = WeakKeyDictionary()
"""Maps each recorded storage, as long as a tensor has it, to its recording and its number there."""


def recording_of(tensor: Tensor) -> Recording | None:
    """Return the recording of a tensor's memory; ``None`` if it has memory or was made outside of :func:`deferred`."""
    found = _RECORDED.get(tensor.untyped_storage()) if tensor.is_meta else None
    return None if found is None else found[0]


@contextmanager
def deferred(recording: Recording) -> Iterator[None]:
    """Context in which large tensors are meta tensors and what is done to them is recorded."""
    with _Disguise(recording), _Deferred(recording):
        yield


class _Disguise(TorchFunctionMode):
    """Makes recorded tensors report the CPU as their device: ``torch.nn.init`` skips meta tensors."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _LOOKS and self._recording.knows(args[0]):
            return _LOOKS[function]
        return function(*args, **(kwargs or {}))


class _Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode of :func:`deferred`."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 (in here they shall say what they are)
            return self._dispatch(function, args, dict(kwargs or {}))

    def _dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            return function(*args, **kwargs) if tensors else self._make(function, args, kwargs)
        written = [each for each in _written(function, args, kwargs) if isinstance(each, Tensor)]
        if function in _READS or any(not tensor.is_meta for tensor in written):
            return function(*tree_map(self._now, args), **tree_map(self._now, kwargs))
        if "device" in kwargs:
            kwargs["device"] = _CPU
        return self._note(function, args, kwargs, written, self._run_on_meta(function, args, kwargs))

    def _make(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Create a tensor: small ones with memory, large ones on meta, those for another device there."""
        takes_device = any(argument.name == "device" for argument in function._schema.arguments)  # noqa: SLF001
        if not takes_device or torch.device(kwargs.get("device") or _CPU) not in (_CPU, _META):
            return function(*args, **kwargs)
        kwargs["device"] = _CPU
        made = self._run_on_meta(function, args, kwargs)
        if made.numel() < SMALL:
            return function(*args, **kwargs)
        return self._note(function, args, kwargs, [], made)

    @staticmethod
    def _run_on_meta(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = _without_generator(kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        try:
            return function(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
        except (NotImplementedError, RuntimeError) as problem:
            raise UnsupportedError(
                f"{function} cannot run on a tensor without memory: {problem}",
                cure="Construct this model without init_empty_weights, or do that after prepare.",
            ) from problem

    def _note(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], made: Any
    ) -> Any:
        """Record an operation on meta tensors, and advance the generator of a random one. Returns ``made``."""
        recording = self._recording
        noted = tree_map(self._noted, (args, _without_generator(kwargs)))
        keys = [each.key for each in tree_flatten(noted)[0] if isinstance(each, _Ref)]
        results = [
            recording.ref(each, new=True) if isinstance(each, Tensor) else each for each in tree_flatten(made)[0]
        ]
        targets = {recording.ref(each).key for each in written}
        writes = targets | ({each.key for each in results if isinstance(each, _Ref)} - set(keys))
        if not writes:
            return made  # A view, on memory that is known.
        random = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            random = (kwargs.get("generator") or torch.default_generator).get_state()
            self._draw(function, args, kwargs, targets)
        overwrites = not targets or (
            _name(function) in _OVERWRITES
            and recording.covers(recording.ref(written[0]))
            and keys.count(recording.ref(written[0]).key) == 1
        )
        reads = set(keys) - targets if overwrites else set(keys)
        recording.add(
            _Step(function, noted[0], noted[1], results, frozenset(reads), frozenset(writes), overwrites, random)
        )
        return made

    def _draw(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: set[int]) -> None:
        """Draw as many numbers as the real operation draws, into temporary memory."""

        def scratch(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_meta and self._recording.ref(value).key in targets:
                return temporary_like(value.shape, value.stride(), value.dtype)
            return self._now(value)

        function(*tree_map(scratch, args), **tree_map(scratch, kwargs))

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._recording.ref(value) if value.is_meta else value.detach().clone()

    def _now(self, value: Any) -> Any:
        return self._recording.value(value) if isinstance(value, Tensor) and value.is_meta else value


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replace the generator argument by the default generator, whose state a replay sets."""
    return {**kwargs, "generator": None} if "generator" in kwargs else kwargs


def _name(function: Any) -> str:
    name: str = function._schema.name  # noqa: SLF001
    return name.rpartition("::")[2]


def _as_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return value


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Arguments that an operation writes to."""
    for number, argument in enumerate(function._schema.arguments):  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else [value]
