"""Makes sharded parameters and gradients behave as full tensors in scripts: reads gather, writes reach every shard.

A parameter that tensor parallelism cuts is a DTensor. Outside of a module's forward scripts compute with it beside
ordinary tensors, write to it, look at rows of it, and average it. ``DTensor`` refuses most of that, and some it does
to this rank's part alone. :class:`CutTensor` does it as one process does, and leaves what the engine itself does to
DTensors as it is.

Ordinary tensors are taken to be the same on every rank of the axis ``tp``, as they are where every rank reads the
same batch and draws the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.tensor import sharded as sharded_tensors
from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.layout import Layout
from drivetrain_megatron.tensor.sharded import Sharded, operation, sharded
from drivetrain_sharding import with_strides

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_plainly = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 (torch has no public word for it)

engine_side = _plainly
"""Treat cut tensors as plain DTensors, for the engine's own operations. No user code runs inside."""


class CutTensor(DTensor):
    """A cut parameter, its gradient, or what was computed from them element by element.

    Operations that need more than this rank's part are collective over the axis ``tp``.

    Attributes:
        tp_layout: how the whole is cut.
        ring: the ranks that hold the parts.
    """

    tp_layout: Layout
    ring: Ring

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = _HANDLERS[func] = _handler_of(func)
        return handler(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the engine's operations below ``__torch_function__`` on DTensors."""
        if func in _OTHER_MEMORY:
            raise _other_memory(str(func))
        with _as_dtensors((args, kwargs)):
            return func(*args, **(kwargs or {}))

    def full_tensor(self, **_: Any) -> Tensor:
        """The whole as a plain tensor, in the model's own order. Collective over the axis ``tp``."""
        return _whole(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError("Only tensors created explicitly by the user support the deepcopy protocol")
        copied = like(self, self._local_tensor.detach().clone())
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)  # type: ignore[assignment]
        else:
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        if self.grad is not None and not isinstance(self, nn.Parameter):  # whose copies torch makes without gradients
            copied.grad = self.grad.detach().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "torch.save, pickle or an object collective was given a tensor that is cut over "
            f"{self.ring.size} tensor-parallel ranks, and would write this rank's part of it",
            cure="On every rank write accelerator.save(accelerator.get_state_dict(model), path), or "
            "accelerator.save_model(model, folder). p.full_tensor() gathers one tensor.",
        )


class _View(Tensor):
    """A view of a whole cut tensor, in memory of its own: what is written to it is written to every part.

    Attributes:
        viewed: what it is a view of.
        whole: the memory, which is brought up to date before each operation.
    """

    viewed: CutTensor
    whole: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, operation(func)
        if name == "set:data":
            raise UsageError(
                "x.data = ... gives a view of a cut parameter other memory", cure="Write `x.copy_(values)` instead."
            )
        if _passes(name):
            with _plainly():
                return func(*args, **kwargs)
        views = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, _View)]
        written = _written(name, args, kwargs)
        for view in views:
            if not view.requires_grad:
                with torch.no_grad():
                    view.whole.copy_(_whole(view.viewed))
            elif view is written:
                raise UnsupportedError(
                    f"{name} writes to a view of a cut parameter that was taken while gradients were enabled",
                    cure="Take the view inside of `with torch.no_grad():` too, or write to p.data[...].",
                )
        found = func(*_without_views(args), **_without_views(kwargs))
        if isinstance(written, _View):
            _write(written.viewed, written.whole)
            return written
        homes = {_storage(view.whole): (view.viewed, view.whole) for view in views}
        return _as_views(found, homes)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with _plainly():
            return repr(self.as_subclass(Tensor))


def _without_views(value: Any) -> Any:
    """Plain tensors of what is views, as they are."""
    with _plainly():
        return pytree.tree_map_only(_View, lambda one: one.as_subclass(Tensor), value)


def as_cut(tensor: DTensor, layout: Layout, ring: Ring) -> CutTensor:
    """Let a DTensor be a :class:`CutTensor`, in place."""
    tensor.__class__ = CutTensor
    assert isinstance(tensor, CutTensor)
    tensor.tp_layout, tensor.ring = layout, ring
    return tensor


