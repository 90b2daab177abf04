"""What a stranger reads after a mistake: each text says what happened, whose it is and what to type next.

The mistakes are those that newcomers made on purpose, the texts stand in `said.txt`.
"""

from __future__ import annotations

import logging
import os
import re
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

from drivetrain.cli.main import drivetrain
from drivetrain_testing import spawn

pytest.importorskip("drivetrain_ddp")
pytest.importorskip("drivetrain_fsdp")

TRAIN = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

torch.manual_seed(0)
accelerator = Accelerator()
x = torch.randn(64, 20)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for number, (inputs, targets) in enumerate(loader):
    loss = nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""

PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
BACKWARD = "    accelerator.backward(loss)\n"
DDP = "distributed_type: ddp\nnum_processes: 2\nuse_cpu: true\n"
TWO = DDP.replace("ddp", "megatron")


TEXTS = Path(__file__).with_name("said.txt").read_text(encoding="utf-8").split("\n== ")[1:]
SAID = {name: text.strip("\n") for name, _, text in (each.partition("\n") for each in TEXTS)}


def test_every_text_belongs_to_a_mistake():
    assert set(SAID) == {*SCRIPTS, *COMMANDS}


def matches(text, said):
    """Whether a text is the expected one, in which `...` stands for any words."""
    return re.fullmatch(re.escape(said).replace(r"\.\.\.", ".*"), text, re.DOTALL) is not None


# ---- in the script --------------------------------------------------------------------------------------------------

SCRIPTS = {
    "nothing prepared": [(PREPARE, "")],
    "loader not prepared": [(PREPARE, "model, optimizer = accelerator.prepare(model, optimizer)")],
    "optimizer not prepared": [(PREPARE, "model, loader = accelerator.prepare(model, loader)")],
    "another batch size on one rank": [("batch_size=8", "batch_size=8 * (1 + accelerator.process_index)")],
    "loss.backward()": [(BACKWARD, "    loss.backward()\n")],
    "a precision that is none": [("Accelerator()", "Accelerator(mixed_precision='fp61')")],
    "fp8": [("Accelerator()", "Accelerator(mixed_precision='fp8')")],
    "an argument that is none": [("Accelerator()", "Accelerator(fp16=True)")],
    "a backend that is not installed": [("Accelerator()", "Accelerator(distributed_type='fsdpp')")],
    "a name of Accelerate's": [("import Accelerator", "import Accelerator, dispatch_model")],
    "length of an iterable data set": [
        ("loader = DataLoader(data, batch_size=8, shuffle=True)", "loader = DataLoader(Stream(), batch_size=8)"),
        ("torch.manual_seed(0)", "class Stream(torch.utils.data.IterableDataset):\n    __iter__ = None\n"),
        (PREPARE, f"{PREPARE}\nlen(loader)"),
    ],
    "no checkpoint there": [(PREPARE, f"{PREPARE}\naccelerator.load_state('does/not/exist')")],
    "the folder of the checkpoints": [
        (PREPARE, f"{PREPARE}\naccelerator.save_state('out/first')\naccelerator.load_state('out')")
    ],
    "another model": [
        ("nn.Linear(20, 1)", "nn.Sequential(nn.Linear(20, 1))"),
        (PREPARE, f"{PREPARE}\naccelerator.load_state(CHECKPOINT)"),
    ],
    "another shape": [
        ("nn.Linear(20, 1)", "nn.Linear(20, 2)"),
        (PREPARE, f"{PREPARE}\naccelerator.load_state(CHECKPOINT)"),
    ],
    "a folder that cannot be written": [(PREPARE, f"{PREPARE}\naccelerator.save_state('/proc/here')")],
}
"""By name, what is changed in the script."""


def script(changes):
    source = TRAIN
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def end_of_script(folder):
    """One rank of a script: what its exception says, or else its warning, or nothing."""
    os.chdir(folder)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("drivetrain").addHandler(handler)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            runpy.run_path("train.py", run_name="__main__")
        except Exception as error:
            return "".join(traceback.format_exception_only(error)).strip().removeprefix("drivetrain.errors.")
    said = [*map(str, (each.message for each in seen)), *records]
    return f"warning: {said[-1]}" if said else "nothing"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    end = "accelerator.end_training()"
    assert ends(folder, script([(end, f"accelerator.save_state('ck')\n{end}")])) == ["nothing"] * 2
    return folder / "ck"


def ends(folder, source):
    """How each of two ranks of a script ends."""
    (folder / "train.py").write_text(source, encoding="utf-8")
    (folder / "ddp.yaml").write_text(DDP, encoding="utf-8")
    return spawn(end_of_script, 2, folder, env={"DRIVETRAIN_CONFIG_FILE": str(folder / "ddp.yaml")})


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_mistake_in_a_script(name, tmp_path, checkpoint):
    first, other = ends(tmp_path, script(SCRIPTS[name]).replace("CHECKPOINT", repr(str(checkpoint))))
    assert matches(re.sub(r"\n +", "\n", first), SAID[name]), first
    # What is no error is said once.
    assert other == ("nothing" if first.startswith("warning: ") else first)


