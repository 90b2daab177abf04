"""Batch norms, buffers and averages of weights on several ranks, against plain torch in one process."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import EMA, Accelerator
from drivetrain_testing import spawn

ROWS, STEPS, SAVED_AT = 12, 5, 3
DECAY = 0.8
TOLERANCE = 2e-5  # What is promised of float32; the sums of 12 rows are added in another order.
AVERAGES = 1e-6  # Beyond what the weights themselves differ, nothing is added in another order.


@dataclass(frozen=True)
class Place:
    """A backend on a world, with its section."""

    backend: str
    world_size: int
    section: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([f"{self.backend}x{self.world_size}", *(f"{key}={one}" for key, one in self.section.items())])

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``Accelerator``."""
        names = {"megatron": "megatron_lm_plugin", "deepspeed": "deepspeed_plugin"}
        return {names[self.backend]: self.section} if self.section else {}

    def run(self, job: Any, *arguments: Any) -> list[Any]:
        # Not imported here, since engines change the environment of the process that imports them.
        wanted = [] if self.backend == "single" else [f"drivetrain_{self.backend}"]
        for module in wanted + ["deepspeed"] * (self.backend == "deepspeed"):
            if find_spec(module) is None:
                pytest.skip(f"{module} is not installed")
        return spawn(job, self.world_size, self, *arguments)


def tensor(size: int, world_size: int, **section: Any) -> Place:
    return Place("megatron", world_size, {"tensor_parallel_size": size, **section})


def pipeline(size: int, world_size: int, **section: Any) -> Place:
    return Place("megatron", world_size, {"pipeline_parallel_size": size, **section})


