"""Describes causal language models of Transformers for Megatron-Core: Llama, Qwen2, Qwen3, Mixtral and GPT-2.

A model is recognized by its exact class, since a subclass may compute something else. Raises, with the reason, if
Megatron-Core would compute something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain_megatron.core_engine.calls import refuse
from drivetrain_megatron.core_engine.cuts import Cuts
from drivetrain_megatron.core_engine.description import EMBEDDING, OUTPUT, Correspondence, Description
from drivetrain_megatron.core_engine.parallel_state import import_core
from drivetrain_megatron.core_engine.rearranging import EXPERTS_OUT, GATED, TRANSPOSED, heads, packed_heads

_RECOMPUTING = {"make_inputs_require_grads"}
"""The hook that Transformers sets where activations are to be computed again; Megatron-Core needs none."""


def describe(model: nn.Module, rank: int, degree: int) -> Description:
    """A Transformers model for one rank of the axis ``tp``. Not collective.

    Raises:
        UnsupportedError: the class is not known, or uses something that Megatron-Core computes otherwise or not.
        UsageError: sizes that do not divide.
    """
    family = FAMILIES.get(type(model).__name__)
    if family is None or not type(model).__module__.startswith("transformers."):
        known = ", ".join(sorted(FAMILIES))
        raise refuse(
            model,
            f"it knows how to compute {known} of Transformers and GPTModel of Megatron-Core, and no subclass of them",
        )
    found = family(model, Cuts(model, rank, degree))
    check(model, found)
    return found


def check(model: nn.Module, found: Description) -> None:
    """Whether a description has all of a model.

    Raises:
        UnsupportedError: a parameter that it does not name, or hooks, which would never run.
    """
    named = {name for each in found.correspondences for name in each.ours}
    unknown = [name for name, _ in model.named_parameters() if name not in named]
    if unknown:
        raise refuse(model, f"it has no place for the parameter(s) {', '.join(unknown[:4])}")
    for name, part in model.named_modules():
        hooks = [part._forward_hooks, part._forward_pre_hooks, part._backward_hooks]  # noqa: SLF001 (no public word)
        if {getattr(one, "__name__", "") for each in hooks for one in each.values()} - _RECOMPUTING:
            raise refuse(model, f"the hooks on {name or 'the model'} would never run")


# ---- Llama and what is built like it --------------------------------------------------------------------------------


def _llama(model: nn.Module, cuts: Cuts) -> Description:
    config: Any = model.config
    if getattr(config, "use_sliding_window", False) or getattr(config, "sliding_window", None):
        raise refuse(model, "its attention slides over a window")
    rope = dict(config.rope_parameters)
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise refuse(model, f"its rotary embedding is of the type {rope.get('rope_type')!r}")
    if config.hidden_act != "silu":
        raise refuse(model, f"hidden_act is {config.hidden_act!r}, not 'silu'")
    groups, num_heads = config.num_key_value_heads, config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    cuts.divides(num_attention_heads=num_heads, num_key_value_heads=groups, intermediate_size=config.intermediate_size)
    names = {name for name, _ in model.named_parameters()}
    layer = "model.layers.0"
    experts = getattr(config, "num_local_experts", None)
    transformer = {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": num_heads,
        "num_query_groups": groups,
        "kv_channels": head_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": f"{layer}.self_attn.q_proj.bias" in names,
        "qk_layernorm": f"{layer}.self_attn.q_norm.weight" in names,
        "hidden_dropout": 0.0,
        "attention_dropout": config.attention_dropout,
    }
    if experts:
        transformer |= _moe(model, experts)
    tied = "lm_head.weight" not in names
    found = [cuts.vocabulary("model.embed_tokens.weight", EMBEDDING)]
    for index in range(config.num_hidden_layers):
        found += _llama_layer(index, names, cuts, heads(num_heads // groups, head_size), experts)
    found.append(Correspondence(("model.norm.weight",), ("decoder.final_layernorm.weight",)))
    if not tied:
        found.append(cuts.vocabulary("lm_head.weight", OUTPUT))
    gpt = {
        "vocab_size": cuts.padded_vocabulary(config.vocab_size),
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "share_embeddings_and_output_weights": tied,
    }
    output = _output_of(model, moe=bool(experts))
    return _description(model, transformer, config.num_hidden_layers, gpt, config.vocab_size, found, cuts, output)


def _description(
    model: nn.Module,
    transformer: dict[str, Any],
    num_layers: int,
    gpt: dict[str, Any],
    vocabulary: int,
    found: list[Correspondence],
    cuts: Cuts,
    output: type,
) -> Description:
    """Layers of plain torch operations: no fused kernels, which are compiled or come with Apex."""
    import_core()
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from drivetrain_megatron.core_engine.transformers_calls import TransformersCalls

    plain: dict[str, Any] = {
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "cuda_graph_scope": [],
        "persist_layer_norm": False,
    }
    config = TransformerConfig(**transformer, **plain, num_layers=num_layers)
    looked_up = gpt["position_embedding_type"] == "learned_absolute"
    return Description(
        config,
        [_layer(config, WrappedTorchNorm)] * num_layers,
        WrappedTorchNorm,
        gpt,
        vocabulary,
        gpt["share_embeddings_and_output_weights"],
        found,
        cuts.layouts,
        TransformersCalls(model, vocabulary, output, looked_up=looked_up),
    )


def _layer(config: Any, norm: Any) -> Any:
    """Megatron-Core's own layer of plain torch operations."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    inner = layer.submodules
    inner.input_layernorm = inner.pre_mlp_layernorm = norm
    if config.qk_layernorm:
        attention = inner.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = norm
    return layer


