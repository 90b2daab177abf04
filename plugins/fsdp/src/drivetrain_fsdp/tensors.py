"""``ShardedTensor``: a DTensor whose reads return the full tensor and whose writes reach every shard.

``fully_shard`` makes parameters and gradients DTensors, on which some operations are silently wrong: ``.item()`` of a
sum gives this rank's part, ``p.data[0].zero_()`` writes to a copy, ``p.data = x`` changes nothing, random numbers are
drawn per part, and ``torch.save`` writes this rank's part. :class:`ShardedTensor` does each of these as on one process
or raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from drivetrain.api import UnsupportedError, UsageError
from drivetrain.api.engines import check_collective
from drivetrain_fsdp import private_names
from drivetrain_fsdp.shards import box_of
from drivetrain_sharding import leaves_ranks_out, with_strides

_aten = torch.ops.aten

_LOOKS_UP = {_aten.index.Tensor, _aten.index_select.default, _aten.gather.default}

_SETTERS = [getattr(Tensor, name).__set__ for name in ("data", "grad")]
_KEEP_ARGUMENTS: frozenset[Any] = frozenset(
    (torch.autograd.backward, torch.autograd.grad, Tensor.backward, *_SETTERS)
)
"""Functions that change or name the very tensors that they are given."""

View = Callable[[Tensor], Tensor]

_LIKE = {_aten.clone.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.empty_like.default}
_NOT_SENT = frozenset({torch.int16})
"""Types that tensors can be converted to and that neither gloo nor NCCL carries."""

_DIMS = {
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default), 1),
    **dict.fromkeys((_aten.any.dims, _aten.all.dims, _aten.var.correction, _aten.std.correction), 1),
    **dict.fromkeys((_aten.linalg_vector_norm.default, _aten.norm.ScalarOpt_dim), 2),
}
"""Reductions for which an empty list of dims is all of them, and the place of that argument. DTensor takes it for none,
and torch gives one in the backward of a norm."""

_SAME_CLASS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
"""Up to torch 2.10 DTensor insists that an alias is of its operand's class, and gives it its own; and it may give an
operand the strides of its result, which tensors made from it later take over."""


@contextmanager
def _plain(args: tuple[Any, ...]) -> Iterator[None]:
    """Context in which sharded tensors among these arguments are plain DTensors."""
    changed = [(one, type(one)) for one in args if isinstance(one, ShardedTensor)]
    for one, _ in changed:
        one.__class__ = DTensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for one, its in changed:
            one.__class__ = its


class Writes:
    """Writes to sharded tensors, which every rank must make alike: each changes its own part.

    The first one after an optimizer step is a call that ranks are compared by.
    """

    _noted = False

    @classmethod
    def note(cls) -> None:
        """Compare the first write after a step with what the other ranks do."""
        if not cls._noted:
            cls._noted = True
            check_collective("write to a sharded parameter or gradient")

    @classmethod
    @contextmanager
    def of_step(cls) -> Iterator[None]:
        """Context of an optimizer's own writes; the first one behind it is compared."""
        cls._noted = True
        try:
            yield
        finally:
            cls._noted = False


