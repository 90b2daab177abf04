from __future__ import annotations

import json

import pytest

from drivetrain.config import Config, ResolvedConfig, load_config, worker_config
from drivetrain.errors import BackendBrokenError, BackendNotFoundError, ConfigError


@pytest.mark.parametrize("text", ["", "# a remark\n", "---\n", "null\n", "mesh:\nalpha:\n"])
def test_an_empty_file_gives_the_defaults(load, text):
    resolved = load(text)
    assert resolved.config == Config()
    assert resolved.sections == {}
    assert resolved.config.mixed_precision == "no"
    assert resolved.config.mesh.sizes() == {}


def test_no_file_at_all(registry):
    resolved = load_config(environ={}, registry=registry)
    assert resolved.config == Config()
    assert resolved.origins == {}
    assert {str(resolved.origin(key)) for key in Config.model_fields} == {"default"}


def test_layers_and_origins(load):
    resolved = load(
        "distributed_type: MULTI_ALPHA\nnum_processes: 2\nmixed_precision: bf16\n"
        "debug: false\nalpha:\n  bucket_mb: 3\n",
        environ={
            "DRIVETRAIN_NUM_PROCESSES": "3",
            "DRIVETRAIN_MIXED_PRECISION": "fp16",
            "DRIVETRAIN_MESH__TP": "2",
            "DRIVETRAIN_ALPHA__RESHARD_AFTER_FORWARD": "no",
            "UNRELATED": "x",
        },
        overrides={"num_processes": "4", "mesh.pp": 2, "process_group": {"timeout_seconds": 5}, "debug": None},
    )
    config = resolved.config
    assert config.distributed_type == "alpha"
    assert (config.num_processes, config.mixed_precision, config.debug) == (4, "fp16", False)
    assert config.mesh.sizes() == {"pp": 2, "tp": 2}
    assert config.process_group.timeout_seconds == 5.0
    assert resolved.section == {"bucket_mb": 3, "reshard_after_forward": False}
    assert {key: str(origin) for key, origin in resolved.origins.items() if str(origin) != "default"} == {
        "distributed_type": "c.yaml:1:19",
        "num_processes": "flag num_processes",
        "mixed_precision": "environment variable DRIVETRAIN_MIXED_PRECISION",
        "debug": "c.yaml:4:8",
        "mesh.pp": "flag mesh.pp",
        "mesh.tp": "environment variable DRIVETRAIN_MESH__TP",
        "process_group.timeout_seconds": "flag process_group.timeout_seconds",
        "alpha.bucket_mb": "c.yaml:6:14",
        "alpha.reshard_after_forward": "environment variable DRIVETRAIN_ALPHA__RESHARD_AFTER_FORWARD",
    }


def test_a_null_of_a_louder_layer_goes_back_to_the_default(load):
    text = "num_processes: 2\nlog_with: [jsonl]\nmesh: {tp: 2, pp: 2}\n"
    resolved = load(text, environ={"DRIVETRAIN_NUM_PROCESSES": ""}, overrides={"mesh.tp": "null", "log_with": "~"})
    assert resolved.config.num_processes is None
    assert resolved.config.log_with == []
    assert resolved.config.mesh.sizes() == {"pp": 2}


def test_a_louder_layer_replaces_a_whole_mapping(load):
    resolved = load("alpha: {options: {a: 1, b: 2}}\n", environ={"DRIVETRAIN_ALPHA__OPTIONS": "{c: 3}"})
    assert resolved.section_for("alpha") == {"options": {"c": 3}}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("log_with", "jsonl,tensorboard", ["jsonl", "tensorboard"]),
        ("log_with", "[jsonl, all]", ["jsonl", "all"]),
        ("log_with", "jsonl", ["jsonl"]),
        ("project_dir", "123", "123"),
        ("project_dir", "no", "no"),
        ("main_process_ip", "10.0.0.1", "10.0.0.1"),
        ("monitor_interval", "1e-2", 0.01),
        ("use_cpu", "yes", True),
        ("use_cpu", "1", True),
        ("mixed_precision", "BF16", "bf16"),
        ("mixed_precision", "no", "no"),
        ("main_process_port", "0", 0),
    ],
)
def test_text_of_variables_and_flags(load, key, text, value):
    assert getattr(load("", environ={f"DRIVETRAIN_{key.upper()}": text}).config, key) == value
    assert getattr(load("", overrides={key: text}).config, key) == value


