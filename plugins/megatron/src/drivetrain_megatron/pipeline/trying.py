"""Infers the batch dims of a model's inputs by trial forwards on a few rows.

A batch may be cut where the model computes each sample for itself. Whether it does, and in which dim of which input
the samples lie, is not declared anywhere; so the model runs forward on three rows and on the same rows in two parts,
over all stages, without gradients. Outputs that differ mean that it mixes samples, or that the dim is another one.
Once for each form of inputs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.api import UnsupportedError
from drivetrain_megatron import agreement
from drivetrain_megatron.module_state import Change, ModuleState, Place, same_randomness, without_gradients
from drivetrain_megatron.pipeline import steady
from drivetrain_megatron.pipeline.batches import Dims, Rows, chosen, cut
from drivetrain_megatron.pipeline.passage import Passage
from drivetrain_megatron.pipeline.planning import Arguments, Planner
from drivetrain_megatron.pipeline.reductions import Adjusting
from drivetrain_megatron.pipeline.skeleton import is_absent
from drivetrain_megatron.pipeline.values import leaves
from drivetrain_megatron.tensor.sharded import full_tensor

logger = logging.getLogger(__name__)

_MOST_CANDIDATES = 32
"""Ways of cutting that are tried for inputs of one form."""

_MOST_BASES = 3
"""Inputs that are taken to have the batch's size."""


class Runner(Protocol):
    """Runs a batch forward over all stages."""

    def attempt(self, arguments: Arguments, way: Passage, adjusting: Adjusting | None) -> tuple[Any, str]:
        """The output on the rank of the last stage, and what went wrong on this rank. Collective."""


