"""Sets of keys as public files have them: each trains an unchanged script, a word on what has no effect, or says why.

Key sets of Transformers' and DeepSpeed's examples, LLaMA-Factory, Axolotl and DeepSpeed-Chat; sizes are a tiny model's.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.api import UnsupportedError, UsageError
from drivetrain_deepspeed import effects
from drivetrain_deepspeed.config import DeepSpeedConfig
from drivetrain_deepspeed.optimizers import ScriptOptimizer, engine_optimizer
from drivetrain_deepspeed.written import Written
from drivetrain_testing import models, spawn
from drivetrain_testing.scenario import share

AUTO = "auto"
BATCHES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), AUTO
)
FP16 = {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
PRECISIONS = {"fp16": {**FP16, "initial_scale_power": 16}, "bf16": {"enabled": AUTO}}
SIZES_3 = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), AUTO
)
CPU = {"device": "cpu", "pin_memory": True}

TRAINING: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama-factory zero2": (
        {
            **BATCHES,
            **PRECISIONS,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "allgather_bucket_size": 5e8,
                "overlap_comm": False,
                "reduce_scatter": True,
                "reduce_bucket_size": 5e8,
                "contiguous_gradients": True,
                "round_robin_gradients": True,
            },
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
        },
        ["comms_config", "monitor_config"],
    ),
    "llama-factory zero3, partly offloaded": (
        {
            **BATCHES,
            **PRECISIONS,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "overlap_comm": False,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                **SIZES_3,
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        ["zero_force_ds_cpu_optimizer"],
    ),
    "llama-factory zero3 for gaudi": (
        {
            **BATCHES,
            "bf16": {"enabled": AUTO},
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": False,
                "contiguous_gradients": True,
                "reduce_scatter": False,
                "sub_group_size": 1e9,
                **SIZES_3,
            },
            "timers": {"throughput": {"enabled": True, "synchronized": False}},
        },
        [],
    ),
    "llama-factory sweep": (
        {
            **BATCHES,
            "fp16": {"enabled": False},
            "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True},
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "reduce_scatter": True,
                "allgather_partitions": True,
                "allgather_bucket_size": 200000000,
                "stage3_module_granularity_threshold": 16,
                "stage3_param_persistence_threshold": 50,
            },
        },
        [
            "activation_checkpointing",
            "zero_optimization.allgather_partitions",
            "zero_optimization.allgather_bucket_size",
        ],
    ),
    "axolotl zero3, all offloaded": (
        {
            **BATCHES,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 0,
                **SIZES_3,
                "max_live_parameters": 0,
                "max_reuse_distance": 0,
                "gather_16bit_weights_on_model_save": True,
            },
            "wall_clock_breakdown": False,
        },
        [],
    ),
    "axolotl zero1": (
        {
            **BATCHES,
            "bf16": {"enabled": AUTO},
            "fp16": {**FP16, "auto_cast": False, "initial_scale_power": 32},
            "zero_optimization": {"stage": 1, "overlap_comm": True},
        },
        [],
    ),
    "transformers zero3 of 2021": (
        {
            "fp16": {"enabled": False},
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "sub_group_size": 1e14,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.999], "eps": 1e-8}},
            "steps_per_print": 2000,
        },
        [],
    ),
    "cifar of deepspeed": (
        {
            "train_batch_size": 8,
            "prescale_gradients": False,
            "gradient_clipping": 1.0e6,
            "fp16": {"enabled": False, "loss_scale_window": 500, "initial_scale_power": 15},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000, "cpu_offload": True},
        },
        [],
    ),
    "deepspeed-chat, stage 2 with a common dictionary": (
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            "zero_optimization": {
                "stage": 2,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none"},
                "stage3_param_persistence_threshold": 1e4,
                "stage3_max_live_parameters": 3e7,
                "stage3_prefetch_bucket_size": 3e7,
                "memory_efficient_linear": False,
            },
            "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
        },
        [
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_prefetch_bucket_size",
        ],
    ),
}


class _Heard(logging.Handler):
    """What the backend says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def plain() -> list[float]:
    model = models.build("dense")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(3):
        x, y = models.dense_data(8, seed=step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def follow(folder: str) -> dict[str, tuple[list[float], str]]:
    """Losses of a script under each of the files, and what was said."""
    found = {}
    for name, (values, _) in TRAINING.items():
        heard = _Heard()
        logging.getLogger("drivetrain_deepspeed.backend").addHandler(heard)
        path = Path(folder) / f"{os.environ['RANK']}.json"
        path.write_text(json.dumps(values, indent=1))
        accelerator = Accelerator(cpu=True, deepspeed_plugin={"config_file": str(path)})
        model: Any = models.build("dense")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        losses = []
        for step in range(3):
            x, y = share(accelerator, *models.dense_data(8, seed=step))
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.end_training()
        logging.getLogger("drivetrain_deepspeed.backend").removeHandler(heard)
        found[name] = losses, "\n".join(heard.said)
    return found


def test_they_train_an_unchanged_script(tmp_path: Path) -> None:
    expected = plain()
    first, second = spawn(follow, 2, str(tmp_path), timeout=110)
    for name, (_, idle) in TRAINING.items():
        losses, said = first[name]
        # Float32 sums over ranks in another order.
        assert losses == pytest.approx(expected, rel=3e-6), name
        assert [key for key in idle if f"{key} ({tmp_path}/0.json:" not in said] == [], said
        assert said.count(".json:") == len(idle), said
        assert second[name] == (losses, ""), "rank 0 speaks for all"


# ---- those that cannot be followed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e5}},
            r"'stage3_param_persitance_threshold' .*; did you mean 'stage3_param_persistence_threshold'\?",
        ),
        ({"compile": {"disable": False, "backend": "inductor"}}, r"compile .* is not supported: .*torch.compile"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
        ({"sparse_attention": {"mode": "fixed", "block": 16}}, "sparse_attention .* is not supported"),
        ({"fp16": {"enabled": True, "loss_scale_windw": 5}}, r"'fp16.loss_scale_windw' .*'loss_scale_window'\?"),
        ({"bf16": {"enabled": True, "master": 1}}, "unknown key 'bf16.master' .*; remove it"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow .* is not supported"),
        (
            {"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 2}},
            "two names of one key",
        ),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": CPU}}, "two names of one key"),
        (
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}},
            "lower_precision_safe_modules .*float32",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, values: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values, indent=1))
    with pytest.raises(ValueError, match=sentence):
        DeepSpeedConfig(config_file=str(path))
    with pytest.raises(ValueError, match=sentence):
        DeepSpeedConfig(config=values)


