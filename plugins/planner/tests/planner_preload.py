"""What ranks find imported: the models of Transformers, and DeepSpeed."""

from __future__ import annotations

from importlib.util import find_spec

from drivetrain_testing import preload

FAMILIES = ("gpt2", "llama", "qwen3_moe", "resnet", "t5", "vit")


def preload_models() -> None:
    """Ask for the imports; before the first ranks start."""
    if find_spec("transformers") is not None:
        preload(*(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES))
    if find_spec("deepspeed") is not None:
        # The second is imported by the first engine of a process.
        preload("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", opens_accelerators=True)
