"""ZeRO-3 with CPU offload on one device that is too small for the model otherwise, against DeepSpeed by hand.

The device is made small by a limit on what this process may allocate, so that one size of model serves every device.
Runs on a CPU as well, with a small shape and no limit, so that it can be tested where there is no accelerator.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers
from benchmarks.llama import Llama, Shape
from benchmarks.pairs import Block, Samples, alternate, here
from benchmarks.zero import AGAIN, BARE

LIMIT_BYTES = 14e9
"""What the device may hold; 1.1 billion parameters need 17.6e9 bytes with gradients and Adam moments in float32."""
SHAPE = Shape(rows=2)
"""Of the model; a batch whose logits leave room for three contenders side by side on so small a device."""
HOST_BYTES = 3 * 20e9
"""Three contenders keep all of that in the machine's memory."""

Step = Callable[[Tensor, Tensor], object]


def unable() -> str | None:
    """Why this machine cannot measure it; ``None`` when it can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device here"
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if host < HOST_BYTES:
        return f"{host / 1e9:.0f} GB of memory are free, and {HOST_BYTES / 1e9:.0f} GB are used"
    return None


def measure(
    shape: Shape, device: str, steps: int, rounds: int, limit: float | None = LIMIT_BYTES
) -> tuple[dict[str, Samples], list[str]]:
    """Wall seconds of a step in bfloat16 with recomputation, and what they mean. One process; the unit is a step.

    Args:
        shape: of model and batch.
        device: its type.
        steps: in a block.
        rounds: blocks of each contender.
        limit: bytes that the device may hold, ``None`` for all that it has.
    """
    os.environ["DS_ACCELERATOR"] = device
    peers.begin()
    if device != "cpu":
        # The optimizer's step runs on the CPU, where a user has all cores.
        torch.set_num_threads(os.cpu_count() or 1)
    torch.distributed.init_process_group("gloo" if device == "cpu" else None)
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    tokens = torch.randint(0, shape.vocabulary, (shape.rows, shape.length + 1), device=device)
    meaning = []
    if limit is not None and device == "cuda":
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(limit / total)
        meaning.append(f"{torch.cuda.get_device_name()}, held to {limit / 1e9:.0f} GB")
        meaning.append(f"without offload: {_without_offload(shape, tokens)}")
    blocks: dict[str, Block] = {}
    for name, make in ((BARE, _bare), (peers.OURS, _ours), (AGAIN, _bare)):
        blocks[name] = _repeat(make(shape, device, offload=True), tokens, steps)
    meter = here if device == "cpu" else _synchronised
    samples = alternate(blocks, units=steps, rounds=rounds, meter=meter, warmup=1)
    if device == "cuda":
        meaning.append(f"most that the device held: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    for name, found in samples.items():
        seconds = sorted(found.wall)[len(found.wall) // 2]
        meaning.append(f"{name}: {shape.tokens / seconds:.0f} tokens/s")
    return samples, meaning


def _without_offload(shape: Shape, tokens: Tensor) -> str:
    """That the model does not fit: what the allocator says."""
    try:
        step = _ours(shape, "cuda", offload=False)
        step(tokens[:, :-1], tokens[:, 1:])
    except torch.OutOfMemoryError as error:
        return str(error).partition(".")[0]
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return "it fits; the limit is too wide to show anything"


def _synchronised(block: Block) -> tuple[float, float]:
    torch.accelerator.synchronize()

    def complete() -> None:
        block()
        torch.accelerator.synchronize()

    return here(complete)


def _repeat(step: Step, tokens: Tensor, steps: int) -> Block:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def block() -> None:
        for _ in range(steps):
            step(inputs, targets)

    return block


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _zero(shape: Shape, *, offload: bool) -> dict[str, Any]:
    where = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    parts = {"offload_optimizer": where, "offload_param": where} if offload else {}
    return {
        "train_micro_batch_size_per_gpu": shape.rows,
        # Each contender keeps its bucket on the device: by default 2 GB.
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 50_000_000, **parts},
        "steps_per_print": None,
    }


def _bare(shape: Shape, device: str, *, offload: bool) -> Step:
    import deepspeed

    model = Llama(shape, recompute=True)
    config = {
        **_zero(shape, offload=offload),
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(inputs: Tensor, targets: Tensor) -> None:
        with torch.autocast(device, torch.bfloat16):
            logits = engine(inputs)
        engine.backward(_loss(logits, targets))
        engine.step()

    return step


def _ours(shape: Shape, device: str, *, offload: bool) -> Step:
    from drivetrain import Accelerator

    section = {"config": _zero(shape, offload=offload)}
    accelerator = Accelerator(cpu=device == "cpu", deepspeed_plugin=section, mixed_precision="bf16")
    with accelerator.init_empty_weights():
        plain = Llama(shape, recompute=True)
    model: Any
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4))

    def step(inputs: Tensor, targets: Tensor) -> None:
        accelerator.backward(_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    return step
