"""Distributes an unsharded ``GPTModel`` of Megatron-Core over ranks.

Names and layouts are Megatron-Core's own: its layers mark each parameter with the dim that ``tp`` cuts, and in how many
parts (a gate and what it gates are two). Layers have their numbers in the whole model, whatever the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlock, TransformerBlockSubmodules
from torch import nn

from drivetrain_megatron.core_engine.calls import refuse
from drivetrain_megatron.core_engine.cuts import Cuts
from drivetrain_megatron.core_engine.description import EMBEDDING, OUTPUT, Correspondence, Description
from drivetrain_megatron.core_engine.gpt_calls import GPTCalls
from drivetrain_megatron.core_engine.transformers_models import check

_DEGREES = "degrees of parallelism stand in the configuration of Drivetrain"
_LAYOUT = "every stage of the pipeline has as many layers"
_BESIDE = "it adds to gradients beside the loss, where neither num_items nor micro-batches weigh it"
_COUNTED = "it depends on how many tokens a micro-batch has, so numbers would change with the layout"
_UNTRIED = "nobody tried it here"

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_model_parallel_size": ((1,), _DEGREES),
    "pipeline_model_parallel_size": ((1,), _DEGREES),
    "virtual_pipeline_model_parallel_size": ((None,), "interleaved schedules are not offered"),
    "context_parallel_size": ((1,), "there is no axis for contexts"),
    "expert_model_parallel_size": ((1,), "there is no axis for experts"),
    "num_layers_in_first_pipeline_stage": ((None,), _LAYOUT),
    "num_layers_in_last_pipeline_stage": ((None,), _LAYOUT),
    "pipeline_model_parallel_layout": ((None,), _LAYOUT),
    "account_for_embedding_in_pipeline_split": ((False,), _LAYOUT),
    "account_for_loss_in_pipeline_split": ((False,), _LAYOUT),
    "calculate_per_token_loss": ((False,), "write accelerator.backward(loss_sum, num_items=tokens)"),
    "moe_aux_loss_coeff": ((0, 0.0), _BESIDE),
    "moe_z_loss_coeff": ((None, 0, 0.0), _BESIDE),
    "mtp_num_layers": ((None, 0), _BESIDE),
    "moe_router_enable_expert_bias": ((False,), "the bias is no parameter, and would not be saved"),
    "moe_expert_capacity_factor": ((None,), _COUNTED),
    "moe_token_dropping": ((False,), _COUNTED),
    "moe_router_load_balancing_type": (("none", "aux_loss", "seq_aux_loss", "global_aux_loss"), _COUNTED),
    "moe_grouped_gemm": ((False,), "its experts are one parameter, which was never tried"),
    "multi_latent_attention": ((False,), _UNTRIED),
    "experimental_attention_variant": ((None,), _UNTRIED),
    "heterogeneous_block_specs": ((False,), _UNTRIED),
    "qk_clip": ((False,), "it changes parameters behind the optimizer's back"),
    "fp8": ((None,), _UNTRIED),
    "fp4": ((None,), _UNTRIED),
    "cpu_offloading": ((False,), _UNTRIED),
    "fine_grained_activation_offloading": ((False,), _UNTRIED),
    "defer_embedding_wgrad_compute": ((False,), _UNTRIED),
    "delay_wgrad_compute": ((False,), _UNTRIED),
    "overlap_moe_expert_parallel_comm": ((False,), _UNTRIED),
    "enable_cuda_graph": ((False,), _UNTRIED),
    "cuda_graph_impl": (("none",), _UNTRIED),
    "finalize_model_grads_func": ((None,), "Drivetrain ends accumulation windows"),
    "grad_scale_func": ((None,), "Drivetrain scales losses"),
    "no_sync_func": ((None,), "Drivetrain ends accumulation windows"),
    "grad_sync_func": ((None,), "Drivetrain ends accumulation windows"),
    "param_sync_func": ((None,), "Drivetrain ends accumulation windows"),
}
"""Fields of ``TransformerConfig`` with the values that are accepted, and why no others are."""


def describe(model: GPTModel, rank: int, degree: int) -> Description:
    """The model for one rank of the axis ``tp``. Not collective.

    Raises:
        UnsupportedError: it is sharded, or its configuration is not supported.
        UsageError: sizes that do not divide.
    """
    _check_config(model)
    config: Any = model.config
    cuts = Cuts(model, rank, degree)
    cuts.divides(num_attention_heads=config.num_attention_heads, num_query_groups=config.num_query_groups)
    for name in ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if getattr(config, name):
            cuts.divides(**{name: getattr(config, name)})
    norm, layers = _specification(model)
    rope = getattr(model, "rotary_pos_emb", None)
    gpt = {
        "vocab_size": cuts.padded_vocabulary(model.vocab_size),
        "max_sequence_length": model.max_sequence_length,
        "position_embedding_type": model.position_embedding_type,
        "rotary_percent": model.rotary_percent,
        "rotary_base": model.rotary_base,
        "seq_len_interpolation_factor": getattr(rope, "seq_len_interpolation_factor", None),
        "share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
    }
    found = Description(
        config,
        layers,
        norm,
        gpt,
        model.vocab_size,
        model.share_embeddings_and_output_weights,
        list(_correspondences(model, cuts)),
        cuts.layouts,
        GPTCalls(model, model.vocab_size, looked_up=gpt["position_embedding_type"] == "learned_absolute"),
        None if rope is None else rope.inv_freq,
    )
    check(model, found)
    return found


def _check_config(model: GPTModel) -> None:
    config: Any = model.config
    for name, (accepted, why) in _REFUSED.items():
        value = getattr(config, name, accepted[0])
        if value not in accepted:
            wanted = " or ".join(map(repr, accepted))
            raise refuse(model, f"{name} of its configuration is {value!r}: {why}", f"Write {name}={wanted}.")
    if not (model.pre_process and model.post_process) or len(model.decoder.layers) != config.num_layers:
        raise refuse(
            model, "it is one stage of a pipeline", "Construct it whole, without pre_process, post_process or vp_stage."
        )
    group = model.pg_collection.tp
    if group is not None and group.size() > 1:
        raise refuse(
            model,
            f"it was constructed as a part for {group.size()} tensor-parallel ranks",
            "Construct it after Accelerator(), whose groups of ranks make it whole, and without a pg_collection.",
        )
    if model.position_embedding_type not in {"learned_absolute", "rope", "none"}:
        raise refuse(
            model,
            f"position_embedding_type {model.position_embedding_type!r}: {_UNTRIED}",
            "Write position_embedding_type='rope', 'learned_absolute' or 'none'.",
        )


def _specification(model: GPTModel) -> tuple[Any, list[Any]]:
    """Return the specifications of the final norm and of each layer of the unsharded model."""
    spec: Any = model.transformer_layer_spec
    if isinstance(spec, ModuleSpec) and issubclass(spec.module, TransformerBlock):
        if spec.module is not TransformerBlock:
            raise refuse(model, f"its decoder is a {spec.module.__name__}", "Use a TransformerBlock.")
        spec = spec.submodules
    if isinstance(spec, TransformerBlockSubmodules):
        return spec.layer_norm, list(spec.layer_specs)
    return LayerNormImpl, [spec] * model.config.num_layers


def _correspondences(model: nn.Module, cuts: Cuts) -> Iterator[Correspondence]:
    """The same names on both sides."""
    parameter: Any
    for name, parameter in model.named_parameters():
        if name in (EMBEDDING, OUTPUT):
            yield cuts.vocabulary(name, name)
            continue
        if getattr(parameter, "tensor_model_parallel", False):
            cuts.along(parameter.partition_dim, name, parts=parameter.partition_stride)
        yield Correspondence((name,), (name,))
