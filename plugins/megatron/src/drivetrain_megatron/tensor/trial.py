"""Replays recorded calls under the sharding rules, on shapes, to test a plan.

A trial shards some parameters and replays the calls that follow. It raises what these require: a layer whose result is
combined with a sharded one must be sharded alike, a fused layer that is split must be sharded in parts, an operation
needs the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain_megatron.tensor import rules  # noqa: F401 (a trial runs under the rules)
from drivetrain_megatron.tensor.layout import Layout, refined
from drivetrain_megatron.tensor.sharded import Sharded, operation, sharded
from drivetrain_megatron.tensor.trace import Call, Trace, Value


class Cut(NamedTuple):
    """Cut of one parameter: the dim, and the parts if it is packed."""

    dim: int
    parts: tuple[int, ...] | None = None


class Unit(NamedTuple):
    """A condition on the number of ranks: it must divide ``count``.

    Args:
        count: how many units there are, for instance heads.
        length: size of the dim that consists of them, for instance the features of all heads.
    """

    count: int  # type: ignore[assignment]
    length: int


@dataclass
class Group:
    """Parameters that are cut together.

    Args:
        cuts: by number of the parameter in the trace.
        units: what the number of ranks must divide.
        first: place of the call at which the flow begins.
    """

    cuts: dict[int, Cut]
    units: set[Unit] = field(default_factory=set)
    first: int = 0


class Refused(Exception):  # noqa: N818 (not an error: the answer of a trial)
    """Raised if an operation needs the full tensor."""


class WantsParts(Exception):  # noqa: N818
    """A dim of this length must be cut in these parts."""

    def __init__(self, length: int, parts: tuple[int, ...]) -> None:
        super().__init__()
        self.length, self.parts = length, parts


class WantsCut(Exception):  # noqa: N818
    """These parameters must be cut too."""

    def __init__(self, cuts: dict[int, Cut]) -> None:
        super().__init__()
        self.cuts = cuts


@final
class Probe:
    """Simulated process group of a trial, in place of :class:`~drivetrain_megatron.tensor.collectives.Ring`.

    Args:
        on_cut: called with each plain tensor that would have to be cut.
        strict: refuse to gather.
    """

    rank, size, group, sequence_parallel = 0, 1, None, False

    def __init__(self, on_cut: Callable[[Tensor, Layout], None], *, strict: bool = True) -> None:
        self._on_cut, self._strict = on_cut, strict
        self.units: set[Unit] = set()
        self.hints: list[tuple[int, tuple[int, ...]]] = []
        self.gathers: list[str] = []

    def divides(self, length: int, tensor: Any) -> bool:
        if length:
            whole = tensor.spec.length
            self.units.add(Unit(length, whole))
            if tensor.spec.parts is None and length < whole:
                self.hints.append((whole, (whole // length,) * length))
        return True

    def wants_parts(self, tensor: Any, sizes: Sequence[int]) -> None:
        finer = refined(tensor.spec, sizes)
        if finer != tensor.spec.parts:
            raise WantsParts(tensor.spec.length, finer)

    def enter(self, plain: Tensor) -> Tensor:
        return plain

    def cut(self, plain: Tensor, layout: Layout) -> Tensor:
        self._on_cut(plain, layout)
        return plain

    def gather(self, local: Tensor, layout: Layout) -> Tensor:
        if self._strict:
            raise Refused
        return local

    def gather_and_enter(self, local: Tensor, layout: Layout) -> Tensor:
        return self.gather(local, layout)

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def add_up(self, values: Tensor) -> Tensor:
        return values

    def largest(self, values: Tensor) -> Tensor:
        return values

    def part(self, whole: Tensor, layout: Layout) -> Tensor:
        return whole

    def collect(self, local: Tensor, layout: Layout) -> Tensor:
        return local


@final
class Replay:
    """Runs the recorded calls that see something cut, under the rules."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.users, self._makers = trace, trace.users(), trace.makers()
        self._parameters = set(trace.parameters.values())
        self._views = views_of_parameters(trace, self._parameters)
        self._numbers = {id(value): number for number, value in enumerate(trace.values)}

    @torch.no_grad()
    def run(self, group: Group, probe: Probe, *, outputs_may_be_cut: bool = False) -> None:
        """Follow the group's cuts until all values are unsharded again.

        Raises:
            Refused: values remain sharded, or an operation needs a full tensor.
        """
        self._group, self._probe = group, probe
        held: dict[int, Sharded] = {}
        self._after: set[int] = set()
        """Values that depend on a sum over this group's ranks."""
        for number, cut in group.cuts.items():
            held[number] = self._cut(number, cut)
        for place in range(group.first, len(self.trace.calls)):
            call = self.trace.calls[place]
            inputs = call.inputs
            if not any(number in held for number in inputs):
                if any(number in self._after for number in inputs):
                    self._after.update(call.outputs)
                continue
            if any(number in held for number in self.trace.opaque.intersection(inputs)):
                raise Refused
            self._step(call, held)
        if not outputs_may_be_cut and any(number in held for number in self.trace.outputs):
            raise Refused

    def _cut(self, number: int, cut: Cut) -> Sharded:
        value = self.trace.values[number]
        layout = Layout(tuple(value.shape), cut.dim % value.dim(), cut.parts)
        return sharded(value, layout, self._probe, owner="parameter")  # type: ignore[arg-type]

    def _step(self, call: Call, held: dict[int, Sharded]) -> None:
        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return held.get(leaf.number, self.trace.values[leaf.number])
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf

        before = set(self._group.cuts)
        try:
            result = call.func(*tree_map(fill, call.args), **tree_map(fill, call.kwargs))
        except (Refused, WantsParts, WantsCut):
            raise
        except Exception as problem:
            # The rule cannot run on shapes only: the results are unknown, so nothing is sharded.
            raise Refused from problem
        for number in set(self._group.cuts) - before:
            held[number] = self._cut(number, self._group.cuts[number])
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for number, leaf in zip(call.outputs, leaves, strict=False):
            if isinstance(leaf, Sharded):
                held[number] = leaf
            else:
                held.pop(number, None)
                self._after.add(number)

    def on_cut(self, plain: Tensor, layout: Layout) -> None:
        """Handle a plain operand beside a sharded one: shard a parameter too, or the layer that returned it."""
        number = self._numbers.get(id(plain))
        if number is None or number in self._group.cuts:
            return
        if number in self._parameters:
            self._group.cuts[number] = Cut(layout.dim, layout.parts)
            return
        if number in self._after:
            raise Refused
        if number in self._views:
            root, turned = self._views[number]
            raise WantsCut({root: Cut(1 - layout.dim if turned else layout.dim)})
        wanted = self._producers(number)
        if wanted:
            raise WantsCut(wanted)

    def _producers(self, number: int) -> dict[int, Cut]:
        """The weights of the layers that a value comes from, nearest first, as they must be cut for it to be cut.

        Raises:
            Refused: a layer from before the group's first one, or one that cannot be cut.
        """
        found: dict[int, Cut] = {}
        waiting, seen = [number], set()
        while waiting:
            at = waiting.pop()
            place = self._makers.get(at)
            if at in seen or place is None:
                continue
            seen.add(at)
            call = self.trace.calls[place]
            weight = written_dim(call, self.trace, self._views)
            if weight is not None:
                if place < self._group.first or weight[0] in self._group.cuts:
                    raise Refused
                found[weight[0]] = Cut(weight[1])
                continue
            waiting.extend(each for each in call.inputs if each not in self._views)
        return found


