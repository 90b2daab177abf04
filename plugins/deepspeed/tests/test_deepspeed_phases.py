"""Optimizers of one model at their own pace, layers used late, and second phases: equal to the single process."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.api import UnsupportedError, UsageError
from drivetrain_testing import models, spawn
from drivetrain_testing.scenario import full_state, share

TOLERANCE = 1e-5
"""Sums over ranks in another order, in float32; AdamW divides by small moments."""

BATCH = 12
"""Divides by 2, 3 and 4 ranks."""

SECTIONS: dict[str, dict[str, Any]] = {
    "stage0": {"zero_stage": 0},
    "stage1": {"zero_stage": 1},
    "stage2": {"zero_stage": 2},
    "stage2-offload": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "stage2-round-robin": {"zero_stage": 2, "round_robin_gradients": True},
    "stage3": {"zero_stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 60},
    "stage3-offload": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
}

Found = tuple[dict[str, Tensor], list[float]]
"""Weights at the end, and norms or other numbers on the way."""


class Net(nn.Module):
    """Three layers and a further one that is used on request; ``(B, F) -> (B, C)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(models.FEATURES, 13), nn.Linear(13, 9)
        self.head, self.late = nn.Linear(9, models.CLASSES), nn.Linear(models.FEATURES, models.CLASSES)

    def forward(self, x: Tensor, late: bool = False) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return found + self.late(x) if late else found


def build() -> Any:
    with models.seeded(5):
        return Net()


def adamw(parameters: Any, lr: float = 0.02) -> Any:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def sgd(parameters: Any, lr: float = 0.2) -> Any:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


class One:
    """One process of plain torch, by the accelerator's names."""

    def prepare(self, *objects: Any) -> Any:
        return objects if len(objects) > 1 else objects[0]

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def end_training(self) -> None:
        """Nothing to end."""


def batch(accelerator: Any, number: int) -> Any:
    data = models.dense_data(BATCH, seed=200 + number)
    return data if isinstance(accelerator, One) else share(accelerator, *data)


def step_on(accelerator: Any, model: Any, optimizers: Any, number: int, *, late: bool = False) -> None:
    x, y = batch(accelerator, number)
    accelerator.backward(F.cross_entropy(model(x, late), y))
    for each in optimizers:
        each.step()
        each.zero_grad()


def weights(accelerator: Any, model: Any) -> dict[str, Tensor]:
    if isinstance(accelerator, One):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}
    return full_state(accelerator, model)


# ---- the scenarios ------------------------------------------------------------------------------------------------


