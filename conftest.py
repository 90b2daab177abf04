"""Every test of every distribution runs under the hygiene plugin of the conformance kit."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Ranks share few cores, and a process that is forked after OpenMP made its threads hangs in its next parallel loop.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["drivetrain_testing.plugin"]

SLOW_FILES = {
    # Each test starts a launcher with several programs; test_launch_local.py and test_launch_output.py start some too.
    "test_launch_blame.py", "test_launch_failures.py", "test_launch_interrupts.py", "test_cli_launch_shown.py",
    "test_clusters_files.py",
    # Scripts, hooks and models one by one; the conformance tests of the same backend hold a script of each kind.
    "test_deepspeed_compiling.py", "test_deepspeed_elementwise.py", "test_deepspeed_native.py",
    "test_deepspeed_scripts.py", "test_fsdp_scripts.py", "test_megatron_hooks.py", "test_megatron_ordinary_scripts.py",
    "test_megatron_tensor_scripts.py", "test_megatron_variants.py", "test_megatron_whole_state.py",
    # Adapters and TRL's trainers; test_trainer_backends.py shows Trainer itself under every backend.
    "test_trainer_adapters.py", "test_trainer_trl.py",
    # Megatron-Core's own models; test_megatron_core_calls.py and its conformance tests train smaller ones.
    "test_megatron_core_gpt.py", "test_megatron_core_training.py",
    # Programs beside the library: benchmarks, and a user's own model given to the kit.
    "test_bench_runs.py", "test_testing_user_models.py",
}  # fmt: skip
"""Files whose tests are all slow."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark as slow what `make test` leaves out: :data:`SLOW_FILES`, and of conformance tests :func:`_left_out`."""
    for item in items:
        requirements = getattr(getattr(item, "module", None), "Requirements", None)
        parameters = getattr(getattr(item, "callspec", None), "params", None)
        conformance = requirements is not None and parameters is not None
        if item.path.name in SLOW_FILES or (conformance and _left_out(item.originalname, parameters, requirements)):
            item.add_marker(pytest.mark.slow)


def _left_out(test: str, parameters: dict[str, Any], requirements: Any) -> bool:
    """Whether a faster test of the same module shows nearly the same.

    Cases run on two processes where the backend takes several. Checkpoints travel between `single` and two processes;
    every pair of backends is in tests/parity, which is slow. Of the two moments of a killed save one is left.
    """
    quick = 2 if 2 in requirements.world_sizes else min(requirements.world_sizes)
    if test == "test_conformance":
        # A case with worlds of its own, as one on three ranks, has no other place.
        return bool(parameters["world_size"] != quick and parameters["world_size"] in requirements.world_sizes)
    if test in {"test_state_travels", "test_samples_after_resume"}:
        return any(place not in {("single", 1), (requirements.backend, quick)} for place in parameters["journey"])
    return test == "test_killed_save" and parameters["moment"] != "writing"
