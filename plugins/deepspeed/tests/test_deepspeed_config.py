"""The section, DeepSpeed's file, and what the script says: they agree, or an error shows both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drivetrain import load_config
from drivetrain.api import ConfigError, PrecisionPolicy, UsageError
from drivetrain.utils import DummyOptim
from drivetrain_deepspeed.config import TYPED, DeepSpeedConfig
from drivetrain_deepspeed.engine_config import EngineConfig, hidden_size_of, implied
from drivetrain_deepspeed.jsonfile import read_json
from drivetrain_deepspeed.optimizers import describe, engine_optimizer
from drivetrain_deepspeed.schedules import plan
from drivetrain_deepspeed.vocabulary import KNOWN, ZERO
from drivetrain_deepspeed.written import Written
from drivetrain_testing import spawn

PLAIN = PrecisionPolicy()
BF16 = PrecisionPolicy("bf16", compute="bfloat16")
FP16 = PrecisionPolicy("fp16", compute="float16", loss_scaling=True)


def section(tmp_path: Path, **values: object) -> DeepSpeedConfig:
    return DeepSpeedConfig(config_file=file(tmp_path, values))


def file(tmp_path: Path, values: dict) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return str(path)


def mistakes(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    return caught.value.what


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_file_is_read_with_comments_and_lines(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{ // first\n "a": {"b": [1, 2.5e8, "x#y"], /* two\n lines */ "c": true,},\n # more\n "d": null}')
    found = read_json(str(path))
    assert found.values == {"a": {"b": [1, 2.5e8, "x#y"], "c": True}, "d": None}
    assert (found.where(("a", "b")), found.where(("a", "c")), found.where(("d",))) == (
        f"{path}:2",
        f"{path}:3",
        f"{path}:5",
    )
    assert found.where(("a", "unknown")) == f"{path}:2"


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ('{"a": 1\n "b": 2}', 2, "expected ','"),
        ('{"a": 1,\n "a": 2}', 2, "the key 'a' was already given in line 1"),
        ('{"a": yes}', 1, "expected a value, not 'yes'"),
        ("{a: 1}", 1, "double quotes"),
        ("[1]", 1, "braces"),
        ('{"a": 1}\n}', 2, "after the end"),
        ('{"a": 1', 1, "the end"),
        ('{"a": "x', 1, "begins nothing"),
    ],
)
def test_a_file_that_is_not_json_says_where(tmp_path, text, line, sentence):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_json(str(path))
    assert f"{path}:{line}:" in str(caught.value)


def test_mistakes_of_file_and_section_are_told_together(tmp_path):
    ds = file(
        tmp_path,
        {
            "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
            "gradient_clipping": 1.0,
        },
    )
    said = mistakes(
        tmp_path,
        f"deepspeed:\n  config_file: {ds}\n  zero_stage: 2\n  overlap_comm: false\n  offload_optimizer: nvme\n"
        "  offload_optimizer_nvme_path: /x\n  gradient_clipping: 0.5\n  reduce_buckets: 3\n",
    )
    assert f"train.yaml:3:15: deepspeed.zero_stage: zero_stage: 2 contradicts zero_optimization.stage: 3 ({ds}:3)" in (
        said
    )
    assert f"overlap_comm: false contradicts zero_optimization.overlap_comm: true ({ds}:4)" in said
    assert f'"nvme" contradicts zero_optimization.offload_optimizer.device: "cpu" ({ds}:6)' in said
    assert f"gradient_clipping: 0.5 contradicts gradient_clipping: 1 ({ds}:9)" in said
    assert "unknown key 'reduce_buckets'; did you mean 'reduce_bucket_size'?" in said
    assert "5 mistakes" in said


def test_an_inline_dictionary_is_held_against_file_and_keys(tmp_path):
    ds = file(tmp_path, {"zero_optimization": {"stage": 3}})
    text = f"deepspeed:\n  config_file: {ds}\n  config:\n    zero_optimization: {{stage: 2}}\n  zero_stage: 1\n"
    said = mistakes(tmp_path, text)
    assert f"zero_optimization.stage: 2 contradicts zero_optimization.stage: 3 ({ds}:3)" in said
    assert f"zero_stage: 1 contradicts zero_optimization.stage: 3 ({ds}:3)" in said
    same = DeepSpeedConfig(config_file=ds, config={"zero_optimization": {"stage": 3}}, zero_stage=3)
    assert Written(same).stage == 3


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"zero_optimisation": {"stage": 1}}, "unknown key 'zero_optimisation' .*did you mean 'zero_optimization'"),
        ({"zero_optimization": {"overlap_com": True}}, "unknown key 'overlap_com' .*did you mean 'overlap_comm'"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel .* the backend 'megatron'"),
        ({"elasticity": {"enabled": True}}, "elasticity .* the launcher decides"),
        ({"dataloader_drop_last": True}, "drop_last=True"),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, r"bf16\.immediate_grad_update"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, values, sentence):
    for given in ({"config_file": file(tmp_path, values)}, {"config": values}):
        with pytest.raises(ValueError, match=sentence):
            DeepSpeedConfig(**given)


def test_what_is_off_or_a_remark_passes(tmp_path):
    values = {
        "sparse_gradients": False,
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "tensor_parallel": {"autotp_size": 1},
        "_comment": "of a person",
    }
    dictionary, _ = EngineConfig(section(tmp_path, **values), PLAIN, 1).dictionary()
    assert not {"sparse_gradients", "elasticity", "tensor_parallel"} & dictionary.keys()


def test_a_missing_file_and_a_missing_folder_are_told(tmp_path):
    assert "there is no file 'nowhere.json'" in mistakes(tmp_path, "deepspeed: {config_file: nowhere.json}\n")
    assert "nvme needs offload_param_nvme_path" in mistakes(tmp_path, "deepspeed: {offload_param: nvme}\n")


# ---- typed keys -----------------------------------------------------------------------------------------------------

VALUES = {
    "offload_optimizer": "cpu",
    "offload_param": "cpu",
    "offload_optimizer_nvme_path": "/disk",
    "offload_param_nvme_path": "/disk",
    "zero_stage": 3,
    "gradient_clipping": 0.5,
    "communication_data_type": "fp32",
}


def test_every_typed_key_reaches_deepspeeds_dictionary():
    given = {key: VALUES.get(key, True if "int" not in str(field.annotation) else 7) for key, field in typed_fields()}
    written = Written(DeepSpeedConfig(**given))
    assert {key: written.get(*keys) for key, keys in TYPED.items()} == given
    assert set(TYPED) == set(DeepSpeedConfig.model_fields) - {"config", "config_file"}


def typed_fields():
    return [(key, DeepSpeedConfig.model_fields[key]) for key in TYPED]


def known_to_deepspeed() -> dict[tuple[str, ...], set[str]]:
    """In a process of its own, as importing DeepSpeed changes the environment."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    zero = "zero_optimization"
    models = {
        (zero,): DeepSpeedZeroConfig,
        (zero, "offload_optimizer"): DeepSpeedZeroOffloadOptimizerConfig,
        (zero, "offload_param"): DeepSpeedZeroOffloadParamConfig,
    }
    return {
        keys: {name for key, field in model.model_fields.items() for name in (key, field.alias) if name}
        for keys, model in models.items()
    }


