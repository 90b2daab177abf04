"""Every sentence here is what a user reads; all of a file's mistakes come at once."""

from __future__ import annotations

import re
import warnings

import pytest
from pydantic import field_validator

from drivetrain.config import Section, worker_config
from drivetrain.config.problems import show
from drivetrain.errors import ConfigError


def complaints(load, text, **layers):
    with pytest.raises(ConfigError) as caught:
        load(text, **layers)
    *lines, last = caught.value.what.split("\n")
    count = len(lines)
    assert last == ("1 mistake" if count == 1 else f"{count} mistakes") + " in the configuration"
    return [line.removeprefix("c.yaml:") for line in lines]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("mixed_precison: bf16", "1:1: unknown key 'mixed_precison'; did you mean 'mixed_precision'?"),
        ("alpah: {}", "1:1: unknown key 'alpah'; did you mean 'alpha'?"),
        ("stage: 3", "1:1: unknown key 'stage' outside of a section; it belongs into the section 'alpha:'"),
        ("depth: 3", "1:1: unknown key 'depth' outside of a section; it belongs into the section 'gamma:'"),
        ("alpha: {reshard: 1}", "1:9: unknown key 'reshard'; did you mean 'reshard_after_forward'?"),
        ("alpha: {wrapping: {min_parms: 1}}", "1:20: unknown key 'min_parms'; did you mean 'min_params'?"),
        ("gamma: {dept: 1}", "1:9: unknown key 'dept'; did you mean 'depth'?"),
        ("mesh: {dp: 2}", "1:8: unknown key 'dp'; the keys here are cp, dp_replicate, dp_shard, pp, tp"),
        ("a: !ruby 1", "1:4: this is not valid YAML: could not determine a constructor for the tag '!ruby'"),
        (
            "process_group: {zzz: 2}",
            ("1:17: unknown key 'zzz'; the keys here are communication_backend, init_method, timeout_seconds"),
        ),
        ("beta: {a: 1}", "1:8: backend 'beta' has no settings of its own; remove its keys"),
        ("MULTI_ALPHA: {a: 1}", "1:1: the section of this backend is called 'alpha', not 'MULTI_ALPHA'"),
        ("alpha: 3", "1:8: alpha: expected keys and values, as this is the section of a backend"),
        ("delta: {a: 1}", "1:1: no installed backend is called 'delta'. Run: pip install \"drivetrain[delta]\""),
        (
            "broken: {}",
            ("1:1: this section cannot be checked: plugin 'broken' could not be imported [drivetrain-broken 1.0]"),
        ),
        ("num_processes: two", "1:16: num_processes: expected a whole number, not 'two'"),
        ("num_processes: 1.5", "1:16: num_processes: expected a whole number, not 1.5"),
        ("num_processes: yes", "1:16: num_processes: expected a number, not true"),
        ("num_processes: 0", "1:16: num_processes: expected at least 1, not 0"),
        ("num_processes: [1]", "1:16: num_processes: expected a whole number, not a list"),
        ("main_process_port: 70000", "1:20: main_process_port: expected at most 65535, not 70000"),
        ("monitor_interval: 0", "1:19: monitor_interval: expected above 0, not 0"),
        # Of a number that is neither finite nor above 0, releases of pydantic name one or the other.
        ("monitor_interval: .nan", re.compile("1:19: monitor_interval: expected (above 0|a finite number), not nan")),
        ("use_cpu: perhaps", "1:10: use_cpu: expected true or false, not 'perhaps'"),
        ("project_dir: 12", "1:14: project_dir: expected text, not 12; put it in quotes"),
        ("rdzv_backend: c10", "1:15: rdzv_backend: expected 'c10d' or 'static', not 'c10'; did you mean 'c10d'?"),
        ("mixed_precision: fp8", "1:18: mixed_precision: 'fp8' is not supported; write bf16 (or fp16, or 'no')"),
        ("mixed_precision: yes", "1:18: mixed_precision: expected 'no', 'bf16' or 'fp16', not true"),
        ("mesh: 3", "1:7: mesh: expected keys and values, not 3"),
        ("mesh:\n  tp: -2", "2:7: mesh.tp: expected at least 1, not -2"),
        ("log_with: {a: 1}", "1:11: log_with: expected a list, not keys and values"),
        ("log_with: [a, 3]", "1:15: log_with.1: expected text, not 3; put it in quotes"),
        ("distributed_type: 3", "1:19: distributed_type: expected text, not 3; put it in quotes"),
        (
            "machine_rank: 2\nnum_machines: 2",
            ("1:15: machine_rank: machine 2 does not exist among num_machines: 2; count from 0"),
        ),
        ("alpha: {stage: 4}", "1:16: alpha.stage: expected 1, 2 or 3, not 4"),
        ("alpha: {offload: maybe}", "1:18: alpha.offload: expected true or false or 'auto', not 'maybe'"),
        ("gpu_ids: true", "1:10: accelerator_ids: expected ids such as [0, 2], or all"),
        (
            "alpha_config: {a: 1}",
            "1:15: alpha_config is not supported; write a section 'alpha:' with the backend's own keys",
        ),
        (
            "compute_environment: AMAZON_SAGEMAKER",
            (
                "1:22: compute_environment: 'AMAZON_SAGEMAKER' is not supported; only "
                "LOCAL_MACHINE has a meaning"
            ),
        ),
        ("debug: true\ndebug: true", "2:1: key 'debug' was already given in line 1"),
        ("mesh:\n  tp: 1\n  tp: 2", "3:3: key 'tp' was already given in line 2"),
        ("? [a, b]\n: 3", "1:3: a key must be a word, not a list or a mapping"),
        ("- a", "1:1: a configuration is made of keys and values (key: value), this is not"),
        ("hello", "1:1: a configuration is made of keys and values (key: value), this is not"),
        ("mesh: &m {tp: *m}", "1:7: this is not valid YAML: an anchor contains itself"),
        (
            "mesh: {tp: 1",
            ("1:13: this is not valid YAML: while parsing a flow mapping, expected ',' or '}', but got '<stream end>'"),
        ),
        ("a:\n\tb: 1", "2:1: this is not valid YAML: a tab cannot indent or start a value; use spaces"),
        (
            "a: !!python/object/apply:os.system [ls]",
            ("1:4: this is not valid YAML: the tag 'python/object/apply:os.system' has no meaning here"),
        ),
        (
            "a: 1\n---\nb: 2",
            ("2:1: this is not valid YAML: expected a single document in the stream, but found another document"),
        ),
        ('debug: true\nproject_dir: "\x07"', ("2:15: this is not valid YAML: it holds a character that YAML forbids")),
    ],
)
def test_one_mistake_in_a_file(load, text, complaint):
    (found,) = complaints(load, text)
    assert complaint.fullmatch(found) if isinstance(complaint, re.Pattern) else found == complaint