def test_text_for_a_section_follows_its_model(load, alpha):
    given = {"stage": "3", "hook": "no", "offload": "false", "label": "007", "bucket_mb": "1e1", "options": "{a: 1}"}
    resolved = load("", overrides={f"alpha.{key}": text for key, text in given.items()})
    section = resolved.validated_section(alpha, "alpha")
    assert section == alpha(stage=3, hook="no", offload=False, label="007", bucket_mb=10.0, options={"a": 1})


@pytest.mark.parametrize("word", ["no", "NO", "'no'", "false", "'NO'", "off"])
def test_yaml_reads_no_as_false_and_we_do_not(load, word):
    resolved = load(f"mixed_precision: {word}\ndistributed_type: {word}\n")
    assert resolved.config.mixed_precision == "no"
    assert resolved.config.distributed_type == "beta"


def test_a_sections_no_is_a_word_where_the_model_says_so(load, alpha):
    resolved = load("distributed_type: alpha\nalpha: {hook: no, offload: no, reshard_after_forward: no}\n")
    assert resolved.section == {"hook": "no", "offload": False, "reshard_after_forward": False}
    assert resolved.validated_section(alpha) == alpha(hook="no", offload=False, reshard_after_forward=False)


def test_numbers_and_dates_as_people_write_them(load):
    resolved = load("monitor_interval: 1e-1\nproject_dir: 2026-11-20\nnum_machines: 1:30\nmain_process_port: 0x7_0\n")
    assert (resolved.config.num_machines, resolved.config.main_process_port) == ("1:30", 112)
    assert resolved.config.monitor_interval == 0.1
    assert resolved.config.project_dir == "2026-11-20"


def test_anchors_and_merges(load):
    resolved = load("mesh: &m {tp: 2}\nalpha:\n  options: {<<: *m, pp: 3}\n")
    assert resolved.section_for("alpha") == {"options": {"tp": 2, "pp": 3}}


def test_a_section_of_another_backend_waits(load):
    resolved = load("distributed_type: alpha\nalpha: {stage: 1}\ngamma: {depth: 4}\n")
    assert resolved.section == {"stage": 1}
    assert resolved.section_for("gamma") == {"depth": 4}
    assert resolved.section_for("beta") == {}


def test_the_registry_speaks_for_distributed_type(load):
    with pytest.raises(BackendNotFoundError) as caught:
        load("distributed_type: alhpa\nmixed_precison: bf16\n")
    assert caught.value.__notes__ == [
        "distributed_type was set by c.yaml:1:19",
        "c.yaml:2:1: unknown key 'mixed_precison'; did you mean 'mixed_precision'?",
    ]
    with pytest.raises(BackendBrokenError, match="could not be imported"):
        load("", overrides={"distributed_type": "broken"})


def test_an_accelerate_file_reads_as_it_stands(load):
    resolved = load(
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: 'NO'\ndowncast_bf16: 'no'\n"
        "enable_cpu_affinity: false\ngpu_ids: all\nmachine_rank: 0\nmain_training_function: main\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 2\nrdzv_backend: static\nsame_network: true\n"
        "tpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\nfsdp_config: {}\n"
        "main_process_ip: null\ncommands: null\ndynamo_backend: 'NO'\n"
    )
    assert resolved.config.distributed_type == "beta"
    assert (resolved.config.num_processes, resolved.config.rdzv_backend) == (2, "static")


def test_the_file_of_the_environment(tmp_path, registry):
    file = tmp_path / "mine.yaml"
    file.write_text("num_processes: 3\n", encoding="utf-8")
    environ = {"DRIVETRAIN_CONFIG_FILE": str(file)}
    assert load_config(environ=environ, registry=registry).config.num_processes == 3
    assert worker_config(environ, registry=registry).config.num_processes == 3
    assert worker_config({}, registry=registry).config == Config()


