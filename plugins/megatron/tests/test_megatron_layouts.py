"""``drivetrain plan show``: what it says that each rank would hold is what each rank holds once it trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from drivetrain.api import UsageError
from drivetrain_megatron.commands import plan
from drivetrain_megatron.pipeline.skeleton import is_absent
from drivetrain_testing import spawn

WORDS, WIDTH, ROWS = 37, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("factor", torch.ones(WIDTH))

    def forward(self, x):
        return x + self.factor * self.down(self.up(x).relu())


class Tied(nn.Module):
    """A language model whose head is its embedding, which a pipeline has at both of its ends."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Two(nn.Module):
    """Takes what nobody can guess."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 5)

    def forward(self, pair):
        return self.second(self.first(pair["left"] + pair["right"]))


def arguments_of_two():
    return {"pair": {"left": torch.zeros(2, 3), "right": torch.zeros(2, 3)}}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


HERE = Path(__file__).name


def show(monkeypatch, *arguments):
    monkeypatch.chdir(Path(__file__).parent)
    outcome = CliRunner().invoke(plan, ["show", *arguments], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held_in_training(section: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds after a step: the shapes of its parameters and how many bytes they have."""
    from drivetrain import Accelerator, load_config

    overrides = {"distributed_type": "megatron", "use_cpu": True, "megatron": section}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    torch.manual_seed(0)
    core = section.get("engine") == "megatron_core"
    model: Any = llama() if core else Tied()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.arange(ROWS * 4).view(ROWS, 4) % WORDS
    if core:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    else:
        loss = model(tokens).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    if core:
        parameters = list(model._drivetrain.trainable._wrapped.module.parameters())
        shapes = {str(place): tuple(one.shape) for place, one in enumerate(parameters)}
    else:
        named = dict(accelerator.unwrap_model(model).named_parameters())
        # What other stages hold has shapes, but no memory.
        named = {name: one for name, one in named.items() if not is_absent(one)}
        shapes = {name: tuple(local(one).shape) for name, one in named.items()}
        parameters = [local(one) for one in named.values()]
    size = sum(one.numel() * one.element_size() for one in parameters)
    accelerator.end_training()
    return {"shapes": shapes, "bytes": size}


@pytest.mark.parametrize(
    ("world", "section"),
    [
        (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        (2, {"pipeline_parallel_size": 2, "schedule": "zbv", "num_micro_batches": 4}),
        (2, {"pipeline_parallel_size": 2, "split_points": ["layers.3"]}),
    ],
    ids=["tp-pp", "zbv", "split"],
)
@pytest.mark.gate("tp-pp")
def test_what_is_shown_is_what_training_holds(world, section, tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"distributed_type": "megatron", "megatron": section}), encoding="utf-8")
    shown = json.loads(show(monkeypatch, f"{HERE}:Tied", "--config", str(config), "--json"))
    trained = spawn(held_in_training, world, section, timeout=200)
    assert [one["bytes"] for one in trained] == shown["bytes_by_rank"]
    for rank, one in enumerate(trained):
        pipeline_rank, tensor_rank = divmod(rank, shown["degree"])
        stages = {n for n, stage in enumerate(shown["stages"]) if stage["pipeline_rank"] == pipeline_rank}
        expected = {
            each["name"]: tuple(each["local_shapes"][tensor_rank])
            for each in shown["parameters"]
            if stages & set(each["stages"])
        }
        assert one["shapes"] == expected


def test_what_is_shown_of_megatron_core_is_what_training_holds(monkeypatch):
    pytest.importorskip("megatron.core", reason="needs drivetrain-megatron[core]")
    flags = ["--engine", "megatron_core", "--tp", "2", "--pp", "2"]
    shown = json.loads(show(monkeypatch, f"{HERE}:llama", *flags, "--json"))
    section = {"engine": "megatron_core", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    trained = spawn(held_in_training, 4, section, timeout=200)
    assert [one["bytes"] for one in trained] == shown["bytes_by_rank"]
    for rank, one in enumerate(trained):
        expected = sorted(
            tuple(each["local_shapes"][rank % 2]) for each in shown["parameters"] if rank // 2 in each["stages"]
        )
        assert sorted(one["shapes"].values()) == expected
    text = show(monkeypatch, f"{HERE}:llama", *flags)
    assert "stage 1, pipeline rank 1: decoder.layers.2-3, decoder.final_layernorm, output_layer" in text
    for line in (
        r"embedding.word_embeddings.weight +vocab-parallel +37 x 16 +19 x 16 +also on stage 1; is \S+embed_tokens\S+",
        r"decoder.layers.0-1.self_attention.linear_qkv.weight +column-parallel +32 x 16 +16 x 16 +is \S+{q_proj,k\S+",
        r"decoder.layers.0-1.mlp.linear_fc2.weight +row-parallel +16 x 24 +16 x 12 +is \S+down_proj.weight",
        r"decoder.final_layernorm.weight +replicated +16 +16 +is model.norm.weight",
    ):
        assert re.search(rf"^ +{line}$", text, re.MULTILINE), line


def test_a_page_of_a_pipeline(monkeypatch):
    text = show(monkeypatch, f"{HERE}:Tied", "--pp", "2")
    assert text.startswith("Tied by engine torch, 2 rank(s): pp 2 x tp 1\n2 stages, by balance of bytes\n")
    assert "stage 0, pipeline rank 0: embedding, layers.0-1\n" in text
    assert "stage 1, pipeline rank 1: layers.2-3, head\n" in text
    assert re.search(r"^  embedding.weight +37 x 16 +also on stage 1; tied to head.weight$", text, re.MULTILINE)
    assert re.search(r"^  layers.2-3.up.weight +64 x 16$", text, re.MULTILINE)
    assert "  4,848 parameters, 19,392 bytes on a rank" in text
    assert "tensor parallel" not in text


def test_inputs_that_cannot_be_guessed_are_asked_for(monkeypatch):
    with pytest.raises(UsageError, match="the forward of Two, which shows where") as caught:
        show(monkeypatch, f"{HERE}:Two", "--pp", "2")
    assert "--batch train.py:function" in caught.value.cure
    text = show(monkeypatch, f"{HERE}:Two", "--pp", "2", "--batch", f"{HERE}:arguments_of_two")
    assert "stage 1, pipeline rank 1: second" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pp", "20"], "cannot be cut into 20 pipeline stages"),
        (["--pp", "2", "--batch", "nowhere:batch"], "'nowhere' cannot be imported"),
        (["--engine", "megatron_core"], "cannot train Tied"),
    ],
)
def test_what_training_would_refuse_is_refused(arguments, said, monkeypatch):
    from drivetrain.api import DrivetrainError

    with pytest.raises(DrivetrainError, match=said):
        show(monkeypatch, f"{HERE}:Tied", *arguments)


def test_the_documents_show_what_the_command_prints_of_a_model(tmp_path, monkeypatch):
    page = Path(__file__).parents[3] / "docs" / "how-to" / "model-layout.md"
    if not page.exists():
        pytest.skip("the documents are in the repository only")
    text = page.read_text(encoding="utf-8")
    for name, source in re.findall(r"<!-- saved as: (\w+.py) -->\n```python\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(source, encoding="utf-8")
    pytest.importorskip("megatron.core", reason="needs drivetrain-megatron[core]")
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```sh\ndrivetrain plan show ([^\n]*)\n```\n(?:\n```text\n(.*?)```)?", text, re.DOTALL)
    assert len(shown) == 2
    for arguments, expected in shown:
        outcome = CliRunner().invoke(plan, ["show", *arguments.split()], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        assert outcome.output.startswith(expected)
