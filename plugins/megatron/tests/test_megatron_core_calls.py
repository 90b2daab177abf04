"""``engine: megatron_core``: what a script may call, windows of several batches, and what is refused with a reason."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator, load_config
from drivetrain.api import BackendBlockedError, UnsupportedError, UsageError
from drivetrain.api.programs import pip_line
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.core_engine.parallel_state import check
from drivetrain_megatron.core_engine.rearranging import EXPERTS_OUT, GATED, TRANSPOSED, heads, packed_heads, padded_rows
from drivetrain_megatron.core_engine.transformers_models import describe
from drivetrain_testing import spawn

pytest.importorskip("megatron.core", reason="needs drivetrain-megatron[core]")

ATOL = 2e-5
"""As in test_megatron_core_training."""

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(**sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes)).train()


def accelerator(gradient_accumulation_steps: int = 1, **section: Any) -> Accelerator:
    overrides: dict[str, Any] = {"distributed_type": "megatron", "use_cpu": True, "megatron.engine": "megatron_core"}
    overrides |= {f"megatron.{key}": value for key, value in section.items()}
    overrides["gradient_accumulation_steps"] = gradient_accumulation_steps
    return Accelerator(config=load_config(overrides=overrides, environ={}))


# ---- where parameters lie -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "shapes"),
    [
        (TRANSPOSED, [(3, 4)]),
        (GATED, [(3, 4), (3, 4)]),
        (heads(2, 3), [(12, 5), (6, 5), (6, 5)]),
        (heads(2, 3), [(12,), (6,), (6,)]),
        (packed_heads(3), [(5, 18)]),
        (packed_heads(3), [(18,)]),
        (padded_rows(3, 5), [(3, 4)]),
        (EXPERTS_OUT, [(4, 3, 2)]),
    ],
)
def test_rearranging_goes_there_and_back(how, shapes) -> None:
    ours = [torch.randn(shape) for shape in shapes]
    for there, back in zip(ours, how.split(how.join(ours)), strict=True):
        assert torch.equal(there, back)


# ---- calls ----------------------------------------------------------------------------------------------------------


def a_window_of_uneven_batches() -> dict[str, Any]:
    """Three batches of 3, 2 and 1 rows make a window, by the loop and by train_step, with a read before backward."""
    made = accelerator(3, pipeline_parallel_size=2, num_micro_batches=2)
    model = llama()
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(24, (rows, 6), generator=generator) for rows in (3, 2, 1)]
    early = []
    for ids in batches:
        with made.accumulate(model):
            loss = model(ids, labels=ids).loss
            early.append(float(loss))
            made.backward(loss * ids[:, 1:].numel(), num_items=ids[:, 1:].numel())
            # Computed again, by parts.
            assert float(loss) == pytest.approx(early[-1], rel=1e-5)
            norm = made.clip_grad_norm_(model.parameters(), 0.1) if made.sync_gradients else None
            optimizer.step()
            optimizer.zero_grad()
    step = made.train_step(
        model,
        [{"input_ids": ids} for ids in batches],
        _summed,
        num_items=lambda batch: batch["input_ids"][:, 1:].numel(),
        max_norm=0.1,
    )
    state = made.backend.broadcast_object({name: one.clone() for name, one in made.get_state_dict(model).items()})
    made.end_training()
    return {"early": early, "norms": [float(norm), float(step.grad_norm)], "state": state}


def _summed(outputs: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum")


def test_a_window_of_uneven_batches_is_one_big_batch(ranks) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(24, (rows, 6), generator=generator) for rows in (3, 2, 1)]
    early, norms = [model(ids, labels=ids).loss.item() for ids in batches], []
    for _ in range(2):
        model(torch.cat(batches), labels=torch.cat(batches)).loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    for found in (rank["window"] for rank in ranks):
        assert found["early"] == pytest.approx(early, rel=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-4)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(
                found["state"][name], tensor, rtol=0, atol=ATOL, msg=lambda text, n=name: n + text
            )


def special_cases() -> dict[str, Any]:
    """What other tests do not do, one model each: frozen parameters, dropout, recomputation, an empty model."""
    found: dict[str, Any] = {}
    ids = torch.arange(24).view(4, 6)
    made = accelerator(tensor_parallel_size=2)
    with made.init_empty_weights():
        empty = llama()
    # Its name before Transformers 5.24.
    enable = getattr(empty, "activation_checkpointing_enable", None) or empty.gradient_checkpointing_enable
    enable()
    for parameter in empty.model.embed_tokens.parameters():
        parameter.requires_grad_(False)
    empty, optimizer = made.prepare(empty, torch.optim.AdamW(empty.parameters(), lr=0.05, eps=1e-3))
    outputs = empty(input_ids=ids, labels=ids, return_dict=False)
    made.backward(outputs[0])
    optimizer.step()
    found["empty"] = {name: one.clone() for name, one in made.get_state_dict(empty).items()}
    made.free_memory()
    dropping, optimizer = made.prepare(*_with_dropout())
    for _ in range(2):
        optimizer.zero_grad()
        loss = dropping(ids, labels=ids).loss
        made.backward(loss)
        found.setdefault("dropped", []).append(float(loss))
    found["norm"] = float(made.clip_grad_norm_(dropping.parameters(), 1.0))
    made.end_training()
    return found


def _with_dropout() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = llama(attention_dropout=0.5)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_empty_models_frozen_parameters_recomputation_and_dropout(ranks) -> None:
    model, ids = llama(), torch.arange(24).view(4, 6)
    model.model.embed_tokens.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    found = ranks[0]["special"]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(
            found["empty"][name], tensor, rtol=0, atol=ATOL, msg=lambda text, n=name: f"{n}: {text}"
        )
    first, second = found["dropped"]
    assert first != second, "dropout drew the same numbers twice"
    assert found["dropped"] == ranks[1]["special"]["dropped"]
    assert found["norm"] == ranks[1]["special"]["norm"]


def refused_optimizers() -> list[str]:
    """What Megatron-Core's distributed optimizer cannot take, each with a model of its own."""
    made, told = accelerator(data_parallel="zero1"), []
    for number in range(3):
        model = llama()
        named = dict(model.named_parameters())
        key = named.pop("model.layers.0.self_attn.k_proj.weight")
        optimizer = [
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.optim.AdamW([{"params": [key]}, {"params": list(named.values())}]),
            torch.optim.AdamW([one for name, one in named.items() if "norm" not in name] + [key]),
        ][number]
        try:
            made.prepare(model, optimizer)
        except (UnsupportedError, UsageError) as problem:
            told.append(str(problem))
        made.free_memory()
    made.end_training()
    return told