class ShardedTensor(DTensor):
    """A sharded parameter, its gradient, or what was computed from them.

    Operations are collective over all ranks where they need more than this rank's part.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; below autograd."""
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:  # noqa: SLF001 (what .item(), float() and bool() run)
            return _whole(args[0]).item()
        out = kwargs.get("out")
        if isinstance(out, ShardedTensor) and not any(isinstance(one, DTensor) for one in pytree.tree_leaves(args)):
            return _compute_into(func, args, kwargs)
        args = _with_all_dims(func, args)
        changes = _changes(func, args)
        if changes is not None:
            _refuse_other_memory(func, changes)
            Writes.note()
            if func is _aten.copy_.default and not isinstance(args[1], DTensor):
                return _copy(changes, args[1])
        elif _changes_plain(func, args):
            # Such as the gradient of a 0-d parameter, by the coefficient of a norm over all gradients.
            _run_on_whole(func, args, kwargs, args[0])
            return args[0]
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _draw_whole(func, args, kwargs) if changes is None else _change_whole(func, args, kwargs, changes)
        if changes is None:
            if torch.is_grad_enabled():
                _refuse_numbers_of_ranks(func, (args, kwargs))
            writes = func._schema.is_mutable  # noqa: SLF001 (torch has no other word)
            if not (writes or _by_elements(func)) and _some_rank_has_none((args, kwargs)):
                # Reductions such as max raise there alone, and the ranks would go different ways.
                return _compute_whole(func, args, kwargs)
        try:
            with _plain(args) if _SAME_CLASS and _is_view(func) else nullcontext():
                result = DTensor.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError) as problem:
            return _without_rule(func, args, kwargs, changes, problem)
        _keep_strides(args, result)
        if changes is not None:
            return result
        return _all_as_sharded(result, func, args, kwargs)

    @property
    def data(self) -> Any:
        """The values, as ``detach()`` gives them."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise UsageError(
            "param.data = ... gives a sharded parameter other memory, which FSDP does not see",
            cure="Write `with torch.no_grad(): param.copy_(value)`, and `param.detach().clone()` to keep its values.",
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Gather the full tensor, as torch's own method does. Collective over all ranks."""
        if self.dtype in _NOT_SENT:
            sent: Any = super().to(torch.int32)
            whole: Tensor = sent.full_tensor(grad_placements=grad_placements)
            return whole.to(self.dtype)
        return super().full_tensor(grad_placements=grad_placements)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.detach().clone()
        if self.is_leaf and self.requires_grad:
            copied.requires_grad_()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_writing(self, "torch.save, pickle or an object collective")

    def storage(self) -> NoReturn:
        """Raise: a DTensor has no memory of its own. safetensors calls this in ``save_pretrained``."""
        _refuse_writing(self, "safetensors, or another function that asks for a tensor's storage(),")

    def tolist(self) -> Any:
        """Return the full tensor as Python numbers. Collective over all ranks."""
        return _whole(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the full tensor as an array, read-only since writes would be lost. Collective over all ranks."""
        if self.requires_grad and not force:
            raise UsageError("numpy() of a parameter, which requires a gradient", cure="Write p.detach().numpy().")
        array = _whole(self).clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        """Raise: ``from_dlpack`` would read memory of no tensor, or of a copy whose writes are lost."""
        raise UsageError(
            "from_dlpack was given a tensor that is sharded, which has no memory of its own to share",
            cure="Give it p.full_tensor(), of every rank. p.detach().numpy() reads it too.",
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.dim() else super().__format__(spec)  # type: ignore[no-untyped-call]


class ComputedTensor(ShardedTensor):
    """Result of sharded tensors, which becomes plain where a plain tensor comes in, such as the loss of a batch.

    Plain tensors may differ from rank to rank and take plain gradients; DTensor takes a number for one that is equal
    everywhere. Parameters lack this method, which would cost a call for each attribute that is read.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; above autograd. Collective where a plain tensor is among the arguments."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (as torch's own classes do)
            given = (args, kwargs or {})
            if not torch.is_grad_enabled() or func in _KEEP_ARGUMENTS or not _joins_plain(given):
                return func(*given[0], **given[1])
            whole_args, whole_kwargs = pytree.tree_map_only(ComputedTensor, _with_mean_gradient, given)
            result = func(*whole_args, **whole_kwargs)
            if whole_args and result is whole_args[0] and isinstance(args[0], ComputedTensor):
                # `loss += ...` takes the result; other names of the tensor that is written to do not.
                args[0].__class__ = _Replaced  # type: ignore[assignment]
            return result


class _Replaced(ShardedTensor):
    """Result that an operation in place would have had to make plain; every use of it raises."""

    @classmethod
    def __torch_function__(cls, *_arguments: Any, **_named: Any) -> NoReturn:
        """Raise."""
        raise UsageError(
            "a number computed from sharded parameters was changed in place by a plain tensor, and is used afterwards",
            cure="Write `total = total + loss` in place of `total.add_(loss)`.",
        )


def _joins_plain(arguments: Any) -> bool:
    """Whether gradients flow through an operation on computed and plain tensors."""
    tensors = [one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)]
    return any(one.requires_grad for one in tensors) and not all(isinstance(one, DTensor) for one in tensors)


