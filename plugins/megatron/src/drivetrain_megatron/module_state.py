"""Saves and restores a module's state besides its parameters around trial forwards.

A forward may count its calls in a Python attribute, move running statistics, fill a cache or draw random numbers.
Pipelines and tensor-parallel plans run trial forwards, and split the script's forwards into micro-batches;
:class:`ModuleState` restores what they changed, and reports it.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import random
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

OF_TORCH = frozenset({*vars(nn.Module()), "_compiled_call_impl", "_drivetrain"})
"""Attributes of every module, and that of a prepared one, which no forward writes."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type)
_numpy = np.random
_TEE: Any = type(itertools.tee((), 1)[0])

_GENERATORS: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (torch.Generator, lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    (random.Random, lambda one: one.getstate(), lambda one, state: one.setstate(state)),
    (_numpy.RandomState, lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    (
        _numpy.Generator,
        lambda one: one.bit_generator.state,
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
)
"""Generators of random numbers: their classes, and functions that read and set their state."""

_OF_GENERATORS = tuple(kind for kind, _, _ in _GENERATORS)

_LIBRARIES = frozenset({"torch", "transformers", "drivetrain_megatron"})
"""Packages whose forwards and hooks keep nothing in variables outside of a module."""

_FEW = 100
"""Elements of a container outside of a module that are compared; a larger one is data."""


@contextmanager
def without_gradients() -> Iterator[None]:
    """Run trial forwards without gradients."""
    with torch.no_grad(), warnings.catch_warnings():
        # Checkpoints warn of it; in training they have inputs that do.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        yield


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Context in which torch logs no traceback for an operator that cannot run without values, which raises, too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class Place(NamedTuple):
    """An attribute or buffer of a module.

    Args:
        path: name of the module.
        name: of the attribute or buffer, or of a variable outside of the module that its forward names.
        buffer: it is a buffer.
        owned: it belongs to the module.
    """

    path: str
    name: str
    buffer: bool
    owned: bool = True

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(frozen=True)
class Change:
    """A change that a forward made to an attribute or buffer.

    Args:
        value: the ``repr`` of an attribute, without the values of tensors.
        tensors: copies of a buffer, or of the tensors in an attribute, such as the last activation.
    """

    value: str
    tensors: tuple[Tensor, ...] = ()

    def same(self, other: Change | None) -> bool:
        """Whether another forward left the same."""
        if other is None or self.value != other.value or len(self.tensors) != len(other.tensors):
            return False
        return all(
            one.shape == two.shape
            # Power iterations in another order of rows differ in the last digits.
            and torch.allclose(one.double(), two.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
            for one, two in zip(self.tensors, other.tensors, strict=True)
        )


@final
class ModuleState:
    """Buffers and Python attributes of a module and of all modules in it, as they are now.

    Args:
        module: its parameters are not looked at.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.named_modules())
        for _, part in self._modules:
            _make_iterators_copyable(part)
        memo: dict[int, _Saved] = {}
        self._attributes = [
            {name: _saved(value, memo) for name, value in vars(part).items() if name not in OF_TORCH}
            for _, part in self._modules
        ]
        self._buffers = [
            {name: (one, _clone(one)) for name, one in part._buffers.items()}  # noqa: SLF001 (also those without value)
            for _, part in self._modules
        ]
        self._outside = [
            (Place(path, name, False, owned=False), read, write, _saved(read(), memo))
            for path, part in self._modules
            for name, read, write in _outside(part)
        ]

    def changes(self) -> dict[Place, Change]:
        """Return what has changed. Buffers registered since then are caches, and are left out."""
        found: dict[Place, Change] = {}
        for (path, part), attributes, buffers in zip(self._modules, self._attributes, self._buffers, strict=True):
            for name, (one, before) in buffers.items():
                now = part._buffers.get(name)  # noqa: SLF001
                if now is not None and not (now is one and _equal(now, before)):
                    found[Place(path, name, True)] = Change("", (now.detach().clone(),))
            for name, value in vars(part).items():
                if name in OF_TORCH or (name in attributes and attributes[name].unchanged(value)):
                    continue
                found[Place(path, name, False)] = Change(_told(value), tuple(_tensors(value)))
        for place, read, _, saved in self._outside:
            if not saved.unchanged(read()):
                found[place] = Change(_told(read()))
        return found

    def tensors_kept(self) -> dict[Place, Any]:
        """Return copies of the attributes with tensors that have changed."""
        modules, memo = dict(self._modules), dict[int, _Saved]()
        return {
            place: _saved(vars(modules[place.path])[place.name], memo)
            for place, change in self.changes().items()
            if change.tensors and not place.buffer
        }

    def put(self, kept: Mapping[Place, Any]) -> None:
        """Give attributes the values that :meth:`tensors_kept` has returned."""
        modules = dict(self._modules)
        for place, saved in kept.items():
            setattr(modules[place.path], place.name, saved.back())

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back. May be called many times."""
        for (_, part), attributes, buffers in zip(self._modules, self._attributes, self._buffers, strict=True):
            for name in [one for one in vars(part) if one not in OF_TORCH and one not in attributes]:
                del vars(part)[name]
            for name, saved in attributes.items():
                vars(part)[name] = saved.back()
            part._buffers.clear()  # noqa: SLF001
            for name, (one, before) in buffers.items():
                if one is not None and before is not None and not _equal(one, before):
                    one.copy_(before)
                part._buffers[name] = one  # noqa: SLF001
        for _, read, write, saved in self._outside:
            if not saved.unchanged(read()):
                write(saved.back())


@contextmanager
def unchanged(module: nn.Module, device: torch.device | None = None) -> Iterator[ModuleState]:
    """Whatever forwards of a module do in here is undone: attributes, buffers and random numbers."""
    state = ModuleState(module)
    with same_randomness(device):
        try:
            yield state
        finally:
            state.restore()


@final
class Once:
    """State that the forward of each micro-batch changes alike, and that must change once per batch.

    All micro-batches start from the same values.

    Args:
        module: of which.
        places: what.
    """

    def __init__(self, module: nn.Module, places: Iterable[Place]) -> None:
        chosen: dict[nn.Module, set[str]] = {}
        for place in places:
            chosen.setdefault(module.get_submodule(place.path), set()).add(place.name)
        for part in chosen:
            _make_iterators_copyable(part)
        self._buffers = [
            (part, name, part._buffers[name], _clone(part._buffers[name]))  # noqa: SLF001
            for part, names in chosen.items()
            for name in names & part._buffers.keys()  # noqa: SLF001
        ]
        memo: dict[int, _Saved] = {}
        self._attributes = [
            (part, name, _saved(vars(part)[name], memo) if name in vars(part) else None)
            for part, names in chosen.items()
            for name in names - part._buffers.keys()  # noqa: SLF001
        ]
        self._random = (random.getstate(), _numpy.get_state())
        self._left: dict[tuple[int, str], Any] = {}

    def begin(self) -> None:
        """One more forward begins."""
        self._note()
        random.setstate(self._random[0])
        _numpy.set_state(self._random[1])
        for part, name, _, before in self._buffers:
            # A tensor of its own for each: graphs of earlier forwards keep theirs.
            part._buffers[name] = None if before is None else before.clone()  # noqa: SLF001
        self._attributes_back()

    def end(self, *, keep: bool) -> None:
        """All forwards have run; with ``keep`` what one of them left stays, else nothing."""
        self._note()
        for part, name, one, before in self._buffers:
            left = self._left.get((id(part), name), before) if keep else before
            part._buffers[name] = one  # noqa: SLF001
            if one is not None and left is not None and one.shape != left.shape:
                part._buffers[name] = left  # noqa: SLF001
            elif one is not None and left is not None:
                # Not a change of version: what autograd kept was read before.
                one.data.copy_(left)
        self._attributes_back()
        if keep:
            for part, name, _ in self._attributes:
                if (id(part), name) in self._left:
                    vars(part)[name] = self._left[id(part), name].back()

    def _note(self) -> None:
        for part, name, _, before in self._buffers:
            now = part._buffers[name]  # noqa: SLF001
            if now is not None and not _equal(now, before):
                self._left[id(part), name] = now.detach()
        for part, name, saved in self._attributes:
            if name in vars(part) and (saved is None or not saved.unchanged(vars(part)[name])):
                self._left[id(part), name] = _saved(vars(part)[name], {})

    def _attributes_back(self) -> None:
        for part, name, saved in self._attributes:
            if saved is None:
                vars(part).pop(name, None)
            else:
                vars(part)[name] = saved.back()


@contextmanager
def once(module: nn.Module, places: Collection[Place], *, keep: bool = False) -> Iterator[Once]:
    """Forwards of parts of one batch run in here; see :class:`Once`. An error undoes what they changed."""
    made = Once(module, places)
    try:
        yield made
    except BaseException:
        made.end(keep=False)
        raise
    made.end(keep=keep)


@contextmanager
def same_randomness(device: torch.device | None = None) -> Iterator[None]:
    """Restore the random states of Python, numpy, torch and a device on exit."""
    python, numpys = random.getstate(), _numpy.get_state()
    devices = [] if device is None or device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            _numpy.set_state(numpys)


@dataclass
class _Saved:
    """An object and what was in it; only the object itself where nothing is known of its inside."""

    value: Any
    inside: _Inside | None = None

    def back(self) -> Any:
        return self.value if self.inside is None else self.inside.put(self.value)

    def unchanged(self, now: Any) -> bool:
        if type(now) is not type(self.value):
            return False
        if isinstance(now, _PLAIN):
            return bool(now == self.value or now != now)  # noqa: PLR0124 (NaN)
        return now is self.value and (self.inside is None or self.inside.same(now))


def _saved(value: Any, memo: dict[int, _Saved]) -> _Saved:
    if isinstance(value, _PLAIN):
        return _Saved(value)
    if id(value) not in memo:
        memo[id(value)] = made = _Saved(value)
        kind = _kind(value)
        made.inside = None if kind is None else kind(value, memo)
    return memo[id(value)]


class _Inside(Protocol):
    """Content of an object of one kind when this is made.

    Args:
        value: the object.
        memo: what is saved of others, by identity.
    """

    def __init__(self, value: Any, memo: dict[int, _Saved]) -> None: ...

    def put(self, value: Any) -> Any:
        """Put it back; returns the object, or one that takes its place."""

    def same(self, now: Any) -> bool:
        """Whether the object still has it."""


class _State:
    """State of a generator of random numbers."""

    def __init__(self, value: Any, memo: dict[int, _Saved]) -> None:
        self._state = _state(value)

    def put(self, value: Any) -> Any:
        next(write for kind, _, write in _GENERATORS if isinstance(value, kind))(value, self._state)
        return value

    def same(self, now: Any) -> bool:
        return _digest(_state(now)) == _digest(self._state)


class _Copy:
    """A copy of an iterator, from which further ones are made."""

    def __init__(self, value: Any, memo: dict[int, _Saved]) -> None:
        self._copy = value.__copy__()

    def put(self, value: Any) -> Any:
        return self._copy.__copy__()

    def same(self, now: Any) -> bool:
        return False


class _Variables:
    """Variables of the function around a function."""

    def __init__(self, value: FunctionType, memo: dict[int, _Saved]) -> None:
        self._cells = [(cell, _saved(cell.cell_contents, memo)) for cell in _cells(value)]

    def put(self, value: Any) -> Any:
        for cell, one in self._cells:
            cell.cell_contents = one.back()
        return value

    def same(self, now: Any) -> bool:
        return all(one.unchanged(cell.cell_contents) for cell, one in self._cells)


class _Values:
    """Values of a tensor."""

    def __init__(self, value: Tensor, memo: dict[int, _Saved]) -> None:
        self._before = _clone(value)

    def put(self, value: Tensor) -> Any:
        if self._before is not None and not _equal(value, self._before):
            value.copy_(self._before)
        return value

    def same(self, now: Tensor) -> bool:
        return _equal(now, self._before)


class _Items:
    """Items of a dict, or attributes of an object."""

    def __init__(self, value: Any, memo: dict[int, _Saved]) -> None:
        self._items = {key: _saved(one, memo) for key, one in _items(value).items()}

    def put(self, value: Any) -> Any:
        items = _items(value)
        items.clear()
        items.update({key: one.back() for key, one in self._items.items()})
        return value

    def same(self, now: Any) -> bool:
        items = _items(now)
        return items.keys() == self._items.keys() and all(one.unchanged(items[key]) for key, one in self._items.items())


class _Elements:
    """Elements of a list."""

    def __init__(self, value: Any, memo: dict[int, _Saved]) -> None:
        self._elements = [_saved(one, memo) for one in value]

    def put(self, value: Any) -> Any:
        value.clear()
        value.extend(one.back() for one in self._elements)
        return value

    def same(self, now: Any) -> bool:
        pairs = zip(self._elements, now, strict=False)
        return len(now) == len(self._elements) and all(one.unchanged(other) for one, other in pairs)


class _Members:
    """Members of a set."""

    def __init__(self, value: set[Any], memo: dict[int, _Saved]) -> None:
        self._members = set(value)

    def put(self, value: set[Any]) -> Any:
        value.clear()
        value.update(self._members)
        return value

    def same(self, now: set[Any]) -> bool:
        return now == self._members


_KINDS: tuple[tuple[Any, type[_Inside]], ...] = (
    (_OF_GENERATORS, _State),
    (_TEE, _Copy),
    (FunctionType, _Variables),
    (Tensor, _Values),
    (dict, _Items),
    ((list, deque), _Elements),
    (set, _Members),
)


def _kind(value: Any) -> type[_Inside] | None:
    if isinstance(value, nn.Parameter):
        return None
    return next((inside for kind, inside in _KINDS if isinstance(value, kind)), _Items if _is_record(value) else None)


def _items(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else vars(value)


def _state(generator: Any) -> Any:
    return next(read for kind, read, _ in _GENERATORS if isinstance(generator, kind))(generator)


def _digest(state: Any) -> int:
    return zlib.crc32(state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state))


def _make_iterators_copyable(part: nn.Module) -> None:
    """Replace Python's own iterators among the attributes of a module by ones that give the same and can be copied."""
    for name, value in list(vars(part).items()):
        of_python = isinstance(value, Iterator) and type(value).__module__ in {"builtins", "itertools"}
        if of_python and not isinstance(value, _TEE):
            setattr(part, name, itertools.tee(value, 1)[0])


def _cells(function: FunctionType) -> list[CellType]:
    """Return the variables of a function around another that are small enough to be compared."""
    return [cell for cell in function.__closure__ or () if _is_filled(cell) and _is_small(cell.cell_contents)]


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (reading raises where there is none)
    except ValueError:
        return False
    return True


def _is_small(value: Any) -> bool:
    """Whether a value outside of a module is a number, or a small container of numbers, or a generator of them."""
    if isinstance(value, (list, dict, set, deque)):
        content = value.values() if isinstance(value, dict) else value
        return len(value) <= _FEW and all(isinstance(one, _PLAIN) for one in content)
    return isinstance(value, (*_PLAIN, *_OF_GENERATORS))


def _outside(part: nn.Module) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Variables outside of a module that its forward and its hooks name, and functions that read and set them."""
    hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())  # noqa: SLF001 (no public list of them)
    forwards = [kind.__dict__["forward"] for kind in type(part).__mro__ if "forward" in kind.__dict__]
    for called in (*forwards, *([vars(part)["forward"]] if "forward" in vars(part) else []), *hooks):
        owner, function = getattr(called, "__self__", None), getattr(called, "__func__", called)
        if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] in _LIBRARIES:
            continue
        scope = function.__globals__
        for name in function.__code__.co_names:
            if name in scope and not isinstance(scope[name], type) and _is_small(scope[name]):
                yield f"global {name}", partial(scope.__getitem__, name), partial(scope.__setitem__, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell) and _is_small(cell.cell_contents):
                read = partial(getattr, cell, "cell_contents")
                yield f"nonlocal {name}", read, partial(setattr, cell, "cell_contents")
        if owner is not None and _is_record(owner):
            for name, value in vars(owner).items():
                if _is_small(value):
                    yield f"{type(owner).__name__}.{name}", partial(getattr, owner, name), partial(setattr, owner, name)


def _is_record(value: Any) -> bool:
    """An object of the user's own that is nothing but its attributes."""
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__") or callable(value):
        return False
    own = any("__reduce_ex__" in vars(kind) or "__reduce__" in vars(kind) for kind in type(value).__mro__[:-1])
    return not own and not type(value).__module__.startswith("torch")


def _clone(value: Tensor | None) -> Tensor | None:
    # A tensor without a value stays what it is.
    if value is None or value.is_meta or isinstance(value, FakeTensor):
        return None
    return value.detach().clone()


def _equal(value: Tensor | None, before: Tensor | None) -> bool:
    if value is None or before is None:
        return True
    if value.shape != before.shape or value.dtype != before.dtype:
        return False
    return torch.equal(value, before) or bool(torch.allclose(value.double(), before.double(), 0, 0, equal_nan=True))


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Copies of the tensors in an attribute that have values."""
    if isinstance(value, Tensor):
        made = _clone(value)
        yield torch.empty(0) if made is None else made
    elif not isinstance(value, _PLAIN) and depth:
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, (list, tuple, deque, set)):
            inner = value
        elif _is_record(value):
            inner = vars(value).values()
        for one in inner:
            yield from _tensors(one, depth - 1)


def _told(value: Any, depth: int = 4) -> str:
    """Return the ``repr`` of an attribute without addresses."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor) or depth == 0:
        return type(value).__name__
    if isinstance(value, _OF_GENERATORS):
        return f"{type(value).__name__} at {_digest(_state(value)):x}"
    if isinstance(value, FunctionType):
        return _told([cell.cell_contents for cell in _cells(value)], depth - 1)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_told(one, depth - 1)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple, deque)):
        return "[" + ", ".join(_told(one, depth - 1) for one in value) + "]"
    if isinstance(value, set):
        return repr(sorted(map(repr, value)))
    return _told(vars(value), depth - 1) if _is_record(value) else type(value).__name__
