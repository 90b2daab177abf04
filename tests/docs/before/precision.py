"""A prepared model under bf16, and one batch."""

import torch
from torch import nn

from drivetrain import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
inputs = torch.randn(4, 8)
labels = inputs.sum(1, keepdim=True)
