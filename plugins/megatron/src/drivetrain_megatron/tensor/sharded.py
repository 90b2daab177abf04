"""``Sharded``: a tensor of which each rank of the axis ``tp`` holds a part, while code sees the shape of the whole.

A model's own code runs on it unchanged: ``x.view(B, T, num_heads, head_dim)`` becomes a view of this rank's heads.
What an operation does to the cut dim is a *rule*, found by the operation's name. Where there is none, the parts are
gathered and the operation runs on the whole tensor: slower, and the same numbers.

Only Python's ``__torch_function__`` is used: autograd, autocast and kernels see plain local tensors, and backward costs
what it costs without this class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from drivetrain.api import UnsupportedError
from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.layout import Layout

logger = logging.getLogger(__name__)

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[str, Rule] = {}
"""Rules by operation name; ``get:shape`` is the attribute ``shape``. Filled by the modules that :mod:`rules` names."""

OTHERS: dict[type, Callable[[Any], Any]] = {}
"""Other kinds of tensors that may stand beside sharded ones, and what exchanges them in nested arguments."""

_BY_FUNCTION: dict[Any, Rule] = {}
_TOLD: set[str] = set()


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations with these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


class Sharded(Tensor):
    """One rank's part of a tensor; see the module. Made by :func:`sharded`.

    Attributes:
        spec: how the whole tensor is cut.
        ring: the ranks that hold the parts.
        owner: name of the parameter that this is, empty for what was computed.
        bias: for a partial sum, what is to be added once it is complete.
        keeps_gradient: the script has called ``retain_grad``.
    """

    keeps_gradient = False
    spec: Layout
    ring: Ring
    owner: str
    bias: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _BY_FUNCTION.get(func)
        if found is None:
            found = _BY_FUNCTION[func] = RULES.get(operation(func), by_gathering)
        if len(types) > 1:
            for kind in types:
                if kind in OTHERS:
                    args, kwargs = OTHERS[kind](args), OTHERS[kind](kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch has no public word for it)
            return found(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "partial" if self.spec.dim < 0 else f"dim {self.spec.dim} of"
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch has no public word for it)
            return f"Sharded({kind} {list(self.spec.shape)}, here {list(self.shape)}, {self.dtype})"


class ShardedWithoutValues(Sharded, FakeTensor):
    """A part that has no values, for what is only traced. torch does not give a fake tensor another class.

    Attributes:
        plain: the part as a plain tensor.
    """

    plain: Tensor


def operation(func: Any) -> str:
    """The name under which an operation's rule is found."""
    name = str(getattr(func, "__name__", func))
    if name in {"__get__", "__set__"}:
        return f"{name.strip('_')}:{func.__self__.__name__}"
    return name


def sharded(local: Tensor, layout: Layout, ring: Ring, owner: str = "") -> Sharded:
    """Wrap a local tensor as a shard of a full one."""
    if isinstance(local, FakeTensor):
        part: Any = local.view_as(local)
        part.__class__ = ShardedWithoutValues
        part.plain = local
    else:
        part = local.as_subclass(Sharded)
    part.spec, part.ring, part.owner, part.bias = layout, ring, owner, None
    return part  # type: ignore[no-any-return]


def global_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape of the whole tensor, sharded or not."""
    return tensor.spec.shape if isinstance(tensor, Sharded) else tuple(tensor.shape)


def local(part: Sharded) -> Tensor:
    """This rank's part as a plain tensor. Inside of rules only."""
    return part.plain if isinstance(part, ShardedWithoutValues) else part.as_subclass(Tensor)


def operand(part: Any) -> Any:
    """Return the operand of an operation whose result has the shard's layout. Inside of rules only.

    A shard without values would report the full shape to torch's own shape functions, in backward too.
    """
    return part.plain if type(part) is ShardedWithoutValues else part


def whole(part: Sharded) -> Tensor:
    """The plain tensor of all parts. Collective over the ranks that hold them; inside of rules only."""
    if part.spec.dim < 0:
        return settled(part)  # type: ignore[no-any-return]
    return part.ring.gather(local(part), part.spec)


def settled(part: Any) -> Any:
    """Complete a partial sum; anything else is returned as it is. Collective if it is one; inside of rules only."""
    if not isinstance(part, Sharded) or part.spec.dim >= 0:
        return part
    total = part.ring.sum(local(part))
    return total if part.bias is None else total + part.bias