def as_cut_like(cut: CutTensor, tensor: Any) -> Any:
    """Let a DTensor that lies on ranks as a cut tensor does be one, in place; anything else is returned as it is."""
    return as_cut(tensor, cut.tp_layout, cut.ring) if type(tensor) is DTensor and _alike(tensor, cut) else tensor


def like(cut: CutTensor, local: Tensor) -> CutTensor:
    """A part that is laid out as a cut tensor is. Not collective."""
    spec = _spec_of(cut._spec, local)  # noqa: SLF001
    made = _FromLocal.apply(local, spec) if local.requires_grad else DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return as_cut(made, cut.tp_layout, cut.ring)


def detect_anomalies() -> None:
    """Let ``torch.autograd.detect_anomaly`` look for NaN in DTensors: torch has no rule for it. Once a process."""

    def any_true(_: Any, args: Any, __: Any) -> Any:
        found = args[0]._local_tensor.any().int()  # noqa: SLF001
        for axis, placement in enumerate(args[0].placements):
            if placement.is_shard():
                dist.all_reduce(found, dist.ReduceOp.MAX, args[0].device_mesh.get_group(axis))
        return found.bool()

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001 (rules of torch's public kind give one rank's)
    handlers.setdefault(torch.ops.aten._is_any_true.default, any_true)  # noqa: SLF001


def local_part(cut: DTensor) -> Tensor:
    """This rank's part as a plain tensor through which gradients flow, those of gradients too. Not collective."""
    part: Tensor = _ToLocal.apply(cut)  # type: ignore[no-untyped-call]
    return part


class _ToLocal(Function):
    """Like ``DTensor.to_local``, but with a differentiable backward."""

    @staticmethod
    def forward(ctx: Any, cut: Any) -> Tensor:
        local: Tensor = cut._local_tensor  # noqa: SLF001
        ctx.spec, ctx.stride = cut._spec, local.stride()  # noqa: SLF001
        # Not a view: autograd forbids writes to views in a forward. The version counter is the parameter's.
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # DTensors whose strides differ from the parameter's need them in the spec.
        if grad.stride() != ctx.stride:
            grad = grad.contiguous()
        if torch.is_grad_enabled():
            return _FromLocal.apply(grad, ctx.spec)  # type: ignore[no-untyped-call]
        return DTensor(grad, _spec_of(ctx.spec, grad), requires_grad=False)  # type: ignore[no-untyped-call]


class _FromLocal(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return DTensor(local.view_as(local), _spec_of(spec, local), requires_grad=local.requires_grad)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad.placements != ctx.spec.placements:
            grad = grad.redistribute(placements=ctx.spec.placements)
        return (local_part(grad) if torch.is_grad_enabled() else grad._local_tensor), None  # noqa: SLF001


def _spec_of(spec: DTensorSpec, local: Tensor) -> DTensorSpec:
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == local.dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))


@contextmanager
def _as_dtensors(values: Any) -> Iterator[None]:
    """Treat cut tensors among these values as plain DTensors."""
    found = [one for one in pytree.tree_leaves(values) if isinstance(one, CutTensor)]
    for one in found:
        one.__class__ = DTensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for one in found:
            one.__class__ = CutTensor


# ---- gather and scatter ----------------------------------------------------------------------------------------------


def _whole(cut: CutTensor) -> Tensor:
    """The whole as a plain tensor with its strides, in memory of its own. Collective over the axis ``tp``."""
    local = local_part(cut) if _follows(cut) else cut._local_tensor.detach()  # noqa: SLF001
    # A script may keep a copy on the host, where an accelerator's ranks do not talk.
    home, kind = local.device, cut.device_mesh.device_type
    if home.type != kind:
        local = local.to(kind)
    if local.dtype is torch.bool:  # Not every communication backend carries it.
        whole = cut.ring.gather(local.view(torch.uint8), cut.tp_layout).view(torch.bool).to(home)
    else:
        whole = cut.ring.gather(local, cut.tp_layout).to(home)
    return with_strides(whole, _strides(cut))


