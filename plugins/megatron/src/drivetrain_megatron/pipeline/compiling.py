"""Derives how a recorded loss is computed on one micro-batch at a time, and whether that is possible.

Which tensors of the recording are cut along with the batch, and which numbers stand for its size, is found by running
the recording without values on the shapes of a micro-batch. Then a trial on a few rows of random outputs, once per
recording, checks that values and gradients of the parts add up to the full batch's; a loss that mixes samples fails.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.api import UnsupportedError
from drivetrain_megatron.module_state import quiet_fake_tensors
from drivetrain_megatron.pipeline.batches import Rows
from drivetrain_megatron.pipeline.deferred import BY_MASK, TRAIN_STEP, Node, apply
from drivetrain_megatron.pipeline.replay import (
    SCALED,
    WHOLE,
    Along,
    Choice,
    LossFunction,
    Program,
    Way,
    arguments,
    autocast_of,
    run,
)
from drivetrain_megatron.pipeline.skeleton import NO_VALUE
from drivetrain_megatron.pipeline.values import leaves, rebuilt

_MOST_TRIALS = 64
"""Ways of cutting that are tried; a recording with more tensors that could be cut or not is refused."""

_MOST_ELEMENTS = 2**22
"""Elements of the outputs that a trial of all rows computes with; larger outputs are tried on three rows only."""

_DRAWS_OF_REDUCTIONS = 16

_CANNOT = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""Exceptions of torch for shapes that do not fit; its functions for fake tensors assert."""


_PICKED = "it takes some of the samples, by their places"


class WholeBatchError(UnsupportedError):
    """A loss that cannot be computed on one micro-batch at a time.

    Cause: it uses samples together, as pairs, contrasts, elements of a mask or a clamp of the mean.

    Cure: keep the batch in one piece with ``megatron.num_micro_batches: 1``, or write the loss as the message says.
    """


def compiled(nodes: Sequence[Node], rows: Rows, part_outputs: Mapping[int, Tensor]) -> Program:
    """Find out how to compute a recording in parts.

    Args:
        nodes: inputs first; the last one is a number, a loss or what else the script made of the output.
        rows: how the batch is cut.
        part_outputs: the model's outputs for the first micro-batch, without values, by leaf.

    Raises:
        WholeBatchError: it cannot be computed in parts.
        UnsupportedError: it is not a number.
    """
    if len(rows) == 1:
        return uncut(nodes)
    options, absent = _options(nodes, rows, part_outputs)
    varying = {id(node) for node, part in zip(nodes, absent, strict=True) if _varies(node.absent, part)}
    if id(nodes[-1]) in varying:
        raise UnsupportedError("a value for each sample is not a loss", cure="Reduce it: .mean() or .sum().")
    frontier = tuple(
        place
        for place, node in enumerate(nodes)
        if id(node) not in varying
        and (node.func is None or any(id(one) in varying for one in node.inputs()))
        and isinstance(node.absent, Tensor)
    )
    problem = "it was not tried"
    kinds = ("mean", "sum") if any(isinstance(node.func, LossFunction) for node in nodes) else ("",)
    for choices, kind in itertools.islice(itertools.product(itertools.product(*options), kinds), _MOST_TRIALS):
        program = Program(choices, frontier, kind)
        problem = wrong(program, nodes, rows, part_outputs)
        if not problem and nodes[-1].trains and _bends(program, nodes, varying):
            problem = "its gradient depends on a mean or sum over the whole batch, which is not linear in it"
        if not problem:
            return program
    raise WholeBatchError(
        f"this loss on the output of a pipelined model cannot be computed on one micro-batch at a time: {problem}",
        cure="Write megatron.num_micro_batches: 1, which keeps the batch in one piece, where a loss uses samples "
        f"together, as pairs or contrasts. {BY_MASK if _indexes(nodes) else TRAIN_STEP}",
    )


def _indexes(nodes: Sequence[Node]) -> bool:
    """Whether a recording takes elements at given places, as an index by a mask does."""
    found = (leaf for node in nodes if node.func is Tensor.__getitem__ for leaf in leaves(node.args[1]))
    return any(isinstance(one, Tensor) for one in found)


def uncut(nodes: Sequence[Node]) -> Program:
    """Program for a batch that is not split: values need no scaling."""
    numbers = tuple(
        place for place, node in enumerate(nodes) if isinstance(node.absent, Tensor) and not node.absent.dim()
    )
    return Program(tuple((WHOLE,) * len(leaves((node.args, node.kwargs))) for node in nodes), numbers)


