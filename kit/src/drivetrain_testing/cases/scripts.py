"""Checks what ordinary scripts do with a prepared model: they get the numbers of one process, or an error.

A refusal is an error of :class:`~drivetrain.errors.UnsupportedError` or :class:`~drivetrain.errors.UsageError` on every
rank, before anything was updated. A backend that trains on after one of these calls trains what the script asked for.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import EMA
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain_testing import diagnosis, models
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import assert_same_state, backward, full_state, share

STEPS, ROWS = 4, 12


class Encoder(nn.Module):
    """Has methods that call the model and methods that do not, a second head, and an attribute that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(models.FEATURES, 8)
        self.head = nn.Linear(8, models.CLASSES)
        self.scale = 1.0

    def encode(self, x: Tensor) -> Tensor:
        """Features, ``(B, F) -> (B, 8)``."""
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encode(x)) * self.scale
        return logits

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss, 0-d, through the model's own call."""
        return F.cross_entropy(self(x), y)


@dataclass
class Logits:
    """An output of a type that no tree walk of torch knows."""

    values: Tensor


class Wrapped(Encoder):
    """Returns a dataclass."""

    def forward(self, x: Tensor) -> Any:
        return Logits(super().forward(x))


class Tied(Encoder):
    """Two layers share a weight, and a buffer belongs to the state."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, models.CLASSES)
        self.again.weight = self.head.weight
        self.register_buffer("offset", torch.arange(models.CLASSES) / 8)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encode(x)
        logits: Tensor = self.head(features) + self.again(features.square()) + self.offset
        return logits


class InOneMemory(Encoder):
    """Two parameters share their memory: what one update writes, both have."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, models.CLASSES)
        self.again.weight.data = self.head.weight.data

    def forward(self, x: Tensor) -> Tensor:
        features = self.encode(x)
        logits: Tensor = self.head(features) + self.again(features.square())
        return logits


class Convolved(nn.Module):
    """A convolution, whose weight has a second order in memory, and a square weight, which has a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, (1, 3), padding=(0, 1))
        self.square, self.last = nn.Linear(12, 12), nn.Linear(12, models.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.view(-1, 2, 1, 3))).flatten(1)
        logits: Tensor = self.last(torch.tanh(self.square(hidden)))
        return logits


class Columns(Convolved):
    """Weights that do not lie row by row: ``channels_last``, and by columns as those of a transposed matrix do."""

    def __init__(self) -> None:
        super().__init__()
        self.first.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.square.weight = nn.Parameter(self.square.weight.detach().t().contiguous().t())


class Writing(Encoder):
    """Forward writes what it computes from its batch to a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.bias.add_(x.mean())
        return super().forward(x)


