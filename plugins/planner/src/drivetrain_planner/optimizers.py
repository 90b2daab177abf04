"""Counts what an optimizer holds and needs, by stepping it on small parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.api import UsageError
from drivetrain_planner.estimates import OptimizerCosts
from drivetrain_planner.tracing import Census
from drivetrain_sharding import ELEMENTWISE

_ROWS, _COLUMNS = 512, 256
"""Shape of the parameters that are stepped: large beside step counts and other scalars."""


def optimizer_costs(name: str, arguments: dict[str, Any] | None = None, device_type: str = "cpu") -> OptimizerCosts:
    """Step an optimizer of ``torch.optim`` on one to three parameters and count.

    Args:
        name: of its class, in any case.
        arguments: of its constructor, beside the parameters; some give it more state (``momentum``, ``amsgrad``).
        device_type: of the run; on an accelerator torch updates all parameters at once unless ``foreach`` says no.

    Raises:
        UsageError: no such optimizer, or it does not take these arguments.
    """
    classes = {
        each.lower(): kind
        for each, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    kind = classes.get(name.lower())
    if kind is None:
        known = ", ".join(sorted(one.__name__ for one in classes.values()))
        raise UsageError(f"torch.optim has no optimizer {name!r}", cure=f"Name one of: {known}.")
    given = {"lr": 1e-3, **(arguments or {})}
    if device_type != "cpu" and not given.get("fused"):
        given.setdefault("foreach", True)
    try:
        counts = [_count(kind, given, parameters) for parameters in (1, 2, 3)]
    except (RuntimeError, TypeError, ValueError) as problem:
        if isinstance(problem, UsageError):
            raise
        what = f"{kind.__name__} cannot be stepped with {given}: {(str(problem).splitlines() or [''])[0]}"
        raise UsageError(what, cure="Give its arguments as --optimizer_args '{lr: 0.1, momentum: 0.9}'.") from problem
    shaped, other, of_one = counts[0]
    of_two, of_three = counts[1][2], counts[2][2]
    size = _ROWS * _COLUMNS * 4
    # What grows with a third parameter of one size is for all; a second adds its own beside what the first leaves.
    each = max(of_three - of_two, 0)
    return OptimizerCosts(
        name=kind.__name__,
        per_element=shaped / size,
        per_parameter=other,
        step_current=max(of_one - each, 0) / size,
        step_previous=max(of_two - of_one - each, 0) / size,
        step_all=each / size,
        moved=_moved(kind, given) / size,
        elementwise=kind in ELEMENTWISE,
    )


def _count(kind: type[Optimizer], arguments: dict[str, Any], parameters: int) -> tuple[int, int, int]:
    """Bytes of state of a parameter's shape, other bytes of state, bytes that the second step needs for a moment."""
    optimizer, made = _stepped(kind, arguments, parameters)
    shaped = other = 0
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    for value in states:
        size = value.numel() * value.element_size()
        if value.shape == made[0].shape:
            shaped += size
        elif value.numel() == 1:
            other += size
        else:
            raise UsageError(
                f"{kind.__name__} keeps state of shape {tuple(value.shape)} for a parameter of {tuple(made[0].shape)}, "
                "which the planner does not count",
                cure="Plan with an optimizer whose state has the shape of its parameter, or is a number.",
            )
    with Census() as census:
        for tensor in (*made, *(each.grad for each in made if each.grad is not None), *states):
            census.ignore(tensor)
        optimizer.step()
        census.record("end")
    return shaped // parameters, other // parameters, census.events[-1].most


def _stepped(kind: type[Optimizer], arguments: dict[str, Any], parameters: int) -> tuple[Any, list[nn.Parameter]]:
    """Return an optimizer after its first step, which makes its state, and its parameters."""
    made = [nn.Parameter(torch.ones(_ROWS, _COLUMNS)) for _ in range(parameters)]
    optimizer: Any = kind(made, **arguments)
    for each in made:
        each.grad = torch.ones_like(each)
    optimizer.step()
    return optimizer, made


def _moved(kind: type[Optimizer], arguments: dict[str, Any]) -> int:
    """Return the bytes that a step on one parameter reads and writes."""
    optimizer, _ = _stepped(kind, arguments, 1)
    with _Moves() as moves:
        optimizer.step()
    return int(moves.bytes)


class _Moves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that kernels read and write: of their arguments, of those they write to, and of new results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema  # noqa: SLF001 (which arguments an operator writes to)
        if all(each.alias_info is None or each.alias_info.is_write for each in schema.returns):
            written = [
                (kwargs or {}).get(argument.name, args[place] if place < len(args) else None)
                for place, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            fresh = result if all(each.alias_info is None for each in schema.returns) else None
            touched = tree_leaves((args, kwargs, written, fresh))
            self.bytes += sum(one.numel() * one.element_size() for one in touched if isinstance(one, Tensor))
        return result
