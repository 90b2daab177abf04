"""Every setting of the section trains as one plain process does."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain_testing import spawn
from drivetrain_testing.processes import RankFailedError

WORDS, WIDTH, BATCH, STEPS = 17, 8, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embeddings, a buffer, a frozen block, and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("places", torch.linspace(0, 1, WIDTH))
        self.blocks[1].requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) * self.gain + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Net:
    torch.manual_seed(11)
    return Net()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = [parameter for parameter in trained if parameter.dim() < 2]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": flat, "lr": 0.03}], lr=0.01)


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    words = torch.randint(WORDS, (BATCH, 6), generator=generator)
    return words[:, :-1], words[:, 1:]


def loss_of(model: Any, words: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), labels.flatten())


def plain(window: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    model = build()
    optimizer = optimizer_of(model)
    norms = []
    for step in range(STEPS):
        for micro in range(window):
            (loss_of(model, *data(step * window + micro)) / window).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def accelerator_with(section: dict[str, Any], tmp: str, **config: Any) -> Accelerator:
    import os
    from pathlib import Path

    path = Path(tmp) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "fsdp", "use_cpu": True, "fsdp": section, **config}))
    return Accelerator(config=path)


def train(section: dict[str, Any], tmp: str, window: int = 1, **config: Any) -> tuple[dict[str, Tensor], list[float]]:
    # Dynamo looks at every attribute of the tensors that it traces.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    accelerator = accelerator_with(section, tmp, gradient_accumulation_steps=window, **config)
    model = build()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    norms = []
    for step in range(STEPS * window):
        words, labels = (each.to(accelerator.device) for each in data(step))
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, words[share], labels[share]))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    state = {name: tensor.cpu().clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state, norms


def same(found: list[Any], expected: tuple[dict[str, Tensor], list[float]], atol: float = 2e-6) -> None:
    state = found[0][0]
    assert list(state) == list(expected[0])
    for name, tensor in expected[0].items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=atol, msg=name)
    for _, norms in found:
        torch.testing.assert_close(norms, expected[1], rtol=1e-4, atol=max(atol, 1e-5))
        assert norms == found[0][1]


REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Torch 2.9 has no such switch."""
BLOCKS = {"transformer_layer_cls": "Block"}
SETTINGS: dict[str, dict[str, Any]] = {
    "class": BLOCKS,
    "size": {"min_num_params": 300},
    "keep": {"reshard_after_forward": False},
    "free": {"reshard_after_forward": True},
    "offload": {"cpu_offload": True},
    "checkpointing": {"activation_checkpointing": True},
    "compile": {"compile": "eager"},
    "prefetch": {"forward_prefetch": 2, "backward_prefetch": 2},
    "each": {"accumulate_without_sync": False},
    "nested": {"transformer_layer_cls": "Block, LayerNorm, Embedding", "activation_checkpointing": True},
    "all": {
        "activation_checkpointing": True,
        "cpu_offload": True,
        "forward_prefetch": 1,
        "broadcast_buffers": True,
        "reduce_unused_parameters": REDUCES_UNUSED,
        "accumulate_without_sync": False,
        "reshard_after_forward": True,
    },
}


def train_each(tmp: str) -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    return {name: train(section, tmp, 2) for name, section in SETTINGS.items()}


