"""Where pipelines are cut, who says so, and what may stand between the blocks, against the same model uncut."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError, UsageError, hookimpl
from drivetrain.api.programs import get_registry
from drivetrain_megatron.pipeline.skeleton import is_absent
from drivetrain_testing import spawn

WIDTH, ROWS = 8, 8
ATOL = 5e-6
"""Float32: a batch in parts adds the same numbers in another order."""


def accelerator(section: dict[str, Any], **config: Any) -> Accelerator:
    overrides = {"distributed_type": "megatron", "use_cpu": True, "megatron.pipeline_parallel_size": 2, **config}
    overrides |= {f"megatron.{key}": value for key, value in section.items()}
    return Accelerator(config=load_config(overrides=overrides, environ={}))


def follows(made: Accelerator, kind: type[nn.Module], *, empty: bool = False, **inputs: Any) -> Any:
    """Train beside the plain model; what was prepared."""
    torch.manual_seed(0)
    plain = kind()
    torch.manual_seed(0)
    with made.init_empty_weights() if empty else nullcontext():
        model: Any = kind()
    assert any(one.is_meta for one in model.parameters()) == empty
    step = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(3):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        expected = F.mse_loss(plain(x, **inputs), x)
        loss = F.mse_loss(model(x, **inputs), x)
        made.backward(loss)
        torch.testing.assert_close(loss.item(), expected.item(), rtol=0, atol=ATOL)
        for one, backward in ((optimizer, None), (step, expected.backward)):
            if backward:
                backward()
            one.step()
            one.zero_grad()
    state = made.backend.broadcast_object(dict(made.get_state_dict(model)))
    for name, value in plain.named_parameters():
        torch.testing.assert_close(state[name], value, rtol=0, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}")
    return model


class Stack(nn.Module):
    """Blocks alike in bytes; the first one takes as long as a hundred others."""

    def __init__(self) -> None:
        super().__init__()
        # What a busy machine adds must not decide: the first takes twice as long as the others together.
        self.blocks = nn.ModuleList(Slow(0.1 if index == 0 else 0.01) for index in range(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Slow(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def cut_by(section: dict[str, Any]) -> tuple[str, ...]:
    made = accelerator(section)
    model = follows(made, Stack)
    assert model.calls == 3, "three batches, whose parts count once; measuring counts nothing"
    points: tuple[str, ...] = model._drivetrain.trainable.pipeline.planner.cut.points
    made.end_training()
    return points


@pytest.mark.parametrize(("balance", "point"), [("bytes", "blocks.3"), ("time", "blocks.1")])
def test_stages_are_balanced_by_bytes_or_by_measured_time(balance: str, point: str) -> None:
    assert spawn(cut_by, 2, {"balance": balance}) == [(point,)] * 2


class Knowing:
    """A plugin that knows where one model is cut."""

    @hookimpl
    def drivetrain_pipeline_split(self, model: nn.Module, num_stages: int) -> list[str] | None:
        return ["blocks.4"] if isinstance(model, Stack) and num_stages == 2 else None


def cut_by_plugin(section: dict[str, Any]) -> tuple[str, ...]:
    get_registry().register(Knowing(), name="knowing")
    return cut_by(section)


def test_a_plugin_that_knows_the_model_is_asked_before_the_balance() -> None:
    assert spawn(cut_by_plugin, 2, {}) == [("blocks.4",)] * 2
    assert spawn(cut_by_plugin, 2, {"split_points": ["blocks.2"]}) == [("blocks.2",)] * 2, "the user first"


class Halving(nn.Module):
    """Changes a gradient on its way, for which forward needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        x.register_hook(lambda gradient: gradient * 0.5)
        return x


class Mistaken:
    """A plugin that names one module too many."""

    @hookimpl
    def drivetrain_pipeline_split(self, model: nn.Module, num_stages: int) -> list[str]:
        return [f"blocks.{index}" for index in range(1, num_stages + 1)]


