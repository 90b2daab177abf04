"""DeepSpeed's own checkpoints, both ways: plain DeepSpeed writes and reads, without a line of ours in its process.

Tolerance 1e-6 on float32 losses of about 2.4: another world adds the same numbers in another order.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import ZeroStageEnum
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator, checkpoint, load_config
from drivetrain.api import CheckpointError
from drivetrain.api.programs import pip_line
from drivetrain_convert import convert, convert_to
from drivetrain_deepspeed import natives
from drivetrain_testing import spawn

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

CUT, STEPS = 3, 6


class Net(nn.Module):
    """Tied weights, a frozen block, a buffer that matters, parameters of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.table(words) * (1 + self.seen.sum() / 50)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Let DeepSpeed compile what it loads at its first start, which on a loaded machine takes longer than a test may.

    A rank that is killed in the middle of it leaves a lock, for which every later start would wait for ever.
    """
    program = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=900)


def build(seed: int, *, one_group: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    if one_group:
        return model, torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.03}]
    # A large eps: a gradient of nearly zero, whose sign the order of sums decides, must not make a full step.
    return model, torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


def batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
    return words, (words + 1) % 11


def plain_engine(stage: int, seed: int, dtype: str = "no", *, one_group: bool = False) -> Any:
    """An engine as a script for DeepSpeed alone makes it."""
    warnings.simplefilter("ignore")  # DeepSpeed's own, which concern its authors.
    import deepspeed
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None  # Else it is compiled first.
    dist.init_process_group("gloo")
    model, optimizer = build(seed, one_group=one_group)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": 0.0,  # Its default is 1.
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def plain_steps(engine: Any, steps: range) -> list[float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in steps:
        words, labels = batch(step, rank, world_size)
        loss = F.cross_entropy(engine(words).float(), labels)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / world_size)
        engine.backward(loss)
        engine.step()
    return losses


def plain_write(
    stage: int, folder: Path, dtype: str = "no", *, universal: bool = False, one_group: bool = False
) -> list[float]:
    """Train, save, train on; the later losses."""
    engine = plain_engine(stage, 1, dtype, one_group=one_group)
    plain_steps(engine, range(CUT))
    engine.save_checkpoint(str(folder), tag="half", client_state={"epoch": 2, "mine": {"a": 1}})
    if universal and dist.get_rank() == 0:
        from argparse import Namespace

        from deepspeed.checkpoint.ds_to_universal import main

        known = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        main(Namespace(
            input_folder=f"{folder}/half", output_folder=f"{folder}/half_universal", inject_missing_state=True, **known
        ))  # fmt: skip
    return plain_steps(engine, range(CUT, STEPS))


def plain_read(stage: int, folder: Path, dtype: str = "no") -> tuple[list[float], int]:
    """Load into a fresh engine of other weights and go on."""
    engine = plain_engine(stage, 2, dtype)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    begun = engine.global_steps
    return plain_steps(engine, range(begun, STEPS)), begun


def ours(
    backend: str, load: Path | None, save: Path | None, *, one_group: bool = False, strict: bool = True, **section: Any
) -> list[float]:
    """A run of ours: to the cut and a save, or from a checkpoint to the end."""
    overrides = {"distributed_type": backend, "use_cpu": True}
    overrides |= {f"{backend}.{key}": value for key, value in section.items()}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    model, optimizer = accelerator.prepare(*build(1 if load is None else 3, one_group=one_group))
    if load is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It says that there is no random state.
            accelerator.load_state(load, strict=strict)
    losses = []
    for step in range(accelerator.step, CUT if save else STEPS):
        words, labels = batch(step, accelerator.process_index, accelerator.num_processes)
        loss = F.cross_entropy(model(words), labels)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(save)
    accelerator.end_training()
    return losses


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Later losses of a single process that nobody stops, and its checkpoint at the cut."""
    folder = tmp_path_factory.mktemp("reference") / "cut"
    spawn(ours, 1, "single", None, folder)
    return spawn(ours, 1, "single", folder, None)[0], folder


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 4), (3, 2), (3, 4)], ids=str)
def test_what_deepspeed_writes_goes_on_as_ours(stage, world_size, reference, tmp_path):
    later = spawn(plain_write, world_size, stage, tmp_path / "theirs", env={"DS_ACCELERATOR": "cpu"})[0]
    assert later == pytest.approx(reference[0], abs=1e-6)
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert report.kind.startswith("a checkpoint of DeepSpeed")
    assert [sentence for sentence in report.left_out if not sentence.startswith("the position in the data")] == [
        "client_state['mine']: a dict of the script's own, which stays in the source"
    ]
    found = checkpoint.inspect(tmp_path / "ours").manifest
    assert found.info["notes"]["client_state.epoch"] == 2
    assert found.trainables[0]["extra"]["tied"] == {"head.weight": "table.weight"}
    assert spawn(ours, 1, "single", tmp_path / "ours", None)[0] == pytest.approx(later, abs=1e-6)


