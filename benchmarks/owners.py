"""What a step of a matrix-wise optimizer costs on shards: owners, against an all-gather of each matrix by hand.

Run it from the root of the repository as ``python -m benchmarks.owners``. Each rank of a job has the same model three
times: whole, in shards of ``fsdp`` with the optimizer that ``prepare`` returned, and in shards of ``fully_shard`` with
the loop that a user writes: every rank gathers each parameter and its gradient, steps all of them, and keeps its part.
Only ``optimizer.step()`` runs, with gradients at hand.

- **CPU** is that of rank 0's process, all threads; contenders alternate, and ratios are taken within a round.
- **sent** counts the bytes that rank 0 hands to others in one step: of owners what it gives to all-to-all, of the
  all-gather its shards times the other ranks.
- **state** is the optimizer's, of the rank that has most, as a part of the whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import peers
from benchmarks.pairs import Samples, alternate, compare

WHOLE, OWNERS, GATHERED = "one process", "owners", "an all-gather for each matrix"

KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Muon": lambda parameters: torch.optim.Muon(parameters, lr=1e-3),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
}


def network(width: int, layers: int) -> nn.Sequential:
    """Square matrices alone."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def give_gradients(parameters: Iterable[Tensor]) -> None:
    """Random ones, laid out as the parameters."""
    torch.manual_seed(1)
    for one in parameters:
        one.grad = torch.randn_like(one)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the tensors that this rank keeps."""
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in held if one.dim())


class Gathering:
    """The loop by hand: whole copies of all parameters, of which each rank keeps its part.

    Args:
        parameters: DTensors, cut along their first dim.
        make: the optimizer of the copies.
    """

    def __init__(self, parameters: list[Any], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.parameters = parameters
        self.copies = [nn.Parameter(one.full_tensor().detach()) for one in parameters]
        self.optimizer = make(self.copies)

    @torch.no_grad()
    def step(self) -> None:
        """Gather, step, keep this rank's part."""
        for one, whole in zip(self.parameters, self.copies, strict=True):
            whole.copy_(one.full_tensor())
            whole.grad = one.grad.full_tensor()
        self.optimizer.step()
        rank, size = dist.get_rank(), dist.get_world_size()
        for one, whole in zip(self.parameters, self.copies, strict=True):
            one.to_local().copy_(whole.chunk(size)[rank])


def measure(kind: str, width: int, layers: int, rounds: int) -> tuple[dict[str, Samples], int, int, float]:
    """Samples by contender, bytes sent by owners and by the all-gather, and the largest part of the state.

    Collective over all ranks.
    """
    peers.begin()
    make = KINDS[kind]
    whole = network(width, layers)
    plain = make(list(whole.parameters()))
    give_gradients(whole.parameters())

    accelerator = peers.accelerator(peers.OURS, distributed_type="fsdp")
    model = network(width, layers)
    optimizer = make(list(model.parameters()))
    model, prepared = accelerator.prepare(model, optimizer)
    give_gradients(model.parameters())

    sharded = network(width, layers)
    for layer in sharded:
        fully_shard(layer)
    gathering = Gathering(list(sharded.parameters()), make)
    give_gradients(sharded.parameters())

    sent = 0
    torch_distributed: Any = dist
    plain_exchange, rank, size = dist.all_to_all_single, dist.get_rank(), dist.get_world_size()

    def counted(into: Tensor, given: Tensor, received: list[int], parts: list[int], **options: Any) -> Any:
        nonlocal sent
        sent += sum(parts) - parts[rank]
        return plain_exchange(into, given, received, parts, **options)

    torch_distributed.all_to_all_single = counted
    prepared.step()
    torch_distributed.all_to_all_single = plain_exchange
    of_all: list[Any] = [None] * size
    dist.all_gather_object(of_all, state_bytes(optimizer))
    gathered = 2 * sum(one.to_local().nbytes for one in gathering.parameters) * (size - 1)
    samples = alternate(
        {GATHERED: gathering.step, OWNERS: prepared.step, WHOLE: plain.step}, units=1, rounds=rounds, warmup=1
    )
    most = max(of_all) / state_bytes(plain)
    accelerator.end_training()
    return samples, sent, gathered, most


def main() -> None:
    """Print a table for each optimizer."""
    from drivetrain_testing import spawn

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="rows and columns of a matrix (512)")
    parser.add_argument("--layers", type=int, default=8, help="matrices (8)")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(f"{given.layers} matrices of {given.width} x {given.width}, torch {torch.__version__}\n")
    head = ["optimizer", "ranks", "step of owners, CPU", "to one process", "to all-gathers", "sent, to all-gathers"]
    print("| " + " | ".join([*head, "state"]) + " |")
    print("|---|" + "--:|" * len(head))
    for kind in KINDS:
        for ranks in (2, 4):
            samples, sent, gathered, most = spawn(
                measure, ranks, kind, given.width, given.layers, given.rounds, timeout=600
            )[0]
            ours = compare({WHOLE: samples[WHOLE], OWNERS: samples[OWNERS]}, "cpu")[OWNERS]
            theirs = compare({GATHERED: samples[GATHERED], OWNERS: samples[OWNERS]}, "cpu")[OWNERS]
            row = [kind, ranks, f"{ours.median * 1e3:.1f} ms", f"{ours.ratio:.2f}", f"{theirs.ratio:.2f}"]
            print("| " + " | ".join(map(str, [*row, f"{sent / gathered:.2f}", f"{most:.2f}"])) + " |", flush=True)


if __name__ == "__main__":
    main()
