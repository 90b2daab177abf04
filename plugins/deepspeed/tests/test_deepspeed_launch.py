"""The same script under ``drivetrain launch``, ``torchrun`` and DeepSpeed's own launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

# Nine processes that import torch and DeepSpeed; core/tests/launch starts the same job by each launcher under ddp.
pytestmark = pytest.mark.slow

SCRIPT = """
    import argparse, json, os
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from drivetrain import Accelerator

    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float)
    arguments = parser.parse_args()
    accelerator = Accelerator()
    torch.manual_seed(0)
    data = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.rate)
    rows = 8 // accelerator.num_processes
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=rows))
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    engine = model._drivetrain.trainable.driver.engine
    found = {
        "losses": losses,
        "world": accelerator.num_processes,
        "stage": engine.zero_optimization_stage(),
        "variables": sorted(name for name in os.environ if name.startswith(("DS_", "DEEPSPEED"))),
        "threads": torch.get_num_threads(),
    }
    with open(f"found{accelerator.process_index}.json", "w") as file:
        json.dump(found, file)
    accelerator.end_training()
"""

CONFIG = """
    distributed_type: deepspeed
    use_cpu: true
    num_processes: 2
    deepspeed:
      zero_stage: 2
"""


def alone() -> list[float]:
    """Losses of one plain process."""
    torch.manual_seed(0)
    data = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in DataLoader(data, batch_size=8):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def launchers() -> dict[str, list[str]]:
    folder = Path(sys.executable).parent
    return {
        "drivetrain": [str(folder / "drivetrain"), "launch", "--config", "train.yaml", "script.py"],
        "torchrun": [str(folder / "torchrun"), "--nproc_per_node", "2", "--master_port", free_port(), "script.py"],
        # Without `--no_local_rank` it adds `--local_rank=0` to the script's own arguments.
        "deepspeed": [
            str(folder / "deepspeed"),
            *("--num_gpus", "2", "--no_local_rank", "--master_port", free_port(), "script.py"),
        ],
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What the ranks of each launcher's job found."""
    results = {}
    for name, command in launchers().items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "script.py").write_text(dedent(SCRIPT), encoding="utf-8")
        (folder / "train.yaml").write_text(dedent(CONFIG), encoding="utf-8")
        environment = {**os.environ, "DRIVETRAIN_CONFIG_FILE": "train.yaml", "OMP_NUM_THREADS": "1"}
        # DeepSpeed's launcher starts its helper by the interpreter's own folder.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        done = subprocess.run(
            [*command, "--rate", "0.1"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
        results[name] = [json.loads(path.read_text()) for path in sorted(folder.glob("found*.json"))]
    return results


def test_every_launcher_starts_the_same_job(found):
    assert {name: [rank["world"] for rank in ranks] for name, ranks in found.items()} == {
        "drivetrain": [2, 2],
        "torchrun": [2, 2],
        "deepspeed": [2, 2],
    }
    assert {rank["stage"] for ranks in found.values() for rank in ranks} == {2}
    expected = alone()
    for name, ranks in found.items():
        for rank in ranks:
            # Sums over two ranks are taken in another order than over one batch.
            assert rank["losses"] == pytest.approx(expected, rel=1e-6), name


def test_no_variable_of_deepspeed_stays_in_the_scripts_environment(found):
    seen = {name: {tuple(rank["variables"]) for rank in ranks} for name, ranks in found.items()}
    assert seen == {name: {()} for name in found}
