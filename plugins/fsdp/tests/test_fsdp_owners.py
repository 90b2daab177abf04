"""Matrix-wise optimizers under ``fsdp``: each parameter is stepped whole by its owner, against one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain import Accelerator, load_config
from drivetrain.api import DrivetrainError
from drivetrain_testing import spawn

BATCH, STEPS = 12, 5
TOLERANCE = 2e-5
"""Absolute, of parameters near 1: gradients are summed over ranks in another order."""


class Net(nn.Module):
    """Matrices with numbers of rows that no world divides, one shorter than most worlds, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.first, self.second = nn.Linear(10, 17), nn.Linear(17, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids).mean(1)
        out: Tensor = self.head(self.norm(hidden + self.second(torch.tanh(self.first(hidden)))))
        return out


class Trusting(torch.optim.Optimizer):
    """A trust ratio for each parameter, as LAMB; a step count in its group."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state["momentum"], state["norms"] = torch.zeros_like(one), []
                state["momentum"].lerp_(one.grad, 0.1)
                state["norms"].append(float(one.norm()))
                ratio = one.norm() / state["momentum"].norm().clamp(min=1e-6)
                one.add_(state["momentum"] * ratio, alpha=-group["lr"] / math.sqrt(group["count"]))


class RowFactored(torch.optim.Optimizer):
    """A second moment for each row, as the mean of its squares."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    rows = one.grad.flatten(1) if one.dim() > 1 else one.grad[None]
                    state = self.state[one]
                    moment = state.setdefault("rows", torch.zeros(len(rows)))
                    moment.lerp_(rows.square().mean(1), 0.5)
                    scaled = rows / (moment.sqrt()[:, None] + 1e-3)
                    one.sub_(scaled.view_as(one) / (1 + scaled.norm()), alpha=group["lr"])


class Global(torch.optim.Optimizer):
    """Divides by the norm of all gradients together."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        everything = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        total = torch.stack([one.grad.norm() for one in everything if one.grad is not None]).norm()
        for one in everything:
            one.add_(one.grad / total, alpha=-self.param_groups[0]["lr"])  # type: ignore[operator]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.dim() == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.dim() != 2]


def muon(model: nn.Module) -> list[Any]:
    """The common recipe: AdamW for what is not a matrix."""
    # Newton-Schulz in bfloat16 would round differences in the last bit of a gradient up to 2e-3 of an update.
    return [
        torch.optim.Muon(matrices(model), lr=0.02, ns_steps=2),
        torch.optim.AdamW(others(model), lr=0.02),
    ]


def adafactor(model: nn.Module) -> list[Any]:
    return [torch.optim.Adafactor(model.parameters(), lr=0.05)]


def trusting(model: nn.Module) -> list[Any]:
    return [Trusting([{"params": matrices(model)}, {"params": []}, {"params": others(model), "lr": 0.02}])]


def row_factored(model: nn.Module) -> list[Any]:
    return [RowFactored(model.parameters())]


def accelerate(backend: str, mesh: dict[str, int] | None = None, **arguments: Any) -> Accelerator:
    overrides: dict[str, Any] = {"distributed_type": backend, "use_cpu": True}
    if mesh:
        overrides["mesh"] = mesh
    return Accelerator(config=load_config(overrides=overrides, environ={}), **arguments)


def batch(accelerator: Accelerator, step: int) -> Tensor:
    """This rank's rows of a batch that is the same for all worlds."""
    ids = torch.randint(11, (BATCH, 4), generator=torch.Generator().manual_seed(step))
    rows = BATCH // accelerator.num_processes
    return ids[accelerator.process_index * rows :][:rows]