def _moe(model: nn.Module, experts: int) -> dict[str, Any]:
    config: Any = model.config
    if config.output_router_logits or config.router_jitter_noise:
        raise refuse(model, "output_router_logits and router_jitter_noise change its loss")
    return {
        "num_moe_experts": experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "moe_ffn_hidden_size": config.intermediate_size,
    }


def _llama_layer(
    index: int, names: set[str], cuts: Cuts, attention: Any, experts: int | None
) -> Iterator[Correspondence]:
    ours, theirs = f"model.layers.{index}", f"decoder.layers.{index}"
    yield Correspondence((f"{ours}.input_layernorm.weight",), (f"{theirs}.input_layernorm.weight",))
    for kind in ("weight", "bias"):
        parts = tuple(f"{ours}.self_attn.{one}_proj.{kind}" for one in "qkv")
        if parts[0] in names:
            cuts.along(0, *parts)
            yield Correspondence(parts, (f"{theirs}.self_attention.linear_qkv.{kind}",), attention)
    for one in "qk":
        norm = f"{ours}.self_attn.{one}_norm.weight"
        if norm in names:
            yield Correspondence((norm,), (f"{theirs}.self_attention.{one}_layernorm.weight",))
    out = f"{ours}.self_attn.o_proj.weight"
    cuts.along(1, out)
    yield Correspondence((out,), (f"{theirs}.self_attention.linear_proj.weight",))
    yield Correspondence((f"{ours}.post_attention_layernorm.weight",), (f"{theirs}.pre_mlp_layernorm.weight",))
    if experts:
        yield from _experts(f"{ours}.mlp", f"{theirs}.mlp", cuts, experts)
        return
    gate, up, down = (f"{ours}.mlp.{one}_proj.weight" for one in ("gate", "up", "down"))
    cuts.along(0, gate, up)
    cuts.along(1, down)
    yield Correspondence((gate, up), (f"{theirs}.mlp.linear_fc1.weight",), GATED)
    yield Correspondence((down,), (f"{theirs}.mlp.linear_fc2.weight",))


def _experts(ours: str, theirs: str, cuts: Cuts, experts: int) -> Iterator[Correspondence]:
    yield Correspondence((f"{ours}.gate.weight",), (f"{theirs}.router.weight",))
    cuts.along(1, f"{ours}.experts.gate_up_proj", parts=2)
    cuts.along(2, f"{ours}.experts.down_proj")
    for name, linear in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        each = tuple(f"{theirs}.experts.local_experts.{expert}.{linear}.weight" for expert in range(experts))
        yield Correspondence((f"{ours}.experts.{name}",), each, EXPERTS_OUT)


