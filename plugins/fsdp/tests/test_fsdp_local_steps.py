"""Optimizers step on each rank's shards as plain tensors: as in one process, and nobody else sees the difference."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain import Accelerator, load_config
from drivetrain_sharding import STEPPED_LOCALLY, steps_locally
from drivetrain_testing import spawn

KINDS = sorted(STEPPED_LOCALLY, key=lambda kind: kind.__name__)
WIDTH, STEPS = 5, 4


class Pair(nn.Module):
    """Of three rows or a single one: one rank of two holds less than the other, or nothing."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class Watched(torch.optim.AdamW):
    """Somebody's own, which sees what its parameters are."""

    def step(self, closure=None):
        self.seen = {type(one) for group in self.param_groups for one in group["params"]}
        return super().step(closure)


def optimizer_of(kind, model):
    settings = {"lr": 0.02, "weight_decay": 0.1}
    settings |= {"momentum": 0.9} if kind in {torch.optim.SGD, torch.optim.RMSprop} else {}
    return kind([{"params": [model.up.weight, model.down.weight]}, {"params": [model.up.bias], "lr": 0.1}], **settings)


def train(kind, backend, section):
    """The script: weights, and what the optimizer holds afterwards. A bias is frozen by being in no group."""
    overrides = {"distributed_type": backend, "use_cpu": True, **({backend: section} if section else {})}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    torch.manual_seed(0)
    model = Pair()
    model, optimizer = accelerator.prepare(model, optimizer_of(kind, model))
    norms = []
    for step in range(STEPS):
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).sin() + step
        accelerator.backward(model(x).square().mean())
        if step % 2:
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        applied = steps_locally(optimizer.optimizer)
        optimizer.step()
        optimizer.zero_grad()
    inner = optimizer.optimizer
    held = [one for group in inner.param_groups for one in group["params"]]
    state = [(one, value) for one in held for value in inner.state[one].values() if isinstance(value, torch.Tensor)]
    whole = accelerator.get_state_dict(model)
    found = {
        "weights": {name: one.clone() for name, one in whole.items()},
        "norms": norms,
        "applied": applied,
        "sharded": all(isinstance(one, DTensor) for one in held),
        "laid_out": all(isinstance(value, DTensor) for _, value in state if value.dim()),
        "alike": all(value.shape == one.shape for one, value in state if value.dim()),
        # What a script reads of it: a DTensor of torch's own gives this rank's part of a norm or a sum.
        "read": [float(value.norm()) for _, value in state if value.dim()] + [float(value.sum()) for _, value in state],
        "seen": {each.__name__ for each in getattr(inner, "seen", set())},
    }
    accelerator.end_training()
    return found


def several(kinds, backend, section=None):
    return {kind.__name__: train(kind, backend, section) for kind in kinds}


@pytest.fixture(scope="module")
def alone():
    return spawn(several, 1, KINDS, "single")[0]


@pytest.mark.parametrize("section", [None, {"cpu_offload": True}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.gate("None", "{'cpu_offload': True}")
def test_every_elementwise_optimizer_steps_as_in_one_process(alone, section):
    for number, rank in enumerate(spawn(several, 2, KINDS, "fsdp", section)):
        for name, found in rank.items():
            assert found["applied"], name
            # Parameters and their state are what they were before, for checkpoints.
            assert found["sharded"], name
            assert found["laid_out"], name
            assert found["alike"], name
            assert found["read"] == pytest.approx(alone[name]["read"], rel=1e-5, abs=1e-6), name
            # Float32: two ranks add the parts of a norm and of a batch in another order.
            assert found["norms"] == pytest.approx(alone[name]["norms"], rel=1e-5), name
            # The first rank is given the whole weights.
            for key, value in alone[name]["weights"].items() if number == 0 else ():
                torch.testing.assert_close(found["weights"][key], value, atol=1e-5, rtol=0)


def test_whoever_may_look_at_parameters_sees_them_as_they_are():
    found = spawn(train, 2, Watched, "fsdp", None)[0]
    assert not found["applied"]
    assert found["seen"] == {"ShardedTensor"}, "which are DTensors"


def before_and_after_compiling():
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    model = Pair()
    _, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    inner = optimizer.optimizer
    found = [steps_locally(inner)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own, when it imports its compiler
        inner.step = torch.compile(inner.step)
    found.append(steps_locally(inner))
    accelerator.end_training()
    return found


def test_a_compiled_step_has_the_tensors_that_it_was_compiled_for():
    assert spawn(before_and_after_compiling, 2) == [[True, False]] * 2
