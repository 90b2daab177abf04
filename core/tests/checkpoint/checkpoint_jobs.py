"""What the ranks of the checkpoint tests run: a tiny model, replicated or sharded, on real gloo."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import resource
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from drivetrain.backend import PortableState, RunSettings, Trainable
from drivetrain.backends import portable
from drivetrain.checkpoint import TrainingState, load, read_manifest, save, saver
from drivetrain.distributed.current import World
from drivetrain.distributed.rng import set_seed
from drivetrain.errors import CheckpointError
from drivetrain.launch.environment import read_process_info
from drivetrain_testing.resident_memory import ResidentMemory


class Plain(Trainable):
    """A module and its optimizers as they are; only what a checkpoint asks of a trainable is there."""

    def __init__(self, module, optimizers=()):
        self.module, self.optimizers = module, list(optimizers)

    def portable_state(self):
        return portable.portable_state(self.module, self.optimizers)

    def portable_template(self, saved):
        return portable.portable_template(self.module, self.optimizers, saved)

    def load_portable_state(self, state):
        portable.load_portable_state(self.module, self.optimizers, state)


# The rest of the contract is nobody's business here; other tests hold it.
Plain.__abstractmethods__ = frozenset()


class Net(nn.Module):
    """Tied weights, a buffer, a volatile buffer, a parameter smaller than any world, a frozen block."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.body = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("volatile", torch.zeros(3), persistent=False)

    def forward(self, x):
        h = self.frozen(self.norm(torch.relu(self.body(self.embed(x)))))
        return self.head(h * self.gain)


class Counter:
    """The user's own registered object."""

    def __init__(self):
        self.state = {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@contextlib.contextmanager
def started():
    backend = World(RunSettings(process=read_process_info(), device_type="cpu"))
    backend.start()
    try:
        yield backend
    finally:
        backend.barrier()
        backend.stop()


def two_groups(net):
    decay = [net.embed.weight, net.body.weight]
    rest = [net.body.bias, net.gain, *net.norm.parameters(), *net.frozen.parameters()]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01, betas=(0.8, 0.9)
    )


