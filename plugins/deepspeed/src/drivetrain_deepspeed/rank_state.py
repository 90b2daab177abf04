"""``state_dict`` and ``load_state_dict`` of the script's optimizers; under ZeRO of this rank's part, for this rank.

Under ZeRO an optimizer's state belongs to flat buffers, which stage 3 has in the parameter groups during a step only.
Several optimizers of one model have one mapping of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch.optim import Optimizer

from drivetrain.api import Topology, UnsupportedError
from drivetrain_deepspeed.layout import flat_groups

PART = "drivetrain_part"
"""Key of a state dict that identifies the rank of a partition."""


def serve(optimizers: Sequence[Optimizer], zero: Any, topology: Topology) -> None:
    """Replace ``state_dict`` and ``load_state_dict`` of these optimizers, in the order of the engine's groups."""
    first = 0
    for optimizer in optimizers:
        _Served(optimizer, range(first, first := first + len(optimizer.param_groups)), zero, topology)


@final
class _Served:
    """One optimizer whose two methods are replaced.

    Args:
        optimizer: the one that steps.
        groups: places of its parameter groups among those of the engine.
        zero: ``engine.optimizer`` of stages 1 to 3; ``None`` without ZeRO.
        topology: the job.
    """

    def __init__(self, optimizer: Optimizer, groups: range, zero: Any, topology: Topology) -> None:
        self._optimizer, self._groups, self._zero = optimizer, groups, zero
        self._part = None if zero is None else {"rank": topology.dp_rank, "ranks": topology.dp_size}
        self._say, self._load = optimizer.state_dict, optimizer.load_state_dict
        optimizer.state_dict = self.state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign]

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; under ZeRO that of this rank's flat buffers."""
        with self._alone():
            return self._say() if self._part is None else {**self._say(), PART: dict(self._part)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load such a state dict. Not collective.

        Raises:
            UnsupportedError: it is not what this rank's :meth:`state_dict` returned.
        """
        name, part = type(self._optimizer).__name__, state_dict.get(PART)
        if part != self._part:
            raise UnsupportedError(
                f"this state of {name} is {_whose(part)}, and this {name} holds {_whose(self._part)}",
                cure="Save with accelerator.save_state(folder) and load with accelerator.load_state(folder). A state "
                "that state_dict() returned can be loaded on the same rank only.",
            )
        with self._alone():
            self._load(state_dict)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Restrict the optimizer to its own flat buffers or parameters and their state."""
        optimizer, live, every = self._optimizer, self._optimizer.param_groups, self._optimizer.state
        flats = [flat for flat in flat_groups(self._zero) if flat.group in self._groups]
        if any(flat.optimizer is not self._zero.optimizer for flat in flats):
            raise UnsupportedError(
                f"offload_optimizer.ratio has a second {type(optimizer).__name__} step what stays on the device, and "
                "the state of one has no part of the other's",
                cure="Use accelerator.save_state and accelerator.load_state, or leave the ratio at 1.",
            )
        held = [group["params"] for group in live]
        for number, group in zip(self._groups, live if self._part else (), strict=False):
            group["params"] = [flat.flat for flat in flats if flat.group == number]
        own = [each for group in live for each in group["params"]]
        optimizer.state = defaultdict(dict, {each: every.pop(each) for each in own if each in every})
        try:
            yield
        finally:
            # Loading makes new dictionaries, where DeepSpeed, schedules and checkpoints hold the old ones.
            for group, loaded, params in zip(live, optimizer.param_groups, held, strict=True):
                group.update({**loaded, "params": params})
            every.update(optimizer.state)
            optimizer.param_groups, optimizer.state = live, every


def _whose(part: Mapping[str, int] | None) -> str:
    return "that of whole parameters" if part is None else f"the part of rank {part['rank']} of {part['ranks']}"
