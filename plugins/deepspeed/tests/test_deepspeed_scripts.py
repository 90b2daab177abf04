"""What scripts do to parameters, gradients and optimizers: the numbers of one process, or an error in words."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import EMA, Accelerator
from drivetrain.api import DrivetrainError, UnsupportedError, UsageError
from drivetrain_testing import models, spawn
from drivetrain_testing.scenario import full_state, share

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

TOLERANCE = 2e-5
"""What is promised: float32 sums in another order, through AdamW, after four steps."""

VARIANTS: dict[str, dict[str, Any]] = {
    "stage0": {"zero_stage": 0},
    "stage1": {"zero_stage": 1},
    "stage2-offload": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "stage2-round-robin": {"zero_stage": 2, "round_robin_gradients": True},
    "stage3": {"zero_stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 60},
    "stage3-small": {"zero_stage": 3},
    "stage3-offload": {
        "zero_stage": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "stage3_param_persistence_threshold": 0,
    },
}
"""The third kind of stage 3 keeps all of these small parameters whole between uses."""


class Output(NamedTuple):
    logits: Tensor


@dataclass
class Holder:
    logits: Tensor


class Custom:
    def __init__(self, logits: Tensor) -> None:
        self.hidden = {"deep": [logits]}

    @property
    def logits(self) -> Tensor:
        return self.hidden["deep"][0]


class Net(nn.Module):
    """``(B, F) -> (B, C)``, in what kind of output is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, 7)
        self.head = nn.Linear(7, models.CLASSES)
        self.kind: Callable[[Tensor], Any] | None = None

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.encode(x))
        return logits if self.kind is None else self.kind(logits)


@dataclass
class Job:
    """One script at work: plain, or under DeepSpeed."""

    accelerator: Accelerator | None
    model: Any
    optimizer: Any
    own: torch.optim.Optimizer

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        x, y = models.dense_data(12, seed=30 + step)
        return (x, y) if self.accelerator is None else share(self.accelerator, x, y)

    def backward(self, loss: Tensor) -> None:
        loss.backward() if self.accelerator is None else self.accelerator.backward(loss)

    def loss(self, step: int) -> Tensor:
        x, y = self.batch(step)
        return F.cross_entropy(self.model(x), y)

    def train(self, step: int) -> None:
        self.backward(self.loss(step))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        if self.accelerator is None:
            return {name: each.detach().clone() for name, each in self.model.state_dict().items()}
        return full_state(self.accelerator, self.model)


Script = Callable[[Job], None]
SCRIPTS: dict[str, Script] = {}


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


def other_state() -> dict[str, Tensor]:
    with models.seeded(11):
        return Net().state_dict()


# ---- writes to parameters ------------------------------------------------------------------------------------------


@script
def load_state_dict(job: Job) -> None:
    job.train(0)
    job.model.load_state_dict(other_state())
    job.train(1)
    job.train(2)


@script
def clamp_under_no_grad(job: Job) -> None:
    for step in range(4):
        job.train(step)
        with torch.no_grad():
            for each in job.model.parameters():
                each.clamp_(-0.1, 0.1)


@script
def clamp_data(job: Job) -> None:
    for step in range(4):
        job.train(step)
        for each in job.model.parameters():
            each.data.clamp_(-0.1, 0.1)


@script
def multiply_between_backward_and_step(job: Job) -> None:
    for step in range(3):
        job.backward(job.loss(step))
        with torch.no_grad():
            job.model.head.weight.mul_(0.5)
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def initialise_again(job: Job) -> None:
    job.train(0)
    with models.seeded(5):
        nn.init.normal_(job.model.head.weight)
        nn.init.zeros_(job.model.head.bias)
    job.train(1)
    job.train(2)


@script
def copy_one_row(job: Job) -> None:
    job.train(0)
    with torch.no_grad():
        job.model.first.weight[1].copy_(torch.arange(models.FEATURES) / 10)
    job.train(1)


@script
def assign_data(job: Job) -> None:
    job.train(0)
    job.model.head.weight.data = other_state()["head.weight"].clone()
    job.train(1)
    job.train(2)


@script
def vector_to_parameters(job: Job) -> None:
    job.train(0)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(other_state().values()), job.model.parameters())
    job.train(1)


@script
def assign_low_precision(job: Job) -> None:
    job.train(0)
    job.model.head.weight.data = job.model.head.weight.data.double()
    job.model.head.weight.data = job.model.head.weight.data.float()
    job.train(1)


@script
def double(job: Job) -> None:
    job.model.double()
    x, y = job.batch(1)
    job.backward(F.cross_entropy(job.model(x.double()), y))
    job.optimizer.step()
    job.model.float()