def _strides(cut: CutTensor) -> tuple[int, ...]:
    """Strides of the whole, which assigned values may change: ``stride()`` of a DTensor stays as it was made."""
    meta = cut._spec.tensor_meta  # noqa: SLF001
    assert meta is not None
    return meta.stride


def _follows(one: Tensor) -> bool:
    """Whether autograd follows what is computed from a tensor."""
    return torch.is_grad_enabled() and one.requires_grad


def _part(plain: Tensor, cut: CutTensor) -> Tensor:
    """Return this rank's shard of a full tensor, or of one that broadcasts to it. Not collective."""
    expanded = plain if plain.shape == cut.shape else plain.expand(cut.shape)
    if _follows(expanded):
        return cut.ring.cut(expanded, cut.tp_layout)
    return cut.ring.part(expanded, cut.tp_layout)


@torch.no_grad()
def _write(cut: CutTensor, whole: Tensor) -> None:
    cut._local_tensor.copy_(cut.ring.part(whole, cut.tp_layout))  # noqa: SLF001


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address


def _as_views(found: Any, homes: dict[int, tuple[CutTensor, Tensor]]) -> Any:
    """Let results that lie in the memory of a gathered tensor be views of what was gathered."""

    def follow(one: Tensor) -> Tensor:
        home = homes.get(_storage(one)) if type(one) is Tensor and one.layout is torch.strided else None
        if home is None:
            return one
        view = one.as_subclass(_View)
        view.viewed, view.whole = home
        return view

    return pytree.tree_map_only(Tensor, follow, found)


def _alike(one: Any, cut: CutTensor) -> bool:
    """Whether a DTensor lies on ranks as the cut tensor does, element by element."""
    return (
        isinstance(one, DTensor)
        and one.shape == cut.shape
        and (one._spec is cut._spec or (one.device_mesh, one.placements) == (cut.device_mesh, cut.placements))  # noqa: SLF001
        and getattr(one, "tp_layout", cut.tp_layout) == cut.tp_layout
    )


# ---- what an operation does -----------------------------------------------------------------------------------------


def _plain_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that reads no values."""
    with _plainly():
        return func(*args, **kwargs)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute from whole tensors, on every rank."""
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(one, Sharded) for one in leaves):
        return func(*with_sharded(args), **with_sharded(kwargs))
    out = kwargs.get("out")
    homes: dict[int, tuple[CutTensor, Tensor]] = {}

    def gather(cut: CutTensor) -> Tensor:
        whole = _whole(cut)
        homes[_storage(whole)] = (cut, whole)
        return whole

    whole_args, whole_kwargs = pytree.tree_map_only(CutTensor, gather, (args, kwargs))
    found = func(*whole_args, **whole_kwargs)
    if isinstance(out, CutTensor):
        _write(out, whole_kwargs["out"])
        return out
    if operation(func) in {"numpy", "__array__"} and hasattr(found, "flags"):
        # Of a copy: what is written there would be lost.
        found.flags.writeable = False
    return _as_views(found, homes)


def with_sharded(value: Any) -> Any:
    """Arguments of a forward, with cut tensors as that forward sees them."""
    return pytree.tree_map_only(CutTensor, lambda cut: sharded(local_part(cut), cut.tp_layout, cut.ring), value)


