"""Builds this rank's part of a ``GPTModel``: its pipeline stage, and its tensor-parallel shard of every layer."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from drivetrain_megatron.core_engine.calls import refuse
from drivetrain_megatron.core_engine.description import Description


class _RMSNorm(nn.RMSNorm):
    """Torch's, as Megatron-Core constructs norms; its gradient is summed over ``tp`` where the sequence is shared."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        _mark(self, config)


class _LayerNorm(nn.LayerNorm):
    """Likewise."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        _mark(self, config)


def _mark(norm: nn.Module, config: TransformerConfig) -> None:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _with_norms(spec: Any, norm: type[nn.Module]) -> Any:
    """Replace torch's norms in a specification by ones that support sequence parallelism and the dtype."""
    if spec is WrappedTorchNorm:
        return norm
    if isinstance(spec, type) or not dataclasses.is_dataclass(spec):
        return spec
    found = copy.copy(spec)
    for each in dataclasses.fields(spec):
        setattr(found, each.name, _with_norms(getattr(spec, each.name), norm))
    return found


def build(
    module: nn.Module,
    description: Description,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sequence_parallel: bool,
    recompute: bool,
) -> GPTModel:
    """This rank's part, with values that mean nothing yet. Collective over the pipeline where embeddings are tied.

    Args:
        module: the user's.
        description: of it.
        dtype: of computation.
        device: of this rank.
        sequence_parallel: norms and dropout share the sequence over ``tp``.
        recompute: activations of layers are computed again in the backward pass.

    Raises:
        UnsupportedError: Megatron-Core does not accept the configuration in this layout.
    """
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    degree = parallel_state.get_tensor_model_parallel_world_size()
    on_cpu = device.type == "cpu"
    again: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    try:
        config = dataclasses.replace(
            description.config,
            tensor_model_parallel_size=degree,
            expert_tensor_parallel_size=degree,
            pipeline_model_parallel_size=num_stages,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            sequence_parallel=sequence_parallel,
            # Values come from the user's model.
            perform_initialization=False,
            use_cpu_initialization=on_cpu,
            **(again if recompute else {}),
        )
    except (ValueError, AssertionError) as problem:
        raise refuse(module, f"its configuration cannot be laid out so: {problem}") from problem
    norm = _RMSNorm if config.normalization == "RMSNorm" else _LayerNorm
    num_layers = description.num_layers // num_stages
    layers = description.layers[stage * num_layers : (stage + 1) * num_layers]
    block = TransformerBlockSubmodules(
        layer_specs=[_with_norms(layer, norm) for layer in layers], layer_norm=_with_norms(description.norm, norm)
    )
    with _here(on_cpu), _same_environment():
        model = GPTModel(
            config=config,
            transformer_layer_spec=block,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            **description.gpt,
        )
    if description.frequencies is not None:
        model.rotary_pos_emb.inv_freq = description.frequencies.to(model.rotary_pos_emb.inv_freq.device, copy=True)
    if config.recompute_granularity is not None and first:
        # A layer that is computed again learns nothing when its input needs no gradient, as behind a frozen embedding.
        model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
    return model.to(device)


@contextmanager
def _same_environment() -> Iterator[None]:
    """Take back variables that construction sets for Transformer Engine, which these layers do not use."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def _here(on_cpu: bool) -> AbstractContextManager[Any]:
    if not on_cpu:
        return nullcontext()
    from drivetrain_megatron.core_engine.device import Here

    return Here()


def with_gradient_buffers(model: GPTModel, *, sharded: bool) -> DistributedDataParallel:
    """Megatron-Core's data parallelism around its model: gradients in float32, in one buffer. Not collective.

    Args:
        model: of this rank.
        sharded: its distributed optimizer will take the gradients, each rank a shard.
    """
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    return DistributedDataParallel(model.config, options, model)
