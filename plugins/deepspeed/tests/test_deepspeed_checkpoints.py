"""What only DeepSpeed's layouts can get wrong in a portable checkpoint; every pair of backends is in tests/parity."""

from __future__ import annotations

import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator, checkpoint, load_config
from drivetrain.api import CheckpointMismatchError
from drivetrain_testing import RankFailedError, spawn

CUT, STEPS = 3, 6


class Net(nn.Module):
    """Sizes that divide by nothing, 0-d too, a convolution whose pieces are many boxes, tied and frozen weights."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.still = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.mix(self.table(words)[:, :, None])[:, :, 0]
        return self.head(torch.tanh(self.still(x)) * (1 + self.seen / 50) * self.gain)


def start(backend: str, *, use_cpu: bool = True, **section: Any) -> Accelerator:
    overrides = {"distributed_type": backend, "use_cpu": use_cpu}
    overrides |= {f"{backend}.{key}": value for key, value in section.items()}
    return Accelerator(config=load_config(overrides=overrides, environ={}))


def optimizers(model: nn.Module, kind: str) -> list[Any]:
    trained = [each for each in model.parameters() if each.requires_grad]
    if kind == "two":
        return [torch.optim.AdamW(trained[:1], lr=0.02, eps=1e-3), torch.optim.SGD(trained[1:], lr=0.1, momentum=0.9)]
    # A large eps: a gradient of nearly zero, whose sign the order of sums decides, must not make a full step.
    groups = [trained] if kind == "one group" else [trained[:1], trained[1:]]
    return [torch.optim.AdamW([{"params": each, "lr": 0.02 / len(each)} for each in groups], eps=1e-3)]


def run(
    backend: str,
    folder: Path | None,
    *,
    load: bool = False,
    kind: str = "one",
    blocking: bool = True,
    **section: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights: to the cut, where it saves, and on, or from there."""
    accelerator = start(backend, **section)
    torch.manual_seed(1 + load)
    model, *steps = accelerator.prepare(net := Net(), *optimizers(net, kind))
    if load:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*random state.*")
            accelerator.load_state(folder)
    losses = []
    for step in range(accelerator.step // len(steps), STEPS):
        words = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step)).to(accelerator.device)
        mine = words.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = F.cross_entropy(model(mine), (mine + 1) % 11)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        accelerator.backward(loss)
        for each in steps:
            each.step()
            each.zero_grad()
        if step == CUT - 1 and folder is not None and not load:
            accelerator.save_state(folder, blocking=blocking)
    state = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return losses, state


JOURNEYS = {
    "round robin": ({"zero_stage": 2, "round_robin_gradients": True}, {"zero_stage": 1}),
    "offloaded": ({"zero_stage": 2, "offload_optimizer": "cpu"}, {"zero_stage": 3, "offload_optimizer": "cpu"}),
    "several buffers": ({"zero_stage": 3, "sub_group_size": 20}, {"zero_stage": 2, "offload_optimizer": "cpu"}),
    "persistent": ({"zero_stage": 3, "stage3_param_persistence_threshold": 0}, {"zero_stage": 3}),
    "aligned": ({"zero_stage": 1, "config": {"zero_optimization": {"parameter_alignment": True}}}, {"zero_stage": 0}),
}


