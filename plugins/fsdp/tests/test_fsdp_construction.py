"""Models built without memory, weights from files, and optimizers made before sharding."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain import Accelerator
from drivetrain_fsdp.weights import load_weights
from drivetrain_testing import spawn

WIDTH = 96


class Net(nn.Module):
    """Tied tables, and more than one way to be initialised."""

    def __init__(self, width: int = WIDTH, depth: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(61, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))
        self.own = nn.Parameter(torch.randn(width, width) * 0.1)
        self.head = nn.Linear(width, 61, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.ones(width, width).tril())
        for block in self.blocks:
            nn.init.normal_(block[0].weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words) @ (self.own * self.mask)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.gain


def accelerator_with(tmp: str, **section: Any) -> Accelerator:
    path = Path(tmp) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "fsdp", "use_cpu": True, "fsdp": section}))
    return Accelerator(config=path)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    flat = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "lr": 0.03}]


def step(model: Any, optimizer: Any, backward: Any) -> None:
    words = torch.arange(16).view(4, 4)
    loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten() + 1)
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=name)


def trained_eagerly(steps: int) -> dict[str, Tensor]:
    torch.manual_seed(21)
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    for _ in range(steps):
        step(model, optimizer, lambda loss: loss.backward())
    return model.state_dict()


def empty_model(tmp: str, steps: int, section: dict[str, Any]) -> dict[str, Tensor]:
    """Rank 0's seed counts; others have one of their own."""
    accelerator = accelerator_with(tmp, **section)
    torch.manual_seed(21 + accelerator.process_index)
    with accelerator.init_empty_weights():
        model: Any = Net()
    assert model.own.is_meta
    optimizer: Any = torch.optim.AdamW(groups_of(model), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len({id(parameter) for parameter in held}) == len(held) == len(list(Net().parameters()))
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in model.parameters()}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.03]
    assert model.head.weight is model.table.weight
    for _ in range(steps):
        step(model, optimizer, accelerator.backward)
    assert model.head.weight is model.table.weight
    state = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.gate("4")
def test_empty_model_begins_as_an_eager_one(world_size: int, tmp_path: Path) -> None:
    assert_same(spawn(empty_model, world_size, str(tmp_path), 0, {})[0], trained_eagerly(0))


def test_empty_model_trains(tmp_path: Path) -> None:
    section = {"cpu_offload": True, "transformer_layer_cls": "Sequential"}
    assert_same(spawn(empty_model, 2, str(tmp_path), 3, section)[0], trained_eagerly(3), atol=1e-5)


def low_precision(tmp: str) -> None:
    accelerator = Accelerator(distributed_type="fsdp", cpu=True, mixed_precision="bf16")
    torch.manual_seed(21)
    with accelerator.init_empty_weights():
        model: Any = Net().bfloat16()
    model = accelerator.prepare(model)
    torch.manual_seed(21)
    expected = Net().bfloat16().state_dict()
    for name, tensor in model._drivetrain.trainable.full_state_dict():
        assert tensor.dtype == (torch.bfloat16 if name == "mask" else torch.float32)
        assert torch.equal(tensor.float(), expected[name].float()), name
    accelerator.end_training()


def test_empty_model_gets_float32_masters(tmp_path: Path) -> None:
    spawn(low_precision, 2, str(tmp_path))


def made_on_meta(tmp: str) -> None:
    accelerator = accelerator_with(tmp)
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match=r"lies on the meta device.*init_empty_weights"):
        accelerator.prepare(model)
    accelerator.end_training()


def test_a_meta_model_of_unknown_making_is_refused(tmp_path: Path) -> None:
    spawn(made_on_meta, 2, str(tmp_path))


# ---- weights from files


def saved_weights(folder: Path, *, index: bool) -> dict[str, Tensor]:
    torch.manual_seed(77)
    state = {name: tensor.contiguous() for name, tensor in Net().state_dict().items()}
    stored = {name: tensor for name, tensor in state.items() if name != "head.weight"}
    if not index:
        save_file(stored, folder / "model.safetensors")
        return state
    places = {}
    for number, names in enumerate((list(stored)[:4], list(stored)[4:])):
        save_file({name: stored[name] for name in names}, folder / f"part-{number}.safetensors")
        places |= dict.fromkeys(names, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return state


@pytest.mark.parametrize(("index", "world_size"), [(False, 2), (True, 2), (True, 4)])
@pytest.mark.gate("True-*")
def test_empty_model_reads_weights(index: bool, world_size: int, tmp_path: Path) -> None:
    expected = saved_weights(tmp_path, index=index)
    found = spawn(empty_model, world_size, str(tmp_path), 0, {"weights": str(tmp_path)})[0]
    assert_same(found, expected)


def load_later(tmp: str) -> dict[str, Tensor]:
    accelerator = accelerator_with(tmp)
    model: Any = accelerator.prepare(Net())
    load_weights(model, Path(tmp) / "model.safetensors")
    state = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    save_file({"gain": torch.zeros(())}, Path(tmp) / f"other-{accelerator.process_index}.safetensors")
    with pytest.raises(ValueError, match=r"lacks 14 parameter\(s\) of the model, such as .*\. Name the files of"):
        load_weights(model, Path(tmp) / f"other-{accelerator.process_index}.safetensors")
    with pytest.raises(ValueError, match="holds no safetensors"):
        load_weights(model, Path(tmp) / "nowhere")
    wide: Any = accelerator.prepare(Net(WIDTH + 2))
    words = r"own is \[96, 96\] in .* and \[98, 98\] in the model\. Build the model as it was when"
    with pytest.raises(ValueError, match=words):
        load_weights(wide, tmp)
    load_weights(model, tmp)
    accelerator.end_training()
    return state


def test_prepared_model_reads_weights(tmp_path: Path) -> None:
    expected = saved_weights(tmp_path, index=False)
    assert_same(spawn(load_later, 2, str(tmp_path))[0], expected)


SIDE, DEPTH = 1024, 24


def many() -> nn.Sequential:
    return nn.Sequential(*nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH)))


