"""Hooks under a pipeline: what each stage computes is tried, and what a hook would do once a micro-batch is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_and_prepared import PIPELINES, TENSOR, WIDTH, Net, accelerator, batch, classify, follow, refused
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_testing import RankFailedError, spawn

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

WORLDS = pytest.mark.parametrize(("world", "section"), PIPELINES)


class Clipping:
    """A hook that is an object, with state that calls do not change."""

    def __init__(self) -> None:
        self.most, self.times = 0.3, [1.0, 2.0]

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.clamp(-self.most, self.most) * self.times[1]


def computing(model: Any) -> None:
    """Hooks that compute something from their arguments."""
    gain = torch.linspace(0.5, 1.5, WIDTH)
    model.layers[0].register_forward_hook(Clipping())
    model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * gain,))
    model.layers[2].register_forward_hook(
        lambda module, args, kwargs, output: torch.relu(output) + 0.1, with_kwargs=True
    )
    model.layers[3].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    model.head.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * gain[0],))


def whole_output(model: Any) -> None:
    """Hooks of the model itself see the batch, whole and once."""
    model.seen = [0, 0]

    def before(module: Any, args: Any) -> Any:
        module.seen[0] += len(args[0])
        return (args[0] - args[0].mean(0),)

    def after(module: Any, args: Any, output: Any) -> Any:
        model.seen[1] += len(output)
        return output * 2

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)


def computing_hooks(section: dict[str, Any]) -> None:
    made = accelerator(section)
    follow(made, before=computing)
    made.free_memory()
    for how in ("before", "after"):
        plain, model = follow(made, **{how: whole_output})
        assert model.seen == plain.seen == [24, 24]
        model.eval()
        plain.eval()
        x = batch(9).x
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=2e-5)
        assert model.seen == plain.seen
        made.free_memory()
    made.end_training()


@WORLDS
def test_hooks_that_compute_do_what_they_do_in_one_process(world, section) -> None:
    spawn(computing_hooks, world, section)


def set_and_removed(section: dict[str, Any]) -> None:
    made = accelerator(section)
    handles: dict[Any, Any] = {}

    def loss(model: Any, one: Any) -> Tensor:
        # Set in the second step, removed before the third.
        turns[model] = turns.get(model, 0) + 1
        if turns[model] == 2:
            handles[model] = model.layers[1].register_forward_hook(lambda module, args, output: output * 0.5)
        if turns[model] == 3:
            handles[model].remove()
        return classify(model, one)

    turns: dict[Any, int] = {}
    follow(made, loss=loss)
    made.free_memory()

    def mixing(model: Any, one: Any) -> Tensor:
        # Not seen when the model was tried first.
        turns[model] = turns.get(model, 0) + 1
        if turns[model] == 2:
            model.layers[0].register_forward_hook(lambda module, args, output: output - output.mean(0))
        return classify(model, one)

    turns.clear()
    if "num_micro_batches" in section:
        refused(made, "a sample's output depends on the other samples", loss=mixing)
    else:
        follow(made, loss=mixing)
        made.free_memory()

    def removed_at_once(model: Any, one: Any) -> Tensor:
        handle = model.layers[1].register_forward_hook(lambda module, args, output: output * 0.5)
        found = classify(model, one)
        handle.remove()
        return found

    refused(made, "set or removed between its forward and", loss=removed_at_once)
    made.end_training()


@WORLDS
def test_hooks_that_come_and_go_are_followed(world, section) -> None:
    spawn(set_and_removed, world, section)


COUNT = 0
KEPT: list[Any] = []


def counts_globally(module: Any, args: Any, output: Any) -> Any:
    global COUNT  # noqa: PLW0603 (what scripts do)
    COUNT += 1
    return output * 2


def keeps(module: Any, args: Any, output: Any) -> None:
    keep(output)


def keep(output: Tensor) -> None:
    KEPT.append(output.detach())


class Recorder:
    total = 0.0

    def hook(self, module: Any, args: Any, output: Any) -> None:
        self.total = self.total + output.pow(2).mean()

    def norm(self, module: Any, args: Any, output: Any) -> None:
        self.total += output.norm().item()

    def gradient(self, module: Any, inputs: Any, outputs: Any) -> None:
        self.total = self.total + outputs[0].norm()


def register(how: str, model: Any) -> None:
    features: dict[str, Tensor] = {}
    layer = model.layers[1]
    if how == "activation penalty":
        layer.register_forward_hook(lambda module, args, output: features.update(last=output))
    elif how == "global":
        layer.register_forward_hook(counts_globally)
    elif how == "helper":
        layer.register_forward_hook(keeps)
    elif how == "object":
        layer.register_forward_hook(Recorder().hook)
    elif how == "number":
        layer.register_forward_hook(Recorder().norm)
    elif how == "append":
        layer.register_forward_pre_hook(lambda module, args: KEPT.append(args[0]))
    elif how == "model":
        layer.register_forward_hook(lambda module, args, output: setattr(model, "last", output))
    elif how == "backward":
        layer.register_full_backward_hook(Recorder().gradient)
    elif how == "backward of the model":
        model.register_full_backward_pre_hook(lambda module, outputs: KEPT.append(outputs[0]))


class Watching(Net):
    """Sets a hook on a tensor of its forward, as maps of gradients (Grad-CAM) do."""

    def encode(self, x):
        hidden = super().encode(x)
        if hidden.requires_grad:
            hidden.register_hook(self.keep)
        return hidden

    def keep(self, gradient: Tensor) -> None:
        self.gradient = gradient


class Features:
    """Collects, as an object that a module keeps."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.found.append(output)


