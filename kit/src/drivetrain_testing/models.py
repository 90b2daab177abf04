"""Small models and data sets that the cases share; all are functions of a seed.

Shapes: ``B`` samples, ``F`` = 6 features, ``C`` = 4 classes, ``T`` = 5 positions, ``V`` = 11 words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES, CLASSES, POSITIONS, WORDS = 6, 4, 5, 11
IGNORED = -100
"""Label that does not count."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from this seed inside, and restore the process's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Dense(nn.Module):
    """Two layers; ``(B, F) -> (B, C)``. Notes the dtype it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, CLASSES)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.seen.append(hidden.dtype)
        output: Tensor = self.second(hidden)
        return output


class Words(nn.Module):
    """An embedding whose table is the output layer's too (tied weights); ``(B, T) -> (B, T, V)``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.mix(self.table(x))))
        return output


class Speaking(Words):
    """Computes its own loss from labels: the mean over those of the next positions, as in Transformers.

    ``(B, T), (B, T) -> {"loss": (), "logits": (B, T, V)}``.
    """

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        if labels is None:
            return {"logits": logits}
        each, following = shifted(logits, labels)
        loss = F.cross_entropy(each.flatten(0, 1), following.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


class Frozen(Dense):
    """:class:`Dense` whose first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Counting(nn.Module):
    """Has buffers: a float one that forward reads, an integer one that forward counts in; and a parameter of size 1."""

    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Dense()
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        output: Tensor = self.inner(x) * self.scale * self.gain
        return output


class Branching(nn.Module):
    """Uses one branch of two: the other's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(FEATURES, CLASSES)
        self.unused = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.used(x)
        return output


class Normed(nn.Module):
    """Batch-independent normalisation and dropout that is off: a common block; ``(B, F) -> (B, C)``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.0), nn.Linear(12, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


class BatchNormed(nn.Module):
    """Normalises by statistics of the batch, and keeps running ones in buffers; ``(B, F) -> (B, C)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return output


class Labelled(nn.Module):
    """Computes its own loss where it is given labels; ``(B, F), (B,) -> {"loss": (), "logits": (B, C)}``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits: Tensor = self.head(torch.tanh(self.body(x)))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Indexed(nn.Module):
    """Has parameters that are no floating-point numbers: an order of features, and a switch for each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)
        self.order = nn.Parameter(torch.arange(FEATURES - 1, -1, -1), requires_grad=False)
        self.switch = nn.Parameter(torch.arange(FEATURES) != 2, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.inner(x[:, self.order] * self.switch)))
        return output


MODELS: dict[str, type[nn.Module]] = {
    "dense": Dense,
    "words": Words,
    "speaking": Speaking,
    "frozen": Frozen,
    "counting": Counting,
    "branching": Branching,
    "normed": Normed,
    "batch_normed": BatchNormed,
    "labelled": Labelled,
    "indexed": Indexed,
}


def build(name: str, seed: int = 1) -> Any:
    """A model of :data:`MODELS`, its parameters a function of the seed."""
    with seeded(seed):
        return MODELS[name]()


def dense_data(num_samples: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """``(N, F)`` features and ``(N,)`` labels, all of which count."""
    with seeded(seed):
        return torch.randn(num_samples, FEATURES), torch.randint(CLASSES, (num_samples,))


def ragged_data(num_samples: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """``(N, T)`` words and labels; sample ``i`` counts ``i % (T + 1)`` positions, so some count none."""
    with seeded(seed):
        words = torch.randint(WORDS, (num_samples, POSITIONS))
        labels = torch.randint(WORDS, (num_samples, POSITIONS))
    counted = torch.arange(num_samples).unsqueeze(1) % (POSITIONS + 1)
    labels[torch.arange(POSITIONS).unsqueeze(0) >= counted] = IGNORED
    return words, labels


def loss_sum(output: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy summed over the labels that count; 0-d, reaches every parameter even when none counts."""
    logits = output.flatten(0, -2).float()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """``(B, T - 1, V)`` and ``(B, T - 1)``: what each position says of the next one, and that one's label."""
    return logits[:, :-1], labels[:, 1:]


def num_items(labels: Tensor) -> Tensor:
    """Return the number of labels that count, 0-d."""
    return (labels != IGNORED).sum()
