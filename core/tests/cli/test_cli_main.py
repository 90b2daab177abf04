"""The group itself: light, and clear about what it does not know."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from drivetrain.api import CONTRACT
from drivetrain.cli.backends import backends

HEAVY = {"torch", "numpy", "pydantic_core", "tqdm", "questionary"}


def imported(arguments: list[str]) -> tuple[set[str], str]:
    """Run the command line with an import log; return top-level modules and what was written."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from drivetrain.cli.main import main; main()", *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith("DRIVETRAIN_")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}, done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"], ["backends"], ["backends", "--json"]])
def test_what_needs_neither_torch_nor_a_schema_imports_neither(arguments):
    seen, _ = imported(arguments)
    assert "click" in seen
    assert not seen & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [["config", "show"], ["checkpoint", "--help"], ["launch", "--help"], ["test", "--help"], ["config", "--help"]],
)
def test_no_torch_before_something_is_launched(arguments):
    seen, words = imported(arguments)
    assert "torch" not in seen
    assert words


def test_help_names_every_subcommand(drivetrain):
    words = drivetrain("--help").stdout
    for name in ("backends", "checkpoint", "check", "compare", "config", "env", "launch", "new-plugin", "test"):
        assert f"\n  {name} " in words


def test_a_command_of_another_distribution_is_told_with_its_cure_where_that_is_not_installed(monkeypatch):
    from drivetrain.cli.main import Commands
    from drivetrain.registry import Registry

    monkeypatch.setattr("drivetrain.registry.get_registry", lambda: Registry(entry_points=()))
    monkeypatch.setattr("drivetrain.registry.source_tree", lambda: None)
    run = CliRunner().invoke
    words = " ".join(run(Commands("drivetrain"), ["--help"]).output.split())
    assert "new-plugin Write a package that brings a backend of your own." in words
    assert 'Needs: pip install "drivetrain[testing]"' in words
    done = run(Commands("drivetrain"), ["new-plugin", "mine"])
    assert done.exit_code == 2
    assert "The subcommand 'new-plugin' is not installed. Run: pip install \"drivetrain[testing]\"" in done.output
    done = run(Commands("drivetrain"), ["check", "train.py"])
    assert "The subcommand 'check' is not installed. Run: pip install \"drivetrain[convert]\"" in done.output
    done = run(Commands("drivetrain"), ["plan", "choose"])
    assert "The subcommand 'plan' is not installed. Run: pip install \"drivetrain[planner]\"" in done.output


def test_the_version(drivetrain):
    from importlib.metadata import version

    assert drivetrain("--version").stdout == f"drivetrain {version('drivetrain')}\n"


def test_an_unknown_subcommand_is_guessed_or_the_list_is_given(drivetrain):
    done = drivetrain("lanch")
    assert done.returncode == 2
    assert "There is no subcommand 'lanch'. Did you mean 'launch'?" in done.stderr
    there = drivetrain("xyzzy").stderr.partition("There are: ")[2]
    # Plugins add their own.
    ours = {"backends", "checkpoint", "compare", "config", "env", "launch", "test"}
    assert ours <= set(there.rstrip(".\n").split(", "))


def test_a_plugin_adds_a_command_and_may_not_take_one(drivetrain, tmp_path):
    (tmp_path / "toy_cli.py").write_text(
        "import click\nfrom drivetrain.hookspecs import hookimpl\n"
        "@hookimpl\ndef drivetrain_commands(group):\n"
        "    @group.command()\n    def greet():\n        '''Say hello.'''\n        click.echo('hello')\n"
        "    @group.command()\n    def launch():\n        click.echo('taken over')\n"
    )
    info = tmp_path / "toy_cli-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-cli\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drivetrain.hooks]\ncommands = toy_cli\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert drivetrain("greet", PYTHONPATH=path).stdout == "hello\n"
    words = drivetrain("--help", PYTHONPATH=path)
    assert "greet       Say hello." in words.stdout
    assert words.stderr == "warning: toy-cli 1.0 brings the command launch, which exists already\n"
    assert "taken over" not in drivetrain("launch", "--help", PYTHONPATH=path).stdout


def test_the_help_of_launch_has_an_example_and_every_option_once_in_its_group(drivetrain):
    from drivetrain.cli.launch import GROUPS, launch

    words = drivetrain("launch", "--help").stdout
    places = [words.index(f"\n{title}:\n") for title in ("Example", *GROUPS, "Other")]
    assert places == sorted(places)
    assert "drivetrain launch --config train.yaml train.py" in words
    grouped = [name for names in GROUPS.values() for name in names]
    options = [each.name for each in launch.params if each.param_type_name == "option"]
    assert sorted(grouped) == sorted(options), "an option of its own group, and no other"
    assert words.partition("\nOther:\n")[2].split()[:2] == ["-h,", "--help"]


def test_backends_as_text_and_as_json(drivetrain):
    import json

    words = drivetrain("backends").stdout
    assert "single  ready  [drivetrain " in words
    can = words.partition("single  ready")[2].splitlines()[1]
    assert can.startswith("    one process; mixed_precision no, bf16, fp16; ")
    assert "; saves while training goes on: " in can
    assert "async_save" not in words
    rows = {row["name"]: row for row in json.loads(drivetrain("backends", "--json").stdout)}
    single = rows["single"]
    assert (single["ready"], single["distribution"], single["api"]) == (True, "drivetrain", CONTRACT)
    assert single["capabilities"]["multi_process"] is False
    assert "not multi_process" in drivetrain("backends", "--verbose").stdout


def test_backends_that_are_not_installed_are_listed_with_the_line_that_installs_them(monkeypatch):
    monkeypatch.setattr("drivetrain.registry.known_extras", lambda: ("fsdp", "warp"))
    shown = CliRunner().invoke(backends, []).output.splitlines()
    assert shown[-1] == 'warp  not installed  Run: pip install "drivetrain[warp]"'
    assert sum(line.startswith("fsdp  ") for line in shown) == 1, "an installed one is listed once"


def test_env_says_what_a_bug_report_needs(drivetrain):
    import torch

    words = drivetrain("env", NCCL_DEBUG="INFO").stdout
    assert f"- torch: {torch.__version__}" in words
    assert "- backend single: ready" in words
    assert "gloo" in words
    assert "- NCCL_DEBUG: INFO" in words