def _options(
    nodes: Sequence[Node], rows: Rows, part_outputs: Mapping[int, Tensor]
) -> tuple[list[list[Choice]], list[Any]]:
    """Possible choices for each node's arguments, likeliest first, and results on the shapes of a micro-batch."""
    options: list[list[Choice]] = []
    results: dict[int, Any] = {}
    for node in nodes:
        found = leaves((node.args, node.kwargs))
        if node.func is None:
            options.append([()])
            results[id(node)] = part_outputs[node.place]
            continue
        if isinstance(node.func, LossFunction):
            # It may look at values, so it cannot be tried without.
            options.append([tuple(_ways(leaf, rows)[0] for leaf in found)])
            results[id(node)] = node.absent
            continue
        able: list[tuple[Choice, Any]] = []
        for choice in itertools.islice(itertools.product(*(_ways(leaf, rows) for leaf in found)), _MOST_TRIALS):
            part = arguments(node, choice, rows, 0, results)
            try:
                with warnings.catch_warnings(), quiet_fake_tensors():
                    # Torch warns of sizes that it makes fit by broadcasting, where a loss was meant to have equal ones.
                    warnings.simplefilter("error")
                    result = node.func(*part[0], **part[1])
            except (*_CANNOT, *NO_VALUE, Warning):
                continue
            if _scales(node.absent, result, rows):
                able.append((choice, result))
        if not able:
            raise WholeBatchError(
                f"{getattr(node.func, '__name__', node.func)} on the output of a pipelined model cannot be computed on "
                "one micro-batch at a time",
                cure=f"Write megatron.num_micro_batches: 1, which keeps the batch in one piece. "
                f"{BY_MASK if _indexes(nodes) else TRAIN_STEP}",
            )
        options.append([choice for choice, _ in able])
        results[id(node)] = able[0][1]
    return options, [results[id(node)] for node in nodes]


def _ways(leaf: Any, rows: Rows) -> tuple[Way, ...]:
    if isinstance(leaf, Tensor) and rows.size > 1:
        found: list[Way] = []
        for dim, size in enumerate(leaf.shape):
            if size and size % rows.size == 0:
                found += [Along(dim)] if size == rows.size else [Along(dim), Along(dim, spread=True)]
        return (*found, WHOLE)
    if type(leaf) is int and leaf >= rows.size > 1 and leaf % rows.size == 0:
        return (WHOLE, SCALED)
    return (WHOLE,)


def _scales(whole: Any, part: Any, rows: Rows) -> bool:
    """Whether each dim is as it was or has shrunk as the batch has."""
    before, after = leaves(whole), leaves(part)
    if len(before) != len(after):  # One for each sample, as unbind gives them.
        return False
    for one, other in zip(before, after, strict=True):
        if isinstance(one, Tensor) != isinstance(other, Tensor):
            return False
        if not isinstance(one, Tensor):
            continue
        if one.dim() != other.dim():
            return False
        for size, smaller in zip(one.shape, other.shape, strict=True):
            if size != smaller and size * rows.count(0) != smaller * rows.size:
                return False
    return True


def _varies(whole: Any, part: Any) -> bool:
    return any(
        isinstance(one, Tensor) and one.shape != other.shape
        for one, other in zip(leaves(whole), leaves(part), strict=True)
    )


def _bends(program: Program, nodes: Sequence[Node], varying: Container[int]) -> bool:
    """Whether what follows the reductions over the batch is not linear in them, as a clamp of the mean loss.

    A part of the batch would go through another piece of such a function than the whole, if not in a trial then later
    in the training. So it is computed between random values of both signs and many sizes.
    """
    places = set(program.frontier)
    after: list[Node] = []
    known = {id(node) for place, node in enumerate(nodes) if place in places}
    for place, node in enumerate(nodes):
        if place not in places and id(node) not in varying and any(id(one) in known for one in node.inputs()):
            after.append(node)
            known.add(id(node))
    if not after or id(nodes[-1]) not in known or any(id(one) not in known for node in after for one in node.inputs()):
        return False
    generator = torch.Generator().manual_seed(0)
    frontier = [nodes[place] for place in program.frontier]
    tolerance = max(1e-4, 8 * torch.finfo(nodes[-1].absent.dtype).eps)
    with torch.no_grad():
        for _ in range(_DRAWS_OF_REDUCTIONS):
            ends = [[_of_any_size(node.absent, generator) for node in frontier] for _ in range(2)]
            middle = [(one + other) / 2 if one.is_floating_point() else one for one, other in zip(*ends, strict=True)]
            ends[1] = [two if two.is_floating_point() else one for one, two in zip(*ends, strict=True)]
            values = [
                _after(after, {id(node): value for node, value in zip(frontier, point, strict=True)})
                for point in (*ends, middle)
            ]
            first, second, between = (float(value) for value in values)
            close = tolerance * max(abs(first), abs(second), 1.0)
            if math.isfinite(first + second) and not abs((first + second) / 2 - between) <= close:
                return True
    return False


