"""What a batch costs to load: one epoch at a time, in this process, against torch's own way to share data out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate

WIDTH = 64


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """An endless source of samples, cut off; ``part`` keeps every n-th of them, as a script shards by hand.

    Args:
        size: samples.
        part: ``(rank, world)``.
    """

    def __init__(self, size: int, part: tuple[int, int] = (0, 1)) -> None:
        self.size, self.part = size, part
        self.x, self.y = torch.randn(WIDTH), torch.tensor(1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in islice(range(self.size), self.part[0], None, self.part[1]):
            yield self.x, self.y


def measure(kind: str, rows: int, batches: int, rounds: int) -> dict[str, Samples]:
    """All contenders on a ``"map"`` (shuffled) or ``"iterable"`` dataset. Runs on every rank; the unit is a batch.

    Args:
        kind: of the dataset.
        rows: size of a batch.
        batches: in an epoch of one rank, which is a block.
        rounds: how often each contender reads one.
    """
    peers.begin()
    torch.manual_seed(0)
    size = batches * rows * peers.world_size()
    build = _map if kind == "map" else _iterable
    return alternate(build(size, rows), units=batches, rounds=rounds)


def _map(size: int, rows: int) -> dict[str, Block]:
    data = TensorDataset(torch.randn(size, WIDTH), torch.randint(0, 10, (size,)))
    sampler = _sampler(data)
    plain: DataLoader[Any] = DataLoader(data, batch_size=rows, sampler=sampler)

    def bare() -> None:
        sampler.set_epoch(sampler.epoch + 1)
        _epoch(plain)

    blocks: dict[str, Block] = {peers.BARE: bare, peers.AGAIN: bare}
    for name in (peers.OURS, *peers.present()):
        shuffled: DataLoader[Any] = DataLoader(data, batch_size=rows, shuffle=True)
        blocks[name] = _block(_prepared(name, shuffled))
    return blocks


def _sampler(data: Dataset[Any]) -> DistributedSampler[Any]:
    import torch.distributed as dist

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return DistributedSampler(data, world, rank)


def _iterable(size: int, rows: int) -> dict[str, Block]:
    import torch.distributed as dist

    part = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plain: DataLoader[Any] = DataLoader(Stream(size, part), batch_size=rows)
    blocks = {peers.BARE: _block(plain), peers.AGAIN: _block(plain)}
    for name in (peers.OURS, *peers.present()):
        # Fabric leaves streams to the script.
        stream = Stream(size, part if name == "fabric" else (0, 1))
        loader: DataLoader[Any] = DataLoader(stream, batch_size=rows)
        blocks[name] = _block(_prepared(name, loader))
    return blocks


def _prepared(name: str, loader: DataLoader[Any]) -> Any:
    if name == "fabric":
        return peers.fabric().setup_dataloaders(loader)
    settings: dict[str, Any] = {}
    if name == "accelerate":
        from accelerate.utils import DataLoaderConfiguration

        # Its default for streams, dispatch by the main process, is some twenty times dearer than sharding.
        settings["dataloader_config"] = DataLoaderConfiguration(dispatch_batches=False)
    return peers.accelerator(name, **settings).prepare(loader)


def _block(loader: Any) -> Block:
    return lambda: _epoch(loader)


def _epoch(loader: Any) -> None:
    for _ in loader:
        pass
