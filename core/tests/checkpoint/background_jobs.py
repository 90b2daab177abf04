"""What the ranks of the tests of saves in the background run: the user's object on the installed backends."""

from __future__ import annotations

import resource
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from drivetrain import Accelerator, ProjectConfiguration, load_config
from drivetrain.checkpoint import saver
from drivetrain.errors import CheckpointError


def run(folder=None, limit=None, width=64):
    """An accelerator with automatic naming, and a model with a used optimizer."""
    project = None
    if folder is not None:
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator, model, optimizer, count=1):
    for _ in range(count):
        x = torch.linspace(-1, 1, 32).reshape(4, 8) + accelerator.process_index
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


@contextmanager
def held_back(seconds=None):
    """Writing waits for the event that is given out, or for some time."""
    gate = threading.Event()
    write = saver.SaveWork._write

    def late(self):
        assert gate.wait(seconds if seconds is not None else 30) or seconds is not None
        return write(self)

    saver.SaveWork._write = late
    try:
        yield gate
    finally:
        gate.set()
        saver.SaveWork._write = write


def beside_job(folder):
    """Save, train on while nothing is written yet, let it be written, load."""
    accelerator, model, optimizer = run()
    with held_back() as gate:
        at_save = weights(model)
        path = accelerator.save_state(folder / "one", blocking=False)
        early = (Path(path) / "manifest.json").exists()
        step(accelerator, model, optimizer, 3)
        gate.set()
        accelerator.wait_for_checkpoint()
        moved = weights(model)
        accelerator.load_state(path)
    accelerator.wait_for_checkpoint()
    result = early, torch.equal(moved, at_save), torch.equal(weights(model), at_save)
    accelerator.end_training()
    return result


def names_job(folder):
    """Saves one after the other without waiting; what lies there after each call and at the end."""
    accelerator, model, optimizer = run(folder, limit=2)
    seen = []
    for _ in range(4):
        step(accelerator, model, optimizer)
        accelerator.save_state(blocking=False)
        accelerator.wait_for_checkpoint()
        accelerator.wait_for_everyone()
        seen.append(sorted(path.name for path in (folder / "checkpoints").iterdir()))
        accelerator.wait_for_everyone()
    accelerator.save_state(blocking=False)
    before = weights(model)
    step(accelerator, model, optimizer)
    path = accelerator.load_state()
    iteration = accelerator.save_iteration
    result = seen, Path(path).name, torch.equal(before, weights(model)), iteration
    accelerator.end_training()
    return result


def failing_job(folder, surfaces):
    """The disk of rank 1 is full while the thread writes; the error at a later call, and what is loaded then."""
    accelerator, model, optimizer = run(folder, width=4096)
    accelerator.save_state(blocking=False)
    good = weights(model)
    step(accelerator, model, optimizer)
    accelerator.wait_for_checkpoint()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if accelerator.process_index == accelerator.num_processes - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        accelerator.save_state(blocking=False)
        step(accelerator, model, optimizer)
        try:
            getattr(accelerator, surfaces)()
        except CheckpointError as problem:
            text = str(problem)
        else:
            return None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    if surfaces == "end_training":
        return text, left, True, True
    accelerator.load_state()
    loaded = torch.equal(weights(model), good)
    accelerator.save_state(blocking=False)
    accelerator.wait_for_checkpoint()
    again = torch.equal(good, weights(model)) and len(list((folder / "checkpoints").iterdir())) == 2
    accelerator.end_training()
    return text, left, loaded, again


def uneven_job(folder):
    """Ranks write at very different speeds while all of them train, which needs each other."""
    accelerator, model, optimizer = run(folder)
    for number in range(3):
        with held_back(seconds=0.3 * (accelerator.process_index == number % 2)):
            accelerator.save_state(blocking=False)
            step(accelerator, model, optimizer, 5)
            accelerator.wait_for_checkpoint()
    complete = sorted(path.name for path in (folder / "checkpoints").iterdir())
    accelerator.end_training()
    return complete


def ends_without_a_word_job(folder):
    """The script's last line is a save: it does not end the run."""
    accelerator, _, _ = run()
    accelerator.save_state(folder / "last", blocking=False)
    accelerator._close()
    return (folder / "last" / "manifest.json").exists(), [
        thread.name for thread in threading.enumerate() if thread.name == "drivetrain-save"
    ]


def observed_job(folder):
    """On which thread, and when, observers hear of it."""
    from drivetrain.registry import get_registry

    told = []
    registry = get_registry()
    registry.listens = lambda event: event == "checkpoint_saved"
    registry.notify = lambda event, accelerator, path: told.append(
        (path.name, threading.current_thread() is threading.main_thread())
    )
    accelerator, _, _ = run()
    accelerator.save_state(folder / "one", blocking=False)
    at_once = list(told)
    accelerator.end_training()
    return at_once, told




class Growing:
    """A registered object whose tensor may be larger at each save, on one rank only; or that cannot say its state."""

    def __init__(self):
        self.values, self.fails = torch.zeros(1), False

    def state_dict(self):
        if self.fails:
            raise RuntimeError("no state today")
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def planning_job(folder, backend):
    """Saves of a run that stays or does not stay as it is: how many were planned anew, and what each one holds.

    Each is ``(planned, error, loaded)``: whether plans were exchanged, what was raised, whether the numbers of its
    moment are read back.
    """
    planned = []
    make_plan = saver.make_plan

    def counted(*args):
        planned.append(1)
        return make_plan(*args)

    saver.make_plan = counted
    accelerator = Accelerator(cpu=True, config=load_config(overrides={"distributed_type": backend}, environ={}))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    growing = Growing()
    accelerator.register_for_checkpointing(growing)
    found = []

    def save(name):
        planned.clear()
        at_save, error = whole(accelerator, model), ""
        try:
            accelerator.save_state(folder / name, blocking=False)
        except CheckpointError as problem:
            error = str(problem)
        step(accelerator, model, optimizer)
        accelerator.wait_for_checkpoint()
        loaded = None
        if not error:
            moved = whole(accelerator, model)
            accelerator.load_state(folder / name)
            loaded = torch.equal(whole(accelerator, model), at_save) and not torch.equal(moved, at_save)
        found.append((len(planned), error, loaded))

    save("before the first step")
    step(accelerator, model, optimizer)
    save("with the optimizer's state")
    save("the same again")
    save("and again")
    growing.values = torch.arange(3.0) if accelerator.is_main_process else growing.values
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*custom.0 has another state.*")
        save("one rank has more")
        rows = growing.values.tolist()
        growing.values = torch.zeros(1)
        growing.fails = accelerator.process_index == 1
        save("a rank cannot")
        growing.fails = False
    save("as it was at first")
    save("and again, at last")
    accelerator.end_training()
    return found, rows


def whole(accelerator, model):
    """All parameters of the model on every rank."""
    parts = [tensor.flatten() for _, tensor in model._drivetrain.trainable.full_state_dict()]
    return torch.cat(parts).detach().clone()
