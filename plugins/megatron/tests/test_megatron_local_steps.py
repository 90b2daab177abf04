"""Optimizers of cut parameters step on plain parts: as in one process, and nobody else sees the difference."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain_sharding import STEPPED_LOCALLY, steps_locally
from drivetrain_testing import spawn

STEPS, WIDTH = 3, 8
SETTINGS = {"lr": 0.01, "weight_decay": 0.1}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Watched(torch.optim.AdamW):
    """Somebody's own, which sees what its parameters are."""

    def step(self, closure=None):
        self.seen = {type(one) for group in self.param_groups for one in group["params"]}
        return super().step(closure)


def made(kind, model):
    settings = SETTINGS | ({"momentum": 0.9} if kind in {torch.optim.SGD, torch.optim.RMSprop} else {})
    return kind(model.parameters(), **settings)


def train(kind, overrides, *, hook=False):
    """The script: weights, the optimizer's state, and which kinds of parameters the optimizer had in its step."""
    from drivetrain import Accelerator, load_config

    accelerator = Accelerator(config=load_config(overrides={"use_cpu": True, **overrides}, environ={}))
    torch.manual_seed(0)
    model = Pair()
    model, optimizer = accelerator.prepare(model, made(kind, model))
    inner = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
    seen = set()
    if hook:
        look = lambda each, *_: seen.update(type(one) for group in each.param_groups for one in group["params"])  # noqa: E731
        inner.register_step_pre_hook(look)
    for step in range(STEPS):
        x = torch.arange(4.0 * WIDTH).view(4, WIDTH).sin() + step
        accelerator.backward(model(x).square().mean())
        if step == STEPS - 1:
            plain = steps_locally(inner)
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
    parameters = [one for group in inner.param_groups for one in group["params"]]
    kinds = {type(one) for one in parameters} | {
        type(value) for one in parameters if isinstance(one, DTensor) for value in inner.state[one].values()
    }
    laid_out = all(
        value.shape == one.shape
        for one in parameters
        for value in inner.state[one].values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    accelerator.end_training()
    return {
        "weights": whole,
        "applies": plain,
        "kinds": {each.__name__ for each in kinds},
        "laid_out": laid_out,
        "seen": {each.__name__ for each in seen | getattr(inner, "seen", set())},
    }


def several(kinds, overrides):
    return {kind.__name__: train(kind, overrides) for kind in kinds}


TENSOR_PARALLEL = {"distributed_type": "megatron", "megatron.tensor_parallel_size": 2}


def test_every_elementwise_optimizer_steps_as_in_one_process():
    kinds = sorted(STEPPED_LOCALLY, key=lambda kind: kind.__name__)
    alone = spawn(several, 1, kinds, {"distributed_type": "single"}, timeout=100)[0]
    for number, rank in enumerate(spawn(several, 2, kinds, TENSOR_PARALLEL, timeout=200)):
        for name, found in rank.items():
            assert found["applies"], name
            assert found["laid_out"], name
            # Parameters and their state are what they were before, for checkpoints.
            assert found["kinds"] <= {"CutTensor", "Parameter", "Tensor", "float"}, (name, found["kinds"])
            assert "CutTensor" in found["kinds"], name
            # The first rank is given the whole weights.
            for key, value in alone[name]["weights"].items() if number == 0 else ():
                # Float32: matrices on two ranks add in another order.
                torch.testing.assert_close(found["weights"][key], value, atol=2e-5, rtol=0)


def test_whoever_may_look_at_parameters_sees_them_as_they_are():
    own = spawn(train, 2, Watched, TENSOR_PARALLEL, timeout=100)[0]
    assert not own["applies"]
    assert "CutTensor" in own["seen"]
    watched = spawn(train_with_hook, 2, timeout=100)[0]
    assert not watched["applies"]
    assert "CutTensor" in watched["seen"]


def train_with_hook():
    return train(torch.optim.AdamW, TENSOR_PARALLEL, hook=True)
