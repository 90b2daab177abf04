"""``drivetrain launch --slurm`` and ``--kubernetes``: the files that are written start the run."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drivetrain.api.programs import CommandLine, LaunchPlan
from drivetrain_clusters import batch_file

# Starts a launcher with several programs in each test; test_launch_local.py starts some too.
pytestmark = pytest.mark.slow

WORKER = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
OURS = ("DRIVETRAIN_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_")

SRUN = """#!/bin/bash
# Stands for Slurm on this machine: runs its command once per machine of the allocation, at the same time.
shift
for node in $(seq 0 $((NODES - 1))); do SLURM_NODEID=$node "$@" & done
status=0; for job in $(jobs -p); do wait $job || status=$?; done; exit $status
"""
SCONTROL = "#!/bin/bash\necho 127.0.0.1\n"


@pytest.fixture
def drivetrain(tmp_path):
    """``drivetrain("launch", "script.py")`` in an empty folder, with no launcher's variables."""

    def run(*arguments):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", *map(str, arguments)]
        return subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
        )

    return run


def script(folder: Path, name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(WORKER)
    return path


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_batch_file_submits_the_job_again_where_the_run_saves_itself():
    typed = CommandLine((("num_processes", "8"),), (), ("train.py",))
    plan = LaunchPlan(world_size=8, processes_here=8)
    text = batch_file(plan, typed, accelerators=8, resumable=True)
    assert "#SBATCH --requeue\n#SBATCH --signal=TERM@120\n#SBATCH --open-mode=append\n" in text
    assert 'if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi\nexit "$code"\n' in text
    assert "requeue" not in batch_file(plan, typed, accelerators=8)


def test_the_batch_file_runs(tmp_path):
    """Slurm's commands played by small programs: the job is submitted again after 75, and after nothing else."""
    plan = LaunchPlan(world_size=2, processes_here=2)
    text = batch_file(plan, CommandLine((), (), ("train.py",)), accelerators=0, resumable=True)
    (tmp_path / "job.sbatch").write_text(text)
    for name, body in {"scontrol": 'echo "scontrol $@" >> said', "srun": 'exit "$CODE"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for code in (0, 1, 75):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code)}
        environment |= {"SLURM_JOB_NODELIST": "node0", "SLURM_JOB_ID": "7"}
        done = subprocess.run(["bash", "job.sbatch"], env=environment, cwd=tmp_path, check=False)
        assert done.returncode == code
        assert ("scontrol requeue 7" in (tmp_path / "said").read_text()) == (code == 75)


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


def kubernetes(drivetrain, folder: Path, *options: str, kind: str = "JobSet") -> dict:
    """The manifest that these options give, checked against the models that Kubeflow publishes of its schemas."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="requirements-dev.txt has kubeflow-trainer-api")
    file = folder / "job.yaml"
    done = drivetrain(
        "launch", "--kubernetes", str(file), "--kubernetes_kind", kind, "--image", "registry/train:1", *options,
        str(script(folder, "My_job.py")), f"{folder}/rank",
    )  # fmt: skip
    assert done.stdout == f"Wrote {file}. Submit it: kubectl create -f {file}\n", done.stderr
    written = yaml.safe_load(file.read_text())
    model = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}[kind]
    # A key that the schema does not have would be dropped, a value of another type refused.
    assert getattr(models, model).from_dict(written).to_dict() == written
    assert written["metadata"]["name"] == "my-job"
    return written


def test_a_jobset_is_one_launcher_in_each_pod_and_they_are_one_run(drivetrain, tmp_path):
    written = kubernetes(drivetrain, tmp_path, "--cpu", "--num_processes", "4", "--num_machines", "2")
    (replicated,) = written["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    (container,) = job["template"]["spec"]["containers"]
    assert "resources" not in container
    # What the kubelet would do, with this machine's address in the place of the pod's name.
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["PET_MASTER_ADDR"] == "my-job-node-0-0.my-job"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(listening.getsockname()[1])}
    assert container["command"][0] == "drivetrain"
    words = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", *container["command"][1:]]
    pods = [subprocess.Popen(words, env={**os.environ, **variables, "PET_NODE_RANK": str(index)}) for index in range(2)]
    assert [pod.wait(180) for pod in pods] == [0, 0]
    assert {path.name: path.read_text() for path in tmp_path.glob("rank*")} == {f"rank{rank}": "4" for rank in range(4)}


def test_a_jobset_asks_for_accelerators_and_lets_a_run_save_itself(drivetrain, tmp_path):
    options = (
        "--num_processes",
        "16",
        "--num_machines",
        "1:2",
        "--set",
        "save_on_interrupt=true",
        "--max_restarts",
        "3",
    )
    spec = kubernetes(drivetrain, tmp_path, *options, "--set", "project_dir=runs")["spec"]
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert {"name": "PET_NNODES", "value": "1:2"} in pod["containers"][0]["env"]
    assert (pod["terminationGracePeriodSeconds"], spec["failurePolicy"]["maxRestarts"]) == (120, 100)
    assert "--num_machines" not in pod["containers"][0]["command"]
    assert spec["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 3
    assert "--max_restarts" in pod["containers"][0]["command"]


def test_a_trainjob_leaves_the_variables_to_kubeflow(drivetrain, tmp_path):
    options = ("--num_processes", "4", "--num_machines", "2")
    spec = kubernetes(drivetrain, tmp_path, *options, kind="TrainJob")["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 2)
    assert "env" not in spec["trainer"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kubernetes", "x.yaml"), "--kubernetes needs --image IMAGE"),
        (("--image", "x"), "--image needs --kubernetes FILE"),
        (("--kubernetes", "x.yaml", "--image", "x", "--slurm", "y"), "exclude each other"),
        (
            ("--kubernetes", "x.yaml", "--image", "x", "--kubernetes_kind", "TrainJob", "--num_machines", "1:2",
             "--num_processes", "2"),
            "a TrainJob has a fixed number of nodes, and num_machines is 1:2",
        ),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_is_refused(drivetrain, tmp_path, options, words):
    done = drivetrain("launch", *options, str(script(tmp_path)))
    assert done.returncode != 0
    assert words in done.stderr
