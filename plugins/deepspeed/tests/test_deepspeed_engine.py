"""Models as people have them, construction in parts, and what DeepSpeed must not leave behind in a process."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain_testing import models, spawn
from drivetrain_testing.scenario import full_state, share

TOLERANCE = 5e-6
"""Float32 sums in another order, through AdamW, after three steps of a Llama; seen are 7e-7."""


def accelerator_with(section: dict[str, Any], folder: str, **settings: Any) -> Accelerator:
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section, **settings}))
    return Accelerator(config=path)


# ---- a model of Transformers -------------------------------------------------------------------------------------


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    with models.seeded(7):
        return transformers.LlamaForCausalLM(config)


def words(step: int) -> tuple[Tensor, Tensor]:
    with models.seeded(200 + step):
        tokens = torch.randint(40, (4, 10))
    labels = tokens.clone()
    labels[0, :9] = labels[1, :4] = -100
    if step == 1:
        labels[:2] = -100  # nothing counts on rank 0
    return tokens, labels


def loss_sum(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels[:, 1:] != -100).sum()


def plain_llama() -> tuple[dict[str, Tensor], list[float]]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        loss, items = loss_sum(model, *words(step))
        (loss / items).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, norms


def train_llama(section: dict[str, Any], folder: str, checkpointing: str) -> tuple[dict[str, Tensor], list[float]]:
    accelerator = accelerator_with(section, folder)
    with accelerator.init_empty_weights():  # under stage 3 in parts, under the others as always
        model = llama()
    if checkpointing:
        from torch.utils.checkpoint import checkpoint

        for layer in model.model.layers:
            inner, reentrant = layer.forward, checkpointing == "reentrant"
            layer.forward = lambda *args, inner=inner, reentrant=reentrant, **kwargs: checkpoint(
                lambda *again: inner(*again, **kwargs), *args, use_reentrant=reentrant
            )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    for step in range(3):
        loss, items = loss_sum(model, *share(accelerator, *words(step)))
        accelerator.backward(loss, num_items=items)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    state = full_state(accelerator, model)
    accelerator.end_training()
    return state, norms


def ways(section: dict[str, Any], folder: str) -> list[Any]:
    return [train_llama(section, folder, checkpointing) for checkpointing in ("", "reentrant", "not reentrant")]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.gate("3")
def test_transformers(stage: int, tmp_path: Path) -> None:
    expected, norms = plain_llama()
    for state, found in spawn(ways, 2, {"zero_stage": stage}, str(tmp_path), timeout=120)[0]:
        assert found == pytest.approx(norms, abs=TOLERANCE)
        assert set(state) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=TOLERANCE)


# ---- construction in parts -----------------------------------------------------------------------------------------

WIDTH, DEPTH = 1024, 24


class Wide(nn.Module):
    """96 MiB in layers of 4 MiB, each initialised twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def build_wide(folder: str) -> tuple[int, float, float]:
    """How far resident memory rose; a value of the first layer, and the next random number."""
    # What is freed goes back to the system at once, so that resident memory is what is held. -3 is M_MMAP_THRESHOLD.
    ctypes.CDLL(None).mallopt(-3, 65536)
    accelerator = accelerator_with({"zero_stage": 3}, folder)
    with accelerator.init_empty_weights():
        nn.Linear(WIDTH, WIDTH)  # DeepSpeed's own buffers
    torch.manual_seed(3 if accelerator.process_index == 0 else 4)
    start, peak, done = _resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with accelerator.init_empty_weights():
        model = Wide()
    done.set()
    watcher.join()
    after = float(torch.rand(()))
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    first = next(iter(prepared._drivetrain.trainable.full_state_dict()))[1]
    return peak - start, float(first[5, 7]), after


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    whole = 4 * WIDTH * WIDTH * DEPTH
    torch.manual_seed(3)
    plain = Wide()
    first, after = plain.layers[0].weight[5, 7].item(), float(torch.rand(()))
    results = spawn(build_wide, 4, str(tmp_path), timeout=120)
    for rose, value, _ in results:
        # A quarter of it, and the few layers that are whole at a time with what gathers them.
        assert rose < 0.25 * whole + 12 * 4 * WIDTH * WIDTH, f"memory rose by {rose / whole:.2f} of the model"
        assert value == first
    assert results[0][2] == after


# ---- the process afterwards --------------------------------------------------------------------------------------


def runs_in_turn(folder: str) -> None:
    import logging

    linear, environment = F.linear, dict(os.environ)
    handlers = list(logging.getLogger("DeepSpeed").handlers)
    for section, settings in (({"zero_stage": 3}, {"mixed_precision": "bf16"}), ({"zero_stage": 2}, {})):
        accelerator = accelerator_with(section, folder, **settings)
        with accelerator.init_empty_weights():
            model: Any = models.build("dense")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = models.dense_data(4)
        accelerator.backward(F.cross_entropy(model(x), y))
        assert F.linear is linear, "another linear layer for everybody"
        optimizer.step()
        accelerator.end_training()
        assert F.linear is linear
        assert dict(os.environ) == environment
        assert nn.Linear.__init__.__name__ == "__init__"
        assert list(logging.getLogger("DeepSpeed").handlers) == handlers
    import deepspeed.ops
    from deepspeed.runtime import torch_autocast

    assert "__compatible_ops__" not in vars(deepspeed.ops), "compilers were started to see what could be built"
    assert not torch_autocast.TORCH_AUTOCAST_INITIALIZED
    assert not torch.distributed.is_initialized()


def test_a_second_run_finds_the_process_as_it_was(tmp_path: Path) -> None:
    spawn(runs_in_turn, 2, str(tmp_path), timeout=120)


# ---- no compiler, no DeepSpeed -----------------------------------------------------------------------------------

TRAIN = """
import sys, torch
from drivetrain import Accelerator
assert "deepspeed" not in sys.modules
accelerator = Accelerator(distributed_type="deepspeed", cpu=True)
model = torch.nn.Linear(3, 2)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(4, 3)).sum())
optimizer.step()
accelerator.end_training()
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_trains_without_a_compiler(tmp_path: Path) -> None:
    """Nothing is compiled where nobody asks for it."""
    done = run(TRAIN, PATH="", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    assert done.stdout == ""


WITHOUT = """
import importlib.metadata as metadata
real = metadata.version
def version(name):
    if name == "deepspeed":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
from drivetrain import Accelerator
Accelerator(distributed_type="deepspeed", cpu=True)
"""


def test_without_deepspeed() -> None:
    done = run(WITHOUT)
    assert done.returncode != 0
    assert "deepspeed>=0.19.8,<0.20 (not installed)" in done.stderr, done.stderr
    assert 'pip install "deepspeed>=0.19.8,<0.20"' in done.stderr
