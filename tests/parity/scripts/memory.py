"""Parameters that share memory with one another, with buffers or with a tensor of the script's."""

from __future__ import annotations

import torch
from parity_common import CLASSES, FEATURES, build, loader, mean, points, result, script
from torch import nn
from torch.nn import functional as F


class Auto(nn.Module):
    """An encoder and a decoder; ``(B, F) -> (B, F)``."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def reconstruct(accelerator, model, lr=0.2, momentum=0.0, after=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, _ in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        accelerator.backward(loss)
        optimizer.step()
        after()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def decoder_is_a_view_of_the_encoder(accelerator):
    """An autoencoder whose decoder's parameter is ``nn.Parameter(encoder.weight.t())``"""
    model = build(Auto)
    model.decoder.weight = nn.Parameter(model.encoder.weight.t())
    return reconstruct(accelerator, model)


class Twins(nn.Module):
    """Two towers; ``(B, F) -> (B, F)``."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return torch.tanh(self.left(x)) - 0.5 * torch.tanh(self.right(2 * x))


@script()
def towers_with_one_data(accelerator):
    """Two towers are tied by ``right.weight.data = left.weight.data``, with momentum"""
    model = build(Twins)
    model.right.weight.data = model.left.weight.data
    return reconstruct(accelerator, model, momentum=0.9)


@script()
def part_of_a_larger_parameter(accelerator):
    """A small layer's parameter is the upper rows of a larger one's, as in slimmable networks"""
    model = build(Slim)
    return reconstruct(accelerator, model)


class Slim(nn.Module):
    """A wide path, and a narrow one in its upper rows; ``(B, F) -> (B, F)``."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.out = nn.Linear(FEATURES, 16), nn.Linear(FEATURES, 4), nn.Linear(20, FEATURES)
        self.narrow.weight = nn.Parameter(self.wide.weight[:4])

    def forward(self, x):
        return self.out(torch.tanh(torch.cat([self.wide(x), self.narrow(2 * x)], 1)))


class Anchored(nn.Module):
    """A buffer is what the weight was at first, if it is a copy; ``(B, F) -> (B, F)``."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("anchor", self.layer.weight.data)

    def forward(self, x):
        return torch.tanh(self.layer(x)) + 0.1 * x @ self.anchor.t()


@script()
def buffer_in_the_memory_of_a_weight(accelerator):
    """``register_buffer("anchor", weight.data)`` without ``clone``: the buffer follows the weight"""
    return reconstruct(accelerator, build(Anchored))


class Vocabularies(nn.Module):
    """Two embeddings and a head; ``(B,), (B,) -> (B, C)``."""

    def __init__(self, vectors):
        super().__init__()
        self.left = nn.Embedding.from_pretrained(vectors)
        self.right = nn.Embedding.from_pretrained(vectors)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, left, right):
        return self.head(torch.tanh(self.left(left) - 2 * self.right(right)))


def embed(accelerator, unfreezes_in_step=-1):
    model = build(lambda: Vocabularies(torch.randn(20, FEATURES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    words = torch.arange(48) * 7 % 20
    batches = loader(words, words.roll(5), points()[1])
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for step, (left, right, y) in enumerate(batches):
        if step == unfreezes_in_step:
            model.left.weight.requires_grad_(True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(left, right), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def frozen_embeddings_of_one_tensor(accelerator):
    """Two ``nn.Embedding.from_pretrained`` of one tensor of word vectors, both frozen"""
    return embed(accelerator)


@script()
def one_of_two_frozen_embeddings_is_trained_later(accelerator):
    """One of two frozen embeddings in one memory is unfrozen in the third step: the other follows it"""
    return embed(accelerator, unfreezes_in_step=2)


@script()
def prompt_in_the_memory_of_a_weight(accelerator):
    """A parameter beside the model is the first rows of the model's weight, and the optimizer holds both"""
    model = build(Auto)
    prompt = nn.Parameter(model.encoder.weight.data[:1])
    optimizer = torch.optim.SGD([*model.parameters(), prompt], lr=0.2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, _ in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x + prompt), x)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def slices_of_a_vector_that_is_scaled(accelerator):
    """All parameters lie in one flat vector, which the script shrinks after every step"""
    model = build(Auto)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    begin = 0
    for p in model.parameters():
        p.data = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    return reconstruct(accelerator, model, after=lambda: flat.mul_(0.9))


@script()
def slices_of_a_vector_that_is_gone(accelerator):
    """``vector_to_parameters`` leaves all parameters in one vector, which nobody else holds"""
    model = build(Auto)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())
    del vector
    return reconstruct(accelerator, model)


@script()
def columns_of_one_matrix(accelerator):
    """Two weights are the even and the odd columns of one matrix that nobody else holds, and share no element"""
    model = build(Twins)
    wide = torch.randn(FEATURES, 2 * FEATURES) * 0.3
    model.left.weight.data, model.right.weight.data = wide[:, ::2], wide[:, 1::2]
    del wide
    return reconstruct(accelerator, model)


@script()
def two_models_with_one_memory(accelerator):
    """Two models, prepared one after the other, whose weights are one memory"""
    first, second = build(lambda: nn.Linear(FEATURES, FEATURES)), build(lambda: nn.Linear(FEATURES, FEATURES))
    second.weight.data = first.weight.data
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    first, optimizers[0] = accelerator.prepare(first, optimizers[0])
    second, optimizers[1], batches = accelerator.prepare(second, optimizers[1], loader())
    losses = []
    for x, _ in batches:
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(torch.tanh(model(x)), x)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, first=first, second=second)


@script()
def tied_as_the_advice_says(accelerator):
    """What the refusal advises: one parameter, used transposed where the other was"""
    model = build(Tied)
    return reconstruct(accelerator, model)


class Tied(nn.Module):
    """An autoencoder with one weight; ``(B, F) -> (B, F)``."""

    def __init__(self):
        super().__init__()
        self.encoder, self.bias = nn.Linear(FEATURES, 16), nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x):
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)