def _element_wise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank computes its part."""
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    cut = next(one for one in tensors if isinstance(one, CutTensor))
    if any(isinstance(one, Sharded) for one in tensors) or "out" in kwargs:
        return _on_whole(func, args, kwargs)
    if torch.broadcast_shapes(*(one.shape for one in tensors)) != cut.shape:  # type: ignore[no-untyped-call]
        return _on_whole(func, args, kwargs)
    found = func(*_parts(args, cut), **_parts(kwargs, cut))
    if not isinstance(found, Tensor) or found.shape != cut._local_tensor.shape:  # noqa: SLF001
        # Of one name with what is element-wise, such as the largest element and the larger of two.
        return _on_whole(func, args, kwargs)
    return like(cut, found)


def _parts(values: Any, cut: CutTensor) -> Any:
    """Arguments of an element-wise operation, each as this rank's part. Collective where one is cut otherwise."""

    def part(one: Tensor) -> Tensor:
        if isinstance(one, DTensor) and _alike(one, cut):
            return local_part(one) if _follows(one) else one._local_tensor  # noqa: SLF001
        plain = one.full_tensor() if isinstance(one, DTensor) else _unviewed(one)
        return plain if not plain.dim() and not _follows(plain) else _part(plain, cut)

    return pytree.tree_map_only(Tensor, part, values)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to a cut tensor, or what is computed from cut tensors to another one."""
    name = operation(func)
    target = _written(name, args, kwargs)
    if not isinstance(target, CutTensor):
        return _on_whole(func, args, kwargs)
    others = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one is not target]
    # What torch.nn.init calls is called without gradients.
    if getattr(func, "__module__", "") != nn.init.__name__ and any(_follows(one) for one in (target, *others)):
        if target.is_leaf and target.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        raise UnsupportedError(
            f"{name} changes a tensor in place that is cut over tensor-parallel ranks, where gradients flow",
            cure="Write the operation without changing a tensor in place, or do it inside of torch.no_grad().",
        )
    with torch.no_grad():
        if _base(name) in _LOCAL or _is_element_wise(name):
            own = target._local_tensor  # noqa: SLF001
            rest, named = _parts((args, kwargs), target)
            if args:
                func(own, *rest[1:], **named)
            else:
                func(**{key: own if kwargs[key] is target else value for key, value in named.items()})
            return target
        whole = _whole(target)
        shape = whole.shape
        values = (args, kwargs)
        rest, named = pytree.tree_map_only(CutTensor, lambda one: whole if one is target else _whole(one), values)
        func(*rest, **named)
        if whole.shape != shape or name in {"set_", "resize_"}:
            raise _other_memory(name)
        _write(target, whole)
    return target


def _other_memory(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} would change shape or memory of a cut parameter",
        cure="Make a plain tensor of the wanted values, on every rank, and write `p.copy_(values)`.",
    )


_OTHER_MEMORY = frozenset(
    getattr(packet, overload)
    for packet in (torch.ops.aten.set_, torch.ops.aten.resize_)
    for overload in packet.overloads()  # type: ignore[no-untyped-call]
)
"""Operations that bypass ``__torch_function__``."""


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor that an operation writes to, or ``None``."""
    if "out" in kwargs:
        return kwargs["out"]
    if not _writes(name):
        return None
    return args[0] if args else next((one for one in kwargs.values() if isinstance(one, Tensor)), None)


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE_OPERATORS
    return name.endswith("_")


_IN_PLACE_OPERATORS = {f"__i{name}__" for name in "add sub mul div truediv floordiv mod pow and or xor".split()} | {
    "__ilshift__",
    "__irshift__",
}


def _get_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _plainly():
        return as_cut_like(args[0], func(*args, **kwargs))


def _set_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cut, grad = args
    if isinstance(cut, CutTensor) and isinstance(grad, Tensor) and not isinstance(grad, DTensor):
        with torch.no_grad():
            if grad.shape == cut.shape:
                grad = like(cut, cut.ring.part(_unviewed(grad), cut.tp_layout))
    elif isinstance(grad, CutTensor) and not isinstance(cut, CutTensor):
        grad = _whole(grad)
    with _plainly():
        return func(cut, grad, **kwargs)


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return like(args[0], args[0]._local_tensor.detach())  # noqa: SLF001


def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give this rank's part other memory, as ``p.data = x`` does."""
    cut, values = args
    if not isinstance(cut, CutTensor):
        return func(cut, _whole(values))
    if (values.shape, values.dtype) != (cut.shape, cut.dtype):
        raise UsageError(
            f"param.data = ... of shape {list(values.shape)} and {values.dtype} for a cut parameter of shape "
            f"{list(cut.shape)} and {cut.dtype}",
            cure="Assign values of the parameter's shape and dtype; model.to(dtype) changes the dtype.",
        )
    if isinstance(values, CutTensor) and _alike(values, cut):
        cut._local_tensor, cut._spec = values._local_tensor.detach(), values._spec  # noqa: SLF001
    else:
        with torch.no_grad():
            plain = values.full_tensor() if isinstance(values, DTensor) else _unviewed(values)
            meta = TensorMeta(cut.shape, plain.stride(), cut.dtype)
            cut._spec = DTensorSpec(cut.device_mesh, cut.placements, tensor_meta=meta)  # noqa: SLF001
            cut._local_tensor = cut.ring.part(plain, cut.tp_layout).to(cut._local_tensor.device, copy=True)  # noqa: SLF001
    return None


