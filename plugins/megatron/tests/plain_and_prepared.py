"""What tests of ordinary scripts share: a small model, its batches, and a plain loop beside the prepared one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError, UsageError

ATOL = 2e-5
"""What the README promises in float32: sums in another order."""

TENSOR = {"tensor_parallel_size": 2}
PIPELINES = [(2, {"pipeline_parallel_size": 2}), (3, {"pipeline_parallel_size": 3, "num_micro_batches": 4})]
ROWS, WIDTH, CLASSES = 8, 8, 4


def accelerator(section: dict[str, Any], **config: Any) -> Accelerator:
    overrides = {"distributed_type": "megatron", "use_cpu": True, **config}
    overrides |= {f"megatron.{key}": value for key, value in section.items()}
    return Accelerator(config=load_config(overrides=overrides, environ={}))


class Net(nn.Module):
    def __init__(self, out: int = CLASSES):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, out)

    def encode(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x):
        return self.head(self.encode(x))

    def loss(self, x, labels):
        return F.cross_entropy(self(x), labels)


class Batch(NamedTuple):
    x: Tensor
    labels: Tensor


def batch(seed: int, rows: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(rows, WIDTH, generator=generator), torch.randint(CLASSES, (rows,), generator=generator))


def classify(model: Any, one: Batch) -> Tensor:
    return F.cross_entropy(model(one.x), one.labels)


def no_change(_: Any) -> None: ...


def follow(
    made: Accelerator,
    kind: Callable[[], nn.Module] = Net,
    loss: Callable[[Any, Any], Tensor] = classify,
    *,
    batches: Callable[[int], Any] = batch,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    before: Callable[[Any], None] = no_change,
    after: Callable[[Any], None] = no_change,
    clip: float | None = None,
) -> tuple[nn.Module, nn.Module]:
    """Train plainly and prepared, and compare losses, norms and weights; the plain model and the prepared one."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind())
        before(models[-1])
    plain, model = models
    step = optimizer(plain.parameters(), lr=0.3)
    model, prepared = made.prepare(model, optimizer(model.parameters(), lr=0.3))
    after(plain)
    after(model)
    for seed in range(3):
        one = batches(seed)
        expected = loss(plain, one)
        expected.backward()
        norm = None if clip is None else nn.utils.clip_grad_norm_(plain.parameters(), clip)
        step.step()
        step.zero_grad()
        found = loss(model, one)
        made.backward(found)
        if clip is not None:
            torch.testing.assert_close(made.clip_grad_norm_(model.parameters(), clip), norm, rtol=1e-5, atol=0)
        prepared.step()
        prepared.zero_grad()
        assert found.item() == pytest.approx(expected.item(), abs=ATOL)
    same_state(made, model, plain)
    return plain, model


def same_state(made: Accelerator, model: nn.Module, plain: nn.Module) -> None:
    state = made.backend.broadcast_object(dict(made.get_state_dict(model)))
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(
            state[name], tensor, rtol=0, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )


def refused(made: Accelerator, match: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=match):
        follow(made, *args, **kwargs)
    made.free_memory()
