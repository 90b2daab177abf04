"""Checks by a trial whether an optimizer is element-wise or matrix-wise, as engines that shard parameters require.

An optimizer is element-wise when the update of each element of a parameter depends on that element and its own
gradients only (AdamW, SGD, Lion). Then shards of a parameter can be stepped separately, with the same result. It is
matrix-wise when it couples the elements of one parameter, but not two parameters (Muon, Adafactor, LAMB). Then full
parameters can be stepped separately. Prodigy, or one that normalises all gradients together, is neither.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import UnsupportedError
from drivetrain_sharding.local_steps import STEPPED_LOCALLY

ELEMENTWISE: frozenset[type[Optimizer]] = STEPPED_LOCALLY | {torch.optim.Rprop, torch.optim.Adagrad, torch.optim.ASGD}
"""Known without a trial. Exact classes: a subclass may do anything."""

MATRIXWISE: frozenset[type[Optimizer]] = frozenset({torch.optim.Muon, torch.optim.Adafactor})
"""Known without a trial, as above."""

_STEPS = 12
"""Optimizers that refresh a preconditioner do so every ten steps by default."""

_BLOCKWISE = 4096
"""Optimizers that quantise their states, in blocks of up to 256 elements, do so for parameters from here on."""

_LARGEST_DIM = 160
"""Largest dim of parameters with fewer elements; larger ones cost time."""

_SMALL_DIM = 12
"""Tried first, in shapes that the parameters have themselves, or nearly: some optimizers factor small dims only, and
those that factor any take long with more."""

_LARGE_ROWS = ((), (128,), (32, 4), (8, 4, 4), (2, 4, 4, 4))
"""Shapes of a row by its number of dims, for parameters with more. 34 or 130 of them are whole blocks of 256 elements,
and their halves are not: one that quantises its states does so in other blocks there."""

_FACTORED = 128
"""Adafactor of several libraries factors dims from here on only."""

_FLAT_SHAPES = ((), (6144,), (96, 64), (48, 64, 2))
"""Shapes by number of dims. As many elements as block-wise optimizers need to use blocks, in halves of fewer: a flat
row of many parameters has them although none of the parameters does."""

_RATE = 0.1
"""Replaces a learning rate of 0, with which warm-up schedules begin: no parameter would change."""

_RELATIVE = 1e-5
"""Tolerance relative to the largest update. Equal arithmetic differs at most by the rounding of float32."""

_PER_RUN = frozenset({"state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})
"""Attributes that the copy for the trial gets anew. A scheduler or a compiler puts a ``step`` on the instance."""


def check_elementwise(
    optimizer: Optimizer, engine: str, *, flat: bool = False, instead: str = "distributed_type: ddp"
) -> None:
    """Refuse an optimizer that is not element-wise. Not collective.

    Args:
        optimizer: over the parameters that it will step.
        engine: what cuts parameters into parts, as users know it: ``"fsdp"``, ``"deepspeed stage 2"``.
        flat: a part is a range of the elements in a row, with one dim; else it has the dims of the whole.
        instead: the setting with which it may be used.

    Raises:
        UnsupportedError: with what was found and what to use instead.
    """
    why = why_not_elementwise(optimizer, flat=flat)
    if why is not None:
        instead = "distributed_type: ddp" if NEEDS_CLOSURE in why else instead
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not element-wise: {why}. {engine} steps parts of parameters, where it "
            "would be another optimizer",
            cure=f"Use an element-wise optimizer, such as torch.optim.AdamW, or {instead}.",
        )


def needs_owners(optimizer: Optimizer, engine: str, *, instead: str = "distributed_type: ddp") -> bool:
    """Whether an optimizer is matrix-wise rather than element-wise. Not collective.

    Args:
        optimizer: over the parameters that it will step.
        engine: what cuts parameters into parts, as users know it.
        instead: the setting with which it may be used if it is neither.

    Raises:
        UnsupportedError: it is neither; with what was found and what to use instead.
    """
    not_elementwise = why_not_elementwise(optimizer)
    if not_elementwise is None:
        return False
    why = why_not_matrixwise(optimizer)
    if why is not None:
        which = f"({not_elementwise}) nor matrix-wise ({why})"
        if why == not_elementwise:
            which = f"nor matrix-wise ({why})"
        raise UnsupportedError(
            f"{type(optimizer).__name__} is neither element-wise {which}. {engine} shares parameters out, and no rank "
            "could step any of them alone",
            cure="Use an optimizer that treats each parameter by itself, such as torch.optim.AdamW or "
            f"torch.optim.Muon, or {instead}.",
        )
    return True


def why_not_elementwise(optimizer: Optimizer, *, flat: bool = False) -> str | None:
    """Why an optimizer is not element-wise, as part of a sentence; ``None`` when it is. Not collective.

    Classes of torch are known. Any other is tried: a copy of it steps small parameters with the number of dims that
    its own have, once whole and once in two parts, each by a copy that sees nothing of the other. The optimizer itself,
    its parameters and the random state stay untouched. What an optimizer changes only after a dozen steps is not
    noticed, unless it keeps state for it from the beginning.
    """
    if type(optimizer) in ELEMENTWISE:
        return None
    small, large = (partial(_differs, optimizer, flat=flat, small=small) for small in (True, False))
    return _tried(optimizer, small) or _tried(optimizer, large)


def why_not_matrixwise(optimizer: Optimizer) -> str | None:
    """Why an optimizer is not matrix-wise, as part of a sentence; ``None`` when it is. Not collective.

    As :func:`why_not_elementwise`, but the copies step some of the small parameters each, whole, and one steps none.
    Groups may lose all of their parameters.
    """
    if type(optimizer) in ELEMENTWISE | MATRIXWISE:
        return None
    return _tried(optimizer, partial(_depends, optimizer))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step()`` of an optimizer fails without a closure, and calls one. Not collective."""
    called = False

    def closure() -> Tensor:
        nonlocal called
        called = True
        return torch.zeros(())

    with suppress(Exception):  # a trial has failed already, and this asks only why
        _Run(optimizer, torch.float32, _whole, small=True).step(0)
        return False
    with suppress(Exception):
        _Run(optimizer, torch.float32, _whole, small=True).step(0, closure)
        return called
    return False


