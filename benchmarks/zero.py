"""What ``deepspeed`` costs: a training step of ZeRO 0 to 3 and its set-up, against ``deepspeed.initialize`` by hand.

The bare loop calls ``engine.backward(loss)`` and ``engine.step()``, as DeepSpeed's documents say; so does Accelerate.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate
from benchmarks.sharded import MLP
from benchmarks.sharded_saves import together

BARE = "bare DeepSpeed"
AGAIN = "bare DeepSpeed again"
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ZeroCase:
    """A way to train under DeepSpeed.

    Args:
        stage: of ZeRO.
        world: ranks.
        accumulation: micro-batches in a window; the unit is a micro-batch.
        clip: global norm, ``None`` clips nothing.
        width: of the layers.
        blocks: pairs of layers.
        rows: size of a micro-batch.
    """

    stage: int = 2
    world: int = 1
    accumulation: int = 1
    clip: float | None = None
    width: int = 64
    blocks: int = 2
    rows: int = 16

    @property
    def title(self) -> str:
        """As in the table."""
        parts = [f"ZeRO-{self.stage}", "1 process" if self.world == 1 else f"{self.world} processes"]
        parts += [f"{self.blocks} blocks of width {self.width}"]
        parts += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        return ", ".join(parts + (["clipping"] if self.clip is not None else []))

    def dictionary(self) -> dict[str, Any]:
        """DeepSpeed's, for the bare engine; ours and Accelerate's are told the same."""
        return {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip or 0.0,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
        }


class Contender(NamedTuple):
    """A model under DeepSpeed, ready to train.

    Args:
        model: what the loop calls.
        backward: called with the loss.
        step: called after each backward: clips, steps and zeroes where a window ends.
        window: around each micro-batch.
        wrapper: the ``Accelerator`` that it belongs to, or the engine.
        optimizer: what the script holds.
    """

    model: Any
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]
    window: Callable[[], AbstractContextManager[Any]]
    wrapper: Any
    optimizer: Any


def begin() -> None:
    """Make a rank ready. DeepSpeed needs a process group on one rank too, and reads which device from a variable."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    peers.begin()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    import deepspeed
    import deepspeed.ops

    # Compiled at the first engine otherwise, for inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def network(case: ZeroCase) -> nn.Module:
    """The same for all."""
    torch.manual_seed(0)
    layers = [*(MLP(case.width) for _ in range(case.blocks)), nn.Linear(case.width, case.width)]
    return nn.Sequential(*layers)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def measure(case: ZeroCase, micro_batches: int, rounds: int) -> tuple[dict[str, Samples], list[str]]:
    """A micro-batch of all contenders, and why some are missing. Runs on every rank."""
    begin()
    made, missing = contenders(case)
    torch.manual_seed(0)
    shape = (case.rows, case.width)
    batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(micro_batches)]
    blocks = {name: loop(each, batches) for name, each in made.items()}
    return alternate(blocks, units=micro_batches, rounds=rounds), missing


def loop(contender: Contender, batches: Batches) -> Block:
    """The training loop over all batches."""
    model, backward, step, window, *_ = contender

    def run() -> None:
        for x, y in batches:
            with window():
                backward(F.mse_loss(model(x), y))
                step()

    return run


def set_up(case: ZeroCase, rounds: int) -> tuple[dict[str, Samples], list[str]]:
    """Seconds from a plain model to one under DeepSpeed: ``prepare`` against ``deepspeed.initialize``."""
    begin()
    makers, missing = _makers(case)
    blocks: dict[str, Block] = {name: partial(_made, make) for name, make in makers.items()}
    return alternate(blocks, units=1, rounds=rounds, warmup=1, meter=together), missing


def _made(make: Callable[[], Contender]) -> Callable[[], Any]:
    """Make a contender; what is returned lets go of it, off the clock."""
    wrapper = make().wrapper
    closing: Callable[[], Any] = wrapper.destroy if hasattr(wrapper, "zero_optimization_stage") else wrapper.free_memory
    return closing


