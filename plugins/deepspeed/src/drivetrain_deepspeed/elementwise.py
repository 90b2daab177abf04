"""Which optimizers may step ZeRO's flat partitions: those that treat each element by itself.

ZeRO lays the parameters of a group one after another and cuts the row anywhere. An optimizer that looks at a
parameter's shape, at norms or at blocks of it becomes another optimizer there, without an error. DeepSpeed's own list
has nine classes; others are found out by a trial.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import DummyOptim, UnsupportedError

logger = logging.getLogger(__name__)

_KNOWN = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""Of torch, by their formulas. Their subclasses are tried as any other."""

_DESCRIBED = frozenset({"adam", "adamw", "lion", *(each.__name__.lower() for each in _KNOWN)}) - {"adagrad"}
"""What a section may name. Of torch's Adagrad DeepSpeed makes a second one, which no schedule reaches."""

_SHAPES = ((96, 64), (64,))
"""As many elements as block-wise optimizers take for worth their blocks (4096), in halves that are fewer."""
_STEPS = 3
_RATE = 0.1
"""In the place of the learning rate, which a schedule may have set to 0 by now."""
_TOLERANCE = 1e-4
"""Of the longest way that an element went. Kernels round the ends of a tensor otherwise (seen: 1e-7); what couples
elements differs by 1e-2 and more."""


def check(optimizer: Optimizer, stage: int, device: str) -> None:
    """Raise :class:`UnsupportedError` where ZeRO would make another optimizer of this one. Not collective.

    What DeepSpeed has not tested and this finds element-wise is said once: its own warning of that is answered here.

    Args:
        optimizer: the script's, before its first step; it is left as it is.
        stage: of ZeRO; 0 cuts nothing.
        device: of the run.
    """
    if not stage or type(optimizer) in _KNOWN or isinstance(optimizer, DummyOptim):
        return
    name = type(optimizer).__name__
    why = _trial(optimizer, device)
    if why:
        raise UnsupportedError(
            f"{name} is not element-wise, and ZeRO stage {stage} cuts parameters into flat parts, whatever their "
            f"shape: {why}",
            cure="Use zero_stage: 0, another backend such as ddp, or an optimizer that updates each element by itself, "
            "such as torch.optim.AdamW.",
        )
    logger.warning(
        "DeepSpeed has not tested %s under ZeRO. Steps of a copy, whole and in flat parts, were equal: it is taken to "
        "be element-wise.",
        name,
    )


def check_described(kind: str, stage: int) -> None:
    """The same of an optimizer that the section names and DeepSpeed makes."""
    if stage and kind.lower() not in _DESCRIBED:
        raise UnsupportedError(
            f"the section names the optimizer {kind}, which is not known to update each element by itself, and ZeRO "
            f"stage {stage} cuts parameters into flat parts",
            cure="Prepare an optimizer of torch in the script, name Adam, AdamW or Lion, or use zero_stage: 0.",
        )


def _trial(optimizer: Optimizer, device: str) -> str:
    """Step a copy with whole parameters, and two with a half each of the same in a row; in words, how they differ."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) * 0.1 for shape in _SHAPES]
    gradients = [[torch.randn(shape, generator=generator) * 10.0**-step for shape in _SHAPES] for step in range(_STEPS)]
    halves = [_halves(each) for each in gradients]
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _stepped(optimizer, start, gradients, device)
        except Exception as error:  # noqa: BLE001 (whatever an optimizer of a stranger raises)
            return f"whether it is cannot be tried, since a copy of it raises {_said(error)}"
        try:
            found = [
                _stepped(optimizer, [half], [[each[index]] for each in halves], device)
                for index, half in enumerate(_halves(start))
            ]
        except Exception as error:  # noqa: BLE001
            return f"on a flat part it raises {_said(error)}"
    expected = torch.cat([each.flatten() for each in whole])
    way = float((expected - torch.cat([each.flatten() for each in start])).abs().max())
    difference = float((torch.cat([half for (half,) in found]) - expected).abs().max())
    if difference <= _TOLERANCE * way and way:
        return ""
    return f"{_STEPS} steps of two flat halves end {difference:.1e} from those of the whole, which go {way:.1e} far"


def _halves(tensors: list[Tensor]) -> list[Tensor]:
    row = torch.cat([each.flatten() for each in tensors])
    return list(torch.split(row, (row.numel() + 1) // 2))


def _stepped(optimizer: Optimizer, start: list[Tensor], gradients: list[list[Tensor]], device: str) -> list[Tensor]:
    """Values after a few steps of a copy that has these parameters in the place of its first group's."""
    own = [nn.Parameter(each.clone().to(device)) for each in start]
    stand_ins = {id(each): nn.Parameter(torch.zeros(1, device=device)) for each in _held(optimizer)}
    kind: Any = type(optimizer)
    # An optimizer whose __del__ frees what it has made elsewhere would free the original's.
    copy: Any = object.__new__(type(kind.__name__, (kind,), {"__del__": lambda _: None}))
    memo: dict[int, Any] = {**stand_ins, id(optimizer): copy}
    # Not `step`, which a scheduler replaces on the object by one that steps the original.
    copy.__dict__.update(deepcopy({key: value for key, value in vars(optimizer).items() if key != "step"}, memo))
    group = copy.param_groups[0]
    group["params"] = own
    if isinstance(group.get("lr"), float | Tensor):
        group["lr"] = torch.full_like(group["lr"], _RATE) if isinstance(group["lr"], Tensor) else _RATE
    for each in gradients:
        for parameter, gradient in zip(own, each, strict=True):
            parameter.grad = gradient.clone().to(device)
        type(optimizer).step(copy)
    return [each.detach().cpu() for each in own]


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