def _with_mean_gradient(tensor: ComputedTensor) -> Tensor:
    """Gather the full tensor for a loss of this rank, of which the mean is trained on. Collective, its backward too."""
    if not tensor.requires_grad:
        return _whole(tensor)
    whole: Tensor = _MeanGradient.apply(with_strides(tensor.full_tensor(), tensor.stride()))  # type: ignore[no-untyped-call]
    return whole


class _MeanGradient(torch.autograd.Function):
    """Returns its argument. Its gradient is the mean over all ranks, as that of whole parameters in a forward is."""

    @staticmethod
    def forward(_: Any, whole: Tensor) -> Tensor:
        """Copy, since the result may be changed in place."""
        return whole.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        """Average. Collective over all ranks."""
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)
        return mean


class _Part(ComputedTensor):
    """A view that is a copy, since the part is on several ranks; writes to it are applied to the whole."""

    viewed: ShardedTensor
    as_viewed: View

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        changes = _changes(func, args)
        if not isinstance(changes, _Part):
            return super().__torch_dispatch__(func, types, args, kwargs)
        _refuse_other_memory(func, changes)
        # A copy where every rank has all of it: what is written there is written by _write only.
        whole = _whole(changes.root).clone()
        part = changes.in_whole(whole)
        _run_on_whole(func, args, kwargs or {}, part)
        _write(changes.root, whole)
        _write(changes, part)
        return changes

    @property
    def root(self) -> ShardedTensor:
        """The tensor that it is ultimately a view of."""
        return self.viewed.root if isinstance(self.viewed, _Part) else self.viewed

    def in_whole(self, whole: Tensor) -> Tensor:
        """Return the same view of the full tensor."""
        return self.as_viewed(self.viewed.in_whole(whole) if isinstance(self.viewed, _Part) else whole)


def as_sharded(tensor: DTensor, kind: type[ShardedTensor] = ShardedTensor) -> DTensor:
    """Make a DTensor a :class:`ShardedTensor`, or one of its subclasses, in place."""
    if type(tensor) is DTensor:
        tensor.__class__ = kind
    return tensor


