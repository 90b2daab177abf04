"""Checks checkpoints: a run that is saved and resumed, also on other ranks, equals one that never stopped."""

from __future__ import annotations

import os
import random
import signal
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.checkpoint.saver import SaveWork
from drivetrain.errors import CheckpointMismatchError, UnsupportedError
from drivetrain_testing import diagnosis, models
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import Scenario, adamw, assert_same_state, full_state, reference

GLOBAL_BATCH, MICRO_STEPS, CUT = 12, 6, 4
"""Samples per micro-step over all ranks, micro-steps in an epoch, and after how many of them the run is cut."""


def _falling(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


RUN = Scenario(
    "dense", global_batch=GLOBAL_BATCH, micro_steps=MICRO_STEPS, epochs=2, window=2, optimizer=adamw, scheduler=_falling
)
"""Two epochs; adaptive moments, a scheduler and accumulation windows all leave traces when they are not restored."""


class Run:
    """The prepared objects of :data:`RUN`."""

    def __init__(self, kit: Kit, seed: int = 1) -> None:
        self.accelerator = kit.accelerator(gradient_accumulation_steps=RUN.window)
        model = models.build(RUN.model, seed)
        optimizer = adamw(model)
        loader: Any = RUN.loader(self.accelerator.backend.topology.dp_size)
        self.model: Any
        self.optimizer: Any
        self.scheduler: Any
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, _falling(optimizer)
        )

    def micro_step(self, x: Tensor, y: Tensor) -> None:
        """One pass through the loop's body."""
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(F.cross_entropy(self.model(x), y))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def epoch(self) -> int:
        """The rest of the current epoch; how many micro-steps that was."""
        count = 0
        for x, y in self.loader:
            self.micro_step(x, y)
            count += 1
        return count

    def state(self) -> dict[str, Tensor]:
        """Parameters in full."""
        return full_state(self.accelerator, self.model)


def first_part(kit: Kit) -> dict[str, Tensor]:
    """Train, save in the middle of the first epoch, and go on to the end: what an uninterrupted run gives."""
    return _first_part(kit)[1]


def _first_part(kit: Kit) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters where it was cut, and at the end."""
    run = Run(kit)
    cut: dict[str, Tensor] = {}
    for number, (x, y) in enumerate(run.loader, start=1):
        run.micro_step(x, y)
        if number == CUT:
            run.accelerator.save_state(str(kit.shared / "cut"))
            cut = run.state()
    run.epoch()
    return cut, run.state()


def _load(accelerator: Any, kit: Kit, name: str = "cut") -> None:
    """Load the checkpoint; ignores the warning that a larger world derives further random states."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random state.*")
        accelerator.load_state(str(kit.shared / name))


def second_part(kit: Kit) -> dict[str, Tensor]:
    """Build everything again from other parameters, load, and train to the end."""
    return _second_part(kit)[1]


