"""Rules of element-wise operations, and of those that only read properties of a tensor.

Operands are aligned from the right as torch broadcasts them. Beside a sharded operand, a plain one is cut alike where
it has the cut dim, and is the same for every part where it has not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drivetrain.api import UnsupportedError
from drivetrain_megatron.tensor.layout import Layout
from drivetrain_megatron.tensor.randomness import own_stream
from drivetrain_megatron.tensor.sharded import (
    Sharded,
    by_gathering,
    global_shape,
    local,
    operand,
    rule,
    settled,
    sharded,
    whole,
)

_ONE = """
abs neg exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square sin cos tan tanh sigmoid erf erfc relu relu6 gelu silu
elu selu celu mish softplus softsign hardtanh hardswish hardsigmoid leaky_relu logsigmoid threshold clamp clip
clamp_min clamp_max float double half bfloat16 int long bool clone contiguous detach alias sign floor ceil round trunc
frac reciprocal isnan isinf isfinite nan_to_num logical_not bitwise_not zeros_like ones_like full_like empty_like cpu
cuda logit sgn positive relu_ silu_ gelu_ tanh_ sigmoid_ exp_ neg_ zero_ fill_ clamp_ requires_grad_ detach_ sqrt_
rsqrt_ nan_to_num_ hardtanh_
""".split()
_SEVERAL = """
add sub mul div true_divide floor_divide pow fmod remainder maximum minimum where masked_fill lerp addcmul addcdiv rsub
__rdiv__ __rsub__ __rpow__ __pow__ __rfloordiv__ __floordiv__ __rmod__ __mod__ __rtruediv__ __truediv__ __and__ __or__
__xor__ eq ne lt le gt ge __eq__ __ne__ logical_and logical_or logical_xor bitwise_and bitwise_or atan2 hypot xlogy
prelu subtract multiply divide __invert__ addmul add_ sub_ mul_ div_ masked_fill_ pow_ copy_ addcmul_ addcdiv_ lerp_
isclose
""".split()


@rule(*_ONE)
def one_operand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One tensor, the first argument; thresholds beside it that are tensors are operands too."""
    if any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return several_operands(func, args, kwargs)
    part = settled(args[0])
    if not isinstance(part, Sharded):
        return func(part, *args[1:], **kwargs)
    given = operand(part)
    found = func(given, *args[1:], **kwargs)
    if found is given:
        return part
    if _in_place(func):
        return args[0]
    return sharded(found, part.spec, part.ring, part.owner)


