"""Splits the optimizer's state by parameter, as if the script's optimizer held the parameters.

The inner optimizer has one parameter per group, the flat buffer, and state of the buffer's shape: moments, which are
split like the buffer, and numbers that hold for all of it, such as Adam's step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import CheckpointError, TensorSpec
from drivetrain_deepspeed.layout import FlatGroup, Piece

_COUNTERS = frozenset({"step"})
"""Slots that are one number a parameter, where a 0-d parameter leaves it open."""


@final
class OptimizerView:
    """Optimizer interface for ``drivetrain.api.portable``, over a ZeRO optimizer's flat buffers.

    Args:
        parameters: of each group as the script made it, frozen ones included.
        groups: the live dictionaries of hyper-parameters, in the same order.
        flats: the flat buffers.
        behind: number of steps of those parameters that have had fewer than their group, by identity.

    Attributes:
        param_groups: copies of the groups that hold the module's parameters.
        state: by parameter; moments as :class:`~drivetrain_deepspeed.flatshard.FlatShard`, the live memory.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        groups: Sequence[dict[str, Any]],
        flats: Sequence[FlatGroup],
        behind: Mapping[int, int],
    ) -> None:
        self._groups = groups
        self.param_groups = [{**group, "params": list(held)} for group, held in zip(groups, parameters, strict=True)]
        self.state: dict[Tensor, dict[str, Any]] = {}
        for flat in flats:
            for piece in flat.pieces if flat.state else ():
                own = behind.get(id(piece.parameter))
                if own == 0:
                    continue  # The script's optimizer would have no state for it yet.
                self.state[piece.parameter] = {
                    slot: _part(flat, piece, slot, _own(slot, value, own)) for slot, value in flat.state.items()
                }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Do nothing: :meth:`Moments.take_over` sets the inner optimizer's state, after the buffers are filled."""

    def take_over(self) -> None:
        """Give hyper-parameters that were loaded to the live groups."""
        for live, loaded in zip(self._groups, self.param_groups, strict=True):
            live.update((key, value) for key, value in loaded.items() if key != "params")


@final
class Moments:
    """Room for the slots that a checkpoint brings, from the template to the take-over.

    Live buffers are filled in place, so that a load needs no second copy of the moments.

    Args:
        flats: the flat buffers.
        names: first name of each parameter, by ``id``.
        saved: what the checkpoint holds.

    Attributes:
        template: what is to be filled, by key.
    """

    def __init__(self, flats: Sequence[FlatGroup], names: Mapping[int, str], saved: Mapping[str, TensorSpec]) -> None:
        self._flats, self._names = flats, names
        self.template: dict[str, Tensor] = {}
        self._buffers: list[dict[str, Tensor]] = []
        slots = _slots(saved)
        for flat in flats:
            wanted = dict.fromkeys(slot for piece in flat.pieces for slot in slots.get(self._name(piece), ()))
            self._buffers.append({})
            for slot in wanted:
                self._lay_out(flat, slot, saved)

    def _lay_out(self, flat: FlatGroup, slot: str, saved: Mapping[str, TensorSpec]) -> None:
        keys = {f"optim.{self._name(piece)}.{slot}": piece for piece in flat.pieces}
        found = {key: (piece, saved[key]) for key, piece in keys.items() if key in saved}
        if not _is_elementwise(flat, slot, list(found.values())):
            for key, (_, spec) in found.items():
                self.template[key] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            return
        dtype = getattr(torch, next(iter(found.values()))[1].dtype)
        live: Any = flat.state.get(slot)
        fits = isinstance(live, Tensor) and live.shape == flat.flat.shape
        buffer: Tensor = live if fits else torch.zeros_like(flat.flat, dtype=dtype, requires_grad=False)
        self._buffers[-1][slot] = buffer
        self.template |= {key: piece.of(buffer) for key, (piece, _) in found.items()}

    @torch.no_grad()
    def take_over(self, filled: Mapping[str, Any], loaded: Mapping[Tensor, Mapping[str, Any]]) -> dict[int, int]:
        """Let the inner optimizers have what was filled; where the checkpoint had nothing, moments are zero.

        Returns the number of steps of each parameter that has had fewer than others of its buffer, by identity.

        Args:
            filled: the template, filled.
            loaded: state by parameter, with numbers as the optimizer keeps them; moments in it are passed over.
        """
        behind: dict[int, int] = {}
        for flat, buffers in zip(self._flats, self._buffers, strict=True):
            for slot, buffer in buffers.items():
                for piece in flat.pieces:
                    if f"optim.{self._name(piece)}.{slot}" not in filled:
                        buffer[piece.at : piece.at + piece.numel].zero_()
            numbers = {
                self._name(piece): {slot: value for slot, value in slots.items() if slot not in buffers}
                for piece in flat.pieces
                if (slots := loaded.get(piece.parameter))
            }
            state = {**_common(numbers, flat.optimizer), **buffers}
            most = int(state.get("step", 1)) if state else 0
            for piece in flat.pieces:
                name = self._name(piece)
                there = name in numbers or any(f"optim.{name}.{slot}" in filled for slot in buffers)
                own = int(numbers.get(name, {}).get("step", most)) if there else 0
                if own < most:
                    behind[id(piece.parameter)] = own
            flat.optimizer.state.pop(flat.flat, None)
            if state:
                flat.optimizer.state[flat.flat] = state
        for optimizer in dict.fromkeys(flat.optimizer for flat in self._flats):
            _settle(optimizer, [flat for flat in self._flats if flat.optimizer is optimizer])
        return behind

    def _name(self, piece: Piece) -> str:
        return self._names[id(piece.parameter)]


