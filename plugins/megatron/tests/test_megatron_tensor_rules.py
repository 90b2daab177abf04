"""Operations on sharded tensors give the results and the gradients that they give on whole ones.

Tolerance 1e-12 in float64: parts are added up in another order than the whole is.
"""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drivetrain.api import UnsupportedError
from drivetrain_megatron.tensor import rules
from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.layout import Layout, follow_view
from drivetrain_megatron.tensor.sharded import Sharded, by_gathering, full_tensor, sharded, warn_anew
from drivetrain_testing import spawn

assert rules

Case = tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]
"""A function, and for each of its tensors the shape and, if it is cut, the dim or the dim and the parts."""


def _heads(x: Tensor) -> Tensor:
    q, k, v = (each.view(2, 3, 4, 2).transpose(1, 2) for each in x.split(8, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 3, 8)


def _alibi(q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    return ((q @ k.transpose(-1, -2)) + slopes.view(1, 4, 1, 1)).softmax(-1)


def _in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    z += y
    z.mul_(0.5).relu_()
    return z


LABELS = torch.tensor([1, -100, 6, 0, 3, -100])
PICKED = torch.tensor([2, 0, 1]).view(1, 3, 1).expand(2, 3, 6)
MASK = torch.tensor([[True, False, True], [False, True, True]])

CASES: dict[str, Case] = {
    "broadcasts beside a cut dim": (lambda x, y: x * y + 2.0, [((2, 3, 6), 2), ((3, 1), None)]),
    "cuts a plain operand alike": (lambda x, y: x / y, [((2, 3, 6), 2), ((6,), None)]),
    "two cut along other dims": (lambda x, y: x + y, [((2, 4, 6), 1), ((2, 4, 6), 2)]),
    "uneven parts": (lambda x, y: torch.sigmoid(x) * y, [((2, 5), 1), ((2, 5), 1)]),
    "where and masks": (lambda x: torch.where(x > 0, x, 0.1 * x).masked_fill(x > 1, 3.0), [((4, 6), 0)]),
    "in place": (_in_place, [((2, 6), 1), ((6,), None)]),
    "splits a dim": (lambda x: x.view(2, 3, 4, 2).transpose(1, 2), [((2, 3, 8), 2)]),
    "merges dims after it": (lambda x: x.flatten(1), [((3, 4, 5), 1)]),
    "merges dims before it": (lambda x: x.reshape(8, 6).sin(), [((2, 4, 6), 1)]),
    "packed by a view": (lambda x: x.view(2, 3, 4, 2).unbind(1)[1], [((2, 24), (1, (8, 8, 8)))]),
    "cannot follow a view": (lambda x: x.reshape(5, 6), [((6, 5), 0)]),
    "a fused layer": (_heads, [((2, 3, 24), (2, (8, 8, 8)))]),
    "slices into parts": (lambda x: x[..., 4:].exp() * x[..., :4].sum(-1, keepdim=True), [((2, 8), (1, (4, 4)))]),
    "slices across parts": (lambda x: x[:, 1:5], [((2, 8), 1)]),
    "indexes other dims": (lambda x: x[:, -1, None, ..., 0], [((2, 3, 4, 2), 2)]),
    "a boolean mask": (lambda x: x[MASK], [((2, 3, 6), 2)]),
    "indices of another dim": (lambda x: x[torch.tensor([2, 0])], [((3, 6), 1)]),
    "expands": (lambda x: x[:, :, None].expand(-1, -1, 3, -1).reshape(2, 12, 3), [((2, 4, 3), 1)]),
    "repeats heads": (lambda x: x.repeat_interleave(3, dim=1), [((2, 4, 3), 1)]),
    "stacks and joins": (lambda x, y: torch.cat([torch.stack([x, x]), y[None]], 0), [((3, 4), 1), ((3, 4), None)]),
    "joins along the cut dim": (lambda x, y: torch.cat([x, y], -1).cos(), [((2, 4), 1), ((2, 6), 1)]),
    "permutes": (lambda x: x.permute(2, 0, 1).unsqueeze(1).squeeze().mT, [((2, 3, 4), 2)]),
    "column": (F.linear, [((2, 3, 5), None), ((6, 5), 0), ((6,), 0)]),
    "row": (F.linear, [((2, 3, 6), 2), ((5, 6), 1), ((5,), None)]),
    "row of a plain input": (F.linear, [((2, 6), None), ((5, 6), 1)]),
    "whole matrix, cut batch": (F.linear, [((2, 3, 5), 1), ((6, 5), None), ((6,), None)]),
    "column of a cut sequence": (lambda x, w: x @ w, [((2, 5, 3), 1), ((3, 4), 1)]),
    "transposed layer": (lambda x, w, b: torch.addmm(b, x, w), [((4, 6), None), ((6, 8), 1), ((8,), 1 - 1)]),
    "scaled product added": (
        lambda a, x, w: torch.addmm(a, x, w, beta=0.5, alpha=2),
        [((4, 6), 1), ((4, 3), None), ((3, 6), 1)],
    ),
    "einsum": (lambda x, w: torch.einsum("bti,hio->bhto", x, w), [((2, 3, 4), None), ((6, 4, 2), 0)]),
    "einsum over the cut dim": (lambda x, w: torch.einsum("bhto,hio->bti", x, w), [((2, 6, 3, 2), 1), ((6, 4, 2), 0)]),
    "biases by heads": (_alibi, [((2, 4, 3, 2), 1), ((2, 4, 3, 2), 1), ((4,), None)]),
    "grouped queries": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [((2, 4, 3, 2), 1), ((2, 2, 3, 2), 1), ((2, 2, 3, 2), 1)],
    ),
    "attention over a cut sequence": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [((2, 4, 6, 2), 2), ((2, 4, 6, 2), 2), ((2, 4, 6, 2), None)],
    ),
    "norm": (lambda x, g, b: F.layer_norm(x, (4,), g, b), [((2, 6, 4), 1), ((4,), None), ((4,), None)]),
    "rms norm": (lambda x, g: F.rms_norm(x, (4,), g, 1e-6), [((2, 6, 4), 1), ((4,), None)]),
    "norm over the cut dim": (lambda x, g: F.layer_norm(x, (4,), g), [((2, 3, 4), 2), ((4,), None)]),
    "sums": (lambda x: x.sum(-1) * x.mean() + x.sum((0, 1), keepdim=True)[..., 0], [((3, 4, 6), 2)]),
    "along other dims": (lambda x: x.softmax(1).cumsum(0).amax(1), [((3, 4, 6), 2)]),
    "softmax over the cut dim": (lambda x: x.softmax(-1) + x.log_softmax(-1) * x.logsumexp(-1, True), [((3, 6), 1)]),
    "picked by an index": (lambda x: x.gather(1, PICKED) + x.scatter(1, PICKED, 0.0), [((2, 3, 6), 2)]),
    "put by an index": (lambda x, y: (x * 1).scatter_(1, PICKED, y), [((2, 3, 6), 2), ((2, 3, 6), 2)]),
    "sorted without a rule": (lambda x: x.sort(-1)[0], [((3, 6), 1)]),
    "words": (lambda w: F.embedding(LABELS.clamp(min=0), w, padding_idx=3), [((7, 4), 0)]),
    "features of words": (lambda w: F.embedding(LABELS.clamp(min=0), w), [((7, 4), 1)]),
    "cross entropy": (lambda x: F.cross_entropy(x, LABELS), [((6, 8), 1)]),
    "cross entropy, uneven": (lambda x: F.cross_entropy(x, LABELS, reduction="sum"), [((6, 7), 1)]),
    "cross entropy, smoothed": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), [((6, 7), 1)]),
    "cross entropy, weighted": (
        lambda x: F.cross_entropy(x, LABELS, torch.arange(1.0, 9, dtype=x.dtype)),
        [((6, 8), 1)],
    ),
    "cross entropy of positions": (lambda x: F.cross_entropy(x, LABELS, reduction="none"), [((6, 8), 0)]),
    "cross entropy, deep": (lambda x: F.cross_entropy(x, LABELS.view(2, 3)), [((2, 8, 3), 1)]),
    "cross entropy of chances": (lambda x, p: F.cross_entropy(x, p.softmax(-1)), [((6, 8), 1), ((6, 8), None)]),
    "shifted as transformers do": (
        lambda x: F.cross_entropy(
            x.float()[:, :-1].contiguous().view(-1, 8).double(), LABELS.view(2, 3)[:, 1:].flatten()
        ),
        [((2, 3, 8), 2)],
    ),
    "negative log likelihood": (lambda x: F.nll_loss(x.log_softmax(-1), LABELS), [((6, 8), 1)]),
}