def _second_part(kit: Kit) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters after the load, and at the end."""
    run = Run(kit, seed=77)
    _load(run.accelerator, kit)
    cut = run.state()
    rest = run.epoch()
    assert rest == MICRO_STEPS - CUT, f"{rest} micro-steps left of the epoch, not {MICRO_STEPS - CUT}"
    whole = run.epoch()
    assert whole == MICRO_STEPS, f"{whole} micro-steps in the next epoch, not {MICRO_STEPS}"
    return cut, run.state()


# ---- buffers, over two jobs; see ``suite.test_state_travels`` -------------------------------------------------------


def _batch_normed(kit: Kit, seed: int) -> tuple[Any, Any, Any] | None:
    """A model whose buffers are a function of the seed, prepared; ``None`` where the backend takes no batch norms."""
    accelerator = kit.accelerator()
    model: Any = models.build("batch_normed", seed)
    with models.seeded(seed):
        model.norm.running_mean.uniform_(-1, 1)
        model.norm.running_var.uniform_(0.5, 2)
    model.norm.num_batches_tracked.fill_(seed)
    try:
        return accelerator, *accelerator.prepare(model, adamw(model))
    except UnsupportedError:
        return None


def departure(kit: Kit) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """:func:`first_part`, then a run with batch norms that is saved: the end of the one, what the other saved."""
    end = first_part(kit)
    kit.made.pop().end_training()
    made = _batch_normed(kit, seed=5)
    if made is None:
        return end, {}
    accelerator, model, optimizer = made
    x, y = models.dense_data(12)
    x, y = x.to(accelerator.device), y.to(accelerator.device)
    try:
        for _ in range(2):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    except UnsupportedError:
        pass  # Statistics that mix what an engine takes apart: they travel as they were made.
    accelerator.save_state(str(kit.shared / "buffers"))
    return end, full_state(accelerator, model)


def arrival(kit: Kit) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """:func:`second_part`, then what a load brings of the run with batch norms, which evaluation must use."""
    end = second_part(kit)
    made = _batch_normed(kit, seed=6) if (kit.shared / "buffers").exists() else None
    if made is None:
        return end, {}
    accelerator, model, _ = made
    _load(accelerator, kit, "buffers")
    state = full_state(accelerator, model)
    x, _ = models.dense_data(6)
    plain = models.build("batch_normed").eval()
    plain.load_state_dict(state)
    with torch.no_grad(), diagnosis.meaning("evaluation after the load does not use the statistics that were loaded"):
        output = model.eval()(x.to(accelerator.device)).cpu()
        torch.testing.assert_close(output, plain(x), rtol=0, atol=max(kit.atol, 1e-5))
    return end, state


def assert_arrived(saved: dict[str, Tensor], loaded: dict[str, Tensor]) -> None:
    """The state of the run with batch norms, to the last bit; nothing where one of the two backends takes none."""
    if saved and loaded:
        buffers = {name for name, _ in models.build("batch_normed").named_buffers()}
        for what, chosen in (("buffers", buffers), ("parameters", set(saved) - buffers)):
            with diagnosis.meaning(f"load_state did not bring back the {what} that another job saved"):
                here, there = ({name: state[name] for name in state if name in chosen} for state in (loaded, saved))
                assert_same_state(here, there, 0.0)


def _killed(kit: Kit, method: str, victim: str) -> None:
    """Train and save as :func:`first_part`, then let one rank die in the middle of the next save to the same place."""
    run = Run(kit)
    topology = run.accelerator.backend.topology
    for number, (x, y) in enumerate(run.loader, start=1):
        run.micro_step(x, y)
        if number == CUT:
            run.accelerator.save_state(str(kit.shared / "cut"))
    if topology.rank == (0 if victim == "first" else topology.world_size - 1):

        def die(*_: Any, **__: Any) -> None:
            (kit.shared / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(SaveWork, method, die)
    run.accelerator.save_state(str(kit.shared / "cut"))


def killed_while_writing(kit: Kit) -> None:
    """The last rank dies before it has written its part."""
    _killed(kit, "_write", "last")


def killed_while_completing(kit: Kit) -> None:
    """The main process dies when everything is written, before the checkpoint appears."""
    _killed(kit, "_complete", "first")


killed_parts = {"writing": killed_while_writing, "completing": killed_while_completing}


@case(guards="accelerate#3306, TensorAuto/OpenTau#180")
def resumed_equals_uninterrupted(kit: Kit) -> None:
    """Cut in the middle of an epoch and resumed in the same process: parameters, moments, scheduler, position."""
    saved, expected = _first_part(kit)
    kit.made.pop().end_training()
    loaded, end = _second_part(kit)
    with diagnosis.meaning("load_state did not bring back the parameters that were saved"):
        assert_same_state(loaded, saved, 0.0)
    with diagnosis.meaning(
        "load_state brought back the parameters, and the run then goes another way: the optimizer's state, its rates, "
        "the scheduler or the accumulation window did not come back"
    ):
        assert_same_state(end, expected, kit.atol)
    assert_same_state(expected, reference(RUN).state, max(kit.atol, 1e-5))


@case()
def load_undoes(kit: Kit) -> None:
    """``load_state`` into a run that has gone on brings it back, buffers and moments included."""
    accelerator = kit.accelerator()
    model: Any = models.build("counting")
    optimizer: Any = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = models.dense_data(6)
    x, y = x.to(accelerator.device), y.to(accelerator.device)

    def steps(count: int) -> dict[str, Tensor]:
        for _ in range(count):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return full_state(accelerator, model)

    saved = steps(2)
    accelerator.save_state(str(kit.shared / "here"))
    expected = steps(3)
    accelerator.load_state(str(kit.shared / "here"))
    with diagnosis.meaning("load_state did not bring back the parameters and buffers that were saved"):
        assert_same_state(full_state(accelerator, model), saved, 0.0)
    with diagnosis.meaning("load_state brought back parameters and buffers, and not the optimizer's state"):
        assert_same_state(steps(3), expected, kit.atol)


@case(guards="IntelLabs/distiller#145")
def parameter_groups_come_back(kit: Kit) -> None:
    """A learning rate that the script has changed since the save is the saved one after a load, and is used."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = models.dense_data(6)
    x, y = x.to(accelerator.device), y.to(accelerator.device)

    def step() -> dict[str, Tensor]:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return full_state(accelerator, model)

    step()
    accelerator.save_state(str(kit.shared / "rates"))
    expected = step()
    optimizer.param_groups[0]["lr"] = 0.001
    optimizer.param_groups[0]["momentum"] = 0.0
    accelerator.load_state(str(kit.shared / "rates"))
    rates = {name: optimizer.param_groups[0][name] for name in ("lr", "momentum")}
    said = f"load_state did not bring back the parameter groups that were saved: lr 0.5 and momentum 0.9 are {rates}"
    assert rates == {"lr": 0.5, "momentum": 0.9}, said
    with diagnosis.meaning("load_state brought back the parameter groups, and the next step does not use them"):
        assert_same_state(step(), expected, kit.atol)


