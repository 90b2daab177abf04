"""Checks that random numbers for weights that lie by columns are those of one process on every pipeline stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain_testing import spawn

PIPELINE: dict[str, Any] = {
    "distributed_type": "megatron",
    "megatron_lm_plugin": {"pipeline_parallel_size": 2, "num_micro_batches": 2},
}


def trained(config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after three steps, each followed by noise; numbers of torch depend on the strides that they fill."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **config)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for layer in model:
        layer.weight = nn.Parameter(torch.empty_strided((8, 8), (1, 8)).copy_(layer.weight.detach()))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        accelerator.backward(model(torch.arange(64.0).view(8, 8) / 64).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                if step == 1:
                    parameter.normal_(0, 0.3)
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return accelerator.get_state_dict(model)


def test_noise_on_weights_that_lie_by_columns() -> None:
    expected = trained({"distributed_type": "single"})
    found, _ = spawn(trained, 2, PIPELINE)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)
