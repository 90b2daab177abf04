"""The contenders: the bare engine, ours, and the peers that are installed, each set up as its documents say."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib import import_module, metadata, util
from typing import Any

OURS = "drivetrain"
BARE = "bare torch"
FOREACH, FUSED = "bare torch, foreach=True", "bare torch, fused=True"
"""The same with another implementation of the optimizer. The fastest of the three is what others are compared with."""
AGAIN = "bare torch again"
"""The bare one a second time: how far apart two equal contenders are measured, which nothing below can be told."""
PEERS = {"accelerate": "accelerate", "fabric": "lightning-fabric"}
MODULES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}


def present() -> list[str]:
    """The peers that can be imported here."""
    return [name for name, module in MODULES.items() if util.find_spec(module) is not None]


def versions() -> dict[str, str]:
    """Versions of what is measured."""
    distributions = metadata.packages_distributions()
    # A peer's module may come with a larger distribution, as lightning_fabric does with lightning.
    peers = [distributions.get(MODULES[name], [PEERS[name]])[0] for name in present()]
    return {name: metadata.version(name) for name in ["torch", "drivetrain", *peers]}


def world_size() -> int:
    """Ranks of this job."""
    return int(os.environ["WORLD_SIZE"])


def begin() -> None:
    """Make a rank ready: one thread, and a process group that every contender takes as it finds it."""
    import torch
    import torch.distributed as dist

    # The search path reached this process twice over; a peer that looks for a module at each step would pay twice.
    sys.path[:] = dict.fromkeys(sys.path)
    torch.set_num_threads(1)
    # Peers warn of their own deprecations in each start; what is measured has none.
    warnings.simplefilter("ignore")
    if world_size() > 1:
        dist.init_process_group("gloo")


def accelerator(name: str, **settings: Any) -> Any:
    """An ``Accelerator``, ours or the peer's: the same arguments mean the same."""
    module = import_module("drivetrain" if name == OURS else "accelerate")
    return module.Accelerator(cpu=True, **settings)


def fabric(precision: str = "32-true", strategy: Any = None) -> Any:
    """A launched ``Fabric`` on the CPU; its strategy by default is DDP where there are several ranks."""
    from lightning_fabric import Fabric

    # It tells of its precision on every start.
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    world = world_size()
    strategy = strategy or ("ddp" if world > 1 else "auto")
    made = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision=precision)
    made.launch()
    return made
