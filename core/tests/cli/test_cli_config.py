"""Writing and showing a configuration."""

from __future__ import annotations

import json

import pytest

from drivetrain.cli.options import resolve
from drivetrain.config import Config, load_config

NO_ACCELERATOR = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
"""So that the questions are the same on every machine."""


def test_default_asks_nothing_and_writes_a_file_of_defaults(drivetrain, tmp_path):
    done = drivetrain("config", "--default")
    assert done.returncode == 0, done.stderr
    written = tmp_path / "drivetrain.yaml"
    assert written.read_text().count("#") > 20
    assert load_config(written, environ={}).config == Config()


def test_where_nobody_answers_defaults_are_written_and_that_is_said(drivetrain, tmp_path):
    done = drivetrain("config", "-o", "deep/here.yaml", **NO_ACCELERATOR)
    assert done.returncode == 0, done.stderr
    assert "Found: this machine has no accelerator" in done.stdout
    assert "no more answers" in done.stdout
    assert load_config(tmp_path / "deep/here.yaml", environ={}).config == Config()


def test_answers_by_lines_are_checked_shown_and_written(drivetrain, tmp_path):
    answers = ["1", "many", "2", "dp", "fsdp", "bf16", "4", "cpu_offload,forward_prefetch", "true", "-1", "2", "yes"]
    done = drivetrain("config", answers="\n".join(answers), **NO_ACCELERATOR)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("How many processes?") == 2
    assert "expected a number from 1, not 'many'" in done.stdout
    assert "dp cannot be chosen here: trains in one process, not in 2" in done.stdout
    assert "at least 0" in done.stdout
    loaded = load_config(tmp_path / "drivetrain.yaml", environ={})
    assert (loaded.config.distributed_type, loaded.config.num_processes) == ("fsdp", 2)
    assert (loaded.config.mixed_precision, loaded.config.gradient_accumulation_steps) == ("bf16", 4)
    assert loaded.sections == {"fsdp": {"cpu_offload": True, "forward_prefetch": 2}}
    written = (tmp_path / "drivetrain.yaml").read_text()
    assert written in done.stdout
    assert "# Micro-batches between two optimizer steps.\ngradient_accumulation_steps: 4\n" in written
    assert "\nnum_machines" not in written


def test_a_file_that_is_shown_and_not_wanted_is_not_written(drivetrain, tmp_path):
    done = drivetrain("config", answers="1\n1\nsingle\n\n\nno\n", **NO_ACCELERATOR)
    assert done.returncode == 0, done.stderr
    assert "distributed_type: single\n" in done.stdout
    assert done.stdout.endswith("Nothing was written.\n")
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_replaced_unless_that_is_said(drivetrain, tmp_path):
    (tmp_path / "drivetrain.yaml").write_text("debug: true\n")
    done = drivetrain("config", "--default")
    assert done.returncode == 2
    assert "--force replaces it" in done.stderr
    assert (tmp_path / "drivetrain.yaml").read_text() == "debug: true\n"
    assert drivetrain("config", "--default", "--force").returncode == 0


def test_show_says_where_each_value_comes_from(drivetrain, tmp_path):
    (tmp_path / "c.yaml").write_text("mixed_precision: bf16\ndebug: true\n")
    done = drivetrain(
        "config", "show", "--config", "c.yaml", "--num-processes", "3", "--set", "mesh.tp=2", "--json",
        DRIVETRAIN_DEBUG="false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(done.stdout)}
    assert rows["mixed_precision"] == ("bf16", "c.yaml:1:18")
    assert rows["debug"] == (False, "environment variable DRIVETRAIN_DEBUG")
    assert rows["num_processes"][0] == 3
    assert rows["num_processes"][1].startswith("flag")
    assert rows["mesh.tp"][0] == 2
    assert rows["use_cpu"] == (False, "default")
    plain = drivetrain("config", "show", "--config_file", "c.yaml").stdout
    assert any(line.split() == ["mixed_precision", '"bf16"', "c.yaml:1:18"] for line in plain.splitlines())


def test_mistakes_of_a_file_are_told_at_once_and_end_with_code_2(drivetrain, tmp_path):
    (tmp_path / "c.yaml").write_text("mixed_precison: bf16\nnum_processes: many\n")
    done = drivetrain("config", "show", "--config", "c.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "c.yaml:1:1" in done.stderr
    assert "c.yaml:2:16" in done.stderr
    assert "did you mean 'mixed_precision'" in done.stderr
    assert "Traceback" not in done.stderr


def test_set_needs_a_value(drivetrain):
    done = drivetrain("config", "show", "--set", "debug")
    assert done.returncode == 2
    assert "--set takes KEY=VALUE, not 'debug'" in done.stderr


@pytest.mark.parametrize(
    ("typed", "settings", "origin"),
    [
        ({"accelerator_ids": "0"}, (), "flag --accelerator_ids / --gpu_ids"),
        ({"log_dir": "logs"}, (), "flag --log_dir"),
        ({"cpu": True}, (), "flag --cpu"),
        ({}, ("mesh.tp=1",), "flag --set mesh.tp"),
    ],
)
def test_an_origin_names_the_flag_as_it_is_typed(typed, settings, origin):
    resolved = resolve(None, settings, typed)
    assert origin in {str(each) for each in resolved.origins.values()}