def _of_any_size(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random values of both signs, from a thousandth to a thousand; counts from 1 to 9."""
    if not like.is_floating_point():
        return torch.randint(1, 10, like.shape, generator=generator).to(like.device, like.dtype)
    sizes = 10 ** (6 * torch.rand(like.shape, generator=generator, dtype=torch.float64) - 3)
    signs = torch.randint(0, 2, like.shape, generator=generator) * 2 - 1
    return (sizes * signs).to(like.device, like.dtype)


def _after(nodes: Sequence[Node], results: dict[int, Any]) -> Tensor:
    """The last of some nodes, from the values of the first."""
    for node in nodes:
        with autocast_of(node):
            results[id(node)] = apply(node, lambda one: results[id(one)])
    value: Tensor = results[id(nodes[-1])]
    return value


def wrong(program: Program, nodes: Sequence[Node], rows: Rows, part_outputs: Mapping[int, Tensor]) -> str:
    """Whether the parts do not add up, on random outputs; the reason, or nothing.

    Args:
        program: what is tried.
        nodes: the recording.
        rows: how the batch is cut.
        part_outputs: as for :func:`compiled`.
    """
    few = Rows((0, 1, min(3, rows.size)))
    problem = _wrong_on(few, 0, program, nodes, rows, part_outputs)
    if not problem and sum(node.absent.numel() for node in nodes if node.func is None) <= _MOST_ELEMENTS:
        # Constants, as in losses[:4], may concern more rows than the few.
        problem = _wrong_on(rows, 1, program, nodes, rows, part_outputs)
    return problem


def _wrong_on(
    few: Rows, seed: int, program: Program, nodes: Sequence[Node], rows: Rows, part_outputs: Mapping[int, Tensor]
) -> str:
    small = _shrunk(nodes, program, rows, few.size)
    generator = torch.Generator().manual_seed(seed)
    outputs = {
        node.place: _Output(node.absent, part_outputs[node.place], rows, few, generator)
        for node in nodes
        if node.func is None
    }
    one = Rows((0, few.size))
    try:
        wholes = {place: output.computed(output.whole) for place, output in outputs.items()}
        results = run(_as_one(program), small, one, 0, wholes)
        if _varied(program, nodes, small, results):
            return _PICKED
        for node in small:
            node.absent = results[id(node)]
        whole = results[id(small[-1])]
        _backward(whole)
        total = torch.zeros(())
        for index in range(len(few)):
            parts = {place: output.computed(output.parts[index]) for place, output in outputs.items()}
            results = run(program, small, few, index, parts)
            if _varied(program, nodes, small, results):
                return _PICKED
            part = results[id(small[-1])] / len(few)
            _backward(part)
            total = total + part.detach()
    except _CANNOT as problem:
        return f"on parts of the batch it raises {type(problem).__name__} ({str(problem).splitlines()[0]})"
    if not _close(whole.detach(), total):
        return "its value is not the sum or mean of its values on parts of the batch"
    if not all(_close(first, second) for output in outputs.values() for first, second in output.gradients()):
        return "its gradient is not the sum or mean of its gradients on parts of the batch"
    return ""


def _varied(program: Program, nodes: Sequence[Node], small: Sequence[Node], results: Mapping[int, Any]) -> bool:
    """Whether what is computed of all rows has another shape for fewer, as the first four of three rows have."""
    return any(results[id(small[place])].shape != nodes[place].absent.shape for place in program.frontier)


def example(
    program: Program, nodes: Sequence[Node], rows: Rows, part_outputs: Mapping[int, Tensor]
) -> tuple[Tensor, int]:
    """The number on a few rows of random outputs, with its graph, and how many rows these are; 1 where none is cut.

    Numbers of the recording that are multiples of the batch's rows, or their reciprocals, are those of the few.

    Args:
        program: that was found for the recording.
        nodes: the recording.
        rows: how the batch is cut.
        part_outputs: as for :func:`compiled`.
    """
    few = Rows((0, _telling(nodes, rows.size)))
    generator = torch.Generator().manual_seed(0)
    outputs: dict[int, Tensor] = {}
    for node in nodes:
        if node.func is None:
            output = _Output(node.absent, part_outputs[node.place], rows, few, generator)
            outputs[node.place] = _computed(output.whole)
    small = _shrunk(nodes, program, rows, few.size)
    for node in small:
        node.args, node.kwargs = rebuilt(
            (node.args, node.kwargs), [_of_few(leaf, rows.size, few.size) for leaf in leaves((node.args, node.kwargs))]
        )
    results = run(_as_one(program), small, few, 0, outputs)
    return results[id(small[-1])], few.size


def _telling(nodes: Sequence[Node], size: int) -> int:
    """Return a small number of rows that divides no constant of the recording that is unrelated to the rows.

    Else such a number might be that of the few rows, or of their elements, by chance: 12 of three rows of 4 classes.
    """
    if size <= 3:
        return size
    constants = {
        abs(round(1 / leaf)) if isinstance(leaf, float) and 0 < abs(leaf) < 1 else abs(round(leaf))
        for node in nodes
        for leaf in leaves((node.args, node.kwargs))
        if type(leaf) in (int, float) and leaf == _of_few(leaf, size, 1) and math.isfinite(leaf)
    }
    # None is a multiple of all rows, or it would be related to them.
    able = (
        few for few in (3, 2, *range(4, size)) if few < size and not any(each and each % few == 0 for each in constants)
    )
    return next(able, size)


def _computed(random: Tensor) -> Tensor:
    """The same numbers, as a result: a loss's graph then shows an output, where a leaf would be a parameter."""
    return random.roll(0) if random.requires_grad else random


def _of_few(leaf: Any, size: int, few: int) -> Any:
    if type(leaf) is int and leaf >= size and leaf % size == 0:
        return leaf // size * few
    if type(leaf) is float and 0 < leaf < 1:
        number = round(1 / leaf)
        if number % size == 0 and math.isclose(number * leaf, 1.0, rel_tol=1e-6):
            return leaf * size / few
    return leaf


class _Output:
    """Random numbers in place of one of the model's outputs, for the full batch and in parts."""

    def __init__(self, absent: Tensor, part: Tensor, rows: Rows, few: Rows, generator: torch.Generator) -> None:
        varying = [dim for dim, (size, less) in enumerate(zip(absent.shape, part.shape, strict=True)) if size != less]
        self._dim = varying[0] if varying else None
        shape = list(absent.shape)
        if self._dim is not None:
            shape[self._dim] = shape[self._dim] // rows.size * few.size
            self.whole = _random(shape, absent, generator)
            bounds = [bound * shape[self._dim] // few.size for bound in few.bounds]
            self.parts = [
                self.whole.detach().narrow(self._dim, start, stop - start).clone().requires_grad_(self._trained)
                for start, stop in itertools.pairwise(bounds)
            ]
        else:
            # A value that is the mean of its values on the parts, which differ.
            self.parts = [_random(shape, absent, generator) for _ in range(len(few))]
            self.whole = torch.stack([one.detach().float() for one in self.parts]).mean(0).to(absent.dtype)
            self.whole.requires_grad_(self._trained)

    def computed(self, random: Tensor) -> Tensor:
        """These numbers as :func:`_computed`; as they are where the model has reduced them: the whole is their mean."""
        return random if self._dim is None else _computed(random)

    @property
    def _trained(self) -> bool:
        value = self.parts[0] if self._dim is None else self.whole
        return value.is_floating_point()

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs that must be the same: of the whole, and of the parts."""
        if not self._trained:
            return []
        ours = [torch.zeros_like(part) if part.grad is None else part.grad for part in self.parts]
        whole = torch.zeros_like(self.whole) if self.whole.grad is None else self.whole.grad
        if self._dim is None:
            return [(whole, one * len(self.parts)) for one in ours]
        return [(whole, torch.cat(ours, self._dim))]


def _random(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    if not like.dtype.is_floating_point:
        return torch.randint(0, 2, list(shape), generator=generator).to(like.device, like.dtype)
    return torch.rand(list(shape), generator=generator).to(like.device, like.dtype).requires_grad_()


def _shrunk(nodes: Sequence[Node], program: Program, rows: Rows, size: int) -> list[Node]:
    """The same recording of a batch of fewer rows."""
    made: dict[int, Node] = {}
    for node, choice in zip(nodes, program.choices, strict=True):
        found = leaves((node.args, node.kwargs))
        changed: list[Any] = []
        for leaf, way in zip(found, choice, strict=True):
            if isinstance(leaf, Node):
                changed.append(made[id(leaf)])
            elif isinstance(way, Along):
                changed.append(way.part(leaf, Rows((0, size, rows.size)), 0))
            elif way == SCALED:
                changed.append(leaf // rows.size * size)
            else:
                changed.append(leaf)
        args, kwargs = rebuilt((node.args, node.kwargs), changed) if node.func is not None else ((), {})
        made[id(node)] = Node(node.call, node.absent, node.func, args, kwargs, node.place, node.grad, node.autocast)
    return list(made.values())


def _as_one(program: Program) -> Program:
    """Program for a batch that is not split."""
    return Program(tuple((WHOLE,) * len(choice) for choice in program.choices), program.frontier, program.kind)


def _backward(value: Any) -> None:
    if value.requires_grad:
        value.backward()


def _close(one: Tensor, other: Tensor) -> bool:
    # Float32 sums in another order; a wrong factor is at least one part in a few.
    return torch.allclose(one.float(), other.to(one.device).float(), rtol=1e-3, atol=1e-5, equal_nan=True)