def keep_placements_of_gradients(parameter: DTensor) -> None:
    """Make gradients of computations with this parameter lie as its parts do. Not collective.

    DTensor may give another placement, such as that of ``torch.cat``, and FSDP adds its local part to this one's. The
    gradients that FSDP reduces do not pass here.
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return  # such as counts and codes, which have no gradients
    placements, trains = parameter.placements, parameter.requires_grad
    parameter.requires_grad_()  # as register_hook wants it
    # The method of the class: on a parameter it is the script's hooks'.
    hook: Any = Tensor.register_hook
    hook(parameter, lambda grad: None if grad is None else grad.redistribute(placements=placements))
    parameter.requires_grad_(trains)


def explain_missing_gradients() -> None:
    """Make ``torch.autograd.grad`` raise in words where it finds no gradient of sharded parameters.

    A loss depends on the whole parameters of its forward, which are other objects. torch raises in words of its own
    there, or returns ``None`` under ``allow_unused``. What is put in is once in a process, and costs a call.
    """
    theirs: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # noqa: SLF001 (no public way)
    if not isinstance(theirs, _ExplainedBackward):
        torch.autograd._engine_run_backward = _ExplainedBackward(theirs)  # type: ignore[attr-defined]  # noqa: SLF001


class _ExplainedBackward:
    """torch's own function, and whether it found what it was asked for."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self._theirs = theirs

    def __call__(self, *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        inputs = () if accumulate_grad else args[4]
        places = [place for place, one in enumerate(inputs) if isinstance(one, ShardedTensor)]
        try:
            found = self._theirs(*args, accumulate_grad=accumulate_grad, **kwargs)
        except RuntimeError as problem:
            if places and "not have been used in the graph" in str(problem):
                raise self._refusal() from problem
            raise
        if places and all(found[place] is None for place in places):
            raise self._refusal()
        return found

    def _refusal(self) -> UsageError:
        return UsageError(
            "torch.autograd.grad was asked for gradients of sharded parameters, on which the loss does not depend: "
            "fsdp computes a forward with whole ones, that are made for it",
            cure="Call accelerator.backward(loss), which leaves gradients over all ranks in p.grad of "
            "model.parameters().",
        )


def refuse_plain_gradients(parameters: Iterable[Tensor], problem: Exception) -> None:
    """Raise in words where a script has set a gradient that is no DTensor, to which FSDP cannot add.

    Args:
        parameters: of a sharded model.
        problem: what FSDP raised.

    Raises:
        UsageError: a sharded parameter has a plain gradient.
    """
    for parameter in parameters:
        if isinstance(parameter, DTensor) and not isinstance(parameter.grad, DTensor | None):
            raise UsageError(
                "p.grad of a sharded parameter was set to a plain tensor, to which fsdp cannot add a gradient",
                cure="Write `p.grad = None` before the backward, or after one `p.grad.copy_(value)`.",
            ) from problem


@contextmanager
def plain_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context in which gradients are plain DTensors, which are faster; only this package's code may run in it."""
    grads = [grad for grad in (parameter.grad for parameter in parameters) if type(grad) is ShardedTensor]
    for grad in grads:
        grad.__class__ = DTensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for grad in grads:
            grad.__class__ = ShardedTensor


def _without_rule(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changes: ShardedTensor | None, problem: Exception
) -> Any:
    """Run an operation on full tensors that DTensor refused. Collective over all ranks."""
    if changes is not None:
        return _change_whole(func, args, kwargs, changes)
    if isinstance(kwargs.get("out"), ShardedTensor):
        return _compute_into(func, args, kwargs)
    if func._schema.is_mutable:  # noqa: SLF001
        return _change_wholes(func, args, kwargs, problem)
    mixed = _mixes((args, kwargs))
    # Indices are plain. With gradients, those of ranks that look up other rows would not be summed.
    looks_up = func in _LOOKS_UP and not (torch.is_grad_enabled() and args[0].requires_grad)
    if not mixed or looks_up or (private_names.in_backward() and _alike_on_all_ranks((args, kwargs))):
        # Plain tensors that a backward makes of sharded ones, such as zeros and masks, are alike on all ranks.
        return _compute_whole(func, args, kwargs)
    raise UsageError(
        f"{func} was given a sharded parameter or gradient beside a plain tensor. Outside of the model's "
        "forward the parameters of the module that was prepared are this rank's shards",
        cure="Call the prepared model itself; list methods that compute with its parameters in "
        "`fsdp: {forward_methods: [...]}`. In a loss beside it write `1 * p` for a parameter: it is gathered where "
        "plain tensors come in; without gradients, p.full_tensor(), on every rank.",
    ) from problem


def _all_as_sharded(results: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """See :func:`_as_sharded`; operations such as ``unbind`` have several results."""
    if isinstance(results, (list, tuple)):
        return type(results)(_as_sharded(one, func, args, kwargs, place) for place, one in enumerate(results))
    return _as_sharded(results, func, args, kwargs)


def _as_sharded(
    result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int | None = None
) -> Any:
    """Wrap the result of an operation on sharded tensors; a view that became a copy keeps its base.

    Args:
        result: one of them.
        func: the operation, that was given ``args`` and ``kwargs``.
        place: of the result, where the operation has several.
    """
    if not isinstance(result, DTensor):
        return result
    if any(isinstance(placement, Partial) for placement in result.placements):
        # Each rank's part of a norm, a maximum or a sum, of which later operations would take sums of their own: torch
        # adds up parts of norms.
        result = _everywhere(_whole(result), result)
    as_sharded(result, ComputedTensor)
    base = args[0] if args else None
    if not _is_view(func) or not isinstance(base, ShardedTensor):
        return result
    if isinstance(base, _Part) or _storage(result) != _storage(base):
        result.__class__ = _Part
        assert isinstance(result, _Part)
        result.viewed = base
        result.as_viewed = lambda whole: _one(func(whole, *args[1:], **kwargs), place)
    return result


def _with_all_dims(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Name all dims where an empty list stands for them, see :data:`_DIMS`."""
    place = _DIMS.get(func)
    if place is None or len(args) <= place or args[place] != []:
        return args
    return (*args[:place], list(range(args[0].dim())), *args[place + 1 :])


def _is_view(func: Any) -> bool:
    return any(one.alias_info is not None for one in func._schema.returns)  # noqa: SLF001 (torch has no other word)


def _one(results: Any, place: int | None) -> Any:
    return results if place is None else results[place]


def _storage(tensor: DTensor) -> int:
    address: int = tensor._local_tensor.untyped_storage()._cdata  # noqa: SLF001 (an address that empty tensors have, too)
    return address


def _mixes(arguments: Any) -> bool:
    """Whether there is a plain tensor which DTensor does not take for a number that is the same on all ranks."""
    tensors = (one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor))
    return any(one.numel() != 1 for one in tensors if not isinstance(one, DTensor))


def _changes(func: Any, args: tuple[Any, ...]) -> ShardedTensor | None:
    """The sharded tensor that an operation writes to; those on lists of tensors are element-wise."""
    first = args[0] if args else None
    return first if isinstance(first, ShardedTensor) and _writes_first(func) else None


def _changes_plain(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation writes something that it is given of sharded tensors to a plain one."""
    return bool(args) and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor) and _writes_first(func)


def _refuse_numbers_of_ranks(func: Any, arguments: Any) -> None:
    """Raise where a parameter meets a number that differs between ranks: each part would be of another.

    Collective where a parameter meets a plain tensor of one element.
    """
    tensors = [one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)]
    numbers = [one for one in tensors if not isinstance(one, DTensor) and one.numel() == 1]
    if not numbers or not any(one.requires_grad for one in tensors):
        return
    if not _alike_on_all_ranks(numbers, like=next(one for one in tensors if isinstance(one, ShardedTensor))):
        raise UsageError(
            f"{func} joins a sharded parameter with a number that differs between the ranks, as the loss of a batch "
            "does, and each rank would compute its part with its own",
            cure="Write `1 * parameter` for the parameter there: what is computed from one is gathered where plain "
            "tensors come in.",
        )


def _alike_on_all_ranks(arguments: Any, like: DTensor | None = None) -> bool:
    """Whether plain tensors have as many elements on all ranks, and the same values. Collective.

    Args:
        arguments: they are among these.
        like: a sharded tensor, by default the first of ``arguments``.
    """
    tensors = [one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)]
    device = _device(like if like is not None else next(one for one in tensors if isinstance(one, ShardedTensor)))
    plain = [one.detach().reshape(-1).double() for one in tensors if not isinstance(one, DTensor)]
    mine = torch.cat(plain).nan_to_num()
    lengths = torch.tensor([mine.numel(), -mine.numel()], device=device)
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    if int(lengths.sum()):
        return False
    least, greatest = mine.to(device, copy=True), mine.to(device, copy=True)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return torch.equal(least, greatest)