_TURNING = frozenset({"t", "get:T", "get:mT", "transpose", "swapaxes"})
_VIEWING = frozenset({"chunk", "split", "unbind", "__getitem__", "to", "float", "bfloat16", "half", "contiguous"})


def views_of_parameters(trace: Trace, parameters: Iterable[int]) -> dict[int, tuple[int, bool]]:
    """Parameters and their pieces, by number: the parameter, and whether its two dims are turned around."""
    found = {number: (number, False) for number in parameters}
    for call in trace.calls:
        name, inputs = operation(call.func), call.inputs
        if len(inputs) != 1 or inputs[0] not in found or not (name in _TURNING or name in _VIEWING):
            continue
        root, turned = found[inputs[0]]
        for number in call.outputs:
            if trace.values[number].dim() == trace.values[root].dim():
                found.setdefault(number, (root, turned ^ (name in _TURNING)))
    return found


def written_dim(call: Call, trace: Trace, views: Mapping[int, tuple[int, bool]]) -> tuple[int, int] | None:
    """Return the parameter of a layer (a matrix product), and its dim that the result has."""
    name, inputs = operation(call.func), call.inputs
    weights = [number for number in inputs if number in views and trace.values[number].dim() == 2]
    if not weights:
        return None
    if name == "linear":
        weight, dim = weights[0], 0
    elif name in {"addmm", "matmul", "mm", "__matmul__"} and weights[-1] == inputs[-1]:
        weight, dim = weights[-1], 1
    else:
        return None
    root, turned = views[weight]
    return root, 1 - dim if turned else dim
