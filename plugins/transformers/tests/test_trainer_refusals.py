"""Shows the words of what a Trainer refuses, and runs what they advise."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import refusal_jobs as jobs

from drivetrain_testing import spawn

if find_spec("accelerate") is None or find_spec("transformers") is None:
    pytest.skip("Transformers and Accelerate are not installed", allow_module_level=True)

STEPS = 6


def test_batches_that_are_balanced_among_processes(tmp_path: Path) -> None:
    """Refuse what cuts the data by itself; batches of like lengths train."""
    refused, advised = ({"train_sampling_strategy": name} for name in ("batch_rebalance", "group_by_length"))
    ((words, losses),) = spawn(jobs.arguments, 1, str(tmp_path), refused, advised, timeout=60)
    assert words.startswith(
        "UnsupportedError: train_sampling_strategy='batch_rebalance' cuts the data among processes by itself"
    )
    assert "'group_by_length'" in words
    assert len(losses) == STEPS


def test_a_mode_of_compilation(tmp_path: Path) -> None:
    """Refuse the mode as an argument; a model compiled with it trains."""
    ((words, losses),) = spawn(jobs.compiled, 1, str(tmp_path), timeout=120)
    assert words.startswith("UsageError: TrainingArguments(torch_compile_mode=...) has no place in a run of Drivetrain")
    assert "Compile the model before it is given to the Trainer: model.compile(mode=...)." in words
    assert len(losses) == STEPS


def test_optimizers_that_step_in_backward(tmp_path: Path) -> None:
    """Refuse LOMO at its first backward; AdamW trains."""
    ((words, losses),) = spawn(jobs.stepping_in_backward, 1, str(tmp_path), timeout=60)
    assert words.startswith("UnsupportedError: LOMO and AdaLOMO step inside of backward")
    assert 'Choose another optimizer: TrainingArguments(optim="adamw_torch").' in words
    assert len(losses) == STEPS


def test_a_layout_among_the_arguments(tmp_path: Path) -> None:
    """Refuse sizes of a mesh as an argument; those of the configuration train (test_trainer_backends.py, ``tp``)."""
    from accelerate.parallelism_config import ParallelismConfig

    from drivetrain.api import UsageError
    from drivetrain_transformers import TrainingArguments

    with pytest.raises(UsageError, match=r"parallelism_config=\.\.\.\) lays out an engine") as raised:
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    assert "write the sizes into the section mesh: of the configuration" in str(raised.value)


@pytest.mark.slow
def test_a_model_that_transformers_has_sharded(tmp_path: Path) -> None:
    """Refuse a model that was loaded in shards; loaded whole, it is sharded by the configuration."""
    advised = {"distributed_type": "megatron", "mesh": {"tp": 2}}
    for words, losses in spawn(jobs.shards_of_transformers, 2, str(tmp_path), advised, timeout=120):
        assert words.startswith("UnsupportedError: the model was sharded while it was loaded, by Transformers")
        assert "mesh: {tp: 2} with distributed_type: megatron" in words
        assert len(losses) == STEPS


def test_an_argument_of_a_later_release(tmp_path: Path) -> None:
    """Name what a Transformers passes that nobody here knows, and the release that is tested."""
    (words,) = spawn(jobs.of_tomorrow, 1, str(tmp_path), timeout=60)
    assert words.startswith("UnsupportedError: this version of Transformers passes of_tomorrow to Accelerator")
    assert "pip install transformers==" in words


@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
def test_a_checkpoint_of_another_adapter(tmp_path: Path) -> None:
    """Refuse to go on from a folder without this adapter; its own, and the other as advised, go on."""
    (found,) = spawn(jobs.resumed_from, 1, str(tmp_path), timeout=120)
    words, resumed, uninterrupted = found
    assert "holds no adapter: there is no adapter_model.safetensors" in words["whole"]
    assert "Give the folder of a checkpoint that was saved with this adapter." in words["whole"]
    assert "holds tensors that are not this adapter's: " in words["other"]
    assert "k_proj" in words["other"]
    assert f"peft.PeftModel.from_pretrained(base, '{tmp_path}/other/checkpoint-3', is_trainable=True)" in words["other"]
    for name, losses in resumed.items():
        assert losses == pytest.approx(uninterrupted[name], abs=2e-6), name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_generations_that_do_not_divide(tmp_path: Path) -> None:
    """Refuse a generation batch that groups do not divide, once the mesh is known; a larger one trains."""
    found: list[Any] = spawn(jobs.groups_of_generations, 2, str(tmp_path), timeout=120)
    for words, losses in found:
        assert words.startswith("UsageError: a generation batch of 2 (1 data-parallel process(es)) cannot be divided")
        assert "Choose per_device_train_batch_size or num_generations so that it can." in words
        assert len(losses) == 2
