"""What torch's DistributedDataParallel is expected to have, and another class in its place."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.api import BackendBlockedError
from drivetrain_ddp import backend
from drivetrain_testing import spawn

REPLACED = """
import torch

class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()

torch.nn.parallel.DistributedDataParallel = torch.nn.parallel.distributed.DistributedDataParallel = Wrapper

from drivetrain import Accelerator

accelerator = Accelerator(cpu=True, distributed_type="ddp")
model, optimizer = accelerator.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(4, 2)).sum())
optimizer.step()
print("trained by", accelerator.distributed_type)
"""


def test_another_class_in_its_place_does_not_matter_to_one_process() -> None:
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, check=False)
    assert "trained by" in done.stdout, done.stderr


def prepared(lacks: str) -> str:
    theirs = backend.DistributedDataParallel

    class Wrapper(theirs):  # type: ignore[valid-type,misc]
        if lacks == "arguments":

            def __init__(self, module: nn.Module) -> None:
                super().__init__(module)

        else:

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                delattr(self, lacks)

            __init__.__signature__ = inspect.signature(theirs.__init__)  # type: ignore[attr-defined]

    backend.DistributedDataParallel = Wrapper  # type: ignore[misc]
    accelerator = Accelerator(cpu=True, distributed_type="ddp")
    model = nn.Linear(2, 1)
    try:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except BackendBlockedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("lacks", "what"),
    [
        ("arguments", "takes neither forward_sync_buffers nor broadcast_buffers"),
        ("_accum_grad_hooks", "has no _accum_grad_hooks"),
    ],
)
def test_a_class_that_is_not_as_expected_is_named(lacks: str, what: str) -> None:
    for said in spawn(prepared, 2, lacks):
        assert f"Wrapper {what}, which drivetrain-ddp needs of torch {metadata.version('torch')}" in said
        assert "pip install torch==" in said