@final
class Trials:
    """Batch-dim inference for one model.

    Args:
        module: the user's module.
        planner: plans its forward.
        runner: runs it.
        whole: keywords whose tensors are never cut.
        groups: process groups of the trial: those of the pipeline and of the axis ``tp``.
        data_group: data-parallel ranks without which no forward runs.
        last: this rank has the last stage.
        device: of this rank.
        keeps_whole: is told why batches stay in one piece; ``None`` if that raises.
    """

    def __init__(
        self,
        module: nn.Module,
        planner: Planner,
        runner: Runner,
        whole: Collection[str],
        groups: Sequence[dist.ProcessGroup | None],
        data_group: dist.ProcessGroup | None,
        last: bool,
        device: torch.device,
        keeps_whole: Callable[[str], None] | None,
    ) -> None:
        self._keeps_whole = keeps_whole
        self._wrote = False
        """A trial has written to parameters, on any stage, which are not as they were."""
        self._module, self._planner, self._runner, self._whole = module, planner, runner, frozenset(whole)
        self._groups, self._data_group, self._last, self._device = groups, data_group, last, device
        self._known: dict[Any, Dims] = {}
        self.counted: set[Place] = set()
        """State that the forward of each part changes as the forward of the full batch does: it must change once."""

    def dims(self, arguments: Arguments) -> Dims:
        """Return the batch dim of each leaf of the arguments. Collective over the groups.

        Raises:
            UnsupportedError: the model cannot run on parts of this batch.
        """
        key = self._key(arguments)
        known = self._known.get(key)
        if not self._somebody(known is None):
            assert known is not None
            return known
        candidates = [known] if known is not None else list(_candidates(arguments, self._whole))
        if not candidates:
            self._known[key] = tuple(None for _ in leaves(arguments))
            return self._known[key]
        found: Dims | None = None
        problem, turn = "", 0
        while True:
            candidate = candidates[turn] if found is None else found
            wrong = self._wrong(arguments, candidate)
            problem = problem or wrong
            if found is None and not wrong:
                found = candidate
            elif found is None:
                turn += 1
            if not self._somebody(found is None and turn < len(candidates)):
                break
            turn = min(turn, len(candidates) - 1)
        if found is None:
            kind = type(self._module).__name__
            why = f"{kind} cannot run on one micro-batch at a time, as a pipeline does: {problem}"
            if self._keeps_whole is not None and not self._wrote:
                self._keeps_whole(why)
                self._known[key] = tuple(None for _ in leaves(arguments))
                return self._known[key]
            raise UnsupportedError(
                why,
                cure="Write megatron.num_micro_batches: 1, which keeps the batch in one piece; or compute what mixes "
                "samples in the loss, and use layers that do not (GroupNorm or LayerNorm for BatchNorm).",
            )
        if found != candidates[0]:
            logger.info("Batches of %s are cut along dims %s.", type(self._module).__name__, found)
        self._known[key] = found
        return found

    def would_try(self, arguments: Arguments) -> bool:
        """Whether inputs of this form are new. Not collective."""
        return self._key(arguments) not in self._known

    def _key(self, arguments: Arguments) -> Any:
        return _form(arguments), self._module.training, self._planner.version

    def _somebody(self, flag: bool) -> bool:
        """Whether a flag is set on any rank of the data-parallel group that takes part."""
        if self._data_group is None:
            return flag
        flags = torch.tensor([int(flag)], device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._data_group)
        return bool(flags.item())

    def _everybody(self, mine: Any) -> list[Any]:
        told = [mine]
        for group in self._groups:
            if group is not None and dist.get_world_size(group) > 1:
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, told, group=group)
                told = [one for part in parts for one in part]
        return told

    def _wrong(self, arguments: Arguments, dims: Dims) -> str:
        """Why a batch cannot be cut so; nothing when it can. Collective over the ranks that try."""
        size = _size(arguments, dims)
        which = _distinct(arguments, dims, size)
        few = Rows((0, 1, len(which)))
        whole = chosen(arguments, which, dims)
        parts = cut(whole, few, dims)
        try:
            with without_gradients():
                ways = [self._planner.passage(one) for one in (whole, *parts)]
        except Exception as problem:  # noqa: BLE001 (a user's forward raises anything; it is reported)
            wrong = _first_line(problem)
            # Each rank finds the same, since it knows the same shapes.
            return next((one for one, *_ in self._everybody((wrong,)) if one), "")
        before = self._written()
        wrong, changes, carries = self._compared(whole, parts, ways)
        counted, problem_here = self._states(changes)
        problem_here = problem_here or carries
        spanning = {str(place): one for place, one in changes[0].items() if self._spans(place) and not one.tensors}
        here = {name: one.value for name, one in spanning.items()}
        told = self._everybody((wrong, problem_here, here, before != self._written()))
        self._wrote = self._wrote or any(wrote for *_, wrote in told)
        for one, other, *_ in told:
            if one or other:
                return str(one or other)
        uneven = {name for _, _, mine, _ in told for name in mine if any(name not in one for _, _, one, _ in told)}
        if uneven:
            return f"its forward changes {', '.join(sorted(uneven))}, and only some of the stages would do so"
        self.counted |= counted
        return ""

    def _compared(
        self, whole: Arguments, parts: Sequence[Arguments], ways: Sequence[Passage]
    ) -> tuple[str, list[dict[Place, Change]], str]:
        """Return how outputs of parts differ, the state that each forward changed, and what it carries on.

        The forwards are those of the full batch, twice in a row, and of the parts, each from the state before. A last
        one starts from the tensors alone that a full batch has left in attributes: they may be a cache that nothing
        reads, as the last activation is, or what the next forward goes on with, as a recurrent state.
        """
        state = ModuleState(self._module)
        outputs: list[list[Any]] = []
        changes: list[dict[Place, Change]] = []
        problem = ""
        adjusting: list[Adjusting | None] = [None] * (len(parts) + 3)
        kept: Mapping[Place, Any] = {}
        carried: Mapping[Place, Any] = {}
        with same_randomness(self._device), without_gradients():
            if self._last:
                counts = self._planner.counts(whole, ways[0])
                adjusting[2:-1] = [Adjusting(counts, len(parts)) if counts else None for _ in parts]
            runs = [(whole, ways[0]), (whole, ways[0]), *zip(parts, ways[1:], strict=True), (whole, ways[0])]
            try:
                for number, ((given, way), adjusted) in enumerate(zip(runs, adjusting, strict=True)):
                    if number != 1:
                        state.restore()
                    if number == len(runs) - 1:
                        carried = {place: one for place, one in kept.items() if not _is_counted(place, changes)}
                        state.put(carried)
                    steady.start()
                    with steady.Steady():  # type: ignore[no-untyped-call]
                        output, here = self._runner.attempt(given, way, adjusted)
                    problem = problem or here
                    found = leaves(output)
                    outputs.append([full_tensor(one) if isinstance(one, Tensor) else one for one in found])
                    changes.append(state.changes())
                    if number == 0:
                        kept = state.tensors_kept()
            finally:
                state.restore()
        if problem or not self._last:
            return problem, changes, ""
        carries = ""
        if carried and _differ(outputs[0], [outputs[-1]], self._tolerance):
            carries = (
                f"its forward goes on from what the one before left in {', '.join(sorted(map(str, carried)))}, which "
                "depends on the batch"
            )
        return _differ(outputs[0], outputs[2:-1], self._tolerance), changes[:-1], carries

    def _states(self, changes: Sequence[dict[Place, Change]]) -> tuple[set[Place], str]:
        """Return places that must change once per step, and the problem with the others."""
        first, again, *_ = changes
        counted: set[Place] = set()
        for place, change in first.items():
            if _is_counted(place, changes):
                counted.add(place)
            elif place.buffer:
                return set(), (
                    f"its forward changes the buffer {place} by what is in the batch (running statistics, as those of "
                    "BatchNorm), and would see one micro-batch at a time"
                )
            elif not change.tensors and not change.same(again.get(place)):
                return set(), f"its forward adds to the attribute {place} by what is in the batch"
        return counted, ""

    def _written(self) -> int:
        """Return a number that changes with the values of this rank's parameters."""
        here = [one for one in self._module.parameters() if not is_absent(one)]
        return int(agreement.digest(here, self._device)) if self._keeps_whole is not None else 0

    def _spans(self, place: Place) -> bool:
        """Whether code of several stages is in this module's forward."""
        made = self._planner.cut
        inside = f"{place.path}." if place.path else ""
        return made is not None and any(point.startswith(inside) for point in made.points)

    @property
    def _tolerance(self) -> float:
        """Largest difference, of the largest value, that rounding makes; what mixes samples makes more."""
        compute = self._planner.compute_dtype
        if compute is not None and compute is not torch.float32:
            return 8 * torch.finfo(compute).eps
        # Devices choose other algorithms, of TF32 too, for other sizes.
        return 1e-4 if self._device.type == "cpu" else 5e-3