@pytest.fixture(scope="module")
def each_setting(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """All settings in one group of ranks, which spares starting them; nothing when one of them fails there."""
    try:
        return spawn(train_each, 2, str(tmp_path_factory.mktemp("settings")))
    except RankFailedError:
        return []


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.gate("size", "keep", "offload", "checkpointing", "compile", "all")
def test_settings(name: str, each_setting: list[Any], tmp_path: Any) -> None:
    found = [rank[name] for rank in each_setting] or spawn(train, 2, SETTINGS[name], str(tmp_path), 2)
    same(found, plain(2))


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.gate("4")
def test_other_worlds(world_size: int, tmp_path: Any) -> None:
    same(spawn(train, world_size, {"activation_checkpointing": True}, str(tmp_path), 2), plain(2))


@pytest.mark.parametrize(
    ("mesh", "section"),
    [
        ({"dp_replicate": 2}, {}),
        ({"dp_replicate": 2}, {"accumulate_without_sync": False}),
        ({"dp_replicate": 4}, {}),
        ({"dp_shard": 4}, {"reshard_after_forward": 2}),
    ],
)
@pytest.mark.gate("mesh0-*", "mesh3-*")
def test_meshes(mesh: dict[str, int], section: dict[str, Any], tmp_path: Any) -> None:
    same(spawn(train, 4, section, str(tmp_path), 2, mesh=mesh), plain(2))


def test_resharding_to_a_number_that_does_not_divide(tmp_path: Any) -> None:
    with pytest.raises(Exception, match="does not divide the 2 ranks"):
        spawn(train, 2, {"reshard_after_forward": 3}, str(tmp_path))


def itself(model: nn.Module) -> list[nn.Module]:
    """No units but the root."""
    return [model]


def mixed(section: dict[str, Any], tmp: str) -> tuple[list[float], list[float]]:
    """bf16 with batch norm and a float32 stream into a layer norm; losses of a run, and the statistics at its end."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2))
            self.batch = nn.BatchNorm1d(6)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return self.head(self.batch(x))

    accelerator = accelerator_with(section, tmp, mixed_precision="bf16")
    torch.manual_seed(1)
    model: Any = Mixed()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(5 + accelerator.process_index)
    x = torch.randn(8, 6)
    y = torch.randint(3, (8,))
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    own = model.batch.running_mean.clone()
    model.eval()(x)
    statistics = accelerator.gather(model.batch.running_mean[None])
    assert torch.equal(statistics[0], statistics[1])
    assert torch.equal(own, statistics[0]) == (accelerator.process_index == 0), "rank 0's statistics count"
    accelerator.end_training()
    return losses, statistics[0].tolist()


def test_norms_in_bf16(tmp_path: Any) -> None:
    once = spawn(mixed, 2, {}, str(tmp_path))
    recomputed = spawn(mixed, 2, {"activation_checkpointing": True, "wrap": f"{__name__}:itself"}, str(tmp_path))
    assert once == recomputed
    for losses, _ in once:
        assert losses[-1] < losses[0]
        assert all(math.isfinite(loss) for loss in losses)


def two_dtypes(tmp: str) -> dict[str, Tensor]:
    """A block of two dtypes, and a module that holds both itself."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).double()).float()

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Pair() for _ in range(2))
            self.odd, self.even = nn.Parameter(torch.ones(4, dtype=torch.float64)), nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return (x * self.odd).sum(1) + self.even.mean()

    def step(model: Any, x: Tensor, backward: Any, optimizer: Any) -> None:
        for _ in range(2):
            backward((model(x) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(2)
    reference, x = Two(), torch.randn(4, 4)
    torch.manual_seed(2)
    model: Any = Two()
    step(reference, x, lambda loss: loss.backward(), torch.optim.Adam(reference.parameters(), lr=0.1))
    accelerator = accelerator_with({"transformer_layer_cls": "Pair"}, tmp)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    step(model, x.chunk(2)[accelerator.process_index], accelerator.backward, optimizer)
    for name, tensor in accelerator.get_state_dict(model).items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=0, atol=1e-6)
    accelerator.end_training()
    return reference.state_dict()


def test_two_dtypes_in_one_unit(tmp_path: Any) -> None:
    spawn(two_dtypes, 2, str(tmp_path))


def dropped(tmp: str, section: dict[str, Any]) -> None:
    """``zero_grad`` drops what ``no_sync`` gathered out of sight, though another model trains in between."""
    accelerator = accelerator_with(section, tmp)
    model: Any = build()
    other: Any = nn.Linear(2, 2)
    model, optimizer, other = accelerator.prepare(model, optimizer_of(model), other)
    with accelerator.no_sync(model):
        accelerator.backward(100 * loss_of(model, *data(0)))
    accelerator.backward(other(torch.ones(1, 2)).sum())
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, *data(1)))
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    reference = build()
    loss_of(reference, *data(1)).backward()
    expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    assert norm == pytest.approx(expected, rel=1e-5)
    accelerator.end_training()


@pytest.mark.parametrize("section", [{}, {"accumulate_without_sync": False}])
@pytest.mark.gate("section0")
def test_zero_grad_drops_hidden_gradients(section: dict[str, Any], tmp_path: Any) -> None:
    spawn(dropped, 2, str(tmp_path), section)


