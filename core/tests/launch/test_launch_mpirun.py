"""The same script under real ``mpirun``, Open MPI's and MPICH's, whichever is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
from drivetrain import Accelerator
accelerator = Accelerator(cpu=True)
seen = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
facts = {"seen": seen, "local": accelerator.local_process_index, "backend": str(accelerator.distributed_type)}
json.dump(facts, open(f"{sys.argv[1]}/{accelerator.process_index}.json", "w"))
"""

COMMANDS = {
    # Root and one core are what a container has; Open MPI asks before it believes it.
    "mpirun.openmpi": ("--allow-run-as-root", "--oversubscribe"),
    "mpirun.mpich": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_two_processes_of_mpirun_train_together(command, clean_environment, tmp_path):
    program = shutil.which(command)
    if program is None:
        pytest.skip(f"{command} is not installed (Debian: openmpi-bin, mpich)")
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    words = [program, *COMMANDS[command], "-n", "2", sys.executable, str(script), str(tmp_path)]
    environ = clean_environment(PRTE_ALLOW_RUN_AS_ROOT="1") | {"HOME": os.environ.get("HOME", str(tmp_path))}
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=100, check=False)
    # Judged by what the ranks wrote: a finished gloo process may still abort while its interpreter ends.
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"seen": [0, 1], "local": rank, "backend": "ddp"} for rank in range(2)], ended.stderr
