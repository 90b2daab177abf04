"""Parameter groups and state of a script's optimizers, which stay as DeepSpeed has laid them out.

Under ZeRO a group holds this rank's flat partition, under stage 3 nothing between steps. A script that clips or clamps
``group["params"]`` would do nothing, or something else on each rank. State is kept by flat partition too, so that
``optimizer.state[parameter]`` would find none.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_deepspeed.guard import Guard

_MAY_READ = ("torch.optim.", "deepspeed.", "drivetrain.", "drivetrain_")
"""Modules that mean what the optimizer steps, whatever that is: schedules, ``zero_grad``, checkpoints."""

_COMPREHENSIONS = frozenset({"<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"})


@final
class FixedGroups:
    """Notices edits of ``param_groups``, and refuses what a script does to the parameters in them under ZeRO.

    Args:
        optimizers: the script's, after DeepSpeed has put its buffers into their groups.
        guard: of the module's parameters.
        stage: of ZeRO.
    """

    def __init__(self, optimizers: Sequence[Optimizer], guard: Guard, stage: int) -> None:
        self._guard, self._stage = guard, stage
        self._known = [(each, list(each.param_groups)) for each in optimizers]
        self._held: list[tuple[Any, Any, list[int]]] = []
        self.settle()

    def settle(self) -> None:
        """DeepSpeed has stepped, for which stage 3 has lists of its own."""
        for optimizer, groups in self._known:
            for group in groups if self._stage else ():
                if type(group["params"]) is not _Held:
                    group["params"] = _Held(group["params"], optimizer, self._guard, self._stage)
        every = [(group, group["params"]) for _, groups in self._known for group in groups]
        self._held = [(group, held, list(map(id, list.__iter__(held)))) for group, held in every]

    def check(self) -> None:
        """Raise where an optimizer has other groups than it had, or a group other parameters. Not collective."""
        for optimizer, groups in self._known:
            now = optimizer.param_groups
            if len(now) != len(groups) or any(one is not other for one, other in zip(now, groups, strict=True)):
                raise _edited(optimizer)
        for group, held, numbers in self._held:
            if group["params"] is not held or list(map(id, list.__iter__(held))) != numbers:
                raise _edited(next(one for one, groups in self._known if any(group is each for each in groups)))

    def restore(self) -> None:
        """Undo edits: DeepSpeed's own end goes through the groups by their places."""
        for optimizer, groups in self._known:
            optimizer.param_groups = list(groups)


def _edited(optimizer: Optimizer) -> UnsupportedError:
    return UnsupportedError(
        f"param_groups of {type(optimizer).__name__} was edited: it has other groups, or one of them other parameters, "
        "than when it was prepared, and DeepSpeed has laid out the parameters by their places",
        cure="Write settings of a group in place (`group['lr'] = 0.05`), and call p.requires_grad_(False) to stop "
        "training some parameters. For other groups prepare a new optimizer, whose state begins anew: "
        "optimizer = accelerator.prepare(torch.optim.AdamW(groups)).",
    )


def _scaled(optimizer: Optimizer, stage: int) -> UsageError:
    return UsageError(
        f"torch.amp.GradScaler was given this {type(optimizer).__name__}, and looks for gradients in parameter groups "
        f"where ZeRO stage {stage} keeps none",
        cure="Set mixed_precision: fp16 in the configuration, or Accelerator(mixed_precision='fp16'), which scales the "
        "loss by itself, and write accelerator.backward(loss) and optimizer.step() without a scaler.",
    )


