"""A script that goes on from the newest checkpoint and saves without end, every second time in the background.

``agent_jobs.py FOLDER`` is killed; with a second argument it only loads. It prints the step that it resumed at, then
each step once it may be saved.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.utils import ProjectConfiguration, broadcast_object_list


class Net(nn.Module):
    """``clock`` says which step its parameters are of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.clock = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def main(folder: str, *, only_load: bool) -> None:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(project_config=project)
    torch.manual_seed(0)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    step = -1
    if any(Path(folder, "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
        weights = accelerator.get_state_dict(model)  # the main process's alone
        (step,) = broadcast_object_list(list(set(weights["clock"].tolist())) if accelerator.is_main_process else [None])
    accelerator.print("resumed", int(step), flush=True)
    while not only_load:
        step += 1
        accelerator.backward(model(torch.ones(2, 64)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            net.clock.fill_(step)
        accelerator.save_state(blocking=step % 2 == 0)
        accelerator.print("saved", int(step), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], only_load=len(sys.argv) > 2)
