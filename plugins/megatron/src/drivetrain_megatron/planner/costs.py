"""Costs of a pipeline's actions: seconds and bytes for each stage. Numbers in, numbers out; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from drivetrain.api import UsageError


@dataclass(frozen=True)
class Costs:
    """Time and memory of each stage for one micro-batch. Times share one unit, whichever it is; memory is in bytes.

    Args:
        forward: time of a forward, by stage.
        backward_input: time of the backward for the stage's input, by stage.
        backward_weight: time of the backward for its weights; a backward in one piece takes the sum of both.
        activations: bytes that a forward leaves in memory until its backward, by stage.
        resident: bytes that are there all the time (parameters, gradients, optimizer state), by stage.
        transfer: time between the end of a computation and the moment when another rank has its result.
        gap: least time between two actions of a rank, in which no rank computes: the schedule's own work.
        overhead: part of every forward's time, and of every backward's, that does not shrink with the micro-batch.
        kept_for_weights: share of a stage's activations that still waits for the weights after the backward for the
            input. 1 keeps everything, which is the most it can be.
        split: how many times as long the two parts of a backward take, run apart, as the backward in one piece.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    activations: tuple[float, ...]
    resident: tuple[float, ...]
    transfer: float = 0.0
    gap: float = 0.0
    overhead: float = 0.0
    kept_for_weights: float = 1.0
    split: float = 1.0

    def __post_init__(self) -> None:
        lengths = {len(value) for value in self._by_stage().values()}
        if len(lengths) != 1:
            raise UsageError(
                f"costs by stage have different lengths: { {name: len(v) for name, v in self._by_stage().items()} }",
                cure="Give one number for each stage, or a single one for all of them.",
            )
        for name, values in self._by_stage().items():
            if any(not 0 <= value < float("inf") for value in values):
                raise UsageError(
                    f"{name} of a stage is negative or not finite: {list(values)}",
                    cure="Give finite numbers from 0 on.",
                )
        if not 0 <= self.kept_for_weights <= 1:
            raise UsageError(f"{self.kept_for_weights} of the activations wait for the weights", cure="Use 0 to 1.")
        if not 0 < self.split < float("inf"):
            raise UsageError(
                f"the two parts of a backward take {self.split:g} times its time",
                cure="Use 1 or more: the parts' times over the whole backward's.",
            )
        if not self.work:
            raise UsageError("all stages together take no time", cure="Give forwards or backwards a duration.")

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @property
    def work(self) -> float:
        """Time that one micro-batch computes in all stages together, its backward in one piece."""
        return sum(self.forward) + sum(self.backward_input) + sum(self.backward_weight)

    def _by_stage(self) -> dict[str, tuple[float, ...]]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, tuple)}

    def repeated(self, num_stages: int) -> Costs:
        """Return the costs of a pipeline in which every stage costs what the only one of these does."""
        assert self.num_stages == 1, self.num_stages
        return self._scaled(1, 1, 1, [[0]] * num_stages)

    def for_stages(self, num_stages: int) -> Costs:
        """Return the costs of the same model in ``num_stages`` stages: each cut evenly, or neighbours joined.

        The overhead is each stage's own: it is not cut.

        Raises:
            UsageError: neither number is a multiple of the other.
        """
        mine = self.num_stages
        if num_stages % mine == 0:
            parts = num_stages // mine
            groups = [[stage] for stage in range(mine) for _ in range(parts)]
            return self._scaled(1 / parts, 1 / parts, 1 / parts, groups)
        if mine % num_stages == 0:
            size = mine // num_stages
            return self._scaled(1, 1, 1, [list(range(start, start + size)) for start in range(0, mine, size)])
        raise UsageError(
            f"costs of {mine} stages say nothing about {num_stages} stages",
            cure=f"Give {num_stages} numbers, or one for each rank.",
        )

    def resized(self, factor: float) -> Costs:
        """Return the costs of a micro-batch ``factor`` times as large: time and activations grow with it.

        The overhead stays. Exact for computation that is linear in the samples; small micro-batches on large devices
        are slower than that, which is what ``overhead`` stands for.
        """
        return self._scaled(factor, factor, 1, [[stage] for stage in range(self.num_stages)])

    def _scaled(self, time: float, activations: float, resident: float, groups: list[list[int]]) -> Costs:
        """Return costs by groups of stages, each group one new stage, with what grows multiplied by its factor."""

        def joined(values: list[tuple[float, float]]) -> float:
            """Return the sum of the parts that grow, and one overhead."""
            return sum(whole - fixed for whole, fixed in values) * time + max(fixed for _, fixed in values)

        def total(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
            return tuple(sum(values[stage] for stage in group) * factor for group in groups)

        forward = [(value, min(self.overhead, value)) for value in self.forward]
        halves = [self._backward_overheads(stage) for stage in range(self.num_stages)]
        inputs = [(value, fixed) for value, (fixed, _) in zip(self.backward_input, halves, strict=True)]
        weights = [(value, fixed) for value, (_, fixed) in zip(self.backward_weight, halves, strict=True)]
        return replace(
            self,
            forward=tuple(joined([forward[stage] for stage in group]) for group in groups),
            backward_input=tuple(joined([inputs[stage] for stage in group]) for group in groups),
            backward_weight=tuple(joined([weights[stage] for stage in group]) for group in groups),
            activations=total(self.activations, activations),
            resident=total(self.resident, resident),
        )

    def _backward_overheads(self, stage: int) -> tuple[float, float]:
        """Return the overheads of the two parts of a backward: one together, in proportion to their times."""
        both = self.backward_input[stage] + self.backward_weight[stage]
        fixed = min(self.overhead, both)
        share = self.backward_input[stage] / both if both else 0.0
        return fixed * share, fixed * (1 - share)


def costs(
    forward: Sequence[float],
    *,
    backward: Sequence[float] | None = None,
    weight_share: float | Sequence[float] = 0.5,
    activations: Sequence[float] = (0.0,),
    resident: Sequence[float] = (0.0,),
    transfer: float = 0.0,
    gap: float = 0.0,
    overhead: float = 0.0,
    kept_for_weights: float = 1.0,
    split: float = 1.0,
) -> Costs:
    """Return costs from what people know; a sequence of one number holds for every stage.

    Args:
        forward: time of a forward, by stage.
        backward: time of a full backward, by stage; twice the forward when it is not given, as two matrix products of
            the forward's size make up the backward of a linear layer.
        weight_share: part of a backward that is for the weights, one number or by stage.
        activations: see :class:`Costs`.
        resident: see :class:`Costs`.
        transfer: see :class:`Costs`.
        gap: see :class:`Costs`.
        overhead: see :class:`Costs`.
        kept_for_weights: see :class:`Costs`.
        split: see :class:`Costs`.
    """
    shares = [weight_share] if isinstance(weight_share, int | float) else weight_share
    if any(not 0 <= share <= 1 for share in shares):
        raise UsageError(f"{weight_share} of the backward for the weights", cure="Use a share from 0 to 1.")
    count = max(map(len, (forward, activations, resident, backward or (), shares)))

    def spread(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values) * count if len(values) == 1 else tuple(values)

    forwards = spread(forward)
    backwards = tuple(2 * value for value in forwards) if backward is None else spread(backward)
    weights = tuple(value * share for value, share in zip(backwards, spread(shares), strict=False))
    return Costs(
        forwards,
        tuple(whole - weight for whole, weight in zip(backwards, weights, strict=False)),
        weights,
        spread(activations),
        spread(resident),
        transfer=transfer,
        gap=gap,
        overhead=overhead,
        kept_for_weights=kept_for_weights,
        split=split,
    )