def _by_elements(func: Any) -> bool:
    """Whether an operation takes an empty part as it takes any other: it is element-wise, or gives a view."""
    return torch.Tag.pointwise in func.tags or _is_view(func) or func in _LIKE


def _some_rank_has_none(arguments: Any) -> bool:
    """Whether a sharded tensor has fewer rows than there are parts, all ranks alike, and no plain one is with it."""
    tensors = [one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)]
    return all(isinstance(one, DTensor) for one in tensors) and any(map(leaves_ranks_out, tensors))


def _writes_first(func: Any) -> bool:
    """Whether an operation writes to its first argument."""
    if not func._schema.is_mutable:  # noqa: SLF001
        return False
    alias = func._schema.arguments[0].alias_info  # noqa: SLF001
    return alias is not None and bool(alias.is_write)


def _refuse_other_memory(func: Any, changes: ShardedTensor) -> None:
    """Operations that change what a tensor is, not its values: ``set_``, ``resize_``, ``t_``."""
    if func is _aten.squeeze_.dim and not isinstance(changes, nn.Parameter):
        return  # the last step of torch's own quantile(), which DTensor can do
    name = func._schema.name  # noqa: SLF001
    if torch.Tag.inplace_view in func.tags or name in {"aten::set_", "aten::resize_"}:
        raise UnsupportedError(
            f"{func} would change shape or memory of a sharded tensor",
            cure="Make a plain tensor of the wanted values, on every rank, and write `p.copy_(values)`.",
        )