def peak(tmp: str, section: dict[str, Any]) -> dict[str, int]:
    """Bytes of the model, of this rank's part, and how far resident memory rose above the start.

    With files to read, memory of its own only (sampled): their pages are the system's, which maps neighbours along.
    """
    accelerator = accelerator_with(tmp)
    with accelerator.init_empty_weights():
        torch.rand(SIDE, SIDE)
        model: Any = Net(SIDE, 1)
    accelerator.prepare(model)  # Warm: what the first collectives and kernels load is not the model's.
    accelerator.end_training()
    accelerator = accelerator_with(tmp, **section)
    Path("/proc/self/clear_refs").write_text("5")
    start, own, done = _resident("VmRSS"), [_resident("RssAnon")], threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            own.append(_resident("RssAnon"))

    watching = threading.Thread(target=watch)
    if section:
        watching.start()
    with accelerator.init_empty_weights():
        model = many()
    model = accelerator.prepare(model)
    done.set()
    if section:
        watching.join()
    rose = max(own) - own[0] if section else _resident("VmHWM") - start
    part = sum(4 * parameter.to_local().numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
    accelerator.end_training()
    return {"whole": 4 * DEPTH * SIDE * SIDE, "part": part, "rose": rose, "one": 4 * SIDE * SIDE}


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from /proc")
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    for found in spawn(peak, 4, str(tmp_path), {}):
        assert found["part"] * 4 == found["whole"]
        # Rank 0 holds a parameter as it is replayed and as it is sent; libraries keep a little.
        assert found["rose"] <= found["part"] + 2 * found["one"] + (8 << 20), found


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="memory is read from /proc")
def test_no_rank_reads_the_whole_model(tmp_path: Path) -> None:
    save_file(many().state_dict(), tmp_path / "model.safetensors")
    for found in spawn(peak, 4, str(tmp_path), {"weights": str(tmp_path / "model.safetensors")}):
        assert 0 < found["rose"] <= found["part"] + 2 * found["one"] + (8 << 20), found


# ---- optimizers made before sharding


def with_state(tmp: str, late: bool) -> dict[str, Tensor]:
    """An optimizer that has stepped before it is prepared goes on where it was."""
    accelerator = accelerator_with(tmp)
    torch.manual_seed(21)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(groups_of(model), lr=0.01, foreach=True)
    step(model, optimizer, lambda loss: loss.backward())
    if late:
        model = accelerator.prepare(model)
        with torch.no_grad():
            model(torch.arange(4)[None])
        optimizer = accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    step(model, optimizer, accelerator.backward)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert all(int(slots["step"]) == 2 for slots in optimizer.state.values())
    fresh: Any = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    assert {id(one) for one in fresh.param_groups[0]["params"]} == {id(one) for one in model.parameters()}
    state = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.gate("True")
def test_optimizer_keeps_its_state(late: bool, tmp_path: Path) -> None:
    found = spawn(with_state, 2, str(tmp_path), late)[0]
    assert_same(found, trained_eagerly(2), atol=1e-5)


def odd_models(tmp: str) -> None:
    accelerator = accelerator_with(tmp, activation_checkpointing=True)
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    no_parameters = nn.BatchNorm1d(3, affine=False)
    one_number = nn.Linear(1, 1)
    for model in (frozen, no_parameters, one_number):
        size = 1 if model is one_number else 3
        prepared = accelerator.prepare_model(model, evaluation_mode=True).eval()
        with torch.inference_mode():
            assert prepared(torch.ones(2, size)).shape == (2, size)
        assert set(accelerator.get_state_dict(prepared)) == (
            set(model.state_dict()) if accelerator.is_main_process else set()
        )
    accelerator.free_memory()
    accelerator.end_training()


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.gate("4")
def test_odd_models(world_size: int, tmp_path: Path) -> None:
    spawn(odd_models, world_size, str(tmp_path))