def cuts_as_advised() -> None:
    names = r"names 2 module\(s\), 2 stages need 1\. Name 1 in megatron\.split_points: where the second and each"
    time, in_bytes, in_half = {"balance": "time"}, {"balance": "bytes"}, {"split_points": ["blocks.2"]}
    cases: list[tuple[str, dict[str, Any], str, list[dict[str, Any]]]] = [
        (
            "none",
            time,
            r"the time of Halving's parts cannot be measured: .*\. Write megatron\.balance: bytes, or megatron\.split",
            [in_bytes, time | in_half],
        ),
        ("none", {"split_points": ["blocks.1", "blocks.3"]}, rf"megatron\.split_points {names}", [in_half]),
        ("mistaken", {}, rf"a plugin {names}", [in_half]),
    ]
    for plugin, section, words, advised in cases:
        if plugin == "mistaken":
            get_registry().register(Mistaken(), name=plugin)
        made = accelerator(section)
        with pytest.raises(UsageError, match=words):
            follows(made, Halving)
        made.end_training()
        for each in advised:
            made = accelerator(each)
            follows(made, Halving)
            made.end_training()


def test_cuts_that_cannot_be_made_are_made_as_advised() -> None:
    spawn(cuts_as_advised, 2, timeout=100)


class Scaled(nn.Module):
    """``scales`` is a table of as many rows as a batch has, and belongs to no row of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * scales.mean(0)
        return x


def table_goes_whole(section: dict[str, Any]) -> None:
    made = accelerator(section)
    follows(made, Scaled, scales=torch.linspace(0.5, 1.5, ROWS * WIDTH).view(ROWS, WIDTH))
    made.end_training()


def test_an_input_as_long_as_the_batch_can_go_whole_to_every_part() -> None:
    spawn(table_goes_whole, 2, {"whole_inputs": ["scales"], "num_micro_batches": 4})
    # Nobody needs to say it: the trial of the model finds that cutting the table changes the output.
    spawn(table_goes_whole, 2, {"num_micro_batches": 4})


class Double(torch.autograd.Function):
    """Three times as much, and a gradient that only it knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        return x * 3, also.sin() + x

    @staticmethod
    def backward(ctx: Any, x: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, also


class Custom(nn.Module):
    """A function of the user's own between the blocks, and inside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = Doubling()

    def forward(self, x: Tensor) -> Tensor:
        other = self.blocks[0](x)
        for block in self.blocks[1:]:
            x, other = Double.apply(torch.tanh(block(other)), other + x)
        return self.last(x + other)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(self.out(x), x)[0]


def custom_follows(section: dict[str, Any]) -> None:
    made = accelerator(section)
    follows(made, Custom)
    made.end_training()


def test_functions_with_gradients_of_their_own_between_the_blocks() -> None:
    spawn(custom_follows, 2, {})


class Shared(nn.Module):
    """Both ends are one matrix; the blocks are wide enough to be made without memory, and can be shared over tp."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def built_from_nothing(section: dict[str, Any]) -> list[str]:
    made = accelerator(section)
    model = follows(made, Shared, empty=True)
    held = [name for name, one in model.named_parameters() if not is_absent(one)]
    made.end_training()
    return held


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.gate("2")
def test_a_model_made_without_memory_is_the_eager_one_on_its_stages(degree: int) -> None:
    found = spawn(built_from_nothing, 2 * degree, {"tensor_parallel_size": degree, "num_micro_batches": 2})
    first, second = found[0], found[-1]
    assert "first.weight" in first
    assert "first.weight" in second
    assert not {name for name in first if name.startswith("blocks.3")}
    assert not {name for name in second if name.startswith("blocks.0")}


class Remembering(nn.Module):
    """Blocks that keep what they computed in an object that forward is given, and add what the first block kept."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Notebook) -> Tensor:
        for block in self.blocks:
            x = memory.add(block(x))
        return x


class Notebook:
    """Keeps tensors under no name that anything else knows."""

    def __init__(self) -> None:
        self.pages: list[Tensor] = []

    def add(self, x: Tensor) -> Tensor:
        self.pages.append(x)
        return x + self.pages[0]


def remembers(training: bool) -> None:
    made = accelerator({"split_points": ["blocks.2"]})
    model, _ = made.prepare(kept := Remembering(), torch.optim.SGD(kept.parameters(), lr=0.1))
    model.train(training)
    with pytest.raises(UnsupportedError, match=r"layers leave tensors for later layers in an argument .*Notebook"):
        made.backward(model(torch.ones(ROWS, WIDTH), Notebook()).sum())
    made.end_training()


@pytest.mark.parametrize("training", [True, False])
def test_an_object_that_keeps_tensors_between_layers_is_refused(training: bool) -> None:
    spawn(remembers, 2, training)
