"""``drivetrain launch --print`` and ``--slurm``: what is shown is what would run."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

WORKER = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"

SRUN = """#!/bin/bash
# Stands for Slurm on this machine: runs its command once per machine of the allocation, at the same time.
shift
for node in $(seq 0 $((NODES - 1))); do SLURM_NODEID=$node "$@" & done
status=0; for job in $(jobs -p); do wait $job || status=$?; done; exit $status
"""
SCONTROL = "#!/bin/bash\necho 127.0.0.1\n"


def script(folder: Path, name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(WORKER)
    return path


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_print_shows_every_machine_and_runs_nothing(drivetrain, tmp_path):
    job = script(tmp_path)
    done = drivetrain(
        "launch", "--print", "--num_processes", "4", "--num_machines", "2", "--main_process_ip", "10.0.0.1",
        "--gpu_ids", "1,0", "--cpu", str(job), f"{tmp_path}/rank", "--num_machines", "of the script",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("drivetrain")]
    assert [words[words.index("--machine_rank") + 1] for words in commands] == ["0", "1"]
    assert all(words[-4:] == [str(job), f"{tmp_path}/rank", "--num_machines", "of the script"] for words in commands)
    assert "# machine 1 of 2: ranks 2 to 3 of 4" in done.stdout
    assert "export CUDA_VISIBLE_DEVICES=1,0" in done.stdout
    assert "at 10.0.0.1, port 29500" in done.stdout
    assert not list(tmp_path.glob("rank*"))


def test_what_is_shown_for_a_worker_runs_as_it_stands(drivetrain, tmp_path):
    job = script(tmp_path)
    shown = drivetrain("launch", "--print", "--cpu", "--num_processes", "2", str(job), f"{tmp_path}/rank").stdout
    lines = shown.splitlines()
    exports = [line for line in lines if line.startswith("export ")]
    environ = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    subprocess.run(["bash", "-c", "\n".join([*exports, lines[-1]])], env=environ, check=True, timeout=180)
    assert (tmp_path / "rank1").read_text() == "2"


def test_a_batch_file_starts_one_launcher_a_machine(drivetrain, tmp_path):
    job, batch, tools = script(tmp_path, "my job.py"), tmp_path / "job.sbatch", tmp_path / "bin"
    numbers = ["--num_processes", "2", "--num_machines", "2", "--rdzv_backend", "static"]
    done = drivetrain("launch", "--slurm", str(batch), "--cpu", *numbers, str(job), f"{tmp_path}/rank")
    assert done.stdout == f"Wrote {batch}. Submit it: sbatch {batch}\n"
    assert "#SBATCH --nodes=2\n" in batch.read_text()
    assert "#SBATCH --job-name=my-job\n" in batch.read_text()
    tools.mkdir()
    program(tools / "srun", SRUN)
    program(tools / "scontrol", SCONTROL)
    ours = f'{sys.executable} -c "from drivetrain.cli.main import main; main()"'
    program(tools / "drivetrain", f'#!/bin/bash\nexec {ours} "$@"\n')
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[0-1]", "NODES": "2"}
    environ = {**os.environ, **slurm, "PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(batch)], env=environ, check=True, timeout=120)
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]
    assert (tmp_path / "rank1").read_text() == "2"


def test_a_batch_file_for_one_machine_asks_for_its_accelerators(drivetrain, tmp_path):
    batch = tmp_path / "job.sbatch"
    drivetrain("launch", "--slurm", str(batch), "--gpu_ids", "0,1,2", str(script(tmp_path)))
    assert "#SBATCH --gpus-per-node=3\n" in batch.read_text()
    assert "--machine_rank" not in batch.read_text()
