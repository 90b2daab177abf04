"""Models as users give them to the kit: a plain one, one of Transformers, and mistakes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def plain():
    x = torch.randn(24, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    return model, TensorDataset(x, x[:, :4].argmax(dim=1)), loss


def llama():
    """Rows of another length of labels each; the model computes its own loss from what it is given as keywords."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        use_cache=False,
    )
    rows = []
    for number in range(12):
        ids = torch.randint(32, (8,))
        labels = ids.clone()
        labels[: number % 5] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return LlamaForCausalLM(config), rows


def random():
    model, dataset, function = plain()
    return nn.Sequential(model, nn.Dropout(0.5)), dataset, function


def without_loss():
    model, dataset, _ = plain()
    return model, dataset


def nothing():
    return None


def empty():
    return plain()[0], []