def _whole(tensor: DTensor) -> Tensor:
    """Gather the full tensor, with its strides. Collective over all ranks unless every rank has it."""
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        whole = tensor._local_tensor  # noqa: SLF001
    else:
        alone: Any = tensor.detach()
        whole = alone.full_tensor()
    strides = tensor.stride()
    # The last step of torch's own quantile() is squeeze_, which leaves the strides of a DTensor as they were.
    return with_strides(whole, strides) if len(strides) == whole.dim() else whole


def _keep_strides(operands: tuple[Any, ...], result: Any) -> None:
    """Give operands their own strides back where a result has their specification, and has changed it."""
    for one in operands if _SAME_CLASS else ():
        spec: Any = one._spec if isinstance(one, ShardedTensor) else None  # noqa: SLF001
        if spec is None or spec.tensor_meta.stride == one.stride():
            continue
        for made in pytree.tree_leaves(result):
            if isinstance(made, DTensor) and made is not one and made._spec is spec:  # noqa: SLF001
                made._spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)  # noqa: SLF001
        # In place: torch's cache holds it too.
        spec.tensor_meta = TensorMeta(one.shape, one.stride(), one.dtype)


def _change_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changes: ShardedTensor) -> ShardedTensor:
    """Change the full tensor as one process would, and keep this rank's shard. Collective over all ranks."""
    whole = _whole(changes).clone()
    _run_on_whole(func, args, kwargs, whole)
    _write(changes, whole)
    return changes


def _change_wholes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], problem: Exception) -> None:
    """Like :func:`_change_whole`, for an operation on a list of tensors, such as ``torch._foreach_copy_``.

    Raises:
        Exception: ``problem``, why the operation is not done on parts, where it writes to something else.
    """
    if not (isinstance(args[0], (list, tuple)) and _writes_first(func)):
        raise problem
    wholes = [(_whole(each) if isinstance(each, DTensor) else each).clone() for each in args[0]]
    _run_on_whole(func, args, kwargs, wholes)
    for each, whole in zip(args[0], wholes, strict=True):
        _from_first_rank(whole)  # plain values among the other arguments may differ from rank to rank
        if isinstance(each, DTensor):
            _write(each, whole)
        else:
            each.copy_(whole)