def test_without_zero_the_optimizer_is_told_apart_by_order(tmp_path):
    environment = {"DS_ACCELERATOR": "cpu"}
    later = spawn(plain_write, 2, 0, tmp_path / "theirs", one_group=True, env=environment)[0]
    assert convert(tmp_path / "theirs", tmp_path / "ours").kind == "a checkpoint of DeepSpeed without ZeRO"
    losses = spawn(ours, 1, "single", tmp_path / "ours", None, one_group=True)[0]
    assert losses == pytest.approx(later, abs=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_goes_on_under_every_backend(stage, reference, tmp_path):
    spawn(plain_write, 2, stage, tmp_path / "theirs", universal=True, env={"DS_ACCELERATOR": "cpu"})
    (masters,) = (tmp_path / "theirs" / "half_universal").glob("zero/norm.weight/fp32.pt")
    masters.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"there is no fp32\.pt for norm\.weight.*Fetch the whole folder, or"):
        convert(tmp_path / "theirs" / "half_universal", tmp_path / "ours", "deepspeed")
    (tmp_path / "elsewhere").rename(masters)
    report = convert(tmp_path / "theirs" / "half_universal", tmp_path / "ours", "deepspeed")
    assert report.kind == "a universal checkpoint of DeepSpeed"
    places = [("deepspeed", 2, {"zero_stage": 5 - stage}), ("fsdp", 2, {})]
    for backend, world_size, section in places:
        losses = spawn(ours, world_size, backend, tmp_path / "ours", None, **section)[0]
        assert losses == pytest.approx(reference[0], abs=1e-6)


def test_master_values_of_a_low_precision_run_are_carried(tmp_path):
    spawn(plain_write, 2, 3, tmp_path / "theirs", "bf16", env={"DS_ACCELERATOR": "cpu"})
    convert(tmp_path / "theirs", tmp_path / "ours")
    tensors = checkpoint.inspect(tmp_path / "ours").manifest.tensors
    assert tensors["model.norm.weight"].dtype == "float32"
    assert tensors["model.blocks.1.weight"].dtype == "bfloat16", "frozen: it has no master values"


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 4), (2, 2), (3, 2), (3, 4)], ids=str)
def test_what_we_write_plain_deepspeed_goes_on_with(stage, world_size, reference, tmp_path):
    options = {"zero_stage": str(stage), "world_size": str(world_size)}
    left_out = convert_to(reference[1], tmp_path / "theirs", "deepspeed", options)
    assert "random states: DeepSpeed's checkpoints have no place for them" in left_out
    losses, steps = spawn(plain_read, world_size, stage, tmp_path / "theirs", env={"DS_ACCELERATOR": "cpu"})[0]
    assert steps == CUT
    assert losses == pytest.approx(reference[0], abs=1e-6)


def test_what_we_write_in_several_buffers_comes_back(reference, tmp_path):
    options = {"zero_stage": "3", "world_size": "3", "sub_group_size": "20", "precision": "bf16"}
    convert_to(reference[1], tmp_path / "theirs", "deepspeed", options)
    convert(tmp_path / "theirs", tmp_path / "back")
    assert spawn(ours, 1, "single", tmp_path / "back", None)[0] == pytest.approx(reference[0], abs=1e-7)


def test_a_folder_wrapped_by_accelerate_brings_what_lies_beside(reference, tmp_path):
    convert_to(reference[1], tmp_path / "plain", "deepspeed", {"zero_stage": "2", "world_size": "2"})
    folder = tmp_path / "theirs"
    folder.mkdir()
    (tmp_path / "plain" / f"global_step{CUT}").rename(folder / "pytorch_model")
    (folder / "latest").write_text("pytorch_model", encoding="utf-8")
    torch.save({"last_epoch": CUT, "base_lrs": [0.02, 0.03]}, folder / "scheduler.bin")
    torch.save({"step": CUT, "random_state": random.getstate(), "numpy_random_seed": np.random.get_state(),
                "torch_manual_seed": torch.get_rng_state()}, folder / "random_states_0.pkl")  # fmt: skip
    report = convert(folder, tmp_path / "ours")
    assert report.kind == "Accelerate's folder with a checkpoint of DeepSpeed, ZeRO-2 on 2 process(es)"
    assert {"scheduler.0", "the random state of 1 process(es)"} <= set(report.carried)
    losses = spawn(ours, 1, "single", tmp_path / "ours", None, strict=False)[0]  # It has no scheduler.
    assert losses == pytest.approx(reference[0], abs=1e-7)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_nothing_in_a_foreign_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "theirs"
    folder.mkdir()
    torch.save({"module": Bomb()}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt cannot be read as weights only"):
        convert(folder, tmp_path / "ours")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "ours").exists()


