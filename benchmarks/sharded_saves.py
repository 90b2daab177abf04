"""What a checkpoint in shards costs against ``torch.distributed.checkpoint``, and what a loop waits for it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks import peers, sharded
from benchmarks.pairs import Block, Samples, alternate
from benchmarks.sharded import Contender, ShardedCase

BLOCKING = "drivetrain, blocking=True"
BESIDE = "drivetrain, blocking=False"
BARE_BLOCKING = "bare torch, save"
BARE_BESIDE = "bare torch, async_save"


def measure(case: ShardedCase, rounds: int) -> tuple[dict[str, dict[str, Samples]], list[str]]:
    """``{"save": ..., "load": ..., "wait": ...}`` of a trained model, and why contenders are missing.

    Runs on every rank; the unit is one call. ``"save"`` and ``"load"`` compare contenders; ``"wait"`` compares what the
    loop waits for a save beside the training with our save that blocks.
    """
    sharded.begin()
    made, missing = sharded.contenders(case)
    for name in (peers.AGAIN, *sharded.BARE_TOO):
        made.pop(name)
    shape = (case.rows, case.width)
    for contender in made.values():
        sharded.loop(contender, 1, [(torch.randn(shape), torch.randn(shape))])()
    main = dist.get_rank() == 0
    names = [tempfile.mkdtemp(prefix="drivetrain-bench-") if main else ""]
    dist.broadcast_object_list(names)
    folder = Path(names[0])
    try:
        return _all(made, folder, rounds), missing
    finally:
        dist.barrier()
        if main:
            shutil.rmtree(folder)


def _all(made: dict[str, Contender], folder: Path, rounds: int) -> dict[str, dict[str, Samples]]:
    kinds = {peers.BARE: _bare, "fabric": _fabric}
    pairs = {name: kinds.get(name, _accelerator)(contender) for name, contender in made.items()}
    saves: dict[str, Block] = {
        name: _cleared(save, folder / f"save-{name}") for name, (save, _) in pairs.items()
    }
    loads: dict[str, Block] = {}
    for name, (save, load) in pairs.items():
        save(folder / name)
        loads[name] = partial(load, folder / name)
    ours, bare = made[peers.OURS], made[peers.BARE]
    waits: dict[str, Block] = {
        BLOCKING: _cleared(pairs[peers.OURS][0], folder / "blocking"),
        BESIDE: _cleared(partial(_beside, ours), folder / "beside"),
        BARE_BLOCKING: _cleared(pairs[peers.BARE][0], folder / "bare"),
        BARE_BESIDE: _cleared(partial(_bare_beside, bare, dist.new_group(backend="gloo")), folder / "bare-beside"),
    }
    once = partial(alternate, units=1, rounds=rounds, warmup=1, meter=together)
    return {"save": once(saves), "load": once(loads), "wait": once(waits)}


def together(block: Block) -> tuple[float, float]:
    """CPU and wall seconds of a block that all ranks begin at once.

    What it returns, if that can be called, is called off the clock.
    """
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    afterwards = block()
    used = time.process_time() - cpu, time.perf_counter() - wall
    if callable(afterwards):
        afterwards()
    return used


def _cleared(save: Callable[[Path], Any], folder: Path) -> Block:
    """A save into a folder that is not there; what it wrote is removed off the clock, once it is complete."""

    def afterwards(finish: Any) -> None:
        if callable(finish):
            finish()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()

    return lambda: partial(afterwards, save(folder))


Pair = tuple[Callable[[Path], Any], Callable[[Path], Any]]


def _state(contender: Contender) -> dict[str, Any]:
    model, optimizer = get_state_dict(contender.model, contender.optimizer)
    return {"model": model, "optimizer": optimizer}


def _bare(contender: Contender) -> Pair:
    def save(folder: Path) -> None:
        dcp_save(_state(contender), checkpoint_id=folder)

    def load(folder: Path) -> None:
        state = _state(contender)
        dcp_load(state, checkpoint_id=folder)
        set_state_dict(
            contender.model,
            contender.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    return save, load


def _bare_beside(contender: Contender, group: Any, folder: Path) -> Callable[[], Any]:
    # Its thread's messages would otherwise meet those of the loop.
    future: Any = dcp_async_save(_state(contender), checkpoint_id=folder, process_group=group)
    finish: Callable[[], Any] = future.result
    return finish


def _accelerator(contender: Contender) -> Pair:
    wrapper = contender.wrapper
    return lambda folder: wrapper.save_state(str(folder)) and None, lambda folder: wrapper.load_state(str(folder))


def _beside(contender: Contender, folder: Path) -> Callable[[], Any]:
    contender.wrapper.save_state(str(folder), blocking=False)
    finish: Callable[[], Any] = contender.wrapper.wait_for_checkpoint
    return finish


def _fabric(contender: Contender) -> Pair:
    fabric = contender.wrapper
    state = {"model": contender.model, "optimizer": contender.optimizer}
    return lambda folder: fabric.save(folder, state), lambda folder: fabric.load(folder, state)
