"""Ranks find the modules beside these tests by name, and the models of Transformers imported."""

from __future__ import annotations

from importlib.util import find_spec

from drivetrain_testing import preload

if find_spec("transformers") is not None:
    preload(*(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "resnet", "t5", "vit")))
if find_spec("deepspeed") is not None:
    # The second is imported by the first engine of a process.
    preload("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", opens_accelerators=True)
