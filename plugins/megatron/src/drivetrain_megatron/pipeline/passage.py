"""Boundary activations of each cut, and outputs of other stages' modules, for inputs of one signature.

Between the modules that belong to one stage each, a model's forward has code of its own: sums, masks, a loop over
blocks. That code runs on every stage, in the same order, so its results can be named by counting: the ``n``-th call
that depends on a parameter. (Masks and positions may be computed in one way or another, as their values are.) A value
crosses a cut when it is computed before it and used, by that code or by a module, after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.pipeline.randomness import Draws
from drivetrain_megatron.pipeline.skeleton import Skeleton, forget_memory, is_absent, memory_of
from drivetrain_megatron.pipeline.timeline import Timeline
from drivetrain_megatron.pipeline.values import Meta, leaves, rebuilt

Key = tuple[int, int]
"""Name of a value: the number of the call that made it, and which leaf of its result it is."""


@dataclass(frozen=True)
class Crossing:
    """The values that go from one stage to the next.

    Args:
        point: name of the module at which the next stage begins.
        keys: their names, in order.
        metas: their shapes, in that order.
        calls: how many calls were counted before.
    """

    point: str
    keys: tuple[Key, ...]
    metas: tuple[Meta, ...]
    calls: int


@dataclass(frozen=True)
class Stub:
    """A module that runs on one stage; the other stages skip it.

    Args:
        stage: the stage that runs it.
        output: its output on the other stages, tensors without values.
        loss: it is of the last stage, and a loss is computed inside.
    """

    stage: int
    output: Any
    loss: bool


@dataclass(frozen=True)
class Passage:
    """Forward trace of a split model, for inputs of one signature.

    Args:
        crossings: one for each cut, in order.
        stubs: modules that other stages skip, by name.
        output: the model's output, tensors without values.
        draws: the generators that its forward draws from.
    """

    crossings: tuple[Crossing, ...]
    stubs: dict[str, Stub]
    output: Any
    draws: Draws = field(default_factory=Draws, compare=False)


@final
class Between(TorchFunctionMode):
    """Intercepts torch calls between skipped modules, and counts those that depend on parameters.

    Args:
        before: is given a call's arguments and returns those to use.
        after: is given the number and the result of each call that depends on a parameter.
    """

    def __init__(self, before: Callable[[Any], Any], after: Callable[[int, Any], None]) -> None:
        super().__init__()
        self._before, self._after = before, after
        self._dependent: dict[int, Tensor] = {}
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._before((args, kwargs or {}))
        result = func(*args, **kwargs)
        if any(self._depends(leaf) for leaf in leaves((args, kwargs))):
            if func is Tensor.__setitem__:  # what it changes is its result
                self.made(args[0])
                return result
            found = leaves(result)
            if any(isinstance(leaf, Tensor) for leaf in found):
                self.made(result)
        return result

    def _depends(self, leaf: Any) -> bool:
        return isinstance(leaf, nn.Parameter) or id(memory_of(leaf)) in self._dependent

    def made(self, result: Any) -> None:
        """Count a call, of torch or of a module that is skipped as a whole."""
        self.calls += 1
        self.depend(result)
        self._after(self.calls, result)

    def depend(self, result: Any) -> None:
        """Take note of values that depend on parameters."""
        # Kept, so that no other tensor gets their identity.
        self._dependent.update({id(leaf): leaf for leaf in leaves(result) if isinstance(leaf, Tensor)})

    def end(self) -> None:
        """Release the values and the run, which refers to this object, so that reference counting frees both."""
        self._dependent.clear()
        del self._before, self._after

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable interception, inside of a skipped module."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]


def stubs_of(timeline: Timeline, points: Sequence[str]) -> dict[str, Stub]:
    """The modules that lie in one stage, read off a forward of the skeleton.

    Raises:
        UsageError: the inputs take another way through the model than those by which it was cut.
    """
    called = dict(timeline.once())
    missing = [name for name in points if name not in called]
    if missing:
        raise UsageError(
            f"with these inputs forward calls {missing[0]!r}, where a pipeline stage begins, "
            f"{len(timeline.calls.get(missing[0], ()))} times, and with the first batch it called it once",
            cure="Call the same modules for every batch, or name other split_points, or use "
            "pipeline_parallel_size: 1.",
        )
    check_graded(timeline, points)
    times = [called[name].began for name in points]
    stubs = {}
    for name, call in called.items():
        first = sum(call.began >= began for began in times)
        last = sum(call.ended >= began for began in times)
        if not name or first != last or not all(_skippable(leaf) for leaf in leaves(call.output)):
            continue
        for leaf in leaves(call.output):
            forget_memory(leaf)
        loss = first == len(times) and any(call.began < time < call.ended for time in timeline.losses)
        stubs[name] = Stub(first, call.output, loss)
    return stubs


def check_graded(timeline: Timeline, points: Sequence[str]) -> None:
    """Raise :class:`UsageError` where a stage would begin in the middle of what records no gradients."""
    for name in points:
        if name in timeline.ungraded:
            raise UsageError(
                f"a pipeline stage begins at {name!r}, which forward calls where gradients are not recorded: under "
                "torch.no_grad(), or in checkpoint(..., use_reentrant=True), so that no gradient "
                "would come back to the stage before",
                cure="Write use_reentrant=False, or name split_points outside of it.",
            )


def _skippable(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return is_absent(leaf)
    return isinstance(leaf, int | float | str | bool | None)


@final
class Survey:
    """A run of the skeleton that passes over every module and notes which values are used in another stage.

    Args:
        points: where stages begin.
        stubs: what is passed over.
        is_written: whether an absent value was written into a memory with values.
        existing: tensors that live longer than a forward: the model's arguments and buffers.
    """

    def __init__(
        self,
        points: Sequence[str],
        stubs: dict[str, Stub],
        is_written: Callable[[Any], bool],
        existing: Iterable[Any],
    ) -> None:
        self.between, self.waits = Between(self._before, self._made), False
        self._points, self._stubs, self._is_written = points, stubs, is_written
        self._existing = {_storage(one) for one in existing if isinstance(one, Tensor)} - {0}
        self._writers: dict[int, int] = {}
        """The first stage that writes absent values into memory, by its storage."""
        self._stage = 0
        self._calls = [0 for _ in points]
        self._origins: dict[int, tuple[Key, int]] = {}
        self._needed: list[dict[Key, Tensor]] = [{} for _ in points]

    def skips(self, name: str) -> bool:
        """Whether a module lies in one stage."""
        return name in self._stubs

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip a module's call."""
        if name in self._points:
            self._calls[self._points.index(name)] = self.between.calls
            self._stage = self._points.index(name) + 1
            self._used((args, kwargs))
        stub = self._stubs.get(name)
        if stub is None:
            return forward(*args, **kwargs)
        self._used((args, kwargs))
        with self.between.off():
            output = fresh(stub.output, range(len(leaves(stub.output))))
        self.between.made(output)
        return output

    def end(self) -> None:
        """Keep the recorded tensors: :meth:`crossings` looks up the output's tensors by identity."""

    def _before(self, arguments: Any) -> Any:
        self._used(arguments)
        return arguments

    def _used(self, tree: Any) -> None:
        for given in leaves(tree):
            leaf = memory_of(given)
            written = self._is_written(leaf)
            if written:
                self._check_memory(leaf)
            if not (written or is_absent(leaf)) or id(leaf) not in self._origins:
                continue
            key, stage = self._origins[id(leaf)]
            for cut in range(stage, self._stage):
                self._needed[cut].setdefault(key, leaf)

    def _check_memory(self, tensor: Tensor) -> None:
        """Raise where a stage reads what an earlier one has written, and cannot be sent it."""
        storage = _storage(tensor)
        if self._writers.get(storage, self._stage) == self._stage:
            return
        if id(tensor) in self._origins and storage not in self._existing:
            return
        how = "a buffer or an argument of forward" if storage in self._existing else "memory, through a view of it,"
        raise UnsupportedError(
            f"forward writes what layers of one pipeline stage return into {how} and reads it where another stage has "
            f"begun, at {self._points[self._stage - 1]!r}",
            cure="Compute it without changing a tensor in place (torch.cat, torch.stack, torch.index_add), or assign "
            "to the new tensor itself by an index (rows[:, :8] = h), not to a view of it; or name split_points before "
            "the write or behind the read.",
        )

    def _made(self, number: int, result: Any) -> None:
        for index, leaf in enumerate(leaves(result)):
            written = self._is_written(leaf)
            if written:
                self._writers.setdefault(_storage(leaf), self._stage)
            if written or is_absent(leaf):
                self._origins[id(leaf)] = ((number, index), self._stage)

    def crossings(self, output: Any) -> tuple[Crossing, ...]:
        """Return the boundary activations; the model's output counts as used in the last stage."""
        self._stage = len(self._points)
        self._used(output)
        return tuple(
            Crossing(point, tuple(sorted(needed)), tuple(Meta.of(needed[key]) for key in sorted(needed)), calls)
            for point, needed, calls in zip(self._points, self._needed, self._calls, strict=True)
        )


def _storage(tensor: Tensor) -> int:
    """Return a number that identifies the storage of a tensor; 0 if it has none."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001 (torch has no public name for it)
        if is_absent(tensor) or tensor.layout is not torch.strided:
            return 0
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def fresh(output: Any, which: Iterable[int]) -> Any:
    """Copy the output of a skipped module with some new tensors, which each run fills with its own values."""
    found, chosen = leaves(output), set(which)
    return rebuilt(
        output,
        [
            writable(leaf.detach().requires_grad_(leaf.requires_grad))
            if index in chosen and isinstance(leaf, Tensor)
            else leaf
            for index, leaf in enumerate(found)
        ],
    )


def whole_output(skeleton: Skeleton, timeline: Timeline) -> Any:
    """The model's output without values, also where it has some."""
    found = [
        skeleton.absent(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves(timeline.output)
    ]
    return rebuilt(timeline.output, found)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def writable(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that forward may change in place, which autograd refuses of a leaf and its views."""
    trained = tensor.requires_grad and torch.is_grad_enabled()
    return _Writable.apply(tensor) if trained else tensor  # type: ignore[no-untyped-call]


class _Writable(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient
