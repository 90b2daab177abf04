"""Computes a recorded loss on one micro-batch at a time.

A :class:`Program` lists the tensors of the recording that are split along with the batch; :mod:`.compiling` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain_megatron.pipeline.batches import Rows
from drivetrain_megatron.pipeline.deferred import Node
from drivetrain_megatron.pipeline.reductions import Reduction, in_part, reduction_of
from drivetrain_megatron.pipeline.values import leaves, rebuilt

WHOLE, SCALED = 0, 1


class Along(NamedTuple):
    """A tensor of a recording that is cut with the rows.

    Args:
        dim: in which it has them.
        spread: they come round again and again in that dim, as the samples do in a flattened ``[time, batch]``.
    """

    dim: int
    spread: bool = False

    def part(self, tensor: Tensor, rows: Rows, index: int) -> Tensor:
        """One micro-batch's part."""
        if self.spread:
            return rows.spread_part(tensor, index, self.dim)
        return rows.part(tensor, index, tensor.shape[self.dim] // rows.size, self.dim)


Way = int | Along
Choice = tuple[Way, ...]
"""Choice for each leaf of a call's arguments: kept, split along the rows, or a number that scales with them."""


@dataclass(frozen=True)
class LossFunction:
    """A loss that the script gave as a function, which is called with outputs that have values.

    Args:
        function: ``function(output, batch)``.
    """

    function: Callable[[Any, Any], Tensor]

    def __call__(self, output: Any, batch: Any) -> Tensor:
        """The loss of a batch, or of a part of it."""
        return self.function(output, batch)


@dataclass(frozen=True)
class Program:
    """Program that computes a recording on a micro-batch.

    Args:
        choices: for each node, in order, what becomes of its arguments.
        frontier: positions of the nodes whose value over the batch is the mean over the micro-batches; what comes after
            them does not depend on the rows any more.
        kind: of a :class:`LossFunction`: ``"mean"`` or ``"sum"`` over samples.
    """

    choices: tuple[Choice, ...]
    frontier: tuple[int, ...]
    kind: str = ""


def ordered(targets: Sequence[Node]) -> list[Node]:
    """Every unknown node that these need, inputs first."""
    found: dict[int, Node] = {}
    for node in targets:
        _add(node, found)
    return list(found.values())


def _add(node: Node, found: dict[int, Node]) -> None:
    if node.value is None and id(node) not in found:
        for one in node.inputs():
            _add(one, found)
        found[id(node)] = node


def key(nodes: Sequence[Node], rows: Rows) -> tuple[Any, ...]:
    """Recordings of one key are computed by one program."""
    places = {id(node): place for place, node in enumerate(nodes)}

    def told(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return ("node", places[id(leaf)])
        if isinstance(leaf, Tensor):
            return (tuple(leaf.shape), leaf.dtype)
        return leaf if isinstance(leaf, int | float | str | bool | None) else str(leaf)

    return (
        rows.bounds,
        tuple(
            (node.place, _identity(node.func), tuple(map(told, leaves((node.args, node.kwargs)))), tuple(node.kwargs))
            for node in nodes
        ),
    )


def _identity(func: Any) -> Any:
    """A function that is written inside of a loop is another object each time, and the same code."""
    if not isinstance(func, LossFunction):
        return func
    return getattr(func.function, "__code__", func.function)


def arguments(node: Node, choice: Choice, rows: Rows, index: int, results: Mapping[int, Any]) -> Any:
    """A node's arguments on one micro-batch."""
    found = leaves((node.args, node.kwargs))
    parts: list[Any] = []
    for leaf, way in zip(found, choice, strict=True):
        if isinstance(leaf, Node):
            parts.append(results[id(leaf)])
        elif isinstance(way, Along):
            parts.append(way.part(leaf, rows, index))
        elif way == SCALED:
            parts.append(leaf // rows.size * rows.count(index))
        else:
            parts.append(leaf)
    return rebuilt((node.args, node.kwargs), parts)


def run(program: Program, nodes: Sequence[Node], rows: Rows, index: int, outputs: Mapping[int, Any]) -> dict[int, Any]:
    """The value of each node on one micro-batch, by identity; of reductions so that their mean is the batch's.

    Args:
        program: for this recording.
        nodes: the recording.
        rows: how the batch is cut.
        index: which micro-batch.
        outputs: the model's outputs on it, by leaf.
    """
    results: dict[int, Any] = {}
    for node, choice in zip(nodes, program.choices, strict=True):
        if node.func is None:
            results[id(node)] = outputs[node.place]
            continue
        args, kwargs = arguments(node, choice, rows, index, results)
        with torch.set_grad_enabled(node.grad), autocast_of(node):
            results[id(node)] = _apply(node, args, kwargs, len(rows))
            if isinstance(node.func, LossFunction) and len(rows) > 1:
                weight = 1.0 if program.kind == "sum" else rows.count(index) / rows.size
                results[id(node)] = results[id(node)] * (len(rows) * weight)
    return results


def _apply(node: Node, args: Any, kwargs: Any, parts: int) -> Any:
    assert node.func is not None
    here = reduction_of(node.func, args, kwargs) if parts > 1 else None
    if here is None:
        return node.func(*args, **kwargs)
    return in_part(node.func, args, kwargs, here, _whole(node), parts)


def _whole(node: Node) -> Reduction:
    """Return the reduction of a node on the full batch."""
    found = [leaf.absent if isinstance(leaf, Node) else leaf for leaf in leaves((node.args, node.kwargs))]
    args, kwargs = rebuilt((node.args, node.kwargs), found)
    whole = reduction_of(node.func, args, kwargs)
    assert whole is not None, "a reduction on a part and not on the whole"
    return whole


def autocast_of(node: Node) -> Any:
    """Return the autocast context in which a node was recorded."""
    device = next((leaf.device.type for leaf in leaves(node.absent) if isinstance(leaf, Tensor)), "cpu")
    return torch.autocast(device, node.autocast, enabled=node.autocast is not None)