NEEDS_CLOSURE = "its step() calls a closure, a forward and a backward between what it writes to parameters"
"""Part of a sentence, where :func:`needs_closure`."""


def _tried(optimizer: Optimizer, trial: Callable[[torch.dtype], str | None]) -> str | None:
    last: Exception | None = None
    # In float64 rounding hides no difference; kernels without float64 support are tried in the dtype in use.
    for dtype in (torch.float64, torch.float32):
        try:
            return trial(dtype)
        except Exception as problem:  # noqa: BLE001 (somebody else's step may raise anything; the error says what)
            last = problem
    if needs_closure(optimizer):
        return f"{NEEDS_CLOSURE}, which cannot be tried"
    return f"a trial of its step() fails with {type(last).__name__}: {str(last).strip().partition(chr(10))[0]}"


def _step_all(optimizer: Optimizer, runs: Sequence[_Run]) -> None:
    """A dozen steps of each copy."""
    devices = {one.device for group in optimizer.param_groups for one in group["params"]}
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    kind = accelerators[0].type if accelerators else "cpu"
    # To compile a step for small parameters takes longer than to run it.
    with torch.random.fork_rng(accelerators, device_type=kind), torch.compiler.set_stance("force_eager"):
        for step in range(_STEPS):
            for run in runs:
                # An optimizer that adds noise adds different noise in each part.
                torch.manual_seed(step)
                run.step(step)


def _depends(optimizer: Optimizer, dtype: torch.dtype) -> str | None:
    """Step copies of the optimizer on two small parameters of each shape, on one of them, and on none, and compare."""
    both, *runs, none = [_Run(optimizer, dtype, _whole, small=True, copies=2, only=only) for only in (None, 0, 1, -1)]
    _step_all(optimizer, (both, *runs))
    numbers = both.numbers(of_parameters=False)
    for run in runs:
        for place, other in run.stepped.items():
            one = both.stepped[place]
            tolerance = _RELATIVE * float((one.detach() - both.start[place]).abs().max())
            if not torch.allclose(one.detach(), other.detach(), rtol=1e-12, atol=tolerance, equal_nan=True):
                return "stepping several parameters together and each alone gives different results"
            for name, value in both.state(one).items():
                kept = run.state(other).get(name)
                if isinstance(value, Tensor) and value.is_floating_point():
                    least = _RELATIVE * float(value.abs().max()) if value.numel() else 0.0
                    if (
                        not isinstance(kept, Tensor)
                        or kept.shape != value.shape
                        or not torch.allclose(value, kept, rtol=0, atol=least, equal_nan=True)
                    ):
                        return f"its state {name!r} is different when other parameters are stepped beside"
                elif list(_numbers([value])) != list(_numbers([kept])):
                    return f"its state {name!r} is different when other parameters are stepped beside"
    _step_all(optimizer, (none,))
    if not all(_close_numbers(numbers, run.numbers(of_parameters=False)) for run in (*runs, none)):
        return "numbers that it keeps depend on which parameters it has"
    return None


