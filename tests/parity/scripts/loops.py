"""Loops: several loaders, short batches, evaluation, stopping, saving and going on."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from parity_common import BATCH, Net, build, loader, mean, noise, points, result, script
from torch.nn import functional as F

FOLDER = "checkpoint"


def start(accelerator, batches=None, lr=0.3):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return accelerator.prepare(model, optimizer, loader() if batches is None else batches)


def step_on(accelerator, model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    return mean(accelerator, loss)


@script()
def two_epochs(accelerator):
    """The plainest loop of all, over two epochs."""
    model, optimizer, batches = start(accelerator)
    losses = [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    return result(accelerator, losses, model=model)


@script()
def two_loaders_zipped(accelerator):
    """``zip(labelled, unlabelled)``, the second one longer."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, labelled, others = accelerator.prepare(
        model, optimizer, loader(), loader(noise(5 * BATCH, 8))
    )
    losses = []
    for (x, y), (z,) in zip(labelled, others, strict=False):
        logits = model(torch.cat((x, z)))
        known, unknown = logits[: len(x)], logits[len(x) :]
        loss = F.cross_entropy(known, y) + 0.1 * unknown.pow(2).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def _two_loaders():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    (x, y), z = points(), noise(7 * BATCH, 8)
    for rows in (slice(0, 2 * BATCH), slice(2 * BATCH, 4 * BATCH)):
        loss = F.cross_entropy(model(x[rows]), y[rows]) + 0.1 * model(z[rows]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [], {f"model.{name}": value for name, value in model.state_dict().items()}


@script(reference=_two_loaders, gradient_accumulation_steps=2)
def two_loaders_in_windows(accelerator):
    """``zip`` of a loader with a longer one that was begun before it, in windows of two batches."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, labelled, others = accelerator.prepare(
        model, optimizer, loader(), loader(noise(7 * BATCH, 8))
    )
    more = iter(others)
    for x, y in labelled:
        (z,) = next(more)
        with accelerator.accumulate(model):
            logits = model(torch.cat((x, z)))
            known, unknown = logits[: len(x)], logits[len(x) :]
            accelerator.backward(F.cross_entropy(known, y) + 0.1 * unknown.pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return result(accelerator, [], model=model)


@script()
def kept_iterator(accelerator):
    """``next(iterator)`` in a loop over steps, begun anew where it ends."""
    model, optimizer, batches = start(accelerator)
    iterator, losses = iter(batches), []
    for _ in range(6):
        try:
            x, y = next(iterator)
        except StopIteration:
            iterator = iter(batches)
            x, y = next(iterator)
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def uneven_last_batch(accelerator):
    """41 samples in batches of 12: the last batch holds 5."""
    x, y = points(41)
    model, optimizer, batches = start(accelerator, loader(x, y))
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def uneven_last_batch_counted(accelerator):
    """The same with ``backward(loss_sum, num_items=len(x))``."""
    x, y = points(41)
    model, optimizer, batches = start(accelerator, loader(x, y))
    for x, y in batches:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        optimizer.zero_grad()
        accelerator.backward(loss, num_items=len(x))
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def last_batch_dropped(accelerator):
    """The same with ``drop_last=True``."""
    x, y = points(41)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH, drop_last=True)
    model, optimizer, batches = start(accelerator, data)
    losses = [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    return result(accelerator, losses, model=model)


@script()
def evaluation_in_between(accelerator):
    """After each epoch: ``eval()``, ``no_grad``, predictions by ``gather_for_metrics``, and on with training."""
    model, optimizer, batches = start(accelerator)
    x, y = points(17, seed=9)
    held_out = accelerator.prepare(loader(x, y))
    losses = []
    for _ in range(2):
        model.train()
        losses += [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
        model.eval()
        found = []
        for x, y in held_out:
            with torch.no_grad():
                logits = model(x)
            found.append(accelerator.gather_for_metrics(F.cross_entropy(logits, y, reduction="none")))
        losses += torch.cat(found).tolist()
    return result(accelerator, losses, model=model)


@script()
def evaluation_in_a_step(accelerator):
    """An evaluation of other data between the forward of a step and its backward."""
    model, optimizer, batches = start(accelerator)
    other, losses = points(seed=9)[0], []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        model.eval()
        with torch.no_grad():
            seen = model(other).pow(2).mean()
        model.train()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses += [mean(accelerator, loss), mean(accelerator, seen)]
    return result(accelerator, losses, model=model)


@script()
def early_stopping(accelerator):
    """Training stops in the middle of an epoch when the loss has not fallen for two steps."""
    model, optimizer, batches = start(accelerator, lr=1.5)
    losses, best, patience = [], float("inf"), 2
    for _ in range(4):
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
            best, patience = (losses[-1], 2) if losses[-1] < best - 0.05 else (best, patience - 1)
            if patience == 0:
                break
        if patience == 0:
            break
    return result(accelerator, losses, model=model)


def _uninterrupted(accelerator=None):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        for x, y in loader():
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


@script(reference=_uninterrupted)
def saved_and_resumed(accelerator):
    """``save_state`` in the middle of an epoch; steps that are then undone by ``load_state``, and the epoch goes on."""
    folder = f"{accelerator.project_dir}/{FOLDER}"
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        losses.append(step_on(accelerator, model, optimizer, x, y))
    for number, (x, y) in enumerate(batches):
        losses.append(step_on(accelerator, model, optimizer, x, y))
        if number == 1:
            accelerator.save_state(folder)
            break
    for x, y in batches:
        step_on(accelerator, model, optimizer, x + 1, y)
    accelerator.load_state(folder)
    for _ in range(2):
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script(reference=_uninterrupted)
def resumed_by_new_objects(accelerator):
    """After ``save_state`` everything is dropped, built and prepared anew, and ``load_state`` takes it up."""
    folder = f"{accelerator.project_dir}/{FOLDER}"
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    accelerator.save_state(folder)
    model, optimizer, batches = accelerator.free_memory(model, optimizer, batches)
    model = build(Net, seed=77)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    accelerator.load_state(folder)
    losses += [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    return result(accelerator, losses, model=model)


@script(reference=_uninterrupted)
def train_step(accelerator):
    """``accelerator.train_step``, the whole step as one call."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for _ in range(3):
        for batch in batches:
            out = accelerator.train_step(model, batch, lambda logits, batch: F.cross_entropy(logits, batch[1]))
            losses.append(out.loss.item())
    return result(accelerator, losses, model=model)


class Augmented(torch.utils.data.Dataset):
    """Adds noise that the dataset's own generator draws when a sample is read."""

    def __init__(self):
        self.x, self.y = points()
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.5 * torch.randn(8, generator=self.generator), self.y[index]


@script(whole_batch="which noise a sample gets depends on how many samples its process has read")
def random_augmentation(accelerator):
    """Noise from the dataset's own generator is added to each sample as it is read."""
    data = torch.utils.data.DataLoader(Augmented(), batch_size=BATCH)
    model, optimizer, batches = start(accelerator, data)
    losses = [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    return result(accelerator, losses, model=model)


class Unseeded(Augmented):
    """Draws from the operating system: input and goal of a sample are of one draw, and no two draws are alike."""

    def __getitem__(self, index):
        drawn = torch.from_numpy(np.random.default_rng().normal(size=8)).float()
        return drawn, (drawn.sum() > 0).long()


@script(whole_batch="only the sum of what processes read is seen", reference=lambda: ([], {"one": torch.ones(1)}))
def unseeded_augmentation(accelerator):
    """Samples are drawn anew at each read, without a seed: a step still sees input and goal of one draw."""
    data = torch.utils.data.DataLoader(Unseeded(), batch_size=BATCH)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer, batches = accelerator.prepare(model, optimizer, data)
    losses = [step_on(accelerator, model, optimizer, x, y) for _ in range(20) for x, y in batches]
    # What can be learnt is learnt: far below ln 2, where a model stays whose goals are of another draw.
    return [], {"one": torch.ones(1) * float(sum(losses[-8:]) / 8 < 0.4)}


@script()
def loader_never_prepared(accelerator):
    """Batches come from no loader: every process trains on the whole batch."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = points()
    losses = []
    for first in range(0, len(x), BATCH):
        rows = slice(first, first + BATCH)
        losses.append(step_on(accelerator, model, optimizer, x[rows], y[rows]))
    return result(accelerator, losses, model=model)


@script()
def gradients_synchronised_by_hand(accelerator):
    """``no_sync`` around the first of two backwards of a step."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        with accelerator.no_sync(model):
            first = F.cross_entropy(model(x), y)
            accelerator.backward(first)
        second = model(x).pow(2).mean()
        accelerator.backward(second)
        optimizer.step()
        losses += [mean(accelerator, first), mean(accelerator, second)]
    return result(accelerator, losses, model=model)


@script()
def main_process_evaluates(accelerator):
    """Whole weights are loaded into a model of the script's own, which evaluates."""
    model, optimizer, batches = start(accelerator)
    losses = [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    losses, found = result(accelerator, losses, model=model)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        own = Net()
        own.load_state_dict(weights)
        with torch.no_grad():
            found["answers"] = own(points(seed=9)[0])
    return losses, found


@script()
def inference_mode_first(accelerator):
    """The model answers under ``torch.inference_mode()`` before the first step and between steps."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        with torch.inference_mode():
            seen = model(x).pow(2).mean()
        losses += [mean(accelerator, seen), step_on(accelerator, model, optimizer, x, y)]
    return result(accelerator, losses, model=model)


@script()
def saved_by_torch(accelerator):
    """``torch.save(unwrap_model(model).state_dict())`` on the main process alone, read back by each process."""
    file = f"{accelerator.project_dir}/weights.pt"
    model, optimizer, batches = start(accelerator)
    losses = [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), file)
    accelerator.wait_for_everyone()
    own = Net()
    own.load_state_dict(torch.load(file))
    return losses, {name: value.clone() for name, value in own.state_dict().items()}


@script()
def parameters_by_torch_save(accelerator):
    """``torch.save(list(model.parameters()))`` on every process, read back with what the script has set on one."""
    file = f"{accelerator.project_dir}/parameters-{accelerator.process_index}.pt"
    model, optimizer, batches = start(accelerator)
    next(model.parameters()).kept = "by the script"
    losses = [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    torch.save(list(model.parameters()), file)
    read = torch.load(file, weights_only=False)
    assert read[0].kept == "by the script"
    assert {type(parameter) for parameter in read} == {torch.nn.Parameter}
    return losses, {str(number): parameter.detach() for number, parameter in enumerate(read)}


class Stream(torch.utils.data.IterableDataset):
    """Samples without an index and without a length."""

    def __iter__(self):
        return zip(*points(), strict=True)


@script()
def iterable_dataset(accelerator):
    """An iterable dataset without a length."""
    model, optimizer, batches = start(accelerator, torch.utils.data.DataLoader(Stream(), batch_size=BATCH))
    losses = [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    return result(accelerator, losses, model=model)


@script()
def own_batch_sampler(accelerator):
    """A batch sampler of the script's own: batches of every fourth sample."""
    x, y = points()
    order = [list(range(first, len(x), 4)) for first in range(4)]
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_sampler=order)
    model, optimizer, batches = start(accelerator, data)
    losses = [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    return result(accelerator, losses, model=model)


# ---- batches that are used after the loop that reads them ----------------------------------------------------------


def train_on(accelerator, batches_of, epochs=1):
    """A loop over what ``batches_of`` makes of a loader with a short last batch."""
    model, optimizer, batches = start(accelerator, loader(*points(4 * BATCH - 5)))
    kept = batches_of(batches)
    for _ in range(epochs):
        for x, y in kept:
            step_on(accelerator, model, optimizer, x, y)
    return result(accelerator, [], model=model)


@script()
def batches_kept_in_a_list(accelerator):
    """All batches are read once and trained on for some epochs."""
    return train_on(accelerator, list, epochs=3)


@script()
def one_batch_ahead(accelerator):
    """A prefetcher reads the next batch before the script trains on the one before it."""

    def ahead(batches):
        iterator = iter(batches)
        now = next(iterator)
        for following in iterator:
            yield now
            now = following
        yield now

    return train_on(accelerator, ahead)


@script()
def batches_cycled(accelerator):
    """``itertools.cycle`` reads the batches once and repeats them."""
    return train_on(accelerator, lambda batches: itertools.islice(itertools.cycle(batches), 10))
