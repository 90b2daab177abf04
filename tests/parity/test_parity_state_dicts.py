"""``state_dict()`` and ``save_pretrained`` of a prepared model: the whole state or a sentence, under every backend."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from drivetrain import Accelerator, load_config
from drivetrain.errors import DrivetrainError
from drivetrain_testing import spawn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

RUNS = {
    "ddp": (2, {"distributed_type": "ddp"}),
    "fsdp": (2, {"distributed_type": "fsdp"}),
    "fsdp on three ranks": (3, {"distributed_type": "fsdp"}),
    "deepspeed 1": (2, {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 1}}),
    "deepspeed 3": (2, {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 3}}),
    "tp": (2, {"distributed_type": "megatron", "mesh": {"tp": 2}}),
    "pp": (2, {"distributed_type": "megatron", "mesh": {"pp": 2}, "megatron": {"num_micro_batches": 2}}),
}

GIVES_WHOLE = {"ddp", "deepspeed 1", "tp", "pp"}
"""Where ``torch.save(model.state_dict())`` on every rank writes the whole state; elsewhere it raises."""


def llama():
    torch.manual_seed(4)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def saved_by_torch(model, _folder):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved_by_transformers(model, folder):
    with warnings.catch_warnings():
        # Transformers asks DTensors for their storage by a name that torch deprecates.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        model.save_pretrained(folder)
    if not list(folder.glob("*.safetensors")):
        return None  # Transformers writes on one rank only.
    return transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()


def attempt(way, model, folder):
    """What it wrote, or what it said."""
    try:
        found = way(model, folder)
        return None if found is None else {name: one.clone() for name, one in found.items()}
    except DrivetrainError as error:
        return str(error)


def ask(config, folder):
    accelerator = Accelerator(config=load_config(overrides={**config, "use_cpu": True}, environ={}))
    net = llama()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    words = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(1))
    accelerator.backward(model(input_ids=words, labels=words).loss)
    optimizer.step()
    optimizer.zero_grad()
    whole = accelerator.backend.broadcast_object(
        {n: one.clone() for n, one in accelerator.get_state_dict(model).items()}
    )
    answers = {}
    for everyone in (True, False):
        for way in (saved_by_torch, saved_by_transformers):
            for kind, asked in (("prepared", model), ("unwrapped", accelerator.unwrap_model(model))):
                if everyone or accelerator.is_main_process:
                    where = Path(folder) / f"{accelerator.process_index}-{len(answers)}"
                    answers[everyone, way.__name__, kind] = attempt(way, asked, where)
                accelerator.wait_for_everyone()
    accelerator.end_training()
    return whole, answers


@pytest.mark.parametrize("name", RUNS)
def test_the_whole_state_or_a_sentence(name, tmp_path):
    world, config = RUNS[name]
    for rank, (whole, answers) in enumerate(spawn(ask, world, config, str(tmp_path))):
        for asked, answer in answers.items():
            if answer is None:
                assert rank, asked
                continue
            if isinstance(answer, str):
                assert "accelerator.get_state_dict" in answer or "accelerator.save_model" in answer, (asked, answer)
                assert name not in GIVES_WHOLE, (asked, answer)
                continue
            assert answer.keys() == whole.keys(), asked
            for key, value in whole.items():
                torch.testing.assert_close(answer[key], value, rtol=0, atol=0, msg=f"{asked} {key}")


def ask_for_distributed_checkpoint(backend):
    accelerator = Accelerator(distributed_type=backend, cpu=True)
    model = accelerator.prepare(llama())
    live = get_model_state_dict(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    shapes = {name: tuple(one.shape) for name, one in live.items()}
    values = {name: one.clone() for name, one in full.items()}
    accelerator.end_training()
    return shapes, values


@pytest.mark.parametrize(("backend", "world"), [("ddp", 2), ("fsdp", 2), ("fsdp", 3)])
@pytest.mark.gate("ddp-2", "fsdp-3")
def test_functions_of_torchs_distributed_checkpoints_read_a_prepared_model(backend, world):
    wanted = llama().state_dict()
    for shapes, values in spawn(ask_for_distributed_checkpoint, world, backend):
        assert shapes == {name: tuple(one.shape) for name, one in wanted.items()}
        assert values.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=0, msg=name)
