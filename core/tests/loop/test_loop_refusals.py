"""Makes each mistake, which is refused in words, and then does what the words advise, which works."""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    EMA,
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ParallelismConfig,
    ProfileKwargs,
    load_config,
)
from drivetrain.api import Mesh, ProcessInfo, Topology
from drivetrain.errors import DrivetrainError
from drivetrain_testing import spawn

Case = tuple[Callable[[], Any], str, Callable[[], Any]]
CASES: dict[str, Case] = {}
"""A mistake, words of the refusal, and what its cure says to write instead."""


def run(**settings: Any) -> Accelerator:
    return Accelerator(cpu=True, distributed_type="single", **settings)


def prepared(**settings: Any) -> Any:
    accelerator = run(**settings)
    model = nn.Linear(2, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def batches() -> Any:
    return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)


def case(name: str, words: str, advised: Callable[[], Any]) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(mistake: Callable[[], Any]) -> Callable[[], Any]:
        CASES[name] = mistake, words, advised
        return mistake

    return register


def stepped(given: Any) -> None:
    accelerator, model, _ = prepared()
    accelerator.train_step(model, given, lambda output, _: output.mean())


@case("no micro-batch", "train_step was given no micro-batch", lambda: stepped([torch.ones(4, 2)]))
def _() -> None:
    stepped([])


def trained_in_a_step(optimizer: bool) -> None:
    accelerator, model = run(), nn.Linear(2, 1)
    if optimizer:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model = accelerator.prepare(model)
    accelerator.train_step(model, torch.ones(4, 2), lambda output, _: output.mean())


@case("no optimizer", "train_step needs the model's optimizer", lambda: trained_in_a_step(True))
def _() -> None:
    trained_in_a_step(False)


def placed(*placement: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run().prepare(model, optimizer, device_placement=list(placement))


@case("device_placement of one", "was given 2 objects and a device_placement of 1 entries", lambda: placed(True, True))
def _() -> None:
    placed(True)


def left_where_it_is(**settings: Any) -> None:
    run(**settings).prepare_model(nn.Linear(2, 1), device_placement=False)


@case(
    "device_placement of a model",
    "prepare_model was given device_placement=False, and the accelerator has device_placement=True",
    lambda: left_where_it_is(device_placement=False),
)
def _() -> None:
    left_where_it_is()


@case(
    "split_batches twice",
    r"split_batches=False contradicts DataLoaderConfiguration\(split_batches=True\)",
    lambda: run(dataloader_config=DataLoaderConfiguration(split_batches=True)),
)
def _() -> None:
    run(dataloader_config=DataLoaderConfiguration(split_batches=True), split_batches=False)


@case(
    "accumulation twice",
    "both gradient_accumulation_steps and gradient_accumulation_plugin were given",
    lambda: run(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2)),
)
def _() -> None:
    run(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))


@case("no handler", "is not a keyword handler", lambda: run(kwargs_handlers=[DistributedDataParallelKwargs()]))
def _() -> None:
    run(kwargs_handlers=["DistributedDataParallelKwargs"])


@case("no activity", "unknown activity 'gpu'", lambda: profiled("cpu"))
def _() -> None:
    profiled("gpu")


def profiled(activity: str) -> None:
    with run().profile(ProfileKwargs(activities=[activity])):
        pass


@case("a pickled loader", "belongs to its run and cannot be pickled", lambda: pickled("base_dataloader"))
def _() -> None:
    pickled("")


def pickled(attribute: str) -> None:
    loader = run().prepare(batches())
    pickle.dumps(getattr(loader, attribute) if attribute else loader)


@case("a loader's state of a later release", "the loader's state has format 99", lambda: loaded({}))
def _() -> None:
    loaded({"format": 99})


def loaded(changes: dict[str, Any]) -> None:
    loader = run().prepare(batches())
    next(iter(loader))
    loader.load_state_dict(loader.state_dict() | changes)


@case("a decay beyond 1", r"EMA was given decay=1\.5", lambda: averaged(0.5))
def _() -> None:
    averaged(1.5)