def complete(partial: Tensor, ring: Ring, bias: Tensor | None = None) -> Tensor:
    """Add up a partial sum, then add the bias. Collective; inside of rules only.

    Under sequence parallelism the result stays cut along dim 1, the sequence of a batch ``(B, T, ...)``. For rows
    ``(B * T, ...)`` the sum waits until a view shows where the sequence is.
    """
    # As a layer does under autocast.
    bias = None if bias is None else bias.to(partial.dtype)
    if not ring.sequence_parallel or partial.dim() < 2:
        total = ring.sum(partial)
        return total if bias is None else total + bias
    if partial.dim() == 2:
        waiting = sharded(partial, Layout(tuple(partial.shape), -1), ring)
        waiting.bias = bias
        return waiting
    layout = Layout(tuple(partial.shape), 1)
    cut = ring.sum_and_cut(partial, layout)
    return sharded(cut if bias is None else cut + ring.enter(bias), layout, ring)


def by_gathering(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for everything without a rule. Collective."""
    name = operation(func)
    if "out" in kwargs or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE:
        raise UnsupportedError(
            f"{name} writes into a tensor of which each tensor-parallel rank holds a part",
            cure="Write the operation without changing a tensor in place.",
        )
    if name in _OF_MEMORY:
        raise UnsupportedError(
            f"{name} asks for the memory of a tensor of which each tensor-parallel rank holds a part",
            cure="Leave the layer that calls this kernel out of tp_plan, or use torch's own operation.",
        )
    if name not in _TOLD and torch.is_grad_enabled():
        _TOLD.add(name)
        logger.warning("%s has no rule for sharded tensors: it runs on the whole tensor, on every rank.", name)
    return func(*gathered(args), **gathered(kwargs))


def warn_anew() -> None:
    """Name operations without a rule again, for another model."""
    _TOLD.clear()


_IN_PLACE = frozenset({"__setitem__", "set:data", "set:grad"})
_OF_MEMORY = frozenset(
    {"data_ptr", "untyped_storage", "storage", "as_strided", "stride", "storage_offset", "__dlpack__"}
)


def gathered(value: Any) -> Any:
    """A nested value with whole tensors in place of sharded ones. Collective; inside of rules only."""
    if isinstance(value, Sharded):
        return whole(value)
    if type(value) in {list, tuple}:
        return type(value)(gathered(each) for each in value)
    if type(value) is dict:
        return {key: gathered(each) for key, each in value.items()}
    return value


@rule("backward")
def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients of parts are parts, as ``torch.utils.checkpoint`` hands them on."""
    # A backward inside of a backward runs where gradients are off; the local alias must still lead into the graph.
    with torch.enable_grad():
        args, kwargs = tuple(map(_locals, args)), {name: _locals(each) for name, each in kwargs.items()}
    return func(*args, **kwargs)


@rule("grad")
def _gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad``: gradients of shards are shards."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    found = func(*args, **kwargs)
    several = [inputs] if isinstance(inputs, Tensor) else inputs
    return tuple(
        sharded(grad, part.spec, part.ring) if isinstance(part, Sharded) and grad is not None else grad
        for grad, part in zip(found, several, strict=True)
    )


@rule("get:grad")
def _gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of a shard, plain: it returns to autograd, which handles local tensors only.

    One that the script has asked to be kept is the whole. Collective then.
    """
    found = func(*args, **kwargs)
    part = args[0]
    if found is None or not (isinstance(part, Sharded) and part.keeps_gradient and part.spec.dim >= 0):
        return found
    return part.ring.collect(found, part.spec)


@rule("retain_grad")
def _retain_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0].keeps_gradient = True
    return func(*args, **kwargs)


@rule("register_hook")
def _register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook on a shard gets the whole gradient, and what it returns is cut. Collective in backward."""
    part, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    layout, ring = part.spec, part.ring
    if layout.dim < 0:  # A partial sum has the whole gradient.
        return func(part, hook)

    def on_whole(grad: Tensor) -> Tensor | None:
        changed = hook(ring.gather(grad, layout))
        return None if changed is None else ring.cut(changed, layout)

    return func(part, on_whole)


def _locals(value: Any) -> Any:
    if isinstance(value, Sharded):
        return local(value)
    return type(value)(_locals(each) for each in value) if type(value) in {list, tuple} else value


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, plain; one that is not sharded is returned as it is. Collective over the axis ``tp``."""
    if not isinstance(tensor, Sharded):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch has no public word for it)
        return whole(tensor)