def compare_all(names: list[str]) -> dict[str, str]:
    """For each case that goes wrong, what is wrong."""
    dist.init_process_group("gloo")
    logging.getLogger("drivetrain_megatron.tensor.sharded").setLevel(logging.ERROR)
    ring = Ring(dist.group.WORLD)
    wrong = {name: text for name in names if (text := compare(ring, *CASES[name]))}
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def compare(ring: Ring, function: Callable[..., Any], tensors: list[tuple[tuple[int, ...], Any]]) -> str:
    torch.manual_seed(3)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape, _ in tensors]
    expected = function(*leaves)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), leaves)
    given = []
    for leaf, (shape, cut) in zip(leaves, tensors, strict=True):
        if cut is None:
            given.append(leaf)
            continue
        dim, parts = cut if isinstance(cut, tuple) else (cut, None)
        layout = Layout(shape, dim, parts)
        given.append(sharded(ring.cut(leaf, layout), layout, ring))
    found = function(*given)
    if tuple(found.shape) != tuple(expected.shape):
        return f"shape {tuple(found.shape)}"
    whole = full_tensor(found)
    if not torch.allclose(whole, expected, atol=1e-12):
        return f"result differs by {(whole - expected).abs().max()}"
    for place, (own, right) in enumerate(
        zip(torch.autograd.grad((whole * weight).sum(), leaves), gradients, strict=True)
    ):
        if not torch.allclose(own, right, atol=1e-12):
            return f"gradient {place} differs by {(own - right).abs().max()}"
    return ""


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_and_gradients(ranks: int) -> None:
    # On three ranks no head divides: what cannot be followed is gathered, and right all the same.
    assert spawn(compare_all, ranks, list(CASES), timeout=100) == [{}] * ranks


