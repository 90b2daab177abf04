"""What ``fsdp`` costs: a training step and peak memory, against ``fully_shard`` and the loop that a user writes."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate

Batches = list[tuple[Tensor, Tensor]]
BARE_TOO = (peers.FOREACH, peers.FUSED)


@dataclass(frozen=True)
class ShardedCase:
    """A way to train in shards.

    Args:
        world: ranks.
        accumulation: micro-batches in a window, gradients not communicated before its end; the unit is a micro-batch.
        bf16: parameters gathered and used in bfloat16, gradients reduced in float32, output in float32.
        width: of the layers.
        blocks: units, of two layers each.
        rows: size of a micro-batch.
    """

    world: int = 1
    accumulation: int = 1
    bf16: bool = False
    width: int = 64
    blocks: int = 2
    rows: int = 16

    @property
    def title(self) -> str:
        """As in the table."""
        parts = ["1 process" if self.world == 1 else f"{self.world} processes"]
        parts += [f"{self.blocks} blocks of width {self.width}"]
        parts += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        return ", ".join(parts + (["bf16"] if self.bf16 else []))


class MLP(nn.Module):
    """One unit: two layers beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Network(nn.Module):
    """Units one after the other."""

    def __init__(self, case: ShardedCase) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(MLP(case.width) for _ in range(case.blocks))
        self.head = nn.Linear(case.width, case.width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Contender(NamedTuple):
    """A sharded model, ready to train.

    Args:
        model: what the loop calls.
        optimizer: of its shards.
        backward: called with the loss.
        window: one micro-batch of a window; ``None`` where the loop divides losses and holds back steps itself.
        waiting: for those, the context in which gradients are not communicated, given whether they wait.
        wrapper: the ``Accelerator`` or ``Fabric`` that it belongs to.
    """

    model: Any
    optimizer: Any
    backward: Callable[[Tensor], Any]
    window: Callable[[], AbstractContextManager[Any]] | None
    waiting: Callable[[bool], AbstractContextManager[Any]]
    wrapper: Any = None


def begin() -> None:
    """Make a rank ready; shards need a process group on one rank too."""
    peers.begin()
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def measure(case: ShardedCase, micro_batches: int, rounds: int) -> tuple[dict[str, Samples], list[str]]:
    """All contenders on one case, and why some are missing. Runs on every rank; the unit is a micro-batch."""
    begin()
    torch.manual_seed(0)
    shape = (case.rows, case.width)
    batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(micro_batches)]
    made, missing = contenders(case)
    blocks = {name: loop(each, case.accumulation, batches) for name, each in made.items()}
    return alternate(blocks, units=micro_batches, rounds=rounds), missing


def peak(name: str, case: ShardedCase, steps: int) -> float | str:
    """Bytes that this rank's memory grows by at most, from before the model is built until some steps are done.

    Why a peer does not run here, if it does not.
    """
    begin()
    before = 0.0
    try:
        make = _MAKE[name](case)
        before = high_water()
        contender = make()
    except Exception as error:  # noqa: BLE001 (raised again, or the reason that the table tells)
        return _missing(name, error)
    shape = (case.rows, case.width)
    loop(contender, 1, [(torch.randn(shape), torch.randn(shape))] * steps)()
    return high_water() - before