def test_files_that_cannot_be_read(tmp_path, registry):
    with pytest.raises(ConfigError, match=r"there is no configuration file 'nowhere\.yaml'"):
        load_config("nowhere.yaml", environ={}, registry=registry)
    (tmp_path / "latin.yaml").write_bytes(b"project_dir: caf\xe9\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "latin.yaml", environ={}, registry=registry)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, environ={}, registry=registry)


def test_a_byte_order_mark_is_no_key(tmp_path, registry):
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfnum_processes: 2\n")
    assert load_config(tmp_path / "bom.yaml", environ={}, registry=registry).config.num_processes == 2


# ---- from launcher to worker ----------------------------------------------------------------------------------------


def test_workers_get_what_the_launcher_resolved(load, registry):
    launched = load(
        "distributed_type: alpha\nnum_processes: 2\nalpha: {stage: 3, options: {a: 1}}\n",
        environ={"DRIVETRAIN_DEBUG": "true"},
        overrides={"mixed_precision": "fp16"},
    )
    assert ResolvedConfig.from_json(launched.to_json()) == launched
    assert worker_config({"DRIVETRAIN_CONFIG": launched.to_json()}, registry=registry) == launched


def test_a_flag_of_the_launcher_is_louder_than_the_workers_environment(load, registry):
    launched = load("num_processes: 2\ngradient_accumulation_steps: 4\n", overrides={"mixed_precision": "fp16"})
    environ = {
        "DRIVETRAIN_CONFIG": launched.to_json(),
        "DRIVETRAIN_MIXED_PRECISION": "bf16",
        "DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS": "8",
    }
    resolved = worker_config(environ, registry=registry)
    assert resolved.config.mixed_precision == "fp16"
    assert resolved.config.gradient_accumulation_steps == 8
    assert str(resolved.origin("gradient_accumulation_steps")).endswith("DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS")
    assert str(resolved.origin("mixed_precision")) == "flag mixed_precision"


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"format": 1, "values": {"x": 1}, "sections": {}}'])
def test_anything_else_in_the_variable_is_refused(text, registry):
    with pytest.raises(ConfigError, match="not a configuration that drivetrain wrote"):
        worker_config({"DRIVETRAIN_CONFIG": text}, registry=registry)


def test_another_versions_json_is_refused(registry):
    handed = load_config(overrides={"num_processes": 3}, environ={}, registry=registry).to_json()
    other = json.dumps(json.loads(handed) | {"format": 99})
    words = "the configuration handed over has format 99, this version reads 1"
    with pytest.raises(ConfigError, match=rf"{words}\. Let the launcher and the workers use the same version"):
        worker_config({"DRIVETRAIN_CONFIG": other}, registry=registry)
    assert worker_config({"DRIVETRAIN_CONFIG": handed}, registry=registry).config.num_processes == 3


def test_validated_section_keeps_its_places(load, alpha, gamma):
    resolved = ResolvedConfig.from_json(load("distributed_type: gamma\ngamma:\n  depth: 4\n").to_json())
    assert resolved.validated_section(gamma) == gamma(depth=4)
    with pytest.raises(ConfigError, match=r"c.yaml:3:10: unknown key 'depth'"):
        resolved.validated_section(alpha)


# ---- the real registry ----------------------------------------------------------------------------------------------


def test_with_what_is_installed(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("distributed_type: NO\n", encoding="utf-8")
    assert load_config(file, environ={}).config.distributed_type == "single"


def test_what_this_process_was_told(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS", "3")
    assert worker_config().config.gradient_accumulation_steps == 3


def test_foreign_variables_are_mentioned_and_kubernetes_ones_are_not(load):
    with pytest.warns(UserWarning, match="DRIVETRAIN_ZZZZZZ is not read"):
        load("", environ={"DRIVETRAIN_ZZZZZZ": "1"})
    load("", environ={"DRIVETRAIN_PORT": "tcp://1:2", "DRIVETRAIN_SERVICE_HOST": "x", "DRIVETRAIN_PORT_80_TCP": "y"})
    load("", environ={"DRIVETRAIN_TRACE_HOOKS": "1", "DRIVETRAIN_LOG_LEVEL": "INFO"})


@pytest.mark.parametrize(
    ("written", "meant"), [("2", 2), ("'3'", 3), ("1:4", "1:4"), ("' 1 : 4 '", "1:4"), ("2:2", 2), ("10:60", "10:60")]
)
def test_machines_are_a_number_or_a_range(load, written, meant):
    assert load(f"num_machines: {written}\n").config.num_machines == meant


@pytest.mark.parametrize("written", ["0", "4:1", "0:2", "'1:'", "two", "1.5", "true", "-1"])
def test_other_machines_are_refused(load, written):
    with pytest.raises(ConfigError, match="num_machines: "):
        load(f"num_machines: {written}\n")
