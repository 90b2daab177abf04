"""Collect a run's state as named tensors and JSON values, without copying."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.manifest import original_name, stored_name
from drivetrain.checkpoint.state import TrainingState
from drivetrain.checkpoint.tree import Encoder
from drivetrain.topology import DATA_AXES, Topology


@dataclass(frozen=True)
class Collected:
    """What one rank has to say.

    Args:
        tensors: under their stored names; the live ones.
        of_one_rank: names of those that are buffers. Each rank's running statistics are its own, so that a checkpoint
            that took some from one rank and some from another would hold a state that no rank ever had.
        trainables: the encoded rest of each trainable.
        counters: encoded.
        objects: each object's state, encoded.
        rng: this coordinate's random state, encoded, with its tensors; ``None`` on ranks that do not save one.
    """

    tensors: dict[str, Tensor]
    of_one_rank: frozenset[str]
    trainables: tuple[Any, ...]
    counters: Any
    objects: dict[str, Any]
    rng: tuple[Any, dict[str, Tensor]] | None

    def marks(self) -> dict[str, int]:
        """A checksum of each object's state; that should be the same on every rank."""
        return {name: zlib.crc32(json.dumps(tree).encode()) for name, tree in self.objects.items()}


def collect(state: TrainingState, topology: Topology, skip_models: Collection[int] = ()) -> Collected:
    """Put the whole state into the words of the format. Collective where an engine's ``portable_state`` is.

    Args:
        state: the run.
        topology: the job.
        skip_models: indices of trainables whose ``model.*`` tensors are left out.

    Raises:
        CheckpointError: state that no checkpoint can hold.
    """
    encoder = Encoder()
    tensors: dict[str, Tensor] = {}
    of_one_rank: set[str] = set()
    trainables = []
    for index, trainable in enumerate(state.trainables):
        portable = trainable.portable_state()
        parameters = {f"model.{original_name(name)}" for name, _ in trainable.module.named_parameters()}
        of_one_rank |= {
            stored_name(own, index) for own in portable.tensors if own.startswith("model.") and own not in parameters
        }
        for own, tensor in portable.tensors.items():
            if not (own.startswith("model.") and index in skip_models):
                tensors[stored_name(own, index)] = tensor
        where = f"trainables.{index}"
        trainables.append(
            {
                "optimizers": encoder.encode(portable.optimizers, f"{where}.optimizers"),
                "extra": encoder.encode(portable.extra, f"{where}.extra"),
            }
        )
    counters = encoder.encode(state.counters, "counters")
    objects = {name: encoder.encode(item.state_dict(), f"objects.{name}") for name, item in state.objects.items()}
    # Replicated by contract; if they are not, words and numbers still come from one rank, the main process.
    tensors.update(
        (name, tensor)
        for name, tensor in encoder.tensors.items()
        if topology.rank == 0 or isinstance(tensor, DTensor)
    )
    rng = _capture_rng(state, topology)
    return Collected(tensors, frozenset(of_one_rank), tuple(trainables), counters, objects, rng)


def _capture_rng(state: TrainingState, topology: Topology) -> tuple[Any, dict[str, Tensor]] | None:
    """Random state, on the first rank of each data-parallel coordinate."""
    place = topology.mesh.coordinates(topology.rank)
    if state.rng is None or any(at for axis, at in place.items() if axis not in DATA_AXES):
        return None
    encoder = Encoder()
    return encoder.encode(state.rng.capture(), "rng"), encoder.tensors