def _unviewed(tensor: Tensor) -> Tensor:
    """A plain tensor, also of a view, as it is now."""
    return tensor.clone() if isinstance(tensor, _View) else tensor


def _size_of_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``view_as`` and the like read only the shape of the other tensor."""
    first, *rest = (*args, *kwargs.values())
    shaped = [torch.empty(one.shape, device="meta") if isinstance(one, CutTensor) else one for one in rest]
    if isinstance(first, CutTensor):
        return _on_whole(func, (first, *shaped), {})
    return func(first, *shaped)


def _filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """New tensors like a cut one."""
    first, *rest = args or (kwargs.pop("input"),)
    if not isinstance(first, CutTensor):
        return _on_whole(func, args, kwargs)
    made = like(first, func(first._local_tensor, *rest, **kwargs))  # noqa: SLF001
    if operation(func) == "contiguous" and not kwargs:
        made._spec = _lying_row_by_row(made)  # noqa: SLF001
    return made


def _lying_row_by_row(cut: CutTensor) -> DTensorSpec:
    meta = TensorMeta(cut.shape, torch.empty(cut.shape, device="meta").stride(), cut.dtype)
    return DTensorSpec(cut.device_mesh, cut.placements, tensor_meta=meta)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``new_zeros(size)`` and the like: cut as the tensor is where the size is the same, as state of an optimizer is.

    Without values (``new_empty``) it is what a function works in, and whole.
    """
    cut, *rest = args
    size = kwargs.get("size", rest[0] if rest else ())
    sizes = tuple(rest) if isinstance(size, int) else tuple(size) if isinstance(size, (list, tuple)) else None
    if not isinstance(cut, CutTensor):
        return _on_whole(func, args, kwargs)
    local = cut._local_tensor  # noqa: SLF001
    if sizes != tuple(cut.shape) or operation(func) in {"new_empty", "new_tensor"}:
        return func(local, *rest, **kwargs)
    named = {key: value for key, value in kwargs.items() if key != "size"}
    others = rest[1:] if rest and not isinstance(rest[0], int) else []
    return like(cut, func(local, local.shape, *others, **named))


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers like a cut tensor: those of the whole."""

    def empty(cut: CutTensor) -> Tensor:
        return torch.empty_strided(cut.shape, _strides(cut), dtype=cut.dtype, device=cut.device)

    whole_args, whole_kwargs = pytree.tree_map_only(CutTensor, empty, (args, kwargs))
    return func(*whole_args, **whole_kwargs)


def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``to`` and the like read only dtype and device of the other tensor."""
    cut = args[0]
    rest, named = pytree.tree_map_only(CutTensor, lambda one: one._local_tensor, (args[1:], kwargs))  # noqa: SLF001
    if not isinstance(cut, CutTensor):
        return func(cut, *rest, **named)
    local = local_part(cut) if _follows(cut) else cut._local_tensor  # noqa: SLF001
    found = func(local, *rest, **named)
    if found is local:
        return cut
    return like(cut, found) if isinstance(found, Tensor) else found  # type() returns a name.


def _reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums and norms of all elements are put together from the parts'; others are computed from the whole."""
    name, given = operation(func), {key: one for key, one in kwargs.items() if one is not None and one is not False}
    cut, *rest = args or (None,)
    if not isinstance(cut, CutTensor) or given.keys() - {"dtype", "p", "ord"}:
        return _on_whole(func, args, kwargs)
    dtype = given.pop("dtype", None)
    if name in {"sum", "mean"} and not rest and not given:
        total = cut.ring.sum(local_part(cut).sum(dtype=dtype))
        return total if name == "sum" else total / cut.numel()
    order = rest[0] if len(rest) == 1 else given.get("p", given.get("ord", 2.0)) if not rest else None
    order = 2.0 if order == "fro" and name == "norm" else order
    of_vector = name != "linalg_norm" or (not rest and not given)
    if name not in _NORMS or not of_vector or not isinstance(order, (int, float)) or not _norms_combine(cut, order):
        return _on_whole(func, args, kwargs)
    own = torch.linalg.vector_norm(local_part(cut), order, dtype=dtype)
    each = cut.ring.gather(own.reshape(1), Layout((cut.ring.size,), 0))
    return torch.linalg.vector_norm(each, order)