class Masked(Encoder):
    """A hook on a parameter, set before ``prepare``, keeps half of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(models.FEATURES) % 2
        self.body.weight.register_hook(lambda gradient: gradient * mask.to(gradient))  # type: ignore[no-untyped-call]


Loss = Callable[[Any, Tensor, Tensor], Tensor]


def _plainly(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    x, y = models.dense_data(STEPS * ROWS)
    for step in range(STEPS):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        yield x[rows], y[rows]


def _built(kind: type[nn.Module]) -> Any:
    with models.seeded(3):
        return kind()


def compare(
    kit: Kit,
    what: str,
    loss: Loss = _plainly,
    *,
    kind: type[nn.Module] = Encoder,
    between: Callable[[Any, Any, int], None] = lambda *_: None,
    after: Callable[[Any], None] = lambda _: None,
    window: int = 1,
) -> None:
    """Train by a plain loop and through the backend; both end with the same weights, or the backend refuses.

    Args:
        kit: the backend.
        what: the script does, for the error.
        loss: ``loss(model, x, y)``, a mean.
        kind: the model.
        between: called with model, optimizer and step before each step's forward.
        after: called with the model after each backward.
        window: micro-batches between two updates.
    """
    # First, since torch's autograd knows only those devices that there are at its first backward.
    accelerator = kit.accelerator(gradient_accumulation_steps=window)
    plain = _built(kind)
    steps = SGD(plain.parameters(), lr=0.5)
    for step, (x, y) in enumerate(_batches()):
        between(plain, steps, step)
        backward(loss(plain, x, y) / window)
        after(plain)
        if (step + 1) % window == 0:
            steps.step()
            steps.zero_grad()
    model = _built(kind)
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
        for step, (x, y) in enumerate(_batches()):
            between(model, optimizer, step)
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, *share(accelerator, x, y)))
                after(model)
                optimizer.step()
                optimizer.zero_grad()
        found = full_state(accelerator, model)
    except (UnsupportedError, UsageError):
        return
    _assert_trained(found, plain, kit, what)


def _assert_trained(found: dict[str, Tensor], plain: nn.Module, kit: Kit, what: str) -> None:
    try:
        assert_same_state(found, dict(plain.state_dict()), max(kit.atol, 2e-5))
    except AssertionError as difference:
        raise AssertionError(
            f"{what}: no error, and the weights are not those of one process: {difference}"
        ) from difference


@case()
def the_model_is_the_users(kit: Kit) -> None:
    """``prepare`` returns the user's object: its class, name, attributes and module are as before."""
    accelerator = kit.accelerator()
    given = _built(Encoder)
    model = accelerator.prepare(given)
    assert model is given
    assert isinstance(model, Encoder)
    assert (type(model).__name__, type(model).__qualname__) == ("Encoder", "Encoder")
    assert accelerator.unwrap_model(model) is given
    assert model.scale == 1.0
    settings: Any = {"max_length": 5}
    model.generation_config = settings
    assert given.generation_config is settings
    model.eval()
    assert not any(each.training for each in given.modules())
    model.train()
    assert all(each.training for each in given.modules())


@case()
def methods_that_call_the_model(kit: Kit) -> None:
    """``model.loss(x, y)``, where the method calls ``self(x)``."""
    compare(kit, "a method that calls the model", lambda model, x, y: model.loss(x, y))
    compare(kit, "a method that calls the model", lambda model, x, y: model.loss(x, y), window=2)


