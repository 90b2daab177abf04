"""Moves a model to an XLA device so that its parameters stay the objects that optimizers and tied modules hold.

``module.to("xla")`` makes new parameters, since a CPU tensor cannot become an XLA tensor in place: ties are lost, and
an optimizer created before keeps the old ones. Here the tensor behind each object is exchanged instead, once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.optim import Optimizer


def move(module: nn.Module, device: str) -> None:
    """Move parameters and buffers to the device. Local.

    Objects keep their identity, and with it ties, hooks and optimizers.
    """
    for tensor in each_tensor(module):
        if tensor.device.type != torch.device(device).type:
            _exchange(tensor, device)


def send(tensor: Tensor, device: str, sharding: Any = None) -> Tensor:
    """Copy a host tensor to the device, sharded by a ``ShardingSpec``. Local.

    Threads must use this function: ``tensor.to(device)`` defers the copy to its first use, and a graph that the script
    starts in between may read a partial copy.
    """
    if tensor.device.type != "cpu":
        return tensor
    sent: Tensor = xm.send_cpu_data_to_device(tensor, device, sharding)[0]
    return sent


def each_tensor(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [*module.parameters(), *module.buffers()]


def move_state(optimizers: Sequence[Optimizer]) -> None:
    """Move existing optimizer state to the device of its parameter; counters on the host stay there."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.device != parameter.device:
                    state[name] = value.to(parameter.device)


def _exchange(tensor: Tensor, device: str) -> None:
    swap: Any = torch.utils.swap_tensors
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        gradient = tensor.grad
        tensor.grad = None
        swap(tensor, nn.Parameter(moved, tensor.requires_grad))
        tensor.grad = None if gradient is None else gradient.to(device)
    else:
        swap(tensor, moved)