def test_every_typed_key_is_one_of_deepspeeds():
    known = {**spawn(known_to_deepspeed, 1)[0], (): KNOWN}
    assert [keys for keys in TYPED.values() if keys[-1] not in known[keys[:-1]]] == []
    # What this release of DeepSpeed knows is never called a slip of the pen.
    assert known["zero_optimization",] <= ZERO


def test_the_stage_is_two_unless_anybody_says(tmp_path):
    assert Written(DeepSpeedConfig()).stage == 2
    assert Written(DeepSpeedConfig(zero_stage=0)).stage == 0
    assert Written(section(tmp_path, steps_per_print=5)).stage == 0  # As DeepSpeed reads such a file.


def test_names_of_accelerates_files_are_accepted():
    found = DeepSpeedConfig(offload_optimizer_device="cpu", zero3_save_16bit_model=True, zero3_init_flag=False)
    assert (found.offload_optimizer, found.zero3_gather_16bit_weights) == ("cpu", True)
    with pytest.raises(ValueError, match="init_empty_weights"):
        DeepSpeedConfig(zero3_init_flag=True)
    with pytest.raises(ValueError, match="two names of one key"):
        DeepSpeedConfig(offload_param_device="cpu", offload_param="cpu")


def test_accelerates_section_becomes_ours(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  deepspeed_multinode_launcher: standard\n"
        "  gradient_accumulation_steps: 2\n  gradient_clipping: 1.0\n  offload_optimizer_device: cpu\n"
        "  offload_param_device: none\n  zero3_init_flag: false\n  zero3_save_16bit_model: true\n  zero_stage: 3\n"
    )
    resolved = load_config(path, environ={})
    assert resolved.config.distributed_type == "deepspeed"
    assert resolved.section == {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "offload_optimizer": "cpu",
        "zero3_gather_16bit_weights": True,
        "zero_stage": 3,
    }
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, zero3_init_flag: true}\n")
    with pytest.warns(UserWarning, match="init_empty_weights"):
        load_config(path, environ={})