@case()
def methods_that_do_not(kit: Kit) -> None:
    """``model.head(model.encode(x))``: no forward of the model runs at all."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model.head(model.encode(x)), y)

    compare(kit, "methods past the model's call", loss)
    compare(kit, "methods past the model's call", loss, window=2)


@case()
def attributes_that_forward_reads(kit: Kit) -> None:
    """An attribute that is set after ``prepare`` is what the next forward reads."""

    def between(model: Any, _optimizer: Any, step: int) -> None:
        if step == 2:
            model.scale = 3.0

    compare(kit, "an attribute set after prepare", between=between)


@case()
def layers_that_come_later(kit: Kit) -> None:
    """A head that is replaced after ``prepare`` is trained from then on, and is part of the state."""

    def between(model: Any, optimizer: Any, step: int) -> None:
        if step == 2:
            with models.seeded(9):
                model.head = nn.Linear(8, models.CLASSES).to(model.body.weight.device)
            optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.5})

    compare(kit, "a layer replaced after prepare", between=between)


@case()
def parameters_that_are_unfrozen(kit: Kit) -> None:
    """Parameters that did not require gradients in ``prepare`` are trained once they do."""

    class Frozen(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.body.requires_grad_(False)

    def between(model: Any, _optimizer: Any, step: int) -> None:
        if step == 2:
            model.body.requires_grad_(True)

    compare(kit, "parameters unfrozen after prepare", kind=Frozen, between=between)


@case()
def outputs_of_any_type(kit: Kit) -> None:
    """A model that returns a dataclass trains."""
    compare(kit, "an output that is a dataclass", lambda model, x, y: F.cross_entropy(model(x).values, y), kind=Wrapped)


@case()
def several_forwards(kit: Kit) -> None:
    """Two forwards before one backward."""
    compare(kit, "two forwards before a backward", lambda model, x, y: F.cross_entropy(model(x) + model(2 * x), y))


@case()
def parameters_that_are_written(kit: Kit) -> None:
    """``load_state_dict``, ``clamp_`` and ``mul_`` after ``prepare`` are what the next step starts from."""

    def loads(model: Any, _optimizer: Any, step: int) -> None:
        if step == 2:
            with models.seeded(11):
                values = _built(Encoder).state_dict().items()
                model.load_state_dict({name: torch.randn_like(value) for name, value in values})

    def clamps(model: Any, _optimizer: Any, step: int) -> None:
        if step:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.1, 0.1)

    def scales(model: Any, _optimizer: Any, step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.head.weight.mul_(0.5)

    for between in (loads, clamps, scales):
        compare(kit, f"a script that {between.__name__} parameters", between=between)


@case()
def weights_of_other_strides(kit: Kit) -> None:
    """Weights whose order in memory changes after ``prepare``; random numbers for any that do not lie row by row."""

    def transposes(model: Any, _optimizer: Any, step: int) -> None:
        if step == 1:
            model.square.weight.data = model.square.weight.data.t()

    def lays_out_anew(model: Any, _optimizer: Any, step: int) -> None:
        if step == 2:
            model.square.weight.data = model.square.weight.data.t().contiguous().t()

    def takes_channels_last(model: Any, _optimizer: Any, step: int) -> None:
        if step == 1:
            model.to(memory_format=torch.channels_last)

    said = {
        transposes: "a script that transposes a weight",
        lays_out_anew: "a script that lays out a weight anew",
        takes_channels_last: "channels_last after prepare",
    }
    for between, what in said.items():
        compare(kit, what, kind=Convolved, between=between)

    @torch.no_grad()
    def draws(model: Any, _optimizer: Any, step: int) -> None:
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.square.weight.data.mul_(torch.rand_like(model.square.weight.data))

    if kit.accelerator().device.type == "cpu":  # Other devices draw other numbers than the plain loop.
        compare(kit, "noise for weights by columns", kind=Columns, between=draws)


@case()
def gradients_that_are_edited(kit: Kit) -> None:
    """``p.grad.mul_``, and torch's own ``clip_grad_norm_``, between a backward and its step."""

    def halves(model: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def clips(model: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    for after in (halves, clips):
        compare(kit, f"a script that {after.__name__} gradients", after=after)


@case()
def hooks_of_parameters(kit: Kit) -> None:
    """``register_hook`` on parameters: a mask set before ``prepare``, a clamp set after it, which is not linear."""

    def clamps(model: Any, _optimizer: Any, step: int) -> None:
        if step == 1:
            model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    compare(kit, "a hook that masks a gradient", kind=Masked)
    compare(kit, "a hook that clamps a gradient", between=clamps)


@case()
def tensors_of_no_model(kit: Kit) -> None:
    """A temperature beside the model, in its optimizer: nothing reduces the gradient of what was never prepared."""

    def trained(model: Any, temperature: Tensor, step: Callable[[Tensor], None], data: Any) -> None:
        for x, y in data:
            step(F.cross_entropy(model(x) * temperature, y))

    def parts(device: Any = "cpu") -> tuple[Any, Tensor, Any]:
        model, temperature = _built(Encoder), nn.Parameter(torch.ones((), device=device))
        return model, temperature, SGD([{"params": model.parameters()}, {"params": [temperature]}], lr=0.5)

    accelerator = kit.accelerator()
    plain, expected, steps = parts()

    def plainly(loss: Tensor) -> None:
        backward(loss)
        steps.step()
        steps.zero_grad()

    trained(plain, expected, plainly, _batches())
    model, found, optimizer = parts(accelerator.device)

    def accelerated(loss: Tensor) -> None:
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    try:
        model, optimizer = accelerator.prepare(model, optimizer)
        trained(model, found, accelerated, (share(accelerator, x, y) for x, y in _batches()))
    except (UnsupportedError, UsageError):
        return
    for rank, value in enumerate(accelerator.backend.gather_object(float(found.detach()))):
        apart = abs(value - float(expected.detach()))
        assert apart <= max(kit.atol, 2e-5), f"a tensor of no prepared model: no error, and rank {rank} is {apart} off"


@case(world_sizes=(2,), applies=lambda capabilities: capabilities.multi_process)
def forwards_that_write(kit: Kit) -> None:
    """A forward that writes to a parameter what it computes from the samples of its rank."""
    compare(kit, "a forward that writes to a parameter", kind=Writing)


@case()
def averages(kit: Kit) -> None:
    """``drivetrain.EMA`` holds the average that torch's ``AveragedModel`` holds on one process."""
    accelerator = kit.accelerator()
    plain = _built(Encoder)
    steps = SGD(plain.parameters(), lr=0.5)
    expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    model = _built(Encoder)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
    average = EMA(accelerator, model, decay=0.5)
    for x, y in _batches():
        backward(_plainly(plain, x, y))
        steps.step()
        steps.zero_grad()
        expected.update_parameters(plain)
        accelerator.backward(_plainly(model, *share(accelerator, x, y)))
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    with average.averaged():
        found = full_state(accelerator, model)
    _assert_trained(found, expected.module, kit, "the weights inside EMA.averaged()")
    _assert_trained(full_state(accelerator, model), plain, kit, "the weights after EMA.averaged()")


@case()
def steps_without_the_accelerator(kit: Kit) -> None:
    """A plain ``loss.backward()``, and a step of an optimizer that was never prepared."""
    x, y = models.dense_data(ROWS)
    for prepares_optimizer in (True, False):
        accelerator = kit.accelerator()
        plain = _built(Encoder)
        steps = SGD(plain.parameters(), lr=0.5)
        backward(F.cross_entropy(plain(x), y))
        steps.step()
        model = _built(Encoder)
        optimizer: Any = SGD(model.parameters(), lr=0.5)
        try:
            if prepares_optimizer:
                model, optimizer = accelerator.prepare(model, optimizer)
            else:
                model = accelerator.prepare(model)
                optimizer = SGD(model.parameters(), lr=0.5)
            mine, labels = share(accelerator, x, y)
            loss = F.cross_entropy(model(mine), labels)
            if prepares_optimizer:
                backward(loss)
            else:
                accelerator.backward(loss)
            optimizer.step()
            found = full_state(accelerator, model)
        except (UnsupportedError, UsageError):
            continue
        _assert_trained(found, plain, kit, "loss.backward()" if prepares_optimizer else "an optimizer never prepared")


@case()
def steps_without_a_backward(kit: Kit) -> None:
    """A step without a preceding backward is refused, and changes nothing."""
    accelerator = kit.accelerator()
    model = _built(Encoder)
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = full_state(accelerator, model)
    refused = False
    try:
        optimizer.step()
    except UsageError:
        refused = True
    assert refused, "optimizer.step() before any backward: it did not raise UsageError"
    assert_same_state(full_state(accelerator, model), before, 0.0)


@case()
def parameters_in_one_memory(kit: Kit) -> None:
    """Two parameters that share their memory stay together, or ``prepare`` refuses them."""
    compare(kit, "two parameters in one memory", kind=InOneMemory)


@case()
def later_optimizers(kit: Kit) -> None:
    """The head is trained first, then all by a new optimizer, which replaces the first: also in what is saved."""

    def first(model: Any) -> Any:
        return SGD(model.head.parameters(), lr=0.5, momentum=0.9)

    def second(model: Any) -> Any:
        return SGD(model.parameters(), lr=0.2, momentum=0.5)

    accelerator = kit.accelerator()
    batches, plain = list(_batches()), _built(Encoder)
    steps = first(plain)
    for step, (x, y) in enumerate(batches):
        if step == 1:
            steps = second(plain)
        backward(_plainly(plain, x, y))
        steps.step()
        plain.zero_grad()
    model = _built(Encoder)
    optimizer: Any = first(model)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
        for step, (x, y) in enumerate(batches):
            if step == 1:
                optimizer = accelerator.prepare(second(model))
            if step == len(batches) - 1:
                accelerator.save_state(str(kit.shared / "later"))
            accelerator.backward(_plainly(model, *share(accelerator, x, y)))
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
        found = full_state(accelerator, model)
    except (UnsupportedError, UsageError):
        return
    _assert_trained(found, plain, kit, "an optimizer that replaces an earlier one")
    accelerator.load_state(str(kit.shared / "later"))
    accelerator.backward(_plainly(model, *share(accelerator, *batches[-1])))
    optimizer.step()
    _assert_trained(full_state(accelerator, model), plain, kit, "a resume of an optimizer that replaces an earlier one")


@case()
def copies(kit: Kit) -> None:
    """Deep copies and unpickled models have the full weights and the user's class, or are refused."""
    accelerator = kit.accelerator()
    model = accelerator.prepare(_built(Encoder))
    ways: tuple[Callable[[Any], Any], ...] = (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)))  # noqa: S301 (ours)
    for way in ways:
        try:
            copied = way(model)
        except (UnsupportedError, UsageError):
            continue
        assert type(copied) is Encoder
        weights = {name: value.cpu() for name, value in copied.state_dict().items()}
        with diagnosis.meaning("a deep copy has other weights than the model"):
            assert_same_state(weights, dict(_built(Encoder).state_dict()), 0.0)


