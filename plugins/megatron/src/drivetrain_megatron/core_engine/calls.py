"""What a script gives to a model and what it gets back, apart from how Megatron-Core computes it.

Shapes: B rows, S positions, V rows of the vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drivetrain.api import UnsupportedError
from drivetrain_megatron.pipeline.batches import Rows

OTHER_ENGINE = "Write megatron.engine: torch, which trains any model."
signature_of = functools.cache(inspect.signature)
"""Read once: a script calls the same forward thousands of times."""

OTHER_BACKEND = "Write distributed_type: ddp, which runs the model as it is."


def refuse(model: nn.Module, why: str, cure: str | None = None) -> UnsupportedError:
    """The error that says why Megatron-Core cannot train a model.

    Args:
        model: of the user.
        why: in words.
        cure: what to write; ``None``: what trains such a model otherwise.
    """
    if cure is None:
        # Layers of Megatron-Core ask for its groups of ranks, which the other engine does not have.
        layers_of_core = any(each.__module__.startswith("megatron.") for each in type(model).__mro__)
        cure = OTHER_BACKEND if layers_of_core else OTHER_ENGINE
    return UnsupportedError(f"megatron.engine: megatron_core cannot train {type(model).__name__}: {why}", cure=cure)


class Batch(Protocol):
    """What one call of the model was given, in Megatron-Core's words."""

    @property
    def form(self) -> Hashable:
        """What the output's containers and shapes depend on."""

    @property
    def input_ids(self) -> Tensor:
        """int64 ``[B, S]``."""

    @property
    def positions(self) -> Tensor:
        """int64 ``[B, S]``."""

    @property
    def masked(self) -> Tensor | None:
        """Bool ``[B, 1, S, S]``, true where a query does not look; ``None`` where that is the future only."""

    def part(self, rows: Rows, index: int) -> Batch:
        """One micro-batch."""


class Calls(Protocol):
    """How scripts speak to one kind of model."""

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """Read the arguments of the model's forward.

        Raises:
            UnsupportedError: an argument that Megatron-Core's model does not have.
            UsageError: no tokens, or shapes that do not fit together.
        """

    def absent(self, batch: Any, device: torch.device) -> Any:
        """The output's containers, with tensors of which only the shape counts."""

    def labels(self, model: nn.Module, batch: Any, absent: Any, wanted: set[int]) -> Tensor | None:
        """What Megatron-Core's model is given to compute losses by itself, int64 ``[B, S]``; ``None``: nothing.

        It does so before it turns logits round to ``[B, S, V]``, which costs two copies of them.

        Args:
            model: Megatron-Core's, of this rank.
            batch: the part.
            absent: the output without values.
            wanted: which leaves have a use.
        """

    def outputs(
        self, model: nn.Module, computed: Tensor, batch: Any, absent: Any, num_parts: int, wanted: set[int]
    ) -> Any:
        """What the model returns for one part; what is not wanted stays without a value. Collective over ``tp``.

        Args:
            model: Megatron-Core's, of this rank.
            computed: this rank's part of the vocabulary, ``[B, S, V/tp]``; losses ``[B, S]`` where there were
                :meth:`labels`.
            batch: the part.
            absent: the output without values.
            num_parts: the mean over so many losses of the model is the batch's.
            wanted: which leaves have a use.
        """
