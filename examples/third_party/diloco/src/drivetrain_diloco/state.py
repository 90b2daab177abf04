"""Maps a worker's state to the portable checkpoint: parameters that all agree on, momenta of the outer optimizer.

Checkpoints are made between rounds, when the workers' parameters agree. The inner optimizers' state does not: its mean
over the workers is saved, and every worker resumes from that, which is what a checkpoint for any number of workers
loses. The outer momentum stands beside it as one more slot, ``optim.<fqn>.outer_momentum``; other backends carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from drivetrain.api import CheckpointError, DrivetrainError, PortableState, portable
from drivetrain_diloco.rounds import SLOT, Rounds

EXTRA = "diloco"


def check_joined(rounds: Sequence[Rounds], what: str, kind: type[DrivetrainError]) -> None:
    """Refuse what only makes sense when the workers agree.

    Raises:
        kind: a round is under way.
    """
    for each in rounds:
        if each.position:
            raise kind(
                f"{what} in local step {each.position} of a round, when every worker has parameters of its own",
                cure="Do it at the end of a round, or end the round: "
                "from drivetrain_diloco.backend import synchronise; synchronise(accelerator).",
            )


def portable_state(module: nn.Module, rounds: Sequence[Rounds], mean: Callable[[Tensor], Tensor]) -> PortableState:
    """The state under original names. Collective over the workers when their inner state differs.

    Raises:
        CheckpointError: a round is under way.
    """
    check_joined(rounds, "a checkpoint was asked for", CheckpointError)
    state = portable.portable_state(module, [each.optimizer for each in rounds])
    decoupled = any(not each.synchronous and each.steps for each in rounds)
    for key, tensor in state.tensors.items():
        if decoupled and key.startswith("optim.") and tensor.is_floating_point():
            state.tensors[key] = mean(tensor)
    names = portable.first_names(module)
    for each in rounds:
        momenta = {names[id(one)]: momentum for one, momentum in each.momenta().items() if id(one) in names}
        state.tensors |= {f"optim.{name}.{SLOT}": momentum for name, momentum in momenta.items()}
    state.extra[EXTRA] = {"steps": [each.steps for each in rounds]}
    return state


def load_portable_state(module: nn.Module, rounds: Sequence[Rounds], state: PortableState) -> None:
    """Take over a filled template, also of a run that was not ours: its steps then count from 0."""
    portable.load_portable_state(module, [each.optimizer for each in rounds], state)
    steps = state.extra.get(EXTRA, {}).get("steps", [0] * len(rounds))
    for each, count in zip(rounds, steps, strict=True):
        momenta: dict[Tensor, Tensor] = {}
        for parameter, slots in each.optimizer.state.items():
            momentum = slots.pop(SLOT, None)
            if isinstance(momentum, torch.Tensor):
                momenta[parameter] = momentum
        # An optimizer without state of its own had an entry for the outer momentum only.
        for parameter in [one for one, slots in each.optimizer.state.items() if not slots]:
            del each.optimizer.state[parameter]
        each.restart(count, momenta)
