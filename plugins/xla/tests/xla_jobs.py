"""What the tests of the ``xla`` backend run in fresh processes: small trainings, and what can be seen of them."""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, load_config, set_seed

GLOBAL_BATCH, STEPS, WIDTH, WORDS = 8, 6, 32, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embeddings, blocks in a list, a buffer that training changes and the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        hidden = self.embed(x) * (1 + self.seen / 10)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def make(
    backend: str, mesh: Mapping[str, int] | None = None, section: Mapping[str, Any] | None = None, **further: Any
) -> Accelerator:
    """An accelerator that a configuration file describes."""
    config = {"distributed_type": backend, "use_cpu": True, "mesh": dict(mesh or {}), **further}
    if section:
        config[backend] = dict(section)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)  # JSON is YAML
        file.flush()
        return Accelerator(config=load_config(file.name, environ={}))


class Run:
    """A script: clipping, a scheduler that moves in each step, AdamW with two groups."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        seed: int = 1,
        rows: int = GLOBAL_BATCH * STEPS,
        max_norm: float | None = 1.0,
        fused: bool | None = None,
    ) -> None:
        self.accelerator, self._max_norm = accelerator, max_norm
        torch.manual_seed(seed)
        model = Net()
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
        # A large eps: a gradient of nearly zero, whose sign the order of sums decides, must not make a full step.
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3, fused=fused)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        numbers = torch.randint(WORDS, (rows, 5), generator=torch.Generator().manual_seed(0))
        data = TensorDataset(numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous())
        size = GLOBAL_BATCH // accelerator.backend.topology.dp_size
        loader = DataLoader(data, batch_size=size, shuffle=True)
        self.model: Any
        self.optimizer: Any
        self.loader: Any
        self.model, self.optimizer, self.scheduler, self.loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.curve: list[Tensor] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        """Nothing in here looks at a number."""
        loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        self.accelerator.backward(loss)
        if self._max_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self._max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.curve.append(self.accelerator.reduce(loss.detach(), "mean"))

    def epoch(self, stop: int | None = None) -> None:
        for number, (x, y) in enumerate(self.loader, start=1):
            self.step(x, y)
            if number == stop:
                return

    def losses(self) -> list[float]:
        return [float(loss) for loss in self.curve]


def curve(backend: str, mesh: Mapping[str, int], section: Mapping[str, Any], epochs: int = 2) -> list[float]:
    """Losses of a run."""
    accelerator = make(backend, mesh, section)
    run = Run(accelerator)
    for _ in range(epochs):
        run.epoch()
    accelerator.end_training()
    return run.losses()


def shards(mesh: Mapping[str, int], path: Path) -> dict[str, Any]:
    """Share that the first device holds of parameters and moments: after a step, after a load, after a step again."""
    from torch_xla.distributed.spmd import XLAShardedTensor

    accelerator = make("xla", mesh, {"min_shard_elements": 1})
    run = Run(accelerator)

    def held(tensor: Tensor) -> float:
        return XLAShardedTensor(tensor).local_shards[0].data.numel() / tensor.numel()

    def look() -> dict[str, tuple[float, ...]]:
        run.accelerator.backend.sync()
        return {
            name: (held(parameter), *(held(run.optimizer.state[parameter][slot]) for slot in ("exp_avg", "exp_avg_sq")))
            for name, parameter in run.model.named_parameters()
        }

    run.epoch(stop=2)
    found = [look()]
    accelerator.save_state(path)
    run.epoch(stop=1)
    accelerator.load_state(path)
    found.append(look())
    run.epoch(stop=2)
    found.append(look())
    accelerator.end_training()
    return {"found": found}


def counts(
    mesh: Mapping[str, int], section: Mapping[str, Any], epochs: int, rows: int, max_norm: float | None = 1.0
) -> list[tuple[int, int]]:
    """Graphs compiled and values read from the device so far, after each epoch of nothing but training."""
    from drivetrain_xla.watch import compile_count, read_count

    run = Run(make("xla", mesh, section), rows=rows, max_norm=max_norm)
    found = []
    for _ in range(epochs):
        run.epoch()
        found.append((compile_count(), read_count()))
    run.accelerator.end_training()
    return found


def fused(backend: str) -> list[float]:
    """Losses of an epoch with torch's fused AdamW."""
    accelerator = make(backend)
    run = Run(accelerator, fused=True)
    run.epoch()
    accelerator.end_training()
    return run.losses()


def ragged(backend: str, section: Mapping[str, Any]) -> tuple[list[float], list[int], int]:
    """Losses with epochs that end in a short batch, what is gathered for metrics, graphs compiled in the last one."""
    accelerator = make(backend, {}, section)
    run = Run(accelerator, rows=GLOBAL_BATCH * 2 + 3)
    seen: list[int] = []
    compiled: list[int] = []
    for _ in range(3):
        for x, y in run.loader:
            run.step(x, y)
            first = accelerator.gather_for_metrics(y[:, 0])
            seen += first.tolist()
        if backend == "xla":
            from drivetrain_xla.watch import compile_count

            compiled.append(compile_count())
    accelerator.end_training()
    return run.losses(), seen, compiled[-1] - compiled[1] if compiled else 0


def dropping(seed: int) -> tuple[list[float], list[float], list[float]]:
    """Numbers drawn on the device after a seed, after a save, and after the load of that save."""
    accelerator = make("xla")
    set_seed(seed)
    drawn = [torch.rand(3, device=accelerator.device).tolist()]
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(f"{folder}/random")
        drawn.append(torch.rand(3, device=accelerator.device).tolist())
        accelerator.load_state(f"{folder}/random")
        drawn.append(torch.rand(3, device=accelerator.device).tolist())
    accelerator.end_training()
    return drawn[0], drawn[1], drawn[2]