def _own(slot: str, value: Any, own: int | None) -> Any:
    """A slot of a flat buffer as one parameter has it, which may have had fewer steps than the buffer."""
    if own is None or slot not in _COUNTERS:
        return value
    return torch.full_like(value, own) if isinstance(value, Tensor) else type(value)(own)


def _part(flat: FlatGroup, piece: Piece, slot: str, value: Any) -> Any:
    """One parameter's part of a slot of the flat buffer."""
    if isinstance(value, Tensor) and value.dim():
        if value.shape == flat.flat.shape:
            return piece.of(value)
        raise CheckpointError(
            f"{type(flat.optimizer).__name__} keeps {slot} of shape {tuple(value.shape)} for a flat buffer of "
            f"{flat.flat.numel()} elements, which cannot be told apart by parameter",
            cure="Use zero_stage: 0, or an optimizer whose state has an entry for each element, such as AdamW.",
        )
    return value


def _slots(saved: Mapping[str, TensorSpec]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in saved:
        kind, _, rest = key.partition(".")
        if kind == "optim":
            name, _, slot = rest.rpartition(".")
            found.setdefault(name, []).append(slot)
    return found


def _is_elementwise(flat: FlatGroup, slot: str, found: Sequence[tuple[Piece, TensorSpec]]) -> bool:
    """Whether a slot has an entry for each element of its parameter; if all are 0-d, the live state decides."""
    if any(spec.shape for _, spec in found):
        return True
    if any(piece.shape for piece, _ in found):
        return False
    live = flat.state.get(slot)
    return bool(live.dim()) if isinstance(live, Tensor) else live is None and slot not in _COUNTERS


def _common(numbers: Mapping[str, Mapping[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
    """The numbers of one flat buffer, which has one of each; several become the largest, and that is said."""
    own = type(optimizer).__module__.startswith("deepspeed.")  # Those count in plain numbers.
    found: dict[str, Any] = {}
    for slot in dict.fromkeys(slot for slots in numbers.values() for slot in slots):
        values = {name: slots[slot] for name, slots in numbers.items() if slot in slots}
        largest = max(values, key=lambda name: float(values[name]))
        others = [name for name, value in values.items() if float(value) != float(values[largest])]
        if others:
            warnings.warn(
                f"{slot} is {float(values[largest]):g} for {largest} and {float(values[others[0]]):g} for {others[0]} "
                f"({len(others)} parameter(s) differ); DeepSpeed keeps one for all of a group, the largest is taken",
                stacklevel=2,
            )
        value = values[largest]
        found[slot] = value.item() if own and isinstance(value, Tensor) else value
    if own and "step" in found:
        found["step"] = int(found["step"])
    return found


def _settle(optimizer: Optimizer, flats: Sequence[FlatGroup]) -> None:
    """Run the last part of ``load_state_dict``: the optimizer's hook for older state formats (Adam's step a number).

    ZeRO-3 empties the parameter groups between steps, which the hook reads.
    """
    held = [group["params"] for group in optimizer.param_groups]
    try:
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [flat.flat for flat in flats if flat.group == index]
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    finally:
        for group, params in zip(optimizer.param_groups, held, strict=True):
            group["params"] = params