@case()
def state_dicts(kit: Kit) -> None:
    """``torch.save(model.state_dict())`` after a step, on all ranks and on the main process only.

    The full state, tied parameters still one, or an error that names what to call instead; never a part.
    """
    x, y = next(_batches())
    accelerator = kit.accelerator()
    plain = _built(Tied)
    steps = SGD(plain.parameters(), lr=0.5)
    backward(_plainly(plain, x, y))
    steps.step()
    model = _built(Tied)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
    accelerator.backward(_plainly(model, *share(accelerator, x, y)))
    optimizer.step()
    optimizer.zero_grad()
    for everyone in (True, False):
        for asked in (model, accelerator.unwrap_model(model), model.head):
            if everyone or accelerator.is_main_process:
                _check_saved(asked, plain.head if asked is model.head else plain, kit)
            accelerator.wait_for_everyone()


def _check_saved(asked: nn.Module, plain: nn.Module, kit: Kit) -> None:
    file, refusal = io.BytesIO(), ""
    try:
        torch.save(asked.state_dict(), file)
    except (UnsupportedError, UsageError) as error:
        refusal = str(error)
    if refusal:
        named = "accelerator.get_state_dict" in refusal or "accelerator.save_model" in refusal
        assert named, f"state_dict() was refused without a word of what to call instead: {refusal}"
        return
    file.seek(0)
    found = torch.load(file, map_location="cpu", weights_only=True)
    assert_same_state(found, dict(plain.state_dict()), max(kit.atol, 2e-5))
    if isinstance(plain, Tied) and _keeps_ties(next(asked.parameters()).device):
        assert _tied(found), "tied parameters were saved as two"


def _tied(state: dict[str, Tensor]) -> bool:
    return state["head.weight"].data_ptr() == state["again.weight"].data_ptr()


def _keeps_ties(device: torch.device) -> bool:
    """Whether torch saves tied parameters on this device as one, of a model that was not prepared."""
    file = io.BytesIO()
    torch.save(_built(Tied).to(device).state_dict(), file)
    file.seek(0)
    return _tied(torch.load(file, map_location="cpu", weights_only=True))


@case(applies=lambda capabilities: bool({"dp_replicate", "dp_shard"} & capabilities.mesh_axes), world_sizes=(3,))
def three_ranks(kit: Kit) -> None:
    """Scripts that depend on the number of ranks, on three data-parallel ones: a mean of two may be right by luck."""
    axis = "dp_replicate" if "dp_replicate" in kit.capabilities.mesh_axes else "dp_shard"
    along = kit.along(axis, 3)
    for one in (
        methods_that_do_not,
        parameters_that_are_written,
        weights_of_other_strides,
        gradients_that_are_edited,
        hooks_of_parameters,
        tensors_of_no_model,
        forwards_that_write,
        averages,
        state_dicts,
    ):
        one(along)
