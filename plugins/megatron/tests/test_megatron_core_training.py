"""``engine: megatron_core``: Transformers models train as in one process, tensor, pipeline and data parallel."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, load_config
from drivetrain_testing import spawn

# test_megatron_core_calls.py and the conformance tests of Megatron-Core train smaller models.
pytestmark = pytest.mark.slow

pytest.importorskip("megatron.core", reason="needs drivetrain-megatron[core]")

WORDS, WIDTH, LENGTH, ROWS, STEPS = 37, 32, 8, 4, 3
ATOL = 2e-5
"""Float32, AdamW: a batch in parts and matrices on other ranks add in another order, which eps keeps from growing."""

SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
CALM = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama-tied": ("Llama", SIZES | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 8}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2",
        {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64} | CALM,
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"tensor_parallel_size": 2}),
    "sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp": (2, {"pipeline_parallel_size": 2, "num_micro_batches": 2}),
    "dp": (2, {}),
    "zero1": (2, {"data_parallel": "zero1"}),
    "tp-pp": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True}),
    "dp-tp": (4, {"tensor_parallel_size": 2}),
    "zero1-tp": (4, {"tensor_parallel_size": 2, "data_parallel": "zero1"}),
    "zero1-sp": (4, {"tensor_parallel_size": 2, "data_parallel": "zero1", "sequence_parallel": True}),
    "torch-pp": (2, {"engine": "torch", "pipeline_parallel_size": 2}),
    "zero1-pp": (4, {"pipeline_parallel_size": 2, "data_parallel": "zero1"}),
}


def build(which: str) -> nn.Module:
    name, sizes = MODELS[which]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, bos_token_id=None, eos_token_id=None)
    model: nn.Module = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Transformers starts biases at 0 and norms at 1, which would hide one that is in a wrong place.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def samples() -> tuple[torch.Tensor, ...]:
    """Tokens, masks that hide some last positions, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(WORDS, (ROWS * STEPS, LENGTH), generator=generator)
    seen = LENGTH - torch.arange(ROWS * STEPS).unsqueeze(1) % 4
    mask = (torch.arange(LENGTH).unsqueeze(0) < seen).long()
    return ids, mask, ids.masked_fill(mask == 0, -100)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def make(layout: str | None) -> Accelerator:
    overrides: dict[str, Any] = {"distributed_type": "megatron" if layout else "single", "use_cpu": True}
    if layout:
        section = {"engine": "megatron_core"} | LAYOUTS[layout][1]
        overrides |= {f"megatron.{key}": value for key, value in section.items()}
    return Accelerator(config=load_config(overrides=overrides, environ={}))