@pytest.mark.parametrize("name", JOURNEYS)
@pytest.mark.gate("round robin", "persistent")
def test_every_layout_is_read_and_written(name, tmp_path):
    source, target = JOURNEYS[name]
    losses, whole = spawn(run, 2, "deepspeed", tmp_path / "cut", **source)[0]
    resumed, again = spawn(run, 4 if name == "persistent" else 2, "deepspeed", tmp_path / "cut", load=True, **target)[0]
    assert resumed == pytest.approx(losses[CUT:], abs=1e-6)  # Another order of float32 sums, on losses of about 2.4.
    torch.testing.assert_close(again, whole, rtol=0, atol=2e-6)
    assert spawn(run, 1, "single", tmp_path / "cut", load=True)[0][0] == pytest.approx(losses[CUT:], abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_master_values_in_host_memory_beside_a_gpu(stage, tmp_path):
    section = {"zero_stage": stage, "offload_optimizer": "cpu", "use_cpu": False}
    losses, whole = spawn(run, 1, "deepspeed", tmp_path / "cut", **section)[0]
    resumed, again = spawn(run, 1, "deepspeed", tmp_path / "cut", load=True, **{**section, "zero_stage": 5 - stage})[0]
    assert resumed == pytest.approx(losses[CUT:], abs=1e-5)  # Sums on a GPU come in another order.
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.gate("3")
def test_several_optimizers_of_one_model(stage, tmp_path):
    losses, _ = spawn(run, 2, "deepspeed", tmp_path / "cut", kind="two", zero_stage=stage)[0]
    resumed, _ = spawn(run, 2, "deepspeed", tmp_path / "cut", load=True, kind="two", zero_stage=5 - stage)[0]
    assert resumed == pytest.approx(losses[CUT:], abs=1e-6)
    single, _ = spawn(run, 1, "single", tmp_path / "cut", load=True, kind="two")[0]
    assert single == pytest.approx(losses[CUT:], abs=1e-6)


def test_a_save_beside_the_training_holds_the_moment_it_was_asked_for(tmp_path):
    losses, _ = spawn(run, 2, "deepspeed", tmp_path / "cut", blocking=False, zero_stage=3)[0]
    resumed, _ = spawn(run, 2, "deepspeed", tmp_path / "cut", load=True, zero_stage=2)[0]
    assert resumed == pytest.approx(losses[CUT:], abs=1e-6)


def evaluate(folder: Path, again: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Weights and an output of a model that is prepared without an optimizer."""
    accelerator = start("deepspeed", zero_stage=3)
    model = accelerator.prepare(Net())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(optimizer|random) state.*")
        accelerator.load_state(folder)
    model.eval()
    with torch.no_grad():
        output = model(torch.arange(8))
    state = accelerator.get_state_dict(model)
    accelerator.save_state(again)
    accelerator.end_training()
    return state, output


def test_a_model_for_evaluation_only(tmp_path):
    spawn(run, 1, "single", tmp_path / "cut")
    state, output = spawn(evaluate, 2, tmp_path / "cut", tmp_path / "again")[0]
    model = Net().eval()
    model.load_state_dict(state)
    torch.testing.assert_close(output, model(torch.arange(8)).detach())
    checkpoint.export_checkpoint(tmp_path / "cut", tmp_path / "model")
    expected = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    assert checkpoint.inspect(tmp_path / "again").manifest.tensors["model.table.weight"].sharded


def test_each_rank_writes_its_part(tmp_path):
    spawn(run, 2, "deepspeed", tmp_path / "cut", zero_stage=3)
    manifest = checkpoint.inspect(tmp_path / "cut").manifest
    for name in ("model.table.weight", "optim.table.weight.exp_avg", "model.still.weight", "model.mix.weight"):
        entry = manifest.tensors[name]
        assert entry.sharded
        assert {chunk.file.partition("tensors-")[2][:5] for chunk in entry.chunks} == {"00000", "00001"}, name
    assert manifest.trainables[0]["extra"]["tied"] == {"head.weight": "table.weight"}
    assert manifest.trainables[0]["extra"]["frozen"] == ["still.weight", "still.bias"]
    groups = manifest.trainables[0]["optimizers"][0]
    assert [group["params"] for group in groups] == [["gain"], ["unused", "table.weight", "mix.weight", "mix.bias"]]


# ---- what does not fit ----------------------------------------------------------------------------------------------


def misfits(folder: Path) -> dict[str, Any]:
    """Messages of loads that cannot work, and what a lenient one leaves alone."""
    accelerator = start("deepspeed", zero_stage=3)
    told: dict[str, Any] = {}
    torch.manual_seed(5)
    model = Net()
    model.more = nn.Parameter(torch.full((5,), 7.0))
    trained = [each for each in model.parameters() if each.requires_grad and each is not model.more]
    model, _ = accelerator.prepare(model, torch.optim.AdamW([{"params": trained[:1]}, {"params": trained[1:]}]))
    try:
        accelerator.load_state(folder)
    except CheckpointMismatchError as problem:
        told["missing"] = str(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.load_state(folder, strict=False)
    told["left alone"] = accelerator.get_state_dict(model).get("more")
    accelerator.end_training()
    return told


def narrower(folder: Path) -> None:
    accelerator = start("deepspeed", zero_stage=2)
    model = Net(6)
    accelerator.prepare(model, *optimizers(model, "one"))
    accelerator.load_state(folder)


def test_what_does_not_fit_is_named(tmp_path):
    spawn(run, 1, "single", tmp_path / "cut")
    told = spawn(misfits, 2, tmp_path / "cut")[0]
    assert "missing in the checkpoint: model.more" in told["missing"]
    assert told["left alone"].tolist() == [7.0] * 5
    with pytest.raises(RankFailedError, match=r"model\.table\.weight is \[11, 7\] in the checkpoint and \[11, 6\]"):
        spawn(narrower, 2, tmp_path / "cut")


def uneven(folder: Path) -> None:
    """A parameter that only some steps used: torch counts its own steps."""
    accelerator = start("single")
    model = Net()
    model, optimizer = accelerator.prepare(model, *optimizers(model, "one group"))
    for step in range(2):
        words = torch.arange(8)
        loss = model(words).square().mean() + (model.module.unused.sum() if step else 0.0)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.end_training()


def told_on_load(folder: Path) -> list[str]:
    accelerator = start("deepspeed", zero_stage=2)
    model = Net()
    accelerator.prepare(model, *optimizers(model, "one group"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.load_state(folder)
    accelerator.end_training()
    return [str(each.message) for each in caught]


def test_steps_that_differ_within_a_group_are_said(tmp_path):
    spawn(uneven, 1, tmp_path / "cut")
    sentences = spawn(told_on_load, 2, tmp_path / "cut")[0]
    assert any("step is 2 for gain and 1 for unused (1 parameter(s) differ)" in each for each in sentences)


# ---- memory ---------------------------------------------------------------------------------------------------------

MEGABYTES, PARAMETERS = 128, 8


class Sampler:
    """Watches this process's anonymous resident memory from a thread."""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._first = self._highest = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.grown = max(self._highest, self._now()) - self._first

    def _watch(self) -> None:
        while not self._stop.wait(0.0005):
            self._highest = max(self._highest, self._now())

    @staticmethod
    def _now() -> float:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) / 1024
        raise AssertionError


class Wide(nn.Module):
    """128 MiB in 8 parameters, which are used one after the other."""

    def __init__(self) -> None:
        super().__init__()
        width = MEGABYTES * 256 // PARAMETERS
        self.layers = nn.ModuleList(nn.Linear(1024, width, bias=False) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x).sum() for layer in self.layers), torch.zeros(()))