@script
def write_what_is_saved(job: Job) -> None:
    job.train(0)
    with torch.no_grad():
        job.model.head.weight.fill_(0.25)


@script
def average_into_another(job: Job) -> None:
    mean = {name: each.clone() for name, each in job.whole().items()}
    for step in range(3):
        job.train(step)
        now = job.whole()
        for name, each in mean.items():
            each.lerp_(now[name], 0.1)
    job.model.load_state_dict(mean)
    job.train(3)


@script
def average(job: Job) -> None:
    """Of what is trained and of what is written; inside of the block it is in the model, and then gone."""
    if job.accelerator is not None:
        mean: Any = EMA(job.accelerator, job.model, 0.5)
        update = mean.update
    else:
        mean = AveragedModel(job.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        update = lambda: mean.update_parameters(job.model)  # noqa: E731
    for step in range(3):
        job.train(step)
        if step == 1:
            job.model.load_state_dict(other_state())
        update()
    if job.accelerator is not None:
        with mean.averaged():
            averaged = full_state(job.accelerator, job.model)
    else:
        averaged = mean.module.state_dict()
    job.train(3)
    now = job.whole()
    job.model.load_state_dict({name: each + 2 * now[name] for name, each in averaged.items()})


@script
def clamp_before_another_way(job: Job) -> None:
    """What is written is there when a forward takes another way than the one before."""
    for step in range(3):
        job.train(step)
        with torch.no_grad():
            for each in job.model.parameters():
                each.clamp_(-0.1, 0.1)
            job.model(job.batch(step)[0])
        job.backward(-job.model.encode(job.batch(step)[0]).mean() + 0.0 * job.loss(step))
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def assign_with_other_strides(job: Job) -> None:
    """As ``model.to(memory_format=torch.channels_last)`` does: so are gradients then."""
    job.train(0)
    job.model.head.weight.data = job.model.head.weight.data.t().contiguous().t()
    job.train(1)
    job.model.first.weight.data = job.model.first.weight.data.t().contiguous().t()
    job.train(2)


# ---- gradients -----------------------------------------------------------------------------------------------------


@script
def forget_zero_grad(job: Job) -> None:
    for step in range(3):
        job.backward(job.loss(step))
        job.optimizer.step()


@script
def forget_zero_grad_and_clip(job: Job) -> None:
    job.backward(job.loss(0))
    job.optimizer.step()
    job.backward(job.loss(1))
    if job.accelerator is None:
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.05)
    else:
        job.accelerator.clip_grad_norm_(job.model.parameters(), 0.05)
    job.optimizer.step()


@script
def zero_grad_before_backward(job: Job) -> None:
    for step in range(4):
        job.optimizer.zero_grad()
        for micro_batch in range(2):
            job.backward(job.loss(2 * step + micro_batch))
        job.optimizer.step()


@script
def zero_grad_of_parts_after_step(job: Job) -> None:
    for step in range(3):
        job.backward(job.loss(step))
        job.optimizer.step()
        job.model.first.zero_grad()
        job.model.head.zero_grad()


@script
def zero_grad_of_one_part_after_step(job: Job) -> None:
    for step in range(3):
        job.backward(job.loss(step))
        job.optimizer.step()
        job.model.head.zero_grad()


@script
def read_gradients_after_step(job: Job) -> None:
    """The old way of ``zero_grad``."""
    for step in range(3):
        job.backward(job.loss(step))
        job.optimizer.step()
        for each in job.model.parameters():
            if each.grad is not None:
                each.grad.detach_()
                each.grad.zero_()


@script
def move_after_step(job: Job) -> None:
    for step in range(3):
        job.optimizer.zero_grad()
        job.backward(job.loss(step))
        job.optimizer.step()
        job.model.to("cpu")


@script
def gradients_set_to_zero(job: Job) -> None:
    """With weight decay and momentum a gradient of zero moves what the next backward does not use."""
    for step in range(4):
        if step == 2:
            job.backward(job.model.encode(job.batch(step)[0]).square().mean())
        else:
            job.backward(job.loss(step))
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=False)


@script
def restore_the_optimizers_state(job: Job) -> None:
    for step in range(6):
        job.train(step)
        if step == 1:
            kept = copy.deepcopy(job.optimizer.state_dict())
        if step == 3:
            for group in job.optimizer.param_groups:
                group["lr"] = 0.5
            job.optimizer.load_state_dict(kept)


@script
def torchs_clip_grad_norm(job: Job) -> None:
    for step in range(2):
        job.backward(job.loss(step))
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.05)
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def torchs_clip_grad_value(job: Job) -> None:
    job.backward(job.loss(0))
    nn.utils.clip_grad_value_(job.model.parameters(), 0.01)
    job.optimizer.step()