def stay_cut() -> list[str]:
    dist.init_process_group("gloo")
    ring = Ring(dist.group.WORLD)
    torch.manual_seed(0)
    kinds = []
    for name in ("a fused layer", "merges dims before it", "column", "grouped queries", "softmax over the cut dim"):
        function, tensors = CASES[name]
        given = []
        for shape, cut in tensors:
            dim, parts = cut if isinstance(cut, tuple) else (cut, None)
            whole = torch.randn(shape)
            layout = Layout(shape, dim or 0, parts)
            given.append(whole if cut is None else sharded(ring.part(whole, layout), layout, ring))
        kinds.append(repr(function(*given)))
    logits = sharded(torch.randn(6, 4), Layout((6, 8), 1), ring)
    kinds.append(type(F.cross_entropy(logits, LABELS)).__name__)
    dist.barrier()
    dist.destroy_process_group()
    return kinds


def test_what_can_stay_cut_does() -> None:
    kinds = spawn(stay_cut, 2)[0]
    assert kinds[0] == "Sharded(dim 2 of [2, 3, 8], here [2, 3, 4], torch.float32)"
    assert all(kind.startswith("Sharded(dim ") for kind in kinds[:5])
    assert kinds[5] == "Tensor"


def random_numbers() -> dict[str, Any]:
    dist.init_process_group("gloo")
    ring = Ring(dist.group.WORLD)
    torch.manual_seed(5)
    part = sharded(torch.ones(64, 32, requires_grad=True), Layout((64, 64), 1), ring)
    found = {
        "plain": F.dropout(torch.ones(64), 0.5).tolist(),
        "parts": full_tensor(F.dropout(part, 0.5)).tolist(),
        "again": full_tensor(F.dropout(part, 0.5)).tolist(),
    }
    weight = torch.ones(64, 32, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return full_tensor(F.dropout(sharded(x, Layout((64, 64), 1), ring), 0.5)).square().sum()

    state = torch.get_rng_state()
    (kept,) = torch.autograd.grad(run(weight * 1), weight)
    torch.set_rng_state(state)
    (again,) = torch.autograd.grad(checkpoint(run, weight * 1, use_reentrant=False), weight)
    found["recomputed"] = torch.equal(kept, again)
    found["state"] = torch.get_rng_state().tolist()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_parts_draw_their_own_numbers_and_what_is_whole_draws_the_same() -> None:
    first, second = spawn(random_numbers, 2)
    assert first["plain"] == second["plain"]
    assert first["state"] == second["state"]
    assert first["parts"] == second["parts"]
    columns = torch.tensor(first["parts"])
    assert not torch.equal(columns[:, :32], columns[:, 32:])
    assert first["parts"] != first["again"]
    # Half of the elements are dropped, four standard deviations of the count (32) allowed.
    assert abs(int((columns == 0).sum()) - 2048) < 128
    assert first["recomputed"]
    assert second["recomputed"]


def refused() -> list[str]:
    dist.init_process_group("gloo")
    ring = Ring(dist.group.WORLD)
    part = sharded(torch.ones(2, 3), Layout((2, 6), 1), ring)
    said = []
    for function in (
        lambda: part.__setitem__(0, 1.0),
        part.data_ptr,
        lambda: torch.sort(part, out=(part, part)),
    ):
        try:
            function()
        except UnsupportedError as error:
            said.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return said


def test_what_would_be_wrong_is_refused() -> None:
    said = spawn(refused, 2)[0]
    part = "a tensor of which each tensor-parallel rank holds a part."
    memory = "Leave the layer that calls this kernel out of tp_plan, or use torch's own operation."
    in_place = "Write the operation without changing a tensor in place."
    assert said == [
        f"__setitem__ writes into {part} {in_place}",
        f"data_ptr asks for the memory of {part} {memory}",
        f"sort writes into {part} {in_place}",
    ]


def test_views_are_followed_as_they_move_elements() -> None:
    # For random shapes and views: what each rank would hold of the new shape is a view of what it held of the old one.
    draw = random.Random(7)
    followed = 0
    for _ in range(3000):
        ranks = draw.choice((2, 3))
        shape = tuple(draw.choice((1, 2, 3, 4, 6, 12)) for _ in range(draw.randint(1, 4)))
        dim = draw.randrange(len(shape))
        parts = draw.choice((None, 2, 3))
        if shape[dim] < 2 or (parts and shape[dim] % parts):
            continue
        layout = Layout(shape, dim, None if parts is None else (shape[dim] // parts,) * parts)
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        target = _another_shape(draw, whole.numel())
        found = follow_view(layout, target)
        if found is None or (found.divide and found.divide % ranks) or not layout.even(ranks):
            continue
        followed += 1
        after = Layout(target, found.dim, found.parts)
        for rank in range(ranks):
            own = _part(whole, layout, rank, ranks)
            assert torch.equal(
                own.reshape(after.local_shape(rank, ranks)), _part(whole.view(target), after, rank, ranks)
            )
    assert followed > 300


def _part(whole: Tensor, layout: Layout, rank: int, ranks: int) -> Tensor:
    return torch.cat([whole.narrow(layout.dim, *span) for span in layout.spans(rank, ranks)], layout.dim)


def _another_shape(draw: random.Random, count: int) -> tuple[int, ...]:
    sizes = []
    while count > 1 and draw.random() < 0.8:
        size = draw.choice([each for each in range(1, count + 1) if count % each == 0])
        sizes.append(size)
        count //= size
    return (*sizes, count)


def test_what_several_layers_read_is_entered_once_and_let_go() -> None:
    """What they read is a view of it: a reference back would keep both, since no collector sees a view's base."""
    ring, weights = Ring(None), torch.ones(3, requires_grad=True)
    read = weights * 2
    kept = weakref.ref(read.untyped_storage())
    first = ring.enter(read)
    used = first * weights
    assert ring.enter(read) is first
    del first
    assert ring.enter(read).data_ptr() == read.data_ptr()
    del used, read
    gc.collect()
    assert kept() is None


def test_a_sharded_tensor_tells_the_size_of_the_whole() -> None:
    part = sharded(torch.ones(2, 3), Layout((2, 6), 1), Ring(None))
    assert isinstance(part, Sharded)
    assert (part.shape, part.size(1), part.numel(), len(part), part.dim()) == (torch.Size((2, 6)), 6, 12, 2, 2)


def gradients_of_parts() -> list[tuple[str, int, list[list[float]]]]:
    dist.init_process_group("gloo")
    ring = Ring(dist.group.WORLD)
    found = []
    for kind in ("leaf", "kept", "own"):
        part = sharded(torch.ones(2, 3, requires_grad=True) * 2, Layout((2, 6), 1), ring)
        if kind == "leaf":
            part = part.detach().requires_grad_()
        if kind == "kept":
            part.retain_grad()
        loss = full_tensor(part * part).sum()
        if kind == "own":
            (gradient,) = torch.autograd.grad(loss, [part])
        else:
            loss.backward()
            gradient = part.grad
        found.append((type(gradient).__name__, gradient.shape[1], full_tensor(gradient).tolist()))
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_gradients_of_parts() -> None:
    # torch.utils.checkpoint reads that of a leaf inside of a backward and hands it on to autograd, which knows local
    # tensors only. The others are a script's.
    leaf, kept, own = spawn(gradients_of_parts, 2)[1]
    assert leaf == ("Tensor", 3, [[4.0] * 3] * 2)
    assert kept == ("Tensor", 6, [[4.0] * 6] * 2)
    assert own == ("Sharded", 6, [[4.0] * 6] * 2)


@pytest.mark.gpu
def test_streams_of_a_counter_based_generator() -> None:
    # Two ranks in turn on one device: own numbers for parts, and then the same place in the common stream.
    found = []
    for rank in (0, 1):
        ring = Ring(None)
        ring.rank, ring.size = rank, 2
        torch.cuda.manual_seed(3)
        part = sharded(torch.ones(64, 32, device="cuda"), Layout((64, 64), 1), ring)
        dropped = F.dropout(part, 0.5)
        with torch._C.DisableTorchFunctionSubclass():
            own = dropped.tolist()
        found.append((own, torch.rand(4, device="cuda").tolist()))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


@pytest.mark.gpu
def test_the_vocabulary_loss_on_a_device() -> None:
    logits = torch.randn(256, 4096, device="cuda", requires_grad=True)
    labels = torch.randint(4096, (256,), device="cuda")
    labels[::3] = -100
    right = F.cross_entropy(logits, labels)
    (gradient,) = torch.autograd.grad(right, logits)
    found = F.cross_entropy(sharded(logits * 1, Layout((256, 4096), 1), Ring(None)), labels)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], gradient)


def test_an_operation_without_a_rule_is_named_once_for_each_model(caplog) -> None:
    for _ in range(2):
        warn_anew()  # as where a model is released
        for _ in range(3):
            by_gathering(torch.trapezoid, (torch.ones(3),), {})
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["trapezoid", "trapezoid"]
    warn_anew()