def checkpoints(case: ZeroCase, rounds: int) -> tuple[dict[str, dict[str, Samples]], list[str]]:
    """``{"save": ..., "load": ...}`` of a trained model; bare is the engine's own checkpoint. Runs on every rank."""
    begin()
    made, missing = contenders(case)
    made.pop(AGAIN, None)
    batch = (torch.randn(case.rows, case.width), torch.randn(case.rows, case.width))
    names = [tempfile.mkdtemp(prefix="drivetrain-bench-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    saves: dict[str, Block] = {}
    loads: dict[str, Block] = {}
    for name, each in made.items():
        loop(each, [batch] * case.accumulation)()
        place = str(Path(names[0]) / name.replace(" ", "-"))
        if name == BARE:
            saves[name] = partial(each.wrapper.save_checkpoint, place)
            loads[name] = partial(each.wrapper.load_checkpoint, place)
        else:
            saves[name] = partial(_over, each.wrapper.save_state, place)
            loads[name] = partial(each.wrapper.load_state, place)
    once = partial(alternate, units=1, rounds=rounds, warmup=1, meter=together)
    return {"save": once(saves), "load": once(loads)}, missing


def _over(save: Callable[[str], Any], place: str) -> None:
    """A save in the place of an older one."""
    if dist.get_rank() == 0:
        shutil.rmtree(place, ignore_errors=True)
    dist.barrier()
    save(place)


# ---- contenders -----------------------------------------------------------------------------------------------------


def contenders(case: ZeroCase) -> tuple[dict[str, Contender], list[str]]:
    """Those that run here, the bare one first, and a line for each that does not. Collective over all ranks."""
    makers, missing = _makers(case)
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except Exception as error:  # noqa: BLE001 (raised again, or the reason that the table tells)
            missing.append(_missing(name, error))
    return found, missing


def _makers(case: ZeroCase) -> tuple[dict[str, Callable[[], Contender]], list[str]]:
    found, missing = {}, []
    kinds = {BARE: _bare, peers.OURS: _ours, AGAIN: _bare}
    if "accelerate" in peers.present():
        kinds["accelerate"] = _accelerate
    for name, kind in kinds.items():
        try:
            found[name] = kind(case)
        except Exception as error:  # noqa: BLE001 (raised again, or the reason that the table tells)
            missing.append(_missing(name, error))
    return found, missing


def _missing(name: str, error: Exception) -> str:
    """That a peer cannot do this here is a result; of the others it is a failure."""
    if name not in peers.present():
        raise error
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{name} does not run here: {reason}"


def _bare(case: ZeroCase) -> Callable[[], Contender]:
    import deepspeed

    def make() -> Contender:
        model = network(case)
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=case.dictionary())
        return Contender(engine, engine.backward, engine.step, nullcontext, engine, optimizer)

    return make


def _ours(case: ZeroCase) -> Callable[[], Contender]:
    accelerator = peers.accelerator(
        peers.OURS,
        distributed_type="deepspeed",
        deepspeed_plugin={"zero_stage": case.stage},
        gradient_accumulation_steps=case.accumulation,
    )

    def make() -> Contender:
        source = network(case)
        model, optimizer = accelerator.prepare(source, adam(source))
        return Contender(
            model,
            accelerator.backward,
            _step(accelerator, model, optimizer, case),
            _window(accelerator, model, case),
            accelerator,
            optimizer,
        )

    return make


def _accelerate(case: ZeroCase) -> Callable[[], Contender]:
    from accelerate import Accelerator, DeepSpeedPlugin

    # Its `cpu=True` would choose DDP.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    plugin = DeepSpeedPlugin(hf_ds_config=case.dictionary())
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=case.accumulation)
    if str(accelerator.distributed_type).rpartition(".")[2] != "DEEPSPEED":
        raise RuntimeError(f"asked for DeepSpeed on a CPU it trains with {accelerator.distributed_type}")

    def make() -> Contender:
        source = network(case)
        # It keeps one engine for `backward`; every contender here has one model.
        model, optimizer = accelerator.prepare(source, adam(source))
        return Contender(
            model,
            accelerator.backward,
            _step(accelerator, model, optimizer, case),
            _window(accelerator, model, case),
            accelerator,
            optimizer,
        )

    return make


def _window(accelerator: Any, model: Any, case: ZeroCase) -> Callable[[], AbstractContextManager[Any]]:
    return partial(accelerator.accumulate, model) if case.accumulation > 1 else nullcontext


def _step(accelerator: Any, model: Any, optimizer: Any, case: ZeroCase) -> Callable[[], None]:
    """As scripts of Accelerate end a micro-batch."""
    parameters = list(model.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def clipped() -> None:
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(parameters, case.clip)
        step()

    return step if case.clip is None else clipped