@script
def scale_gradients(job: Job) -> None:
    job.backward(job.loss(0))
    for each in job.model.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)
    job.optimizer.step()


@script
def drop_gradients_by_hand(job: Job) -> None:
    job.backward(job.loss(0))
    for each in job.model.head.parameters():
        each.grad = None
    job.optimizer.step()


@script
def drop_gradients_before_each_backward(job: Job) -> None:
    for step in range(3):
        for each in job.model.parameters():
            each.grad = None
        job.backward(job.loss(step))
        job.optimizer.step()


@script
def zero_grad_of_the_model(job: Job) -> None:
    job.backward(job.loss(5))
    job.model.zero_grad()
    for step in range(2):
        job.backward(job.loss(step))
        job.optimizer.step()
        job.model.zero_grad()


@script
def zero_grad_of_a_part(job: Job) -> None:
    job.backward(job.loss(5))
    job.model.head.zero_grad()
    job.optimizer.step()


@script
def hook_after_prepare(job: Job) -> None:
    mask = torch.zeros(models.CLASSES, 7)
    mask[::2] = 1
    job.model.head.weight.register_hook(lambda gradient: gradient * mask)
    for step in range(3):
        job.train(step)


@script
def hook_in_place(job: Job) -> None:
    """Linear, and returns nothing."""

    def drop_first_row(gradient: Tensor) -> None:
        gradient[0] = 0

    job.model.head.weight.register_hook(drop_first_row)
    for step in range(3):
        job.train(step)


@script
def hook_that_clamps(job: Job) -> None:
    job.train(0)
    job.model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    job.train(1)


@script
def hook_that_takes_signs(job: Job) -> None:
    job.model.head.bias.register_hook(torch.sign)
    job.train(0)


@script
def hook_that_takes_magnitudes(job: Job) -> None:
    job.model.head.bias.register_hook(torch.abs)
    job.train(0)


@script
def hook_that_shifts(job: Job) -> None:
    job.model.head.bias.register_hook(lambda gradient: gradient + 0.1)
    job.train(0)


@script
def hook_that_looks(job: Job) -> None:
    norms: list[float] = []
    job.model.head.weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))
    job.train(0)


@script
def clamp_in_forward(job: Job) -> None:
    layer = job.model.first
    forward = layer.forward

    def clamped(x: Tensor) -> Tensor:
        layer.weight.data.clamp_(-0.1, 0.1)
        return forward(x)

    layer.forward = clamped
    for step in range(3):
        job.train(step)


