"""Saves and restores a module's state besides its parameters around trial forwards.

A forward may count its calls in a Python attribute, move running statistics, fill a cache or draw random numbers.
Pipelines and tensor-parallel plans run trial forwards, and split the script's forwards into micro-batches;
:class:`ModuleState` restores what they changed, and reports it.
"""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

OF_TORCH = frozenset({*vars(nn.Module()), "_compiled_call_impl", "_drivetrain"})
"""Attributes of every module, and that of a prepared one, which no forward writes."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type)
_numpy = np.random


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
        name: of the attribute or buffer.
        buffer: it is a buffer.
    """

    path: str
    name: str
    buffer: bool

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(frozen=True)
class Change:
    """A change that a forward made to an attribute or buffer.

    Args:
        value: a copy of a buffer; the ``repr`` of an attribute.
        tensors: an attribute with tensors in it, such as the last activation.
    """

    value: Tensor | str
    tensors: bool = False

    def same(self, other: Change | None) -> bool:
        """Whether another forward left the same."""
        if other is None or self.tensors != other.tensors:
            return False
        if isinstance(self.value, Tensor) and isinstance(other.value, Tensor):
            return self.value.shape == other.value.shape and torch.allclose(
                # Power iterations in another order of rows differ in the last digits.
                self.value.double(),
                other.value.double(),
                rtol=1e-4,
                atol=1e-6,
                equal_nan=True,
            )
        return bool(self.value == other.value)


@final
class ModuleState:
    """Buffers and Python attributes of a module and of all modules in it, as they are now.

    Args:
        module: its parameters are not looked at.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.named_modules())
        memo: dict[int, _Saved] = {}
        self._attributes = [
            {name: _saved(value, memo) for name, value in vars(part).items() if name not in OF_TORCH}
            for _, part in self._modules
        ]
        self._buffers = [
            {name: (one, _clone(one)) for name, one in part._buffers.items()}  # noqa: SLF001 (also those without value)
            for _, part in self._modules
        ]

    def changes(self) -> dict[Place, Change]:
        """Return what has changed. Buffers registered since then are caches, and are left out."""
        found: dict[Place, Change] = {}
        for (path, part), attributes, buffers in zip(self._modules, self._attributes, self._buffers, strict=True):
            for name, (one, before) in buffers.items():
                now = part._buffers.get(name)  # noqa: SLF001
                if now is not None and not (now is one and _equal(now, before)):
                    found[Place(path, name, True)] = Change(now.detach().clone())
            for name, value in vars(part).items():
                if name in OF_TORCH or (name in attributes and attributes[name].unchanged(value)):
                    continue
                found[Place(path, name, False)] = Change(_told(value), _has_tensors(value))
        return found

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
            part._buffers[name] = one  # noqa: SLF001
            left = self._left.get((id(part), name), before) if keep else before
            if one is not None and left is not None:
                # Not a change of version: what autograd kept was read before.
                one.data.copy_(left)
        self._attributes_back()
        if keep:
            for part, name, _ in self._attributes:
                if (id(part), name) in self._left:
                    vars(part)[name] = self._left[id(part), name]

    def _note(self) -> None:
        for part, name, _, before in self._buffers:
            now = part._buffers[name]  # noqa: SLF001
            if now is not None and not _equal(now, before):
                self._left[id(part), name] = now.detach()
        for part, name, saved in self._attributes:
            if name in vars(part) and (saved is None or not saved.unchanged(vars(part)[name])):
                self._left[id(part), name] = copy.copy(vars(part)[name])

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
    inside: Any = None

    def back(self) -> Any:
        value, inside = self.value, self.inside
        if inside is None:
            return value
        if isinstance(value, Tensor):
            if not _equal(value, inside):
                value.copy_(inside)
        elif isinstance(value, dict):
            value.clear()
            value.update({key: one.back() for key, one in inside.items()})
        elif isinstance(value, (list, deque)):
            value.clear()
            value.extend(one.back() for one in inside)
        elif isinstance(value, set):
            value.clear()
            value.update(inside)
        else:
            vars(value).clear()
            vars(value).update({key: one.back() for key, one in inside.items()})
        return value

    def unchanged(self, now: Any) -> bool:
        if type(now) is not type(self.value):
            return False
        if isinstance(now, _PLAIN):
            return bool(now == self.value or now != now)  # noqa: PLR0124 (NaN)
        if now is not self.value:
            return False
        inside = self.inside
        if inside is None:
            return True
        if isinstance(now, Tensor):
            return _equal(now, inside)
        if isinstance(now, set):
            return bool(now == inside)
        if isinstance(now, (list, deque)):
            return len(now) == len(inside) and all(one.unchanged(other) for one, other in zip(inside, now, strict=True))
        content = now if isinstance(now, dict) else vars(now)
        return content.keys() == inside.keys() and all(one.unchanged(content[key]) for key, one in inside.items())


def _saved(value: Any, memo: dict[int, _Saved]) -> _Saved:
    if isinstance(value, _PLAIN):
        return _Saved(value)
    if id(value) in memo:
        return memo[id(value)]
    memo[id(value)] = made = _Saved(value)
    if isinstance(value, Tensor):
        made.inside = None if isinstance(value, nn.Parameter) else _clone(value)
    elif isinstance(value, dict):
        made.inside = {key: _saved(one, memo) for key, one in value.items()}
    elif isinstance(value, (list, deque)):
        made.inside = [_saved(one, memo) for one in value]
    elif isinstance(value, set):
        made.inside = set(value)
    elif _is_record(value):
        made.inside = {key: _saved(one, memo) for key, one in vars(value).items()}
    return made


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


def _has_tensors(value: Any, depth: int = 4) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, _PLAIN) or depth == 0:
        return False
    if isinstance(value, dict):
        return any(_has_tensors(one, depth - 1) for one in value.values())
    if isinstance(value, (list, tuple, deque, set)):
        return any(_has_tensors(one, depth - 1) for one in value)
    return _is_record(value) and any(_has_tensors(one, depth - 1) for one in vars(value).values())


def _told(value: Any, depth: int = 4) -> str:
    """Return the ``repr`` of an attribute without addresses."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor) or depth == 0:
        return type(value).__name__
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_told(one, depth - 1)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple, deque)):
        return "[" + ", ".join(_told(one, depth - 1) for one in value) + "]"
    if isinstance(value, set):
        return repr(sorted(map(repr, value)))
    return _told(vars(value), depth - 1) if _is_record(value) else type(value).__name__
