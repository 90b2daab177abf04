"""Ranges of a tensor's elements as boxes: exact cover, in order, few; and torch's own planners save and fill them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from drivetrain import Accelerator, load_config
from drivetrain.api.programs import checkpoint
from drivetrain_deepspeed.flatshard import FlatShard, boxes
from drivetrain_testing import spawn


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_boxes_are_the_range_and_nothing_else(case):
    shape, start, stop = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    marks = torch.zeros(shape, dtype=torch.int64)
    found = list(FlatShard(torch.arange(start, stop), start, shape).boxes())
    assert len(found) <= max(1, 2 * len(shape) - 1)
    for offsets, part in found:
        box = tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))
        assert torch.equal(whole[box], part)
        marks[box] += 1
    expected = torch.zeros(math.prod(shape), dtype=torch.int64)
    expected[start:stop] = 1
    assert torch.equal(marks.flatten(), expected)


@given(ranges(), st.integers(1, 4))
def test_ranks_that_share_a_row_hold_one_tensor_together(case, num_ranks):
    shape, _, _ = case
    numel = math.prod(shape)
    cuts = [numel * rank // num_ranks for rank in range(num_ranks + 1)]
    states = [{"x": FlatShard(torch.arange(low, high), low, shape)} for low, high in itertools.pairwise(cuts)]
    planners = [DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False) for _ in states]
    for planner, state in zip(planners, states, strict=True):
        planner.set_up_planner(state)
    _, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    chunks = metadata.state_dict_metadata["x"].chunks
    assert sum(math.prod(chunk.sizes) for chunk in chunks) == numel


def save_linear(folder):
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "single", "use_cpu": True}, environ={}))
    model = accelerator.prepare(nn.Linear(4, 5))
    accelerator.save_state(folder)
    return model.module.weight.detach()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_fills_it_from_a_checkpoint(tmp_path):
    folder = tmp_path / "saved"
    (weight,) = spawn(save_linear, 1, folder)
    shard = FlatShard(torch.full((10,), -1.0), 4, tuple(weight.shape))
    dcp.load({"model.weight": shard}, storage_reader=checkpoint.DrivetrainReader(folder), no_dist=True)
    assert torch.equal(shard.local, weight.flatten()[4:14])


def test_it_stands_for_the_whole_and_computes_nothing():
    shard = FlatShard(torch.arange(3.0), 2, (3, 4))
    assert shard.shape == (3, 4)
    assert shard.detach() is shard
    assert repr(shard) == "FlatShard(2:5 of (3, 4), torch.float32)"
    with pytest.raises(TypeError, match="does not compute"):
        shard.clone()
    with pytest.raises(TypeError):
        shard + 1
    inner, start = shard.__tensor_flatten__()
    other = FlatShard.__tensor_unflatten__({inner[0]: shard.local + 1}, start, shard.shape, shard.stride())
    assert (repr(other), other.local.tolist()) == (repr(shard), [1.0, 2.0, 3.0])
    assert list(boxes((), 0, 1)) == [((), ())]
    assert list(boxes((0, 3), 0, 0)) == [((0, 0), (0, 3))]