def _norms_combine(cut: CutTensor, order: float) -> bool:
    """Whether the norm is that of the parts' norms; an empty part has none of some orders."""
    return order > 0 and cut.tp_layout.even(cut.ring.size)


_NORMS = frozenset({"norm", "linalg_vector_norm", "vector_norm", "linalg_norm"})


def _list_norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms of several tensors, with one message for all that are cut."""
    tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    cut = [one for one in tensors if isinstance(one, CutTensor) and _norms_combine(one, order)]
    known: dict[int, Tensor] = {}
    if not any(_follows(one) for one in cut) and len({(one.dtype, one.device, one.ring) for one in cut}) == 1:
        own = torch.stack([torch.linalg.vector_norm(one._local_tensor, order, dtype=dtype) for one in cut])  # noqa: SLF001
        ring = cut[0].ring
        each = ring.collect(own.unsqueeze(0), Layout((ring.size, len(cut)), 0))
        norms = torch.linalg.vector_norm(each, order, dim=0).unbind()
        known = {id(one): norm for one, norm in zip(cut, norms, strict=True)}
    return tuple(
        known[id(one)] if id(one) in known else torch.linalg.vector_norm(one, order, dtype=dtype) for one in tensors
    )


def _on_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Element-wise operations on lists of tensors: what is cut alike in all lists is computed in parts."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    columns = list(zip(*(one for one in lists if any(isinstance(each, Tensor) for each in one)), strict=False))
    follows = any(isinstance(one, Tensor) and _follows(one) for one in pytree.tree_leaves(lists))
    if follows and operation(func).endswith("_"):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    cut_in = [next((one for one in column if isinstance(one, CutTensor)), None) for column in columns]
    in_parts = [
        cut is not None
        and not follows
        and all(_alike(one, cut) or not isinstance(one, Tensor) or one.numel() == 1 for one in column)
        for cut, column in zip(cut_in, columns, strict=True)
    ]
    gathered: dict[int, tuple[CutTensor, Tensor]] = {}

    def exchange(one: Any, in_part: bool) -> Any:
        if isinstance(one, DTensor) and in_part:
            return one._local_tensor  # noqa: SLF001
        if isinstance(one, CutTensor):
            gathered[id(one)] = (one, _whole(one))
            return gathered[id(one)][1]
        return one

    def exchanged(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return _whole(value) if isinstance(value, CutTensor) else value
        return [exchange(one, in_parts[at]) if at < len(in_parts) else one for at, one in enumerate(value)]

    found = func(*map(exchanged, args), **{key: exchanged(value) for key, value in kwargs.items()})
    if operation(func).endswith("_"):
        for cut, whole in gathered.values():
            _write(cut, whole)
        return found
    return tuple(
        like(cut, one) if in_part and cut is not None else one
        for cut, in_part, one in zip(cut_in, in_parts, found, strict=True)
    )


def _of_part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that gives the same on the shard as on the full tensor, and has no rule for DTensors."""
    return func(*pytree.tree_map_only(CutTensor, lambda one: one._local_tensor, args), **kwargs)  # noqa: SLF001


def _iterated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return iter(_on_whole(torch.unbind, args, kwargs))


def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Outside of this function's reach: modules that are computed again in a backward run as in the forward."""
    return func(_whole(args[0]), *pytree.tree_map_only(CutTensor, _whole, args[1:]), **kwargs)


