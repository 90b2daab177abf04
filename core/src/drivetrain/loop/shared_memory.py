"""Refuses parameters that share memory under engines that move parameters, which would untie them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, final
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.errors import UnsupportedError

_LOOSE = "the parameter that no model holds"


@dataclass(frozen=True)
class Place:
    """Memory of a parameter or buffer.

    Args:
        name: of it, in its model.
        model: class of its model; empty for a parameter that no model holds.
        owner: identifies its model.
        tensor: returns it, or ``None`` once it is gone.
        is_parameter: it is no buffer.
        space: 0, or identifies the storage of a tensor on meta, which has no addresses.
        begin, end: byte addresses, on meta bytes from the beginning of the storage.
        storage: identifies its storage.
    """

    name: str
    model: str
    owner: int
    tensor: Callable[[], Tensor | None]
    is_parameter: bool
    space: int
    begin: int
    end: int
    storage: int

    @property
    def full_name(self) -> str:
        return f"{self.name} of {self.model}" if self.model else self.name

    @property
    def is_frozen(self) -> bool:
        tensor = self.tensor()
        return self.is_parameter and tensor is not None and not tensor.requires_grad

    def overlaps(self, other: Place) -> bool:
        """Whether an element belongs to both; once a tensor is gone, whether a byte does."""
        if self.begin >= other.end or other.begin >= self.end:
            return False
        one, another = self.tensor(), other.tensor()
        if one is None or another is None or one.dtype != another.dtype:
            return True
        if one.is_contiguous() or another.is_contiguous():
            return True
        # Columns of one matrix lie between each other and share no element.
        first = min(self.begin, other.begin)
        size = one.element_size()
        marks = torch.zeros((max(self.end, other.end) - first) // size, dtype=torch.uint8)
        for place, tensor in ((self, one), (other, another)):
            marks.as_strided(tensor.shape, tensor.stride(), (place.begin - first) // size).add_(1)
        return bool((marks > 1).any())


def place_of(name: str, owner: nn.Module | None, tensor: Tensor, *, is_parameter: bool) -> Place | None:
    """Return where a tensor lies; ``None`` where it has no memory that another one could share."""
    wraps: Any = is_traceable_wrapper_subclass
    if is_lazy(tensor):  # It has no memory yet.
        return None
    if tensor.layout is not torch.strided or wraps(tensor) or not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    if storage.device.type == "meta" and not tensor.is_meta:  # A fake tensor: another stage has the values.
        return None
    try:
        allocated = tensor.is_meta or storage.data_ptr()
    except RuntimeError:  # A lazy device has no addresses, and no two of its tensors are in one memory.
        allocated = False
    if not allocated:
        return None
    identity = storage._cdata  # noqa: SLF001 (identifies a storage, as in torch.multiprocessing)
    begin = int(tensor.storage_offset()) * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = begin + (int(last) + 1) * tensor.element_size()
    model = "" if owner is None else type(owner).__name__
    space = identity if tensor.is_meta else 0
    return Place(name, model, id(owner), ref(tensor), is_parameter, space, begin, end, identity)


def places(module: nn.Module) -> list[Place]:
    """Return where the parameters and buffers of a module lie."""
    parameters = [place_of(name, module, each, is_parameter=True) for name, each in module.named_parameters()]
    buffers = [place_of(name, module, each, is_parameter=False) for name, each in module.named_buffers()]
    return [place for place in (*parameters, *buffers) if place is not None]


def _overlapping(found: Iterable[Place]) -> Iterator[tuple[Place, Place]]:
    """Pairs of different tensors in one memory, a parameter among them at least, which comes first."""
    ordered = sorted(found, key=lambda place: (place.space, place.begin))
    for index, place in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.space != place.space or other.begin >= place.end:
                break
            if place.tensor() is other.tensor() or not (place.is_parameter or other.is_parameter):
                continue
            if place.overlaps(other):
                yield (place, other) if place.is_parameter else (other, place)


@final
class SharedMemory:
    """Refuses models with parameters that share memory.

    Args:
        engine: its name in errors.
        moves: the engine moves parameters. One that does not may keep them together.
    """

    def __init__(self, engine: str, *, moves: bool) -> None:
        self._engine, self._moves = engine, moves
        self._earlier: dict[int, Place] = {}
        self._numbers = count()

    def pairs(self, module: nn.Module) -> dict[frozenset[str], UnsupportedError]:
        """Parameters that share memory with one another or with buffers, if the engine may keep them together.

        Returns:
            The error for each pair, by their names. It refers to no tensor, which an engine may exchange.
        """
        if self._moves:
            return {}
        found = _overlapping(places(module))
        return {frozenset((one.name, other.name)): self._two_in_one(one, other) for one, other in found}

    def check_kept(self, module: nn.Module, pairs: Mapping[frozenset[str], UnsupportedError]) -> None:
        """Compare with what :meth:`pairs` found before the engine prepared the model. Not collective.

        Raises:
            UnsupportedError: the engine has moved them apart, or to a device one by one, as ``model.to(device)`` does.
        """
        kept = self.pairs(module) if pairs else {}
        for names, error in pairs.items():
            if names not in kept:
                raise error

    def check(self, modules: Sequence[nn.Module], loose: Iterable[Tensor] = ()) -> None:
        """Compare models that are about to be prepared with each other and with those before. Not collective.

        Two parameters that are both frozen have the same values on any engine as long as they stay so, see :meth:`add`.

        Args:
            modules: the models.
            loose: parameters of prepared optimizers that neither these nor earlier models hold.

        Raises:
            UnsupportedError: two parameters, or a parameter and a buffer, share memory.
        """
        mine = [place for module in modules for place in places(module)]
        beside = [place_of(_LOOSE, None, each, is_parameter=True) for each in loose]
        mine += [each for each in beside if each is not None]
        for one, other in _overlapping([*self._before(mine), *mine]):
            if not (one.is_frozen and other.is_frozen):
                raise self._two_in_one(one, other)

    def add(self, module: nn.Module) -> list[str]:
        """Record a checked model that the engine is about to prepare. Not collective.

        Returns:
            Names of its frozen parameters that share memory with another frozen one: see :func:`check_still_frozen`.
        """
        if not self._moves:
            return []
        mine = [place for place in places(module) if place.is_parameter]
        shared = {id(place.tensor()) for pair in _overlapping([*self._before(mine), *mine]) for place in pair}
        for place in mine:
            tensor = place.tensor()
            assert tensor is not None
            number = next(self._numbers)
            self._earlier[number] = place
            # Another storage may have its identity when it is gone.
            finalize(tensor.untyped_storage(), self._earlier.pop, number, None).atexit = False
        return [place.name for place in mine if id(place.tensor()) in shared]

    def clear(self) -> None:
        """Remove all models, which are no longer prepared."""
        self._earlier.clear()

    def _before(self, found: Sequence[Place]) -> list[Place]:
        """Parameters of earlier calls in the storages of these, wherever an engine has moved them since."""
        known = {place.storage for place in found}
        return [place for place in self._earlier.values() if place.storage in known]

    def _two_in_one(self, one: Place, other: Place) -> UnsupportedError:
        kind = "two parameters" if other.is_parameter else "a parameter and a buffer"
        where = f"{one.full_name} and {other.full_name}"
        if one.owner == other.owner:
            where = f"{one.name} and {other.full_name}"
        # The parameters of an earlier model are the engine's by now, and may have neither.
        here = (one.tensor(), other.tensor()) if one.owner == other.owner else ()
        views = [(tuple(each.shape), each.stride()) for each in here if each is not None]
        if not other.is_parameter:
            advice = f"Compute with the parameter itself where {other.name} is used"
        elif one.owner != other.owner:
            advice = "Put both into one module that is prepared as a whole, and assign the one parameter to both names"
        elif len(views) < 2 or views[0] == views[1]:
            advice = f"Tie them as one parameter, {other.name} = {one.name}"
        elif views[0] == (views[1][0][::-1], views[1][1][::-1]):
            advice = f"Use the one parameter for both, as in F.linear(h, {one.name}.t())"
        else:
            advice = f"Use the larger parameter for both, as in F.linear(x, {one.name}[:4])"
        untied = f"{other.name}.data = {other.name}.data.clone()"
        if other.name == _LOOSE:
            untied = f"p.data = p.data.clone(), where p is {_LOOSE}"
        return UnsupportedError(
            f"{where} are {kind} in one memory, and {self._engine} moves parameters, so that they would no longer "
            "share it",
            cure=f"{advice}; or give each its own memory before prepare: {untied}.",
        )


def check_still_frozen(module: nn.Module, names: Sequence[str]) -> None:
    """Refuse to train a parameter that was frozen at ``prepare`` and shared memory with another one then.

    Args:
        module: the prepared model.
        names: what :meth:`SharedMemory.add` returned.

    Raises:
        UnsupportedError: one of them requires a gradient by now.
    """
    for name in names:
        if module.get_parameter(name).requires_grad:
            raise UnsupportedError(
                f"{name} of {type(module).__name__} was frozen when it was prepared and shared its memory with another "
                "parameter, which would not follow its updates",
                cure="Tie them as one parameter before prepare, or give each its own memory before prepare: "
                f"{name}.data = {name}.data.clone().",
            )
