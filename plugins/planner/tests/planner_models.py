"""Small models of several families, made alike on every rank and on the meta device."""

from __future__ import annotations

import torch


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    return GPT2LMHeadModel(config)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=640, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=96, moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, num_experts=8, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=3, intermediate_size=384, image_size=32, patch_size=4,
        num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=96, d_kv=24, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config)


def tokens(samples=4, length=64):
    ids = torch.arange(samples * length).view(samples, length) % 500
    return {"input_ids": ids, "labels": ids.clone()}


def images(samples=4):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(samples, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(samples) % 10}


def pictures(samples=4):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(samples, 3, 64, 64, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(samples) % 10}


MODELS = {
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "qwen3_moe": (qwen3_moe, tokens),
    "vit": (vit, images),
    "t5": (t5, tokens),
    "resnet": (resnet, pictures),
}
