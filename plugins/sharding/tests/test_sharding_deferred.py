"""A construction without memory gives, replayed, the very numbers of an ordinary one."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from drivetrain.api import UnsupportedError
from drivetrain_sharding import Recording, deferred, recording_of

SIDE = 70
"""Squared it is more than deferred.SMALL."""


def both(make: Callable[[], object]) -> tuple[object, object, Recording]:
    """The thing itself, the deferred one, and its recording; the generators must stand at the same place after it."""
    torch.manual_seed(3)
    real = make()
    after = torch.rand(3)
    torch.manual_seed(3)
    recording = Recording()
    with deferred(recording):
        empty = make()
    assert torch.equal(torch.rand(3), after), "the generator went another way"
    return real, empty, recording


class Own(nn.Module):
    """What constructors do beside ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(SIDE, SIDE) * 0.1 + torch.arange(float(SIDE)))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.zeros(SIDE, SIDE)))
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(SIDE, SIDE), std=0.5, a=-0.6, b=0.6))
        self.kaiming = nn.Parameter(nn.init.kaiming_normal_(torch.empty(SIDE, SIDE)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(SIDE, SIDE), 0.1))
        self.low = nn.Parameter(torch.rand(SIDE, SIDE).to(torch.bfloat16))
        self.small = nn.Parameter(torch.rand(3))
        self.register_buffer("mask", torch.ones(SIDE, SIDE).triu(1).bool())
        self.register_buffer("rates", torch.tensor([0.1, 0.2]))
        self.values = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        self.read = torch.rand(2 * SIDE * SIDE).sum().item()
        with torch.no_grad():
            self.kaiming[3:9] *= 2
            self.scaled.mul_(self.orthogonal.std())


class Layers(nn.Module):
    """What libraries ship, copied and initialised again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 64, padding_idx=3)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.copy = copy.deepcopy(layer)
        self.lstm, self.conv = nn.LSTM(64, 64), nn.Conv2d(32, 64, 3)
        self.norm = nn.LayerNorm(8192)
        self.head = nn.Linear(64, 200, bias=False)
        self.head.weight = self.table.weight
        self.apply(self._again)

    @staticmethod
    def _again(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(6))


@pytest.mark.parametrize("make", [Own, Layers])
def test_every_tensor(make: Callable[[], nn.Module]) -> None:
    real, empty, recording = both(make)
    assert isinstance(real, nn.Module)
    assert isinstance(empty, nn.Module)
    expected, found = real.state_dict(keep_vars=True), empty.state_dict(keep_vars=True)
    assert list(expected) == list(found)
    deferred_ones = 0
    for name, tensor in expected.items():
        other = found[name]
        assert type(other) is type(tensor)
        assert (other.shape, other.dtype, other.requires_grad) == (tensor.shape, tensor.dtype, tensor.requires_grad)
        deferred_ones += other.is_meta
        assert other.is_meta == (tensor.numel() >= 1 << 12), name
        assert torch.equal(recording.value(other) if other.is_meta else other, tensor), name
    assert deferred_ones >= 6
    if isinstance(real, Own) and isinstance(empty, Own):
        assert (real.values, real.read) == (empty.values, empty.read)
    if isinstance(empty, Layers):
        assert empty.head.weight is empty.table.weight


def test_only_what_matters_is_replayed() -> None:
    _, empty, recording = both(Layers)
    assert isinstance(empty, Layers)
    steps = recording._needed(recording.ref(empty.copy.linear1.weight).key)
    assert len(steps) == 1, "the last initialisation overwrites the others"


def test_a_generator_of_ones_own() -> None:
    def make() -> Tensor:
        own = torch.Generator().manual_seed(9)
        first = torch.randn(SIDE, SIDE, generator=own)
        return first + torch.empty(SIDE, SIDE).uniform_(generator=own) + torch.rand(1, generator=own)

    real, empty, recording = both(make)
    assert isinstance(empty, Tensor)
    assert torch.equal(recording.value(empty), real)


def test_a_recording_lives_as_long_as_its_tensors() -> None:
    recording = Recording()
    freed = weakref.ref(recording)
    with deferred(recording):
        table = nn.Embedding(SIDE, SIDE)
        with torch.no_grad():
            table.weight.copy_(torch.full((SIDE, SIDE), 2.0))
    del recording
    gc.collect()
    found = recording_of(table.weight)
    assert found is not None
    assert torch.equal(found.value(table.weight), torch.full((SIDE, SIDE), 2.0))
    del found
    table.weight = nn.Parameter(torch.ones(SIDE, SIDE))  # as prepare gives it values
    gc.collect()
    assert freed() is None, "it keeps a copy of what the parameter was given"


def test_what_cannot_be_recorded_says_so() -> None:
    with pytest.raises(UnsupportedError, match="init_empty_weights"), deferred(Recording()):
        torch.randn(SIDE, SIDE).nonzero()
    outside = torch.empty(SIDE, SIDE, device="meta")
    with pytest.raises(UnsupportedError, match="elsewhere"), deferred(Recording()):
        outside.mul_(2)