class NamedStage:
    """A stage as Python 3.11.2 pickles it, whichever runs the test."""

    def __reduce__(self) -> Any:
        return getattr, (ZeroStageEnum, "weights")


class NamedBomb:
    def __reduce__(self) -> Any:
        return getattr, (nn.Module, "forward")


def test_a_stage_is_read_by_its_name_and_nothing_else_is(tmp_path):
    torch.save({"zero_stage": NamedStage()}, tmp_path / "one.pt")
    assert natives.load(tmp_path / "one.pt") == {"zero_stage": 3}
    torch.save({"zero_stage": NamedBomb()}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="cannot be read as weights only"):
        natives.load(tmp_path / "other.pt")


def test_what_is_missing_or_foreign_is_named(reference, tmp_path):
    convert_to(reference[1], tmp_path / "theirs", "deepspeed", {"zero_stage": "2", "world_size": "2"})
    folder = tmp_path / "theirs" / f"global_step{CUT}"
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"1 file.s. with the optimizer's states are there, 2 were written"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "elsewhere").rename(folder / "zero_pp_rank_1_mp_rank_01_optim_states.pt")
    with pytest.raises(CheckpointError, match="model-parallel") as caught:
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert "ds_to_universal" in str(caught.value)
    with pytest.raises(CheckpointError, match="holds no checkpoint of DeepSpeed"):
        convert(tmp_path, tmp_path / "ours", "deepspeed")


def test_options_are_checked(reference, tmp_path):
    cases = {
        "zero_stge": ("1", "did you mean|Did you mean 'zero_stage'"),
        "zero_stage": ("4", "zero_stage=4 makes no sense"),
        "world_size": ("many", "world_size=many makes no sense"),
        "precision": ("fp8", "precision=fp8"),
    }
    for key, (value, message) in cases.items():
        with pytest.raises(CheckpointError, match=message):
            convert_to(reference[1], tmp_path / "theirs", "deepspeed", {key: value})
    assert list(tmp_path.iterdir()) == []


def test_values_of_16_bits_are_written_with_zero_alone(reference, tmp_path):
    given = {"zero_stage": "0", "precision": "bf16"}
    with pytest.raises(CheckpointError, match=r"precision=bf16 with zero_stage=0 is not written\. Use .*only p"):
        convert_to(reference[1], tmp_path / "theirs", "deepspeed", given)
    assert list(tmp_path.iterdir()) == []
    for advised in ({**given, "precision": "no"}, {**given, "zero_stage": "1"}):
        convert_to(reference[1], tmp_path / "_".join(advised.values()), "deepspeed", advised)


def of_two_optimizers(folder: Path) -> dict[str, Tensor]:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "single"}, environ={}))
    model, _ = build(1)
    first, *others = model.parameters()
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in ([first], others)]
    model, *stepping = accelerator.prepare(model, *optimizers)
    words, labels = batch(0, 0, 1)
    accelerator.backward(F.cross_entropy(model(words), labels))
    for optimizer in stepping:
        optimizer.step()
    accelerator.save_state(folder)
    whole = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {name: tensor.clone() for name, tensor in whole.items()}


def test_a_checkpoint_of_two_optimizers_is_exported_without_them(tmp_path):
    (weights,) = spawn(of_two_optimizers, 1, tmp_path / "ours")
    words = r"the model has 2 optimizers, DeepSpeed's checkpoints hold one\. `drivetrain checkpoint export` writes"
    with pytest.raises(CheckpointError, match=words):
        convert_to(tmp_path / "ours", tmp_path / "theirs", "deepspeed", {})
    program = "from drivetrain.cli.main import main; main()"
    words = [sys.executable, "-c", program, "checkpoint", "export", tmp_path / "ours", tmp_path / "exported"]
    subprocess.run(words, check=True, capture_output=True, timeout=180)
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert found.keys() == weights.keys() - {"head.weight"}, "one tensor under two names"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


def test_the_command_line_reads_without_deepspeed_and_says_what_writing_needs(reference, tmp_path):
    convert_to(reference[1], tmp_path / "theirs", "deepspeed", {"zero_stage": "3", "world_size": "2"})
    # DeepSpeed cannot be imported in this process.
    program = "import sys; sys.modules['deepspeed'] = None; from drivetrain.cli.main import main; main()"

    def command(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, "checkpoint", "convert", *map(str, words)],
            check=False, capture_output=True, text=True, timeout=180,
        )  # fmt: skip

    done = command(tmp_path / "theirs", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    assert "from a checkpoint of DeepSpeed, ZeRO-3 on 2 process(es)" in done.stdout
    refused = command(tmp_path / "ours", tmp_path / "again", "--to", "deepspeed", "--set", "zero_stage=1")
    assert refused.returncode != 0
    assert pip_line("deepspeed") in refused.stderr
    assert not (tmp_path / "again").exists()
