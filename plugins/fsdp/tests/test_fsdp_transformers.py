"""A Llama of Transformers, made from a configuration, trains, evaluates and generates in shards as it does whole."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator, load_config
from drivetrain_testing import spawn

transformers = pytest.importorskip("transformers", reason="transformers is not installed: there is no Llama to train")

STEPS, BATCH, WORDS = 3, 4, 64
TOLERANCE = 2e-6  # Losses near 4 in float32; two ranks add the same numbers in another order.
End = tuple[list[float], Tensor, Tensor, dict[str, Tensor]]


def llama(tied: bool) -> Any:
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # A large eps: a gradient of nearly zero, whose sign the order of sums decides, must not make a full step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def batch(step: int) -> Tensor:
    """Words in order, from anywhere: something to learn."""
    first = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(9)) % WORDS


def ended(model: Any) -> tuple[Tensor, Tensor]:
    """Logits of some words in evaluation, and what the model says next by itself."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=batch(99)).logits.clone()
    said = model.generate(input_ids=batch(99)[:2, :4], max_new_tokens=5, do_sample=False, eos_token_id=None)
    model.train()
    return logits, said


def whole(tied: bool) -> End:
    model = llama(tied)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            ended(model)
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, *ended(model), model.state_dict()


def sharded(tied: bool, section: dict[str, Any]) -> End:
    # Dynamo looks at every attribute of the tensors that it traces.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    overrides = {"distributed_type": "fsdp", "use_cpu": True, **{f"fsdp.{key}": each for key, each in section.items()}}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    model = llama(tied)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            ended(model)
        words = batch(step)[share]
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        if step == STEPS:
            # While parameters stand whole: the step below must reach the next forward all the same.
            ended(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    logits, said = ended(model)
    state = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return losses, logits, said, state


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "tied": (True, {}),
    "untied": (False, {}),
    "tied-checkpointing": (True, {"activation_checkpointing": True}),
    "untied-checkpointing-by-size": (
        False,
        {"activation_checkpointing": True, "reshard_after_forward": False, "min_num_params": 500},
    ),
}


def each_case() -> dict[str, End]:
    return {name: sharded(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, End]]:
    """Every case in one group of ranks: importing Transformers takes longer than all of them."""
    return spawn(each_case, 2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.gate("untied", "tied-checkpointing")
def test_a_llama_trains_and_speaks(name: str, found: list[dict[str, End]]) -> None:
    losses, logits, said, state = whole(CASES[name][0])
    assert losses[-1] < losses[0] - 0.1
    for rank in found:
        assert rank[name][0] == pytest.approx(losses, abs=TOLERANCE)
        torch.testing.assert_close(rank[name][1], logits, rtol=0, atol=1e-4)  # Logits near 5, six steps of AdamW.
        assert torch.equal(rank[name][2], said)
    assert list(found[0][name][3]) == list(state)
    for key, tensor in found[0][name][3].items():
        torch.testing.assert_close(tensor, state[key], rtol=0, atol=1e-5, msg=key)