class _Held(list[Any]):
    """Parameters of a group under ZeRO: a list that a script may neither edit nor read.

    Args:
        values: this rank's flat partition, or nothing.
        optimizer: the optimizer of the group; its own methods may read it.
        guard: says whether the engine is at work.
        stage: of ZeRO.
    """

    def __init__(self, values: Sequence[Any], optimizer: Optimizer, guard: Guard, stage: int) -> None:
        super().__init__(values)
        self._optimizer, self._guard, self._stage = optimizer, guard, stage

    def check(self, *, edits: bool) -> None:
        """Raise unless the engine, torch or the optimizer accesses it."""
        if not self._guard.engine_at_work and not self._may(frame := sys._getframe(2)):  # noqa: SLF001
            if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
                raise _scaled(self._optimizer, self._stage)
            self._refuse(edits=edits)

    def _may(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_name in _COMPREHENSIONS:
            frame = frame.f_back
        if frame is None:
            return True
        return f"{frame.f_globals.get('__name__')}.".startswith(_MAY_READ) or (
            frame.f_locals.get("self") is self._optimizer
        )

    def _refuse(self, *, edits: bool) -> NoReturn:
        if edits:
            raise _edited(self._optimizer)
        raise UnsupportedError(
            f"param_groups of {type(self._optimizer).__name__} was asked for the parameters of a group, and ZeRO stage "
            f"{self._stage} keeps {'none there between steps' if self._stage == 3 else 'flat parts of them there'}",
            cure="Take parameters from the model (model.parameters(), model.head.parameters()), clip with "
            "accelerator.clip_grad_norm_ or accelerator.clip_grad_value_, and count before prepare.",
        )

    def __reduce_ex__(self, _: Any) -> Any:
        return list, (list(list.__iter__(self)),)


def _checked(name: str, *, edits: bool) -> Callable[..., Any]:
    plain = getattr(list, name)

    def method(self: _Held, *args: Any, **kwargs: Any) -> Any:
        self.check(edits=edits)
        return plain(self, *args, **kwargs)

    method.__name__ = name
    return method


_READS = "__len__", "__iter__", "__reversed__", "__getitem__", "__contains__", "__add__", "__mul__", "copy", "index"
for _name in _READS:
    setattr(_Held, _name, _checked(_name, edits=False))
for _name in ("append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort"):
    setattr(_Held, _name, _checked(_name, edits=True))
for _name in ("__setitem__", "__delitem__", "__iadd__", "__imul__"):
    setattr(_Held, _name, _checked(_name, edits=True))


_BY_PART = (
    "On every rank read it whole by deepspeed.utils.safe_get_full_optimizer_state(parameter, 'exp_avg'), or another of "
    "its names, and write it by safe_set_full_optimizer_state(parameter, values, 'exp_avg'); "
    "accelerator.save_state(folder) keeps all of it. zero_stage: 0 has it by parameter."
)
_BY_STAGE = (
    "accelerator.save_state(folder) keeps all of it. zero_stage: 0 has it by parameter; under zero_stage: 3 "
    "deepspeed.utils.safe_get_full_optimizer_state(parameter, 'exp_avg') reads it, which in stages 1 and 2 finds that "
    "of a model's only optimizer."
)


class _States(defaultdict[Any, Any]):
    """State by flat partition; raises if the script looks up a parameter.

    Args:
        values: what the optimizer has until now.
        parameters: of the script.
        kind: the optimizer's class.
        guard: says whether the engine is at work.
        stage: of ZeRO.
        alone: the model has one optimizer.
    """

    def __init__(
        self,
        values: Mapping[Any, Any],
        parameters: Sequence[nn.Parameter],
        kind: str,
        guard: Guard,
        stage: int,
        *,
        alone: bool,
    ) -> None:
        super().__init__(dict, values)
        # An identity may be given again once a parameter is gone.
        self._parameters = {id(each): weakref.ref(each) for each in parameters}
        self._kind, self._guard, self._stage, self._alone = kind, guard, stage, alone

    def check(self, key: Any) -> None:
        """Raise if the key is a parameter of the script, unless the engine looks it up."""
        its = self._parameters.get(id(key))
        if its is None or its() is not key or self._guard.engine_at_work:
            return
        raise UnsupportedError(
            f"`state` of {self._kind} was asked for that of {self._guard.named(id(key))}, and ZeRO stage {self._stage} "
            "keeps it in flat parts over the ranks",
            cure=_BY_PART if self._stage == 3 or self._alone else _BY_STAGE,
        )

    def copy(self) -> Any:
        return defaultdict(dict, self)

    __copy__ = copy

    def __reduce_ex__(self, _: Any) -> Any:
        return defaultdict, (dict, dict(self))


def _with_key(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    def method(self: _States, key: Any, *given: Any) -> Any:
        self.check(key)
        return plain(self, key, *given)

    method.__name__ = name
    return method


for _name in ("__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(_States, _name, _with_key(_name))


def refuse_states(
    optimizers: Sequence[Optimizer], parameters: Sequence[Sequence[nn.Parameter]], guard: Guard, stage: int
) -> None:
    """Make look-ups by parameter in the optimizers' state raise.

    Args:
        optimizers: the script's, and what DeepSpeed steps. Those that share a mapping of states share the new one.
        parameters: what the script gave to each of its optimizers.
        guard: of the module's parameters.
        stage: of ZeRO, 1 to 3.
    """
    every = [one for held in parameters for one in held]
    made: dict[int, tuple[Any, _States]] = {}
    for optimizer in optimizers:
        before = optimizer.state
        if id(before) not in made:
            kind = type(optimizer).__name__
            made[id(before)] = before, _States(before, every, kind, guard, stage, alone=len(parameters) == 1)
        optimizer.state = made[id(before)][1]
