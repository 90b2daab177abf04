"""Traces one micro-batch of a model without its memory: what is alive when, and which kernels run.

The model runs on fake tensors, which have shapes and no values, so that the operators, autograd, autocast and
checkpointing are torch's own. A dispatch mode counts the bytes of every storage from its creation to its end, as an
allocator would. What a kernel needs inside of itself is not seen, nor are allocators' rounding and fragmentation.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from drivetrain.api import DrivetrainError, PrecisionPolicy, TorchEngine, UsageError, dtype_of
from drivetrain_planner.allocator import reserved
from drivetrain_planner.estimates import EventKind, Trace, TraceEvent, Work
from drivetrain_planner.kernels import kernels_of
from drivetrain_planner.naming import told

Loss = Callable[[Any, Any], Tensor]
Around = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Example:
    """A micro-batch as the script feeds it.

    Args:
        args: positional arguments of the forward.
        kwargs: its keyword arguments.
        batch: what the loss function is given beside the model's output.
        loss: ``loss(output, batch)``; ``None`` takes the attribute ``loss`` of the output.
        kept: the script has the output in a variable while backward runs, and with it the logits.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any
    loss: Loss | None = None
    kept: bool = True

    @cached_property
    def samples(self) -> int:
        """Size of the first dim of the first tensor that has one."""
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim():
                return len(leaf)
        raise UsageError(
            "the batch holds no tensor with a first dim, which would be its number of samples",
            cure="Let the batch function return the arguments of a forward.",
        )


@final
class Census(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are made while it is entered, and the kernels that make them.

    Args:
        record: called with an event's kind and name whenever one is to be recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[TraceEvent] = []
        self.work: Counter[tuple[int, int, int]] = Counter()
        self.log: list[tuple[int, int]] = []
        """Number and bytes of each storage that begins to be counted, number and 0 of each that ends."""
        self._live = self._most = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._ignored: set[int] = set()
        self._elsewhere: dict[int, weakref.ref[Any]] = {}
        """Storages that stand for what another rank has; what is computed from them is not here either."""

    @property
    def live(self) -> int:
        """Bytes that are alive now."""
        return self._live

    def ignore(self, tensor: Tensor) -> int:
        """Count this tensor's storage no more; returns its bytes."""
        storage = tensor.untyped_storage()
        found = self._storages.pop(storage._cdata, None)  # noqa: SLF001 (the identity of a storage)
        if found is not None:
            self._live -= found[1]
            self.log.append((storage._cdata, 0))  # noqa: SLF001
        self._ignored.add(storage._cdata)  # noqa: SLF001
        return int(storage.nbytes())

    def leave_out(self, tensor: Tensor) -> None:
        """Another rank has this tensor: neither it nor what is computed from it is counted."""
        storage = tensor.untyped_storage()
        number = storage._cdata  # noqa: SLF001
        if number not in self._elsewhere:
            self._elsewhere[number] = weakref.ref(storage, lambda _: self._elsewhere.pop(number, None))

    def is_elsewhere(self, tensor: Any) -> bool:
        """Whether this tensor is on another rank."""
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._elsewhere  # noqa: SLF001

    def count(self, tensor: Tensor) -> None:
        """Count this tensor's storage from now on."""
        storage = tensor.untyped_storage()
        number, size = storage._cdata, int(storage.nbytes())  # noqa: SLF001
        if number in self._storages or number in self._ignored or number in self._elsewhere or not size:
            return
        self._storages[number] = (weakref.ref(storage, partial(self._ended, number)), size)
        self._live += size
        self.log.append((number, size))
        self._most = max(self._most, self._live)

    def _ended(self, number: int, _: Any) -> None:
        found = self._storages.pop(number, None)
        if found is not None:
            self._live -= found[1]
            self.log.append((number, 0))

    def record(self, kind: EventKind, name: str = "") -> None:
        """Record an event."""
        self.events.append(TraceEvent(kind, name, max(self._most, self._live), self._live))
        self._most = self._live

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _GROUPED and isinstance(args[0], FakeTensor):
            result: Any = _grouped(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if self._elsewhere and any(self.is_elsewhere(leaf) for leaf in tree_leaves((args, kwargs))):
            for tensor in made:
                self.leave_out(tensor)
            return result
        for tensor in made:
            self.count(tensor)
        aliases = [each.alias_info for each in func._schema.returns]  # noqa: SLF001
        if made and not any(alias is not None and not alias.is_write for alias in aliases):
            self._measure(func, args, kwargs or {}, result, made)
        return result

    def _measure(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, made: list[Tensor]) -> None:
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        moved = sum(one.numel() * one.element_size() for one in (*taken, *made))
        counted = _ATTENTION.get(func._overloadpacket)  # noqa: SLF001
        if func is _GROUPED:
            flops = 2 * args[0].numel() * args[1].shape[-1]
        elif counted is not None:
            flops = int(counted(*(one.shape for one in args if isinstance(one, Tensor))))
        else:
            counted = flop_registry.get(func._overloadpacket)  # noqa: SLF001
            flops = 0 if counted is None else int(counted(*args, **kwargs, out_val=result))
        self.work[flops, moved, made[0].element_size()] += 1


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any) -> int:
    key, value = (_every_head(query, each) for each in (key, value))
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


def _attention(query: Any, key: Any, value: Any, *_: Any) -> int:
    return int(sdpa_flop_count(query, *(_every_head(query, each) for each in (key, value))))  # type: ignore[no-untyped-call]


def _every_head(query: Any, shape: Any) -> tuple[int, ...]:
    """The shape of keys or values that several heads of queries share, as if each head had its own.

    Torch 2.11's counter refuses shared ones.
    """
    return (*query[:-2], *shape[-2:])


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_ATTENTION: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}{ending}"): counted
    for name in _KERNELS
    for ending, counted in (("", _attention), ("_backward", _attention_backward))
}
"""Attention kernels by torch's own formulas; its counter leaves out the CPU's."""