def paces(accelerator: Any) -> Found:
    """Optimizers step at every batch, every second and every third; parts and the whole are clipped meanwhile."""
    model = build()
    model.late.requires_grad_(False)
    made = [adamw(model.first.parameters()), sgd(model.second.parameters()), adamw(model.head.parameters())]
    model, *optimizers = accelerator.prepare(model, *made)
    norms = []
    for number in range(8):
        x, y = batch(accelerator, number)
        accelerator.backward(F.cross_entropy(model(x), y))
        if number % 4 == 1:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.2)))
        for layer, optimizer, pace in zip(("first", "second", "head"), optimizers, (3, 1, 2), strict=True):
            if number % pace == pace - 1:
                norms.append(float(accelerator.clip_grad_norm_(getattr(model, layer).parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
        if number == 5:  # What the head has gathered is given up, while others wait.
            x, y = batch(accelerator, 50)
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizers[2].zero_grad()
    return weights(accelerator, model), norms


def phases(accelerator: Any) -> Found:
    """The head alone, all by one optimizer, then by two; one of these goes on beside a third; the first layer alone."""
    model = build()
    model.late.requires_grad_(False)
    model.first.requires_grad_(False)
    model.second.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, adamw(model.head.parameters()))
    for number in range(3):
        step_on(accelerator, model, [optimizer], number)
    model.first.requires_grad_(True)
    model.second.requires_grad_(True)
    optimizer = accelerator.prepare(sgd([p for p in model.parameters() if p.requires_grad]))
    for number in range(3, 6):
        step_on(accelerator, model, [optimizer], number)
    two = adamw([*model.first.parameters(), *model.second.parameters()]), sgd(model.head.parameters())
    optimizers = accelerator.prepare(*two)
    for number in range(6, 9):
        step_on(accelerator, model, optimizers, number)
    # The head's goes on with its momentum.
    body = accelerator.prepare(sgd([*model.first.parameters(), *model.second.parameters()], 0.1))
    for number in range(9, 12):
        step_on(accelerator, model, [body, optimizers[1]], number)
    model.second.requires_grad_(False)
    model.head.requires_grad_(False)
    last = accelerator.prepare(adamw(model.first.parameters()))
    numbers = [group["lr"] for group in last.param_groups]
    for number in range(12, 15):
        step_on(accelerator, model, [last], number)
    return weights(accelerator, model), numbers


def kept_gradients(accelerator: Any) -> Found:
    """The second optimizer's first step adds to gradients that the script has not dropped: refused, or as in torch."""
    model = build()
    model.late.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, sgd(p for p in model.parameters() if p.requires_grad))
    x, y = batch(accelerator, 0)
    accelerator.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    second = accelerator.prepare(sgd([p for p in model.parameters() if p.requires_grad], 0.1))
    x, y = batch(accelerator, 1)
    accelerator.backward(F.cross_entropy(model(x), y))
    second.step()
    return weights(accelerator, model), []


SCENARIOS: tuple[Callable[[Any], Found], ...] = (paces, phases)


def accelerator_with(section: dict[str, Any], folder: str) -> Accelerator:
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section}))
    return Accelerator(config=path, project_dir=folder)


def in_rank(section: dict[str, Any], folder: str) -> tuple[list[Found], Any]:
    found = []
    for scenario in SCENARIOS:
        accelerator = accelerator_with(section, folder)
        found.append(scenario(accelerator))
        accelerator.end_training()
    accelerator = accelerator_with(section, folder)
    if section["zero_stage"]:
        with pytest.raises(UsageError, match="not dropped after an earlier step"):
            kept_gradients(accelerator)
        accelerator.end_training()
        return found, None
    kept = kept_gradients(accelerator)
    accelerator.end_training()
    return found, kept


def compare(found: Found, expected: Found, what: str) -> None:
    state, numbers = found
    for name, value in expected[0].items():
        difference = (state[name] - value).abs().max().item()
        assert difference <= TOLERANCE, f"{what}: {name} differs by {difference:.1e}"
    assert numbers == pytest.approx(expected[1], abs=TOLERANCE), what


@pytest.mark.parametrize(
    ("variant", "world"), [*((name, 3) for name in SECTIONS), ("stage2", 2), ("stage3", 2), ("stage3", 4)]
)
@pytest.mark.gate("stage3-3")
def test_paces_and_phases(variant: str, world: int, tmp_path: Path) -> None:
    expected = [scenario(One()) for scenario in SCENARIOS]
    kept = kept_gradients(One())
    for found, mine in spawn(in_rank, world, SECTIONS[variant], str(tmp_path), timeout=180):
        for one, wanted, scenario in zip(found, expected, SCENARIOS, strict=True):
            compare(one, wanted, scenario.__name__)
        if mine is not None:
            compare(mine, kept, "kept_gradients")


# ---- a layer that is used late --------------------------------------------------------------------------------------


def groups_of(model: Any, kind: str) -> Any:
    if kind == "shared":
        return model.parameters()
    early = [p for name, p in model.named_parameters() if not name.startswith("late")]
    return [{"params": early}, {"params": model.late.parameters(), "lr": 0.05}]


LATE = {"momentum": (sgd, "shared"), "own group": (adamw, "own"), "one count": (adamw, "shared")}