@case()
def every_rank_may_be_asked(kit: Kit) -> None:
    """The checkpoint is complete when ``save_state`` returns, on every rank: all may read it at once."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense", seed=3)
    optimizer: Any = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    for name in ("one", "two"):
        accelerator.save_state(str(kit.shared / name))
        assert (kit.shared / name / "manifest.json").is_file(), (
            f"{name} is not complete on rank {accelerator.process_index}"
        )
    accelerator.load_state(str(kit.shared / "two"))


@case()
def random_numbers_go_on(kit: Kit) -> None:
    """Python's and torch's random numbers after a load are those after the save."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    model, _ = accelerator.prepare(model, adamw(model))
    # A checkpoint holds the random state of each data-parallel coordinate.
    torch.manual_seed(40 + accelerator.backend.topology.dp_rank)
    random.seed(50 + accelerator.backend.topology.dp_rank)
    accelerator.save_state(str(kit.shared / "random"))
    expected = (torch.rand(3).tolist(), random.random())
    accelerator.load_state(str(kit.shared / "random"))
    assert (torch.rand(3).tolist(), random.random()) == expected


@case()
def own_objects_travel(kit: Kit) -> None:
    """Objects of ``register_for_checkpointing`` are saved and restored."""

    class Counter:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    model, _ = accelerator.prepare(model, adamw(model))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    counter.value = 7
    accelerator.save_state(str(kit.shared / "own"))
    counter.value = 0
    accelerator.load_state(str(kit.shared / "own"))
    assert counter.value == 7