@script
def clamp_a_child_in_forward(job: Job) -> None:
    """The model writes to a layer's parameter, before it calls the layer."""
    model = job.model
    encode = model.encode

    def clamped(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.head.weight.clamp_(-0.1, 0.1)
        hidden: Tensor = encode(x)
        return hidden

    model.encode = clamped
    for step in range(3):
        job.train(step)


@script
def clamp_a_child_after_its_forward(job: Job) -> None:
    def clamped(logits: Tensor) -> Tensor:
        job.model.head.weight.data.clamp_(-0.1, 0.1)
        return logits

    job.model.kind = clamped
    for step in range(3):
        job.train(step)


def after_some_forwards(job: Job, write: Callable[[], Any]) -> None:
    """A forward writes to parameters from the sixth one on."""
    count = 0

    def late(logits: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count > 5:
            with torch.no_grad():
                write()
        return logits

    job.model.kind = late
    for step in range(10):
        job.train(step)


@script
def clamp_late_in_forward(job: Job) -> None:
    after_some_forwards(job, lambda: job.model.first.weight.clamp_(-0.1, 0.1))


@script
def clamp_data_late_in_forward(job: Job) -> None:
    after_some_forwards(job, lambda: job.model.head.weight.data.clamp_(-0.1, 0.1))


@script
def clamp_late_in_a_layer_alone(job: Job) -> None:
    layer = job.model.head
    forward = layer.forward

    def clamped(x: Tensor) -> Tensor:
        with torch.no_grad():
            layer.weight.clamp_(-0.1, 0.1)
        output: Tensor = forward(x)
        return output

    for step in range(6):
        if step == 4:
            layer.forward = clamped
        x, y = job.batch(step)
        job.backward(F.cross_entropy(layer(job.model.encode(x)), y))
        job.optimizer.step()
        job.optimizer.zero_grad()


# ---- parameter groups ----------------------------------------------------------------------------------------------


def edited_groups(job: Job, edit: Callable[[Any], Any]) -> None:
    job.train(0)
    edit(job.own.param_groups)
    job.train(1)
    job.train(2)


@script
def write_settings_of_a_group(job: Job) -> None:
    edited_groups(job, lambda groups: groups[0].update(lr=0.01))


@script
def put_a_group_in(job: Job) -> None:
    edited_groups(job, lambda groups: groups.append({**groups[0], "params": []}))


@script
def take_a_group_out(job: Job) -> None:
    edited_groups(job, lambda groups: groups.pop())


@script
def assign_other_groups(job: Job) -> None:
    job.train(0)
    job.own.param_groups = [dict(group) for group in job.own.param_groups]
    job.train(1)


@script
def take_a_parameter_out(job: Job) -> None:
    edited_groups(job, lambda groups: groups[0]["params"].pop())


@script
def take_all_parameters_out(job: Job) -> None:
    edited_groups(job, lambda groups: groups[0].update(params=[]))


@script
def clip_what_groups_hold(job: Job) -> None:
    for step in range(3):
        job.backward(job.loss(step))
        nn.utils.clip_grad_norm_([each for group in job.own.param_groups for each in group["params"]], 0.05)
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def clip_each_group(job: Job) -> None:
    for step in range(3):
        job.backward(job.loss(step))
        for group in job.own.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.05)
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def accumulated_hook_after_prepare(job: Job) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    job.model.head.weight.register_post_accumulate_grad_hook(halve)
    job.train(0)
    job.train(1)


@script
def weight_decay_by_hand(job: Job) -> None:
    for step in range(3):
        penalty = sum((each**2).sum() for each in job.model.parameters())
        job.backward(job.loss(step) + 0.1 * penalty)
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def gradient_penalty(job: Job) -> None:
    for step in range(3):
        x, y = job.batch(step)
        x.requires_grad_()
        logits = job.model(x)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        job.backward(F.cross_entropy(logits, y) + (slope**2).sum(1).mean())
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def gradients_of_inputs(job: Job) -> None:
    for step in range(3):
        x, y = job.batch(step)
        x.requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(job.model(x), y), x)
        job.backward(F.cross_entropy(job.model(x.detach() + 0.1 * slope.sign()), y))
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def plain_backward(job: Job) -> None:
    job.loss(0).backward()
    job.optimizer.step()


@script
def a_step_without_a_backward(job: Job) -> None:
    job.train(0)
    job.optimizer.step()


# ---- optimizers ----------------------------------------------------------------------------------------------------


@script
def the_scripts_own_object(job: Job) -> None:
    job.backward(job.loss(0))
    job.own.step()
    job.own.zero_grad()


@script
def add_param_group(job: Job) -> None:
    job.train(0)
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@script
def freeze_after_prepare(job: Job) -> None:
    job.train(0)
    job.model.first.requires_grad_(False)
    job.train(1)
    job.train(2)


@script
def freeze_for_a_while(job: Job) -> None:
    job.train(0)
    job.model.first.requires_grad_(False)
    job.train(1)
    job.model.first.requires_grad_(True)
    job.train(2)


@script
def never_use_some(job: Job) -> None:
    for step in range(3):
        x, y = job.batch(step)
        job.backward(F.cross_entropy(job.model.head(torch.tanh(x.repeat(1, 2)[:, :7])), y))
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def use_now_and_then(job: Job) -> None:
    job.train(0)
    x, y = job.batch(1)
    job.backward(F.cross_entropy(job.model.head(torch.tanh(x.repeat(1, 2)[:, :7])), y))
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.train(2)


@script
def another_layer(job: Job) -> None:
    job.train(0)
    with models.seeded(13):
        job.model.head = nn.Linear(7, models.CLASSES)


@script
def unfreeze_after_prepare(job: Job) -> None:
    job.train(0)
    job.model.first.requires_grad_(True)
    job.train(1)


@script
def replace_a_parameter(job: Job) -> None:
    job.train(0)
    job.model.head.weight = nn.Parameter(other_state()["head.weight"])
    job.train(1)


# ---- the model -----------------------------------------------------------------------------------------------------


def _outputs(job: Job, kind: Callable[[Tensor], Any]) -> None:
    getattr(job.model, "module", job.model).kind = kind
    for step in range(3):
        x, y = job.batch(step)
        job.backward(F.cross_entropy(job.model(x).logits, y))
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def named_tuple_output(job: Job) -> None:
    _outputs(job, Output)


@script
def dataclass_output(job: Job) -> None:
    _outputs(job, Holder)


@script
def custom_output(job: Job) -> None:
    _outputs(job, Custom)


