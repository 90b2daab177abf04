"""Predicted against published memory and seconds of others' runs on accelerators: run as a program, it writes a record.

    python plugins/planner/tests/public_runs.py [PART ...]

predicts the rows of ``public_runs.json`` whose names hold one of the parts, or all, and writes ``public_memory.json``.
The models are made from the families' published sizes, on meta, and the loop of the run is what its source shows: the
dtype of parameters, what is recomputed, the loss, what stays in a variable. Nothing is fitted to a row.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drivetrain.api.programs import policy_for
from drivetrain_planner import PlanRequest
from drivetrain_planner.choosing import GROUP, seconds
from drivetrain_planner.machines import find
from drivetrain_planner.optimizers import optimizer_costs
from drivetrain_planner.tracing import Example, Tracer

ROWS = Path(__file__).with_name("public_runs.json")
RECORD = Path(__file__).with_name("public_memory.json")

GIB = 2**30


def qwen3(**sizes):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=262144, use_cache=False, **sizes,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, tie_word_embeddings=False,
        max_position_embeddings=262144, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def llama3():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {
    "qwen3-0.6b": partial(
        qwen3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
    ),
    "qwen3-4b": partial(qwen3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "qwen3-30b-a3b": qwen3_moe,
    "llama-3.1-8b": llama3,
}


def mean_of_each(output, batch):
    """Return prime-rl's supervised loss: of each token, from float32 logits that stay in a variable in backward."""
    logits = output["logits"]
    each = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), batch["labels"].view(-1), reduction="none")
    return each.mean()


def mean_of_all(output, batch):
    """Return torchtitan's loss, from logits that are made float32 for it and released before backward."""
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1).float(), batch["labels"].flatten(0, 1))


class Logits(nn.Module):
    """Returns logits alone, as the heads of the published runs do."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules

    def forward(self, **given):
        return {"logits": self.model(**given).logits}


class Selective(nn.Module):
    """Recomputes a layer but its attention and each second matrix product, as torchtitan's option ``op`` does."""

    kept = (
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
    )

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return checkpoint(
            self.layer, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts, **kwargs
        )

    def contexts(self):
        products = Counter()

        def policy(ctx, func, *_args, **_kwargs):
            keep = func in self.kept
            if func is torch.ops.aten.mm.default:
                products[ctx.is_recompute] += 1
                keep = products[ctx.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


def selective(model):
    """Return logits alone, of a model whose layers are recomputed selectively."""
    model.model.layers = nn.ModuleList(Selective(layer) for layer in model.model.layers)
    model._no_split_modules = [Selective.__name__]
    return Logits(model)


@dataclass(frozen=True)
class Loop:
    """A training loop as its source shows it.

    Args:
        wrap: makes the module whose forward the loop calls.
        loss: of its output and the batch.
        kept: the loop has the output in a variable while backward runs.
        samples: of a micro-batch.
        micro_batches: of a step.
        section: of ``fsdp``.
    """

    wrap: Callable[[nn.Module], nn.Module]
    loss: Callable[..., torch.Tensor]
    kept: bool
    samples: int
    micro_batches: int
    section: dict[str, bool]


LOOPS = {
    # Gradients of every micro-batch are reduced.
    "prime-rl": Loop(
        Logits, mean_of_each, True, 1, 2, {"activation_checkpointing": True, "accumulate_without_sync": False}
    ),
    "torchtitan": Loop(selective, mean_of_all, False, 2, 1, {"activation_checkpointing": False}),
}


def planned(row):
    """Return the request of a row, and the estimate of our ``fsdp``."""
    loop = LOOPS[row["loop"]]
    with torch.device("meta"):
        model = loop.wrap(MODELS[row["model"]]())
    ids = torch.zeros(loop.samples, row["tokens"], dtype=torch.long)
    policy = policy_for("bf16")
    example = Example((), {"input_ids": ids}, {"labels": ids}, loop.loss, loop.kept)
    tracer = Tracer(model, example, policy, "cuda")
    request = PlanRequest(
        model=model,
        world_size=row["ranks"],
        ranks_per_node=min(8, row["ranks"]),
        device_type="cuda",
        precision=policy,
        micro_batch=loop.samples,
        global_batch=loop.samples * loop.micro_batches * row["ranks"],
        optimizer=optimizer_costs("AdamW", {}, "cuda"),
        sections={"fsdp": loop.section},
        trace=tracer.trace,
        arguments=((), {"input_ids": ids}),
        run=tracer.run,
    )
    # Of this backend alone: the others would trace models of this size for layouts that nobody compares.
    (fsdp,) = entry_points(group=GROUP, name="fsdp")
    # Sharded over all ranks; over several machines `fsdp` offers replicas of a machine's shards, too.
    found = min((each for each in fsdp.load()(request) if not each.last_resort), key=lambda each: each.peak)
    assert not found.refused, found.refused
    return request, found


def rows():
    """Of the file."""
    return json.loads(ROWS.read_text(encoding="utf-8"))["rows"]


def record():
    """Return by name bytes, ``peak`` of tensors and ``reserved`` with the allocator's, and ``seconds`` of a step."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def like(row):
    """What a prediction depends on; the device is not among it."""
    return row["model"], row["tokens"], row["ranks"]


def main(asked):
    """Predict and record; rows that differ in the device alone share a prediction."""
    for row in rows():
        if asked and not any(part in row["name"] for part in asked):
            continue
        began = time.perf_counter()
        request, found = planned(row)
        told = {"peak": found.peak, "reserved": found.peak + found.trace.unused}
        kept = record()
        for each in rows():
            if like(each) == like(row):
                taken = seconds(found, request, find(each["machine"]))
                kept[each["name"]] = {**told, "seconds": round(sum(taken.values()), 3)}
                error = "" if each["gib"] is None else f"{told['reserved'] / GIB / each['gib'] - 1:+.2%}"
                parts = {part: round(value, 3) for part, value in taken.items()}
                sys.stdout.write(f"{each['name']}: published {each['gib']} {error}; {each['seconds']} s, {parts}\n")
        ordered = {each["name"]: kept[each["name"]] for each in rows() if each["name"] in kept}
        RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        parts = {part: round(size / GIB, 2) for part, size in found.memory.items()}
        sys.stdout.write(
            f"  {told['peak'] / GIB:.2f}, reserved {told['reserved'] / GIB:.2f}, most in {found.moment}: {parts}, "
            f"{time.perf_counter() - began:.0f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
