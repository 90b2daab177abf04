"""Adapters of PEFT in a loop of the script's own, under every backend: losses, folders that PEFT loads, resumes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain import Accelerator, load_config
from drivetrain_testing import spawn

if any(find_spec(name) is None for name in ("transformers", "peft")):
    pytest.skip("Transformers and PEFT are not installed", allow_module_level=True)

STEPS, BATCH = 3, 6
TOLERANCE = 2e-6
"""Of losses near 4, in float32."""

BACKENDS: Mapping[str, tuple[dict[str, Any], int]] = {
    "ddp": ({"distributed_type": "ddp"}, 3),
    "fsdp": ({"distributed_type": "fsdp"}, 3),
    "zero2": ({"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 2}}, 2),
    "zero3": ({"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 3}}, 2),
    "tp": ({"distributed_type": "megatron", "mesh": {"tp": 2}}, 2),
    "pp": ({"distributed_type": "megatron", "mesh": {"pp": 2}}, 2),
}

SINGLE = {"distributed_type": "single"}

KINDS: Mapping[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "two": {},
}


def plain() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    # PEFT asks Transformers by an older name.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def adapted(kind: str) -> Any:
    """A frozen base with adapters on attention and MLP; ``two`` trains the second of two."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **KINDS[kind]}
    model: Any = plain()
    torch.manual_seed(1)
    made: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    if kind == "two":
        made.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", **options))
        made.set_adapter("second")
    return made


def ids(step: int) -> Tensor:
    return torch.randint(64, (BATCH, 8), generator=torch.Generator().manual_seed(step))


def train(
    config: dict[str, Any],
    kind: str,
    *,
    folder: str | None = None,
    save: str | None = None,
    load: str | None = None,
    steps: int = STEPS,
) -> list[float]:
    """Losses of the global batches. Writes the adapter's folder, and a checkpoint."""
    accelerator = Accelerator(config=load_config(overrides={"use_cpu": True, **config}, environ={}), count_items=True)
    model = adapted(kind)
    optimizer: Any = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    start = 0
    if load is not None:
        # Ranks that the checkpoint does not know draw other numbers, which nothing here does.
        warnings.filterwarnings("ignore", message="the checkpoint holds the random state")
        accelerator.load_state(load)
        start = STEPS
    topology = accelerator.backend.topology
    rows = BATCH // topology.dp_size
    losses = []
    for step in range(start, start + steps):
        mine = ids(step)[topology.dp_rank * rows :][:rows]
        loss = model(input_ids=mine, labels=mine).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(accelerator.backend.gather_object(loss.detach().cpu())).mean()))
    if save is not None:
        accelerator.save_state(save)
    if folder is not None:
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state)
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return losses


def loaded(folder: str, *, merge: bool = False) -> tuple[float, float]:
    """Loss of the base with what PEFT loads from a folder, and of the base alone."""
    from peft import PeftModel

    base = plain()
    batch = ids(99)
    with torch.no_grad():
        before = float(base(input_ids=batch, labels=batch).loss)
        model: Any = PeftModel.from_pretrained(base, folder)
        if merge:
            model = model.merge_and_unload()
        return float(model(input_ids=batch, labels=batch).loss), before


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By kind: losses of one process, twice as many steps as elsewhere, and the loss with the folder of the first."""
    found = {}
    for kind in KINDS:
        folder = str(tmp_path_factory.mktemp(kind))
        losses = spawn(train, 1, SINGLE, kind, steps=2 * STEPS)[0]
        spawn(train, 1, SINGLE, kind, folder=folder)
        found[kind] = losses, spawn(loaded, 1, _adapter(folder, kind))[0]
    return found


def _adapter(folder: str, kind: str) -> str:
    return f"{folder}/second" if kind == "two" else folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.gate("ddp-lora", "fsdp-lora", "zero3-lora", "tp-lora", "pp-lora")
@pytest.mark.turns(2)
def test_losses_of_one_process_and_a_folder_that_peft_loads(name: str, kind: str, alone: Any, tmp_path: Path) -> None:
    config, ranks = BACKENDS[name]
    expected, (with_adapter, without) = alone[kind]
    folder = str(tmp_path)
    for losses in spawn(train, ranks, config, kind, folder=folder):
        assert losses == pytest.approx(expected[:STEPS], abs=TOLERANCE)
    found = spawn(loaded, 1, _adapter(folder, kind))[0]
    assert found == pytest.approx((with_adapter, without), abs=TOLERANCE)
    assert abs(with_adapter - without) > 100 * TOLERANCE, "the folder changes the base"


@pytest.mark.parametrize(
    ("first", "then"), [("fsdp", "tp"), ("tp", "zero3"), ("zero2", "single"), ("pp", "fsdp"), ("single", "pp")]
)
@pytest.mark.gate("tp-zero3")
def test_a_run_goes_on_under_another_backend(first: str, then: str, alone: Any, tmp_path: Path) -> None:
    places = {"single": (SINGLE, 1), **BACKENDS}
    (config, ranks), (next_config, next_ranks) = places[first], places[then]
    checkpoint = str(tmp_path / "state")
    spawn(train, ranks, config, "lora", save=checkpoint)
    for losses in spawn(train, next_ranks, next_config, "lora", load=checkpoint):
        assert losses == pytest.approx(alone["lora"][0][STEPS:], abs=TOLERANCE)


def test_a_merged_adapter_is_the_adapted_model(tmp_path: Path) -> None:
    config, ranks = BACKENDS["fsdp"]
    folder = str(tmp_path)
    spawn(train, ranks, config, "lora", folder=folder)
    (beside, before), (merged, _) = spawn(loaded, 1, folder)[0], spawn(loaded, 1, folder, merge=True)[0]
    assert merged == pytest.approx(beside, abs=1e-5)
    assert abs(merged - before) > 1e-4