class Wider(models.Dense):
    """Another model: one parameter has another shape, one is new, one is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, 16, bias=False)
        self.second = nn.Linear(16, models.CLASSES + 1)
        self.third = nn.Parameter(torch.zeros(2))


@case()
def mismatches_are_named(kit: Kit) -> None:
    """A checkpoint of another model is refused on every rank, and the error names the keys."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    model, _ = accelerator.prepare(model, adamw(model))
    accelerator.save_state(str(kit.shared / "dense"))
    kit.made.pop().end_training()
    accelerator = kit.accelerator()
    other: Any = Wider()
    accelerator.prepare(other, adamw(other))
    with pytest.raises(CheckpointMismatchError) as caught:
        accelerator.load_state(str(kit.shared / "dense"))
    for name in ("first.bias", "second.weight", "third"):
        assert name in str(caught.value), f"{name} is not named: {caught.value}"


@case()
def saves_a_plain_model(kit: Kit) -> None:
    """``save_model`` writes safetensors under the user's names, tied weights once, that a plain module loads."""
    from safetensors.torch import load_file

    accelerator = kit.accelerator()
    for name in ("dense", "words"):
        model: Any = models.build(name)
        model = accelerator.prepare_model(model)
        accelerator.save_model(model, str(kit.shared / name))
        accelerator.wait_for_everyone()
        loaded = load_file(str(kit.shared / name / "model.safetensors"))
        plain = models.build(name, seed=99)
        missing, unexpected = plain.load_state_dict(loaded, strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= ({"head.weight", "table.weight"} if name == "words" else set()), missing
        assert len(missing) < 2
        assert_same_state(dict(plain.state_dict()), full_state(accelerator, model), 0.0)


@case(applies=lambda capabilities: "fp16" in capabilities.precisions)
def loss_scale_travels(kit: Kit) -> None:
    """The loss scale that an overflow has lowered is the one after a load."""
    scales = []
    for phase in ("save", "load"):
        accelerator = kit.accelerator(mixed_precision="fp16")
        if accelerator.scaler is None:  # an engine that scales by its own means
            return
        model: Any = models.build("dense")
        optimizer: Any = adamw(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        if phase == "save":
            x, y = models.dense_data(6)
            loss = F.cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device))
            accelerator.backward(loss * float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state(str(kit.shared / "scale"))
        else:
            accelerator.load_state(str(kit.shared / "scale"))
        scales.append(accelerator.scaler.get_scale())
        kit.made.pop().end_training()
    assert scales[0] == 32768.0, f"an overflow lowered the loss scale to {scales[0]}, not from 65536 to 32768"
    assert scales[1] == scales[0], f"load_state did not bring back the loss scale: {scales[0]} is {scales[1]}"


# ---- the order of samples, over two jobs; see ``suite.test_samples_after_resume`` -----------------------------------


def _numbers(accelerator: Any) -> Any:
    dataset = TensorDataset(torch.arange(GLOBAL_BATCH * MICRO_STEPS))
    return accelerator.prepare(
        DataLoader(dataset, batch_size=GLOBAL_BATCH // accelerator.backend.topology.dp_size, shuffle=True)
    )


def shuffled_first(kit: Kit) -> list[int]:
    """Sample numbers of the first micro-steps of a shuffled epoch, then a save."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    model, _ = accelerator.prepare(model, adamw(model))
    seen: list[int] = []
    for count, (numbers,) in enumerate(_numbers(accelerator), start=1):
        seen += accelerator.gather(numbers).tolist()
        if count == CUT:
            accelerator.save_state(str(kit.shared / "cut"))
            break
    return seen


def shuffled_rest(kit: Kit) -> tuple[list[int], list[int]]:
    """Sample numbers of the rest of that epoch, and of the next one."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    model, _ = accelerator.prepare(model, adamw(model))
    loader = _numbers(accelerator)
    _load(accelerator, kit)
    rest, following = (
        [number for (numbers,) in loader for number in accelerator.gather(numbers).tolist()] for _ in range(2)
    )
    return rest, following