# ---- GPT-2 ----------------------------------------------------------------------------------------------------------


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, Transformers' ``gelu_new``."""
    return F.gelu(x, approximate="tanh")


_GPT2_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
}


def _gpt2(model: nn.Module, cuts: Cuts) -> Description:
    config: Any = model.config
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn:
        raise refuse(model, "its attention is scaled in a way of its own")
    if config.add_cross_attention:
        raise refuse(model, "it attends to another model")
    if config.activation_function not in _GPT2_ACTIVATIONS:
        raise refuse(model, f"activation_function is {config.activation_function!r}")
    if config.embd_pdrop != config.resid_pdrop:
        raise refuse(model, "embd_pdrop and resid_pdrop differ, and Megatron-Core has one for both")
    width = config.n_inner or 4 * config.n_embd
    cuts.divides(n_head=config.n_head, n_inner=width)
    tied = "lm_head.weight" not in {name for name, _ in model.named_parameters()}
    transformer = {
        "hidden_size": config.n_embd,
        "ffn_hidden_size": width,
        "num_attention_heads": config.n_head,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "activation_func": _GPT2_ACTIVATIONS[config.activation_function],
        "add_bias_linear": True,
        "hidden_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
    }
    found = [
        cuts.vocabulary("transformer.wte.weight", EMBEDDING),
        Correspondence(("transformer.wpe.weight",), ("embedding.position_embeddings.weight",)),
    ]
    for index in range(config.n_layer):
        found += _gpt2_layer(index, cuts, config.n_embd // config.n_head)
    found += [
        Correspondence((f"transformer.ln_f.{kind}",), (f"decoder.final_layernorm.{kind}",))
        for kind in ("weight", "bias")
    ]
    if not tied:
        found.append(cuts.vocabulary("lm_head.weight", OUTPUT))
    gpt = {
        "vocab_size": cuts.padded_vocabulary(config.vocab_size),
        "max_sequence_length": config.n_positions,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": tied,
    }
    return _description(model, transformer, config.n_layer, gpt, config.vocab_size, found, cuts, _output_of(model))


def _gpt2_layer(index: int, cuts: Cuts, head_size: int) -> Iterator[Correspondence]:
    ours, theirs = f"transformer.h.{index}", f"decoder.layers.{index}"
    for kind in ("weight", "bias"):
        yield Correspondence((f"{ours}.ln_1.{kind}",), (f"{theirs}.input_layernorm.{kind}",))
        yield Correspondence((f"{ours}.ln_2.{kind}",), (f"{theirs}.pre_mlp_layernorm.{kind}",))
        packed, inner = f"{ours}.attn.c_attn.{kind}", f"{ours}.mlp.c_fc.{kind}"
        dim = 1 if kind == "weight" else 0
        cuts.along(dim, packed, parts=3)
        cuts.along(dim, inner)
        yield Correspondence((packed,), (f"{theirs}.self_attention.linear_qkv.{kind}",), packed_heads(head_size))
        yield Correspondence((inner,), (f"{theirs}.mlp.linear_fc1.{kind}",), TRANSPOSED)
        for mine, other in (("attn.c_proj", "self_attention.linear_proj"), ("mlp.c_proj", "mlp.linear_fc2")):
            if kind == "weight":
                cuts.along(0, f"{ours}.{mine}.weight")
            yield Correspondence((f"{ours}.{mine}.{kind}",), (f"{theirs}.{other}.{kind}",), TRANSPOSED)


def _output_of(model: nn.Module, *, moe: bool = False) -> type:
    from transformers import modeling_outputs as outputs

    if moe:
        return outputs.MoeCausalLMOutputWithPast
    if type(model).__name__.startswith("GPT2"):
        return outputs.CausalLMOutputWithCrossAttentions
    return outputs.CausalLMOutputWithPast


FAMILIES: dict[str, Callable[[nn.Module, Cuts], Description]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _llama,
    "Qwen3ForCausalLM": _llama,
    "MixtralForCausalLM": _llama,
    "GPT2LMHeadModel": _gpt2,
}