def late(accelerator: Any, kind: str, *, resume: bool) -> Found:
    """A layer has its first gradient after four steps, with or without a resume before it."""
    make, groups = LATE[kind]
    model = build()
    model, optimizer = accelerator.prepare(model, make(groups_of(model, groups)))
    for number in range(4):
        step_on(accelerator, model, [optimizer], number)
    if resume:
        folder = accelerator.save_state(f"{accelerator.project_dir}/{kind}".replace(" ", "-"))
        model, optimizer = accelerator.free_memory(model, optimizer)
        with models.seeded(77):
            model = Net()
        model, optimizer = accelerator.prepare(model, make(groups_of(model, groups)))
        accelerator.load_state(folder)
    for number in range(4, 7):
        step_on(accelerator, model, [optimizer], number, late=True)
    return weights(accelerator, model), []


def late_in_rank(section: dict[str, Any], folder: str) -> dict[tuple[str, bool], Found | None]:
    found: dict[tuple[str, bool], Found | None] = {}
    for kind in LATE:
        for resume in (False, True):
            accelerator = accelerator_with(section, folder)
            if kind == "one count":
                with pytest.raises(UnsupportedError, match=r"late\.\w+ of Net has a gradient, and had none"):
                    late(accelerator, kind, resume=resume)
            else:
                found[kind, resume] = late(accelerator, kind, resume=resume)
            accelerator.end_training()
    return found


@pytest.mark.parametrize(("variant", "world"), [("stage1", 2), ("stage2", 3), ("stage3", 2), ("stage3-offload", 3)])
@pytest.mark.gate("stage3-2")
def test_a_layer_used_late_after_a_resume(variant: str, world: int, tmp_path: Path) -> None:
    expected = {kind: late(One(), kind, resume=False) for kind in LATE}
    for found in spawn(late_in_rank, world, SECTIONS[variant], str(tmp_path), timeout=180):
        for (kind, resume), one in found.items():
            assert one is not None
            compare(one, expected[kind], f"{kind}, resume={resume}")


# ---- what cannot be, and what is freed ------------------------------------------------------------------------------


def replacements(section: dict[str, Any], folder: str) -> None:
    model: Any
    if section["zero_stage"]:
        accelerator = accelerator_with(section, folder)
        model = build()
        model.late.requires_grad_(False)
        body = [*model.first.parameters(), *model.second.parameters()]
        model, first, head = accelerator.prepare(model, adamw(body), sgd(model.head.parameters()))
        step_on(accelerator, model, [first, head], 0)
        model.head.bias.requires_grad_(False)
        with pytest.raises(UsageError, match=r"goes on beside it trains other.*Prepare new optimizers for all"):
            accelerator.prepare(adamw(model.first.parameters()))
        accelerator.end_training()

    accelerator = accelerator_with(section, folder)
    model = build()
    model.late.requires_grad_(False)
    model, first = accelerator.prepare(model, adamw(p for p in model.parameters() if p.requires_grad))
    x, y = batch(accelerator, 0)
    accelerator.backward(F.cross_entropy(model(x), y))
    with pytest.raises(UsageError, match=r"between a backward of Net and the step.*optimizer\.zero_grad\(\) first"):
        accelerator.prepare(sgd(model.head.parameters()))
    first.zero_grad()
    step_on(accelerator, model, [accelerator.prepare(sgd(model.head.parameters()))], 1)
    accelerator.end_training()

    accelerator = accelerator_with(section, folder)
    model = build()
    model.late.requires_grad_(False)
    model, first = accelerator.prepare(model, adamw(p for p in model.parameters() if p.requires_grad))
    step_on(accelerator, model, [first], 0)
    engine = weakref.ref(model._drivetrain.trainable.driver.engine)
    second = accelerator.prepare(sgd([p for p in model.parameters() if p.requires_grad]))
    gc.collect()
    assert engine() is None
    x, y = batch(accelerator, 1)
    accelerator.backward(F.cross_entropy(model(x), y))
    with pytest.raises(UsageError, match="steps no more, since another optimizer was prepared later"):
        first.step()
    second.step()
    accelerator.end_training()


@pytest.mark.parametrize("variant", ["stage0", "stage2", "stage3"])
@pytest.mark.gate("stage3")
def test_replaced_optimizers(variant: str, tmp_path: Path) -> None:
    spawn(replacements, 2, SECTIONS[variant], str(tmp_path), timeout=120)
