"""What ranks compute for ``test_loop_one_and_several.py``."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.utils import DataLoaderConfiguration

CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.5])


def rows(count: int) -> tuple[Tensor, Tensor]:
    """Features and the class of each row."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 3)


def start(**settings):
    accelerator = Accelerator(**{"split_batches": True, **settings})
    return accelerator, accelerator.prepare(model())


def losses_of_a_short_batch() -> tuple[float, float, float]:
    """Of the last seven rows of sixteen: by ``reduce``, by a sum and a count, and of the rows that are gathered."""
    accelerator, net = start()
    loader = accelerator.prepare(DataLoader(TensorDataset(*rows(16)), batch_size=9))
    for x, y in loader:
        with torch.no_grad():
            each = F.cross_entropy(net(x), y, reduction="none")
        loss = each.mean()
        by_mean = accelerator.reduce(loss.detach(), "mean").item()
        total, seen = accelerator.reduce(torch.stack([loss.detach() * len(x), torch.tensor(float(len(x)))]), "sum")
        gathered = accelerator.gather_for_metrics(each)
    return by_mean, (total / seen).item(), gathered.mean().item()


def counts_of_a_single_row() -> tuple[float, float]:
    """Rows that were seen, by ``reduce`` and by ``gather_for_metrics``."""
    accelerator, _ = start()
    loader = accelerator.prepare(DataLoader(TensorDataset(*rows(1)), batch_size=3))
    reduced = gathered = 0.0
    for x, _ in loader:
        reduced += accelerator.reduce(torch.tensor(float(len(x))), "sum").item()
        gathered += len(accelerator.gather_for_metrics(x))
    return reduced, gathered


def gradients_of_an_input(count: int, steps: int) -> tuple[Tensor, Tensor]:
    """Of all rows, in a window of so many steps: as ``backward`` leaves them, and by ``torch.autograd.grad``."""
    accelerator, net = start(gradient_accumulation_steps=steps)
    share = rows(count)[0].chunk(accelerator.num_processes)[accelerator.process_index]
    by_grad = share.clone().requires_grad_()
    (found,) = torch.autograd.grad(net(by_grad).pow(2).mean(), by_grad)
    x = share.clone().requires_grad_()
    with accelerator.accumulate(net):
        accelerator.backward(net(x).pow(2).mean())
    return accelerator.gather(x.grad), accelerator.gather(found)


def weights_after_a_clamped_step(limit: float, *, times_processes: bool) -> Tensor:
    """One step, in which a hook of the output clamps what flows back."""
    accelerator, net = start()
    if times_processes:
        limit *= accelerator.num_processes
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.5))
    loader = accelerator.prepare(DataLoader(TensorDataset(*rows(12)), batch_size=12))
    for x, y in loader:
        output = net(x)
        output.register_hook(lambda gradient: gradient.clamp(-limit, limit))
        accelerator.backward(F.cross_entropy(output, y))
        optimizer.step()
    return accelerator.get_state_dict(net)["weight"]


def said_of_hooks(form: str) -> list[str]:
    """What is logged in two steps of a model with hooks on what flows back."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain").addHandler(handler)
    accelerator = Accelerator(split_batches=True)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    if form == "layer":
        net[1].register_full_backward_hook(lambda module, given, gradient: None)
    if form == "layer, before":
        net[1].register_full_backward_pre_hook(lambda module, gradient: None)
    if form == "parameter":
        net[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.5), DataLoader(TensorDataset(*rows(24)), batch_size=12)
    )
    for x, y in loader:
        output = net(x)
        if form == "output":
            output.register_hook(lambda gradient: gradient.clamp(-1, 1))
        if form == "retained":
            output.retain_grad()
        accelerator.backward(F.cross_entropy(output, y))
        optimizer.step()
    return [line for line in said if "What flows back" in line]


def weights_after_a_step_of(form: str) -> Tensor:
    """One step of a loss that is no mean over rows, ``masked`` or ``root``, or, with ``-right``, of what means it."""
    accelerator, net = start()
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.5))
    loader = accelerator.prepare(DataLoader(TensorDataset(*rows(12)), batch_size=12))
    for x, y in loader:
        losses = F.cross_entropy(net(x), y, reduction="none")
        if form == "masked":
            accelerator.backward(losses[x[:, 0] > 0].mean())
        elif form == "masked-right":
            mask = x[:, 0] > 0
            accelerator.backward(losses[mask].sum(), num_items=mask.sum())
        elif form == "root":
            accelerator.backward(losses.mean().sqrt())
        else:
            m = losses.mean()
            accelerator.backward(m / (2 * accelerator.reduce(m.detach(), "mean").sqrt()))
        optimizer.step()
    return accelerator.get_state_dict(net)["weight"]


def weights_after_a_weighted_step(form: str) -> Tensor:
    """One step of ``cross_entropy`` with weights of the classes."""
    accelerator, net = start(count_items=form == "count_items")
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.5))
    loader = accelerator.prepare(DataLoader(TensorDataset(*rows(12)), batch_size=12))
    for x, y in loader:
        if form == "sum":
            losses = F.cross_entropy(net(x), y, reduction="none")
            accelerator.backward((losses * CLASS_WEIGHTS[y]).sum(), num_items=CLASS_WEIGHTS[y].sum())
        else:
            accelerator.backward(F.cross_entropy(net(x), y, weight=CLASS_WEIGHTS))
        optimizer.step()
    return accelerator.get_state_dict(net)["weight"]


def drawn_noise(*, device_specific: bool) -> Tensor:
    """A row for each process."""
    from drivetrain.utils import set_seed

    accelerator, _ = start()
    set_seed(11, device_specific=device_specific)
    return accelerator.gather(torch.randn(1, 4))


def steps_of_an_epoch(*, split_batches: bool) -> int:
    accelerator, _ = start(split_batches=split_batches)
    return len(accelerator.prepare(DataLoader(TensorDataset(*rows(24)), batch_size=6)))


def collated(*, dispatch: bool) -> Tensor:
    """The rows of the first batch of six, which ``collate_fn`` has centred, of all processes."""
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)

    def centred(batch: list[Tensor]) -> Tensor:
        x = torch.stack(batch)
        return x - x.mean(0)

    loader = accelerator.prepare(DataLoader(rows(12)[0], batch_size=6, collate_fn=centred))
    return accelerator.gather(next(iter(loader)))


def memory_by_sample(*, gathered: bool) -> Tensor:
    """A number that each process notes for each sample, by its index."""
    accelerator, _ = start()
    loader = accelerator.prepare(DataLoader(torch.arange(12), batch_size=6))
    memory = torch.zeros(12)
    for index in loader:
        values = index + 1.0
        if gathered:
            index, values = accelerator.gather_for_metrics((index, values))  # noqa: PLW2901 (as the page writes it)
        memory[index] = values
    return memory


def orders_and_a_draw(dropout: float, seeds: bool) -> tuple[list[list[list[float]]], float]:
    """The samples of each global batch of two epochs of a shuffled loader, and a number that is drawn afterwards."""
    accelerator = Accelerator(split_batches=True)
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(dropout), nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(9) if seeds else None
    loader = DataLoader(torch.arange(24.0).reshape(24, 1), batch_size=6, shuffle=True, generator=generator)
    net, loader = accelerator.prepare(net, loader)
    epochs = []
    for _ in range(2):
        batches = []
        for x in loader:
            net(x)
            batches.append(sorted(accelerator.gather(x).flatten().tolist()))
        epochs.append(batches)
    return epochs, torch.rand(()).item()