# ---- what the run fills in, and what contradicts it -----------------------------------------------------------------

AUTO = "auto"


def everything_auto(**zero: object) -> dict[str, object]:
    """The shape of the files that Transformers' documents show."""
    return {
        "fp16": {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": AUTO},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": AUTO,
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_max_live_parameters": 1e9,
            **zero,
        },
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


def test_auto_is_filled_from_the_run(tmp_path):
    config = EngineConfig(section(tmp_path, **everything_auto()), BF16, 2)
    config.set_batches([8, 32], 4)
    config.check_batches()
    dictionary, open_keys = config.dictionary(hidden_size=64)
    assert open_keys == []
    assert dictionary["train_micro_batch_size_per_gpu"] == 8
    # The engine sees each micro-batch as a window of its own: windows are the core's.
    assert (dictionary["train_batch_size"], dictionary["gradient_accumulation_steps"]) == (16, 1)
    assert dictionary["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 64 * 64,
        "stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
        "stage3_param_persistence_threshold": 640,
        "stage3_max_live_parameters": 1e9,
    }
    assert dictionary["torch_autocast"]["dtype"] == "bfloat16"
    assert f'"{AUTO}"' not in json.dumps(dictionary)


def test_sizes_left_to_auto_have_deepspeeds_default_without_a_hidden_size(tmp_path):
    dictionary, open_keys = EngineConfig(section(tmp_path, **everything_auto()), PLAIN, 2).dictionary()
    assert sorted(open_keys) == [
        "reduce_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
    ]
    assert dictionary["zero_optimization"] == {"stage": 3, "stage3_max_live_parameters": 1e9}


def test_hidden_sizes_of_models():
    class Model:
        pass

    model, config, text = Model(), Model(), Model()
    assert hidden_size_of(model) is None
    model.config = config
    config.hidden_sizes = [16, 48, 32]
    assert hidden_size_of(model) == 48
    config.hidden_size = 24
    assert hidden_size_of(model) == 24
    config.hidden_size, config.hidden_sizes, config.text_config, text.hidden_size = None, None, text, 8
    assert hidden_size_of(model) == 8


def test_auto_without_a_meaning_is_refused_with_its_line(tmp_path):
    config = EngineConfig(section(tmp_path, flops_profiler={"enabled": AUTO}), PLAIN, 1)
    with pytest.raises(UsageError, match=r'"auto" has nothing to be filled in from: flops_profiler.enabled \(.*:3\)'):
        config.dictionary()


@pytest.mark.parametrize(
    ("values", "sizes", "steps", "sentence"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, [4], 1, r"per_gpu: 8 \(.*ds.json:2\), but the prepared loaders have 4"),
        ({"train_batch_size": 16}, [4], 1, r"train_batch_size: 16 \(.*:2\), but the run has 4 .* x 1 .* x 2 ranks = 8"),
        ({"gradient_accumulation_steps": 2}, [4], 3, r"steps: 2 \(.*:2\), but the run accumulates 3"),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, [4], 3, "4 samples a rank x 3"),
        ({"train_micro_batch_size_per_gpu": 8}, [4, 8], 1, None),
        ({"train_batch_size": 32}, [16, 4], 4, None),
        ({"train_micro_batch_size_per_gpu": 8}, [], 1, None),
    ],
)
def test_batch_sizes_agree_with_the_script(tmp_path, values, sizes, steps, sentence):
    config = EngineConfig(section(tmp_path, **values), PLAIN, 2)
    config.set_batches(sizes, steps)
    if sentence is None:
        config.check_batches()
        said = values.get("train_micro_batch_size_per_gpu", 4)
        assert config.dictionary()[0]["train_micro_batch_size_per_gpu"] == said
        return
    with pytest.raises(UsageError, match=sentence):
        config.check_batches()


