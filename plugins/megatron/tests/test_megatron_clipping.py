"""The section's own clipping: each step clips, once, as a script that calls ``clip_grad_norm_`` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator, load_config
from drivetrain.api import UsageError
from drivetrain_testing import spawn

WIDTH, MAX_NORM = 8, 0.05
ATOL = 5e-6
"""Float32: matrices and batches in parts add the same numbers in another order."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def clips(section: dict[str, Any]) -> list[float]:
    overrides = {"distributed_type": "megatron", "use_cpu": True}
    overrides |= {f"megatron.{key}": value for key, value in {**section, "gradient_clipping": MAX_NORM}.items()}
    made = Accelerator(config=load_config(overrides=overrides, environ={}))
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model: Any = Net()
    step = torch.optim.SGD(plain.parameters(), lr=1.0)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    norms = []
    for seed in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        F.mse_loss(plain(x), x.flip(1)).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM).item())
        made.backward(F.mse_loss(model(x), x.flip(1)))
        if seed == 1:
            made.clip_grad_norm_(model.parameters(), MAX_NORM)
        for one in (step, optimizer):
            one.step()
            one.zero_grad()
    state = made.backend.broadcast_object(dict(made.get_state_dict(model)))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=ATOL)
    made.backward(F.mse_loss(model(x), x))
    with pytest.raises(UsageError, match=r"gradient_clipping: 0\.05 contradicts the script.* with 1"):
        made.clip_grad_norm_(model.parameters(), 1.0)
    made.end_training()
    return norms


@pytest.mark.parametrize(
    "section",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel": "zero1"}, {"data_parallel": "fsdp"}],
    ids=str,
)
def test_every_step_clips_by_the_sections_word(section: dict[str, Any]) -> None:
    assert min(spawn(clips, 2, section)[0]) > 2 * MAX_NORM, "clipping matters here"