def all_of_them() -> dict[str, Any]:
    return {
        "window": a_window_of_uneven_batches(),
        "special": special_cases(),
        "refused": refused_calls(),
        "zero1": refused_optimizers(),
        "advised": {name: trained_as_advised(name) for name in ADVISED},
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What both ranks saw; one job, since starting one costs more than all that it does."""
    return spawn(all_of_them, 2, timeout=200)


# ---- refusals -------------------------------------------------------------------------------------------------------


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Changed(transformers.LlamaForCausalLM):
    pass


def hooked() -> nn.Module:
    model = llama()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


def adapted() -> nn.Module:
    model = llama()
    model.model.layers[0].self_attn.q_proj.lora = nn.Parameter(torch.zeros(2))
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Ours, "it knows how to compute GPT2LMHeadModel, LlamaForCausalLM"),
        (lambda: Changed(transformers.LlamaConfig(**SIZES)), "no subclass of them"),
        (hooked, "hooks on model.layers.0 would never run"),
        (adapted, "no place for the parameter.s. model.layers.0.self_attn.q_proj.lora"),
        (lambda: llama(hidden_act="relu"), "hidden_act is 'relu'"),
        (lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "rotary embedding"),
    ],
)
def test_a_model_that_it_cannot_compute_is_refused_with_the_reason(make, why) -> None:
    with pytest.raises(UnsupportedError, match=rf"megatron\.engine: megatron_core cannot train \w+: .*{why}") as told:
        describe(make(), 0, 2)
    assert told.value.cure == "Write megatron.engine: torch, which trains any model."


def test_degrees_that_do_not_divide_are_told_with_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"(?s)num_key_value_heads 2 of the model.*Degrees that do: 1, 2"):
        describe(llama(), 0, 4)


def test_keys_of_the_other_engine_are_refused() -> None:
    for section, told in (
        ({"schedule": "zero_bubble"}, "schedule: zero_bubble is not offered"),
        ({"data_parallel": "fsdp"}, "data_parallel: fsdp is not offered"),
        ({"data_parallel": "zero1", "gradient_clipping": 1.0}, "gradient_clipping is not offered with"),
        ({"split_points": ("a",)}, "split_points is for megatron.engine: torch"),
    ):
        with pytest.raises(UsageError, match=told):
            check(MegatronConfig(engine="megatron_core", **section))


def test_an_engine_that_is_absent_or_another_release_is_told_with_the_pip_command(monkeypatch) -> None:
    section = MegatronConfig(engine="megatron_core")
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.1")
    cure = re.escape(pip_line("megatron", "core"))
    words = rf"engine: megatron_core drives megatron-core \d+\.\d+\.\*, and 0\.99\.1 is installed(?s:.*){cure}"
    with pytest.raises(BackendBlockedError, match=words):
        check(section)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendBlockedError, match="not installed"):
        check(section)


def with_other_loss(model: Any, ids: torch.Tensor) -> None:
    model.loss_function = F.cross_entropy
    model(ids, labels=ids)


def refused_calls() -> list[str]:
    made, told = accelerator(pipeline_parallel_size=2), []
    ids = torch.arange(24).view(4, 6)
    model, optimizer = made.prepare(*_with_dropout())
    copied = copy.deepcopy(made.unwrap_model(model))

    def call(refused: Callable[[], Any]) -> None:
        try:
            refused()
        except (UnsupportedError, UsageError) as problem:
            told.append(str(problem))

    call(lambda: model(inputs_embeds=torch.zeros(4, 6, 16)))
    call(lambda: model(ids, output_hidden_states=True))
    call(lambda: model(ids, position_ids=ids))
    call(lambda: model(ids[0]))
    call(lambda: model(ids, attention_mask=causal()))
    call(lambda: optimizer.step(lambda: 0.0))
    call(model.state_dict)
    call(copied.state_dict)
    call(lambda: with_other_loss(model, ids))
    made.end_training()
    made = accelerator(tensor_parallel_size=2, sequence_parallel=True)
    model = made.prepare(llama())
    call(lambda: model(ids[:, :5]))
    made.end_training()
    made = accelerator(tensor_parallel_size=2)
    call(lambda: made.prepare(mixtral()))
    call(lambda: made.prepare(halving()))
    model = made.prepare(llama())
    call(lambda: model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5))
    made.end_training()
    return told


OTHER_ENGINE, DDP = "Write megatron.engine: torch, which trains any model.", "data_parallel: ddp and engine: torch."


def test_calls_that_it_cannot_honour_are_refused_with_a_cure(ranks) -> None:
    words = [
        "inputs_embeds",
        "output_hidden_states",
        "do not count from 0",
        "LlamaForCausalLM was called without input_ids of two dims. Pass input_ids=[rows, positions].",
        f"6, 6), input_ids (4, 6). Under megatron.engine: megatron_core both are [rows, positions]. {OTHER_ENGINE}",
        "closure",
        "would be this rank's part",
        ") are on others. Write accelerator.get_state_dict(model), or accelerator.save_model(model, folder), on",
        f"own, which Megatron-Core computes. Compute it from outputs.logits in the script. {OTHER_ENGINE}",
        "shares 5 positions over 2 ranks, which do not divide them. Pad sequences to a multiple of 2, or leave sequ",
        "experts over tensor_parallel_size > 1 with sequence parallelism only. Write megatron.sequence_parallel: true.",
        *[f"past the parameter. Change parameter.grad after accelerator.backward(loss), or use {DDP}"] * 2,
    ]
    for told in (rank["refused"] for rank in ranks):
        assert len(told) == len(words)
        for text, word in zip(told, words, strict=True):
            assert word in text


# ---- what refusals advise -------------------------------------------------------------------------------------------

IDS = torch.arange(24).view(4, 6)


def causal() -> torch.Tensor:
    """A mask ``[rows, 1, positions, positions]`` that says what a causal model does anyhow."""
    return torch.ones(6, 6, dtype=torch.bool).tril().repeat(4, 1, 1, 1)


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config).train()


def smoothed(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def smoothed_by_itself() -> nn.Module:
    model: Any = llama()
    model.loss_function = smoothed
    return model


def with_relu() -> nn.Module:
    return llama(hidden_act="relu")


def of_a_subclass() -> nn.Module:
    torch.manual_seed(0)
    return Changed(transformers.LlamaConfig(**SIZES)).train()


def halving() -> nn.Module:
    model = llama()
    model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)
    return model


def in_two_dims(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, attention_mask=torch.ones(4, 6, dtype=torch.long), labels=IDS).loss


def from_logits(model: Any) -> torch.Tensor:
    return smoothed(model(IDS).logits, IDS)


def with_a_mask_of_four_dims(model: Any) -> torch.Tensor:
    return model(IDS, attention_mask=causal(), labels=IDS).loss


def of_five_positions(model: Any) -> torch.Tensor:
    return model(IDS[:, :5], labels=IDS[:, :5]).loss


def padded_to_six(model: Any) -> torch.Tensor:
    return model(F.pad(IDS[:, :5], (0, 1)), labels=F.pad(IDS[:, :5], (0, 1), value=-100)).loss


PIPELINE, TENSOR = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
ADVISED: dict[str, tuple[dict[str, Any], Callable[[], nn.Module], Callable[[Any], torch.Tensor]]] = {
    "two dims": (PIPELINE, llama, in_two_dims),
    "loss from logits": (PIPELINE, smoothed_by_itself, from_logits),
    "padded": (TENSOR | {"sequence_parallel": True}, llama, padded_to_six),
    "no sequence": (TENSOR, llama, of_five_positions),
    "experts": (TENSOR | {"sequence_parallel": True}, mixtral, in_two_dims),
    "gradient": (TENSOR, llama, in_two_dims),
    "mask": (PIPELINE | {"engine": "torch"}, smoothed_by_itself, with_a_mask_of_four_dims),
    "relu": (PIPELINE | {"engine": "torch"}, with_relu, in_two_dims),
    "subclass": (PIPELINE | {"engine": "torch"}, of_a_subclass, in_two_dims),
    "hooked": (PIPELINE | {"engine": "torch"}, hooked, in_two_dims),
    "adapted": (PIPELINE | {"engine": "torch"}, adapted, in_two_dims),
    "halving": (TENSOR | {"engine": "torch"}, halving, in_two_dims),
}
"""By what is advised: a section, a model, and what a script computes of it."""


def trained_as_advised(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    section, make, compute = ADVISED[name]
    made, model = accelerator(**section), make()
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    loss = compute(model)
    made.backward(loss)
    if name == "gradient":
        model.lm_head.weight.grad.mul_(0.5)
    optimizer.step()
    state = made.backend.broadcast_object(dict(made.get_state_dict(model)))
    found = loss.item()
    made.end_training()
    return found, state


@pytest.mark.parametrize("name", ADVISED)
def test_what_refusals_advise_trains_as_in_one_process(name: str, ranks) -> None:
    _, make, compute = ADVISED[name]
    # What is changed after backward, or padded, is to be as what a hook changes, and what is not padded.
    model = halving() if name == "gradient" else make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = (of_five_positions if compute is padded_to_six else compute)(model)
    expected.backward()
    optimizer.step()
    for loss, state in (rank["advised"][name] for rank in ranks):
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=0, atol=ATOL, msg=lambda text, n=key: f"{n}: {text}")


def test_optimizers_that_the_distributed_optimizer_cannot_take_are_refused(ranks) -> None:
    words = ["steps torch's AdamW, not SGD", "not in one parameter group", "require gradients, and Megatron-Core's"]
    for rank in ranks:
        for text, word in zip(rank["zero1"], words, strict=True):
            assert word in text


def test_the_plugin_and_its_configuration_do_not_import_megatron_core() -> None:
    code = "import drivetrain_megatron.backend, sys; print([one for one in sys.modules if one.startswith('megatron')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "[]"