def averaged(decay: float, *, updates: bool = True, inside: str = "") -> None:
    accelerator, model, optimizer = prepared()
    ema = EMA(accelerator, model, decay=decay)

    def train() -> None:
        accelerator.backward(model(torch.ones(2, 2)).mean())
        optimizer.step()

    if updates:
        train()
        ema.update()
    with ema.averaged():
        if inside == "step":
            train()
        if inside == "update":
            ema.update()


@case("no average yet", "nothing has been averaged yet", lambda: averaged(0.5))
def _() -> None:
    averaged(0.5, updates=False)


@case("a step of the average", r"an optimizer steps inside `with ema\.averaged\(\):`", lambda: averaged(0.5))
def _() -> None:
    averaged(0.5, inside="step")


@case("an update of the average", r"update\(\) inside `with ema\.averaged\(\):`", lambda: averaged(0.5))
def _() -> None:
    averaged(0.5, inside="update")


def averages_made(of_another: bool) -> None:
    accelerator, model, _ = prepared()
    EMA(accelerator, nn.Linear(2, 1) if of_another else model)


@case("another model", "Linear was not prepared by this accelerator", lambda: averages_made(of_another=False))
def _() -> None:
    averages_made(of_another=True)


def scripted() -> Any:
    with warnings.catch_warnings():  # torch is about to give up TorchScript
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 1))