def _differs(optimizer: Optimizer, dtype: torch.dtype, *, flat: bool, small: bool) -> str | None:
    """Step copies of the optimizer on small full parameters and on their halves, and compare."""
    parts: Sequence[Callable[[Tensor], Tensor]] = _FLAT_PARTS if flat else _PARTS
    whole, *runs = [_Run(optimizer, dtype, part, flat=flat, small=small) for part in (_whole, *parts)]
    _step_all(optimizer, (whole, *runs))
    numbers = whole.numbers()
    if not all(_close_numbers(numbers, run.numbers()) for run in runs):
        return "numbers that it keeps depend on whole parameters"
    for index, one in enumerate(whole.parameters):
        for name, value in whole.state(one).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != one.shape:
                return f"its state {name!r} has another shape than the parameter"
        tolerance = _RELATIVE * float((one.detach() - whole.start[index]).abs().max())
        for part, run in zip(parts, runs, strict=True):
            other = run.parameters[index]
            if not torch.allclose(part(one.detach()), other.detach(), rtol=1e-12, atol=tolerance, equal_nan=True):
                return "stepping a whole parameter and stepping it in two parts give different results"
            for name, value in whole.state(one).items():
                if isinstance(value, Tensor) and value.shape == one.shape and value.is_floating_point():
                    kept, least = run.state(other).get(name), _RELATIVE * float(value.abs().max())
                    if not isinstance(kept, Tensor) or not torch.allclose(part(value), kept, rtol=0, atol=least):
                        return f"its state {name!r} is different when a parameter is stepped in two parts"
    return None