_GROUPED = torch.ops.aten._grouped_mm.default  # noqa: SLF001


def _grouped(first: Tensor, second: Tensor, offs: Tensor, bias: Tensor | None = None, dtype: Any = None) -> Tensor:
    """The result of a product of groups, without values.

    Torch's own function for it takes bfloat16 alone (as the first kernels for accelerators did), while the kernels take
    other types too. The groups are of rows of ``first``, of columns of ``second``, or of the dim that is summed over.
    """
    del bias
    shapes = {
        (2, 3): (first.shape[0], second.shape[-1]),
        (3, 2): (first.shape[1], second.shape[-1]),
        (2, 2): (len(offs), first.shape[0], second.shape[-1]),
        (3, 3): (*first.shape[:2], second.shape[-1]),
    }
    return first.new_empty(shapes[first.dim(), second.dim()], dtype=first.dtype if dtype is None else dtype)


class _Identity(torch.autograd.Function):
    """Returns its inputs; tells when their gradients have been computed."""

    @staticmethod
    def forward(ctx: Any, told: Callable[[], None], *inputs: Tensor) -> Any:
        ctx.told = told
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.told()
        return (None, *gradients)


@final
class Tracer:
    """Traces a model's micro-batches; each distinct trace is made once.

    Args:
        model: on the meta device; stays as it is.
        example: of a micro-batch.
        policy: the run's precision.
        device_type: of the run.
    """

    def __init__(
        self, model: nn.Module, example: Example, policy: PrecisionPolicy, device_type: str = "cpu"
    ) -> None:
        self._model, self._example, self._policy, self._device_type = model, example, policy, device_type
        self._made: dict[object, Trace] = {}

    def trace(
        self,
        watched: Sequence[str] = (),
        recomputed: Sequence[str] = (),
        dtype: str | None = None,
        around: Around | None = None,
        /,
    ) -> Trace:
        """See :class:`drivetrain_planner.estimates.Tracing`."""
        key = tuple(watched), tuple(recomputed), dtype, around
        if key not in self._made:
            self._made[key] = self._trace(*key)
        return self._made[key]

    def _trace(
        self, watched: Sequence[str], recomputed: Sequence[str], dtype: str | None, around: Around | None
    ) -> Trace:
        def run(bench: Any) -> None:
            named = dict(bench.model.named_modules())
            for name in recomputed:
                _recompute(named[name])
            watch = _Watch(bench.census, {name: named[name] for name in watched})
            bench.begin()
            with nullcontext() if around is None else around():
                output = bench.engine.forward(bench.model, bench.args, bench.kwargs)
                loss = bench.loss(output)
                kept = output if self._example.kept else None
                del output
                bench.record("loss")
                loss.backward()
                del loss, kept
                watch.close()
                bench.record("end")

        return self.run(run, dtype)

    def run(self, how: Callable[[Any], None], dtype: str | None = None) -> Trace:
        """See :attr:`drivetrain_planner.PlanRequest.run`."""
        # Whatever the constructor computed on the CPU is let in, and becomes fake where it meets a fake tensor.
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, ExitStack() as stack:
            # What an operator says about fake tensors is in the error; torch logs its whole stack beside it.
            stack.enter_context(_quiet(logging.getLogger("torch._subclasses.fake_tensor")))
            stack.enter_context(kernels_of(self._device_type))
            model = fake_model(self._model, mode, None if dtype is None else dtype_of(dtype))
            model.train()
            # Loss scaling adds a handful of scalars.
            engine = TorchEngine(PrecisionPolicy(**{**vars(self._policy), "loss_scaling": False}), "cpu")
            args, kwargs = tree_map_only(Tensor, mode.from_tensor, (self._example.args, self._example.kwargs))
            batch = tree_map_only(Tensor, mode.from_tensor, self._example.batch)
            bench = _Bench(model, args, kwargs, batch, self._example, engine, stack)
            try:
                how(bench)
            except DrivetrainError:
                raise
            except (DataDependentOutputException, DynamicOutputShapeException) as problem:
                raise UsageError(
                    f"{type(self._model).__name__} cannot be traced without values: {told(problem)}",
                    cure="What the forward decides must not depend on the values of tensors; for a mixture of experts, "
                    "choose an implementation with fixed shapes.",
                ) from problem
            except Exception as problem:
                raise UsageError(
                    f"{type(self._model).__name__} cannot be traced on this micro-batch: {told(problem)}",
                    cure="Let --batch return what the forward takes. If the model itself runs on it, its forward needs "
                    "values of tensors, and a plan has none.",
                ) from problem
        return bench.trace()


