"""What scripts do to cut parameters and gradients, outside of the model's forward, is what it is on one process.

Worlds of three as well as two: seven rows of a vocabulary are cut into 3, 3 and 1, and a fused layer's rows lie in
another order on ranks than in the model. Tolerance 2e-5: sums over ranks are added in another order.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import Accelerator
from drivetrain.api import DrivetrainError
from drivetrain_testing import spawn

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

WORDS, WIDTH, HEADS, LENGTH, ROWS = 7, 12, 6, 4, 3
TOLERANCE = 2e-5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.width, self.heads = WIDTH, HEADS

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (q, k, v))
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).contiguous().view(B, T, C))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(WORDS, WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.attention(x)
        return self.head(x + self.mlp(x))


def build() -> Model:
    torch.manual_seed(1)
    return Model()


def words() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(WORDS, (2, ROWS, LENGTH), generator=generator)
    return ids[0], ids[1]


def loss_of(model: Any) -> Tensor:
    ids, labels = words()
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def numbers(*shape: int) -> Tensor:
    """Plain numbers, the same wherever they are asked for."""
    return torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).view(shape)


# ---- reads: each gives numbers for one parameter, or for its gradient ------------------------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.mean(),
    "norms": lambda p: [p.norm(), p.norm(1), p.norm(3), torch.linalg.vector_norm(p), p.abs().max(), torch.norm(p)],
    "of_some_dims": lambda p: [p.sum(0), p.mean(-1, keepdim=True), p.norm(dim=0), p.amax(-1), p.var(0), p.std()],
    "numbers": lambda p: [p.min().item(), float(p[0].sum()), p.isnan().any().item(), bool((p < 9).all())],
    "places": lambda p: [p.argmax(), p.flatten().sort().values, p.flatten().topk(3).indices, (p > 0).sum()],
    "views": lambda p: [p[0], p[-1:], p.view(-1)[::2], p.flatten()[1:4], p.t(), p.unsqueeze(0), p.chunk(3)[-1]],
    "rows": lambda p: [row.sum() for row in p],
    "lists": lambda p: [torch.tensor(p.tolist()), torch.from_numpy(p.detach().cpu().numpy().copy())],
    "beside_plain": lambda p: [
        p + numbers(*p.shape),
        numbers(*p.shape) * p,
        1.0 - p,
        2.0 / (p + 10),
        p * numbers(p.shape[-1]),
        numbers(2, *p.shape) - p,
        torch.where(numbers(*p.shape) > 0, p, 0.0),
        numbers(*p.shape).lerp(p, 0.5),
        F.cosine_similarity(p.flatten(), numbers(p.numel()), 0),
        torch.dot(numbers(p.numel()), p.flatten()),
    ],
    "beside_itself": lambda p: [p - p.mean(), p / p.norm(), p * p, p.clone().sub_(p), p - p[0], p - p.mean(0)],
    "matrices": lambda p: (
        [p @ p.T, torch.linalg.svdvals(p), F.linear(numbers(2, p.shape[1]), p)] if p.dim() > 1 else []
    ),
    "many_at_once": lambda p: [*torch._foreach_mul([p, numbers(2)], 2.0), *torch._foreach_norm([p, numbers(2)])],
    "joined": lambda p: [torch.cat([p.flatten(), numbers(2)]), torch.stack([p, p])],
    "types": lambda p: [p.double().sum(), p.to(torch.float64), p.half().float(), (p > 0).float(), p.bool(), p.int()],
    "like": lambda p: [
        torch.zeros_like(p),
        p.new_ones(p.shape),
        p.new_zeros(2),
        torch.full_like(p, 3.0),
        p.new_tensor([1]),
    ],
    "drawn": lambda p: [torch.randn_like(p), torch.rand_like(p.data), torch.bernoulli(p.sigmoid()), F.dropout(p, 0.5)],
    "compared": lambda p: [torch.equal(p, p.clone()), torch.allclose(p, numbers(*p.shape)), (p == p.clone()).all()],
    "copies": lambda p: [p.detach().clone(), p.data.cpu(), copy.deepcopy(p.detach()), p.detach()[1:]],
    "shapes": lambda p: [len(p), p.numel(), p.shape[0], p.dim(), p.element_size(), p.requires_grad, p.stride(0)],
    "viewed_alike": lambda p: [
        numbers(p.numel()).view_as(p),
        numbers(*p.shape).type_as(p),
        p.reshape_as(numbers(p.numel())),
    ],
}


# ---- writes: each changes one parameter under no_grad -------------------------------------------------------------


def kept_view(p: Any) -> None:
    row = p.data[0]
    p.mul_(2.0)
    row.add_(row.abs())  # The row has followed.


def exchanged(p: Any) -> None:
    before = p.data
    p.data = numbers(*p.shape)
    p.mul_(3.0)
    average = p.data.clone()
    p.data = before
    p.lerp_(average, 0.25)


def element_by_index(p: Any) -> None:
    p[0] = 0.5
    p.data[-1] = numbers(*p.shape[1:]) if p.dim() > 1 else 2.0
    p.view(-1)[::3] = -1.0
    p[p > 0.4] = 0.4
    p.data.flatten()[:2].zero_()


def initialised(p: Any) -> None:
    nn.init.normal_(p)
    if p.dim() > 1:
        nn.init.orthogonal_(p)
        p[:2].mul_(2.0)
        nn.init.kaiming_uniform_(p.data[1:], a=2.0)
    else:
        nn.init.uniform_(p, -1, 1)
        nn.init.trunc_normal_(p.data[:2])


def set_gradient(p: Any) -> None:
    p.grad = numbers(*p.shape)
    p.grad.add_(torch.randn(p.shape))
    p.grad[0] = 3.0
    p.add_(p.grad, alpha=-0.1)


def in_place_operators(p: Any) -> None:
    p += numbers(*p.shape)
    p *= 0.5
    p -= p.mean()
    p /= p.norm()
    p **= 2


def many_at_once(p: Any) -> None:
    torch._foreach_lerp_([p, numbers(2)], [numbers(*p.shape), numbers(2)], 0.5)
    torch._foreach_mul_([p, p.grad], 2.0)
    torch._foreach_add_([p], [p.grad], alpha=0.1)
    torch._foreach_clamp_max_([p], 0.5)
    torch._foreach_maximum_([p], [numbers(*p.shape)])


WRITES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda p: p.copy_(numbers(*p.shape)),
    "copy_of_a_row": lambda p: p.copy_(numbers(p.shape[-1])),
    "filled": lambda p: (p.fill_(0.5), p[:1].fill_(2.0), p.data.add_(1.0), p.detach().mul_(numbers(*p.shape))),
    "averaged": lambda p: (p.lerp_(numbers(*p.shape), 0.3), p.mul_(0.9).add_(numbers(*p.shape), alpha=0.1)),
    "clamped": lambda p: (p.clamp_(-0.1, 0.1), p.data.clamp_(max=0.05)),
    "masked": lambda p: (p.mul_(numbers(*p.shape) > 0), p.masked_fill_(numbers(*p.shape) > 0.5, 4.0)),
    "normalised": lambda p: (p.div_(p.norm()), p.sub_(p.mean(0, keepdim=True)), p.div_(p.norm(dim=-1, keepdim=True))),
    "transposed": lambda p: (p.t().mul_(numbers(*p.t().shape)), p.T[0].zero_()),
    "noise": lambda p: (p.add_(torch.randn_like(p)), p.add_(torch.randn(p.shape), alpha=0.1), p.data[0].normal_()),
    "drawn": lambda p: (p.uniform_(-1, 1), p.grad.normal_(), p.add_(p.grad)),
    "added_at_places": lambda p: (
        p.index_fill_(0, torch.tensor([0, 2]), 1.5),
        p.index_add_(0, torch.tensor([1]), p[:1].clone()),
    ),
    "out": lambda p: torch.add(numbers(*p.shape), 1.0, out=p),
    "kept_view": kept_view,
    "exchanged": exchanged,
    "element_by_index": element_by_index,
    "initialised": initialised,
    "set_gradient": set_gradient,
    "in_place_operators": in_place_operators,
    "many_at_once": many_at_once,
}


# ---- derivatives: each gives a term of the loss -------------------------------------------------------------------


def of_vector(model: Any) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).pow(4).sum()


def second_derivative(model: Any) -> Tensor:
    slopes = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
    return sum(slope.pow(2).sum() for slope in slopes) + loss_of(model)


def inner_step(model: Any) -> Tensor:
    named = dict(model.named_parameters())
    slopes = torch.autograd.grad(loss_of(model), list(named.values()), create_graph=True)
    fast = {name: p - 0.5 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
    ids, labels = words()
    found = torch.func.functional_call(model, fast, (ids,))
    return F.cross_entropy(found.flatten(0, 1), labels.flatten())


TERMS: dict[str, Callable[[Any], Any]] = {
    "l1": lambda model: sum(p.abs().sum() for p in model.parameters()),
    "l2": lambda model: sum(p.pow(2).sum() for p in model.parameters()),
    "norms": lambda model: sum(p.norm() + p.norm(1) + torch.linalg.vector_norm(p, 3) for p in model.parameters()),
    "mean_and_spread": lambda model: sum(p.mean() ** 2 + p.std() + p.sum() for p in model.parameters()),
    "beside_plain": lambda model: sum(
        (p * numbers(*p.shape) + numbers(*p.shape)).pow(2).mean() for p in model.parameters()
    ),
    "distance": lambda model: sum(F.mse_loss(p, numbers(*p.shape)) for p in model.parameters()),
    "orthogonality": lambda model: sum((p @ p.T).pow(2).sum() for p in model.parameters() if p.dim() > 1),
    "rows": lambda model: sum(p[0].sum() + p[1:].pow(2).sum() for p in model.parameters()),
    "types": lambda model: sum(p.double().pow(2).sum() for p in model.parameters()),
    "of_vector": of_vector,
    "beside_loss": lambda model: loss_of(model) + 0.1 * sum(p.norm() for p in model.parameters()),
    "times_loss": lambda model: loss_of(model) * sum(p.pow(2).sum() for p in model.parameters()),
    "weight_used_by_hand": lambda model: (
        F.linear(numbers(2, WIDTH), model.attention.qkv.weight).pow(2).sum()
        + (loss_of(model) * model.head.weight).sum()
    ),
    "second_derivative": second_derivative,
    "inner_step": inner_step,
}


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().double().clone()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if isinstance(value, (int, float)) else str(value)


def reads(model: Any) -> Iterator[tuple[str, Any]]:
    for name, p in model.named_parameters():
        # The gradient of the keys' bias is what rounding leaves of zero.
        p.grad.add_(numbers(*p.shape))
        for case, read in READS.items():
            for kind, one in ("value", p), ("data", p.data), ("gradient", p.grad):
                torch.manual_seed(7)
                with torch.no_grad():
                    yield f"{case} of {name}'s {kind}", plain(read(one))


def writes(model: Any) -> Iterator[tuple[str, Any]]:
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    slopes = {name: p.grad.clone() for name, p in model.named_parameters()}
    for case, write in WRITES.items():
        for name, p in model.named_parameters():
            if case == "transposed" and p.dim() < 2:
                continue
            with torch.no_grad():
                p.copy_(first[name])
                p.grad = slopes[name].clone()
                torch.manual_seed(7)
                write(p)
            yield f"{case} of {name}", plain([p, p.grad])
            with torch.no_grad():
                p.copy_(first[name])


def terms(model: Any, backward: Callable[[Tensor], Any]) -> Iterator[tuple[str, Any]]:
    for case, term in TERMS.items():
        model.zero_grad()
        loss = term(model)
        backward(loss)
        yield f"{case}: loss", plain(loss)
        for name, p in model.named_parameters():
            yield f"{case}: {name}", None if p.grad is None else plain(p.grad)


def averages(model: Any) -> Iterator[tuple[str, Any]]:
    before, average = copy.deepcopy(build()), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with torch.no_grad():
        for mine, p in zip(before.parameters(), model.parameters(), strict=True):
            p.mul_(1.5)
            mine.lerp_(p, 0.5)
            yield "lerp", plain(mine)
    average.update_parameters(model)
    average.update_parameters(model)
    yield "average", plain([p for _, p in average.module.named_parameters()])
    with torch.no_grad():
        yield "its output", plain(loss_of(average))
    nn.utils.vector_to_parameters(numbers(sum(p.numel() for p in model.parameters())), model.parameters())
    yield "vector", plain(list(model.parameters()))


PARTS: dict[str, Callable[[Any, Callable[[Tensor], Any]], Iterator[tuple[str, Any]]]] = {
    "reads": lambda model, _: reads(model),
    "writes": lambda model, _: writes(model),
    "terms": terms,
    "averages": lambda model, _: averages(model),
}


def one_process() -> dict[str, Any]:
    found = {}
    for part, numbers_of in PARTS.items():
        model = build()
        loss_of(model).backward()
        found |= {f"{part}: {name}": value for name, value in numbers_of(model, lambda loss: loss.backward())}
    return found


def accelerator_of(folder: str, **settings: Any) -> Accelerator:
    file = Path(folder, f"config-{settings.get('rank', 0)}.yaml")
    section = {key: value for key, value in settings.items() if key != "rank"}
    file.write_text(json.dumps({"distributed_type": "megatron", "use_cpu": True, "megatron": section}), "utf-8")
    return Accelerator(config=str(file), project_dir=folder)


def in_rank(size: int, plan: dict[str, str] | None, folder: str) -> dict[str, Any]:
    section = {} if plan is None else {"tp_plan": plan}
    found = {}
    for part, numbers_of in PARTS.items():
        accelerator = accelerator_of(folder, tensor_parallel_size=size, rank=os.environ["RANK"], **section)
        model = build()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.autograd.set_detect_anomaly(True):  # which looks at parts as well
            accelerator.backward(loss_of(model))
        assert sum(type(p).__name__ == "CutTensor" for p in model.parameters()) >= 4
        found |= {f"{part}: {name}": value for name, value in numbers_of(model, accelerator.backward)}
        accelerator.end_training()
    return found


UNEVEN = {"table": "vocabulary", "head": "vocabulary", "mlp.0": "colwise", "mlp.2": "rowwise"}


@pytest.mark.parametrize(("size", "plan"), [(2, None), (3, None), (3, UNEVEN)], ids=["2", "3", "uneven"])
def test_scripts_find_and_write_the_whole(size: int, plan: dict[str, str] | None, tmp_path: Path) -> None:
    expected = one_process()
    wrong = []
    for rank, found in enumerate(spawn(in_rank, size, size, plan, str(tmp_path), timeout=200)):
        assert found.keys() == expected.keys()
        wrong += [f"rank {rank}: {name}" for name in expected if not same(found[name], expected[name])]
    assert not wrong


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.shape == expected.shape and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == pytest.approx(expected, abs=TOLERANCE) if isinstance(expected, float) else found == expected


def refused(folder: str) -> dict[str, str]:
    accelerator = accelerator_of(folder, tensor_parallel_size=2, rank=os.environ["RANK"])
    model = build()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = model.attention.qkv.weight
    model = accelerator.prepare(model)
    accelerator.backward(loss_of(model))
    cut = model.attention.qkv.weight
    plain = nn.Parameter(torch.zeros(cut.shape))
    found = {}
    for name, call in {
        "a step of an optimizer that was never prepared": before.step,
        "a gradient of a parameter that was replaced": lambda: taken.grad,
        "a gradient of it that is asked for": lambda: torch.autograd.grad(loss_of(model), [taken]),
        "the data of an ordinary parameter": lambda: setattr(plain, "data", 0.5 * cut.data),
        "a write to it": lambda: nn.init.zeros_(taken),
        "a read of it": taken.detach,
        "pickle": lambda: torch.save(cut, Path(folder, "cut.pt")),
        "another dtype": lambda: setattr(cut, "data", cut.data.double()),
        "another shape": cut.data.t_,
        "a compiled model": lambda: torch.compile(model, backend="eager")(words()[0]),
        "a row, where gradients flow": cut[0].zero_,
    }.items():
        try:
            call()
        except DrivetrainError as problem:
            found[name] = str(problem)
        else:
            found[name] = ""
    found["repr"] = repr(cut)
    with torch.no_grad(), torch.autograd.set_detect_anomaly(True):
        cut[0].fill_(torch.inf)  # of one rank's part
        with torch.enable_grad(), pytest.raises(RuntimeError, match="returned nan values"):
            accelerator.backward(loss_of(model))
    accelerator.end_training()
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_the_same_is_refused(tmp_path: Path) -> None:
    for found in spawn(refused, 2, str(tmp_path), timeout=120):
        assert all(found.values()), found
        assert "before accelerator.prepare" in found["a step of an optimizer that was never prepared"]
        assert "torch.compile" in found["a compiled model"]
