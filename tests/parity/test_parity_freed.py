"""Checks that what is freed is freed, on any backend.

After ``free_memory`` nothing refers to what a trial of a search prepared; and no tensor of an update, such as an
activation, waits for Python's garbage collector, which may run many updates later.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity_worlds import PLACES, Place
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, load_config
from drivetrain.errors import DrivetrainError
from drivetrain_testing import spawn

FP16 = {"mixed_precision": "fp16"}
SCALED = ("single", "deepspeed-2")

LAYOUTS = {
    **{name: PLACES[name] for name in ("single", "ddp-2", "fsdp-2", "tp-2", "pp-2")},
    **{name: PLACES[name] for name in ("deepspeed-1", "deepspeed-2", "deepspeed-3")},
    "dp": Place("dp", 1, {"distributed_type": "dp"}),
    "deepspeed-0": Place("deepspeed-0", 2, {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 0}}),
    # The loss scalers, torch's and DeepSpeed's, see which optimizers have stepped.
    **{f"{name}-fp16": replace(PLACES[name], config={**PLACES[name].config, **FP16}) for name in SCALED},
}

QUIET = 10
"""Looks, 20 ms apart, that must find the same tensors."""

Refs = dict[str, "weakref.ref[Any]"]


def made() -> tuple[nn.Module, torch.optim.Optimizer, Any, Any, Refs]:
    """A model and what belongs to it, with weak references to each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = TensorDataset(torch.randn(16, 8), torch.randint(4, (16,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    known = {"model": model, "layer": model[0], "optimizer": optimizer, "data": data, "loader": loader}
    known |= {"scheduler": scheduler}
    return model, optimizer, loader, scheduler, {name: weakref.ref(one) for name, one in known.items()}


def train(accelerator: Accelerator, end: str) -> Refs:
    """Train until the data or something else ends it; all strong references end with the call."""
    model, optimizer, loader, scheduler, refs = made()
    if end == "a refused prepare":
        # The model is the engine's by then.
        with pytest.raises(DrivetrainError):
            accelerator.prepare(model, optimizer, loader, scheduler, torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3)))
        return refs
    prepared: Any = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepared
    refs |= {f"prepared {index}": weakref.ref(one) for index, one in enumerate(prepared)}
    try:
        for step, (x, y) in enumerate(loader):
            if end == "an exception" and step:
                raise ZeroDivisionError
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if end == "a break":
                break
    except ZeroDivisionError:
        return refs
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            accelerator.gather_for_metrics((model(x), y))
    accelerator.get_state_dict(model)
    return refs


ENDS = ("the data", "a break", "an exception", "a refused prepare", "the data")


def search(config: Mapping[str, Any]) -> list[str]:
    """What is still alive after each trial, by how it ended; and after the accelerator's end."""
    accelerator = Accelerator(config=load_config(overrides={**config, "use_cpu": True}, environ={}))
    alive: list[str] = []
    for end in ENDS:
        refs = train(accelerator, end)
        accelerator.free_memory()
        alive += [f"after {end}: {name}" for name in still_alive(refs)]
    refs = train(accelerator, "the data")
    accelerator.end_training()
    del accelerator
    return alive + [f"after the end: {name}" for name in still_alive(refs)]


# torch deprecates TorchScript, whose modules are refused.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # from torch 2.14 on
@pytest.mark.gate("ddp-2", "deepspeed-3", "pp-2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.turns(2)
def test_nothing_outlives_a_trial(layout: str) -> None:
    place = LAYOUTS[layout]
    assert spawn(search, place.world_size, place.config, timeout=100) == [[]] * place.world_size


class Breaking(torch.autograd.Function):
    """The same value, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.value = value  # as functions do that keep more than they should
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ZeroDivisionError


def evaluated_alone(accelerator: Accelerator) -> Refs:
    """A model that has no optimizer, and that nobody has frozen."""
    model, _, loader, _, refs = made()
    model = accelerator.prepare_model(model, evaluation_mode=True)
    refs |= {name: weakref.ref(one) for name, one in model.named_parameters()}
    with torch.no_grad():
        model.eval()(loader.dataset[:8][0])
    return refs


def read_in_one_loop(accelerator: Accelerator) -> Refs:
    """Two loaders."""
    model, optimizer, loader, _, refs = made()
    other: Any = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=8)
    prepared: Any = accelerator.prepare(model, optimizer, loader, other)
    model, optimizer, loader, other = prepared
    refs |= {f"prepared {index}": weakref.ref(one) for index, one in enumerate(prepared)}
    for (x, y), (more,) in zip(loader, other, strict=True):
        accelerator.backward(F.cross_entropy(model(x + more), y))
        optimizer.step()
        optimizer.zero_grad()
    return refs


def kept_for_later(accelerator: Accelerator) -> Refs:
    """A last batch of another size than the others, whose output nothing trains on."""
    model, optimizer, _, _, refs = made()
    loader: Any = DataLoader(TensorDataset(torch.randn(15, 8)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    refs |= {name: weakref.ref(one) for name, one in model.named_parameters()}
    *_, (x,) = loader
    model(x)
    return refs


def with_a_closure(accelerator: Accelerator) -> Refs:
    """An optimizer that engines refuse which cut parameters, when the model is cut already."""
    model, *_, refs = made()
    with suppress(DrivetrainError):
        accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    return refs


class Scaled(nn.Module):
    """A model with a parameter that no engine cuts, and that fsdp reduces by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def scaled(accelerator: Accelerator) -> Refs:
    """A forward and backward of :class:`Scaled`, which cannot be cut into stages."""
    model: Any = Scaled()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    refs: Refs = {"model": weakref.ref(model), "optimizer": weakref.ref(optimizer)}
    with suppress(DrivetrainError):
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(F.cross_entropy(model(torch.randn(4, 8)), torch.arange(4)))
    return refs


BY_THEMSELVES = {
    "evaluation alone": evaluated_alone,
    "two loaders": read_in_one_loop,
    "a kept batch": kept_for_later,
    "a refused optimizer": with_a_closure,
    "a number as a parameter": scaled,
}
LIVES = (
    *("in windows", "an error in backward", "an interrupt", "a break from workers", "two models"),
    *BY_THEMSELVES,
)


def live(accelerator: Accelerator, life: str) -> Refs:
    """A trial that ends as its name says; all strong references end with the call."""
    if life in BY_THEMSELVES:
        return BY_THEMSELVES[life](accelerator)
    model, optimizer, loader, scheduler, refs = made()
    if life == "a break from workers":
        data = loader.dataset
        loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
        refs["loader"] = weakref.ref(loader)
    prepared: Any = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepared
    refs |= {f"prepared {index}": weakref.ref(one) for index, one in enumerate(prepared)}
    second: Any = None
    if life == "two models":
        other, its, *_ = made()
        second = accelerator.prepare(other, its)
        refs |= {f"second {index}": weakref.ref(one) for index, one in enumerate(second)}
    try:
        for x, y in loader:
            # A window of two that is left open.
            with accelerator.accumulate(model):
                output = model(x)
                if life == "an error in backward":
                    output = Breaking.apply(output)
                accelerator.backward(F.cross_entropy(output, y))
                if life == "an interrupt":
                    raise KeyboardInterrupt
                optimizer.step()
                optimizer.zero_grad()
            if second is not None:
                accelerator.backward(F.cross_entropy(second[0](x), y))
                second[1].step()
                second[1].zero_grad()
            if life == "a break from workers":
                break
    except (ZeroDivisionError, KeyboardInterrupt):
        return refs
    return refs


def still_alive(refs: Refs) -> list[str]:
    """Names of what is not freed, given a moment: a thread of the monitor may be in the middle of a look at a model."""
    end = time.monotonic() + 5
    while True:
        gc.collect()
        names = [name for name, one in refs.items() if one() is not None]
        if not names or time.monotonic() > end:
            return names
        time.sleep(0.05)


def lives(config: Mapping[str, Any], which: tuple[str, ...]) -> list[str]:
    """Return what is alive after each trial; each life is tried twice."""
    settings = {**config, "use_cpu": True, "gradient_accumulation_steps": 2}
    accelerator = Accelerator(config=load_config(overrides=settings, environ={}))
    alive: list[str] = []
    for life in (*which, *which):
        refs = live(accelerator, life)
        accelerator.free_memory()
        alive += [f"after {life}: {name}" for name in still_alive(refs)]
    accelerator.end_training()
    return alive


@pytest.mark.gate("deepspeed-2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.turns(2)
def test_nothing_outlives_trials_that_end_in_other_ways(layout: str) -> None:
    place = LAYOUTS[layout]
    # A stage whose neighbour's backward fails waits for it, as it does without us.
    which = tuple(life for life in LIVES if not (layout == "pp-2" and life == "an error in backward"))
    assert spawn(lives, place.world_size, place.config, which, timeout=200) == [[]] * place.world_size


def said_twice(config: Mapping[str, Any]) -> list[list[str]]:
    """What is warned of in each of two trials."""
    settings = {**config, "use_cpu": True, "gradient_accumulation_steps": 2}
    accelerator = Accelerator(config=load_config(overrides=settings, environ={}))
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    for name in ("drivetrain", "drivetrain_megatron"):
        logging.getLogger(name).addHandler(listener)
    trials = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        x = torch.randn(8, 8, requires_grad=config["distributed_type"] == "ddp")
        loss = F.cross_entropy(model(x), torch.arange(8) % 4)
        if config["distributed_type"] == "megatron" and "pipeline_parallel_size" in config["megatron"]:
            loss.item()
        accelerator.backward(loss)
        optimizer.step()  # without `accumulate`, in a window of two
        optimizer.zero_grad()
        begun = time.monotonic()
        speaks = config["distributed_type"] == "ddp" and accelerator.is_main_process
        while speaks and time.monotonic() - begun < 20 and not _has_same_inputs(said):
            time.sleep(0.1)
        trials.append(sorted(said))
        said.clear()
        accelerator.free_memory()
    accelerator.end_training()
    return trials


def _has_same_inputs(said: list[str]) -> bool:
    return any("All ranks have given the same inputs" in sentence for sentence in said)


SENTENCES = {
    "ddp-2": ["All ranks have given the same inputs", "a leaf of shape", "An optimizer stepped"],
    "pp-2": ["An optimizer stepped", "The output of a pipelined model is read"],
}


@pytest.mark.parametrize("layout", SENTENCES)
def test_what_is_said_once_of_a_model_is_said_of_the_next(layout: str) -> None:
    place = LAYOUTS[layout]
    first, second = spawn(said_twice, place.world_size, place.config, timeout=100)[0]
    assert first == second
    for sentence in SENTENCES[layout]:
        assert any(sentence in each for each in first), (sentence, first)


def waiting(config: Mapping[str, Any]) -> list[str]:
    """Tensors that are left of some updates without a collection, and that one would free."""
    accelerator = Accelerator(config=load_config(overrides={**config, "use_cpu": True}, environ={}))
    model, optimizer, loader, scheduler, _ = made()
    prepared: Any = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepared

    def update(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(batch[0]), batch[1]))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def tensors() -> dict[int, str]:
        """Those that are alive. Gloo's threads hold the tensor of a collective for a moment after its call."""
        found: list[dict[int, str]] = []
        while len(found) < QUIET or any(one.keys() != found[-1].keys() for one in found[-QUIET:]):
            alive = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
            found.append({id(one): f"{type(one).__name__} {list(one.shape)}" for one in alive})
            del alive
            time.sleep(0.02)
        return found[-1]

    (batch,) = [batch for batch, _ in zip(loader, range(1), strict=False)]
    for _ in range(3):  # The first ones trace, make buckets and moments.
        update(batch)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            update(batch)
        before = tensors()
        gc.collect()
        after = tensors()
    finally:
        gc.enable()
    accelerator.end_training()
    return [told for one, told in before.items() if one not in after]


@pytest.mark.gate("fsdp-2", "tp-2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.turns(2)
def test_no_tensor_of_an_update_waits_for_the_collector(layout: str) -> None:
    place = LAYOUTS[layout]
    assert spawn(waiting, place.world_size, place.config, timeout=100) == [[]] * place.world_size
