"""A prepared model, optimizer and loader, and a loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 2)
data = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
)
loss_of = nn.functional.cross_entropy