# ---- in the configuration or the command ----------------------------------------------------------------------------

COMMANDS = {
    "a key of a section": (f"{DDP}cpu_offload: true\n", []),
    "an axis that the backend has not": (f"{DDP}mesh: {{tp: 2}}\n", []),
    "a mesh of another size": (f"{DDP}mesh: {{dp_replicate: 3}}\n", []),
    "degrees that do not fit the processes": (
        f"{TWO}megatron:\n  tensor_parallel_size: 2\n  pipeline_parallel_size: 3\n",
        [],
    ),
    "a degree that is written twice": (f"{TWO}mesh: {{pp: 2}}\nmegatron:\n  pipeline_parallel_size: 4\n", []),
    "several processes of a backend of one": ("distributed_type: single\nnum_processes: 2\n", []),
    "a script that is not there": (DDP, ["trian.py"]),
}
"""By name, the configuration, and what is launched instead of the script."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_in_a_configuration_or_command(name, tmp_path, monkeypatch):
    text, command = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(text, encoding="utf-8")
    Path("train.py").write_text(TRAIN, encoding="utf-8")
    words = ["launch", "--config", "c.yaml", "--quiet", *(command or ["--print", "train.py"])]
    done = CliRunner().invoke(drivetrain, words)
    error = done.exception
    assert matches(str(error), SAID[name]), (error, done.output)


def test_a_misspelt_variable_is_answered_with_the_variable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRIVETRAIN_MIXED_PRECISON", "bf16")
    done = CliRunner().invoke(drivetrain, ["launch", "--print", "train.py"])
    assert str(done.exception).splitlines()[0] == (
        "environment variable DRIVETRAIN_MIXED_PRECISON: no such key; did you mean DRIVETRAIN_MIXED_PRECISION?"
    )


# ---- the report of a failed run -------------------------------------------------------------------------------------


def launched(folder, source):
    (folder / "train.py").write_text(source, encoding="utf-8")
    (folder / "c.yaml").write_text(f"{DDP}fsdp: {{cpu_offload: true}}\n", encoding="utf-8")
    command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", "launch", "--config", "c.yaml"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "train.py", "--num_processes", "2"],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_an_error_of_ours_is_reported_once_with_the_scripts_line(tmp_path):
    done = launched(tmp_path, script([(BACKWARD, "    loss.backward()\n")]))
    assert done.returncode == 1
    said = (
        "drivetrain ...: ddp (drivetrain-ddp ...) on 2 processes of the CPU (... core...)\n"
        "Not used: fsdp, which is a section of the configuration, since ddp trains.\n"
        "Given to train.py: --num_processes. Options of the launcher stand before the script.\n"
        "Output of rank 0 is shown; --local_ranks_filter all shows every rank, --log_dir FOLDER files them.\n"
        "Traceback (most recent call last):\n"
        '  File "train.py", line 19, in <module>\n'
        "    optimizer.step()\n"
        "drivetrain.errors.UsageError: an optimizer of Linear would step with gradients of this rank alone: ...\n"
        "rank ... failed: UsageError (exit code 1) [host ...; in step at train.py:19; last call: ...]\n"
        "rank ...\n"
    )
    assert matches(done.stderr, said), done.stderr
    assert done.stderr.count("Call accelerator.backward(loss)") == 1
    assert "/drivetrain/" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("debug", [False, True])
def test_without_a_launcher_an_error_of_ours_is_shown_at_the_scripts_line_too(debug, tmp_path):
    """In the constructor, which reads the configuration, and in a call."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DRIVETRAIN_DEBUG": str(debug).lower()}
    wrong = {"accelerator = Accelerator(mixed_precision='fp61')": 8, f"{PREPARE}\naccelerator.load_state('none')": 15}
    for (line, number), (old, *_) in zip(wrong.items(), (("accelerator = Accelerator()",), (PREPARE,)), strict=True):
        (tmp_path / "train.py").write_text(script([(old, line)]), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=170, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert f'train.py", line {number}, in <module>\n' in done.stderr
        assert ("/drivetrain/" in done.stderr) == debug, done.stderr
        assert re.search(r"^drivetrain\.errors\.\w+Error: .*[.?]$", done.stderr, re.MULTILINE)


@pytest.mark.slow
def test_a_rank_that_lost_its_neighbour_says_that(tmp_path):
    wrong = "    if number == 2 and accelerator.process_index == 1:\n        raise ValueError('mine')\n"
    done = launched(tmp_path, script([(BACKWARD, wrong + BACKWARD)]))
    assert done.returncode == 1
    assert "ValueError: mine\nrank 1 failed: ValueError: mine (exit code 1) [host " in done.stderr
    (other,) = [line for line in done.stderr.splitlines() if line.startswith("rank 0 ")]
    # It may have been stopped before it noticed.
    assert re.match(r"rank 0 (lost its connection to rank 1|was stopped) \[host \S+; .*at train\.py:\d+", other), other
    assert "GLHF" not in done.stderr