class Collecting(nn.Module):
    """A part of one stage, which uses what hooks on its own parts collect in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.features, self.last = Features(), None
        self.parts[0].register_forward_hook(self.features)
        self.parts[1].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.last = output

    def forward(self, x):
        self.features.found.clear()
        return self.parts(x) + self.features.found[0] + self.last


class WithCollecting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Collecting()


class Scaling(Net):
    """Changes a gradient on its way."""

    def encode(self, x):
        hidden = super().encode(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.5)
        return hidden


EFFECTS = [
    "activation penalty",
    "global",
    "helper",
    "object",
    "number",
    "append",
    "model",
    "backward",
    "backward of the model",
]


def hooks_with_effects(section: dict[str, Any]) -> None:
    # What torch says of hooks on a model whose inputs are data.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    made = accelerator(section)
    for how in EFFECTS:
        for when in ("before", "after"):
            refused(made, r"of a pipelined model, .* changes ", **{when: lambda model, how=how: register(how, model)})
    refused(made, "a hook that forward sets on a tensor of a pipelined model", Watching)
    for kind in (Scaling, WithCollecting):
        follow(made, kind)
        made.free_memory()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    refused(made, "is a hook on all modules")
    handle.remove()
    follow(made)
    made.end_training()


@WORLDS
def test_hooks_that_write_elsewhere_are_refused(world, section) -> None:
    spawn(hooks_with_effects, world, section)


# ---- hooks of parameters ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Its first and its last layer are one parameter, which two stages hold."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.words.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.words(x)))))


def of_tied(model: Any) -> None:
    model.words.weight.register_hook(lambda gradient: gradient / gradient.norm())


def accumulated(model: Any) -> None:
    model.calls = []

    def halve(parameter: Any) -> None:
        model.calls.append(1)
        parameter.grad.mul_(0.5)

    def move(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(0.05 * parameter.grad)
        parameter.grad = None

    for one in (model.layers[0].weight, model.head.weight):
        one.register_post_accumulate_grad_hook(halve)
    model.layers[2].weight.register_post_accumulate_grad_hook(move)


def parameter_hooks(section: dict[str, Any]) -> None:
    made = accelerator(section)
    for when in ("before", "after"):
        plain, model = follow(made, **{when: accumulated})
        assert len(plain.calls) == len(model.calls) == 6
        made.free_memory()
        follow(made, Tied, **{when: of_tied})
        made.free_memory()
    made.end_training()


@WORLDS
def test_hooks_of_parameters_are_given_what_the_whole_batch_added(world, section) -> None:
    spawn(parameter_hooks, world, section)


def measured(section: dict[str, Any]) -> None:
    """A hook that reads gradients knows those of one stage: it raises on the others."""
    made = accelerator(section)
    for when in ("before", "after"):
        norms: list[float] = []

        def measure(model: Any, norms: list[float] = norms) -> None:
            for one in model.parameters():
                one.register_hook(lambda gradient: norms.append(gradient.norm().item()))

        torch.manual_seed(0)
        model = Net()
        if when == "before":
            measure(model)
        model = made.prepare(model)
        if when == "after":
            measure(model)
        with pytest.raises(UsageError, match="lies on another pipeline stage"):
            made.backward(classify(model, batch(0)))
        made.free_memory()
    made.end_training()


@WORLDS
def test_hooks_that_measure_gradients_are_refused(world, section) -> None:
    spawn(measured, world, section)


def not_of_the_whole() -> None:
    # Parameters are averaged over ranks after backward.
    made = accelerator({"pipeline_parallel_size": 2})
    model = made.prepare(Net())
    with pytest.raises(UnsupportedError, match="before it is complete"):
        model.layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    made.end_training()


def test_accumulated_gradients_of_one_replica_are_refused() -> None:
    spawn(not_of_the_whole, 4)


# ---- parameters as one, and optimizers of the script -----------------------------------------------------------------


class Normed(torch.optim.Optimizer):
    """Does not ask whether there is a gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad / one.grad.norm() * group["lr"])