def _compute_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Compute an operation from full tensors, and keep this rank's shard in ``out``. Collective over all ranks."""
    out: ShardedTensor = kwargs["out"]
    whole_args, whole_kwargs = pytree.tree_map_only(DTensor, _whole, (args, kwargs))
    whole = torch.empty(out.shape, dtype=out.dtype, device=_device(out))
    func(*whole_args, **{**whole_kwargs, "out": whole})
    _from_first_rank(whole)  # plain values among the arguments may differ from rank to rank
    _write(out, whole)
    return out


def _copy(changes: ShardedTensor, values: Any) -> ShardedTensor:
    """Copy rank 0's values, as ``prepare`` does: other ranks may have different ones. Collective over all ranks."""
    whole = torch.empty(changes.shape, dtype=changes.dtype, device=_device(changes)).copy_(values)
    _from_first_rank(whole)
    _write(changes, whole)
    return changes


def _run_on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Tensor | list[Tensor]) -> None:
    rest, named = pytree.tree_map_only(DTensor, _whole, (args[1:], kwargs))
    func(whole, *rest, **named)
    if torch.Tag.nondeterministic_seeded in func.tags and isinstance(whole, Tensor):
        _from_first_rank(whole)


def _compute_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation without a DTensor rule from full tensors, on every rank. Collective over all ranks."""
    like = next(one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, ShardedTensor))
    whole_args, whole_kwargs = pytree.tree_map_only(DTensor, _whole, (args, kwargs))
    found = func(*whole_args, **whole_kwargs)
    found = pytree.tree_map_only(Tensor, lambda whole: _everywhere(whole, like), found)
    return _all_as_sharded(found, func, args, kwargs)


def _everywhere(whole: Tensor, like: DTensor) -> DTensor:
    """A full tensor, which every rank has, on the mesh of another."""
    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _draw_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers like a sharded tensor: rank 0 draws those of the full tensor. Collective over all ranks."""
    like = next(one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, ShardedTensor))
    whole_args, whole_kwargs = pytree.tree_map_only(DTensor, _whole, (args, kwargs))
    drawn = func(*whole_args, **whole_kwargs)
    if not isinstance(drawn, Tensor) or drawn.shape != like.shape:
        raise UnsupportedError(
            f"{func} of a sharded tensor gives random numbers of another shape",
            cure="Draw from p.full_tensor(), on every rank, with the same seed.",
        )
    _from_first_rank(drawn)
    local = drawn[box_of(like)].contiguous() if drawn.dim() else drawn
    made = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=drawn.stride()
    )
    return as_sharded(made)


def _from_first_rank(whole: Tensor) -> None:
    if dist.get_world_size() > 1:
        sent = whole.contiguous()  # The mesh of `fully_shard` spans the job: all ranks hold the model.
        dist.broadcast(sent, src=0)
        if sent is not whole:
            whole.copy_(sent)


def _device(tensor: DTensor) -> torch.device:
    """Return the device of collectives: a shard may be offloaded to CPU memory."""
    kind = tensor.device_mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _write(changes: DTensor, whole: Tensor) -> None:
    """Write this rank's shard of a full tensor."""
    local = changes._local_tensor  # noqa: SLF001
    local.copy_(whole[box_of(changes)] if whole.dim() else whole)


def _refuse_writing(tensor: DTensor, who: str) -> NoReturn:
    size = operator.index(tensor.device_mesh.size())
    raise UsageError(
        f"{who} was given a tensor that is sharded over {size} ranks, and would write this rank's part of it",
        cure="On every rank write accelerator.save(accelerator.get_state_dict(model), path), or "
        "accelerator.save_model(model, folder); save_pretrained takes the former as its argument state_dict. "
        "p.full_tensor() gathers one tensor, p.to_local() is this rank's part.",
    )


__all__ = [
    "ComputedTensor",
    "ShardedTensor",
    "as_sharded",
    "explain_missing_gradients",
    "keep_placements_of_gradients",
    "plain_gradients",
    "refuse_plain_gradients",
]