def test_other_names_contradict_too(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"max_live_parameters": 5, "cpu_offload": True}}, indent=1))
    with pytest.raises(ValueError, match=r"stage3_max_live_parameters: 7 contradicts .*: 5 \(.*ds.json:3\)"):
        DeepSpeedConfig(config_file=str(path), stage3_max_live_parameters=7)
    with pytest.raises(ValueError, match=r'offload_optimizer: "none" contradicts .*: "cpu" \(.*ds.json:4\)'):
        DeepSpeedConfig(config_file=str(path), offload_optimizer="none")


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"max_grad_norm": 1.0}, "params.max_grad_norm: 1 .* is no such parameter there"),
        ({"bias_correction": False}, "params.bias_correction: false .* is true there"),
        ({"amsgrad": True}, "params.amsgrad: true .* is false there"),
    ],
)
def test_what_changes_an_adam_is_compared(params: dict[str, Any], sentence: str) -> None:
    written = Written(DeepSpeedConfig(config={"optimizer": {"type": "AdamW", "params": params}}))
    script = ScriptOptimizer("AdamW", defaults={"lr": 0.1, "amsgrad": False})
    with pytest.raises(UsageError, match=sentence):
        engine_optimizer(written, script)


def test_typed_keys_of_another_stage_are_said() -> None:
    written = Written(DeepSpeedConfig(zero_stage=2, zero_hpz_partition_size=2, offload_param="cpu", sub_group_size=9))
    assert [each.partition(" ")[0].rpartition(".")[2] for each in effects.without_effect(written)] == [
        "offload_param",
        "sub_group_size",
        "zero_hpz_partition_size",
    ]
    disk = Written(DeepSpeedConfig(zero_stage=2, offload_optimizer="nvme", offload_optimizer_nvme_path="/disk"))
    assert "stage 2 keeps its optimizer in memory" in effects.without_effect(disk)[0]
    assert effects.without_effect(Written(DeepSpeedConfig(zero_stage=0, offload_optimizer="cpu")))
    assert effects.without_effect(Written(DeepSpeedConfig())) == []


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
def test_numbers_of_nvme_are_others(key: str) -> None:
    written = Written(DeepSpeedConfig(**{"zero_stage": 3, key: "nvme", f"{key}_nvme_path": "/disk"}))
    with pytest.raises(UnsupportedError, match=rf'{key}: "nvme" .* other numbers.*') as caught:
        effects.check(written, "cpu")
    assert caught.value.cure == f"Set {key}: cpu."
    effects.check(Written(DeepSpeedConfig(**{"zero_stage": 3, key: "cpu"})), "cpu")


def test_quantisation_needs_an_accelerator() -> None:
    written = Written(DeepSpeedConfig(zero_stage=3, zero_quantized_gradients=True))
    effects.check(written, "cuda")
    with pytest.raises(UnsupportedError, match=r"zero_quantized_gradients: true .* needs an accelerator"):
        effects.check(written, "cpu")