@script
def layer_with_a_dataclass(job: Job) -> None:
    first = getattr(job.model, "module", job.model).first
    inner, first.forward = first.forward, lambda x: Holder(inner(x))
    for step in range(3):
        x, y = job.batch(step)
        job.backward(F.cross_entropy(job.model.head(torch.tanh(job.model.first(x).logits)), y))
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def parts_called_alone(job: Job) -> None:
    for step in range(3):
        x, y = job.batch(step)
        job.backward(F.cross_entropy(job.model.head(job.model.encode(x)), y))
        job.optimizer.step()
        job.optimizer.zero_grad()


@script
def state_dict(job: Job) -> None:
    """On every rank here, so that all go on alike; it waits for no other."""
    job.train(0)
    state = job.model.state_dict()
    assert {name: each.shape for name, each in state.items()} == {
        name: each.shape for name, each in other_state().items()
    }


@script
def number_of_parameters(job: Job) -> None:
    job.train(0)
    assert sum(each.numel() for each in job.model.parameters()) == sum(each.numel() for each in Net().parameters())
    assert [each.shape for each in job.model.parameters()] == [each.shape for each in Net().parameters()]


# ---- the two runs --------------------------------------------------------------------------------------------------


def run(name: str, accelerator: Accelerator | None) -> dict[str, Tensor]:
    with models.seeded(9):
        model: Any = Net()
        if name == "unfreeze_after_prepare":
            model.first.requires_grad_(False)
    own: Any = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    optimizer = own
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, own)
    job = Job(accelerator, model, optimizer, own)
    SCRIPTS[name](job)
    return job.whole()


def every_script(section: dict[str, Any], folder: str, names: list[str]) -> dict[str, Any]:
    """By script its end state, or what was raised."""
    found: dict[str, Any] = {}
    for name in names:
        path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
        path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section}))
        accelerator = Accelerator(config=path)
        try:
            found[name] = run(name, accelerator)
        except DrivetrainError as error:
            found[name] = f"{type(error).__name__}: {error}"
        except Exception:
            found[name] = "raw: " + traceback.format_exc()
        accelerator.end_training()
    return found


# ---- what comes of it ----------------------------------------------------------------------------------------------

ELEMENTS = "asks for the elements of the parameter .* which ZeRO stage 3 shares out over ranks"
EDITED = "param_groups of AdamW was edited"
HELD = "param_groups of AdamW was asked for the parameters of a group, and ZeRO stage"
GRADIENTS = "`grad` of the parameter .* would do nothing: ZeRO stage"

SHARED = {
    "torchs_clip_grad_norm": GRADIENTS,
    "torchs_clip_grad_value": GRADIENTS,
    "scale_gradients": GRADIENTS,
    "drop_gradients_by_hand": GRADIENTS,
    "zero_grad_of_a_part": GRADIENTS,
    "accumulated_hook_after_prepare": "register_post_accumulate_grad_hook",
    "the_scripts_own_object": "was called by itself",
    "forget_zero_grad": "AdamW.step.. needs gradients of Net that were not dropped",
    "forget_zero_grad_and_clip": "clipping needs gradients of Net that were not dropped",
    "zero_grad_of_one_part_after_step": "AdamW.step.. needs gradients of Net that were not dropped",
    "read_gradients_after_step": GRADIENTS,
    "freeze_for_a_while": "has a gradient again",
    "use_now_and_then": "has a gradient again",
    "unfreeze_after_prepare": "was frozen when it was prepared",
    "replace_a_parameter": "weight of Linear has parameters that ZeRO did not share out when Net was prepared",
    "clip_what_groups_hold": HELD,
    "clip_each_group": HELD,
    "another_layer": "head of Net has parameters that ZeRO did not share out",
}
"""Refused under stages 1 to 3."""

IN_PARTS = dict.fromkeys(
    (
        *("clamp_under_no_grad", "clamp_data", "multiply_between_backward_and_step", "initialise_again"),
        *("copy_one_row", "assign_data", "vector_to_parameters", "assign_low_precision", "write_what_is_saved"),
        *("weight_decay_by_hand", "clamp_before_another_way", "assign_with_other_strides", "move_after_step"),
    ),
    ELEMENTS,
) | {"state_dict": f"{ELEMENTS}|state_dict.. would be this rank's part of a model that is sharded"}
"""Refused under stage 3, of parameters that are not small."""

SMALL = dict.fromkeys(("multiply_between_backward_and_step", "weight_decay_by_hand"), ELEMENTS)
"""Small parameters are whole after a step, and in parts before the first forward and after a backward."""

