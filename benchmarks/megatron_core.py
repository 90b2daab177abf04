"""What ``engine: megatron_core`` costs: a step and a rank's memory, against Megatron-Core driven by hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate
from benchmarks.sharded import high_water

BARE, OURS, AGAIN = "Megatron-Core by hand", peers.OURS, "Megatron-Core by hand again"
TORCH, SINGLE = "drivetrain, engine torch", "drivetrain, single"
MEMORY = [("", SINGLE), *((axis, name) for axis in ("tp", "pp") for name in (TORCH, OURS, BARE))]
"""Whose memory is measured, over which axis; nobody's over none but one process's."""
MISSING = "skipped: Megatron-Core is not installed here"


@dataclass(frozen=True)
class LlamaCase:
    """A Llama over two ranks.

    Args:
        axis: ``tp`` or ``pp``; what one process trains has none.
        width: of the residual stream.
        layers: how many.
        words: of the vocabulary.
        rows: of a batch.
        length: of a row, in tokens.
        micro_batches: of a pipeline, in a batch.
    """

    axis: str = ""
    width: int = 256
    layers: int = 4
    words: int = 1024
    rows: int = 8
    length: int = 64
    micro_batches: int = 4

    @property
    def heads(self) -> int:
        """Of attention; half as many groups of keys and values."""
        return 8

    @property
    def inner(self) -> int:
        """Width inside of a block."""
        return 3 * self.width

    @property
    def parts(self) -> int:
        """Micro-batches of a batch."""
        return self.micro_batches if self.axis == "pp" else 1

    @property
    def degrees(self) -> tuple[int, int]:
        """Ranks that share each matrix, and ranks that share the depth."""
        return (2, 1) if self.axis == "tp" else (1, 2)

    @property
    def model(self) -> str:
        """As in the table."""
        return f"Llama, {self.layers} layers of width {self.width}, {self.rows} x {self.length} tokens"

    @property
    def title(self) -> str:
        """As in the table."""
        parts = f", {self.micro_batches} micro-batches, 1f1b" if self.axis == "pp" else ""
        return f"{self.axis} over 2 processes, {self.model}{parts}"


def present() -> bool:
    """Whether Megatron-Core and Transformers can be imported here."""
    return all(importlib.util.find_spec(name) is not None for name in ("megatron", "transformers"))


def measure(case: LlamaCase, rounds: int) -> dict[str, Samples]:
    """Wall and CPU seconds of a step. Runs on both ranks."""
    peers.begin()
    blocks = {name: _MAKE[name](case) for name in (BARE, OURS, AGAIN, TORCH)}
    return alternate(blocks, units=1, rounds=rounds)


def losses(name: str, case: LlamaCase, steps: int) -> list[float | None]:
    """The loss of each step; ``None`` where this rank does not learn it. All contenders begin with the same values."""
    peers.begin()
    step = _MAKE[name](case)
    found = [step() for _ in range(steps)]
    return [None if one is None else float(one) for one in found]  # type: ignore[arg-type]


def peak(name: str, case: LlamaCase, steps: int) -> float:
    """Bytes that this rank's memory grows by at most, the model's construction included."""
    peers.begin()
    # What is imported is the same for all, and larger than a small model.
    _MAKE[name](LlamaCase(case.axis, width=16, layers=2, words=16, rows=4, length=4))()
    before = high_water()
    step = _MAKE[name](case)
    for _ in range(steps):
        step()
    return high_water() - before


def _llama(case: LlamaCase) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=case.words,
        hidden_size=case.width,
        intermediate_size=case.inner,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads // 2,
        max_position_embeddings=case.length,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = LlamaForCausalLM(sizes).train()
    return model


def _tokens(case: LlamaCase) -> Tensor:
    return torch.randint(case.words, (case.rows, case.length), generator=torch.Generator().manual_seed(1))


def _adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


# ---- ours -----------------------------------------------------------------------------------------------------------


def _by_drivetrain(case: LlamaCase, settings: dict[str, Any]) -> Block:
    from drivetrain import Accelerator, load_config

    accelerator = Accelerator(config=load_config(overrides={"use_cpu": True, **settings}, environ={}))
    llama = _llama(case)
    model, optimizer = accelerator.prepare(llama, _adam(llama.parameters()))
    tokens = _tokens(case)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _parallel(engine: str) -> Callable[[LlamaCase], Block]:
    def make(case: LlamaCase) -> Block:
        tensor, pipeline = case.degrees
        section = {"engine": engine, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        section |= {"num_micro_batches": case.parts} if case.axis == "pp" else {}
        return _by_drivetrain(case, {"distributed_type": "megatron", "megatron": section})

    return make


def _single(case: LlamaCase) -> Block:
    return _by_drivetrain(case, {"distributed_type": "single"})


# ---- Megatron-Core by hand ------------------------------------------------------------------------------------------


def _by_hand(case: LlamaCase) -> Block:
    """Megatron-Core's groups, model, gradient buffer and schedule; torch's optimizer on its parameters."""
    with _groups(case):
        step = _step_by_hand(case)

    def among_these_groups() -> object:
        with _groups(case):
            return step()

    return among_these_groups


def _step_by_hand(case: LlamaCase) -> Block:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    gpt = _gpt(case)
    gpt.config.finalize_model_grads_func = finalize_model_grads
    wrapped = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
    parameters = list(gpt.parameters())
    optimizer = _adam(parameters)
    schedule = get_forward_backward_func()
    parts = _tokens(case).chunk(case.parts)

    def step() -> Tensor | None:
        wrapped.zero_grad_buffer()
        told = schedule(
            forward_step_func=_forward,
            data_iterator=iter(parts),
            model=wrapped,
            num_microbatches=case.parts,
            seq_length=case.length,
            micro_batch_size=case.rows // case.parts,
            forward_only=False,
        )
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        optimizer.step()
        # Else the next backward would add to the buffer by way of these gradients, which are views of it.
        optimizer.zero_grad()
        return torch.stack([each["loss"] for each in told]).mean() if told else None

    return step


_known: dict[tuple[int, int], dict[str, Any]] = {}


@contextmanager
def _groups(case: LlamaCase) -> Iterator[None]:
    """Megatron-Core's groups, one set for the whole process, are those of this case; ours puts its own there by turns.

    A CPU takes a stand-in for ``torch.cuda``. Both cost a step some microseconds.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    from drivetrain_megatron.core_engine import alone
    from drivetrain_megatron.core_engine.device import use_cpu
    from drivetrain_megatron.tensor.collectives import Ring

    before = alone.snapshot()
    if case.degrees in _known:
        alone.restore(_known[case.degrees])
    else:
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        importlib.import_module("megatron.core.distributed")
        assert not parallel_state.model_parallel_is_initialized(), "by hand comes first"
        parallel_state.initialize_model_parallel(*case.degrees, order="tp-cp-ep-dp-pp")
        use_cpu(Ring(dist.group.WORLD if case.axis == "tp" else None))
        _known[case.degrees] = before = alone.snapshot()
    try:
        yield
    finally:
        alone.restore(before)


