"""How a DeepSpeed engine's state maps to the portable checkpoint: ranges of each parameter, no gathering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import PortableState, TensorSpec, UnsupportedError, portable
from drivetrain_deepspeed.gathering import full_tensors, update_whole
from drivetrain_deepspeed.layout import FlatGroup, flat_groups, partition_of, partitioned
from drivetrain_deepspeed.moments import Moments, OptimizerView


@dataclass(frozen=True)
class RecordedGroups:
    """An optimizer's parameter groups as the script made them, before DeepSpeed puts flat buffers in their place.

    Args:
        parameters: of each group, frozen ones included.
        groups: the live dictionaries; hyper-parameters stay in them.
        optimizer: the script's.
    """

    parameters: tuple[tuple[nn.Parameter, ...], ...]
    groups: tuple[dict[str, Any], ...]
    optimizer: Optimizer

    @classmethod
    def of(cls, optimizer: Optimizer) -> RecordedGroups:
        """Take them down; to be called before ``deepspeed.initialize``."""
        groups = tuple(optimizer.param_groups)
        return cls(tuple(tuple(group["params"]) for group in groups), groups, optimizer)


@final
class EngineState:
    """The state of one engine in the words of the original module.

    Args:
        module: the user's module, as it was given to ``deepspeed.initialize``.
        optimizer: ``engine.optimizer``: DeepSpeed's around the script's, or the script's own where DeepSpeed wraps none
            (stage 0 in float32); ``None`` for a model without one.
        recorded: the groups of each of the script's optimizers, in order.
    """

    def __init__(self, module: nn.Module, optimizer: Any, recorded: Sequence[RecordedGroups] = ()) -> None:
        self._module, self._optimizer, self._recorded = module, optimizer, recorded
        self._moments: Moments | None = None
        _check_known(optimizer)

    def portable_state(self) -> PortableState:
        """Ranges of the live master values and moments; what every rank holds whole as it is. Not collective.

        Raises:
            CheckpointError: the optimizer keeps state that cannot be told apart by parameter.
        """
        flats = flat_groups(self._optimizer)
        state = portable.portable_state(self._module, self._optimizers(flats))
        state.tensors |= self._cut(flats)
        return state

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        """Ranges of live master values and moments, laid out as they are here, whatever saved them. Not collective."""
        flats = flat_groups(self._optimizer)
        template = portable.portable_template(self._module, self._optimizers(flats), {} if flats else saved)
        self._moments = Moments(flats, portable.first_names(self._module), saved)
        template.tensors |= self._cut(flats) | self._moments.template
        return template

    def load_portable_state(self, state: PortableState) -> None:
        """Take over a filled template, and give every rank the parameters that follow from it. Collective."""
        flats = flat_groups(self._optimizer)
        optimizers = self._optimizers(flats)
        _partition(self._optimizer)
        cut = self._cut(flats)
        rest = {key: tensor for key, tensor in state.tensors.items() if key not in cut}
        portable.load_portable_state(self._module, optimizers, PortableState(rest, state.optimizers, state.extra))
        if self._moments is not None and state.optimizers and flats:
            loaded: dict[Tensor, Mapping[str, Any]] = {}
            for view in optimizers:
                view.take_over()
                loaded |= view.state
            self._moments.take_over(state.tensors, loaded)
        self._moments = None
        _spread(self._optimizer)

    def live_tensors(self) -> dict[str, Tensor]:
        """Ranges of the live master values; what every rank holds whole as it is. Not collective."""
        return portable.live_tensors(self._module) | self._cut(flat_groups(self._optimizer))

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the state dict in full, in the dtype that is trained, one at a time. Collective."""
        yield from full_tensors(self._module, self._optimizer)

    def _optimizers(self, flats: Sequence[FlatGroup]) -> list[Any]:
        """What stands for the script's optimizers: they, or views of the flat buffers as they would see them."""
        if not flats:
            return [each.optimizer for each in self._recorded]
        views, first = [], 0
        for each in self._recorded:
            mine = range(first, first := first + len(each.groups))
            its = [flat for flat in flats if flat.group in mine]
            views.append(OptimizerView(each.parameters, each.groups, its))
        return views

    def _cut(self, flats: Sequence[FlatGroup]) -> dict[str, Tensor]:
        """``model.*`` of what ranks hold ranges of: live master values, else ZeRO-3's partitions."""
        names = portable.first_names(self._module)
        found: dict[str, Tensor] = {}
        for piece in partitioned(self._module):
            found[f"model.{names[id(piece.parameter)]}"] = piece.of(partition_of(piece.parameter))
        for flat in flats:
            for piece in flat.pieces:
                found[f"model.{names[id(piece.parameter)]}"] = piece.of(flat.flat)
        return found


def _check_known(optimizer: Any) -> None:
    known = (Optimizer, DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer, DeepSpeedZeRoOffload)
    if optimizer is not None and not isinstance(optimizer, known):
        raise UnsupportedError(
            f"checkpoints do not know DeepSpeed's {type(optimizer).__name__}",
            cure="Set zero_stage to 1, 2 or 3 in the section `deepspeed:`.",
        )


def _partition(optimizer: Any) -> None:
    """Let ZeRO-3 free what it holds gathered, so that its partitions are all there is. Not collective."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.checkpoint_event_prologue()
    elif isinstance(optimizer, DeepSpeedZeRoOffload):
        optimizer.partition_all_parameters()


@torch.no_grad()
def _spread(optimizer: Any) -> None:
    """From master values to the parameters that a forward sees, on every rank. Collective."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)  # noqa: SLF001  As its own step ends.
        optimizer.checkpoint_event_epilogue()
    elif isinstance(optimizer, DeepSpeedZeRoOffload):
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        update_whole(optimizer)
        optimizer._link_all_hp_params()  # noqa: SLF001  As its own load ends: optimizer state may be new tensors.
        optimizer._hp_optimizer_states_linked = False  # noqa: SLF001
