"""The kernels that a trace for an accelerator runs: what they keep, in which dtype they compute, whom they concern."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from drivetrain_planner.kernels import kernels_of


class Kept:
    """Bytes of the storages that autograd keeps of what is computed."""

    def __init__(self):
        self.storages = {}

    @property
    def bytes(self):
        return sum(each.nbytes() for each in self.storages.values())

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept)
        self.hooks.__enter__()
        return self

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        return tensor

    def __exit__(self, *raised):
        self.hooks.__exit__(*raised)


@pytest.fixture
def fake():
    with FakeTensorMode() as mode:
        yield mode


def test_dropout_keeps_a_byte_an_element(fake):
    x = torch.ones(64, 32, requires_grad=True)
    with kernels_of("cuda"), Kept() as device:
        F.dropout(x, 0.1).sum().backward()
    with kernels_of("cpu"), Kept() as cpu:
        F.dropout(x, 0.1).sum().backward()
    assert (device.bytes, cpu.bytes) == (64 * 32, 4 * 64 * 32)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_all_or_nothing_is_torchs_own(p):
    x = torch.ones(4, requires_grad=True)
    with kernels_of("cuda"):
        assert F.dropout(x, p).tolist() == [1.0 - p] * 4
        assert F.dropout(x, 0.5, training=False) is x


# Scores of one head are as large as 16 heads of queries.
TOKENS, HEAD, HEADS = 256, 16, 4


@pytest.mark.parametrize(
    ("dtype", "kind", "keeps_scores"),
    [
        (torch.float32, "dropout", False),
        (torch.bfloat16, "dropout", False),
        (torch.float32, "mask", False),
        (torch.bfloat16, "mask", False),
        (torch.bfloat16, "grouped", False),
        (torch.float32, "grouped", True),
        (torch.float32, "odd head", True),
        (torch.bfloat16, "odd head", False),
    ],
)
def test_attention_keeps_no_scores_where_a_kernel_takes_it(fake, dtype, kind, keeps_scores):
    size = HEAD - 1 if kind == "odd head" else HEAD
    query = torch.ones(1, HEADS, TOKENS, size, dtype=dtype, requires_grad=True)
    few = torch.ones(1, HEADS // 2, TOKENS, size, dtype=dtype, requires_grad=True)
    key = few if kind == "grouped" else query * 2
    # A mask of each query and key is as large as the scores of a head: these are of keys.
    given = {
        "dropout": {"dropout_p": 0.1, "is_causal": True},
        "mask": {"attn_mask": torch.ones(1, 1, 1, TOKENS, dtype=torch.bool)},
        "grouped": {"enable_gqa": True},
        "odd head": {},
    }[kind]
    with kernels_of("cuda"), Kept() as kept:
        output = F.scaled_dot_product_attention(query, key, key, **given)
        output.float().sum().backward()
    assert output.shape == query.shape
    assert (kept.bytes >= HEADS * TOKENS * TOKENS * dtype.itemsize) == keeps_scores


def test_attention_inside_of_a_layer_of_torch(fake):
    layer = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
    x = torch.ones(2, TOKENS, 64)
    with kernels_of("cuda"), Kept() as kept:
        layer(x, x, x, need_weights=False)[0].sum().backward()
    assert kept.bytes < 2 * 4 * TOKENS * TOKENS * 4


def test_autocast_computes_in_float32_what_a_device_does(fake):
    linear, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    x = torch.ones(2, 8)

    def dtypes():
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
            results = (
                y,
                y.pow(2),
                norm(y),
                y.softmax(-1),
                y.softmax(-1, dtype=torch.float64),
                y.sum(),
                y.sum(None),
                y + 1,
            )
            return [each.dtype for each in results]

    low, full, asked = torch.bfloat16, torch.float32, torch.float64
    with kernels_of("cuda"):
        assert dtypes() == [low, full, full, full, asked, full, full, low]
    assert dtypes()[1] == low


def test_other_threads_keep_their_kernels():
    query = torch.rand(1, 2, 8, 4)
    right, found = F.scaled_dot_product_attention(query, query, query), []
    with kernels_of("cuda"):
        other = threading.Thread(target=lambda: found.append(F.scaled_dot_product_attention(query, query, query)))
        other.start()
        other.join()
    assert torch.equal(found[0], right)


def test_the_kernels_are_the_cpus_again_afterwards():
    query = torch.rand(1, 2, 8, 4)
    right = F.scaled_dot_product_attention(query, query, query)
    with pytest.raises(ZeroDivisionError), kernels_of("cuda"):
        raise ZeroDivisionError
    assert torch.equal(F.scaled_dot_product_attention(query, query, query), right)
    assert type(F.dropout(query.requires_grad_(), 0.5).grad_fn).__name__ == "MulBackward0"
