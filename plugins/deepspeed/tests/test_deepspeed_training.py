"""The gradients of a window, whatever it is made of, wherever a stage keeps them: equal to the single process."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.api import UnsupportedError, UsageError
from drivetrain_deepspeed.loss_scale import LossScale
from drivetrain_testing import models, spawn
from drivetrain_testing.scenario import full_state, share

TOLERANCE = 2e-6
"""Sums over ranks in another order, in float32, after eight steps; seen are 3e-7."""

VARIANTS: dict[str, dict[str, Any]] = {
    "stage0": {"zero_stage": 0},
    "stage1": {"zero_stage": 1},
    "stage1-overlap": {"zero_stage": 1, "overlap_comm": True},
    "stage2": {"zero_stage": 2},
    "stage2-offload": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "stage2-small-buckets": {"zero_stage": 2, "reduce_bucket_size": 50, "contiguous_gradients": False},
    "stage2-round-robin": {"zero_stage": 2, "round_robin_gradients": True},
    "stage2-round-robin-offload": {"zero_stage": 2, "round_robin_gradients": True, "offload_optimizer": "cpu"},
    "stage3": {"zero_stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 60},
    "stage3-offload": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
}
STAGES = [{"zero_stage": stage} for stage in range(4)]

WINDOWS = [["a"], ["b"], ["ab"], ["a", "b"], ["b", "a"], ["b"], ["a", "a", "b"], ["ab"]]
"""Which branches the micro-batches of each window use."""


class Branches(nn.Module):
    """Uses one branch, the other, or both; ``(B, F) -> (B, C)``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(models.FEATURES, 16), nn.Linear(models.FEATURES, 16)
        self.out = nn.Linear(16, models.CLASSES)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, which: str) -> Tensor:
        hidden = sum(getattr(self, name)(x) for name in which)
        return self.out(torch.tanh(hidden)) * self.gain


def branches() -> Branches:
    with models.seeded(3):
        return Branches()


def accelerator_with(section: dict[str, Any], folder: str, **settings: Any) -> Accelerator:
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section, **settings}))
    return Accelerator(config=path)


def close(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float = TOLERANCE) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


# ---- windows ----------------------------------------------------------------------------------------------------


def plain_windows() -> tuple[dict[str, Tensor], list[float]]:
    model = branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    norms, batch = [], 0
    for window in WINDOWS:
        optimizer.zero_grad()
        for which in window:
            x, y = models.dense_data(8, seed=100 + batch)
            batch += 1
            (F.cross_entropy(model(x, which), y) / len(window)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.4)))
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, norms


def windows(section: dict[str, Any], folder: str, way: str) -> tuple[dict[str, Tensor], list[float]]:
    accelerator = accelerator_with(section, folder)
    model: Any = branches()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms, batch = [], 0
    for window in WINDOWS:
        accelerator.gradient_accumulation_steps = len(window)
        losses = []
        for which in window:
            x, y = share(accelerator, *models.dense_data(8, seed=100 + batch))
            batch += 1
            if way == "accumulate":
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x, which), y))
            elif way == "one by one":
                accelerator.backward(F.cross_entropy(model(x, which), y))
            else:
                losses.append(F.cross_entropy(model(x, which), y))
        for loss in losses:
            accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.4)))
        optimizer.step()
        optimizer.zero_grad()
    state = full_state(accelerator, model)
    accelerator.end_training()
    return state, norms


