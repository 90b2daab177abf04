"""Description of a model for Megatron-Core: sizes, layers, and the location of each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drivetrain_megatron.core_engine.calls import Calls
from drivetrain_megatron.core_engine.rearranging import SAME, Rearrangement
from drivetrain_megatron.tensor.layout import Layout

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class Correspondence:
    """Parameters of the user's model and those of Megatron-Core that hold the same numbers.

    Args:
        ours: names in the user's model.
        theirs: names in the whole ``GPTModel``; layers are counted over all pipeline stages.
        how: each rank's parts of the ones lie in the others.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    how: Rearrangement = SAME


@dataclass(frozen=True)
class Description:
    """A model in Megatron-Core's words, as one rank of the axis ``tp`` sees it.

    Args:
        config: ``TransformerConfig`` of the whole model, all degrees 1.
        layers: a ``ModuleSpec`` for each layer of the whole model.
        norm: what constructs the norm behind the last layer.
        gpt: arguments of ``GPTModel``.
        vocabulary: rows of the user's embedding.
        tied: embedding and output layer are one parameter.
        correspondences: every parameter.
        layouts: of the user's parameters that the axis ``tp`` cuts, by name.
        calls: what a script gives to the model and gets from it.
        frequencies: of the rotary embedding, where they are not those that the arguments give.
    """

    config: Any
    layers: Sequence[Any]
    norm: Any
    gpt: Mapping[str, Any]
    vocabulary: int
    tied: bool
    correspondences: Sequence[Correspondence]
    layouts: Mapping[str, Layout]
    calls: Calls
    frequencies: Tensor | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers of the unsharded model."""
        return len(self.layers)

    @property
    def looked_up(self) -> bool:
        """Positions have an embedding of their own, as many as the model was made for."""
        return bool(self.gpt["position_embedding_type"] == "learned_absolute")

    def stages(self, name: str, num_stages: int) -> list[int]:
        """The pipeline stages that hold one of Megatron-Core's parameters.

        Args:
            name: in the whole model.
            num_stages: of the pipeline; they have as many layers each.
        """
        last = num_stages - 1
        if name.startswith("decoder.layers."):
            return [int(name.split(".")[2]) // (self.num_layers // num_stages)]
        if name == EMBEDDING and self.tied and last:
            return [0, last]
        return [0] if name.startswith("embedding.") else [last]

    def owners(self, num_stages: int) -> dict[str, tuple[int, ...]]:
        """Return the pipeline stages that hold each of the user's parameters."""
        return {
            ours: tuple(self.stages(each.theirs[0], num_stages)) for each in self.correspondences for ours in each.ours
        }