def train(layout: str | None, which: str, folder: str | None = None, source: str | None = None) -> dict[str, Any]:
    """The user's script: losses inside and outside of the model, clipping, metrics, evaluation, a checkpoint."""
    made = make(layout)
    model = build(which)
    size = ROWS // made.backend.topology.dp_size
    loader = DataLoader(TensorDataset(*samples()), batch_size=size)
    model, optimizer, loader = made.prepare(model, adamw(model), loader)
    if source is not None:
        made.load_state(source)
    losses, norms = [], []
    for step, (ids, mask, labels) in enumerate(loader):
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        loss, items = outputs.loss, (labels[:, 1:] != -100).sum()
        if step == 1:
            loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        made.backward(loss * items, num_items=items)
        norms.append(float(made.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        both = made.reduce(torch.stack([(loss * items).detach(), items.float()]), "sum")
        losses.append(float(both[0] / both[1]))
    model.eval()
    with torch.no_grad():
        ids, mask, labels = samples()
        outputs = model(ids[:ROWS], attention_mask=mask[:ROWS], labels=labels[:ROWS])
    seen = outputs.logits[mask[:ROWS].bool()]
    if folder is not None:
        made.save_state(folder)
    state = {name: one.clone() for name, one in made.get_state_dict(model).items()}
    state = made.backend.broadcast_object(state)
    made.end_training()
    return {"losses": losses, "norms": norms, "loss": float(outputs.loss), "logits": seen, "state": state}


def several(layout: str, models: list[str]) -> dict[str, Any]:
    return {which: train(layout, which) for which in models}


def several_alone(models: list[str]) -> dict[str, Any]:
    return {which: train(None, which) for which in models}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """The same script in one process, under ``single``, for each model."""
    (found,) = spawn(several_alone, 1, list(MODELS), timeout=110)
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for what in ("losses", "norms", "loss"):
        assert found[what] == pytest.approx(expected[what], rel=1e-4, abs=ATOL), what
    # Logits are sums over the width, ten times a parameter's difference.
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=10 * ATOL)
    assert list(found["state"]) == list(expected["state"])
    for name, tensor in expected["state"].items():
        torch.testing.assert_close(
            found["state"][name], tensor, rtol=0, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("layout", "models"),
    [
        ("tp", ["llama", "llama-tied", "qwen2", "qwen3", "gpt2"]),
        ("pp", ["llama", "llama-tied", "mixtral", "gpt2"]),
        ("zero1", ["llama-tied", "mixtral", "gpt2"]),
        ("tp-pp", ["llama-tied", "qwen3", "mixtral", "gpt2"]),
        pytest.param("dp", ["llama", "mixtral"], marks=pytest.mark.slow),
        pytest.param("dp-tp", ["llama", "gpt2"], marks=pytest.mark.slow),
        pytest.param("zero1-pp", ["llama-tied", "qwen2"], marks=pytest.mark.slow),
        pytest.param("zero1-tp", ["llama-tied", "qwen2", "gpt2"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.turns(2)
def test_a_model_trains_as_in_one_process(layout: str, models: list[str], alone) -> None:
    for rank in spawn(several, LAYOUTS[layout][0], layout, models, timeout=110):
        for which, found in rank.items():
            same(found, alone[which])


def low_precision(device_type: str) -> tuple[list[float], set[torch.dtype]]:
    """Losses of steps on one batch in bf16, and the dtypes of what is saved."""
    overrides = {"distributed_type": "megatron", "mixed_precision": "bf16", "use_cpu": device_type == "cpu"}
    section = {"engine": "megatron_core", "data_parallel": "zero1"}
    made = Accelerator(
        config=load_config(overrides=overrides | {f"megatron.{k}": v for k, v in section.items()}, environ={})
    )
    model = build("llama")
    model, optimizer = made.prepare(model, adamw(model))
    ids, mask, labels = (one[:ROWS].to(made.device) for one in samples())
    losses = []
    for _ in range(4):
        loss = model(ids, attention_mask=mask, labels=labels).loss
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    dtypes = made.backend.broadcast_object({one.dtype for one in made.get_state_dict(model).values()})
    made.end_training()
    return losses, dtypes


def learns_in_low_precision(device_type: str, world_size: int) -> None:
    model = build("llama")
    optimizer = adamw(model)
    ids, mask, labels = (one[:ROWS] for one in samples())
    expected = []
    for _ in range(4):
        loss = model(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses, dtypes in spawn(low_precision, world_size, device_type, timeout=110):
        # bf16 rounds to a part in 256; over the tokens of a batch that averages out to a part in a thousand.
        assert losses == pytest.approx(expected, rel=5e-3)
        assert dtypes == {torch.float32}, "the parameters that are saved are the float32 ones"


@pytest.mark.slow
def test_bf16_has_float32_parameters_beside_it() -> None:
    learns_in_low_precision("cpu", 2)


@pytest.mark.gpu
def test_on_a_gpu_megatron_core_runs_as_it_is() -> None:
    learns_in_low_precision("cuda", 1)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def two_epochs_alone(which: str, folder: str) -> dict[str, Any]:
    train(None, which, f"{folder}/alone")
    return train(None, which, None, f"{folder}/alone")


def there_and_on(writer: str, reader: str, which: str, folder: str) -> list[dict[str, Any]]:
    """One epoch here; a second one of ``single``'s first, and one of the first here under torch's own engine."""
    train(writer, which, f"{folder}/core")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random state of.*")  # More coordinates than were saved.
        return [
            train(reader, which, None, f"{folder}/alone"),
            train("torch-pp", which, None, f"{folder}/core"),
            train(reader, which, None, f"{folder}/core"),
        ]


@pytest.mark.parametrize(
    ("writer", "reader", "which"),
    [
        ("pp", "zero1", "qwen2"),
        pytest.param("zero1", "sp", "gpt2", marks=pytest.mark.slow),
        pytest.param("sp", "zero1", "mixtral", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_under_another_layout_and_another_backend(writer, reader, which, tmp_path) -> None:
    """Moments, names and packed matrices: from ``single``, to ``single``, to ``engine: torch``, and among layouts."""
    (second,) = spawn(two_epochs_alone, 1, which, str(tmp_path))
    for rank in spawn(there_and_on, 2, writer, reader, which, str(tmp_path), timeout=110):
        for found in rank:
            same(found, second)
    (back,) = spawn(train, 1, None, which, None, str(tmp_path / "core"))
    same(back, second)


def there_and_back(which: str, folder: str) -> dict[str, Any]:
    train("zero1-sp", which, f"{folder}/core")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random state of.*")  # More coordinates than were saved.
        return train("zero1-sp", which, None, f"{folder}/alone")


@pytest.mark.slow
@pytest.mark.parametrize("which", ["gpt2", "mixtral"])
def test_shards_of_shared_layers_are_saved_and_loaded(which, tmp_path) -> None:
    """Transposed and packed matrices, and experts: each rank of ``tp`` has a part, and each of ``dp`` a shard of it."""
    (second,) = spawn(two_epochs_alone, 1, which, str(tmp_path))
    for found in spawn(there_and_back, 4, which, str(tmp_path), timeout=110):
        same(found, second)
    (back,) = spawn(train, 1, None, which, None, str(tmp_path / "core"))
    same(back, second)
