"""The scripts of `docs/how-to/from-fabric.md`, by the real Fabric and by us: the same losses; a checkpoint goes on."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from drivetrain import Accelerator
from drivetrain.cli.main import drivetrain
from drivetrain_testing import spawn

# As for the tutorial.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/from-fabric.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- saved as: (\S+) -->\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
BENCH = ROOT / ".venv-bench/bin/python"


@pytest.fixture(scope="module")
def with_fabric():
    """An interpreter that has it: this one, or the environment of the benchmarks, where peers are installed."""
    for python in (sys.executable, str(BENCH)):
        if Path(python).exists():
            found = "import importlib.util as u, sys; sys.exit(u.find_spec('lightning_fabric') is None)"
            if subprocess.run([python, "-c", found], check=False).returncode == 0:
                return python
    return pytest.skip("lightning-fabric is installed in requirements-bench.txt only; there is no .venv-bench here")


def run(command, folder):
    """The losses that a command prints."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(value) for value in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, re.MULTILINE)]


def torchrun(python, script):
    """The page's command, by this interpreter."""
    assert f"torchrun --nproc_per_node 2 {script}" in PAGE
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A folder with the files of the page."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ours(page):
    """What our script prints under torchrun."""
    return run(torchrun(sys.executable, "after.py"), page)


def taken_up(folder):
    """Load what was converted; what the rank then holds."""
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    told = accelerator.is_main_process
    with pytest.warns(UserWarning, match="no random state") if told else contextlib.nullcontext():
        accelerator.load_state(folder / "converted", strict=False)
    weights = accelerator.get_state_dict(model)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    accelerator.end_training()
    return {name: weight.tolist() for name, weight in weights.items()}, steps


@pytest.mark.slow
def test_ours_prints_the_same_under_both_launchers(page, ours):
    command = "drivetrain launch --config train.yaml after.py"
    assert command in PAGE
    assert len(ours) == 3
    assert run([str(Path(sys.executable).parent / "drivetrain"), *command.split()[1:]], page) == ours


@pytest.mark.slow
def test_theirs_prints_the_same_and_its_checkpoint_goes_on(with_fabric, page, ours):
    # Six digits are printed; float32 sums over two ranks in another order, for 24 updates.
    assert run(torchrun(with_fabric, "before.py"), page) == pytest.approx(ours, abs=5e-6)

    command = "drivetrain checkpoint convert before.ckpt converted"
    assert command in PAGE
    with contextlib.chdir(page):
        outcome = CliRunner().invoke(drivetrain, command.split()[1:], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    saved = torch.load(page / "before.ckpt", weights_only=True)
    for weights, steps in spawn(taken_up, 2, page):
        assert weights == {name: weight.tolist() for name, weight in saved["model"].items()}
        assert steps == {24}


def test_every_line_of_ours_names_something_that_is_there():
    import drivetrain as package
    from drivetrain import utils

    table = (ROOT / "docs/reference/fabric.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"accelerator\.(\w+)", row[1])}
    assert len(names) > 15
    missing = {name for name in names if not hasattr(Accelerator, name)}
    assert missing == set()
    assert hasattr(package, "broadcast")
    assert hasattr(utils, "set_seed")