class Around(nn.Module):
    """A TorchScript module in a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = scripted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@case("TorchScript", "a module of TorchScript is of a class that cannot be extended", lambda: run().prepare(Around()))
def _() -> None:
    run().prepare(scripted())


def weighed(weights: torch.Tensor) -> None:
    accelerator, model, _ = prepared()
    accelerator.backward(F.mse_loss(model(torch.ones(4, 2))[:, 0], torch.ones(4), reduction="none"), gradient=weights)


@case("weights of a loss", "add up to 4, and a loss of several processes is a mean", lambda: weighed(torch.ones(4) / 4))
def _() -> None:
    weighed(torch.ones(4))


def counted(second: dict[str, int]) -> None:
    accelerator, model, _ = prepared(gradient_accumulation_steps=2)
    for more in ({"num_items": 4}, second):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(4, 2)).sum(), **more)


@case("items for some", "backward was called with num_items and without it", lambda: counted({"num_items": 4}))
def _() -> None:
    counted({})


def clipped(foreign: bool) -> None:
    accelerator, model, _ = prepared()
    other = accelerator.prepare(nn.Linear(2, 1))
    accelerator.backward((model(torch.ones(2, 2)) + other(torch.ones(2, 2))).mean())
    accelerator.clip_grad_norm_((nn.Linear(2, 1) if foreign else model).parameters(), 1.0)


@case("parameters of no model", "these parameters belong to no prepared model", lambda: clipped(foreign=False))
def _() -> None:
    clipped(foreign=True)


def clamped(by_hook: bool) -> None:
    accelerator, model, optimizer = prepared(mixed_precision="fp16")
    if by_hook:
        model.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    accelerator.backward(model(torch.ones(4, 2)).mean())
    model.weight.grad.clamp_(-1, 1)
    optimizer.step()


@case("a hook that clamps scaled gradients", "since mixed_precision: fp16 multiplies the loss", lambda: clamped(False))
def _() -> None:
    clamped(True)


class Silent:
    """Has neither ``state_dict`` nor ``load_state_dict``."""


@case("no state_dict", "Silent cannot be saved", lambda: run().save({"x": torch.ones(1)}, io.BytesIO(), False))
def _() -> None:
    run().register_for_checkpointing(Silent())


@case(
    "an open file of safetensors",
    "safe_serialization writes to a path, not to an open file",
    lambda: run().save({"x": torch.ones(1)}, "here.safetensors", safe_serialization=True),
)
def _() -> None:
    run().save({"x": torch.ones(1)}, io.BytesIO(), safe_serialization=True)


@case("a process too many", r"process 1 cannot send: there are 1 processes", lambda: sent(0))
def _() -> None:
    sent(1)


def sent(source: int) -> None:
    from drivetrain.utils import broadcast

    run()
    broadcast(torch.ones(1), from_process=source)


@case("a complex maximum", r"reduction 'max' is not defined for torch\.complex64", lambda: reduced(torch.ones(1)))
def _() -> None:
    reduced(torch.ones(1, dtype=torch.complex64))


def reduced(tensor: torch.Tensor) -> None:
    run().backend.reduce(tensor, "max")


@case("nothing to join", "concatenate was given an empty sequence", lambda: joined([torch.ones(1)] * 2))
def _() -> None:
    joined([])


@case("two structures", "values of different structure cannot be concatenated", lambda: joined([[torch.ones(1)]] * 2))
def _() -> None:
    joined([torch.ones(1), [torch.ones(1)]])


def joined(values: list[Any]) -> None:
    from drivetrain.utils import concatenate

    concatenate(values)


@case("a seed that is too large", "seed 4294967296 is out of range", lambda: seeded(0))
def _() -> None:
    seeded(2**32)


def seeded(seed: int) -> None:
    from drivetrain.utils import set_seed

    set_seed(seed)


@case("no generator", "rng type 'generator' needs a generator", lambda: synchronised(torch.Generator()))
def _() -> None:
    synchronised(None)


def synchronised(generator: torch.Generator | None) -> None:
    from drivetrain.utils import synchronize_rng_state

    run()
    synchronize_rng_state("generator", generator)


@case("an unknown comparison", "'=>' compares nothing", lambda: compared(">="))
def _() -> None:
    compared("=>")


def compared(operation: str) -> None:
    from drivetrain.utils import compare_versions

    assert compare_versions("torch", operation, "1.0")


@case("neither yes nor no", "'perhaps' is neither true nor false", lambda: read_as_bool("yes"))
def _() -> None:
    read_as_bool("perhaps")


def read_as_bool(text: str) -> None:
    from drivetrain.utils import str_to_bool

    assert str_to_bool(text) == 1


@case("an object without state", r"object cannot be saved: it has no state_dict", lambda: registered(nn.Linear(1, 1)))
def _() -> None:
    registered(object())


def registered(thing: Any) -> None:
    run().register_for_checkpointing(thing)


@case("a folder without weights", "holds no weights: none of model.safetensors", lambda: weights_from("saved"))
def _() -> None:
    weights_from(".")


def weights_from(folder: str) -> None:
    from drivetrain.utils import load_checkpoint_in_model

    accelerator, model, _ = prepared()
    if folder != ".":
        accelerator.save_model(model, folder)
    load_checkpoint_in_model(nn.Linear(2, 1), folder)


@case("an unknown axis", "unknown mesh axis tq", lambda: Mesh({"tp": 2}))
def _() -> None:
    Mesh({"tq": 2})


@case("a rank outside of the mesh", "rank 2 is not in a mesh of 2", lambda: Mesh({"tp": 2}).coordinates(1))
def _() -> None:
    Mesh({"tp": 2}).coordinates(2)


@case(
    "a closure under fp16",
    "an optimizer closure cannot be combined with loss scaling",
    lambda: stepped_with_closure("bf16"),
)
def _() -> None:
    stepped_with_closure("fp16")


def stepped_with_closure(precision: str) -> None:
    accelerator, model, optimizer = prepared(mixed_precision=precision)

    def closure() -> Any:
        loss = model(torch.ones(2, 2)).mean()
        accelerator.backward(loss)
        return loss

    optimizer.step(closure)


@case(
    "two handlers of a class",
    "two ProfileKwargs were given",
    lambda: run(kwargs_handlers=[ProfileKwargs(), DistributedDataParallelKwargs()]),
)
def _() -> None:
    run(kwargs_handlers=[ProfileKwargs(), ProfileKwargs(activities=["cpu"])])


def meshed(asked: int) -> None:
    run(
        config=load_config(overrides={"mesh": {"tp": 1}}, environ={}),
        parallelism_config=ParallelismConfig(tp_size=asked),
    )


@case("a mesh twice", r"parallelism_config says tp_size=2, and mesh\.tp is 1 \(flag mesh\.tp\)", lambda: meshed(1))
def _() -> None:
    meshed(2)


@case("weights for several devices", "load_checkpoint_in_model does not take device_map here", lambda: spread({}))
def _() -> None:
    spread({"device_map": "auto"})


@case("weights in memory", "load_checkpoint_in_model does not take offload_folder here", lambda: spread({}))
def _() -> None:
    spread({"offload_folder": "elsewhere"})


def spread(settings: dict[str, Any]) -> None:
    from drivetrain.utils import load_checkpoint_in_model

    accelerator, model, _ = prepared()
    accelerator.save_model(model, "spread")
    load_checkpoint_in_model(nn.Linear(2, 1), "spread", **settings)


class Final(nn.Linear):
    """May not be derived from, as some libraries' classes."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Final is final")


