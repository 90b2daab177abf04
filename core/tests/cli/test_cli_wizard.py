"""The wizard: what it asks of which machine, and a real pseudo-terminal driven by keys."""

from __future__ import annotations

import click
import pytest

from drivetrain.cli.prompts import NoAnswerError
from drivetrain.cli.wizard import Machine, Wizard, backend_choices, detect
from drivetrain.config import load_config
from drivetrain.launch.devices import Device, Inventory
from drivetrain.registry import get_registry

CPU = Machine(Inventory(), 8)
TWO = Machine(Inventory("cuda", "NVIDIA", (Device(0, "big"), Device(1, "small"))), 8)


class Script:
    """Answers as a script says, and remembers what was asked; an answer that cannot be given fails the test."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def ask(self, question):
        self.asked.append(question)
        if not self.answers:
            raise NoAnswerError
        answer = self.answers.pop(0) or question.default
        assert not question.complaint(answer), question.complaint(answer)
        free = {choice.value for choice in question.choices if not choice.blocked}
        assert not free or set(filter(None, answer.split(","))) <= free
        return answer


def answer(machine, *answers):
    script = Script(*answers)
    return Wizard(script, machine, get_registry()).run(), [question.text for question in script.asked]


def test_accelerators_are_counted_not_asked_for():
    values, asked = answer(TWO, "", "", "ddp", "", "", "")
    assert values == {"distributed_type": "ddp"}
    assert asked[1:3] == ["What computes?", "Which backend trains the 2 processes?"]


def test_some_accelerators_or_the_cpu():
    chosen = {"accelerator_ids": ["1"], "distributed_type": "single"}
    assert answer(TWO, "", "some accelerators", "1", "single", "", "")[0] == chosen
    chosen = {"use_cpu": True, "num_processes": 3, "distributed_type": "ddp"}
    assert answer(TWO, "", "the CPU", "3", "ddp", "", "", "")[0] == chosen


def test_machines_meet_somewhere_and_processes_are_those_of_all():
    values, asked = answer(CPU, "2", "node0", "", "4", "fsdp", "bf16", "", "")
    assert values == {
        "num_machines": 2,
        "main_process_ip": "node0",
        "main_process_port": 29500,
        "num_processes": 8,
        "distributed_type": "fsdp",
        "mixed_precision": "bf16",
    }
    assert "Which backend trains the 8 processes?" in asked


def test_axes_of_the_mesh_divide_what_is_left():
    script = Script("1", "8", "megatron", "2", "4")
    values = Wizard(script, CPU, get_registry()).run()
    assert values == {"num_processes": 8, "distributed_type": "megatron", "mesh.pp": 2, "mesh.tp": 4}
    sizes = {question.text: [choice.value for choice in question.choices] for question in script.asked}
    assert sizes["How many along mesh.tp?"] == ["1", "2", "4"]


def test_what_cannot_be_chosen_says_why_and_what_to_do(monkeypatch):
    monkeypatch.setattr("drivetrain.cli.wizard.known_extras", lambda: ("fsdp", "warp"))
    choices = {choice.value: choice for choice in backend_choices(get_registry(), 2)}
    assert (choices["fsdp"].blocked, choices["best"].about) == ("", "What fits the number of processes: now ddp.")
    assert choices["single"].blocked == "trains in one process, not in 2"
    assert choices["warp"].blocked == "not installed"
    assert choices["warp"].cure == 'It is not installed. Run: pip install "drivetrain[warp]"'


def test_no_backend_at_all_ends_the_questions(monkeypatch):
    monkeypatch.setattr("drivetrain.cli.wizard.known_extras", lambda: ("warp",))
    monkeypatch.setattr("drivetrain.cli.wizard.backend_choices", lambda *_: backend_choices(get_registry(), 2)[-1:])
    with pytest.raises(click.ClickException, match="no backend can train 2 processes here"):
        answer(CPU, "1", "2")


def test_a_slurm_allocation_is_detected(monkeypatch):
    monkeypatch.setattr("drivetrain.cli.wizard.take_inventory", lambda *_: Inventory())
    found = detect({"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node[07-09]"})
    assert (found.machines, found.first) == (3, "node07")
    assert answer(found, "", "", "", "1")[0]["main_process_ip"] == "node07"


# ---- on a terminal ----------------------------------------------------------------------------------------------


def test_arrow_keys_choose_what_is_free_and_the_file_is_shown(terminal, tmp_path):
    screen = terminal("config", "--config", "c.yaml")
    screen.wait_for("How many machines? 1").press("enter")
    screen.wait_for("How many processes? 1").press("backspace", "x", "enter")
    screen.wait_for("expected a number from 1, not 'x'").press("backspace", "2", "enter")
    screen.wait_for("» best")
    assert "- dp (trains in one process, not in 2)" in screen.text
    screen.press("down", "down", "down")  # over ddp and deepspeed, and dp, on which nobody can stand
    screen.wait_for("» fsdp")
    screen.resize(60, 30).wait_for("» fsdp").resize(100, 40).press("enter")
    screen.wait_for("» no").press("down").wait_for("» bf16").press("enter")
    screen.wait_for("Micro-batches between two optimizer steps? 1").press("enter")
    screen.wait_for("○ cpu_offload").press("down", "down", "down", "down", "space")
    screen.wait_for("● cpu_offload").press("enter")
    screen.wait_for("fsdp.cpu_offload?").wait_for("» false").press("up").wait_for("» true").press("enter")
    screen.wait_for("Write this to c.yaml?").wait_for("» yes")
    assert "cpu_offload: true" in screen.text
    screen.press("enter").wait_for("Wrote c.yaml")
    assert screen.exit_code() == 0
    loaded = load_config(tmp_path / "c.yaml", environ={})
    assert (loaded.config.distributed_type, loaded.config.mixed_precision) == ("fsdp", "bf16")
    assert loaded.sections == {"fsdp": {"cpu_offload": True}}


@pytest.mark.parametrize("menu", [False, True])
def test_ctrl_c_leaves_nothing_behind(terminal, tmp_path, menu):
    screen = terminal("config")
    screen.wait_for("How many machines? 1")
    if menu:
        screen.press("enter").wait_for("How many processes? 1").press("enter").wait_for("» best")
    assert screen.settings != screen.settings_at_first  # keys come one by one, unechoed
    screen.press("ctrl-c").wait_for("Aborted!")
    assert screen.exit_code() == 1
    assert not list(tmp_path.iterdir())
    assert screen.settings == screen.settings_at_first