@final
class _Bench:
    """See :class:`drivetrain_planner.estimates.Bench`."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Any,
        example: Example,
        engine: TorchEngine,
        stack: ExitStack,
    ) -> None:
        self.model, self.args, self.kwargs, self.engine = model, args, kwargs, engine
        self.samples, self.kept = example.samples, example.kept
        self.census = Census()
        self._batch, self._example, self._stack = batch, example, stack
        self._gradients: dict[str, int] = {}
        self._forward: Counter[tuple[int, int, int]] = Counter()
        self._saved = 0

    def begin(self, *, batch: bool = True, elsewhere: Collection[str] = ()) -> None:
        for name, parameter in self.model.named_parameters():
            self.census.ignore(parameter)
            if name in elsewhere:
                self.census.leave_out(parameter)
            elif parameter.requires_grad:
                hook = partial(self._completed, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for buffer in self.model.buffers():
            self.census.ignore(buffer)
        for leaf in tree_leaves((self.args, self.kwargs, self._batch)):
            if isinstance(leaf, Tensor) and batch:
                self.census.count(leaf)
            elif isinstance(leaf, Tensor):
                self.census.ignore(leaf)
        self._stack.enter_context(self.census)

    def record(self, kind: EventKind, name: str = "") -> None:
        if kind == "loss":
            self._forward, self._saved = Counter(self.census.work), self.census.live
        if kind == "gradient":
            gradient = self.model.get_parameter(name).grad
            assert gradient is not None, name
            self._gradients[name] = self.census.ignore(gradient)
        self.census.record(kind, name)

    def leave_out(self, tensor: Tensor) -> None:
        self.census.leave_out(tensor)

    def is_elsewhere(self, tensor: Tensor) -> bool:
        return self.census.is_elsewhere(tensor)

    def loss(self, output: Any, begin: int = 0, end: int | None = None) -> Tensor:
        batch = self._batch
        if end is not None:
            batch = tree_map_only(
                Tensor, lambda one: one[begin:end] if one.dim() and len(one) == self.samples else one, batch
            )
        return _loss_of(output, batch, self._example.loss, type(self.model).__name__)

    def _completed(self, name: str, _: Tensor) -> None:
        self.record("gradient", name)

    def trace(self) -> Trace:
        census = self.census
        return Trace(
            events=census.events,
            forward=_work(self._forward),
            backward=_work(census.work - self._forward),
            saved=self._saved,
            gradients={name: size for name, size in self._gradients.items() if size},
            unused=max(0, reserved(census.log) - max(event.most for event in census.events)),
        )


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _work(counted: Counter[tuple[int, int, int]]) -> tuple[Work, ...]:
    return tuple(Work(*key, count) for key, count in sorted(counted.items()))


def _loss_of(output: Any, batch: Any, function: Loss | None, model: str) -> Tensor:
    loss = getattr(output, "loss", None) if function is None else function(output, batch)
    if not isinstance(loss, Tensor) or loss.dim():
        told = "its output has no attribute `loss`" if function is None else "the loss function returned none"
        raise UsageError(
            f"there is no scalar loss to trace the backward of {model} with: {told}",
            cure="Name a function of the model's output and the batch: --loss train.py:loss_fn.",
        )
    return loss


def fake_model(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a model with fake tensors on the CPU.

    Args:
        model: on any device.
        mode: is entered.
        dtype: of floating parameters; ``None`` = as they are.
    """
    memo: dict[int, Any] = {}
    for one in model.parameters():
        kind = dtype if dtype is not None and one.is_floating_point() else one.dtype
        memo[id(one)] = nn.Parameter(_fake(one, kind), one.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake(buffer, buffer.dtype)
    del mode
    return copy.deepcopy(model, memo)


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")


def _recompute(module: nn.Module) -> None:
    """Recompute this module's activations in backward, as backends with activation checkpointing do."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = forward


@final
class _Watch:
    """Records when watched modules begin and end, forward and backward."""

    def __init__(self, census: Census, modules: dict[str, nn.Module]) -> None:
        self._census = census
        self._open: list[str] = []
        """Modules whose backward has begun, the last first."""
        for name, module in modules.items():
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, name))

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._census.record("enter", name)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not leaves or not torch.is_grad_enabled():
            return None
        passed = _Identity.apply(partial(self._left, name), *leaves)  # type: ignore[no-untyped-call]
        by_id = {id(leaf): one for leaf, one in zip(leaves, passed, strict=True)}
        return tree_map_only(Tensor, lambda leaf: by_id.get(id(leaf), leaf), (args, kwargs))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._entered, name))  # type: ignore[no-untyped-call]
        self._census.record("leave", name)

    def _entered(self, name: str, _: Tensor) -> None:
        if name not in self._open:
            self._open.append(name)
            self._census.record("backward_enter", name)

    def _left(self, name: str) -> None:
        if name in self._open:
            self._open.remove(name)
            self._census.record("backward_leave", name)

    def close(self) -> None:
        """End the backward of modules whose inputs need no gradient."""
        while self._open:
            self._left(self._open[-1])