def _autograd_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients with respect to cut tensors are cut tensors."""
    outputs, inputs, *rest = (*args, *(kwargs.pop(name) for name in ("outputs", "inputs") if name in kwargs))
    outputs = pytree.tree_map_only(CutTensor, _whole, outputs)
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    cuts = [(one.tp_layout, one.ring) if isinstance(one, CutTensor) else None for one in wanted]
    with _as_dtensors((inputs, rest, kwargs)):
        found = func(outputs, inputs, *rest, **kwargs)
    return tuple(
        as_cut(one, *cut) if cut is not None and type(one) is DTensor else one
        for cut, one in zip(cuts, found, strict=True)
    )


# ---- which operation does what --------------------------------------------------------------------------------------

_PASS = frozenset(
    """
    size dim ndimension numel nelement element_size stride storage_offset get_device is_floating_point is_complex
    is_signed is_contiguous is_pinned is_shared is_inference is_conj is_neg is_same_size is_set_to is_tensor
    requires_grad_ retain_grad detach_ share_memory_ register_hook register_post_accumulate_grad_hook
    __hash__ __len__ __dir__ __class__ data_ptr untyped_storage has_names
    result_type can_cast _is_view _has_compatible_shallow_copy_type
    """.split()
)
"""Operations that read no values."""

_OF_WHOLE = frozenset({"get:T", "get:mT", "get:H", "get:mH", "get:real", "get:imag"})

_LOCAL = frozenset({"zero", "fill", "copy", "masked_fill", "constant", "zeros", "ones"})
"""Element-wise in-place operations that torch does not tag as such."""

_SPECIAL: dict[str, Handler] = {
    "get:grad": _get_grad,
    "set:grad": _set_grad,
    "get:data": _detach,
    "set:data": _set_data,
    "detach": _detach,
    "__iter__": _iterated,
    **dict.fromkeys(["dense_dim", "sparse_dim"], _of_part),
    "backward": _backward,
    "grad": _autograd_grad,
    **dict.fromkeys("view_as expand_as reshape_as".split(), _size_of_whole),
    **dict.fromkeys("zeros_like ones_like full_like empty_like contiguous".split(), _filled),
    **dict.fromkeys("new_zeros new_ones new_full new_empty new_tensor".split(), _new),
    **dict.fromkeys("rand_like randn_like randint_like".split(), _drawn),
    **dict.fromkeys("to type type_as float double half bfloat16 int long bool cpu cuda xpu".split(), _converted),
    **dict.fromkeys(["sum", "mean", *_NORMS], _reduced),
    **dict.fromkeys(["_foreach_norm"], _list_norms),
}


def _passes(name: str) -> bool:
    kind, _, attribute = name.partition(":")
    if kind in {"get", "set"} and attribute:
        return name not in _OF_WHOLE and name not in _SPECIAL
    return name in _PASS


def _handler_of(func: Any) -> Handler:
    name = operation(func)
    if _passes(name):
        return _plain_call
    if name == "grad" and func is not torch.autograd.grad:
        return _on_whole
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return _on_whole if name in {"_foreach_max", "_foreach_powsum"} else _on_lists
    if _writes(name):
        return _in_place
    return _element_wise if _is_element_wise(name) or name == "clone" else _on_whole


def _base(name: str) -> str:
    """Return the operation's name without the marks of operators, reversed and in-place variants."""
    if name.startswith("__"):
        name = name.strip("_")
        name = name.removeprefix("r") if name in _REVERSED else name
        name = name.removeprefix("i") if f"__{name}__" in _IN_PLACE_OPERATORS else name
        return {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and"}.get(name, name)
    return name.removesuffix("_")


_REVERSED = frozenset("radd rsub rmul rdiv rtruediv rfloordiv rmod rpow rand ror rxor".split())


def _is_element_wise(name: str) -> bool:
    """Whether torch marks it so."""
    packet = getattr(torch.ops.aten, _base(name), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001 (torch has no public word)
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]  # type: ignore[no-untyped-call]
    return any(torch.Tag.pointwise in one for one in tags) and not any(
        torch.Tag.nondeterministic_seeded in one for one in tags
    )


_HANDLERS: dict[Any, Handler] = {}

sharded_tensors.OTHERS.update({CutTensor: with_sharded, _View: _without_views})


__all__ = ["CutTensor", "as_cut", "as_cut_like", "detect_anomalies", "engine_side", "like", "local_part"]
