"""Forged checkpoints, their checksums made right again: each loads, or raises with the whole run as it was.

The families of forgeries are: any value of the manifest replaced, removed or put elsewhere; headers of tensor files
that are not what the manifest says; random state that no generator takes.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import warnings
import zlib

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.checkpoint import read_manifest
from drivetrain.checkpoint.manifest import MANIFEST
from drivetrain.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from drivetrain_testing import spawn

JUNK = (None, True, -1, 3, 1e308, "", "x", "float64", [], [1], {}, {"a": 1}, {"$": "tensor", "key": "model.0.weight"},
        {"$": "tuple", "items": [1]}, {"$": "nothing"}, {"$": "float", "value": "nan"}, {"$": "dtype", "value": "int8"},
        [[[]]], "../../x", 10**30)  # fmt: skip


class Whole(nn.Module):
    """A module with extra state, running statistics and a parameter that is tied."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.kept = {"calls": 0}

    def forward(self, x):
        self.kept["calls"] += 1
        return self.second(self.norm(self.first(x)))

    def get_extra_state(self):
        return dict(self.kept)

    def set_extra_state(self, state):
        self.kept = {"calls": int(state["calls"])}


class Custom:
    """The user's object: it changes in parts before it finds out that the rest makes no sense."""

    def __init__(self):
        self.mean, self.count, self.log = torch.zeros(3), 0, []

    def state_dict(self):
        return {"mean": self.mean, "count": self.count, "log": self.log}

    def load_state_dict(self, state):
        self.mean.copy_(state["mean"])
        self.count = int(state["count"])
        self.log = [int(each) for each in state["log"]]


def run(steps, seed):
    accelerator = Accelerator(cpu=True, distributed_type="single")
    torch.manual_seed(seed)
    model, custom = Whole(), Custom()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(custom)
    for _, x in zip(range(steps), loader, strict=False):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        custom.mean += x.mean()
        custom.count += 1
        custom.log.append(custom.count)
    return accelerator, model, optimizer, scheduler, loader, custom


def everything(parts):
    """All of a run's state, as text and tensors that nothing else holds."""
    accelerator, model, optimizer, scheduler, loader, custom = parts
    cursor = loader._cursor
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "loader": [str(vars(cursor)[name]) for name in sorted(vars(cursor)) if name != "owner"],
        "owner": id(cursor.owner),
        "custom": custom.state_dict(),
        "random": [torch.get_rng_state(), str(random.getstate())],
        "step": accelerator._loop.step,
    }
    return copy.deepcopy(state)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def signed(body):
    """The text of a manifest whose checksum is right, as a forger would write it."""
    body.pop("checksum", None)
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return json.dumps({"checksum": zlib.crc32(text.encode()), **body})


def places(node, path=()):
    """Every place inside a JSON value."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def forge(body, chance):
    """Change one place, chosen evenly over the manifest's parts; says what was done."""
    part = chance.choice([key for key in body if key not in ("format", "version", "created", "libraries", "info")])
    path = chance.choice(list(places(body[part], (part,))))
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    last, how = path[-1], chance.choice(("junk", "junk", "remove", "swap", "rename", "deep"))
    if how == "remove":
        del holder[last]
    elif how == "swap":
        other = chance.choice(list(holder if isinstance(holder, dict) else range(len(holder))))
        holder[last], holder[other] = holder[other], holder[last]
    elif how == "rename" and isinstance(holder, dict):
        holder[f"{last}x"] = holder.pop(last)
    elif how == "deep":
        for _ in range(chance.choice((2, 400))):
            holder[last] = [holder[last]]
    else:
        holder[last] = chance.choice(JUNK)
    return f"{how} at {'.'.join(map(str, path))}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged") / "ckpt"
    parts = run(3, seed=0)
    parts[0].save_state(folder)
    parts[0].end_training()
    return folder


def attempt(parts, folder, before):
    """The error, after which everything is as before; ``None`` when it was loaded."""
    caught = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parts[0].load_state(folder)
        except CheckpointError as problem:
            caught = problem
    assert caught is None or same(everything(parts), before), f"changed although it raised: {caught}"
    return caught


def test_a_forged_manifest_loads_or_changes_nothing(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "ckpt")
    body = json.loads((saved / MANIFEST).read_text())
    parts = run(1, seed=1)
    before = everything(parts)
    refused = 0
    for number in range(300):
        forged = copy.deepcopy(body)
        what = forge(forged, random.Random(number))
        (folder / MANIFEST).write_text(signed(forged))
        try:
            problem = attempt(parts, folder, before)
        except BaseException as error:
            raise AssertionError(f"{number}, {what}: {type(error).__name__}: {error}") from error
        if problem is None:  # What was forged is not read, or is as good as what stood there.
            parts[0].end_training()
            parts = run(1, seed=1)
            before = everything(parts)
        refused += problem is not None
    assert refused > 150
    parts[0].end_training()


def rewritten(folder, kind, change):
    """Change a file of the checkpoint and make its checksums right again."""
    victim = min(folder.glob(f"data-*/{kind}-*"))
    content = change(victim.read_bytes())
    victim.write_bytes(content)
    body = json.loads((folder / MANIFEST).read_text())
    name = f"{victim.parent.name}/{victim.name}"
    body["files"][name] = {"size": len(content), "crc32": zlib.crc32(content)}
    (folder / MANIFEST).write_text(signed(body))