OF_STAGE_3 = {
    "gradient_penalty": "goes through its layers twice",
    "double": "`double` asks for the elements",
    "clamp_in_forward": "the forward of Linear writes to the parameter first.weight of Net",
    "clamp_a_child_in_forward": "the forward of Net writes to the parameter head.weight of Net",
    "clamp_a_child_after_its_forward": "the forward of Net writes to the parameter head.weight of Net",
    "clamp_late_in_forward": "the forward of Net writes to the parameter first.weight of Net",
    "clamp_data_late_in_forward": "the forward of Net writes to the parameter head.weight of Net",
    "clamp_late_in_a_layer_alone": "the forward of a layer of Net writes to the parameter head.weight of Net",
    "layer_with_a_dataclass": "the layer Linear has parameters and returns Holder",
}

NOWHERE = {
    "hook_that_clamps": "head.weight of Net has a hook by register_hook that is not linear",
    "hook_that_takes_signs": "head.bias of Net has a hook by register_hook that is not linear",
    "hook_that_takes_magnitudes": "head.bias of Net has a hook by register_hook that is not linear",
    "hook_that_shifts": "head.bias of Net has a hook by register_hook that is not linear",
    "hook_that_looks": "head.weight of Net has a hook by register_hook that returns nothing",
    "double": "the parameter first.weight of Net was torch.float32 when it was prepared and is torch.float64 now",
    "plain_backward": "Write accelerator.backward",
    "a_step_without_a_backward": "found no gradients",
    "add_param_group": "takes no group afterwards",
    "put_a_group_in": EDITED,
    "take_a_group_out": EDITED,
    "assign_other_groups": EDITED,
    "take_a_parameter_out": EDITED,
    "take_all_parameters_out": EDITED,
}
"""Refused under every stage."""


def refusals(variant: str) -> dict[str, str]:
    stage = VARIANTS[variant]["zero_stage"]
    found = dict(NOWHERE)
    if stage:
        found |= SHARED
    if stage == 3:
        found |= OF_STAGE_3 | (SMALL if variant == "stage3-small" else IN_PARTS)
    return found


def compare(variant: str, world: int, folder: Path, names: list[str]) -> None:
    refused = refusals(variant)
    for found in spawn(every_script, world, VARIANTS[variant], str(folder), names, timeout=300):
        for name in names:
            outcome = found[name]
            if name in refused:
                assert isinstance(outcome, str), f"{name} was not refused"
                assert not outcome.startswith("raw"), outcome
                assert re.search(refused[name], outcome), f"{name}: {outcome}"
            else:
                assert not isinstance(outcome, str), f"{name}: {outcome}"
                expected = run(name, None)
                assert set(outcome) == set(expected)
                for key, tensor in expected.items():
                    torch.testing.assert_close(
                        outcome[key],
                        tensor,
                        rtol=0,
                        atol=TOLERANCE,
                        msg=lambda text, name=name, key=key: f"{name}: {key}: {text}",
                    )


# Stage 2 runs the same scripts as `deepspeed-2` of tests/parity.
@pytest.mark.parametrize("variant", ["stage0", "stage3"])
def test_on_two_processes(variant: str, tmp_path: Path) -> None:
    compare(variant, 2, tmp_path, list(SCRIPTS))


LAYOUTS = [
    *("load_state_dict", "clamp_data", "copy_one_row", "assign_data", "write_what_is_saved", "never_use_some"),
    *("average", "clamp_before_another_way", "assign_with_other_strides", "forget_zero_grad"),
    *("zero_grad_before_backward", "zero_grad_of_parts_after_step", "gradients_set_to_zero"),
    *("restore_the_optimizers_state", "hook_after_prepare", "hook_in_place", "hook_that_clamps", "hook_that_looks"),
    *("clamp_in_forward", "clamp_a_child_in_forward", "clamp_a_child_after_its_forward"),
]
"""What depends on where a variant keeps masters and parts."""


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "stage0"])
def test_on_three_processes(variant: str, tmp_path: Path) -> None:
    """Parts of which one is padded, and means that are right by no luck."""
    compare(variant, 3, tmp_path, [*LAYOUTS, "torchs_clip_grad_norm", "dataclass_output", "use_now_and_then"])


# ---- what has no single process to compare with --------------------------------------------------------------------


def prepared(section: dict[str, Any], folder: str, model: Any, optimizer: Any, **settings: Any) -> Any:
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section, **settings}))
    accelerator = Accelerator(config=path)
    return accelerator, *accelerator.prepare(model, optimizer)