def high_water() -> float:
    """Bytes of memory that this process has had at most."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found * (1.0 if sys.platform == "darwin" else 1024.0)


def contenders(case: ShardedCase) -> tuple[dict[str, Contender], list[str]]:
    """Those that run here, the bare one first, and a line for each that does not. Collective over all ranks."""
    found, missing = {}, []
    for name in (peers.BARE, *BARE_TOO, peers.OURS, peers.AGAIN, *peers.present()):
        try:
            found[name] = _MAKE[name](case)()
        except Exception as error:  # noqa: BLE001 (raised again, or the reason that the table tells)
            missing.append(_missing(name, error))
    return found, missing


def _missing(name: str, error: Exception) -> str:
    """That a peer cannot do this here is a result; of the others it is a failure."""
    if name not in peers.present():
        raise error
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{name} does not run here: {reason}"


def loop(contender: Contender, window: int, batches: Batches) -> Block:
    """The training loop over all batches."""
    model, optimizer, backward, micro_batch, waiting, _ = contender

    def every_batch() -> None:
        for x, y in batches:
            backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    def windows() -> None:
        assert micro_batch is not None
        for x, y in batches:
            with micro_batch():
                backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    def own_windows() -> None:
        for index, (x, y) in enumerate(batches, 1):
            waits = index % window != 0
            with waiting(waits):
                backward(F.mse_loss(model(x), y) / window)
            if not waits:
                optimizer.step()
                optimizer.zero_grad()

    if window == 1:
        return every_batch
    return own_windows if micro_batch is None else windows


def shard(network: Network, case: ShardedCase) -> Network:
    """Each block a unit, then the root."""
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.bf16 else MixedPrecisionPolicy()
    for block in network.blocks:
        fully_shard(block, mp_policy=low)
    fully_shard(network, mp_policy=replace(low, output_dtype=torch.float32) if case.bf16 else low)
    return network


def adam(network: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """The same for all, in torch's default implementation or another."""
    return torch.optim.AdamW(network.parameters(), lr=1e-4, **implementation)


def _bare(case: ShardedCase, **implementation: bool) -> Callable[[], Contender]:
    def make() -> Contender:
        model: Any = shard(Network(case), case)
        communicates = [True]

        def waiting(waits: bool) -> AbstractContextManager[None]:
            # Asked for at a change only, as a script that counts would.
            if communicates[0] == waits:
                assert isinstance(model, FSDPModule)
                model.set_requires_gradient_sync(not waits)
                communicates[0] = not waits
            return nullcontext()

        return Contender(model, adam(model, **implementation), torch.Tensor.backward, None, waiting)

    return make


def _ours(case: ShardedCase) -> Callable[[], Contender]:
    accelerator = peers.accelerator(
        peers.OURS,
        distributed_type="fsdp",
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.accumulation,
    )

    def make() -> Contender:
        network = Network(case)
        model, optimizer = accelerator.prepare(network, adam(network))
        window = partial(accelerator.accumulate, model)
        return Contender(model, optimizer, accelerator.backward, window, _never, accelerator)

    return make


def _accelerate(case: ShardedCase) -> Callable[[], Contender]:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["MLP"]
    )
    accelerator = peers.accelerator(
        "accelerate",
        fsdp_plugin=plugin,
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.accumulation,
    )

    def make() -> Contender:
        network = Network(case)
        model, optimizer = accelerator.prepare(network, adam(network))
        if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise RuntimeError(f"asked for FSDP2 on a CPU it shards nothing, and trains a {type(model).__name__}")
        window = partial(accelerator.accumulate, model)
        return Contender(model, optimizer, accelerator.backward, window, _never, accelerator)

    return make


def _fabric(case: ShardedCase) -> Callable[[], Contender]:
    from lightning_fabric.strategies import ModelParallelStrategy

    def parallelize(network: Network, _: Any) -> Network:
        return shard(network, case)

    fabric = peers.fabric(
        strategy=ModelParallelStrategy(parallelize, data_parallel_size=case.world, tensor_parallel_size=1)
    )

    def make() -> Contender:
        model = fabric.setup_module(Network(case))
        optimizer = fabric.setup_optimizers(adam(model))
        waiting = partial(fabric.no_backward_sync, model)
        return Contender(model, optimizer, fabric.backward, None, waiting, fabric)

    return make


def _never(_: bool) -> AbstractContextManager[None]:
    """For those whose windows hold gradients back."""
    return nullcontext()


_MAKE: dict[str, Callable[[ShardedCase], Callable[[], Contender]]] = {
    peers.BARE: _bare,
    peers.FOREACH: partial(_bare, foreach=True),
    peers.FUSED: partial(_bare, fused=True),
    peers.AGAIN: _bare,
    peers.OURS: _ours,
    "accelerate": _accelerate,
    "fabric": _fabric,
}
"""What sets a contender up: called before memory is measured, and what it returns after that."""
