"""Language models of Transformers, with ragged labels."""

from __future__ import annotations

import torch
from parity_common import BATCH, loader, result, script
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

ROWS, TIME, WORDS = 3 * BATCH, 6, 23


def llama():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, bos_token_id=None, eos_token_id=None, **sizes)
    )


def text():
    """``(N, T)`` words, and labels of which row ``i`` counts ``1 + i % 5``."""
    ids = torch.randint(WORDS, (ROWS, TIME), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[torch.arange(TIME)[None] > 1 + torch.arange(ROWS)[:, None] % 5] = -100
    return ids, labels


def token_loss(logits, labels):
    """Summed cross entropy of the next words."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def fit(accelerator, model, batches, step):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for batch in batches:
        loss_sum, items = step(model, *batch)
        optimizer.zero_grad()
        accelerator.backward(loss_sum, num_items=items)
        optimizer.step()
        losses.append((accelerator.reduce(loss_sum.detach()) / accelerator.reduce(items)).item())
    return result(accelerator, losses, model=model)


@script()
def ragged_causal_language_model(accelerator):
    """A Llama whose rows count unlike many words: ``accelerator.backward(loss_sum, num_items=n)``."""

    def step(model, ids, labels):
        return token_loss(model(input_ids=ids).logits, labels), (labels[:, 1:] != -100).sum()

    return fit(accelerator, llama(), loader(*text()), step)


def _accumulated():
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids, labels = text()
    losses = []
    for rows in (slice(0, 3 * BATCH),):
        loss = token_loss(model(input_ids=ids[rows]).logits, labels[rows]) / (labels[rows, 1:] != -100).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


@script(reference=_accumulated, gradient_accumulation_steps=3)
def ragged_accumulation(accelerator):
    """The same with a window of three batches: the numbers of one batch three times as large."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*text()))
    total, items = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    for ids, labels in batches:
        with accelerator.accumulate(model):
            loss_sum, count = token_loss(model(input_ids=ids).logits, labels), (labels[:, 1:] != -100).sum()
            accelerator.backward(loss_sum, num_items=count)
            optimizer.step()
            optimizer.zero_grad()
            total, items = total + loss_sum.detach(), items + count
    return result(accelerator, [(accelerator.reduce(total) / accelerator.reduce(items)).item()], model=model)


@script()
def loss_of_the_model(accelerator):
    """``model(input_ids=..., labels=...).loss`` where each row counts as many words as the others."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(text()[0]))
    losses = []
    for (ids,) in batches:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return result(accelerator, losses, model=model)


@script(count_items=True)
def ragged_loss_of_the_model(accelerator):
    """``model(input_ids=..., labels=...).loss`` with ragged labels and ``Accelerator(count_items=True)``."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*text()))
    for ids, labels in batches:
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def language_model_generates(accelerator):
    """``model.generate`` between two epochs, and the training goes on."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(text()[0]))
    losses = []
    for _ in range(2):
        for (ids,) in batches:
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        with torch.no_grad():
            said = accelerator.unwrap_model(model).generate(text()[0][:2], max_new_tokens=3, do_sample=False)
        model.train()
        losses.append(said.float().mean().item())
    return result(accelerator, losses, model=model)


@script(follows="language_model_generates")
def language_model_generates_without_a_cache(accelerator):
    """``model.generate(..., use_cache=False)`` after an epoch, and the training goes on."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(text()[0]))
    losses = []
    for _ in range(2):
        for (ids,) in batches:
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        with torch.no_grad():
            said = accelerator.unwrap_model(model).generate(
                text()[0][:2], max_new_tokens=3, do_sample=False, use_cache=False
            )
        model.train()
        losses.append(said.float().mean().item())
    return result(accelerator, losses, model=model)


@script()
def sequence_to_sequence(accelerator):
    """A T5 with ragged labels: the decoder is fed the shifted labels by the model."""
    torch.manual_seed(1)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=WORDS, dropout_rate=0.0, feed_forward_proj="gated-gelu", **sizes)
    model = T5ForConditionalGeneration(config)
    ids, labels = text()

    def step(model, ids, labels):
        logits = model(input_ids=ids, labels=labels).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return loss, (labels != -100).sum()

    return fit(accelerator, model, loader(ids, labels), step)


@script()
def classifier_of_transformers(accelerator):
    """A small BERT with padded rows, fine-tuned on classes."""
    torch.manual_seed(1)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )
    ids, labels = text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    data = loader(ids, (labels != -100).long(), torch.arange(ROWS) % 3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, data)
    losses = []
    for ids, mask, y in batches:
        loss = model(input_ids=ids, attention_mask=mask, labels=y).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return result(accelerator, losses, model=model)
