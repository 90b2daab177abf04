"""``generate()`` in a loop of the script's own: before the first training step, in inference mode, between steps."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import trainer_jobs as jobs

from drivetrain import Accelerator, load_config
from drivetrain_testing import spawn

if find_spec("transformers") is None:
    pytest.skip("Transformers is not installed", allow_module_level=True)

TOLERANCE = 2e-6
"""Of losses near 4 in float32."""

MODELS: Mapping[str, Any] = {"llama": jobs.llama, "t5": jobs.t5}
METHODS = {"fsdp.forward_methods": ["generate"]}
BACKENDS: Mapping[str, tuple[dict[str, Any], int]] = {
    "ddp": ({"distributed_type": "ddp"}, 2),
    "fsdp": ({"distributed_type": "fsdp"}, 2),
    "fsdp, generate as a forward": ({"distributed_type": "fsdp", **METHODS}, 2),
    "fsdp, whole after a forward": ({"distributed_type": "fsdp", "fsdp.reshard_after_forward": False, **METHODS}, 2),
    "zero2": ({"distributed_type": "deepspeed", "deepspeed.zero_stage": 2}, 2),
    "zero3": ({"distributed_type": "deepspeed", "deepspeed.zero_stage": 3}, 2),
    "tp": ({"distributed_type": "megatron", "mesh.tp": 2}, 2),
}
CASES = [(name, kind) for name in BACKENDS for kind in MODELS]
"""T5 calls its encoder by itself, past the forward that FSDP sees."""


def words(step: int) -> dict[str, Any]:
    data = jobs.Words(4, begin=step)
    return torch.utils.data.default_collate([data[index] for index in range(4)])


def say(model: Any, *, modes: Any) -> torch.Tensor:
    with modes():
        prompt = words(99)["input_ids"][:, :4]
        settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        said: torch.Tensor = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings)
    # What inference mode has made can be computed with afterwards.
    return said.clone()


def speaks_then_trains(kind: str, config: dict[str, Any] | None = None) -> tuple[list[Any], list[float]]:
    """What a model says before, between and after steps, and the losses of the steps; plain torch without a backend."""
    jobs.quiet()
    model = MODELS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    run, rank, ranks = None, 0, 1
    if config is not None:
        run = Accelerator(config=load_config(overrides={"use_cpu": True, **config}, environ={}))
        model, optimizer = run.prepare(model, optimizer)
        rank, ranks = run.backend.topology.dp_rank, run.backend.topology.dp_size
    said, losses = [say(model.eval(), modes=torch.inference_mode)], []
    for step in range(3):
        model.train()
        batch = {name: tensor[rank::ranks].contiguous() for name, tensor in words(step).items()}
        batch["labels"] = batch["input_ids"]
        loss = model(**batch).loss
        loss.backward() if run is None else run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if run is None else float(run.reduce(loss.detach(), "mean")))
        said.append(say(model.eval(), modes=torch.no_grad if step % 2 else torch.inference_mode))
    if run is not None:
        run.end_training()
    return said, losses


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {kind: spawn(speaks_then_trains, 1, kind)[0] for kind in MODELS}


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.gate("ddp-llama", "fsdp, generate*-llama", "zero3-llama", "tp-llama")
def test_generate_before_the_first_step(name: str, kind: str, alone: dict[str, Any]) -> None:
    if name.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    config, ranks = BACKENDS[name]
    said, losses = alone[kind]
    assert losses[-1] < losses[0] - 0.1, "it trains"
    for found, mine in spawn(speaks_then_trains, ranks, kind, config):
        assert mine == pytest.approx(losses, abs=TOLERANCE)
        assert all(torch.equal(one, other) for one, other in zip(found, said, strict=True))