def test_a_section_speaks_for_precision_and_accumulation(tmp_path):
    values = {"bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_accumulation_steps": 4}
    found = implied(section(tmp_path, **values), {})
    assert {key: value for key, (value, _) in found.items()} == {
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
    }
    assert found["mixed_precision"][1].endswith("ds.json:3")
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    assert implied(DeepSpeedConfig(config=autocast), {})["mixed_precision"][0] == "fp16"
    assert implied(section(tmp_path, **everything_auto()), {}) == {}
    with pytest.raises(ConfigError, match=r"bf16.enabled .* contradicts fp16.enabled"):
        implied(section(tmp_path, bf16={"enabled": True}, fp16={"enabled": True}), {})


def test_a_precision_that_is_turned_off_contradicts_the_run(tmp_path):
    with pytest.raises(UsageError, match=r"bf16.enabled: false \(.*:3\), but the run has mixed_precision: bf16"):
        EngineConfig(section(tmp_path, bf16={"enabled": False}), BF16, 1)
    EngineConfig(section(tmp_path, fp16={"enabled": False}), BF16, 1)


def test_clipping_agrees_with_the_call(tmp_path):
    config = EngineConfig(section(tmp_path, gradient_clipping=1.0), PLAIN, 1)
    assert config.clipping == 1.0
    config.check_clipping(1.0)
    config.check_clipping(float("inf"))  # Only measures.
    with pytest.raises(UsageError, match=r"clipping: 1 \(.*:2\), but the script calls clip_grad_norm_ with 0.5"):
        config.check_clipping(0.5)
    left = EngineConfig(section(tmp_path, gradient_clipping=AUTO), PLAIN, 1)
    left.check_clipping(0.5)
    assert left.clipping == 0.0


def test_numbers_of_the_loss_scaler(tmp_path):
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 50}
    found = EngineConfig(section(tmp_path, fp16=fp16), FP16, 1).loss_scaling()
    assert (found["init_scale"], found["growth_interval"]) == (4096.0, 50)
    fixed = EngineConfig(section(tmp_path, fp16={"loss_scale": 128}), FP16, 1).loss_scaling()
    assert (fixed["init_scale"], fixed["growth_factor"], fixed["backoff_factor"]) == (128.0, 1.0, 1.0)
    scaler = PrecisionPolicy("fp16", compute="float16", loss_scaling=True, scaler={"init_scale": 8.0})
    with pytest.raises(UsageError, match=r"initial_scale_power: 12 \(.*\), but GradScalerKwargs has init_scale=8"):
        EngineConfig(section(tmp_path, fp16=fp16), scaler, 1).loss_scaling()


# ---- optimizer and scheduler of the file ----------------------------------------------------------------------------


def parameters():
    return [torch.nn.Parameter(torch.zeros(2))]


def optimizer_section(kind: str = "AdamW", **params: object) -> Written:
    return Written(DeepSpeedConfig(config={"optimizer": {"type": kind, "params": params}}))


