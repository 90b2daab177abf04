"""Hooks on the steps of optimizers, where an engine lets these step on flat parts of the parameters."""

from __future__ import annotations

import pytest
import torch

from drivetrain.api import UnsupportedError
from drivetrain_sharding import check_step_hooks


def gradients(optimizer):
    return [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]


def halve(optimizer, args, kwargs):
    for grad in gradients(optimizer):
        grad.mul_(0.5)


def clamp(optimizer, args, kwargs):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.clamp_(-group["lr"], group["lr"])


def normalise(optimizer, args, kwargs):
    total = sum(grad.pow(2).sum() for grad in gradients(optimizer)).sqrt()
    for grad in gradients(optimizer):
        grad.div_(total)


def centre_rows(optimizer, args, kwargs):
    for grad in gradients(optimizer):
        grad.sub_(grad.mean(-1, keepdim=True))


def measure(optimizer, args, kwargs):
    return sum(float(grad.norm()) for grad in gradients(optimizer)) and None


def read_state(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad.mul_(optimizer.state[one]["exp_avg"])


def optimizer_with(hook, method):
    layer = torch.nn.Linear(3, 2)
    made = torch.optim.AdamW([{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.5}], lr=0.1)
    getattr(made, method)(hook)
    return made


@pytest.mark.parametrize(("hook", "method"), [(halve, "register_step_pre_hook"), (clamp, "register_step_post_hook")])
def test_hooks_that_change_each_element_are_allowed(hook, method):
    tried = set()
    made = optimizer_with(hook, method)
    before = [one.clone() for group in made.param_groups for one in group["params"]]
    check_step_hooks(made, tried, "parts")
    assert len(tried) == 1
    # The trial is on other tensors.
    for one, other in zip(before, (one for group in made.param_groups for one in group["params"]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("hook", [normalise, centre_rows, measure, read_state])
def test_hooks_that_would_see_a_part_are_refused(hook):
    with pytest.raises(UnsupportedError, match="AdamW has a step hook that does not change each element by itself"):
        check_step_hooks(optimizer_with(hook, "register_step_pre_hook"), set(), "parts")