def added_up(tmp: str) -> None:
    """Gradients that were not dropped stay, and those of a later backward are added."""
    accelerator = accelerator_with({}, tmp)
    model: Any = build()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    reference = build()
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    for _ in range(2):
        words, labels = data(0)
        loss = loss_of(model, words[share], labels[share])
        (expected := loss_of(reference, words, labels)).backward(retain_graph=True)
        (expected * 2).backward()
        loss_again = loss * 2
        accelerator.backward(loss + loss_again)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                found = model.get_parameter(name).grad
                whole = found.full_tensor() if hasattr(found, "full_tensor") else found
                torch.testing.assert_close(whole, parameter.grad, rtol=0, atol=1e-5, msg=name)
    accelerator.end_training()


def test_gradients_add_up(tmp_path: Any) -> None:
    spawn(added_up, 2, str(tmp_path))


@pytest.mark.gpu
def test_offload_checkpointing_and_clipping_on_a_gpu(tmp_path: Any) -> None:
    # Sums on the GPU run in another order.
    same(spawn(train, 1, SETTINGS["all"], str(tmp_path), 2, use_cpu=False), plain(2), atol=1e-4)


def whole_parameters(tmp: str) -> None:
    accelerator = accelerator_with({}, tmp)
    model: Any = build()
    before = list(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    loss = loss_of(model, *data(0))
    between = list(model.parameters())
    accelerator.backward(loss)
    with pytest.raises(ValueError, match="not parameters of a sharded model"):
        accelerator.clip_grad_norm_(between, 1.0)
    norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    assert accelerator.clip_grad_norm_(before, 1.0) == norm, "what was listed before prepare stands for the shards"
    optimizer.step()
    with torch.no_grad():
        model(data(0)[0])
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held <= {id(parameter) for parameter in model.parameters()}, "evaluation left parameters whole"
    with torch.inference_mode():
        model(data(0)[0])
    accelerator.backward(loss_of(model, *data(0)))
    with pytest.raises(ValueError, match="shares parameters"):
        accelerator.prepare_model(nn.Sequential(accelerator.unwrap_model(model).blocks[0]))
    accelerator.end_training()


def test_stale_parameters_are_refused(tmp_path: Any) -> None:
    spawn(whole_parameters, 2, str(tmp_path))


class Picks(nn.Module):
    """Integer and boolean parameters beside trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.switch = nn.Parameter(torch.arange(WIDTH) != 2, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, self.order] * self.switch)


def train_picks(tmp: str) -> dict[str, Tensor]:
    from drivetrain_fsdp import sharding

    sharding.FLOATS_ALONE = True
    accelerator = accelerator_with({}, tmp)
    torch.manual_seed(5)
    model = Picks()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert not isinstance(model.order, DTensor)
    assert isinstance(model.inner.weight, DTensor)
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    for step in range(STEPS):
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(x[share]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.gate("3")
def test_integers_stay_whole_where_torch_shards_floats_alone(tmp_path, world) -> None:
    torch.manual_seed(5)
    model = Picks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # The main process has the whole state.
    state = spawn(train_picks, world, str(tmp_path))[0]
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == tensor.dtype
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=2e-6)


class Attending(nn.Module):
    """A block whose operations keep what they were given; ``(B, T, F) -> (B, T, F)``."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.mix(h, h, h, need_weights=False)[0]
        return h + self.out(h.tanh()) + h.sort(2).values / (1 + h.std(2, keepdim=True))


class Attentive(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(2))


def recomputed(tmp: str, *, activation_checkpointing: bool) -> dict[str, Tensor]:
    """Train on a prepared loader: rank 0 then looks at the graph of the first loss, alone."""
    section = {**BLOCKS, "transformer_layer_cls": "Attending", "activation_checkpointing": activation_checkpointing}
    accelerator = accelerator_with(section, tmp)
    torch.manual_seed(11)
    model = Attentive()
    loader = torch.utils.data.DataLoader(list(zip(*data(0), strict=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for words, labels in loader:
        accelerator.backward(loss_of(model, words, labels))
        optimizer.step()
        optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state


def test_nothing_is_recomputed_before_backward(tmp_path: Any) -> None:
    found = spawn(recomputed, 2, str(tmp_path), activation_checkpointing=True)[0]
    torch.testing.assert_close(found, spawn(recomputed, 2, str(tmp_path), activation_checkpointing=False)[0])
