"""Every backend reads what every backend wrote: the resumed curve is that of a single process that was never stopped.

A new backend joins by a line in ``BACKENDS``. Each writer saves once; each reader is one job that takes up all of them.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, load_config
from drivetrain.errors import BackendError
from drivetrain.registry import get_registry
from drivetrain_testing import spawn


@dataclass(frozen=True)
class Case:
    """A backend on a world; ``mesh`` and ``section`` where they are not the default ones."""

    backend: str
    world_size: int
    mesh: tuple[tuple[str, int], ...] = ()
    section: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        settings = [f"{key}{value}" for key, value in (*self.mesh, *self.section)]
        return "-".join([f"{self.backend}x{self.world_size}", *settings])


BACKENDS = [
    Case("single", 1),
    Case("ddp", 2),
    Case("dp", 1),
    Case("fsdp", 2),
    Case("fsdp", 4),
    Case("fsdp", 4, (("dp_replicate", 2), ("dp_shard", 2))),
    # One micro-batch, since the model counts its forwards.
    Case("megatron", 2, section=(("pipeline_parallel_size", 2), ("num_micro_batches", 1), ("schedule", "gpipe"))),
    Case("deepspeed", 2, section=(("zero_stage", 0),)),
    Case("deepspeed", 2, section=(("zero_stage", 1),)),
    Case("deepspeed", 2, section=(("zero_stage", 2),)),
    Case("deepspeed", 2, section=(("zero_stage", 3),)),
    Case("deepspeed", 4, section=(("zero_stage", 3),)),
]

GLOBAL_BATCH, STEPS, CUT, EPOCHS = 8, 6, 4, 2
TOLERANCE = 1e-6  # float32 losses of about 2; other worlds add the same numbers in another order.
WORDS, WIDTH = 12, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embeddings, a buffer that the training changes and the output depends on, a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)  # Losses near 2: the tolerance is a few units in the last place.
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        hidden = self.embed(x) * (1 + self.seen / 10)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Tally:
    """The script's own object."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state) -> None:
        self.samples = state["samples"]


class Run:
    """The user's script."""

    def __init__(self, case: Case, seed: int) -> None:
        overrides = {"distributed_type": case.backend, "use_cpu": True}
        overrides |= {f"mesh.{axis}": size for axis, size in case.mesh}
        overrides |= {f"{case.backend}.{key}": value for key, value in case.section}
        self.accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
        torch.manual_seed(seed)
        model = Net()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.dim() > 1]
        vectors = [parameter for parameter in trained if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
        # A large eps: a gradient of nearly zero, whose sign the order of sums decides, must not make a full step.
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        numbers = torch.randint(WORDS, (GLOBAL_BATCH * STEPS, 5), generator=torch.Generator().manual_seed(0))
        dp_size = self.accelerator.backend.topology.dp_size
        loader = DataLoader(TensorDataset(numbers), batch_size=GLOBAL_BATCH // dp_size, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.tally = Tally()
        self.accelerator.register_for_checkpointing(self.tally)
        self.curve: list[float] = []

    def epoch(self, save_to: Path | None = None) -> None:
        """The rest of the epoch; with ``save_to`` a save after ``CUT`` steps of it, and the end there."""
        for number, (words,) in enumerate(self.loader, start=1):
            loss = F.cross_entropy(self.model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.tally.samples += GLOBAL_BATCH
            self.curve.append(float(self.accelerator.reduce(loss.detach(), "mean")))
            if save_to is not None and number == CUT:
                self.accelerator.save_state(save_to)
                return

    def facts(self) -> dict[str, object]:
        """What a checkpoint carries beside what makes the curve."""
        wanted = ("lr", "weight_decay", "betas", "eps")
        return {
            "groups": [[group[key] for key in wanted] for group in self.optimizer.param_groups],
            "rates": self.scheduler.get_last_lr(),
            "samples": self.tally.samples,
            "step": self.accelerator.step,
            "buffer": float(self.accelerator.unwrap_model(self.model).seen),
        }


def draw() -> list[float]:
    """The next number of each generator, which it gives again afterwards: orders of later passes follow from them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return numbers


def uninterrupted(case: Case) -> list[float]:
    """The curve of a run that nobody stops."""
    run = Run(case, seed=1)
    for _ in range(EPOCHS):
        run.epoch()
    run.accelerator.end_training()
    return run.curve


def write(case: Case, path: Path) -> tuple[list[float], dict[str, object], list[float]]:
    """Train, save in the middle of the first epoch, stop; the curve so far, the facts, and numbers drawn after it."""
    run = Run(case, seed=1)
    run.epoch(save_to=path)
    result = run.curve, run.facts(), draw()
    run.accelerator.end_training()
    return result


def read(case: Case, paths: dict[Case, Path]) -> dict[Case, tuple[list[float], dict[str, object], list[float]]]:
    """Take up each of these runs and go on to the end."""
    found = {}
    for writer, path in paths.items():
        run = Run(case, seed=77)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*random state of.*")  # More processes than were saved.
            run.accelerator.load_state(path)
        facts, numbers = run.facts(), draw()
        run.epoch()
        for _ in range(1, EPOCHS):
            run.epoch()
        run.accelerator.end_training()
        found[writer] = run.curve, facts, numbers
    return found


def _ready(case: Case) -> bool:
    try:
        get_registry().info(case.backend)
    except BackendError:
        return False
    return True


PRESENT = [case for case in BACKENDS if _ready(case)]


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return spawn(uninterrupted, 1, Case("single", 1))[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder, and what each writer's main process knew at the save."""
    folder = tmp_path_factory.mktemp("matrix")
    return {case: (folder / str(case), spawn(write, case.world_size, case, folder / str(case))[0]) for case in PRESENT}


@pytest.fixture(scope="module")
def resumed(request, written):
    """Return what each rank of a reader saw, for each writer whose test runs; its job runs when its first test does."""
    pairs = [
        (item.callspec.params["reader"], item.callspec.params["writer"])
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    done: dict[Case, list[dict[Case, tuple[list[float], dict[str, object], list[float]]]]] = {}

    def of(reader: Case):
        if reader not in done:
            paths = {case: path for case, (path, _) in written.items() if (reader, case) in pairs}
            done[reader] = spawn(read, reader.world_size, reader, paths, timeout=100)
        return done[reader]

    return of


def test_the_backends_of_this_repository_are_installed() -> None:
    missing = [str(case) for case in BACKENDS if case not in PRESENT]
    if missing:
        pytest.skip(f"not installed, so not in the matrix: {', '.join(missing)}")


@pytest.mark.slow  # Each backend to and from `single`, in one case each: `test_state_travels` of its conformance tests.
@pytest.mark.parametrize("reader", PRESENT, ids=str)
@pytest.mark.parametrize("writer", PRESENT, ids=str)
@pytest.mark.turns(2)
def test_a_run_goes_on_as_if_it_had_never_stopped(reference, written, resumed, writer, reader):
    before, facts, numbers = written[writer][1]
    assert before == pytest.approx(reference[:CUT], abs=TOLERANCE)
    for curve, loaded, _ in (each[writer] for each in resumed(reader)):
        assert curve == pytest.approx(reference[CUT:], abs=TOLERANCE)
        assert loaded == facts
    assert resumed(reader)[0][writer][2] == numbers, "the random numbers of the first process go on"
