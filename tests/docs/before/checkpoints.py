"""A folder as Accelerate's ``save_state`` leaves it, for the page to convert, beside a run that trains."""

import copy
import pathlib

import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if accelerator.is_main_process:
    theirs = pathlib.Path("their_folder")
    theirs.mkdir()
    other = copy.deepcopy(model)
    others = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other(torch.ones(2, 8)).sum().backward()
    others.step()
    safetensors.torch.save_file(other.state_dict(), theirs / "model.safetensors")
    torch.save(others.state_dict(), theirs / "optimizer.bin")
accelerator.wait_for_everyone()
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, labels in loader:
    accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