def grown(stage: int, folder: Path) -> dict[str, float]:
    """MiB beyond the run's own, at their highest."""
    accelerator = start("deepspeed", zero_stage=stage, reduce_bucket_size=1 << 20, allgather_bucket_size=1 << 20)
    model = Wide()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    accelerator.backward(model(torch.ones(1, 1024)))
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(folder / "run")
    found = {}
    with Sampler() as sampler:
        accelerator.save_state(folder / "run")
    found["save"] = sampler.grown
    with Sampler() as sampler:
        accelerator.load_state(folder / "run")
    found["load"] = sampler.grown
    with Sampler() as sampler:
        accelerator.save_model(model, folder / "model", max_shard_size="40MB")
    found["save_model"] = sampler.grown
    accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.slow
def test_memory_beyond_the_run_is_about_one_parameter(stage, tmp_path):
    # A parameter has 16 MiB, the model 128, a rank's part of it 64: a copy of the part, or of the model, would show.
    for found in spawn(grown, 2, stage, tmp_path):
        for action, megabytes in found.items():
            assert megabytes < 3.5 * MEGABYTES / PARAMETERS, (action, found)


# ---- models for other programs --------------------------------------------------------------------------------------


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


def save_llama(folder: Path) -> dict[str, Tensor]:
    accelerator = start("deepspeed", zero_stage=3)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    words = torch.randint(33, (2, 6), generator=torch.Generator().manual_seed(accelerator.process_index))
    accelerator.backward(model(input_ids=words, labels=words).loss)
    optimizer.step()
    accelerator.save_model(model, folder / "model", max_shard_size="4kB")
    accelerator.save_state(folder / "run")
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return state


def test_transformers_loads_what_zero3_saves(tmp_path):
    from transformers import LlamaForCausalLM

    state = spawn(save_llama, 2, tmp_path)[0]
    checkpoint.export_checkpoint(tmp_path / "run", tmp_path / "exported")
    for folder in ("model", "exported"):
        llama().config.save_pretrained(tmp_path / folder)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / folder)
        assert loaded.model.embed_tokens.weight is loaded.lm_head.weight
        torch.testing.assert_close(dict(loaded.state_dict()), state, rtol=0, atol=0)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "lm_head.weight" not in index["weight_map"]
    assert all(load_file(path) for path in (tmp_path / "model").glob("*.safetensors"))
    assert "DS_ACCELERATOR" not in os.environ


def saved_with_a_hook(folder):
    accelerator = start("deepspeed", zero_stage=3)
    model = Net()
    model, _ = accelerator.prepare(model, *optimizers(model, "one group"))
    seen = []

    def keep_others(models, weights, _):
        seen.append((models == [model], sorted(weights[0])))
        weights.pop()

    accelerator.register_save_state_pre_hook(keep_others)
    accelerator.save_state(folder)
    accelerator.end_training()
    return seen


def test_save_hooks_run_where_ranks_have_parts(tmp_path):
    assert spawn(saved_with_a_hook, 2, tmp_path / "run") == [[(True, sorted(Net().state_dict()))]] * 2
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert not any("table" in name for name in manifest["tensors"])