def joined(model: Any) -> None:
    nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector(model.parameters()), model.parameters())


def assigned(model: Any) -> None:
    total = sum(one.detach().sum() for one in model.parameters())
    for one in model.parameters():
        one.data = one.data - 0.1 * total


def other_things(section: dict[str, Any]) -> None:
    made = accelerator(section)
    follow(made, optimizer=Normed)
    made.free_memory()
    refused(made, "joins it with others", loss=writing(joined))
    made.end_training()


def writing(write: Callable[[Any], None]) -> Callable[[Any, Any], Tensor]:
    turns: dict[Any, int] = {}

    def loss(model: Any, one: Any) -> Tensor:
        turns[model] = turns.get(model, 0) + 1
        if turns[model] == 2:
            write(model)
        return F.cross_entropy(model(one.x), one.labels)

    return loss


def assigning(section: dict[str, Any]) -> None:
    follow(accelerator(section), loss=writing(assigned))


@WORLDS
def test_own_optimizers_and_writes_of_several_parameters(world, section) -> None:
    spawn(other_things, world, section)
    with pytest.raises(RankFailedError, match="a parameter of another pipeline stage"):
        spawn(assigning, world, section)


def tensor_parallel_refuses() -> None:
    made = accelerator(TENSOR)
    model = Net()
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UnsupportedError, match="register_post_accumulate_grad_hook"):
        made.prepare(model)
    made.end_training()


def test_accumulated_gradients_of_parts_are_refused() -> None:
    spawn(tensor_parallel_refuses, 2)


def averaged_after(section: dict[str, Any]) -> list[str]:
    """With several data-parallel ranks hooks are called before gradients are averaged."""
    said = []
    hooks: dict[str, Any] = {
        "mask": lambda gradient: gradient * (torch.arange(gradient.shape[-1]) % 2),
        "clamp": lambda gradient: gradient.clamp(-0.01, 0.01),
        "look": lambda gradient: None,
    }
    for name, hook in hooks.items():
        for when in ("before", "after"):
            made = accelerator(section)
            torch.manual_seed(0)
            model: Any = Net()
            if when == "before":
                model.head.weight.register_hook(hook)
            model = made.prepare(model)
            if when == "after":
                model.head.weight.register_hook(hook)
            try:
                made.backward(classify(model, batch(0)))
                said.append(f"{name}: nothing")
            except UnsupportedError as error:
                said.append(f"{name}: {error}")
            made.end_training()
    return said


@pytest.mark.parametrize("section", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
def test_hooks_that_are_not_linear_are_refused_with_several_replicas(section) -> None:
    for said in spawn(averaged_after, 4, section):
        assert said[:2] == ["mask: nothing"] * 2
        assert all("is not linear" in each for each in said[2:4])
        assert all("returns nothing" in each for each in said[4:])
        assert all("head.weight" in each for each in said[2:])