def build(layout, seed, width=8):
    """Replicated (plain tensors) or sharded (DTensors) with the same values for the same seed."""
    torch.manual_seed(seed)
    net = Net(width)
    if layout == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net, mesh=mesh)
    elif layout == "hybrid":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(net, mesh=mesh)
    optimizer = two_groups(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return net, optimizer, scheduler


def train(net, optimizer, scheduler, steps, first=0):
    """Every rank sees the same batch, so that replicas stay equal and sharded gradients average to the same."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, 10, (6,), generator=generator)
        loss = nn.functional.cross_entropy(net(x), (x + 1) % 10)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_state(net, optimizer, scheduler, counter=None):
    objects = {"scheduler.0": scheduler}
    if counter is not None:
        objects["custom.0"] = counter
    return TrainingState([Plain(net, [optimizer])], objects, {"step": 0}, rng=True)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def everything(net, optimizer):
    """Names and values of the whole state, gathered."""
    values = {name: whole(tensor.detach()).clone() for name, tensor in net.state_dict().items()}
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            values[f"{names[id(parameter)]}.{slot}"] = whole(torch.as_tensor(value)).clone()
    return values


def save_job(path, layout, steps=3, seed=0):
    """Train, save, go on; returns the whole state at the save and the losses after it."""
    with started() as backend:
        net, optimizer, scheduler = build(layout, seed)
        counter = Counter()
        train(net, optimizer, scheduler, steps)
        counter.state = {"seen": steps, "tuple": (1, float("inf")), 7: b"x", "t": torch.arange(3)}
        state = run_state(net, optimizer, scheduler, counter)
        state.counters["step"] = steps
        save(path, state, backend, info={"iteration": 4})
        at_save = everything(net, optimizer)
        return at_save, train(net, optimizer, scheduler, 3, first=steps)


def load_job(path, layout, steps=3, warm=False):
    """Load into another start; returns what was loaded, the losses after it, and what else came back."""
    with started() as backend:
        net, optimizer, scheduler = build(layout, 99)
        if warm:
            train(net, optimizer, scheduler, 1)
        counter = Counter()
        state = run_state(net, optimizer, scheduler, counter)
        manifest = load(path, state, backend)
        loaded = everything(net, optimizer)
        losses = train(net, optimizer, scheduler, 3, first=steps)
        return loaded, losses, counter.state, state.counters, dict(manifest.info), optimizer.param_groups[0]["betas"]


def load_warnings_job(path, **options):
    """Load a replicated model and return the warnings, or the error's class and text."""
    with started() as backend:
        net, optimizer, scheduler = build("replicated", 99)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                load(path, run_state(net, optimizer, scheduler, Counter()), backend, **options)
            except Exception as problem:
                return type(problem).__name__, str(problem)
        return [str(one.message) for one in caught]


def load_log_job(path):
    """Load a replicated model and return what is logged of it; a warning would be an error."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname}: {record.getMessage()}")
    logger = logging.getLogger("drivetrain.checkpoint")
    logger.setLevel("INFO")
    logger.addHandler(handler)
    with started() as backend, warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path, run_state(*build("replicated", 99), Counter()), backend)
    return records


class Handing(Plain):
    """Hands its weights over as the test says, on the ranks that it says."""

    def __init__(self, tensors):
        super().__init__(nn.Module())
        self.tensors = tensors

    def portable_state(self):
        return PortableState(self.tensors)


def handed_job(path, form):
    """Save a weight that this rank hands over whole, in parts, or not at all; the error's class and text."""
    with started() as backend:
        rows = torch.arange(8.0).view(4, 2)
        weight = rows if form == "whole" else distribute_tensor(rows, init_device_mesh("cpu", (2,)), [Shard(0)])
        mine = form == "parts" or backend.topology.rank == 0
        try:
            save(path, TrainingState([Handing({"model.weight": weight} if mine else {})]), backend)
        except Exception as problem:
            return type(problem).__name__, str(problem)
        return "", sum(math.prod(chunk.shape) for chunk in read_manifest(path).tensors["model.weight"].chunks)


def random_job(path, saving, device_specific=None):
    """Save, or load; then draw numbers."""
    with started() as backend:
        net, optimizer, scheduler = build("replicated", 0)
        state = run_state(net, optimizer, scheduler, Counter())
        set_seed(100 + backend.topology.rank)
        if saving:
            save(path, state, backend)
        else:
            set_seed(7, device_specific)
            load(path, state, backend)
        return torch.rand(2).tolist()


def differing_job(path):
    """An object whose state is not the same everywhere."""
    with started() as backend:
        counter = Counter()
        counter.state = {"rank": backend.topology.rank}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save(path, TrainingState([], {"custom.0": counter}), backend)
        return [str(one.message) for one in caught]


def refused_warning_job(path):
    """A difference between ranks, where the script turns warnings into errors; the error's class and text."""
    with started() as backend, warnings.catch_warnings():
        warnings.simplefilter("error")
        counter = Counter()
        counter.state = {"rank": backend.topology.rank}
        try:
            save(path, TrainingState([], {"custom.0": counter}), backend)
        except Exception as problem:
            return type(problem).__name__, str(problem), Path(path).exists()
        return None


def full_disk_job(path):
    """A save for which the disk has no room; the error's text, and what is left in the folder."""

    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before, saver.write_tensors = saver.write_tensors, write
    try:
        with started() as backend:
            try:
                save(path, run_state(*build("replicated", 0), Counter()), backend)
            except CheckpointError as problem:
                return str(problem), sorted(each.name for each in Path(path).parent.iterdir())
            return None
    finally:
        saver.write_tensors = before


def unwritable_job(path):
    """A save to a folder that cannot be made; the error's text."""
    with started() as backend:
        try:
            save(path, run_state(*build("replicated", 0), Counter()), backend)
        except CheckpointError as problem:
            return str(problem)
        return None


def refused_remark_job(path):
    """Pass over an object of the checkpoint, where the script turns warnings into errors."""
    with started() as backend:
        state = run_state(*build("replicated", 0))
        before = torch.get_rng_state()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                load(path, state, backend, strict=False)
            except Exception as problem:
                return type(problem).__name__, str(problem), torch.equal(before, torch.get_rng_state())
        return None


def older_plan_job(folder):
    """Saves of one layout, before the third of which a rank keeps another save's plan; how many were planned."""
    planned, make_plan = [], saver.make_plan

    def counted(*args):
        planned.append(1)
        return make_plan(*args)

    saver.make_plan = counted
    with started() as backend:
        keeper, state = saver.Saver(backend), run_state(*build("sharded", 0))
        counts = []
        for number in range(4):
            if number == 2 and backend.topology.rank == 1:
                keeper._plan = replace(keeper._plan, made_for="another save")
            keeper.save(folder / str(number), state)
            counts.append(len(planned))
        return counts


def limited_job(path, limit):
    """A rank that may not write files larger than ``limit`` bytes; returns the error's text."""
    with started() as backend:
        net, optimizer, scheduler = build("replicated", 0, width=256)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if backend.topology.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            save(path, run_state(net, optimizer, scheduler), backend)
        except Exception as problem:
            return type(problem).__name__, str(problem), sorted(one.name for one in Path(path).parent.iterdir())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return None


def unsavable_job(path):
    """One rank's object holds what a checkpoint cannot."""
    with started() as backend:
        counter = Counter()
        counter.state = {"inner": [1, object() if backend.topology.rank == 1 else 2]}
        try:
            save(path, TrainingState([], {"custom.0": counter}), backend)
        except Exception as problem:
            return type(problem).__name__, str(problem), Path(path).exists()
        return None


def averaged_job(path, saving):
    """A sharded copy of the model, registered by the user: its tensors are DTensors outside of any trainable."""
    with started() as backend:
        net, _, _ = build("sharded", 1 if saving else 2)
        state = TrainingState([], {"custom.0": net})
        if saving:
            save(path, state, backend)
        else:
            load(path, state, backend)
        return {name: whole(tensor.detach()).clone() for name, tensor in net.state_dict().items()}


def hooks_job(path):
    """Hooks that write beside the checkpoint and leave a model out."""
    with started() as backend:
        net, optimizer, scheduler = build("replicated", 0)

        def hooks(folder):
            (folder / f"adapter-{backend.topology.rank}.txt").write_text("mine")
            return [0]

        save(path, run_state(net, optimizer, scheduler), backend, hooks=hooks)
        net.body.weight.data.fill_(5.0)
        load(path, run_state(net, optimizer, scheduler), backend, hooks=lambda _: [0])
        return net.body.weight.unique().tolist()


def dcp_job(path):
    """A program that knows torch.distributed.checkpoint only."""
    import torch.distributed.checkpoint as dcp

    from drivetrain.checkpoint.tensors import DrivetrainReader

    with started():
        net, _, _ = build("sharded", 99)
        wanted = {"model.body.weight": net.body.weight}
        dcp.load(wanted, storage_reader=DrivetrainReader(path))
        return whole(net.body.weight.detach())


def memory_job(path, saving, megabytes):
    """Anonymous memory beyond what the state itself takes, in MiB, at its highest during a save or load."""
    with started() as backend:
        count = 8
        net = nn.Sequential(*(nn.Linear(1024, megabytes * 256 // count, bias=False) for _ in range(count)))
        fully_shard(net)
        state = TrainingState([Plain(net)])
        save(path, state, backend) if not saving else None
        sampled = ResidentMemory()
        with sampled:
            save(path, state, backend) if saving else load(path, state, backend)
        return sampled.grown / 2**20


def resume_for_ever(folder):
    """Go on from the newest checkpoint, if there is one, and save numbered ones until killed."""
    from drivetrain.checkpoint import Naming

    with started() as backend:
        net, optimizer, scheduler = build("replicated", 0, width=64)
        state = run_state(net, optimizer, scheduler)
        naming = Naming(folder, total_limit=3)
        if naming.complete():
            naming.resumed(load(naming.latest(), state, backend))
        while True:
            train(net, optimizer, scheduler, 1)
            number = naming.claim_next()
            with torch.no_grad():
                net.gain.fill_(number)
            state.counters["step"] = number
            save(naming.path, state, backend, info={"iteration": number})
            naming.prune(naming.path)


def resume_once(folder):
    """Load the newest checkpoint; returns its step."""
    from drivetrain.checkpoint import Naming

    with started() as backend:
        state = run_state(*build("replicated", 9, width=64))
        naming = Naming(folder)
        manifest = load(naming.latest(), state, backend)
        backend.barrier()
        if backend.topology.rank == 0:
            naming.resumed(manifest)
        return state.counters["step"]


def untouched_job(path):
    """Whether a load that raises leaves model, optimizer, counters and random state as they were."""
    with started() as backend:
        net, optimizer, scheduler = build("replicated", 99)
        train(net, optimizer, scheduler, 1)
        state = run_state(net, optimizer, scheduler, Counter())
        before, numbers = everything(net, optimizer), torch.get_rng_state()
        try:
            load(path, state, backend)
        except ValueError:
            after = everything(net, optimizer)
            same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
            return same and state.counters == {"step": 0} and torch.equal(numbers, torch.get_rng_state())
        return False


def export_job(path, dtype):
    """Export three tensors; returns the written names and how many were asked for, or the error."""
    from drivetrain.checkpoint import export_model

    asked = []

    def produce():
        for number in range(3):
            asked.append(number)
            yield f"t{number}", torch.zeros(2).to(getattr(torch, dtype))

    with started() as backend:
        try:
            written = export_model(produce(), path, is_main=backend.topology.rank == 0, backend=backend)
        except Exception as problem:
            return type(problem).__name__, str(problem)
        return [one.name for one in written], len(asked)
