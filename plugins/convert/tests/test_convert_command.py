"""``drivetrain checkpoint convert`` and ``drivetrain check`` as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys

import torch


def drivetrain(*arguments):
    command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def test_convert_says_what_it_carried_and_what_not(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3, "extra": [1, 2]}, tmp_path / "run.pt")
    done = drivetrain("checkpoint", "convert", tmp_path / "run.pt", tmp_path / "ours", "--from", "torch")
    assert done.returncode == 0, done.stderr
    assert "from a file of torch.save" in done.stdout
    assert "carried: 1 tensors of model 0" in done.stdout
    assert "left out: run.pt: 'extra' is neither" in done.stdout
    assert "left out: the position in the data" in done.stdout
    assert drivetrain("checkpoint", "inspect", tmp_path / "ours").returncode == 0
    again = drivetrain("checkpoint", "convert", tmp_path / "run.pt", tmp_path / "ours")
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_its_help_imports_no_torch():
    code = (
        "import json, sys\nfrom drivetrain.cli.main import drivetrain\n"
        "drivetrain.main(['checkpoint', 'convert', '--help'], standalone_mode=False)\n"
        "print(json.dumps('torch' in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert "--parameters" in done.stdout, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) is False


def test_check_is_found_and_imports_no_torch(tmp_path):
    names = "Accelerator, FullyShardedDataParallelPlugin, cpu_offload"
    (tmp_path / "train.py").write_text(f"from drivetrain import {names}\nimport accelerate.utils.fsdp_utils\n")
    code = (
        "import json, sys\nfrom drivetrain.cli.main import drivetrain\n"
        f"try: drivetrain.main(['check', {str(tmp_path / 'train.py')!r}], standalone_mode=False)\n"
        "except SystemExit as end: print(json.dumps([end.code, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert "train.py:1: raises: there is no cpu_offload here." in done.stdout, done.stderr
    assert "train.py:2: differs: accelerate.utils.fsdp_utils is Accelerate's." in done.stdout
    assert "Plugin" not in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == [1, False]