def every_way(section: dict[str, Any], folder: str) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Within ``accumulate``; backwards that each close a window; forwards first, then backwards."""
    return [windows(section, folder, way) for way in ("accumulate", "one by one", "forwards first")]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.gate("stage0", "stage2", "stage3")
def test_windows_of_any_shape(variant: str, tmp_path: Path) -> None:
    expected, norms = plain_windows()
    for results in spawn(every_way, 2, VARIANTS[variant], str(tmp_path), timeout=120):
        for state, found in results:
            close(state, expected)
            assert found == pytest.approx(norms, abs=TOLERANCE)


# ---- several engines, several optimizers, parts of the gradients ---------------------------------------------------


def pair() -> tuple[nn.Module, nn.Module]:
    with models.seeded(4):
        return nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def noise(step: int) -> tuple[Tensor, Tensor]:
    with models.seeded(50 + step):
        return torch.randn(8, 5), torch.randn(8, 6)


def adversaries(accelerator: Any) -> dict[str, Tensor]:
    """One loss that only one of two engines sees, then one that goes through both."""
    maker, judge = pair()
    of_maker, of_judge = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (maker, judge))
    if accelerator is not None:
        maker, judge, of_maker, of_judge = accelerator.prepare(maker, judge, of_maker, of_judge)
    back = (lambda loss: loss.backward()) if accelerator is None else accelerator.backward
    for step in range(3):
        z, real = noise(step) if accelerator is None else share(accelerator, *noise(step))
        fake = maker(z)
        of_judge.zero_grad()
        back(F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean())
        of_judge.step()
        of_maker.zero_grad()
        back(F.softplus(-judge(fake)).mean())
        of_maker.step()
    if accelerator is None:
        states = [dict(maker.state_dict()), dict(judge.state_dict())]
    else:
        states = [full_state(accelerator, maker), full_state(accelerator, judge)]
    return {f"{index}.{name}": tensor for index, state in enumerate(states) for name, tensor in state.items()}


def parts(accelerator: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Two optimizers step in turns with one backward's gradients, each clipped in its own way, some of one more."""
    model: Any = branches()
    groups = [[*model.a.parameters(), model.gain], [*model.b.parameters(), *model.out.parameters()]]
    first = torch.optim.SGD(groups[0], lr=0.5)
    second = torch.optim.AdamW(groups[1], lr=0.02)
    norms = []
    if accelerator is not None:
        model, first, second = accelerator.prepare(model, first, second)
    clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
    clamp = nn.utils.clip_grad_value_ if accelerator is None else accelerator.clip_grad_value_
    for step in range(4):
        x, y = models.dense_data(8, seed=step)
        if accelerator is None:
            F.cross_entropy(model(x, "ab"), y).backward()
        else:
            x, y = share(accelerator, x, y)
            accelerator.backward(F.cross_entropy(model(x, "ab"), y))
        if step == 2:  # a window that is given up
            first.zero_grad()
            second.zero_grad()
            continue
        norms.append(float(clip(groups[0], 0.05)))
        clamp(groups[1], 0.01)
        norms.append(float(clip(groups[1], 0.03, norm_type=math.inf)))
        norms.append(float(clip(model.out.parameters(), 0.02)))
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()
    state = dict(model.state_dict()) if accelerator is None else full_state(accelerator, model)
    return state, norms


def in_rank(section: dict[str, Any], folder: str) -> tuple[Any, Any]:
    first = accelerator_with(section, folder)
    one = adversaries(first)
    first.end_training()
    return one, parts(accelerator_with(section, folder))


OTHERS = ("stage2-offload", "stage2-round-robin", "stage2-round-robin-offload", "stage3-offload")


@pytest.mark.parametrize("section", [*STAGES, *(VARIANTS[name] for name in OTHERS)], ids=str)
@pytest.mark.gate("{'zero_stage': 0}", "{'zero_stage': 2}", "{'zero_stage': 3}")
def test_several_engines_and_optimizers(section: dict[str, Any], tmp_path: Path) -> None:
    together = adversaries(None)
    state, norms = parts(None)
    for one, (found, found_norms) in spawn(in_rank, 2, section, str(tmp_path), timeout=120):
        close(one, together)
        close(found, state, 1e-5)  # AdamW divides by small moments
        assert found_norms == pytest.approx(norms, abs=TOLERANCE)


# ---- what a step says ----------------------------------------------------------------------------------------------


def steps(section: dict[str, Any], folder: str) -> None:
    accelerator = accelerator_with(section, folder)
    model: Any = models.build("dense")
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, own)
    assert optimizer.optimizer is own
    x, y = models.dense_data(6)

    def backward(factor: float = 1.0) -> None:
        accelerator.backward(F.cross_entropy(model(x), y) * factor)

    before = full_state(accelerator, model)
    with pytest.raises(UsageError, match="found no gradients"):
        optimizer.step()
    close(full_state(accelerator, model), before, 0.0)
    own.param_groups[0]["lr"] = 0.0
    backward()
    optimizer.step()
    close(full_state(accelerator, model), before, 0.0)
    own.param_groups[0]["lr"] = 0.1
    backward()
    loss_of_parameters = sum((parameter**2).sum() for parameter in model.parameters() if parameter.numel())
    if section["zero_stage"] in (1, 2):
        accelerator.backward(loss_of_parameters)
    if section["zero_stage"] == 0:
        assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.zero_grad()
    backward(float("nan") if accelerator.process_index == 1 else 1.0)
    optimizer.step()  # without clipping: stages 1 to 3 look by themselves
    if section["zero_stage"]:
        assert accelerator.optimizer_step_was_skipped
        close(full_state(accelerator, model), before, 0.0)
    with pytest.raises(UnsupportedError, match="closure"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("section", STAGES, ids=str)
@pytest.mark.gate("{'zero_stage': 2}", "{'zero_stage': 3}")
def test_steps(section: dict[str, Any], tmp_path: Path) -> None:
    spawn(steps, 2, section, str(tmp_path), timeout=120)


def groups_and_owners(folder: str) -> None:
    accelerator = accelerator_with({"zero_stage": 2}, folder)
    model = models.build("dense")
    model.first.requires_grad_(False)
    groups = [{"params": model.second.parameters()}, {"params": model.first.parameters()}]
    with pytest.raises(UnsupportedError, match="holds no trained parameter"):
        accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1))
    accelerator = accelerator_with({"zero_stage": 2}, folder)
    model = models.build("dense")
    stepped = torch.optim.AdamW(model.parameters(), lr=0.1)
    F.cross_entropy(model(models.dense_data(4)[0]), models.dense_data(4)[1]).backward()
    stepped.step()
    with pytest.raises(UnsupportedError, match="has state of its parameters already"):
        accelerator.prepare(model, stepped)
    accelerator = accelerator_with({"zero_stage": 2}, folder)
    some: Any = models.build("dense")
    some, _ = accelerator.prepare(some, torch.optim.SGD(some.second.parameters(), lr=0.1))
    accelerator.backward(F.cross_entropy(some(models.dense_data(4)[0]), models.dense_data(4)[1]))
    with pytest.raises(UnsupportedError, match="in no optimizer"):
        accelerator.clip_grad_norm_(some.parameters(), 1.0)