def test_all_mistakes_at_once(load):
    text = (
        "mixed_precison: bf16\ngradient_accumulation_steps: x\nmesh: {tp: 0, tt: 1}\nalpha: {stage: 7, label: 1}\n"
        "gamma: {dept: 1, depth: y}\ndowncast_bf16: 'yes'\ndebug: true\ndebug: true\n"
    )
    found = complaints(load, text, environ={"DRIVETRAIN_USE_CPU": "x"}, overrides={"num_machines": "-1", "alpha.q": 1})
    assert [line.split(": ")[0] for line in found] == [
        "environment variable DRIVETRAIN_USE_CPU",
        "1:1", "2:30", "3:12", "3:15", "4:16", "4:26", "5:9", "5:25", "6:16", "8:1",
        "flag alpha.q",
        "flag num_machines",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("MIXED_PRECISON", "bf16", "no such key; did you mean DRIVETRAIN_MIXED_PRECISION?"),
        ("MIXED_PRECISION", "fp8", "'fp8' is not supported; write bf16 (or fp16, or 'no')"),
        ("MESH__TPP", "2", "unknown key 'tpp'; did you mean 'tp'?"),
        ("ALPAH__STAGE", "2", "no such key; did you mean DRIVETRAIN_ALPHA__STAGE?"),
        ("ALPHA__STAGGE", "2", "unknown key 'stagge'; did you mean 'stage'?"),
        ("ALPHA__OPTIONS", "{a: ", "'{a: ' is not a valid value"),
        ("NUM_PROCESSES", "two", "expected a whole number, not 'two'"),
    ],
)
def test_mistakes_in_the_environment(load, variable, value, complaint):
    found = complaints(load, "", environ={f"DRIVETRAIN_{variable}": value})
    assert found == [f"environment variable DRIVETRAIN_{variable}: {complaint}"]


def test_mistakes_of_flags(load):
    assert complaints(load, "", overrides={"mesh.shard": 1}) == [
        "flag mesh.shard: unknown key 'shard'; did you mean 'dp_shard'?"
    ]
    assert complaints(load, "", overrides={"zzz": 1}) == [
        "flag zzz: unknown key 'zzz'; `drivetrain config --default` writes a file with every key"
    ]


def test_the_error_reads_well(load):
    with pytest.raises(ConfigError) as caught:
        load("mixed_precison: bf16\n")
    assert str(caught.value) == (
        "c.yaml:1:1: unknown key 'mixed_precison'; did you mean 'mixed_precision'?\n1 mistake in the configuration."
    )
    assert isinstance(caught.value, ValueError)


def test_long_values_are_cut():
    assert len(show("x" * 500)) == 60
    assert show(None) == "null"


def test_a_file_that_another_backend_would_read_stops_only_that_one(load, registry, monkeypatch):
    class Reading(Section):
        """Its own check looks beyond the configuration, at a file for instance."""

        file: str | None = None

        @field_validator("file")
        @classmethod
        def _is_there(cls, value):
            raise ValueError(f"there is no file {value!r}")

    monkeypatch.setitem(registry.sections, "gamma", Reading)
    section = "gamma:\n  file: old.json\n"
    for chosen in ("", "distributed_type: gamma\n"):
        with pytest.raises(ConfigError, match=r"there is no file 'old\.json'"):
            load(chosen + section)
    with pytest.warns(UserWarning, match="gamma") as mentioned:
        found = load("distributed_type: alpha\n" + section)
    assert [str(each.message) for each in mentioned] == [
        "c.yaml:3:9: gamma.file: there is no file 'old.json'; distributed_type is not gamma, and the run goes on."
    ]
    handed = {"DRIVETRAIN_CONFIG": found.to_json()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the launcher has said it, its workers do not say it again
        assert worker_config(handed, registry=registry).section_for("gamma") == {"file": "old.json"}
    with pytest.raises(ConfigError, match=r"3:3: unknown key 'fil'"):  # what is wrong whatever the machine
        load("distributed_type: alpha\ngamma:\n  fil: old.json\n")