def _is_counted(place: Place, changes: Sequence[dict[Place, Change]]) -> bool:
    """Whether the forward of each part leaves in an attribute or buffer what that of the full batch does."""
    return place.owned and all(changes[0][place].same(part.get(place)) for part in changes[2:])


def _form(arguments: Arguments) -> tuple[Any, ...]:
    """Return the cache key of inputs: structure, constants, and which sizes are equal."""
    sizes: dict[int, int] = {}
    names = [type(arguments[1]), *arguments[1]]
    return (
        *names,
        *(
            (leaf.dtype, *(sizes.setdefault(size, len(sizes)) for size in leaf.shape))
            if isinstance(leaf, Tensor)
            else leaf
            if isinstance(leaf, int | float | str | bool | None)
            else type(leaf)
            for leaf in leaves(arguments)
        ),
    )


def _candidates(arguments: Arguments, whole: Collection[str]) -> Iterator[Dims]:
    """Ways of cutting, likeliest first; none where no tensor has two rows."""
    args, kwargs = arguments
    names = [None for _ in leaves(args)] + [name for name, value in kwargs.items() for _ in leaves(value)]
    found = leaves(arguments)
    able = [
        index
        for index, leaf in enumerate(found)
        if isinstance(leaf, Tensor) and leaf.dim() and names[index] not in whole
    ]
    seen: set[Dims] = set()
    each: list[Iterator[Dims]] = []
    for base in able[:_MOST_BASES]:
        for dim, size in enumerate(found[base].shape):
            if size > 1:
                options = [
                    [None] if index not in able else [dim] if index == base else [*_dims_of(leaf, size, dim), None]
                    for index, leaf in enumerate(found)
                ]
                each.append(iter(itertools.product(*options)))
    # The first of each, then the second of each.
    for turn in itertools.zip_longest(*(itertools.islice(one, _MOST_CANDIDATES) for one in each)):
        for dims in turn:
            if dims is not None and dims not in seen:
                seen.add(dims)
                yield dims
                if len(seen) == _MOST_CANDIDATES:
                    return