def test_refusals(tmp_path: Path) -> None:
    spawn(groups_and_owners, 1, str(tmp_path))


# ---- the loss scale -------------------------------------------------------------------------------------------------


def update(scale: LossScale, *, overflow: bool) -> None:
    """A step, and the beginning of the next backward."""
    scale.note(overflow=overflow)
    scale.move()


def test_loss_scale_is_that_of_torch() -> None:
    settings = {"init_scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2}
    ours, theirs = LossScale(settings), torch.amp.GradScaler("cpu", **settings)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for overflow in (False, False, True, False, False, False, True, True):
        assert ours.scale == theirs.get_scale()
        parameter.grad = torch.full((1,), math.inf if overflow else 1.0)
        theirs.scale(torch.ones(()))
        theirs.step(optimizer)
        theirs.update()
        update(ours, overflow=overflow)
    again = LossScale({})
    again.load_state(theirs.state_dict())
    assert again.state().items() >= theirs.state_dict().items()


def test_hysteresis_and_least_scale() -> None:
    scale = LossScale({"init_scale": 4.0, "hysteresis": 2, "min_scale": 1.0})
    seen = []
    for _ in range(4):
        update(scale, overflow=True)
        seen.append(scale.scale)
    assert seen == [4.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize(("consecutive", "expected"), [(False, 2.0), (True, 4.0)])
def test_hysteresis_counts_overflows_in_a_row_where_asked(consecutive: bool, expected: float) -> None:
    scale = LossScale({"init_scale": 4.0, "hysteresis": 2, "consecutive_hysteresis": consecutive})
    for overflow in (True, False, True):
        update(scale, overflow=overflow)
    assert scale.scale == expected


def scaled(folder: str) -> tuple[float, float]:
    accelerator = accelerator_with({"zero_stage": 3}, folder, mixed_precision="fp16")
    model: Any = models.build("dense")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    x, y = models.dense_data(6)
    accelerator.backward(F.cross_entropy(model(x), y) * math.inf)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    accelerator.save_state(f"{folder}/scaled")
    saved = accelerator.backend.loss_scale.scale
    accelerator.end_training()
    path = Path(folder) / f"ddp-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "ddp", "use_cpu": True, "mixed_precision": "fp16"}))
    other = Accelerator(config=path)
    model = models.build("dense")
    other.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    other.load_state(f"{folder}/scaled")
    return saved, other.scaler.get_scale()


def test_loss_scale_travels(tmp_path: Path) -> None:
    assert set(spawn(scaled, 2, str(tmp_path), timeout=120)) == {(32768.0, 32768.0)}


def transposed_in_place(stage: int | None, folder: str) -> tuple[Tensor, str]:
    """A square weight after steps with ``t_()`` behind each, and what ``len`` of a group's parameters says."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    accelerator = None
    if stage is not None:
        accelerator = accelerator_with({"zero_stage": stage}, folder)
        model, optimizer = accelerator.prepare(model, optimizer)
        x = x.chunk(accelerator.num_processes)[accelerator.process_index]
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        with torch.no_grad():
            model[2].weight.t_()
    said = ""
    try:
        len(optimizer.param_groups[0]["params"])
    except UnsupportedError as refused:
        said = str(refused)
    return model[2].weight.detach().clone(), said


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_transposed_in_place_is_taken_over(stage: int, tmp_path: Path) -> None:
    expected, _ = transposed_in_place(None, "")
    for found, said in spawn(transposed_in_place, 2, stage, str(tmp_path)):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        assert "was asked for the parameters of a group" in said


class Fills(torch.autograd.Function):
    """Runs a layer anew in its backward, and runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *_parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            made: Tensor = layer(x)
        return made

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        with torch.enable_grad():
            ctx.layer(*ctx.saved_tensors)
        raise torch.OutOfMemoryError("no memory is left")


class GivesParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(Fills.apply(x, self.first, *self.first.parameters()))
        return made


def runs_out_of_memory(folder: str) -> None:
    accelerator = accelerator_with({"zero_stage": 3, "stage3_param_persistence_threshold": 0}, folder)
    model = GivesParts()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())


def test_an_error_of_memory_stays_what_it_is(tmp_path: Path) -> None:
    spawn(runs_out_of_memory, 2, str(tmp_path))


def optimizers_of_the_same_parameters(stage: int, folder: str) -> tuple[str, Tensor | None, str]:
    """Return what two in one ``prepare`` are told, a weight after the advice, and what ``add_param_group`` says."""
    model, x, loss = overlapping()
    first = torch.optim.AdamW(model.parameters(), lr=0.01)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    accelerator = accelerator_with({"zero_stage": stage}, folder)
    said = ""
    try:
        accelerator.prepare(model, first, second)
    except UnsupportedError as refused:
        said = str(refused)
    model, first = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    mine = x.chunk(accelerator.num_processes)[accelerator.process_index]
    for phase in range(2):
        optimizer: Any = accelerator.prepare(torch.optim.SGD(model[2].parameters(), lr=0.1)) if phase else first
        optimizer.zero_grad()
        accelerator.backward(loss(model(mine)))
        optimizer.step()
    state = accelerator.get_state_dict(model)
    weight = state["2.weight"].clone() if state else None
    added = ""
    try:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    except UnsupportedError as refused:
        added = str(refused)
    return said, weight, added


def overlapping() -> tuple[Any, Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return model, x, lambda output: output.pow(2).mean()


@pytest.mark.parametrize("stage", [2, 3])
def test_two_optimizers_of_one_parameter_are_refused_and_the_advice_works(stage: int, tmp_path: Path) -> None:
    model, x, loss = overlapping()
    for optimizer in (torch.optim.AdamW(model.parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.1)):
        model.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    for said, weight, added in spawn(optimizers_of_the_same_parameters, 2, stage, str(tmp_path)):
        assert "AdamW and SGD both hold the parameter 2.weight of Sequential and 1 more" in said
        assert "accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.01))" in said
        if weight is not None:
            torch.testing.assert_close(weight, model[2].weight.detach(), atol=1e-6, rtol=1e-5)
        assert "takes no group afterwards" in added


def momentum_read_and_written(stage: int | None, folder: str, several: bool) -> tuple[list[Tensor], list[str], Any]:
    """Two steps; between them the momentum of a weight is read and halved. ``None`` does it in plain torch."""
    model, x, loss = overlapping()

    def sgd(part: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)

    optimizers: list[Any] = [sgd(model[0]), sgd(model[2])] if several else [sgd(model)]
    accelerator: Any = None
    if stage is not None:
        accelerator = accelerator_with({"zero_stage": stage}, folder)
        model, *optimizers = accelerator.prepare(model, *optimizers)
        x = x.chunk(accelerator.num_processes)[accelerator.process_index]
    last, weight = optimizers[-1], model[2].weight
    seen: list[Tensor] = []
    said: list[str] = []
    for number in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if accelerator is None:
            loss(model(x)).backward()
        else:
            accelerator.backward(loss(model(x)))
        for optimizer in optimizers:
            optimizer.step()
        if number:
            break
        if accelerator is None:
            seen.append(last.state[weight]["momentum_buffer"].clone())
            last.state[weight]["momentum_buffer"] *= 0.5
            continue
        for ask in (
            lambda: last.state[weight]["momentum_buffer"],
            lambda: weight in last.state,
            lambda: last.state.get(weight),
            lambda: last.state.pop(weight),
            lambda: last.state.__setitem__(weight, {}),
        ):
            try:
                ask()
            except UnsupportedError as refused:
                said.append(str(refused))
        if several and stage < 3:
            break
        from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

        seen.append(safe_get_full_optimizer_state(weight, "momentum_buffer"))
        safe_set_full_optimizer_state(weight, 0.5 * seen[0], "momentum_buffer")
    state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return seen, said, {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_of_a_parameter_is_refused_and_the_advice_works(stage: int, several: bool, tmp_path: Path) -> None:
    (expected,), _, weights = momentum_read_and_written(None, "", several)
    for seen, said, state in spawn(momentum_read_and_written, 2, stage, str(tmp_path), several):
        assert len(said) == 5
        assert all("the parameter 2.weight of Sequential" in words for words in said)
        if several and stage < 3:
            # DeepSpeed finds no state of one of several optimizers here; the stage that is advised does, the next case.
            assert all("under zero_stage: 3" in words for words in said)
            continue
        (found,) = seen
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], atol=1e-6, rtol=1e-5)
