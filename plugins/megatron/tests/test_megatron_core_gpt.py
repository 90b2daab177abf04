"""``engine: megatron_core``: a ``GPTModel`` that the script constructs from its own ``TransformerConfig``."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.megatron_core import whole_models
from drivetrain_testing import spawn

# test_megatron_core_calls.py and the conformance tests of Megatron-Core train smaller models.
pytestmark = pytest.mark.slow

pytest.importorskip("megatron.core", reason="needs drivetrain-megatron[core]")

WORDS, WIDTH, LENGTH, ROWS, STEPS = 37, 32, 8, 4, 3
ATOL = 2e-5
"""Float32, AdamW: a batch in parts and matrices on other ranks add in another order, which eps keeps from growing."""

PLAIN: dict[str, Any] = {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
ROPE = {"position_embedding_type": "rope"}
SCALED = {
    "rope_scaling": True,
    "rope_scaling_factor": 4.0,
    "rotary_percent": 0.5,
    "seq_len_interpolation_factor": 2.0,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learned-tied": ({}, {"share_embeddings_and_output_weights": True}),
    "llama": (LLAMA, ROPE | SCALED),
    "qk-norm-tied": (
        LLAMA | {"qk_layernorm": True, "add_qkv_bias": True},
        ROPE | {"share_embeddings_and_output_weights": True},
    ),
    "gated-biases": ({"gated_linear_unit": True, "normalization": "RMSNorm"}, ROPE),
    "moe": (
        LLAMA | {"num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 16},
        ROPE,
    ),
    "moe-and-dense": (LLAMA | {"num_moe_experts": 4, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 24}, ROPE),
    "recomputed": (
        LLAMA | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ROPE,
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"tensor_parallel_size": 2}),
    "sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp": (2, {"pipeline_parallel_size": 2, "num_micro_batches": 2}),
    "dp": (2, {}),
    "zero1": (2, {"data_parallel": "zero1"}),
    "tp-pp": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True}),
    "zero1-tp": (4, {"tensor_parallel_size": 2, "sequence_parallel": True, "data_parallel": "zero1"}),
    "zero1-pp": (4, {"pipeline_parallel_size": 2, "data_parallel": "zero1"}),
}


def build(which: str) -> nn.Module:
    """As a script for one device does it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    sizes, gpt = MODELS[which]
    torch.manual_seed(0)
    calm = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    with warnings.catch_warnings():
        # It says which of its own defaults it will do without.
        warnings.simplefilter("ignore")
        config = TransformerConfig(**PLAIN | calm | sizes, use_cpu_initialization=True)
    if isinstance(config.moe_layer_freq, list):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=WORDS, max_sequence_length=LENGTH, **gpt)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start at 0 and norms at 1, which would hide one that is in a wrong place.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def samples() -> tuple[torch.Tensor, ...]:
    """Tokens, what follows each, which of those count, and where queries do not look."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (ROWS * STEPS, LENGTH + 1), generator=generator)
    seen = LENGTH - torch.arange(ROWS * STEPS).unsqueeze(1) % 4
    counts = torch.arange(LENGTH).unsqueeze(0) < seen
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return tokens[:, :-1], tokens[:, 1:], counts, future | ~counts[:, None, None, :]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def make(layout: str) -> Accelerator:
    kind = "megatron" if layout in LAYOUTS else layout
    overrides: dict[str, Any] = {"distributed_type": kind, "use_cpu": True}
    if layout in LAYOUTS:
        section = {"engine": "megatron_core"} | LAYOUTS[layout][1]
        overrides |= {f"megatron.{key}": value for key, value in section.items()}
    return Accelerator(config=load_config(overrides=overrides, environ={}))


def train(layout: str, which: str, folder: str | None = None, source: str | None = None) -> dict[str, Any]:
    """The user's script: losses inside and outside of the model, clipping, metrics, evaluation, a checkpoint."""
    made = make(layout)
    whole_models(made.device)
    model = build(which)
    size = ROWS // made.backend.topology.dp_size
    loader = DataLoader(TensorDataset(*samples()), batch_size=size)
    model, optimizer, loader = made.prepare(model, adamw(model), loader)
    if source is not None:
        made.load_state(source)
    places = torch.arange(LENGTH).unsqueeze(0)
    losses, norms = [], []
    for step, (ids, labels, counts, masked) in enumerate(loader):
        given = {"input_ids": ids, "position_ids": places.expand_as(ids)}
        if step == 1:
            logits = model(**given, attention_mask=None)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            made.backward(loss)
        else:
            loss = (model(**given, attention_mask=masked, labels=labels) * counts).sum() / counts.sum()
            made.backward(loss * counts.sum(), num_items=counts.sum())
        norms.append(float(made.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        weight = torch.tensor(float(labels.numel())) if step == 1 else counts.sum().float()
        both = made.reduce(torch.stack([(loss * weight).detach(), weight]), "sum")
        losses.append(float(both[0] / both[1]))
    model.eval()
    with torch.no_grad():
        ids, labels, counts, masked = (one[:ROWS] for one in samples())
        logits = model(ids, places.expand_as(ids), masked)
        evaluated = model(ids, places.expand_as(ids), masked, labels=labels)
    if folder is not None:
        made.save_state(folder)
    state = {name: one.clone() for name, one in made.get_state_dict(model).items() if isinstance(one, torch.Tensor)}
    state = made.backend.broadcast_object(state)
    made.end_training()
    return {"losses": losses, "norms": norms, "logits": logits[counts], "evaluated": evaluated, "state": state}


def several(layout: str, models: list[str]) -> dict[str, Any]:
    return {which: train(layout, which) for which in models}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """The same script in one process, under ``single``, for each model."""
    (found,) = spawn(several, 1, "single", list(MODELS), timeout=110)
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(expected[what], rel=1e-4, abs=ATOL), what
    # Logits are sums over the width, ten times a parameter's difference.
    for what in ("logits", "evaluated"):
        torch.testing.assert_close(found[what], expected[what], rtol=0, atol=10 * ATOL)
    assert list(found["state"]) == list(expected["state"])
    for name, tensor in expected["state"].items():
        torch.testing.assert_close(
            found["state"][name], tensor, rtol=0, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("layout", "models"),
    [
        ("tp", ["learned-tied", "llama", "gated-biases"]),
        ("pp", ["learned-tied", "moe-and-dense", "recomputed"]),
        ("zero1", ["learned-tied", "moe"]),
        ("tp-pp", ["learned-tied", "qk-norm-tied", "moe", "gated-biases", "moe-and-dense", "recomputed"]),
        ("ddp", ["llama"]),
        pytest.param("sp", ["learned-tied", "qk-norm-tied", "moe"], marks=pytest.mark.slow),
        pytest.param("dp", ["llama", "moe"], marks=pytest.mark.slow),
        pytest.param("zero1-tp", ["learned-tied", "qk-norm-tied", "moe"], marks=pytest.mark.slow),
        pytest.param("zero1-pp", ["learned-tied", "gated-biases"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.turns(2)
def test_a_gpt_model_trains_as_in_one_process(layout: str, models: list[str], alone) -> None:
    for rank in spawn(several, LAYOUTS.get(layout, (2,))[0], layout, models, timeout=110):
        for which, found in rank.items():
            same(found, alone[which])


def constructed_without_memory(*, empty: bool) -> tuple[int, list[float]]:
    """How many parameters had no memory, and losses; the model is wide, since small tensors are made at once."""
    made = make("tp")
    PLAIN["hidden_size"] = 128
    with made.init_empty_weights() if empty else nullcontext():
        model = build("qk-norm-tied")
    absent = sum(one.is_meta for one in model.parameters())
    model, optimizer = made.prepare(model, adamw(model))
    losses = one_batch(model, optimizer, made.backward)
    made.end_training()
    return absent, losses


@pytest.mark.slow
def test_a_model_that_was_constructed_without_memory_starts_with_the_same_values() -> None:
    full = spawn(constructed_without_memory, 2, empty=False, timeout=110)
    for (absent, losses), (_, expected) in zip(
        spawn(constructed_without_memory, 2, empty=True, timeout=110), full, strict=True
    ):
        assert absent
        assert losses == expected


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def two_epochs_alone(which: str, folder: str) -> dict[str, Any]:
    train("single", which, f"{folder}/alone")
    return train("single", which, None, f"{folder}/alone")


def there_and_on(writer: str, reader: str, which: str, folder: str) -> list[dict[str, Any]]:
    """One epoch here; a second one of ``single``'s first, and one of the first here."""
    train(writer, which, f"{folder}/core")
    return [train(reader, which, None, f"{folder}/{source}") for source in ("alone", "core")]


@pytest.mark.parametrize(
    ("writer", "reader", "which"),
    [
        ("pp", "tp", "qk-norm-tied"),
        pytest.param("tp-pp", "zero1-tp", "gated-biases", marks=pytest.mark.slow),
        pytest.param("zero1-tp", "zero1-pp", "moe", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_under_another_layout_and_another_backend(writer, reader, which, tmp_path) -> None:
    """Moments and names, of layers counted over the whole model: from ``single``, to ``single``, and among layouts."""
    (second,) = spawn(two_epochs_alone, 1, which, str(tmp_path), timeout=110)
    for rank in spawn(there_and_on, LAYOUTS[writer][0], writer, reader, which, str(tmp_path), timeout=110):
        for found in rank:
            same(found, second)
    (back,) = spawn(train, 1, "single", which, None, str(tmp_path / "core"), timeout=110)
    same(back, second)


# ---- precision ------------------------------------------------------------------------------------------------------


def low_precision(which: str, section: dict[str, Any]) -> tuple[list[float], set[torch.dtype]]:
    """Losses of steps on one batch, and the dtypes of what is saved."""
    overrides: dict[str, Any] = {"distributed_type": "megatron", "mixed_precision": which, "use_cpu": True}
    overrides |= {f"megatron.{key}": value for key, value in ({"engine": "megatron_core"} | section).items()}
    made = Accelerator(config=load_config(overrides=overrides, environ={}))
    model = build("llama")
    model, optimizer = made.prepare(model, adamw(model))
    losses = one_batch(model, optimizer, made.backward)
    dtypes = made.backend.broadcast_object({one.dtype for one in made.get_state_dict(model).values()})
    made.end_training()
    return losses, dtypes


def one_batch(model: nn.Module, optimizer: Any, backward: Any) -> list[float]:
    ids, labels, _, masked = (one[:ROWS] for one in samples())
    places, losses = torch.arange(LENGTH).expand_as(ids), []
    for _ in range(4):
        loss = model(ids, places, masked, labels=labels).mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_float32() -> list[float]:
    whole_models("cpu")
    model = build("llama")
    return one_batch(model, adamw(model), lambda loss: loss.backward())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "section"),
    [
        ("bf16", {"tensor_parallel_size": 2, "sequence_parallel": True}),
        ("fp16", {"pipeline_parallel_size": 2}),
        ("fp16", {"data_parallel": "zero1"}),
    ],
)
def test_low_precision_has_float32_parameters_beside_it(which, section) -> None:
    (expected,) = spawn(in_float32, 1, timeout=110)
    for losses, dtypes in spawn(low_precision, 2, which, section, timeout=110):
        # bf16 rounds to a part in 256, fp16 to one in 2048; over the tokens of a batch that averages out.
        assert losses == pytest.approx(expected, rel=5e-3)
        assert dtypes == {torch.float32}, "the parameters that are saved are the float32 ones"


# ---- refusals -------------------------------------------------------------------------------------------------------


def changed(**sizes: Any) -> nn.Module:
    """The llama with other fields in its configuration, set after it was constructed."""
    model = build("llama")
    for name, value in sizes.items():
        setattr(model.config, name, value)
    return model


def adapted() -> nn.Module:
    model = build("llama")
    model.decoder.layers[0].self_attention.linear_qkv.lora = nn.Parameter(torch.zeros(2))
    return model


def hooked() -> nn.Module:
    model = build("llama")
    model.decoder.layers[0].register_forward_hook(lambda *_: None)
    return model


def subclass() -> nn.Module:
    model = build("llama")
    model.__class__ = type("Ours", (type(model),), {})
    return model


def a_stage() -> nn.Module:
    model = build("llama")
    model.post_process = False
    return model


REFUSED: list[tuple[Any, str]] = [
    (lambda: changed(moe_aux_loss_coeff=0.01), "moe_aux_loss_coeff of its configuration is 0.01: it adds to gradients"),
    (lambda: changed(tensor_model_parallel_size=2), "tensor_model_parallel_size of its configuration is 2: degrees of"),
    (lambda: changed(calculate_per_token_loss=True), "num_items=tokens"),
    (adapted, "its specification of layers does not construct decoder.layers.0.self_attention.linear_qkv.lora"),
    (hooked, "the hooks on decoder.layers.0 would never run"),
    (subclass, "no subclass of them"),
    (a_stage, "it is one stage of a pipeline"),
]


def told_by_prepare_and_calls() -> tuple[list[str], list[str], dict[str, torch.Tensor]]:
    made, told = make("tp"), []
    for number in range(len(REFUSED)):
        try:
            made.prepare(REFUSED[number][0]())
        except (UnsupportedError, UsageError) as problem:
            told.append(str(problem))
    model = made.prepare(build("learned-tied"))
    ids = torch.arange(LENGTH).expand(ROWS, LENGTH)
    calls: list[str] = []
    for call in (
        lambda: model(ids, ids, None, decoder_input=torch.zeros(LENGTH, ROWS, WIDTH)),
        lambda: model(ids, ids, torch.ones(ROWS, LENGTH)),
        lambda: model(ids, ids, None, labels=ids[:, 1:]),
        lambda: model(ids[0], ids, None),
        lambda: model(ids, None, None),
        lambda: model(ids.repeat(1, 2), ids.repeat(1, 2), None),
    ):
        try:
            call()
        except (UnsupportedError, UsageError) as problem:
            calls.append(str(problem))
    model.eval()
    with torch.no_grad():
        found = {name: advised(model) for name, advised in ADVISED.items()}
    made.end_training()
    return told, calls, found


def _future(rows: int) -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).repeat(rows, 1, 1, 1)


ADVISED: dict[str, Any] = {
    "positions": lambda model: model(_ids(), _ids(), None),
    "mask of each row": lambda model: model(_ids(), _ids(), _future(ROWS)),
    "mask of all rows": lambda model: model(_ids(), _ids(), _future(1)),
    "labels": lambda model: model(_ids(), _ids(), None, labels=_ids().flip(1)),
}


def _ids() -> torch.Tensor:
    return torch.arange(LENGTH).repeat(ROWS, 1)


def called_alone() -> dict[str, torch.Tensor]:
    whole_models("cpu")
    model = build("learned-tied").eval()
    with torch.no_grad():
        return {name: advised(model) for name, advised in ADVISED.items()}


def test_what_cannot_be_trained_is_refused_with_the_reason() -> None:
    words = [
        "decoder_input",
        "attention_mask has the shape (4, 8), and input_ids (4, 8). Megatron-Core wants (4, 1, 8, 8) or (1, 1, 8, 8).",
        "labels has the shape (4, 7), and input_ids (4, 8). Megatron-Core wants (4, 8).",
        "GPTModel was called without input_ids of two dims. Pass [rows, positions].",
        "GPTModel was called without position_ids. Pass int64 [rows, positions].",
        "16 positions, and the model has 8",
    ]
    (expected,) = spawn(called_alone, 1, timeout=110)
    for told, calls, found in spawn(told_by_prepare_and_calls, 2, timeout=110):
        for text, (_, why) in zip(told, REFUSED, strict=True):
            assert "megatron.engine: megatron_core cannot train" in text
            assert why in text
        for text, why in zip(calls, words, strict=True):
            assert why in text
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=10 * ATOL, msg=name)