@case("a final class", "Final cannot be prepared: Final is final", lambda: run().prepare(nn.Sequential(Final(2, 1))))
def _() -> None:
    run().prepare(Final(2, 1))


class Clamp(torch.autograd.Function):
    """An autograd function of the user's, behind the loss."""

    @staticmethod
    def forward(_: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clamp(-1, 1)


def counting(form: str) -> None:
    accelerator, model, _ = prepared(count_items=form == "mean", gradient_accumulation_steps=2)
    for _ in range(2):
        with accelerator.accumulate(model):
            errors = model(torch.ones(4, 2)).pow(2)
            loss = Clamp.apply(errors.sum() if form == "sum" else errors.mean())
            accelerator.backward(loss, **({"num_items": 4} if form == "sum" else {}))


@case("a function that may compute anything", "a Python autograd function between the loss", lambda: counting("sum"))
def _() -> None:
    counting("mean")


@case("a function, and means of samples", "a Python autograd function between the loss", lambda: counting("samples"))
def _() -> None:
    counting("mean")


@case("no size", "max_shard_size='large' is not a size", lambda: exported(max_shard_size="500MiB"))
def _() -> None:
    exported(max_shard_size="large")


@case("a size of nothing", "max_shard_size='0GB' is not above 0", lambda: exported(max_shard_size=10**6))
def _() -> None:
    exported(max_shard_size="0GB")


def exported(dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    accelerator, model = run(), nn.Linear(2, 1)
    model.register_buffer("scale", torch.ones(3).to(dtype))
    accelerator.save_model(accelerator.prepare(model), "exported", **settings)


@case(
    "a dtype that files lack",
    "scale has dtype float8_e4m3fnuz, which safetensors cannot hold",
    lambda: exported(torch.float8_e4m3fn),
)
def _() -> None:
    exported(torch.float8_e4m3fnuz)


@case("two file systems", "simplecache::memory://state joins two file systems", lambda: kept("memory://state"))
def _() -> None:
    kept("simplecache::memory://state")


@case(
    "a path of an address",
    "memory:/state has one slash where an address has two",
    lambda: kept("memory://state"),
)
def _() -> None:
    kept(Path("memory://state"))


def kept(folder: Any) -> None:
    accelerator, *_ = prepared()
    accelerator.save_state(folder)
    accelerator.load_state(folder)


def process(rank: int) -> ProcessInfo:
    return ProcessInfo(rank, 2, rank, 2)


@case("a rank outside of the job", "there is no rank 2 of 2, local rank 2 of 2", lambda: process(1))
def _() -> None:
    process(2)


@case(
    "a mesh of other processes",
    r"a mesh of 4 \(dp_shard=2 x tp=2\) does not fit 2 processes",
    lambda: Topology(process(1), Mesh({"tp": 2}), "cpu"),
)
def _() -> None:
    Topology(process(1), Mesh({"dp_shard": 2, "tp": 2}), "cpu")


def meet(folder: str) -> dict[str, tuple[str, str, str]]:
    """By case: what was refused, its cure, and the error of what is advised."""
    os.chdir(folder)
    found = {}
    for name, (mistake, _, advised) in CASES.items():
        try:
            mistake()
        except DrivetrainError as error:
            what, cure = error.what, error.cure
        except Exception as error:
            what, cure = f"{type(error).__name__}: {error}", ""
        else:
            what = cure = ""
        try:
            advised()
        except Exception as error:
            found[name] = what, cure, f"{type(error).__name__}: {error}"
        else:
            found[name] = what, cure, ""
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    return spawn(meet, 1, str(tmp_path_factory.mktemp("refusals")))[0]


@pytest.mark.parametrize("name", list(CASES))
def test_a_mistake_is_refused_in_words_and_the_advice_works(name: str, found: dict[str, tuple[str, str, str]]) -> None:
    what, cure, then = found[name]
    assert re.search(CASES[name][1], what)
    assert cure
    assert then == ""