def written_values_stay(section: dict[str, Any], folder: str, precision: str) -> None:
    """A step of learning rate 0 leaves what was written as it is."""
    import deepspeed

    model: Any = Net()
    own = torch.optim.SGD(model.parameters(), lr=0.0)
    accelerator, model, optimizer = prepared(section, folder, model, own, mixed_precision=precision)
    job = Job(accelerator, model, optimizer, own)
    job.train(0)
    weight = model.head.weight
    if section == {"zero_stage": 3}:
        # A small parameter is whole now: what is written is not lost where it is gathered with others to be read.
        weight.data.fill_(3.0)
        with deepspeed.zero.GatheredParameters([model.first.weight, weight]):
            torch.testing.assert_close(weight.data, torch.full_like(weight, 3.0), rtol=0, atol=0)
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.copy_(torch.arange(weight.numel()).view(weight.shape) / 7)
    if section["zero_stage"] == 3:
        with (
            pytest.raises(RuntimeError, match="modifier_rank=None"),
            deepspeed.zero.GatheredParameters([model.first.weight]),
        ):
            model.first.weight.data.mul_(2)
    job.train(1)
    expected = torch.arange(4 * 7).view(4, 7) / 7
    torch.testing.assert_close(full_state(accelerator, model)["head.weight"], expected, rtol=0, atol=0)
    accelerator.end_training()


def copies(section: dict[str, Any], folder: str) -> None:
    model: Any = Net()
    accelerator, model, _ = prepared(section, folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, models.FEATURES)).sum())
    if section["zero_stage"] == 3:
        for part in (model.head.weight, model.head, model):
            with pytest.raises(UnsupportedError, match="cannot be copied"):
                copy.deepcopy(part)
    else:
        for other in (copy.deepcopy(model), AveragedModel(model).module):
            assert type(other) is Net
            assert all(type(each) is nn.Parameter for each in other.parameters())
            other(torch.ones(2, models.FEATURES)).sum().backward()
            assert other.head.weight.grad is not None
        assert len(copy.deepcopy(model)._forward_pre_hooks) == 0
    if section["zero_stage"]:
        with pytest.raises(UnsupportedError, match=r"cannot be (pickled|copied)"):
            pickle.dumps(model)
    accelerator.end_training()


def not_prepared(section: dict[str, Any], folder: str) -> None:
    model: Any = Net()
    accelerator, model, _ = prepared(section, folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = torch.optim.SGD(accelerator.unwrap_model(model).parameters(), lr=0.1)
    if section["zero_stage"]:
        with pytest.raises(UsageError, match="not prepared with it"):
            model._drivetrain.trainable.before_unprepared_step(other)
    else:
        model._drivetrain.trainable.before_unprepared_step(other)
    alone: Any = accelerator.prepare(Net())
    if section["zero_stage"] < 3:  # In stage 3 a backward finds its parameters in parts.
        with pytest.raises(UsageError, match="prepared without an optimizer"):
            accelerator.backward(alone(torch.ones(2, models.FEATURES)).sum())
        with pytest.raises(UsageError, match="prepared without an optimizer"):
            torch.optim.SGD(alone.parameters(), lr=0.1).step()
    accelerator.end_training()


class Normalised(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            if each.grad is not None:
                each.grad.div_(each.grad.norm())
        super().step()


def refused_optimizers(section: dict[str, Any], folder: str) -> None:
    for make in (torch.optim.Adafactor, Normalised):
        model = Net()
        path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
        path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section}))
        accelerator = Accelerator(config=path)
        if section["zero_stage"]:
            with pytest.raises(UnsupportedError, match=f"{make.__name__} is not element-wise"):
                accelerator.prepare(model, make(model.parameters(), lr=0.1))
        else:
            accelerator.prepare(model, make(model.parameters(), lr=0.1))
        accelerator.end_training()


