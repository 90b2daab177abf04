"""Makes tensors and numpy arrays that alias a parameter's former memory raise after an engine has moved it.

``p.data``, ``p.detach()``, ``p[0]`` and the tensors of ``model.state_dict()`` lie in the memory of their parameters. In
plain torch they follow the training, and what is written to them reaches the model. Once an engine has moved the
parameter, they keep its first values and reach nothing.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop.shared_memory import Place, place_of, places

_ABOUT = frozenset(
    {
        *("shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "__len__", "stride", "is_contiguous"),
        *("dtype", "device", "layout", "get_device", "itemsize", "element_size", "nbytes", "names", "name"),
        *("requires_grad", "requires_grad_", "grad", "is_leaf", "grad_fn", "retains_grad", "_version"),
        *("is_floating_point", "is_complex", "is_signed", "is_sparse", "is_quantized", "is_nested", "is_inference"),
        *("is_cuda", "is_cpu", "is_xpu", "is_hpu", "is_npu", "is_mps", "is_mtia", "is_xla", "is_meta", "is_mkldnn"),
        *("untyped_storage", "data_ptr", "storage_offset", "is_shared", "is_pinned", "_backward_hooks"),
    }
)
"""Names attributes and methods that read no values, which any such tensor answers."""

_EXPORTS = frozenset({"numpy", "__array__", "__dlpack__"})
"""Names methods that hand the memory to another library, which would go on reading and writing it."""


@final
class FormerMemory:
    """The script's tensors in the memory of a module's parameters, which an engine is about to move.

    They are not kept alive. Costs a search through the objects of the process if there are any, else some microseconds
    for each parameter.

    Args:
        engine: its name in errors.
        module: the engine has not moved its parameters yet.
        moved_later: it moves them in the first forward, before which :meth:`look` is called again.

    Raises:
        UnsupportedError: a numpy array is in this memory, whose uses cannot be detected.
    """

    def __init__(self, engine: str, module: nn.Module, *, moved_later: bool = False) -> None:
        self.engine, self.model, self.moved_later = engine, type(module).__name__, moved_later
        self.when = "its first forward" if moved_later else "accelerator.prepare"
        """Time at which the engine moves them."""
        self._module = ref(module)
        for parameter in module.parameters():
            if isinstance(parameter, _KINDS):  # It was found beside an earlier model, both frozen.
                del vars(parameter)["drivetrain_memory"]
                parameter.__class__ = _ordinary(parameter)  # type: ignore[assignment]
        self._tensors: dict[int, tuple[ref[Tensor], list[Place]]] = {}
        self._prepared: dict[str, tuple[int, int, bool]] = {}
        """Identity, version and requires_grad of each parameter as it was prepared. No weak references: torch refuses
        to exchange a tensor that has one, which a later prepare may do."""
        self.stepped = False
        """An optimizer has stepped on the module."""
        self.look()

    def look(self) -> None:
        """Find the script's tensors in the memory of the parameters, before the engine moves them. Not collective."""
        module = self._module()
        assert module is not None, "it is prepared or called"
        own = {id(each) for each in (*module.parameters(), *module.buffers())}
        parameters = [place for place in places(module) if place.is_parameter and not place.space]
        for tensor in _tensors_in(parameters, own):
            alias = place_of("", None, tensor, is_parameter=False)
            mine = [each for each in parameters if alias is not None and each.overlaps(alias)]
            if not mine:
                continue
            if not (all(each.is_frozen for each in mine) or tensor.untyped_storage().resizable()) and _exported(tensor):
                raise UnsupportedError(
                    f"an array of numpy lies in the memory of {mine[0].name} of {self.model}, and {self.engine} moves "
                    "parameters: the array would keep the first values, and the model would not see what is written "
                    "to it",
                    cure="Before prepare, copy it (array = p.detach().numpy().copy()) or delete it (del array). Take "
                    "later values from model.parameters() after prepare.",
                )
            self._tensors[id(tensor)] = ref(tensor), mine

    def refuse_those_left(self) -> None:
        """Make tensors raise on use if the engine has moved their parameters by now. Not collective."""
        module = self._module()
        if module is None:
            return
        present = dict(module.named_parameters())
        for name, one in present.items():
            if name not in self._prepared:
                self._prepared[name] = id(one), _version(one), one.requires_grad
        for number, (alive, mine) in list(self._tensors.items()):
            tensor = alive()
            moved = [each for each in mine if each.name in present and not _lies_in(present[each.name], each.storage)]
            if tensor is None or moved:
                del self._tensors[number]
            if tensor is not None and moved:
                _mark(tensor, self, moved[0].name)

    def before_step(self) -> None:
        """Note that an optimizer steps on the module, whose parameters every engine has moved by then."""
        if not self.stepped:
            self.moved_later, self.stepped = False, True
            self.refuse_those_left()

    def changed(self, name: str) -> bool:
        """Whether a parameter may have other values than when it left its memory."""
        number, version, trained = self._prepared[name]
        module = self._module()
        present = None if module is None else dict(module.named_parameters()).get(name)
        if present is not None and id(present) == number:
            trained = trained or present.requires_grad
            if _version(present) != version:
                return True
        return trained and (self.stepped or module is None)