def train(
    make: Callable[[nn.Module], list[Any]],
    backend: str,
    mesh: dict[str, int] | None = None,
    *,
    save: str | None = None,
    load: str | None = None,
    steps: int = STEPS,
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, parameters at the end, and the number of elements of optimizer state on this rank."""
    accelerator = accelerate(backend, mesh)
    torch.manual_seed(0)
    model: Any = Net()
    made = make(model)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in made]
    model, *prepared = accelerator.prepare(model, *made, *schedules)
    optimizers, schedules = prepared[: len(made)], prepared[len(made) :]
    start = 0
    # Ranks that the checkpoint does not know draw other numbers, which nothing here does.
    warnings.filterwarnings("ignore", message="the checkpoint holds the random state")
    if load is not None:
        accelerator.load_state(load)
        start = STEPS
    losses = []
    for step in range(start, start + steps):
        out = model(batch(accelerator, step))
        loss = (out.square().sum(-1) - out[..., 0]).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        for each in (*optimizers, *schedules):
            each.step()
        for each in optimizers:
            each.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    if save is not None:
        accelerator.save_state(save)
    weights = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
    held = sum(
        (value.to_local() if isinstance(value, DTensor) else value).numel()
        for one in made
        for state in one.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
    accelerator.end_training()
    return losses, weights, held


def same(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    assert found[0] == pytest.approx(expected[0], abs=tolerance)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0, atol=tolerance, msg=name)


WORLDS: list[tuple[int, dict[str, int] | None]] = [(3, None), (4, None), (4, {"dp_replicate": 2, "dp_shard": 2})]


@pytest.mark.parametrize("make", [adafactor, trusting, row_factored])
@pytest.mark.parametrize(("ranks", "mesh"), WORLDS, ids=["3", "4", "2x2"])
@pytest.mark.gate("3-adafactor", "2x2-adafactor")
def test_numbers_of_one_process(make: Any, ranks: int, mesh: dict[str, int] | None) -> None:
    (alone,) = spawn(train, 1, make, "single")
    sharded = spawn(train, ranks, make, "fsdp", mesh)
    same(sharded[0], alone)
    # State is where the owners are: the heaviest rank has no more than the largest parameter above its share.
    held = [each[2] for each in sharded]
    shards = 2 if mesh else ranks
    largest = 17 * 10
    assert sum(held) == alone[2] * (ranks // shards)
    assert max(held) <= alone[2] / shards + largest


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.gate("3")
def test_muon_for_matrices_and_adamw_for_the_rest(ranks: int) -> None:
    (alone,) = spawn(train, 1, muon, "single")
    # Newton-Schulz multiplies in bfloat16: the last bit of a gradient is up to 4e-3 of an update.
    same(spawn(train, ranks, muon, "fsdp")[0], alone, 0.02 * 4e-3 * STEPS)


@pytest.mark.parametrize("make", [adafactor, trusting, muon])
@pytest.mark.parametrize(
    ("first", "then"),
    [((3, "fsdp"), (1, "single")), ((1, "single"), (3, "fsdp")), ((4, "fsdp"), (2, "fsdp")), ((2, "ddp"), (4, "fsdp"))],
    ids=str,
)
@pytest.mark.gate("(4, 'fsdp')-(2, 'fsdp')-muon", "(1, 'single')-(3, 'fsdp')-adafactor")
def test_a_checkpoint_goes_on_elsewhere(tmp_path: Path, make: Any, first: Any, then: Any) -> None:
    folder = str(tmp_path / "state")
    tolerance = 0.02 * 4e-3 * 2 * STEPS if make is muon else TOLERANCE
    (alone,) = spawn(train, 1, make, "single", steps=2 * STEPS)
    spawn(train, first[0], make, first[1], save=folder)
    ranks = spawn(train, then[0], make, then[1], load=folder)
    same(ranks[0], (alone[0][STEPS:], alone[1]), tolerance)
    # What was loaded is where the owners are, and nowhere else.
    assert sum(held for _, _, held in ranks) == alone[2]


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except DrivetrainError as error:
        return str(error)
    return "nothing"


def refusals() -> dict[str, str]:
    accelerator = accelerate("fsdp")
    model: Any = Net()
    optimizer: Any = Trusting(model.parameters())
    found = {"global": said(lambda: accelerator.prepare(Net(), Global(Net().parameters())))}
    net = Net()
    found["global"] = said(lambda: accelerator.prepare(net, Global(net.parameters())))
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(batch(accelerator, 0)).square().mean())
    found["closure"] = said(lambda: optimizer.step(lambda: 0.0))
    optimizer.step()
    found["state dict"] = said(optimizer.state_dict)
    found["load"] = said(lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}))
    for number, parameter in enumerate(model.parameters()):
        found[f"state {number}"] = said(lambda parameter=parameter: optimizer.state[parameter]["momentum"])
    unprepared = Trusting(model.parameters())
    accelerator.backward(model(batch(accelerator, 0)).square().mean())
    found["unprepared"] = said(unprepared.step)
    accelerator.end_training()
    return found


def test_what_cannot_be_done_is_said() -> None:
    all_found = spawn(refusals, 2)
    for found in all_found:
        assert "Global is neither element-wise" in found["global"]
        assert "matrix-wise (stepping several parameters together and each alone" in found["global"]
        assert "without a closure" in found["closure"]
        assert "accelerator.save_state" in found["state dict"]
        assert "accelerator.load_state" in found["load"]
        assert "accelerator.prepare(model, optimizer)" in found["unprepared"]
    for number in range(len(list(Net().parameters()))):
        # One rank owns it; the other is told so, and no empty state is made there.
        owner, other = sorted((found[f"state {number}"] for found in all_found), key=len)
        assert owner == "nothing"
        assert "kept by the rank that owns the parameter" in other


def grows(backend: str) -> tuple[dict[str, Tensor], list[int]]:
    """Has stepped before ``prepare``, is given a group after it, skips a step, and a parameter without gradients."""
    accelerator = accelerate(backend)
    torch.manual_seed(0)
    model: Any = Net()
    for one in model.head.parameters():
        one.requires_grad_(False)
    optimizer: Any = Trusting(list(model.first.parameters()))
    model(torch.ones(2, 4, dtype=torch.long)).square().mean().backward()
    optimizer.step()
    model.zero_grad()
    model, optimizer = accelerator.prepare(model, optimizer)
    skipped = []
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.03})
        loss = model(batch(accelerator, step)).square().mean()
        accelerator.backward(loss * math.inf if step == 2 else loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        skipped.append(int(accelerator.optimizer_step_was_skipped))
        model.zero_grad()
    weights = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return weights, skipped


def test_groups_added_later_and_steps_before_prepare() -> None:
    (alone,) = spawn(grows, 1, "single")
    for weights, skipped in spawn(grows, 3, "fsdp"):
        assert skipped == alone[1] == [0, 0, 1, 0]
        for name, one in weights.items():
            torch.testing.assert_close(one, alone[0][name], rtol=0, atol=TOLERANCE, msg=name)
