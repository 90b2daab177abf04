"""Plugins that a run has nothing to do with are not imported: one that is slow, or that fails, costs it nothing."""

from __future__ import annotations

import pytest

HEAD = """
    from drivetrain.backend import BackendInfo
    from drivetrain.hookspecs import hookimpl
"""
SLOW = "raise RuntimeError('a stranger was imported')"
TRAINS = """
import sys, torch
from drivetrain import Accelerator
accelerator = Accelerator(cpu=True, distributed_type={name!r})
model = accelerator.prepare(torch.nn.Linear(2, 1))
accelerator.save_state({folder!r})
accelerator.load_state({folder!r})
accelerator.end_training()
print(sorted(name for name in sys.modules if name.startswith("toy_")))
"""


@pytest.mark.parametrize("name", ["ddp", "single"])
@pytest.mark.gate("ddp")
def test_a_run_imports_the_plugin_of_its_backend_alone(toys, tmp_path, name):
    toys.add("slow", plugin=SLOW)
    toys.add("tracks", plugin=SLOW, hooks=("trackers", "commands"))
    code = TRAINS.format(name=name, folder=str(tmp_path / "saved"))
    done = toys.run("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert "a stranger was imported" not in done.stderr


def test_other_first_party_plugins_stay_out_too(toys):
    code = (
        "import sys; from drivetrain import Accelerator; Accelerator(cpu=True, distributed_type='ddp')\n"
        "print(sorted(m for m in sys.modules if m.startswith('drivetrain_') and m.endswith('.plugin')))"
    )
    assert toys.run("-c", code).stdout.strip() == "['drivetrain_ddp.plugin']"


def test_a_configuration_is_loaded_without_strangers(toys, tmp_path):
    toys.add("slow", plugin=SLOW)
    file = tmp_path / "train.yaml"
    file.write_text("distributed_type: ddp\nddp: {static_graph: true}\nmixed_precision: bf16\n", encoding="utf-8")
    code = (
        "import sys; from drivetrain.config import load_config\n"
        f"print(load_config({str(file)!r}).config.distributed_type, 'toy_slow.plugin' in sys.modules)"
    )
    assert toys.run("-c", code).stdout.strip() == "ddp False"


def test_a_launch_and_its_workers_import_no_stranger(toys, tmp_path):
    toys.add("slow", plugin=SLOW)
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom drivetrain import Accelerator\nAccelerator()\nprint('toy_slow' in sys.modules)\n",
        encoding="utf-8",
    )
    code = (
        "import atexit, sys; from drivetrain.cli.main import main\n"
        "atexit.register(lambda: print('launcher', 'toy_slow.plugin' in sys.modules))\nmain()"
    )
    words = ("launch", "--cpu", "--distributed_type", "single", "--num_processes", "1", str(script))
    done = toys.run("-c", code, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "launcher", "False"]


def test_an_observer_is_imported_when_its_event_comes(toys):
    toys.add("watches", plugin=HEAD + "    @hookimpl\n    def drivetrain_closed(accelerator): print('heard')\n")
    code = (
        "import sys; from drivetrain import Accelerator; a = Accelerator(cpu=True, distributed_type='single')\n"
        "print('toy_watches.plugin' in sys.modules); a.end_training(); print('toy_watches.plugin' in sys.modules)"
    )
    assert toys.run("-c", code).stdout.split() == ["False", "heard", "True"]


def test_a_hook_that_is_not_announced_breaks_its_plugin_with_the_lines_to_add(toys):
    hook = "    @hookimpl\n    def drivetrain_closed(accelerator): ...\n"
    toys.add("quiet", plugin=HEAD + hook, hooks=())
    kind, sentence = toys.ask("answer = registry.info('quiet')")
    assert kind == "BackendBrokenError"
    assert (
        "no entry point announces drivetrain_closed; write "
        '[project.entry-points."drivetrain.hooks"] closed = "toy_quiet.plugin" in its pyproject.toml'
    ) in sentence


def test_a_hook_that_is_announced_and_does_not_exist_is_said(toys):
    toys.add("typo", hooks=("step_end",))
    done = toys.run("-c", "from drivetrain.registry import get_registry; print(get_registry().info('typo').name)")
    assert done.stdout.strip() == "typo"
    assert "toy-typo 1.0 announces the hook 'step_end' in its entry points" in done.stderr
    assert "Did you mean 'step_ended'?" in done.stderr


def test_an_alias_is_compared_without_the_plugins_that_are_not_loaded(toys):
    toys.add("sound")
    toys.add("slow", plugin=SLOW)
    assert toys.ask("""
        import sys
        registry.info('sound')
        answer = [registry.canonical('SOUND_ALIAS'), 'toy_slow.plugin' in sys.modules]
    """) == ["sound", False]
