"""What every test of a Trainer imports is imported once."""

from __future__ import annotations

from importlib.util import find_spec

from drivetrain_testing import preload

preload(
    "drivetrain_transformers.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "t5")),
    *(name for name in ("peft",) if find_spec(name)),
    # The package alone imports nothing: it is lazy.
    *(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "reward", "grpo", "rloo") if find_spec("trl")),
)
