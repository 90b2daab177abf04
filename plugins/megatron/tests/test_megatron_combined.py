"""Axes together: each combination trains, clips, gathers and saves as one process does, ragged labels included."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, load_config
from drivetrain.api import ProcessInfo
from drivetrain_megatron.backend import _warn_of_nodes, _warn_of_replicas
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.skeleton import Elsewhere
from drivetrain_testing import spawn

WORDS, WIDTH, LENGTH, ROWS, STEPS = 12, 8, 5, 8, 3
ATOL = 2e-5
"""Float32, AdamW: a batch in parts and matrices on other ranks add in another order, which eps keeps from growing."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "pp": (2, {"pipeline_parallel_size": 2, "num_micro_batches": 2}),
    "dp-pp": (4, {"pipeline_parallel_size": 2, "num_micro_batches": 2}),
    "zero1-pp": (4, {"pipeline_parallel_size": 2, "data_parallel": "zero1", "schedule": "zbv"}),
    "fsdp-pp": (4, {"pipeline_parallel_size": 2, "num_micro_batches": 2, "data_parallel": "fsdp"}),
    "dp-tp": (4, {"tensor_parallel_size": 2}),
    "zero1-tp": (4, {"tensor_parallel_size": 2, "data_parallel": "zero1"}),
    "fsdp-tp": (4, {"tensor_parallel_size": 2, "data_parallel": "fsdp"}),
    "tp-pp": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True}),
    # Its backward is split where torch finds the way to a weight, which it does not where that is a part.
    "tp-pp-zbv": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "zbv"}),
    "dp-tp-pp": (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "zero1-tp-pp": (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel": "zero1"}),
    "fsdp-tp-pp": (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel": "fsdp"}),
}
FOUR = [name for name, (size, _) in LAYOUTS.items() if size == 4]
EIGHT = [name for name, (size, _) in LAYOUTS.items() if size == 8]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def samples():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(WORDS, (ROWS * STEPS, LENGTH), generator=generator)
    labels = torch.randint(WORDS, (ROWS * STEPS, LENGTH), generator=generator)
    counted = torch.arange(ROWS * STEPS).unsqueeze(1) * 7 % (LENGTH + 1)
    labels[torch.arange(LENGTH).unsqueeze(0) >= counted] = -100
    return ids, labels, torch.arange(ROWS * STEPS)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


class Run:
    """The user's script."""

    def __init__(self, layout: str, seed: int) -> None:
        _, section = LAYOUTS[layout]
        overrides = {"distributed_type": "megatron" if section else "single", "use_cpu": True}
        overrides |= {f"megatron.{key}": value for key, value in section.items()}
        self.made = Accelerator(config=load_config(overrides=overrides, environ={}))
        torch.manual_seed(seed)
        model = Net()
        size = ROWS // self.made.backend.topology.dp_size
        loader = DataLoader(TensorDataset(*samples()), batch_size=size)
        self.model, self.optimizer, self.loader = self.made.prepare(model, adamw(model), loader)

    def epoch(self):
        """Losses and norms of its steps, and the samples that metrics saw."""
        losses, norms, seen = [], [], []
        for ids, labels, numbers in self.loader:
            total = F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
            items = (labels != -100).sum()
            self.made.backward(total, num_items=items)
            norms.append(float(self.made.clip_grad_norm_(self.model.parameters(), 0.5)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            both = self.made.reduce(torch.stack([total.detach(), items.float()]), "sum")
            losses.append(float(both[0] / both[1]))
            seen += self.made.gather_for_metrics(numbers).tolist()
        return losses, norms, seen

    def end(self):
        state = self.made.backend.broadcast_object(dict(self.made.get_state_dict(self.model)))
        self.made.end_training()
        return state


def reference(epochs):
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    ids, labels, _ = samples()
    losses, norms = [], []
    for _ in range(epochs):
        for first in range(0, ROWS * STEPS, ROWS):
            rows = slice(first, first + ROWS)
            loss = F.cross_entropy(model(ids[rows]).flatten(0, 1), labels[rows].flatten())
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms, model.state_dict()


def first_epoch(layout, folder):
    run = Run(layout, seed=0)
    losses, norms, seen = run.epoch()
    run.made.save_state(folder)
    return losses, norms, seen, run.end()


def second_epoch(layout, folders):
    found = []
    for folder in folders:
        run = Run(layout, seed=9)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*random state of.*")  # More coordinates than were saved.
            run.made.load_state(folder)
        losses, norms, _ = run.epoch()
        found.append((losses, norms, run.end()))
    return found


def same(found, expected, state, expected_state):
    assert found == pytest.approx(expected, rel=1e-4, abs=ATOL)
    assert set(state) == set(expected_state)
    for name, tensor in expected_state.items():
        torch.testing.assert_close(
            state[name], tensor, rtol=0, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )


def trains_alike(layout, folder):
    size, _ = LAYOUTS[layout]
    losses, norms, state = reference(1)
    for found_losses, found_norms, seen, found_state in spawn(first_epoch, size, layout, str(folder), timeout=110):
        same(found_losses + found_norms, losses + norms, found_state, state)
        assert seen == list(range(ROWS * STEPS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of what the combinations of four ranks have saved, by layout."""
    return tmp_path_factory.mktemp("combined")


@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.gate("tp-pp", "zero1-tp")
def test_a_combination_trains_as_one_process(layout, saved) -> None:
    trains_alike(layout, saved / layout)


def kept_after_the_cut(layout):
    """Names of the parameters whose memory is there after the first steps, and of those that this rank has."""
    run = Run(layout, 0)
    memory = {
        name: weakref.ref(getattr(one, "_local_tensor", one).untyped_storage())
        for name, one in run.model.named_parameters()
    }
    gc.disable()
    try:
        run.epoch()
        kept = {name for name, storage in memory.items() if storage() is not None}
    finally:
        gc.enable()
    mine = {name for name, one in run.model.named_parameters() if not isinstance(one, Elsewhere)}
    run.end()
    return kept, mine


@pytest.mark.parametrize("layout", ["pp", "tp-pp"])
@pytest.mark.gate("tp-pp")
def test_parameters_of_other_stages_are_freed_at_the_first_step(layout) -> None:
    """At once, and not where Python happens to look for cycles: a model may fill the memory."""
    for kept, mine in spawn(kept_after_the_cut, LAYOUTS[layout][0], layout):
        assert kept == mine
        assert 0 < len(mine) < len(list(Net().named_parameters()))


@pytest.mark.parametrize(("degree", "told"), [(4, 1), (2, 0), (1, 0)])
def test_a_degree_that_crosses_machines_is_told(degree, told, caplog) -> None:
    _warn_of_nodes(degree, ProcessInfo(world_size=4, local_world_size=2, num_nodes=2))
    assert len([one for one in caplog.messages if "crosses machines" in one]) == told


@pytest.mark.parametrize(
    ("replicas", "processes", "rank", "data_parallel", "told"),
    [(2, 2, 0, "ddp", 1), (2, 2, 1, "ddp", 0), (2, 4, 0, "ddp", 0), (2, 2, 0, "zero1", 0), (1, 1, 0, "ddp", 0)],
)
def test_replicas_of_which_none_is_cut_are_told(replicas, processes, rank, data_parallel, told, caplog) -> None:
    process = ProcessInfo(rank=rank, local_rank=rank, world_size=processes, local_world_size=processes)
    _warn_of_replicas(replicas, MegatronConfig(data_parallel=data_parallel), process)
    assert len(caplog.messages) == told
    assert all("`megatron: {tensor_parallel_size: 2}`" in one for one in caplog.messages)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EIGHT)
def test_three_axes_train_as_one_process(layout, tmp_path) -> None:
    trains_alike(layout, tmp_path / layout)


@pytest.mark.parametrize("reader", ["single", "pp", "fsdp-pp", "zero1-tp", "tp-pp"])
@pytest.mark.gate("pp")
def test_what_a_combination_saved_goes_on_in_another(reader, saved) -> None:
    writers = [layout for layout in FOUR if (saved / layout).exists()]
    if not writers:
        pytest.skip("the combinations that save have not run in this session")
    size, _ = LAYOUTS[reader]
    losses, norms, state = reference(2)
    for rank in spawn(second_epoch, size, reader, [str(saved / one) for one in writers], timeout=200):
        for found_losses, found_norms, found_state in rank:
            same(found_losses + found_norms, losses[STEPS:] + norms[STEPS:], found_state, state)