def moved() -> dict[str, Any]:
    """What a model, and an optimizer made before, look like after ``prepare``."""
    accelerator = make("xla")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [id(parameter) for parameter in model.parameters()]
    prepared, _ = accelerator.prepare(model, optimizer)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    result = {
        "tied": model.head.weight is model.embed.weight,
        "same": [id(parameter) for parameter in prepared.parameters()] == before == held,
        "devices": {tensor.device.type for tensor in (*model.parameters(), *model.buffers())},
    }
    accelerator.end_training()
    return result


def shapes(*trials: list[int]) -> list[str]:
    """What is logged when inputs have these lengths, step by step; each trial has a model of its own."""
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("drivetrain_xla").addHandler(listener)
    accelerator = make("xla", {}, {"warmup_steps": 3, "max_recompiles": 2})
    for lengths in trials:
        run = Run(accelerator, max_norm=None)
        for length in lengths:
            numbers = torch.zeros(GLOBAL_BATCH, length, dtype=torch.int64, device=accelerator.device)
            run.step(numbers, numbers)
        accelerator.free_memory()
    accelerator.end_training()
    return told


def late_verdicts() -> dict[str, Any]:
    """A step whose gradient is not finite, with nobody looking until the next one is done."""
    accelerator = make("xla")
    run = Run(accelerator)
    batches = [(x, y) for x, y in run.loader]
    run.step(*batches[0])
    before = {name: tensor.cpu() for name, tensor in run.model.named_parameters()}
    counted = float(run.optimizer.state[run.model.embed.weight]["step"])
    rate = run.scheduler.get_last_lr()
    loss = F.cross_entropy(run.model(batches[1][0]).flatten(0, 1), batches[1][1].flatten()) * float("nan")
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    unasked = run.optimizer.pending is not None
    after = {name: tensor.cpu() for name, tensor in run.model.named_parameters()}
    run.step(*batches[2])
    result = {
        "unasked": unasked,
        "untouched": all(torch.equal(before[name], after[name]) for name in before),
        "counted": float(run.optimizer.state[run.model.embed.weight]["step"]) - counted,
        "rates": [a / b for a, b in zip(run.scheduler.get_last_lr(), rate, strict=True)],
        "finite": all(bool(torch.isfinite(tensor.cpu()).all()) for tensor in run.model.parameters()),
    }
    accelerator.end_training()
    return result


def first_step_skipped() -> tuple[bool, int, bool]:
    """The very first step is skipped: was it told, how much state has the optimizer, and does the next one train."""
    accelerator = make("xla")
    run = Run(accelerator)
    batches = [(x, y) for x, y in run.loader]
    accelerator.backward(run.model(batches[0][0]).sum() * float("inf"))
    accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    skipped = accelerator.optimizer_step_was_skipped
    states = len(run.optimizer.state)
    before = run.model.embed.weight.cpu()
    run.step(*batches[1])
    moved = not torch.equal(before, run.model.embed.weight.cpu())
    accelerator.end_training()
    return skipped, states, moved


def graph_cache(folder: str) -> tuple[int, list[str]]:
    """Files in the cache of compiled graphs after a step, and what is logged."""
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("drivetrain_xla").addHandler(listener)
    run = Run(make("xla", {}, {"compilation_cache": folder}))
    run.epoch(stop=1)
    run.losses()
    run.accelerator.end_training()
    return len(list(Path(folder).iterdir())), told


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def write(backend: str, path: Path, mesh: Mapping[str, int], take: Path | None = None, stop: int = 2) -> list[float]:
    """Begin, or take up a checkpoint; some steps; save. The losses."""
    accelerator = make(backend, mesh)
    run = Run(accelerator, seed=1 if take is None else 77)
    if take is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*random state of.*")  # More processes than were saved.
            accelerator.load_state(take)
    run.epoch(stop=stop)
    accelerator.save_state(path)
    accelerator.end_training()
    return run.losses()


def export(path: Path, mesh: Mapping[str, int]) -> dict[str, Tensor]:
    """``save_model``, and what a plain module holds that loads it, beside the state dict in full."""
    accelerator = make("xla", mesh)
    run = Run(accelerator)
    run.epoch(stop=1)
    accelerator.save_model(run.model, path)
    state = {name: tensor.cpu() for name, tensor in accelerator.get_state_dict(run.model).items()}
    accelerator.end_training()
    return state


# ---- launchers -------------------------------------------------------------------------------------------------------


def in_threads() -> None:
    """What ``torch_xla.launch`` does with several CPU devices, without a further process."""
    from torch_xla._internal import pjrt

    pjrt.spawn_threads(_train_a_step)


def _train_a_step(_: int) -> None:
    run = Run(make("xla", {}, {"spmd": False}))
    run.epoch(stop=1)


def brought(passes: int) -> int:
    """Batches, of those that pass through a convolution without gradients, whose scores are not those of the host."""
    accelerator = make("xla")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3), nn.Flatten())
    images = torch.randn(360, 1, 8, 8)
    with torch.no_grad():
        expected = model(images).split(60)
        model, loader = accelerator.prepare(model.eval(), DataLoader(TensorDataset(images), batch_size=60))
        wrong = 0
        for _ in range(passes):
            for (batch,), scores in zip(loader, expected, strict=True):
                wrong += not torch.allclose(accelerator.gather_for_metrics(model(batch)).cpu(), scores, atol=1e-4)
    return wrong