def header(change):
    """A change of a safetensors header, in its own length."""

    def changed(content):
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        text = json.dumps(entries, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return changed


def test_a_forged_file_of_tensors_changes_nothing(saved, tmp_path):
    parts = run(1, seed=1)
    before = everything(parts)
    keys = list(json.loads((saved / MANIFEST).read_text())["tensors"])

    def forgeries(key):
        yield header(lambda entries: entries.update({f"{key}x": entries.pop(key)}))
        yield header(lambda entries: entries[key].update(dtype="U8" if entries[key]["dtype"] != "U8" else "I8"))
        yield header(lambda entries: entries[key].update(shape=[1, *entries[key]["shape"], 1]))
        yield header(lambda entries: entries[key].update(data_offsets=[0, 10**9]))

    for number, key in enumerate(keys):
        for which, change in enumerate(forgeries(key)):
            folder = shutil.copytree(saved, tmp_path / f"{number}-{which}")
            rewritten(folder, "tensors", change)
            assert attempt(parts, folder, before) is not None, (key, which)
    parts[0].end_training()


@pytest.mark.parametrize("key", ["rng.torch", "rng.python.words", "tree"])
def test_forged_random_state_changes_nothing(saved, tmp_path, key):
    folder = shutil.copytree(saved, tmp_path / "ckpt")

    def change(entries):
        if key == "tree":
            entries["__metadata__"]["tree"] = json.dumps({"python": {"version": 3}})
        elif key == "rng.torch":
            entries[f"{key}x"] = entries.pop(key)
        else:
            entries[key]["shape"] = [5, entries[key]["shape"][0] // 5]

    rewritten(folder, "rng", header(change))
    parts = run(1, seed=1)
    assert attempt(parts, folder, everything(parts)) is not None
    parts[0].end_training()


def refused_job(folder):
    """One rank's object refuses what the others take; whether all are as they were."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(5)
    model, custom = Whole(), Custom()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(custom)
    parts = accelerator, model, optimizer, scheduler, loader, custom
    next(iter(loader))
    before = everything(parts)
    taken = []

    def load_state_dict(state):
        custom.mean.fill_(9.0)
        taken.append(state)
        if len(taken) == 1 and accelerator.process_index == 2:
            raise ZeroDivisionError

    custom.load_state_dict = load_state_dict
    try:
        with warnings.catch_warnings():
            # One process saved, three load: how the others are seeded is told.
            warnings.simplefilter("ignore", UserWarning)
            accelerator.load_state(folder)
    except CheckpointError as problem:
        custom.mean.sub_(9.0)  # What the second call did, which gave it back what it had.
        return str(problem), taken[-1]["count"], same(everything(parts), before)
    return None


def test_what_one_rank_refuses_changes_no_rank(saved):
    words = "rank 2 of 3: could not take over the state of objects: ZeroDivisionError"
    for text, count, unchanged in spawn(refused_job, 3, saved):
        assert words in text
        assert count == 0
        assert unchanged


def test_hooks_do_not_run_for_a_damaged_checkpoint(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "ckpt")
    min(folder.glob("data-*/tensors-*")).write_bytes(b"damaged")
    accelerator, model, *_ = run(1, seed=1)
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    with pytest.raises(CheckpointCorruptError, match="bytes where its manifest says"):
        accelerator.load_state(folder)
    assert model.first.weight.any()
    accelerator.end_training()


def test_chunks_that_overlap_are_found(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "ckpt")
    body = json.loads((folder / MANIFEST).read_text())
    entry = body["tensors"]["model.first.weight"]
    whole = entry["chunks"][0]
    entry["chunks"] = [{**whole, "shape": [2, 4]}, {**whole, "shape": [2, 4], "offsets": [1, 0]}]
    (folder / MANIFEST).write_text(signed(body))
    with pytest.raises(CheckpointCorruptError, match="overlap"):
        read_manifest(folder)


def problem_of(saved, tmp_path, change):
    """The error of loading a copy of the checkpoint whose manifest ``change`` has altered; nothing else has changed."""
    folder = shutil.copytree(saved, tmp_path / "ckpt")
    body = json.loads((folder / MANIFEST).read_text())
    change(body)
    (folder / MANIFEST).write_text(signed(body))
    parts = run(1, seed=1)
    problem = attempt(parts, folder, everything(parts))
    parts[0].end_training()
    return problem


def exchange(entries, one, other):
    entries[one], entries[other] = entries[other], entries[one]


def test_a_hyper_parameter_of_another_kind_is_named(saved, tmp_path):
    problem = problem_of(saved, tmp_path, lambda body: body["trainables"][0]["optimizers"][0][0].update(lr="fast"))
    assert isinstance(problem, CheckpointMismatchError)
    assert "optimizers[0][0] of model 0.lr is 'fast' in the checkpoint and 0.02 here" in str(problem)


def test_state_of_the_optimizer_in_another_shape_than_here_changes_nothing(saved, tmp_path):
    step, moment = "optim.norm.weight.step", "optim.norm.bias.exp_avg"
    problem = problem_of(saved, tmp_path, lambda body: exchange(body["tensors"], step, moment))
    assert isinstance(problem, CheckpointMismatchError)
    assert "optim.norm.weight.step of model 0 is [4] in the checkpoint and [] here" in str(problem)


def test_a_scheduler_that_took_another_objects_state_is_as_it_was(saved, tmp_path):
    problem = problem_of(saved, tmp_path, lambda body: exchange(body["objects"], "scheduler.0", "custom.0"))
    assert "could not take over" in str(problem)


def test_a_manifest_that_is_no_regular_file_is_not_read(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "ckpt")
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)  # nobody writes to it, so that reading would wait for ever
    with pytest.raises(CheckpointCorruptError, match="the manifest is no regular file"):
        read_manifest(folder)
