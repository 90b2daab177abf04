"""Deferred model outputs: record the operations on them until backward computes the loss."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.pipeline.skeleton import EXPORTS, NO_VALUE, is_absent
from drivetrain_megatron.pipeline.values import leaves, rebuilt

TRAIN_STEP = (
    "Write the step as accelerator.train_step(model, batch, loss_fn), whose loss_fn gets outputs that have values."
)

_IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("add_", "__iadd__"), operator.add),
    **dict.fromkeys(("sub_", "__isub__"), operator.sub),
    **dict.fromkeys(("mul_", "__imul__"), operator.mul),
    **dict.fromkeys(("div_", "__itruediv__"), operator.truediv),
}
"""Operations that accumulate totals: ``total += loss.detach()``."""

BY_MASK = (
    "Write (values * mask).sum() / mask.sum() in place of an index by a mask, and ignore_index for labels that do not "
    "count."
)

_READING = EXPORTS | {"__float__", "__int__", "__index__", "__bool__", "__complex__"}
"""Methods that give a tensor's values to Python or to another library; not all of them raise for fake tensors."""

_DETACHING = frozenset({Tensor.detach, torch.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
"""Functions whose result takes no part in gradients."""

_REFUSED = frozenset({"register_hook", "retain_grad", "grad", "register_post_accumulate_grad_hook", "__set__"})


class Owner(Protocol):
    """A call of a model, which can compute recorded values."""

    @property
    def model(self) -> object:
        """Object that identifies the model; the same in each of its calls."""

    def watch(self, tensor: Deferred) -> None:
        """The script was given a deferred tensor."""

    def read(self, node: Node) -> Any:
        """A node's value now. Collective over the ranks of a pipeline."""

    def fill(self, tensor: Tensor, node: Node) -> None:
        """A plain number gets this node's value when it is known."""


@final
class Node:
    """One recorded call.

    Not a dataclass, which would count as a container of what it holds.

    Args:
        call: the model's call that it depends on; ``None`` once its value is known.
        absent: its result without values: shapes and dtypes.
        func: what was called; ``None`` for an output of the model.
        args: its arguments, with nodes in place of deferred tensors.
        kwargs: likewise.
        place: of an output of the model: which leaf.
        grad: whether gradients were recorded there.
        autocast: the dtype of an autocast context around it.
    """

    __slots__ = ("absent", "args", "autocast", "call", "early", "func", "grad", "kwargs", "place", "trains", "value")

    def __init__(
        self,
        call: Owner | None,
        absent: Any,
        func: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        place: int = -1,
        grad: bool = True,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.call, self.absent, self.func, self.args, self.kwargs = call, absent, func, args, kwargs or {}
        self.place, self.grad, self.autocast = place, grad, autocast
        sources = self.inputs()
        self.trains: bool = grad and func not in _DETACHING and (not sources or any(one.trains for one in sources))
        """Whether a gradient flows through it to the model, if its dtype can have one."""
        if isinstance(absent, Tensor) and not (absent.is_floating_point() or absent.is_complex()):
            self.trains = False
        self.value: Any = None
        """Once it is known."""
        self.early: Any = None
        """Its value where it was read before backward, which still needs what is recorded."""

    def known(self, value: Any) -> None:
        """Its value is known: nothing else is kept."""
        self.value = value
        self.call, self.func, self.args, self.kwargs, self.early = None, None, (), {}, None

    def inputs(self) -> list[Node]:
        """The nodes that it was computed from."""
        return [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Node)]


@final
class Deferred(Tensor):
    """A tensor whose value will be known after ``accelerator.backward``; its shape, dtype and device are known now.

    What torch does with it is recorded. Reading its value before backward (``item()``, ``print``, ``if``) runs the
    model once more, forward only, and gives the right value. Once the value is known it behaves as a plain tensor.
    """

    RECORDS = True
    """Other subclasses leave calls with such a tensor to this one."""

    node: Node

    @staticmethod
    def __new__(cls: type[Deferred], node: Node) -> Deferred:
        absent = node.absent
        made: Deferred = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, absent.shape, strides=absent.stride(), dtype=absent.dtype, device=absent.device, requires_grad=False
        )
        made.node = node
        return made

    def __init__(self, node: Node) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.node.value is not None:
            return repr(self.node.value)
        absent = self.node.absent
        return f"Deferred({list(absent.shape)}, {absent.dtype}; its value is known after accelerator.backward)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__repr__":
            return Deferred.__repr__(args[0])
        nodes = [leaf.node for leaf in leaves((args, kwargs)) if isinstance(leaf, Deferred)]
        for node in nodes:
            if node.value is None and _reachable(node):
                read(node)
        if all(node.value is not None for node in nodes):
            return func(*_values(args), **_values(kwargs))
        if name in {"backward", "autograd_grad"} or func in {torch.autograd.grad, torch.autograd.backward}:
            raise UsageError(
                "loss.backward() or torch.autograd.grad was called on the loss of a pipelined model, whose backward "
                "runs in accelerator.backward only",
                cure="Write accelerator.backward(loss), which leaves gradients in p.grad. For torch.autograd.grad and "
                "gradients of gradients use distributed_type: ddp.",
            )
        if name in _IN_PLACE and len(args) == 2 and not kwargs and not args[0].dim():
            return _in_place(name, args[0], args[1])
        if name in _REFUSED or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise UnsupportedError(f"{name} on the output of a pipelined model cannot be recorded", cure=TRAIN_STEP)
        return _recorded(func, name, args, kwargs, nodes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedError(f"{func} on the output of a pipelined model cannot be recorded", cure=TRAIN_STEP)


def _recorded(func: Any, name: str, args: Any, kwargs: Any, nodes: list[Node]) -> Any:
    unknown = [node for node in nodes if node.value is None]
    calls = {id(node.call): node.call for node in unknown}
    if len(calls) > 1:
        raise _joined(name, {id(call.model) for call in calls.values() if call is not None})
    if name == "__iter__":
        return iter(torch.unbind(args[0]))
    trains = torch.is_grad_enabled() and any(node.trains for node in unknown)
    if trains and name == "masked_select" and _is_mask(mask := args[1] if len(args) > 1 else kwargs.get("mask")):
        value = args[0] if args else kwargs["input"]
        shape = torch.broadcast_shapes(value.shape, mask.shape)  # type: ignore[no-untyped-call]
        return torch.broadcast_to(value, shape)[mask.expand(shape)]
    if trains and name == "__getitem__":
        args = (args[0], _without_masks(args[1]))
    try:
        if name in _READING:
            raise NO_VALUE[0](func)
        absent = func(*_absents(args), **_absents(kwargs))
    except NO_VALUE:
        if name in _READING:  # No tensor comes of it, and so no gradient is lost.
            return func(*_mapped(args, _value), **_mapped(kwargs, _value))
        return func(*_read(args, name), **_read(kwargs, name))
    for leaf in leaves((args, kwargs)):
        # Each rank has its own of these, and only the last stage's would get a gradient.
        if isinstance(leaf, Tensor) and not isinstance(leaf, Deferred) and (leaf.requires_grad or is_absent(leaf)):
            refuse_read(leaf)
            raise UnsupportedError(
                f"{name} joins the output of a pipelined model with parameters, or with what was computed from them, "
                "outside of its forward",
                cure="Put that into the model's forward, so that its stage computes it; use weight_decay in the "
                "optimizer for a penalty on weights.",
            )
    (call,) = calls.values()
    node = Node(
        call, absent, func, _nodes(args), _nodes(kwargs), grad=torch.is_grad_enabled(), autocast=_autocast(absent)
    )
    return outputs(node)


def _joined(name: str, models: set[int]) -> UnsupportedError:
    if len(models) > 1:
        return UnsupportedError(
            f"{name} joins the outputs of two pipelined models, whose values cannot be known together",
            cure="Put both models into one module and prepare that; one that is not trained is called in eval mode, "
            "where its output has values at once. Or use pipeline_parallel_size: 1.",
        )
    return UnsupportedError(
        f"{name} joins the outputs of two calls of a pipelined model, whose values cannot be known together",
        cure="Call the model once, on both batches: torch.cat((a, b)), or torch.stack((a, b), 1) where a loss compares "
        "their outputs. Read numbers for a log by .item() before the next call. Or use pipeline_parallel_size: 1.",
    )


def _in_place(name: str, total: Tensor, other: Any) -> Deferred:
    """Change a number in place: a deferred one now, a plain one when the value is known."""
    if isinstance(total, Deferred):
        made: Deferred = _IN_PLACE[name](total, other)
        total.node = made.node
        if total.node.call is not None:
            total.node.call.watch(total)
        return total
    made = _IN_PLACE[name](total.clone(), other)
    assert made.node.call is not None, "a value that is not known yet has a call"
    made.node.call.fill(total, made.node)
    return made


def outputs(node: Node) -> Any:
    """A node's result as the script sees it: deferred tensors in the containers that torch returned."""
    if isinstance(node.absent, Tensor):
        return _watched(node)
    found = leaves(node.absent)
    if not any(isinstance(leaf, Tensor) for leaf in found):
        return node.absent
    return rebuilt(
        node.absent,
        [
            _watched(Node(node.call, leaf, pick, (node, index), grad=node.grad)) if isinstance(leaf, Tensor) else leaf
            for index, leaf in enumerate(found)
        ],
    )


def _watched(node: Node) -> Deferred:
    tensor = Deferred(node)
    if node.call is not None:
        node.call.watch(tensor)
    return tensor


def pick(several: Any, index: int) -> Any:
    """One of the results of a call that has several."""
    return leaves(several)[index]


def read(node: Node) -> Any:
    """A node's value, computed from values where that is possible, else by its call. Collective over the pipeline."""
    if node.value is not None:
        return node.value
    if node.early is not None:
        return node.early
    if node.func is not None and node.inputs() and all(_reachable(one) for one in node.inputs()):
        node.known(apply(node, read))
        return node.value
    assert node.call is not None, "a node without a call has a value"
    node.early = node.call.read(node)
    return node.early


def settled(tensor: Tensor) -> Tensor:
    """A deferred tensor's value; any other tensor as it is. Collective over the pipeline when it must be computed."""
    value: Tensor = read(tensor.node) if isinstance(tensor, Deferred) else tensor
    return value


def _reachable(node: Node) -> bool:
    """Whether a value follows from values that are known."""
    return node.value is not None or (bool(node.inputs()) and all(_reachable(one) for one in node.inputs()))


@torch.no_grad()
def apply(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """A node's result from its inputs' values, without gradients."""
    assert node.func is not None
    found = leaves((node.args, node.kwargs))
    args, kwargs = rebuilt(
        (node.args, node.kwargs), [value_of(leaf) if isinstance(leaf, Node) else leaf for leaf in found]
    )
    return node.func(*args, **kwargs)


def _absents(tree: Any) -> Any:
    return rebuilt(tree, [_absent(leaf) for leaf in leaves(tree)])


def _absent(leaf: Any) -> Any:
    if isinstance(leaf, Deferred):
        return leaf.node.absent if leaf.node.value is None else leaf.node.value
    # Making a fake tensor of a computed one reads its gradient, of which torch warns.
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.grad_fn is not None else leaf


def _is_mask(value: Any) -> bool:
    """Whether an index is a mask whose values are known."""
    return isinstance(value, Tensor) and value.dtype is torch.bool and not isinstance(value, Deferred)


def _without_masks(index: Any) -> Any:
    """An index with the places of the true elements instead of masks: the shape of the result is known then."""
    several = index if isinstance(index, tuple) else (index,)
    if not any(_is_mask(one) and one.dim() for one in several):
        return index
    return tuple(
        place for one in several for place in (one.nonzero(as_tuple=True) if _is_mask(one) and one.dim() else (one,))
    )


def _read(tree: Any, reader: str) -> Any:
    return _mapped(tree, lambda one: _with_history(one.node, reader))


def _value(one: Deferred) -> Any:
    return read(one.node)


def _with_history(node: Node, reader: str) -> Any:
    """A node's value, with a graph that refuses to go backward if a gradient would flow through the node."""
    value = read(node)
    if not (torch.is_grad_enabled() and node.trains and isinstance(value, Tensor)):
        return value
    return _Read.apply(value.detach().requires_grad_(), reader)  # type: ignore[no-untyped-call]


class _Read(torch.autograd.Function):
    """Passes a value on that was read before backward, through which no gradient can come."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, reader: str) -> Tensor:
        """Return the value; ``reader`` is the function that needed it."""
        ctx.drivetrain_reader = reader
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse."""
        raise _no_gradient(ctx.drivetrain_reader)


def refuse_read(value: Tensor) -> None:
    """Raise if a tensor was computed, with gradients, from values that were read of an output before backward."""
    following, seen = [value.grad_fn], set()
    while following:
        one = following.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        reader = getattr(one, "drivetrain_reader", None)
        if reader is not None:
            raise _no_gradient(reader)
        following += [before for before, _ in one.next_functions]


def _no_gradient(reader: str) -> UnsupportedError:
    return UnsupportedError(
        f"{reader} needs values of a pipelined model's output before backward, and no gradient flows through a loss "
        "or a part of one that is computed from them",
        cure=f"{BY_MASK} Call .detach() on what the gradient shall pass by. {TRAIN_STEP}",
    )


def _values(tree: Any) -> Any:
    return _mapped(tree, lambda one: one.node.value)


def _nodes(tree: Any) -> Any:
    return _mapped(tree, lambda one: one.node if one.node.value is None else one.node.value)


def _mapped(tree: Any, change: Callable[[Deferred], Any]) -> Any:
    return rebuilt(tree, [change(leaf) if isinstance(leaf, Deferred) else leaf for leaf in leaves(tree)])


def _autocast(absent: Any) -> torch.dtype | None:
    device = absent.device.type if isinstance(absent, Tensor) else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
