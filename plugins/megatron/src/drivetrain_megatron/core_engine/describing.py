"""Describes the models that Megatron-Core supports, for ``prepare`` and ``drivetrain plan show``."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from torch import nn

from drivetrain.api import UsageError
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.core_engine import gpt_models, transformers_models
from drivetrain_megatron.core_engine.description import Description


def describe(model: nn.Module, rank: int, degree: int, num_stages: int, section: MegatronConfig) -> Description:
    """The model in Megatron-Core's words, for one rank of the axis ``tp``. Not collective.

    Args:
        model: of Transformers, or a ``GPTModel``; its parameters may be on meta.
        rank: on the axis ``tp``.
        degree: ranks of the axis ``tp``.
        num_stages: ranks of the axis ``pp``.
        section: the configuration.

    Raises:
        UnsupportedError: Megatron-Core cannot compute it.
        UsageError: sizes that do not divide, or experts over ``tp`` without sequence parallelism.
    """
    found: Description = (gpt_models if type(model) is GPTModel else transformers_models).describe(model, rank, degree)
    if found.num_layers % num_stages:
        raise UsageError(
            f"pipeline_parallel_size {num_stages} does not divide the model's {found.num_layers} layers",
            cure="Choose a degree that does; every stage of Megatron-Core has as many layers.",
        )
    if found.config.num_moe_experts and degree > 1 and not section.sequence_parallel:
        raise UsageError(
            "Megatron-Core trains mixtures of experts over tensor_parallel_size > 1 with sequence parallelism only",
            cure="Write megatron.sequence_parallel: true.",
        )
    return found
