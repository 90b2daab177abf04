"""The kit's cases for a model that somebody brings, under ``engine: megatron_core``.

The kit's own models are plain modules, which this engine refuses; ``engine: torch`` runs those.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from drivetrain_testing.kit import Kit, passed_together, run_case, user_model_cases

pytest.importorskip("megatron.core", reason="needs drivetrain-megatron[core]")

SECTION = {"engine": "megatron_core", "tensor_parallel_size": 2, "num_micro_batches": 2}


def build():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=23, num_hidden_layers=2, bos_token_id=None, eos_token_id=None, **sizes)
    ids = torch.randint(23, (11, 6), generator=torch.Generator().manual_seed(1))
    return transformers.LlamaForCausalLM(config), [{"input_ids": row, "labels": row} for row in ids]


def kit_in(folder):
    kit = Kit.plain("megatron", folder).with_model(f"{__name__}:build")
    return kit.replaced({**kit.config, "megatron": SECTION})


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The cases that passed in one group of ranks, which spares starting ranks for each."""
    kits = {name: kit_in(tmp_path_factory.mktemp(name)) for name in user_model_cases()}
    return passed_together(kits, 2, tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("case", list(user_model_cases()))
@pytest.mark.gate("brought.follows_plain_torch", "brought.resumes")
def test_a_brought_model_passes_the_kit(case, together, tmp_path) -> None:
    if case not in together:
        run_case(case, kit_in(tmp_path), 2)
