"""Accelerate's configuration files as they stand: three piles, and a run that follows them."""

from __future__ import annotations

import warnings

import pytest

from drivetrain.config import load_config
from drivetrain.config.accelerate_file import judge_file
from drivetrain.config.accelerate_rules import RULES, SECTIONS, Rule, flag, judge, judge_section
from drivetrain.errors import ConfigError
from drivetrain.registry import get_registry

WRITTEN_BY_ACCELERATE_CONFIG = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: 'NO'
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
fsdp_config: {}
deepspeed_config: {}
megatron_lm_config: {}
parallelism_config: {}
dynamo_config:
  dynamo_backend: 'NO'
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: false
"""


def load(tmp_path, text, **overrides):
    file = tmp_path / "default_config.yaml"
    file.write_text(text)
    return load_config(file, overrides=overrides, environ={})


def piles(values):
    return {verdict.key: verdict.pile for verdict in judge_file(values, get_registry())}


def test_a_file_of_accelerate_config_loads_without_a_word(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(tmp_path, WRITTEN_BY_ACCELERATE_CONFIG)
    assert loaded.config.use_cpu
    assert loaded.config.rdzv_backend == "static"
    assert loaded.config.accelerator_ids is None


def test_every_key_is_in_one_pile(tmp_path):
    found = piles({"gpu_ids": "2,0", "same_network": False, "enable_cpu_affinity": True, "use_cpu": False})
    assert found == {
        "gpu_ids": "carried over",
        "same_network": "no meaning here",
        "enable_cpu_affinity": "not supported",
        "use_cpu": "carried over",
    }


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("gpu_ids: 2,0", "accelerator_ids", ["2", "0"]),
        ("gpu_ids: 1", "accelerator_ids", ["1"]),
        ("gpu_ids: all", "accelerator_ids", None),
        ("fp16: true", "mixed_precision", "fp16"),
        ("fp16: false", "mixed_precision", "no"),
    ],
)
def test_what_is_carried_over_is_where_our_own_key_is(tmp_path, text, key, value):
    loaded = load(tmp_path, text)
    assert getattr(loaded.config, key) == value


def test_axes_become_the_mesh_and_keep_their_place_in_the_file(tmp_path):
    text = "parallelism_config:\n  parallelism_config_tp_size: 2\n  parallelism_config_dp_shard_size: 4\n"
    loaded = load(tmp_path, text)
    assert loaded.config.mesh.sizes() == {"dp_shard": 4, "tp": 2}
    assert str(loaded.origin("mesh.tp")).endswith("default_config.yaml:2:31")
    assert load(tmp_path, text, **{"mesh.tp": "8"}).config.mesh.tp == 8


def test_the_same_thing_said_twice_must_agree(tmp_path):
    text = "parallelism_config: {parallelism_config_tp_size: 2}\nmesh: {tp: %d}\n"
    assert load(tmp_path, text % 2).config.mesh.tp == 2
    with pytest.raises(ConfigError, match=r":1:22: .*means mesh\.tp: 2, and the file says 4 there; keep one"):
        load(tmp_path, text % 4)


def test_what_would_change_results_stops_and_the_rest_is_mentioned(tmp_path):
    with pytest.raises(ConfigError, match=r"downcast_bf16: 'yes' is not supported; set mixed_precision: bf16"):
        load(tmp_path, "downcast_bf16: 'yes'\n")
    with pytest.raises(ConfigError, match="cloud's own tools"):
        load(tmp_path, "ec2_instance_type: ml.p3.2xlarge\n")
    with pytest.warns(UserWarning, match=r":1:22: enable_cpu_affinity: true is not supported.*goes on without it"):
        load(tmp_path, "enable_cpu_affinity: true\n")
    with pytest.warns(UserWarning, match=r"dynamo_config\.dynamo_backend: 'INDUCTOR' is not supported; call torch"):
        load(tmp_path, "dynamo_config: {dynamo_backend: INDUCTOR}\n")


def test_an_unknown_key_inside_a_section_stops_with_a_guess(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'parallelism_config_tp_size'"):
        load(tmp_path, "parallelism_config: {parallelism_config_tpsize: 2}\n")


def test_a_section_of_nobody_is_an_unknown_key(tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'no_such_config'"):
        load(tmp_path, "no_such_config: {a: 1}\n")


def test_fp8_is_in_the_third_pile_and_stops_and_its_settings_mean_nothing():
    values = {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "fp8_format": "E4M3"}}
    verdicts = judge_file(values, get_registry())
    assert [(v.pile, v.stops) for v in verdicts] == [("not supported", True), *[("no meaning here", False)] * 2]


def test_no_rule_says_two_things():
    rules = {**RULES, **{key: rule for section in SECTIONS.values() for key, rule in section.items()}}
    for key, rule in rules.items():
        assert sum(map(bool, (rule.to, rule.into, rule.why, rule.instead))) == 1, key


def test_zero_is_not_false_and_a_conversion_may_refuse():
    rule = Rule(instead="no", nothing=(False,))
    assert judge("x", False, rule).pile == "no meaning here"
    assert judge("x", 0, rule).pile == "not supported"
    assert judge("x", "maybe", Rule(to="y", convert=flag)).says == "write true or false"
    assert judge("x", "Yes", Rule(to="y", convert=flag)).carried == {"y": True}
    assert next(judge_section("s", [1], {})).stops
