"""The backend, Megatron-Core and models of Transformers are slow to import: the fork server does it for all ranks."""

from __future__ import annotations

from importlib.util import find_spec

from drivetrain_testing import preload

MODELS = ("llama", "gpt2", "mixtral", "qwen2", "qwen3", "t5")

preload("torch.distributed.pipelining", "drivetrain_megatron.backend")
preload(*(f"transformers.models.{name}.modeling_{name}" for name in MODELS))
if find_spec("megatron") is not None:
    preload(
        "megatron.core.distributed",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
        opens_accelerators=True,
    )
