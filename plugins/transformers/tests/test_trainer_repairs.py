"""What stock Trainer gets wrong over several processes is right here, and what cannot be right is refused in words."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_jobs as jobs

from drivetrain_testing import spawn

if find_spec("accelerate") is None or find_spec("transformers") is None:
    pytest.skip("Transformers and Accelerate are not installed", allow_module_level=True)

TOLERANCE = 2e-6
"""As in test_trainer_backends.py."""


def close(one: Any, other: Any, tolerance: float = TOLERANCE) -> bool:
    return bool(torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=tolerance))


@pytest.fixture(scope="module")
def by_hand() -> Any:
    return spawn(jobs.by_hand, 1, 24, 12)[0]


@pytest.fixture(scope="module", params=[1, 2, 3])
def t5(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return spawn(jobs.both_ignoring, request.param, str(tmp_path_factory.mktemp("t5")), request.param, timeout=120)


@pytest.mark.gate("3")
def test_a_model_that_ignores_num_items_in_batch(t5: Any, by_hand: Any) -> None:
    for rank in t5:
        for run in rank[:2]:
            assert len(run[0]["loss"]) == 6
            assert close(run[0]["loss"], by_hand[0]["loss"])
            assert close(run[0]["grad_norm"], by_hand[0]["grad_norm"], 1e-5)
            assert all(close(run[1][name], tensor, 1e-5) for name, tensor in by_hand[1].items())


@pytest.mark.gate("3")
def test_generated_predictions_are_those_of_each_sample(t5: Any) -> None:
    expected = torch.stack([jobs.Words(13, begin=1)[index]["labels"] for index in range(13)])
    alone = spawn(jobs.seq2seq, 1, {"distributed_type": "single"}, "/tmp")[0][0]
    for rank in t5:
        tokens, labels = rank[2]
        assert torch.equal(labels[:, :9], expected)
        assert torch.equal(tokens, alone)


SHARDED: dict[str, dict[str, Any]] = {
    "fsdp": {"distributed_type": "fsdp"},
    "zero3": {"distributed_type": "deepspeed", "deepspeed.zero_stage": 3},
    "tp": {"distributed_type": "megatron", "mesh.tp": 2},
}


@pytest.mark.parametrize("name", list(SHARDED))
@pytest.mark.gate("fsdp")
def test_generation_that_ends_at_different_times_on_different_ranks(name: str, tmp_path: Path) -> None:
    if name == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    single = {"distributed_type": "single"}
    free = spawn(jobs.seq2seq, 1, single, str(tmp_path))[0][0]
    # A token that some samples come to early, and others never.
    come = {int(token): (free[:, 1:3] == token).any(1) for token in free[:, 1:3].unique()}
    end = next(token for token, rows in come.items() if rows.any() and not (free == token).any(1).all())
    expected = spawn(jobs.seq2seq, 1, single, str(tmp_path), end)[0][0]
    assert not torch.equal(expected, free)
    for tokens, _ in spawn(jobs.seq2seq, 2, SHARDED[name], str(tmp_path), end, timeout=60):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize(("processes", "accumulate"), [(1, 2), (2, 2), (3, 1)])
@pytest.mark.gate("2-2", "3-1")
def test_a_loss_of_the_scripts_own(processes: int, accumulate: int, by_hand: Any, tmp_path: Path) -> None:
    for losses, state in spawn(jobs.own_loss, processes, str(tmp_path), processes, accumulate, timeout=90):
        assert close(losses["loss"], by_hand[0]["loss"])
        assert all(close(state[name], tensor, 1e-5) for name, tensor in by_hand[1].items())


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder = str(tmp_path_factory.mktemp("stock"))
    run = spawn(jobs.stock, 1, folder, save_strategy="steps", save_steps=3, timeout=60, **jobs.WINDOWS)[0]
    return run, f"{folder}/checkpoint-3"


@pytest.mark.parametrize(("engine", "processes"), [("single", 1), ("ddp", 2), ("ddp", 3)])
@pytest.mark.gate("ddp-3")
def test_resumes_what_stock_trainer_wrote(engine: str, processes: int, stock: Any, tmp_path: Path) -> None:
    expected, checkpoint = stock
    config = {"distributed_type": engine}
    for run in spawn(jobs.from_stock, processes, str(tmp_path), checkpoint, config, processes, timeout=90):
        assert not isinstance(run, str), run
        for key in ("loss", "grad_norm", "learning_rate"):
            assert close(run[0][key], expected[0][key])
        assert all(close(run[1][name], tensor, 1e-5) for name, tensor in expected[1].items())


def test_an_optimizer_that_stock_trainer_wrote_is_not_cut_up(stock: Any, tmp_path: Path) -> None:
    for said in spawn(jobs.from_stock, 2, str(tmp_path), stock[1], {"distributed_type": "fsdp"}, 2, timeout=90):
        assert said.startswith("UnsupportedError: ")
        assert "Resume and save once under distributed_type: single or ddp" in said


def test_another_global_batch_is_refused(tmp_path: Path) -> None:
    config = {"distributed_type": "single"}
    spawn(jobs.ours, 1, config, str(tmp_path / "a"), save_strategy="steps", save_steps=3, timeout=60, **jobs.WINDOWS)
    checkpoint = str(tmp_path / "a" / "checkpoint-3")
    args = (str(tmp_path / "b"), checkpoint, config, 2)
    (said,) = spawn(jobs.from_stock, 1, *args, timeout=60)
    assert "was trained with 12 samples in each update, this run takes 6" in said
    (run,) = spawn(jobs.from_stock, 1, *args, ignore_data_skip=True, timeout=60)
    assert len(run[0]["loss"]) == 6


def test_the_users_fsdp_file_works_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(jobs.USERS_FILE.format(processes=2))
    reference = spawn(jobs.stock, 1, str(tmp_path / "stock"), timeout=60, **jobs.WINDOWS)[0]
    for losses, facts, dtypes, kinds in spawn(jobs.file_of_user, 2, str(tmp_path / "run"), str(file), timeout=90):
        assert facts == ("fsdp", "bf16")
        assert dtypes == {"torch.float32"}
        assert "Tensor" not in kinds, "parameters are sharded"
        # bfloat16 has 8 bits; the number of tokens is not rounded to them.
        assert close(losses["loss"], reference[0]["loss"], 2e-2)
    assert (tmp_path / "run" / "checkpoint-6" / "model.safetensors").is_file()


def test_arguments_that_choose_an_engine_are_refused_with_the_file_to_write(tmp_path: Path) -> None:
    fsdp = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "reshard_after_forward": False}
    (said,) = spawn(jobs.refused, 1, str(tmp_path), fsdp=True, fsdp_config=fsdp)
    assert said.startswith("UsageError: TrainingArguments(fsdp=...) chooses an engine")
    assert said.endswith(
        "\n    distributed_type: fsdp\n    fsdp_config:\n      fsdp_version: 2"
        "\n      fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n      fsdp_reshard_after_forward: false"
    )
    (said,) = spawn(jobs.refused, 1, str(tmp_path), deepspeed="zero.json")
    assert said.startswith("UsageError: TrainingArguments(deepspeed=...) chooses an engine")
    assert said.endswith("\n    distributed_type: deepspeed\n    deepspeed:\n      config_file: zero.json")