class Batches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(models.FEATURES)
        self.head = nn.Linear(models.FEATURES, models.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def evaluated(section: dict[str, Any], folder: str) -> tuple[Tensor, Tensor]:
    """What every rank computes of one input after training, and the running mean that is saved."""
    with models.seeded(3):
        model: Any = Batches()
    accelerator, model, optimizer = prepared(section, folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        x, y = share(accelerator, *models.dense_data(12, seed=step))
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    saved = full_state(accelerator, model)["norm.running_mean"].clone()
    model(x)
    model.eval()
    with torch.no_grad():
        output = model(models.dense_data(5, seed=77)[0])
    accelerator.end_training()
    return output, saved


def of_two_optimizers(accelerator: Accelerator | None) -> dict[str, Tensor]:
    """Each loads its own state back, and may change its groups afterwards."""
    with models.seeded(9):
        model: Any = Net()
    mine: Any = torch.optim.AdamW(model.first.parameters(), lr=0.02), torch.optim.AdamW(model.head.parameters(), lr=0.3)
    own = mine
    if accelerator is not None:
        model, *mine = accelerator.prepare(model, *mine)
    job = Job(accelerator, model, None, own[0])
    for step in range(5):
        job.backward(job.loss(step))
        for optimizer in mine:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            kept = [copy.deepcopy(optimizer.state_dict()) for optimizer in mine]
        if step == 2:
            mine[1].load_state_dict(kept[1])
            mine[0].load_state_dict(kept[0])
            mine[1].param_groups[0]["lr"] = 0.01
    if "drivetrain_part" in kept[0]:
        assert accelerator is not None
        kept[0]["drivetrain_part"] = {"rank": (accelerator.process_index + 1) % 3, "ranks": 3}
        with pytest.raises(UnsupportedError, match=r"is the part of rank \d of 3, and this AdamW holds"):
            mine[0].load_state_dict(kept[0])
        with pytest.raises(UnsupportedError, match="is that of whole parameters, and this"):
            mine[0].load_state_dict({"state": {}, "param_groups": []})
    return job.whole()


def compiled_first(section: dict[str, Any], folder: str) -> None:
    """A root module with parameters of its own, in which ``torch.compile`` captures graphs."""
    with models.seeded(4):
        plain, model = Scaled(), Scaled()
        model.load_state_dict(plain.state_dict())
    # What torch says to itself where it traces DeepSpeed's linear layers of stage 3.
    warnings.simplefilter("default")
    step = torch.optim.SGD(plain.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")
    accelerator, compiled, optimizer = prepared(section, folder, compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3):
        x, y = models.dense_data(12, seed=number)
        F.cross_entropy(plain(x), y).backward()
        step.step()
        step.zero_grad()
        x, y = share(accelerator, x, y)
        accelerator.backward(F.cross_entropy(compiled(x), y))
        optimizer.step()
        optimizer.zero_grad()
    found = full_state(accelerator, compiled)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE)
    accelerator.end_training()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.FEATURES))
        self.head = nn.Linear(models.FEATURES, models.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


def adagrad(accelerator: Accelerator | None) -> dict[str, Tensor]:
    with models.seeded(9):
        model: Any = Net()
    groups = [{"params": model.first.parameters(), "lr": 0.3}, {"params": model.head.parameters()}]
    own: Any = torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.2, lr_decay=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(own, 2, 0.1)
    optimizer = own
    if accelerator is not None:
        model, optimizer, scheduler = accelerator.prepare(model, own, scheduler)
    job = Job(accelerator, model, optimizer, own)
    for step in range(5):
        job.train(step)
        scheduler.step()
    return job.whole()


def further(section: dict[str, Any], folder: str) -> tuple[Any, Any]:
    written_values_stay(section, folder, "no")
    written_values_stay(section, folder, "bf16")
    copies(section, folder)
    not_prepared(section, folder)
    refused_optimizers(section, folder)
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section}))
    accelerator = Accelerator(config=path)
    found = adagrad(accelerator)
    accelerator.end_training()
    accelerator = Accelerator(config=path)
    found |= {f"of two: {name}": tensor for name, tensor in of_two_optimizers(accelerator).items()}
    accelerator.end_training()
    compiled_first(section, folder)
    return found, evaluated(section, folder)


@pytest.mark.parametrize("variant", ["stage0", "stage1", "stage2-offload", "stage3", "stage3-small", "stage3-offload"])
def test_further(variant: str, tmp_path: Path) -> None:
    expected = adagrad(None) | {f"of two: {name}": tensor for name, tensor in of_two_optimizers(None).items()}
    results = spawn(further, 3, VARIANTS[variant], str(tmp_path), timeout=200)
    for state, (output, mean) in results:
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(output, results[0][1][0], rtol=0, atol=0)
        torch.testing.assert_close(mean, results[0][1][1], rtol=0, atol=0)


def fingerprints() -> None:
    # Here, since it imports DeepSpeed, which changes the environment of the process that imports it.
    from drivetrain_deepspeed import writes

    for dtype in (torch.float32, torch.bfloat16):
        with models.seeded(1):
            part = torch.randn(5000).to(dtype)
        before = writes._fingerprint(part)
        assert torch.equal(before, writes._fingerprint(part.clone()))
        for index in (0, 2047, 4999):
            other = part.clone()
            other[index] += 0.5
            assert not torch.equal(before, writes._fingerprint(other))
        permuted = part.clone()
        permuted[[3, 3000]] = permuted[[3000, 3]]
        assert not torch.equal(before, writes._fingerprint(permuted))
        assert not torch.equal(before, writes._fingerprint(part.flip(0)))


def test_a_write_changes_the_fingerprint() -> None:
    spawn(fingerprints, 1)