def _gpt(case: LlamaCase) -> Any:
    """This rank's part of the same Llama in Megatron-Core's layers, with the same values."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    tensor, pipeline = case.degrees
    config = TransformerConfig(
        num_layers=case.layers,
        hidden_size=case.width,
        ffn_hidden_size=case.inner,
        num_attention_heads=case.heads,
        num_query_groups=case.heads // 2,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=case.words,
        max_sequence_length=case.length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    first = parallel_state.get_pipeline_model_parallel_rank() * case.layers // pipeline
    values = _values(case, parallel_state.get_tensor_model_parallel_rank(), tensor)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[_whole_name(name, first)])
    return model


def _whole_name(name: str, first: int) -> str:
    """A parameter's name in a model of one stage, given the first layer of this one."""
    if not name.startswith("decoder.layers."):
        return name
    _, _, index, rest = name.split(".", 3)
    return f"layers.{int(index) + first}.{rest}"


def _values(case: LlamaCase, rank: int, degree: int) -> dict[str, Tensor]:
    """The Llama's values under Megatron-Core's names, as one tensor-parallel rank holds them."""
    ours = {name.removeprefix("model."): one.detach() for name, one in _llama(case).named_parameters()}

    def part(name: str, dim: int) -> Tensor:
        return ours[name].chunk(degree, dim)[rank]

    groups, head = case.heads // 2 // degree, case.width // case.heads
    found = {
        "embedding.word_embeddings.weight": part("embed_tokens.weight", 0),
        "output_layer.weight": part("lm_head.weight", 0),
        "decoder.final_layernorm.weight": ours["norm.weight"],
    }
    for index in range(case.layers):
        layer = f"layers.{index}"
        three = [part(f"{layer}.self_attn.{one}_proj.weight", 0) for one in "qkv"]
        # Group by group: its queries, its keys, its values.
        qkv = torch.cat([one.reshape(groups, -1, head, case.width) for one in three], 1).flatten(0, 2)
        gated = torch.cat([part(f"{layer}.mlp.{one}_proj.weight", 0) for one in ("gate", "up")])
        found |= {
            f"{layer}.input_layernorm.weight": ours[f"{layer}.input_layernorm.weight"],
            f"{layer}.self_attention.linear_qkv.weight": qkv,
            f"{layer}.self_attention.linear_proj.weight": part(f"{layer}.self_attn.o_proj.weight", 1),
            f"{layer}.pre_mlp_layernorm.weight": ours[f"{layer}.post_attention_layernorm.weight"],
            f"{layer}.mlp.linear_fc1.weight": gated,
            f"{layer}.mlp.linear_fc2.weight": part(f"{layer}.mlp.down_proj.weight", 1),
        }
    return found


def _forward(following: Any, model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """A forward step as Megatron's own training script writes it."""
    tokens = next(following)
    rows, length = tokens.shape
    labels, counts = F.pad(tokens[:, 1:], (0, 1)), torch.ones(rows, length)
    counts[:, -1] = 0.0
    output = model(tokens, torch.arange(length).expand(rows, length), None, labels=labels)

    def mean(each: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (each * counts).sum() / counts.sum()
        # The schedule divides the first one in place.
        return loss, {"loss": loss.detach().clone()}

    return output, mean


_MAKE: dict[str, Callable[[LlamaCase], Block]] = {
    BARE: _by_hand,
    OURS: _parallel("megatron_core"),
    AGAIN: _by_hand,
    TORCH: _parallel("torch"),
    SINGLE: _single,
}
