"""What ranks do apart: data of their own, calls of their own, and what would add up batches of different places."""

from __future__ import annotations

import time

import torch
from parity_common import BATCH, build, loader, mean, noise, points, result, script
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, TensorDataset

from drivetrain import already_sharded


def start(accelerator, batches=None):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return accelerator.prepare(model, optimizer, loader(*points()) if batches is None else batches)


def step_on(accelerator, model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    return mean(accelerator, loss)


def train(accelerator, batches):
    model, optimizer, batches = start(accelerator, batches)
    losses = [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    return result(accelerator, losses, model=model)


class Taken(Sampler):
    """The part of a rank, as samplers of other libraries take it."""

    def __init__(self, size, rank, world):
        self.order = torch.randperm(size, generator=torch.Generator().manual_seed(4)).tolist()[rank::world]

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


class Lines(IterableDataset):
    """Samples one after the other, beginning at one and going on in steps."""

    def __init__(self, begin=0, step=1):
        self.samples, self.begin, self.step = list(zip(*points(), strict=True)), begin, step

    def __iter__(self):
        return iter(self.samples[self.begin :: self.step])


@script()
def subset_of_each_rank(accelerator):
    """The script picks every n-th sample for its process, and prepares the loader as well."""
    rank, world = accelerator.process_index, accelerator.num_processes
    data = Subset(TensorDataset(*points()), range(rank, 4 * BATCH, world))
    return train(accelerator, DataLoader(data, batch_size=BATCH))


@script()
def halves_of_the_tensors(accelerator):
    """Each process keeps a contiguous part of the data in memory."""
    x, y = (part.tensor_split(accelerator.num_processes)[accelerator.process_index] for part in points())
    return train(accelerator, DataLoader(TensorDataset(x, y), batch_size=BATCH))


@script()
def sampler_of_each_rank(accelerator):
    """A sampler of the script's own yields the part of its rank."""
    sampler = Taken(4 * BATCH, accelerator.process_index, accelerator.num_processes)
    return train(accelerator, DataLoader(TensorDataset(*points()), batch_size=BATCH, sampler=sampler))


@script()
def stream_of_each_rank(accelerator):
    """An iterable data set yields every n-th line."""
    data = Lines(accelerator.process_index, accelerator.num_processes)
    return train(accelerator, DataLoader(data, batch_size=BATCH))


@script(follows="stream_of_each_rank")
def stream_of_each_rank_marked(accelerator):
    """The same, marked as this rank's part: the ranks' batches are one global batch. Ranks along tp or pp need one."""
    rank, world = accelerator.process_index, accelerator.num_processes
    return train(accelerator, DataLoader(already_sharded(Lines(rank, world)), batch_size=BATCH // world))


@script()
def batch_size_of_each_rank(accelerator):
    """The main process has the larger accelerator, and takes larger batches."""
    size = BATCH + int(accelerator.num_processes > 1 and accelerator.is_main_process)
    return train(accelerator, DataLoader(TensorDataset(*points()), batch_size=size))


@script()
def loader_that_is_not_prepared(accelerator):
    """All processes read the same batches: the numbers of one process, with a warning."""
    model, optimizer, _ = start(accelerator)
    batches = DataLoader(TensorDataset(*points()), batch_size=BATCH)
    losses = [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    return result(accelerator, losses, model=model)


@script()
def each_rank_skips_another_batch(accelerator):
    """``continue`` at another batch on each rank, as for a sample that is broken: nothing hangs."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for index, (x, y) in enumerate(batches):
        if index == accelerator.process_index:
            continue
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def all_ranks_skip_a_batch(accelerator):
    """``continue`` where any rank has a broken sample, on which the ranks agree first."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for index, (x, y) in enumerate(batches):
        bad = torch.tensor(float(index == 1 and accelerator.process_index == 0))
        if accelerator.reduce(bad, "sum") > 0:
            continue
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def backward_from_two_lines(accelerator):
    """The main process calls ``backward`` at another line than the others."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if accelerator.is_main_process:
            accelerator.backward(loss)
        else:
            accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def one_rank_looks_into_another_loader(accelerator):
    """The main process takes a batch of a second loader, for a picture in the log, and keeps its iterator."""
    model, optimizer, batches = start(accelerator)
    pictures = accelerator.prepare(loader(noise(24, 8)))
    kept, losses = [], []
    for index, (x, y) in enumerate(batches):
        if accelerator.is_main_process and index == 1:
            kept.append(iter(pictures))
            next(kept[-1])
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def one_rank_is_slow(accelerator):
    """The main process rests for longer than ranks take to compare what they have done."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for index, (x, y) in enumerate(batches):
        if accelerator.is_main_process and index == 1:
            time.sleep(1.5)
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def ranks_note_something_in_groups(accelerator):
    """Each rank writes a note of its own into the optimizer's groups, beside what the optimizer reads."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        optimizer.param_groups[0]["note"] = f"rank {accelerator.process_index}"
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def main_process_freezes(accelerator):
    """``if accelerator.is_main_process: model.body.requires_grad_(False)`` after some steps."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for epoch in range(2):
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
        if accelerator.is_main_process and epoch == 0:
            model.body.requires_grad_(False)
    return result(accelerator, losses, model=model)


@script(follows="main_process_freezes")
def all_freeze_what_the_main_process_would(accelerator):
    """The main process decides, and all ranks freeze: they hear of it by a trigger, along every axis."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for _ in range(2):
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
        if accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            model.body.requires_grad_(False)
    return result(accelerator, losses, model=model)


@script()
def main_process_writes_weights(accelerator):
    """``if accelerator.is_main_process:`` around a loop that shrinks the weights."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for epoch in range(2):
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
        if accelerator.is_main_process and epoch == 0:
            shrink(model)
    return result(accelerator, losses, model=model)


@script()
def main_process_writes_the_first_weights(accelerator):
    """``if accelerator.is_main_process:`` around a loop that shrinks one layer, before the first batch."""
    model, optimizer, batches = start(accelerator)
    if accelerator.is_main_process:
        shrink(model.head)
    losses = [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    return result(accelerator, losses, model=model)


@script(follows="main_process_writes_weights main_process_writes_the_first_weights")
def all_write_weights(accelerator):
    """All ranks shrink the weights after each epoch."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for _ in range(2):
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
        shrink(model)
    return result(accelerator, losses, model=model)


@torch.no_grad()
def shrink(model):
    for parameter in model.parameters():
        parameter.mul_(0.9)
