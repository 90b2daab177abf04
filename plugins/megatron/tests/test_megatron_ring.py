"""A ring without other ranks, on which the planner counts what a rank holds and sends."""

from __future__ import annotations

import torch

from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.layout import Layout


def test_a_simulated_ring_has_the_shapes_of_the_first_rank_and_notes_what_it_would_send():
    ring = Ring(None, simulated=3)
    whole = torch.arange(7.0)
    layout = Layout((7,), 0)
    part = ring.part(whole, layout)
    assert part.tolist() == [0, 1, 2]
    assert ring.collect(part, layout).shape == (7,)
    assert ring.add_up(part).shape == (3,)
    assert ring.sent == [("all_gather", 9 * 4), ("all_reduce", 3 * 4)]


def test_one_rank_sends_nothing():
    ring = Ring(None)
    assert ring.add_up(torch.ones(2)).tolist() == [1, 1]
    assert not ring.sent