def zero(stage: int, world_size: int) -> Place:
    return Place("deepspeed", world_size, {"zero_stage": stage})


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The greatest difference."""
    assert set(one) == set(other)
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


# ---- batch norms ----------------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    """Each kind of batch norm, with and without weights, momentum and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm2d = nn.BatchNorm2d(4)
        self.signal = nn.Conv1d(4, 6, 1)
        self.norm1d = nn.BatchNorm1d(6, momentum=None)
        self.first = nn.Linear(6, 8)
        self.plain = nn.BatchNorm1d(8, affine=False)
        self.second = nn.Linear(8, 8)
        self.untracked = nn.BatchNorm1d(8, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        hidden = F.silu(self.norm2d(self.conv(image))).flatten(2)
        hidden = F.silu(self.norm1d(self.signal(hidden))).mean(2)
        hidden = F.silu(self.plain(self.first(hidden)))
        hidden = F.silu(self.frozen(self.untracked(self.second(hidden))))
        output: Tensor = self.head(hidden)
        return output

    def train(self, mode: bool = True) -> Normalised:
        """One layer stays as it is, as in fine-tuning."""
        super().train(mode)
        self.frozen.eval()
        return self


def make_net(seed: int = 0) -> Normalised:
    torch.manual_seed(seed)
    net = Normalised()
    with torch.no_grad():
        net.frozen.running_mean.normal_()
        net.frozen.running_var.uniform_(0.5, 2)
    return net.train()


def make_batches(rows: int = ROWS, steps: int = SAVED_AT) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            3 + torch.randn(rows, 2, 6, 6, generator=generator) * torch.linspace(0.5, 2, rows).view(-1, 1, 1, 1),
            torch.randint(0, 3, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


def shares(rows: int, ranks: int) -> list[int]:
    """Batches of different sizes that make ``rows`` together."""
    sizes = [rows // ranks + (rank % 2) - (rank % 2 == 0) * (rank < ranks - 1) for rank in range(ranks)]
    sizes[-1] += rows - sum(sizes)
    return sizes


def share(accelerator: Accelerator, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's rows; ranks have different numbers of them."""
    rank, ranks = accelerator.data_parallel_rank, accelerator.backend.topology.dp_size
    x, y = batch
    sizes = shares(len(x), ranks)
    return x.split(sizes)[rank], y.split(sizes)[rank]


def outcome(state: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    net.eval()
    with torch.no_grad():
        return {name: one.clone() for name, one in state.items()} | {"evaluation": net(make_batches()[0][0][:4])}


def trained_alone() -> dict[str, Tensor]:
    net = make_net()
    # Not Adam: gradients of biases before a batch norm are zero but for rounding, which it would blow up.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in make_batches():
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return outcome(net.state_dict(), net)


def trained_with_whole_statistics(at: Place) -> tuple[dict[str, Tensor], Tensor]:
    accelerator = Accelerator(cpu=True, distributed_type=at.backend, sync_batch_norm=True, **at.arguments)
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    for batch in make_batches():
        x, y = share(accelerator, batch)
        accelerator.backward(F.cross_entropy(model(x), y, reduction="sum"), num_items=len(x))
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    result = outcome(state, model)
    accelerator.end_training()
    return result, result["evaluation"]


@pytest.mark.parametrize(
    "at",
    [
        Place("ddp", 2),
        Place("ddp", 3),
        Place("fsdp", 4),
        zero(0, 2),
        zero(2, 3),
        zero(3, 2),
        tensor(2, 4),
    ],
    ids=str,
)
@pytest.mark.gate("ddpx3", "fsdpx4", "deepspeedx2-zero_stage=3", "megatronx4-*")
def test_batch_norms_take_statistics_of_the_global_batch(at):
    ranks = at.run(trained_with_whole_statistics)
    expected = trained_alone()
    assert apart(ranks[0][0], expected) < TOLERANCE
    assert all(torch.equal(evaluation, ranks[0][1]) for _, evaluation in ranks)


# ---- buffers --------------------------------------------------------------------------------------------------------


def evaluated(at: Place, how: str) -> Tensor | None:
    """Windows of two micro-batches with local statistics, then one evaluation of the same input."""
    accelerator = Accelerator(cpu=True, distributed_type=at.backend, gradient_accumulation_steps=2, **at.arguments)
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batches = make_batches(steps=4)
    for batch in batches:
        with accelerator.accumulate(model):
            x, y = share(accelerator, batch)
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    if how == "after update_bn":
        with torch.no_grad():
            for batch in batches[:2]:
                model(share(accelerator, batch)[0])
    rank, last = accelerator.process_index, accelerator.num_processes - 1
    looks = {"main process alone": rank == 0, "last process alone": rank == last}.get(how, True)
    model.eval()
    with torch.no_grad():
        output = model(batches[0][0]) if looks else None
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return output


@pytest.mark.parametrize(
    ("at", "how"),
    [
        (Place("ddp", 3), "all"),
        (Place("ddp", 3), "after update_bn"),
        (Place("ddp", 2), "main process alone"),
        (Place("fsdp", 3), "after update_bn"),
        (zero(0, 2), "all"),
        (zero(2, 3), "after update_bn"),
        (zero(3, 2), "all"),
        (tensor(2, 4), "all"),
    ],
    ids=str,
)
@pytest.mark.gate("ddpx3-after*", "ddpx2-main*", "fsdpx3-*", "deepspeedx2-zero_stage=3-*", "megatronx4-*")
def test_ranks_evaluate_with_the_same_statistics(at, how):
    outputs = [output for output in at.run(evaluated, how) if output is not None]
    assert len(outputs) == (1 if "alone" in how else at.world_size)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_rank_may_evaluate_alone_with_the_main_processes_statistics():
    at = Place("ddp", 3)
    alone = at.run(evaluated, "last process alone")[-1]
    assert torch.equal(alone, at.run(evaluated, "all")[0])


class Queued(nn.Module):
    """A queue of features, a running mean and a count of tokens, which forward computes from its batch."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("queue", torch.ones(2 * ROWS, 4))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        features = self.embed(x)
        if self.training:
            with torch.no_grad():
                seen, kept = x, features.detach()
                if self.gathers and dist.is_initialized():
                    seen, kept = (_gathered(one) for one in (seen, kept))
                self.queue.copy_(torch.cat([kept, self.queue])[: 2 * ROWS])
                self.mean.lerp_(seen.mean(0), 0.1)
                self.tokens += int((seen > 0).sum())
                self.calls += 1
        output: Tensor = self.head(features - self.mean) @ self.queue.T
        return output


def _gathered(one: Tensor) -> Tensor:
    parts = [torch.empty_like(one) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, one.contiguous())
    return torch.cat(parts)


def queued(at: Place | None, gathers: bool) -> tuple[list[str], dict[str, Tensor]]:
    """What is logged, and the parameters and buffers after five steps."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain").addHandler(handler)
    torch.manual_seed(0)
    net = Queued(gathers)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    accelerator = None
    if at is not None:
        accelerator = Accelerator(cpu=True, distributed_type=at.backend, **at.arguments)
        net, optimizer = accelerator.prepare(net, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(ROWS, 4, generator=generator)
        if accelerator is not None:
            x = x.chunk(accelerator.backend.topology.dp_size)[accelerator.data_parallel_rank]
        loss = net(x).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state = dict(net.state_dict()) if accelerator is None else accelerator.get_state_dict(net)
    state = {name: one.clone() for name, one in state.items()} | {"mean": net.mean.clone()}
    logging.getLogger("drivetrain").removeHandler(handler)
    if accelerator is not None:
        accelerator.end_training()
    return said, state


@pytest.mark.parametrize("at", [Place("ddp", 3), Place("fsdp", 3), zero(1, 2), tensor(2, 4)], ids=str)
@pytest.mark.gate("ddpx3", "deepspeed*")
def test_buffers_that_forward_computes_from_a_ranks_samples_are_said_once(at):
    ranks = [said for said, _ in at.run(queued, False)]
    (warning,) = [each for each in ranks[0] if "writes to buffers in forward" in each]
    assert "(queue, mean, tokens)" in warning
    assert not any("writes to buffers" in each for said in ranks[1:] for each in said)


@pytest.mark.parametrize("at", [Place("ddp", 3), Place("fsdp", 3), zero(1, 2)], ids=str)
@pytest.mark.gate("fsdpx3")
def test_buffers_of_gathered_samples_are_those_of_one_process_and_nobodys_business(at):
    ranks = at.run(queued, True)
    assert not any("writes to buffers" in each for said, _ in ranks for each in said)
    assert apart(ranks[0][1], queued(None, False)[1]) < TOLERANCE


# ---- averages -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Packed and tied weights, a frozen layer, a buffer: what engines lay out in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.packed, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.full((8,), 0.1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.shift
        query, key, value = (one[:, None] for one in self.packed(hidden).chunk(3, -1))
        hidden = hidden + self.out(F.scaled_dot_product_attention(query, key, value)[:, 0])
        hidden = hidden + self.down(F.gelu(self.up(hidden)))
        output: Tensor = self.head(hidden + self.frozen(hidden))
        return output


def make_attention() -> tuple[Attention, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Attention()
    # A large eps: the gradient of the keys' bias is zero but for rounding.
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-2)


def make_tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 11, (ROWS, 5), generator=generator) for _ in range(STEPS)]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def averaged_alone(steps: int, use_buffers: bool = False) -> dict[str, Tensor]:
    net, optimizer = make_attention()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=use_buffers)
    for tokens in make_tokens()[:steps]:
        loss_of(net, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.shift.mul_(1.1)
        average.update_parameters(net)
    return average.module.state_dict()


def averaged(at: Place, folder: Path, part: str, use_buffers: bool = False) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, distributed_type=at.backend, **at.arguments)
    model, optimizer = accelerator.prepare(*make_attention())
    ema = EMA(accelerator, model, DECAY, use_buffers=use_buffers)
    if part == "second":
        warnings.filterwarnings("ignore", message=".*random state of.*")  # Other worlds have other numbers of them.
        accelerator.load_state(folder)
    rank, ranks = accelerator.data_parallel_rank, accelerator.backend.topology.dp_size
    for tokens in make_tokens()[slice(SAVED_AT) if part == "first" else slice(SAVED_AT, None)]:
        accelerator.backward(loss_of(model, tokens.chunk(ranks)[rank]))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.unwrap_model(model).shift.mul_(1.1)
        ema.update()
    before = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
    if part == "first":
        accelerator.save_state(folder)
    with ema.averaged():
        result = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    accelerator.end_training()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Place("single", 1), Place("fsdp", 3)),
        (Place("ddp", 2), tensor(2, 2)),
        (Place("fsdp", 4), zero(2, 3)),
        (tensor(2, 4, data_parallel="zero1"), Place("ddp", 3)),
        (pipeline(2, 2), zero(3, 2)),
        (zero(0, 2), pipeline(2, 4, data_parallel="zero1")),
        (zero(1, 2), Place("single", 1)),
        (zero(3, 4), Place("fsdp", 2)),
    ],
    ids=str,
)
@pytest.mark.turns(2)
def test_an_average_is_torchs_and_goes_on_under_another_backend(first, second, tmp_path):
    begun = first.run(averaged, tmp_path / "saved", "first")[0]
    assert apart(begun, averaged_alone(SAVED_AT)) < AVERAGES
    ended = second.run(averaged, tmp_path / "saved", "second")[0]
    assert apart(ended, averaged_alone(STEPS)) < AVERAGES


def test_an_average_of_buffers_is_torchs(tmp_path):
    found = Place("fsdp", 2).run(averaged, tmp_path / "saved", "first", True)[0]
    assert apart(found, averaged_alone(SAVED_AT, use_buffers=True)) < AVERAGES