@pytest.mark.parametrize(
    ("kind", "params", "make"),
    [
        ("AdamW", {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}, torch.optim.AdamW),
        ("AdamW", {"lr": 0.1, "betas": [0.9, 0.999], "torch_adam": True}, torch.optim.AdamW),
        ("Adam", {"lr": 0.1}, torch.optim.AdamW),  # DeepSpeed's Adam decouples weight decay.
        ("Adam", {"lr": 0.1, "adam_w_mode": False}, torch.optim.Adam),
        ("Adam", {"lr": 0.1}, torch.optim.Adam),  # Without weight decay both are the same.
        ("sgd", {"lr": 0.1}, torch.optim.SGD),
    ],
)
def test_a_file_that_names_the_scripts_own_optimizer_agrees(kind, params, make):
    optimizer = make(parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # Starts at 0; the rate is still 0.1.
    assert engine_optimizer(optimizer_section(kind, **params), describe(optimizer)) is None


@pytest.mark.parametrize(
    ("kind", "params", "sentence"),
    [
        ("SGD", {"lr": 0.1}, "it is a AdamW in the script"),
        ("AdamW", {"lr": 0.2}, r"params.lr: 0.2 \(.*\) is 0.1 there"),
        ("AdamW", {"betas": [0.8, 0.999]}, r"params.betas: \[0.8, 0.999\] .* is \(0.9, 0.999\) there"),
        ("AdamW", {"momentum": 0.9}, "params.momentum: 0.9 .* is no such parameter there"),
    ],
)
def test_a_file_that_names_another_optimizer_is_refused(kind, params, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        engine_optimizer(optimizer_section(kind, **params), describe(torch.optim.AdamW(parameters(), lr=0.1)))
    assert "DummyOptim" in caught.value.cure


def test_a_placeholder_gets_the_optimizer_of_the_file():
    written = optimizer_section("AdamW", lr=AUTO, eps=1e-7, betas=AUTO, weight_decay=AUTO)
    script = describe(DummyOptim(parameters(), lr=0.3, betas=(0.7, 0.9)))
    assert engine_optimizer(written, script) == {
        "type": "AdamW",
        "params": {"lr": 0.3, "eps": 1e-7, "betas": (0.7, 0.9), "weight_decay": 0.0},
    }
    assert engine_optimizer(written, script, "cpu")["params"]["torch_adam"] is True
    explicit = optimizer_section("AdamW", lr=0.1)
    assert engine_optimizer(explicit, describe(DummyOptim(parameters())))["params"] == {"lr": 0.1}
    with pytest.raises(UsageError, match=r"optimizer.params.lr: 0.1 .*DummyOptim\(..., lr=0.3\)"):
        engine_optimizer(explicit, script)
    with pytest.raises(UsageError, match="none is named"):
        engine_optimizer(Written(DeepSpeedConfig()), script)


def test_a_placeholder_keeps_what_its_groups_say():
    first, second = parameters(), parameters()
    dummy = DummyOptim([{"params": first, "weight_decay": 0.1}, {"params": second}], lr=0.3)
    assert dummy.given_groups() == [{"params": first, "weight_decay": 0.1}, {"params": second}]
    with pytest.raises(UsageError, match="cannot step"):
        dummy.step()


def schedule_section(kind: str = "WarmupDecayLR", **params: object) -> Written:
    return Written(DeepSpeedConfig(config={"scheduler": {"type": kind, "params": params}}))


def test_a_schedule_is_filled_from_the_script():
    written = schedule_section(
        warmup_min_lr=AUTO, warmup_max_lr=AUTO, warmup_num_steps=AUTO, total_num_steps=AUTO, warmup_type="linear"
    )
    assert plan(written, [0.1, 0.3], total_num_steps=10, warmup_num_steps=2) == (
        "WarmupDecayLR",
        {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 0.3,
            "warmup_num_steps": 2,
            "total_num_steps": 10,
            "warmup_type": "linear",
        },
    )
    with pytest.raises(UsageError, match=r"total_num_steps: .auto. .*has nothing to be filled in from"):
        plan(written, [0.1], warmup_num_steps=2)
    with pytest.raises(UsageError, match=r"warmup_num_steps: 5 .*DummyScheduler\(..., warmup_num_steps=2\)"):
        plan(schedule_section(warmup_num_steps=5), [0.1], warmup_num_steps=2)
    assert plan(Written(DeepSpeedConfig()), [0.1]) is None
