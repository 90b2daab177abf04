"""Writing and showing a configuration."""

from __future__ import annotations

import json

from drivetrain.config import Config, load_config


def test_default_asks_nothing_and_writes_a_file_of_defaults(drivetrain, tmp_path):
    done = drivetrain("config", "--default")
    assert done.returncode == 0, done.stderr
    written = tmp_path / "drivetrain.yaml"
    assert written.read_text().count("#") > 20
    assert load_config(written, environ={}).config == Config()


def test_where_nobody_answers_defaults_are_written_and_that_is_said(drivetrain, tmp_path):
    done = drivetrain("config", "-o", "deep/here.yaml")
    assert done.returncode == 0, done.stderr
    assert "no more answers" in done.stdout
    assert load_config(tmp_path / "deep/here.yaml", environ={}).config == Config()


def test_answers_by_lines_and_a_wrong_one_is_asked_again(drivetrain, tmp_path):
    done = drivetrain("config", answers="single\n1\nmany\n1\nno\nbf16\n4\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("How many processes over all machines?") == 2
    found = load_config(tmp_path / "drivetrain.yaml", environ={}).config
    assert (found.distributed_type, found.num_processes) == ("single", 1)
    assert (found.mixed_precision, found.gradient_accumulation_steps) == ("bf16", 4)


def test_several_machines_are_asked_where_they_meet(drivetrain, tmp_path):
    done = drivetrain("config", answers="\n2\n4\n1\nnode0\n\nyes\n\n\n")
    assert done.returncode == 0, done.stderr
    found = load_config(tmp_path / "drivetrain.yaml", environ={}).config
    assert (found.distributed_type, found.num_machines, found.num_processes, found.machine_rank) == (None, 2, 4, 1)
    assert (found.main_process_ip, found.main_process_port, found.use_cpu) == ("node0", 29500, True)


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
