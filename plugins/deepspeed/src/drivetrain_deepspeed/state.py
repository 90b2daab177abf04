"""Maps a DeepSpeed engine's state to the portable checkpoint: ranges of each parameter, no gathering."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import PortableState, TensorSpec, UnsupportedError, UsageError, portable
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

    def restore(self) -> None:
        """Give the optimizer back what it held, without state: its engine goes."""
        for group, held in zip(self.groups, self.parameters, strict=True):
            group["params"] = list(held)
        self.optimizer.param_groups = list(self.groups)
        self.optimizer.state = defaultdict(dict)
        for name in ("state_dict", "load_state_dict", "add_param_group"):
            vars(self.optimizer).pop(name, None)

    @classmethod
    def of(cls, optimizer: Optimizer) -> RecordedGroups:
        """Take them down; to be called before ``deepspeed.initialize``."""
        groups = tuple(optimizer.param_groups)
        return cls(tuple(tuple(group["params"]) for group in groups), groups, optimizer)


@dataclass(frozen=True)
class Carried:
    """State of an optimizer that goes on in another engine of the same model.

    Args:
        optimizer: the script's.
        flats: of each flat buffer in order, identities of its parameters, its number of elements, its state.
        whole: state by parameter, where there are no flat buffers.
    """

    optimizer: Optimizer
    flats: tuple[tuple[tuple[int, ...], int, dict[str, Any]], ...]
    whole: dict[Any, Any]


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
        self.behind: dict[int, int] = {}
        """Step counts of parameters that have had fewer steps than others of their group, by identity."""
        _check_known(optimizer)

    def dissolve(self) -> None:
        """Leave parameters and optimizers as they were before the engine, but for values. Not collective."""
        _partition(self._optimizer)
        for each in self._recorded:
            each.restore()

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer, one of the engine's, holds a parameter that is not frozen now."""
        its = next(each for each in self._recorded if each.optimizer is optimizer)
        return any(parameter.requires_grad for held in its.parameters for parameter in held)

    def carry(self, optimizer: Optimizer) -> Carried:
        """State of one of the engine's optimizers, for an engine that is made after this one. Not collective.

        Raises:
            UsageError: it trains other parameters now than it has state of.
        """
        flats = flat_groups(self._optimizer)
        if not flats:
            its = next(each for each in self._recorded if each.optimizer is optimizer)
            held = [parameter for each in its.parameters for parameter in each]
            return Carried(optimizer, (), {each: optimizer.state[each] for each in held if each in optimizer.state})
        its, mine = next(found for found in self._flats_of(flats) if found[0].optimizer is optimizer)
        trained = {id(parameter) for held in its.parameters for parameter in held if parameter.requires_grad}
        if trained != {id(piece.parameter) for flat in mine for piece in flat.pieces}:
            raise UsageError(
                f"an optimizer was prepared after its model, and the {type(optimizer).__name__} that goes on beside it "
                "trains other parameters now than DeepSpeed has laid out for it",
                cure="Prepare new optimizers for all parameters that train from now on.",
            )
        return Carried(
            optimizer,
            tuple((_members(flat), flat.flat.numel(), dict(flat.state)) for flat in mine),
            {},
        )

    def take_over(self, carried: Carried) -> None:
        """Give one of the engine's optimizers the state that it had in another. Not collective."""
        carried.optimizer.state.update(carried.whole)
        for each, mine in self._flats_of(flat_groups(self._optimizer)):
            if each.optimizer is carried.optimizer:
                for flat, (members, numel, state) in zip(mine, carried.flats, strict=True):
                    assert (_members(flat), flat.flat.numel()) == (members, numel)
                    if state:
                        flat.optimizer.state[flat.flat] = state

    def _flats_of(self, flats: Sequence[FlatGroup]) -> Iterator[tuple[RecordedGroups, list[FlatGroup]]]:
        """The script's optimizers, each with its flat buffers."""
        first = 0
        for each in self._recorded:
            mine = range(first, first := first + len(each.groups))
            yield each, [flat for flat in flats if flat.group in mine]

    def portable_state(self) -> PortableState:
        """Return ranges of the live master values and moments, and replicated tensors. Not collective.

        Raises:
            CheckpointError: the optimizer keeps state that cannot be separated by parameter.
        """
        flats = flat_groups(self._optimizer)
        state = portable.portable_state(self._module, self._optimizers(flats))
        state.tensors |= self._cut(flats)
        return state

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        """Ranges of live master values and moments, laid out as they are here, whatever saved them. Not collective."""
        self.behind = {}
        flats = flat_groups(self._optimizer)
        template = portable.portable_template(self._module, self._optimizers(flats), {} if flats else saved)
        self._moments = Moments(flats, portable.first_names(self._module), saved)
        template.tensors |= self._cut(flats) | self._moments.template
        return template

    def load_portable_state(self, state: PortableState) -> None:
        """Take over a filled template, and give every rank the parameters that follow from it. Collective.

        :attr:`behind` is that of the checkpoint then.
        """
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
            self.behind = self._moments.take_over(state.tensors, loaded)
        self._moments = None
        _spread(self._optimizer)

    def live_tensors(self) -> dict[str, Tensor]:
        """Return ranges of the live master values, and replicated tensors. Not collective."""
        return portable.live_tensors(self._module) | self._cut(flat_groups(self._optimizer))

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the state dict in full, in the dtype that is trained, one at a time. Collective."""
        yield from full_tensors(self._module, self._optimizer)

    def _optimizers(self, flats: Sequence[FlatGroup]) -> list[Any]:
        """Return the script's optimizers, or views of the flat buffers with their interface."""
        if not flats:
            return [each.optimizer for each in self._recorded]
        return [OptimizerView(each.parameters, each.groups, mine, self.behind) for each, mine in self._flats_of(flats)]

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


def _members(flat: FlatGroup) -> tuple[int, ...]:
    return tuple(id(piece.parameter) for piece in flat.pieces)


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