def check_readable(name: str, tensors: Iterable[Any]) -> None:
    """Raise :class:`UsageError` as reading these would, where torch would put that into an error of its own.

    Args:
        name: of the function that is going to read them.
        tensors: other objects among them pass.
    """
    for one in tensors:
        if isinstance(one, _KINDS) and _has_changed(one):
            _refuse(name, one)


def _version(parameter: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (an engine's parameters may refuse to be asked)
        return 0 if parameter.is_inference() else parameter._version  # noqa: SLF001 (torch has no public word for it)


def _lies_in(parameter: Tensor, storage: int) -> bool:
    """Whether a parameter, or a part of it that this rank has, lies in a storage."""
    wraps: Any = is_traceable_wrapper_subclass
    if wraps(parameter):
        whole: Any = parameter
        parts = [getattr(parameter, name) for name in whole.__tensor_flatten__()[0]]
        return any(_lies_in(each, storage) for each in parts if isinstance(each, Tensor))
    return parameter.layout is torch.strided and _storage_of(parameter) == storage


# ---- finding tensors and arrays --------------------------------------------------------------------------------------


def _tensors_in(where: Sequence[Place], own: Collection[int]) -> list[Tensor]:
    """Tensors in the storages of these parameters, without those of these identifiers."""
    held: dict[int, int] = {}
    for place in where:
        held[place.storage] = held.get(place.storage, 0) + 1
    count: Any = torch._C._storage_Use_Count  # noqa: SLF001 (as in torch's CUDA graphs; there is no public way)
    # Newer releases of torch keep the Python object of a storage that was asked for, which is one more reference.
    alone = torch.empty(1)
    python = count(_storage_of(alone)) - 1
    shared = {storage for storage, mine in held.items() if count(storage) > mine + python}
    if not shared:
        return []
    everything = gc.get_objects()
    # Asking each class is much cheaper than asking each object.
    kinds = {kind for kind in set(map(type, everything)) if issubclass(kind, Tensor)}
    found = [each for each in everything if type(each) in kinds and id(each) not in own]
    return [each for each in found if _storage_of(each) in shared]


def _storage_of(tensor: Tensor) -> int | None:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (as tensor subclasses of torch do)
        try:
            number: int = tensor.untyped_storage()._cdata  # noqa: SLF001 (identifies it, as in torch.multiprocessing)
        except (RuntimeError, NotImplementedError):  # Sparse and functional tensors have none.
            return None
    return number


def _exported(tensor: Tensor) -> bool:
    """Whether an object invisible to Python's garbage collector refers to a tensor, as a numpy array does."""
    total, number = sys.getrefcount(tensor) - 1, id(tensor)
    known = sum(list(map(id, gc.get_referents(each))).count(number) for each in gc.get_referrers(tensor))
    return total > known + sum(_local_names(frame).count(number) for frame in _running())


def _local_names(frame: FrameType) -> list[int]:
    """Return the ``id`` of each local variable's value; the garbage collector covers closures."""
    code, values = frame.f_code, frame.f_locals
    found = [id(values[name]) for name in code.co_varnames if name in values and name not in code.co_cellvars]
    if sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()  # A copy, which the frame would keep, and all that is in it.
    return found


def _running() -> Iterator[FrameType]:
    for frame in sys._current_frames().values():  # noqa: SLF001 (the documented way to all threads)
        each: FrameType | None = frame
        while each is not None:
            yield each
            each = each.f_back


# ---- tensors that raise ----------------------------------------------------------------------------------------------


def _mark(tensor: Tensor, memory: FormerMemory, name: str) -> None:
    for plain, kind in ((Tensor, FormerTensor), (nn.Parameter, FormerParameter)):
        if type(tensor) is plain:
            vars(tensor)["drivetrain_memory"] = memory, name
            tensor.__class__ = kind


def _call(
    _cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run an operation on tensors in memory that parameters have left.

    Raises:
        UsageError: it reads values that a parameter no longer has, or it writes.
    """
    kwargs = kwargs or {}
    name = str(getattr(func, "__name__", func))
    if name in {"__get__", "__set__", "__delete__"}:
        name = str(func.__self__.__name__)
    mine = list({id(one): one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, _KINDS)}.values())
    if name in {"__repr__", "__format__"} and _has_changed(mine[0]):
        memory, parameter = mine[0].drivetrain_memory
        when = memory.when.removeprefix("accelerator.")
        return f"<tensor of {tuple(mine[0].shape)} where {parameter} of {memory.model} was before {when}>"
    for one in mine:
        if name not in _ABOUT and (name in _EXPORTS or _has_changed(one)):
            _refuse(name, one)
    with _as_ordinary(mine):
        before = [_version(one) for one in mine]
        result = func(*args, **kwargs)
        written = [one for one, version in zip(mine, before, strict=True) if _version(one) != version]
        # Views of them, and what `data` and `detach()` give.
        owners = {_storage_of(one): one for one in mine}
        for one in pytree.tree_leaves(result):
            owner = owners.get(_storage_of(one)) if isinstance(one, Tensor) else None
            if owner is not None and all(one is not each for each in mine):
                _mark(one, *vars(owner)["drivetrain_memory"])
    if written:
        _refuse(name, written[0])
    return result


@contextmanager
def _as_ordinary(tensors: Sequence[Any]) -> Iterator[None]:
    """Context in which they are of their own classes. Those that are given other memory in it stay so."""
    before = [(one, type(one), _storage_of(one)) for one in tensors]
    for one in tensors:
        one.__class__ = _ordinary(one)
    try:
        yield
    finally:
        for one, kind, storage in before:
            if _storage_of(one) == storage:
                one.__class__ = kind
            else:
                del vars(one)["drivetrain_memory"]


def _ordinary(tensor: Tensor) -> type[Tensor]:
    return Tensor if isinstance(tensor, FormerTensor) else nn.Parameter


class FormerTensor(Tensor):
    """A tensor in memory that a parameter has left."""

    drivetrain_memory: tuple[FormerMemory, str]
    __torch_function__: Any = classmethod(_call)


class FormerParameter(nn.Parameter):
    """A parameter, which is of another model, in memory that a parameter has left."""

    drivetrain_memory: tuple[FormerMemory, str]
    __torch_function__: Any = classmethod(_call)


_KINDS = (FormerTensor, FormerParameter)


def _has_changed(tensor: Any) -> bool:
    memory, name = vars(tensor)["drivetrain_memory"]
    return bool(memory.changed(name))


def _refuse(operation: str, tensor: Any) -> NoReturn:
    memory, name = vars(tensor)["drivetrain_memory"]
    when = memory.when.removeprefix("accelerator.")
    raise UsageError(
        f"`{operation}` was called on a tensor that was taken from {name} of {memory.model} before {memory.when}; "
        f"{memory.engine} has moved the parameter since, so that this tensor keeps the first values, and the model "
        "does not see what is written to it",
        cure=f"Take the tensor from the model after {when} (p.data, p.detach(), model.state_dict()). To keep the "
        f"first values, copy them before {when}: tensor = tensor.clone().",
    )