@rule("to", "type_as", "type")
def conversion(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert dtype and device; another tensor among the arguments only gives both."""
    part = settled(args[0])
    rest = [local(each) if isinstance(each, Sharded) else each for each in args[1:]]
    if not isinstance(part, Sharded):
        return func(part, *rest, **kwargs)
    found = func(local(part), *rest, **kwargs)
    return sharded(found, part.spec, part.ring, part.owner) if isinstance(found, Tensor) else found


@rule(*_SEVERAL)
def several_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any number of tensors that are broadcast together."""
    if "out" in kwargs:
        return by_gathering(func, args, kwargs)
    if len(args) == 2 and not kwargs and _alike(*args):
        # The common case, residuals and gates, without a list.
        found = func(operand(args[0]), operand(args[1]))
        return args[0] if _in_place(func) else sharded(found, args[0].spec, args[0].ring)
    values = [settled(value) for value in (*args, *kwargs.values())]
    leading = next((value for value in values if isinstance(value, Sharded)), None)
    writes = _in_place(func)
    if leading is None or (writes and not isinstance(values[0], Sharded)):
        # A plain tensor that is written to stays plain.
        values = [whole(value) if isinstance(value, Sharded) else value for value in values]
        return _call(func, values, len(args), kwargs)
    layout, ring = leading.spec, leading.ring
    shape = _broadcast(values)
    place = layout.from_right
    operands = [align(value, leading, place) if isinstance(value, Tensor) else value for value in values]
    found = _call(func, operands, len(args), kwargs)
    if writes:
        return args[0]
    return sharded(found, Layout(shape, len(shape) + place, layout.parts), ring)


def _alike(first: Any, second: Any) -> bool:
    if not (isinstance(first, Sharded) and isinstance(second, Sharded)):
        return False
    return first.spec == second.spec and first.spec.dim >= 0


def align(value: Tensor, leading: Sharded, place: int) -> Tensor:
    """The local tensor that fits beside a part. Collective where the value must be gathered or its gradient added up.

    Args:
        value: an operand, plain or sharded, completed.
        leading: the sharded operand whose layout the result has.
        place: its cut dim, counted from the end.
    """
    ring, layout = leading.ring, leading.spec
    if isinstance(value, Sharded):
        same = value.spec.from_right == place and value.spec.parts == layout.parts
        if same and value.spec.length == layout.length:
            return local(value)
        value = whole(value)
    if value.dim() < -place or value.shape[place] == 1:
        return ring.enter(value)
    return ring.cut(value, Layout(tuple(value.shape), value.dim() + place, layout.parts))


def _broadcast(values: list[Any]) -> tuple[int, ...]:
    shapes = {global_shape(value) for value in values if isinstance(value, Tensor)}
    if len(shapes) == 1:
        return shapes.pop()
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError as problem:
        if torch._C._current_graph_task_id() < 0:  # noqa: SLF001 (torch has no public word for "inside of backward")
            raise
        raise UnsupportedError(
            "the backward of a torch.autograd.Function of the model's own combines gradients, of which each "
            "tensor-parallel rank is given its part, with what its forward saved",
            cure="Keep the layers around it whole: megatron.tp_plan: {'<layer before>': replicated, ...}.",
        ) from problem


def _call(func: Any, values: list[Any], positional: int, kwargs: dict[str, Any]) -> Any:
    return func(*values[:positional], **dict(zip(kwargs, values[positional:], strict=True)))


def _in_place(func: Any) -> bool:
    name = str(func.__name__)
    return name.endswith("_") and not name.endswith("__")


@rule("dropout", "alpha_dropout", "dropout_", "bernoulli", "rand_like", "randn_like", "native_dropout")
def random_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Parts of one tensor draw different numbers; what every rank holds whole draws the same."""
    part = settled(args[0])
    if not isinstance(part, Sharded):
        return func(part, *args[1:], **kwargs)
    with own_stream(part.ring, local(part)):
        found = func(local(part), *args[1:], **kwargs)
    if isinstance(found, tuple):
        return tuple(sharded(each, part.spec, part.ring) for each in found)
    return sharded(found, part.spec, part.ring)


# Properties of a tensor. Sizes are those of the full tensor.


@rule("get:shape")
def _shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.Size(args[0].spec.shape)


@rule("size")
def _size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = args[0].spec.shape
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return torch.Size(shape) if dim is None else shape[dim]


@rule("numel", "nelement")
def _numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.Size(args[0].spec.shape).numel()


@rule("__len__")
def _len(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].spec.shape[0]


@rule(
    *"""
    dim ndimension get:ndim get:dtype get:device get:layout get:requires_grad get:is_leaf get:grad_fn get:is_cuda
    get:is_cpu get:is_meta get:is_sparse get:is_quantized get:is_mkldnn get:is_mps get:is_xpu get:is_nested
    get:itemsize get:_version get:names get:output_nr get:_backward_hooks get:retains_grad get:is_xla get:is_vulkan
    get:is_ipu get:is_maia get:is_mtia is_floating_point is_complex is_signed is_contiguous element_size get_device
    is_inference __hash__ get:is_sparse_csr register_post_accumulate_grad_hook is_conj
    is_neg get:nbytes is_tensor is_same_size set:requires_grad can_cast result_type get:grad_dtype
    """.split()
)
def _ask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