class _Run:
    """A copy of an optimizer over small parameters.

    Args:
        optimizer: the original; never changed.
        dtype: of the small parameters.
        part: cuts a whole small tensor to what this copy gets.
        flat: parts are ranges of a row.
        small: no dim has more than a dozen elements.
        copies: how many parameters there are of each shape.
        only: which of them this copy steps; ``None`` for all, -1 for none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        dtype: torch.dtype,
        part: Callable[[Tensor], Tensor],
        *,
        flat: bool = False,
        small: bool,
        copies: int = 1,
        only: int | None = None,
    ) -> None:
        self._part = part
        self.parameters: list[nn.Parameter] = []
        self.stepped: dict[int, nn.Parameter] = {}
        """Those that are in parameter groups, by their place in `parameters`."""
        self.start: list[Tensor] = []
        self._shapes: list[tuple[int, ...]] = []
        kind: Any = type(optimizer)
        # An optimizer whose __del__ frees external resources would free the original's.
        without: Any = type(kind.__name__, (kind,), {"__del__": lambda _: None})
        self._copy: Any = object.__new__(without)
        # All references to the optimizer or its parameters must refer to the copies.
        memo: dict[int, Any] = {id(optimizer): self._copy}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        groups = []
        for group in optimizer.param_groups:
            by_shape: dict[tuple[int, ...], nn.Parameter] = {}
            held: list[nn.Parameter] = []
            kept = []
            for index, one in enumerate(group["params"]):
                shape = _small_shape(one) if small else _flat_shape(one) if flat else _shape(one)
                for number in range(0 if shape in by_shape else copies):
                    made = self._parameter(one, shape, dtype)
                    by_shape.setdefault(shape, made)
                    if only in (None, number):
                        self.stepped[len(self.parameters) - 1] = made
                        held.append(made)
                        kept.append(index)
                        if one in optimizer.state:
                            state[made] = self._state(optimizer.state[one], one, made, memo)
                memo[id(one)] = by_shape[shape]
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            if isinstance(options.get("lr"), float | Tensor) and not options["lr"]:
                options["lr"] = options["lr"] + _RATE
            names = {"param_names": [group["param_names"][index] for index in kept]} if "param_names" in group else {}
            groups.append({**copy.deepcopy(options, memo), **names, "params": held})
        others = {key: value for key, value in vars(optimizer).items() if key not in _PER_RUN}
        vars(self._copy).update(copy.deepcopy(others, memo))
        # Set up as the base class does; its own __init__ would need arguments that are no longer known.
        fresh = Optimizer.__new__(Optimizer)
        fresh.__setstate__({"defaults": {}, "state": state, "param_groups": groups})
        vars(self._copy).update({key: value for key, value in vars(fresh).items() if key != "defaults"})
        train = getattr(self._copy, "train", None)
        if callable(train):
            train()  # Optimizers with modes step in this one only.

    def step(self, number: int, *closure: Callable[[], Any]) -> None:
        """One step, with the gradients of that number."""
        for index, one in enumerate(self.parameters):
            values = _values(self._shapes[index], 1000 * (number + 1) + index)
            one.grad = self._part(values).to(one)
        type(self._copy).step(self._copy, *closure)

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the copy's state of a parameter; quantised tensors are dequantised."""
        state = self._copy.state.get(parameter, {})
        return {name: value.dequantize() if _is_quantised(value) else value for name, value in state.items()}

    def numbers(self, *, of_parameters: bool = True) -> dict[str, list[float]]:
        """Numbers in parameter groups and, beside parameters, in the state; by where they are."""
        found: dict[str, list[float]] = {}
        for at, group in enumerate(self._copy.param_groups):
            found |= {f"group {at} {key}": list(_numbers([value])) for key, value in group.items() if key != "params"}
        for at, one in self.stepped.items() if of_parameters else ():
            found |= {f"state {at} {name}": list(_numbers([value])) for name, value in self.state(one).items()}
        return {place: numbers for place, numbers in found.items() if numbers}

    def _parameter(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        device = torch.device("cpu") if like.is_meta else like.device
        whole = _values(shape, len(self.parameters)).to(device=device, dtype=dtype)
        parameter = nn.Parameter(self._part(whole).clone(), requires_grad=True)
        self.parameters.append(parameter)
        self.start.append(parameter.detach().clone())
        self._shapes.append(shape)
        return parameter

    def _state(self, state: Any, one: Tensor, small: nn.Parameter, memo: dict[int, Any]) -> dict[str, Any]:
        """State that exists before the first step, such as Adagrad's: small, positive, and the same for every part."""
        return {
            name: torch.full_like(small, 0.1, dtype=value.dtype if not value.is_floating_point() else small.dtype)
            if isinstance(value, Tensor) and value.dim() and value.shape == one.shape
            else copy.deepcopy(value, dict(memo))
            for name, value in state.items()
        }


def _values(shape: Sequence[int], seed: int) -> Tensor:
    """Random numbers, those of one half several times as large as those of the other, in either dim."""
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for last in (False, True):
        _half(values, last=last, second=True).mul_(3.0)
    return values


def _is_quantised(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value).dequantize is not Tensor.dequantize


def _shape(like: Tensor) -> tuple[int, ...]:
    if like.numel() >= _BLOCKWISE:
        row = _LARGE_ROWS[min(like.dim() - 1, 4)] + (1,) * (like.dim() - 5)
        rows = 130 if sum(size >= _FACTORED for size in like.shape) > 1 else 34
        return (rows if row else 34 * 128, *row)
    return tuple(min(size, _LARGEST_DIM if at < 2 else 4) for at, size in enumerate(like.shape))


def _small_shape(like: Tensor) -> tuple[int, ...]:
    return tuple(min(size, _SMALL_DIM if at < 2 else 4) for at, size in enumerate(like.shape))


def _flat_shape(like: Tensor) -> tuple[int, ...]:
    return _FLAT_SHAPES[min(like.dim(), 3)] + (1,) * (like.dim() - 3)


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _row_half(tensor: Tensor, *, second: bool) -> Tensor:
    """One half of the elements in a row; all of a tensor with one element."""
    row = tensor.flatten()
    half = len(row) // 2
    return row if len(row) == 1 else row[half:] if second else row[:half]


def _half(tensor: Tensor, *, last: bool, second: bool) -> Tensor:
    """A view of one half along the first or the last dim that can be cut; all of a tensor with one element."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if not dims:
        return tensor
    dim = dims[-1 if last else 0]
    half = tensor.shape[dim] // 2
    return tensor.narrow(dim, half, tensor.shape[dim] - half) if second else tensor.narrow(dim, 0, half)


_PARTS = tuple(partial(_half, last=last, second=second) for last in (False, True) for second in (False, True))
"""Two halves along the first dim, then two along the last: an optimizer may couple the elements of a row only."""

_FLAT_PARTS = tuple(partial(_row_half, second=second) for second in (False, True))


def _numbers(values: Sequence[Any]) -> Iterator[float]:
    for value in values:
        if isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            yield float(value)
        elif isinstance(value, (tuple, list)):
            yield from _numbers(value)


def _close_numbers(whole: dict[str, list[float]], part: dict[str, list[float]]) -> bool:
    # A part may have one element, whose state is a number there alone.
    for place, numbers in whole.items():
        others = part.get(place, [])
        if len(numbers) != len(others):
            return False
        pair = torch.tensor([numbers, others], dtype=torch.float64)
        if not torch.allclose(pair[0], pair[1], rtol=_RELATIVE, atol=0, equal_nan=True):
            return False
    return True
