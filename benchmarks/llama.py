"""A Llama-shaped model of a billion parameters on one accelerator: tokens per second against the bare loop.

Runs on a CPU as well, with a small shape, so that it can be tested where there is no accelerator.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate, here

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bfloat16 operations per second, from the makers' data sheets, by a part of the device's name."""
NEEDED_BYTES = 60e9
"""Three contenders side by side, each with float32 parameters and Adam moments."""


@dataclass(frozen=True)
class Shape:
    """Of model and batch; 1.1 billion parameters by default.

    Args:
        vocabulary: tokens.
        width: of the residual stream.
        layers: blocks.
        heads: of queries.
        kv_heads: of keys and values.
        hidden: of the feed-forward part.
        rows: sequences in a batch.
        length: tokens in a sequence.
    """

    vocabulary: int = 32000
    width: int = 2048
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    hidden: int = 5632
    rows: int = 8
    length: int = 2048

    @property
    def tokens(self) -> int:
        """In a batch."""
        return self.rows * self.length

    def flops(self, model: nn.Module) -> float:
        """Of one step, forward and backward, recomputation not counted (PaLM, appendix B): 6 N + 12 L d S a token."""
        weights = sum(parameter.numel() for parameter in model.parameters()) - self.vocabulary * self.width
        return self.tokens * (6.0 * weights + 12.0 * self.layers * self.width * self.length)


class Attention(nn.Module):
    """Causal, with rotary positions and grouped keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.heads * self.size, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.o = nn.Linear(shape.heads * self.size, shape.width, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        q, k, v = (
            part(x_BTC).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = (rotated(each, cos_TD, sin_TD) for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, the two halves of a head being the pairs."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Layer(nn.Module):
    """Attention and a gated feed-forward part, each beside the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        y = self.norms[1](x)
        z: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return z


class Llama(nn.Module):
    """Embedding, layers, head.

    Args:
        shape: sizes.
        recompute: layers recompute their activations in backward.
    """

    def __init__(self, shape: Shape, *, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.recompute, half = recompute, shape.width // shape.heads // 2
        angle = torch.arange(shape.length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.recompute else layer(x, cos, sin)
        y: Tensor = self.head(self.norm(x))
        return y


def unable() -> str | None:
    """Why this machine cannot measure it; ``None`` when it can."""
    if not torch.accelerator.is_available():
        return f"torch {torch.__version__} finds no accelerator here"
    device = torch.accelerator.current_accelerator()
    assert device is not None
    free, total = torch.accelerator.get_memory_info()
    if free < NEEDED_BYTES:
        has = f"{device.type} has {free / 1e9:.0f} GB of {total / 1e9:.0f} GB free"
        return f"{has}, and {NEEDED_BYTES / 1e9:.0f} GB are used"
    return None


def measure(shape: Shape, device: str, steps: int, rounds: int) -> tuple[dict[str, Samples], list[str]]:
    """Wall seconds of a step in bfloat16 with recomputation, and what they mean. One process; the unit is a step."""
    peers.begin()
    torch.distributed.init_process_group("gloo" if device == "cpu" else None)
    tokens = torch.randint(0, shape.vocabulary, (shape.rows, shape.length + 1), device=device)
    flops = 0.0
    blocks: dict[str, Block] = {}
    for name, make in ((peers.BARE, _bare), (peers.OURS, _ours), (peers.AGAIN, _bare)):
        step, model = make(shape, device)
        flops = shape.flops(model)
        blocks[name] = _repeat(step, tokens, steps)
    meter = here if device == "cpu" else _synchronised
    samples = alternate(blocks, units=steps, rounds=rounds, meter=meter)
    return samples, _meaning(samples, shape, flops, device)


def _meaning(samples: dict[str, Samples], shape: Shape, flops: float, device: str) -> list[str]:
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name() if device == "cuda" else device
    best = next((speed for part, speed in PEAK_FLOPS.items() if part in name), None)
    lines = [f"{name}: {shape.tokens} tokens a step, {flops / 1e12:.1f} TFLOP of the model a step"]
    for contender, found in samples.items():
        seconds = sorted(found.wall)[len(found.wall) // 2]
        share = "" if best is None else f", model FLOPs utilisation {flops / seconds / best:.1%}"
        lines.append(f"{contender}: {shape.tokens / seconds:.0f} tokens/s{share}")
    return lines


def _synchronised(block: Block) -> tuple[float, float]:
    """CPU and wall seconds of a block, until the device has done what it was given."""
    torch.accelerator.synchronize()

    def complete() -> None:
        block()
        torch.accelerator.synchronize()

    return here(complete)


def _repeat(step: Callable[[Tensor, Tensor], object], tokens: Tensor, steps: int) -> Block:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def block() -> None:
        for _ in range(steps):
            step(inputs, targets)

    return block


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


Made = tuple[Callable[[Tensor, Tensor], object], nn.Module]


def _bare(shape: Shape, device: str) -> Made:
    with torch.device(device):
        model = Llama(shape, recompute=True)
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=low)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(inputs: Tensor, targets: Tensor) -> None:
        _loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def _ours(shape: Shape, device: str) -> Made:
    from drivetrain import Accelerator

    with tempfile.TemporaryDirectory(prefix="drivetrain-bench-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(
            "distributed_type: fsdp\nmixed_precision: bf16\nfsdp: {activation_checkpointing: true}\n", encoding="utf-8"
        )
        accelerator = Accelerator(cpu=device == "cpu", config=config)
    with torch.device(device):
        plain = Llama(shape, recompute=False)
    model: Any
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4))

    def step(inputs: Tensor, targets: Tensor) -> None:
        accelerator.backward(_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    return step, model


SMALL = Shape(vocabulary=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64, rows=2, length=16)
"""Seconds on a CPU: shows that it runs."""
