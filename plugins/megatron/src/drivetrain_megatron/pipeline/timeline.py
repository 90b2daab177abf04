"""Records the order of module calls, parameter uses and values at the cuts in one forward of a skeleton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain_megatron.pipeline.reductions import Counting
from drivetrain_megatron.pipeline.skeleton import Skeleton
from drivetrain_megatron.pipeline.values import leaves


@dataclass(slots=True)
class Call:
    """One call of a module.

    Args:
        began: when; the clock counts calls, returns and uses of parameters.
        arguments: what it was called with, ``(args, kwargs)``.
        ended: when it returned.
        output: what it returned.
    """

    began: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    ended: int = -1
    output: Any = None


@dataclass
class Timeline:
    """A recorded forward.

    Args:
        calls: of each module, by name.
        uses: of each parameter, by first name: when.
        losses: when one of torch's losses was computed.
        output: what the model returned.
        ungraded: modules that were called where gradients are not recorded, though they are around the model's call:
            under ``no_grad``, or inside of a checkpoint that recomputes in its own backward.
    """

    calls: dict[str, list[Call]] = field(default_factory=dict)
    uses: dict[str, list[int]] = field(default_factory=dict)
    losses: list[int] = field(default_factory=list)
    output: Any = None
    ungraded: set[str] = field(default_factory=set)

    def once(self) -> Iterator[tuple[str, Call]]:
        """Modules that were called exactly once, in order of their calls."""
        single = [(name, calls[0]) for name, calls in self.calls.items() if len(calls) == 1 and calls[0].ended >= 0]
        yield from sorted(single, key=lambda pair: pair[1].began)


def record(skeleton: Skeleton, run: Callable[[Callable[..., Any]], Any], *args: Any, **kwargs: Any) -> Timeline:
    """Run a skeleton's forward and note everything. Not collective.

    Args:
        skeleton: the model without memory.
        run: ``run(forward)`` calls it under the run's precision.
        args: the model's arguments, with values.
        kwargs: its keyword arguments.
    """
    timeline = Timeline()
    clock = _Clock()
    names = {id(one): name for name, one in skeleton.module.named_parameters()}
    counting = Counting(lambda: timeline.losses.append(clock.tick()))
    with (
        _Uses(names, timeline.uses, clock),
        counting,
        _listening(skeleton.module, timeline, clock),
        _noting(skeleton.module, timeline),
    ):
        timeline.output = run(lambda: skeleton.module(*args, **kwargs))
    for name, parameter in skeleton.module.named_parameters():
        for part in skeleton.opaque:
            if name.startswith(f"{part}."):
                timeline.uses.setdefault(names[id(parameter)], []).extend(call.began for call in timeline.calls[part])
    return timeline


@final
class _Clock:
    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        self.now += 1
        return self.now


@final
class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that read parameters."""

    def __init__(self, names: dict[int, str], uses: dict[str, list[int]], clock: _Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._uses, self._clock = names, uses, clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in leaves((args, kwargs or {})):
            if isinstance(value, Tensor) and id(value) in self._names:
                self._uses.setdefault(self._names[id(value)], []).append(self._clock.tick())
        return func(*args, **(kwargs or {}))


@contextmanager
def _listening(module: nn.Module, timeline: Timeline, clock: _Clock) -> Iterator[None]:
    handles = []
    for name, part in module.named_modules():

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            timeline.calls.setdefault(name, []).append(Call(clock.tick(), (args, kwargs)))

        def after(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            call = next(one for one in reversed(timeline.calls[name]) if one.ended < 0)
            call.ended, call.output = clock.tick(), output

        handles += [part.register_forward_pre_hook(before, with_kwargs=True), part.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _noting(module: nn.Module, timeline: Timeline) -> Iterator[None]:
    """Note where gradients are not recorded: at the call itself, which may enter a checkpoint before any hook."""
    outside = torch.is_grad_enabled()
    originals = [(part, type(part)) for part in module.modules()]
    for name, part in module.named_modules():
        kind = type(part)

        def call(it: nn.Module, *args: Any, _name: str = name, _kind: Any = kind, **kwargs: Any) -> Any:
            if outside and not torch.is_grad_enabled():
                timeline.ungraded.add(_name)
            return _kind.__call__(it, *args, **kwargs)

        part.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    try:
        yield
    finally:
        for part, kind in originals:
            part.__class__ = kind