def _dims_of(tensor: Tensor, size: int, likeliest: int) -> list[int]:
    return sorted((dim for dim, one in enumerate(tensor.shape) if one == size), key=lambda dim: (dim != likeliest, dim))


def _size(arguments: Arguments, dims: Dims) -> int:
    return next(int(leaf.shape[dim]) for leaf, dim in zip(leaves(arguments), dims, strict=True) if dim is not None)


def size_along(arguments: Arguments, dims: Dims) -> int:
    """Rows of a batch; 1 where nothing is cut."""
    return 1 if all(dim is None for dim in dims) else _size(arguments, dims)


def _distinct(arguments: Arguments, dims: Dims, size: int) -> list[int]:
    """Up to three rows that differ from each other where any do: equal rows mix without a trace."""
    pairs = [(leaf, dim) for leaf, dim in zip(leaves(arguments), dims, strict=True) if dim is not None]

    def differ(one: int, other: int) -> bool:
        return any(not torch.equal(leaf.select(dim, one), leaf.select(dim, other)) for leaf, dim in pairs)

    taken = [0]
    for row in range(1, min(size, 64)):
        if len(taken) < 3 and all(differ(row, other) for other in taken):
            taken.append(row)
    for row in range(1, size):
        if len(taken) < min(3, size) and row not in taken:
            taken.append(row)
    return sorted(taken)


def _differ(whole: Sequence[Any], parts: Sequence[Sequence[Any]], tolerance: float) -> str:
    """Return how the outputs of parts differ from those of the full batch; empty if they agree."""
    if any(len(part) != len(whole) for part in parts):
        return "its output has another structure on a part of the batch"
    for one, *others in zip(whole, *parts, strict=True):
        if not isinstance(one, Tensor):
            continue
        if not all(isinstance(other, Tensor) and other.dim() == one.dim() for other in others):
            return "its output has another structure on a part of the batch"
        varying = [d for d in range(one.dim()) if any(other.shape[d] != one.shape[d] for other in others)]
        if len(varying) > 1 or (varying and sum(other.shape[varying[0]] for other in others) != one.shape[varying[0]]):
            return f"its output of {list(one.shape)} is not made of those of the parts"
        if varying:
            joined = torch.cat(others, varying[0])
        elif one.is_floating_point():
            joined = torch.stack([other.float() for other in others]).mean(0)
        else:
            joined = others[0] if all(torch.equal(others[0], other) for other in others) else ~one
        if not _close(one, joined, tolerance):
            return "a sample's output depends on the other samples of the batch"
    return ""


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.double(), other.double()
    finite = one[one.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=tolerance * scale + 1e-12, equal_nan=True)


def _first_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"


def failed(problem: BaseException) -> str:
    """Describe the exception of a forward, for the other ranks."""
    return _first_line(problem)
