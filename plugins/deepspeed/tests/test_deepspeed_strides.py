"""Checks what scripts do with weights that do not lie row by row, which ZeRO lays out anew."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain_testing import spawn

SHAPE = (6, 8)


def values_of(stage: int) -> dict[str, Any]:
    """Return what a script reads and writes of a transposed weight, after a step."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **({"deepspeed_plugin": {"zero_stage": stage}} if stage else {}))
    model = nn.Linear(SHAPE[1], SHAPE[0])
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, SHAPE[1])).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    weight = model.weight
    written = io.BytesIO()
    torch.save({"data": weight.data, "state": {k: v.detach() for k, v in model.named_parameters()}}, written)
    written.seek(0)
    found: dict[str, Any] = {
        "saved": torch.load(written, weights_only=True),
        "pickled": pickle.loads(pickle.dumps(weight.detach())),
        "copied": copy.deepcopy(weight.detach()),
        "of a copied model": copy.deepcopy(accelerator.unwrap_model(model)).weight if stage < 3 else weight.clone(),
        "cloned": weight.detach().clone(),
        "array": torch.from_numpy(weight.detach().numpy().copy()),
        "listed": torch.tensor(weight.tolist()),
        "computed": (weight.data * 2).sum(0),
        "reduced": accelerator.reduce(weight.detach(), "mean"),
    }
    average = weight.detach().clone()
    with torch.no_grad():
        average.mul_(0.5).add_(weight.data, alpha=0.5)
        weight.data[1].mul_(2)
        weight.detach().t()[0].zero_()
        weight.view_as(weight).add_(1)
        found |= {"average": average, "written": weight.clone()}
        for each in ("saved", "pickled", "copied", "of a copied model", "cloned", "average"):
            kind = found[each]["data"] if each == "saved" else found[each].data
            found[f"{each}, its kind"] = torch.tensor([type(kind) is Tensor, *kind.stride()])
    return {name: each if isinstance(each, dict) else each.detach().as_subclass(Tensor) for name, each in found.items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reads_and_writes_are_those_of_one_process(stage: int) -> None:
    """A weight of this size is whole on every rank at stage 3 too."""
    for found in spawn(values_of, 2, stage):
        torch.testing.assert_close(found, values_of(0))
