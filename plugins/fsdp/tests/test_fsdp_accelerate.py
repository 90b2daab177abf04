"""Accelerate's section ``fsdp_config``, versions 1 and 2, as its configuration files hold it."""

from __future__ import annotations

import pytest

from drivetrain.api import ConfigError, load_config

VERSION_2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1e5
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_processes: 2
"""


def load(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_config(file, environ={})


def section(tmp_path, *lines):
    inner = "".join(f"  {line}\n" for line in lines)
    return load(tmp_path, f"distributed_type: FSDP\nfsdp_config:\n{inner}").section


@pytest.mark.filterwarnings("error")
def test_version_2_is_carried_over(tmp_path):
    loaded = load(tmp_path, VERSION_2)
    assert loaded.config.distributed_type == "fsdp"
    assert loaded.section == {
        "activation_checkpointing": True,
        "min_num_params": 100000,
        "cpu_offload": True,
        "reshard_after_forward": False,
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("strategy", "reshard"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("1", True), ("2", False)]
)
def test_strategies_of_version_1(tmp_path, strategy, reshard):
    assert section(tmp_path, f"fsdp_sharding_strategy: {strategy}") == {"reshard_after_forward": reshard}
    assert section(tmp_path, f"fsdp_reshard_after_forward: {strategy}") == {"reshard_after_forward": reshard}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fsdp_sharding_strategy: NO_SHARD", "write distributed_type: ddp"),
        ("fsdp_sharding_strategy: HYBRID_SHARD", "write mesh: {dp_replicate"),
        ("fsdp_auto_wrap_policy: NO_WRAP", "the blocks of the model are units"),
        ("fsdp_backward_prefetch: BACKWARD_POST", "the next unit is always gathered"),
        ("fsdp_activation_checkpointing_offload: true", "stay on the device"),
    ],
)
def test_what_only_costs_time_or_memory_is_mentioned(tmp_path, line, words):
    with pytest.warns(UserWarning, match=words):
        assert section(tmp_path, line) == {}


def test_what_is_unknown_stops_with_a_guess(tmp_path):
    with pytest.raises(ConfigError, match=r":3:\d+: fsdp_config\.fsdp_offload_param: .*mean 'fsdp_offload_params'"):
        section(tmp_path, "fsdp_offload_param: true")


@pytest.mark.filterwarnings("error")
def test_units_are_named_as_there(tmp_path):
    lines = ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap: Block,Head")
    assert section(tmp_path, *lines) == {"transformer_layer_cls": "Block,Head"}
