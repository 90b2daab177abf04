"""Runs whose checkpoints the tests of ``drivetrain checkpoint`` look at."""

from __future__ import annotations

import torch
from torch import nn

from drivetrain import Accelerator


def small_job(path):
    """Save a small model with tied weights; its whole state dict."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[0].weight = model[1].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.save_state(path)
    state = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state


def llama_config():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def llama_job(path, backend):
    """Train a tiny Llama for a step and save it; its logits for some words."""
    from transformers import LlamaForCausalLM

    from drivetrain import load_config

    overrides = {"distributed_type": backend, "use_cpu": True}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    words = torch.arange(24).reshape(2, 12)
    accelerator.backward(model(input_ids=words, labels=words).loss)
    optimizer.step()
    accelerator.save_state(path)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=words).logits.clone()
    accelerator.end_training()
    return logits


def pretrained_job(folder):
    """The same logits from ``from_pretrained``, in a process of its own: it changes global settings."""
    from transformers import LlamaForCausalLM

    llama_config().save_pretrained(folder)
    model, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(24).reshape(2, 12)).logits
    return logits, {name: list(each) for name, each in report.items() if each}
