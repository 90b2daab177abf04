"""Interface between a script's calls of a model and Megatron-Core: batches in, outputs out.

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
    """Return the error for a model that Megatron-Core cannot train.

    Args:
        model: of the user.
        why: in words.
        cure: what to write; ``None``: what trains such a model otherwise.
    """
    if cure is None:
        # Layers of Megatron-Core need its process groups, which the other engine does not form.
        layers_of_core = any(each.__module__.startswith("megatron.") for each in type(model).__mro__)
        cure = OTHER_BACKEND if layers_of_core else OTHER_ENGINE
    return UnsupportedError(f"megatron.engine: megatron_core cannot train {type(model).__name__}: {why}", cure=cure)


class Batch(Protocol):
    """The arguments of one call of the model, as Megatron-Core names them."""

    @property
    def form(self) -> Hashable:
        """Key on which the output's containers and shapes depend."""

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
    """Converts between the call signature of one kind of model and Megatron-Core's."""

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """Read the arguments of the model's forward.

        Raises:
            UnsupportedError: an argument that Megatron-Core's model does not have.
            UsageError: no tokens, or shapes that do not fit together.
        """

    def absent(self, batch: Any, device: torch.device) -> Any:
        """The output's containers, with tensors of which only the shape counts."""

    def labels(self, model: nn.Module, batch: Any, absent: Any, wanted: set[int]) -> Tensor | None:
        """Return labels for Megatron-Core's own loss, int64 ``[B, S]``; ``None`` if it computes logits.

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
        """Return the model's output for one part; unused leaves have no value. Collective over ``tp``.

        Args:
            model: Megatron-Core's, of this rank.
            computed: this rank's part of the vocabulary, ``[B, S, V/tp]``; losses ``[B, S]`` where there were
                :meth:`labels`.
            batch: the part.
            absent: the output without values.
            num_parts: the mean over so many losses of the model is the batch's.
            wanted: which leaves have a use.
        """
