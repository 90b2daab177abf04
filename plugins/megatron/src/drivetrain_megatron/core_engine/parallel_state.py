"""Initializes and destroys Megatron-Core's parallel state: availability, process groups, random number generators."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from drivetrain.api import BackendBlockedError, Topology, UsageError
from drivetrain.api.engines import numbers_coordinate
from drivetrain.api.programs import pip_line
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.core_engine import alone, private_names
from drivetrain_megatron.tensor.collectives import Ring

_COORDINATE_SEEDS = 1_000_003
"""Between seeds of data-parallel coordinates: Megatron-Core counts up by 2718 and by the tensor-parallel rank."""

SUPPORTED = "0.16."
"""Releases that were tried: names inside of Megatron-Core move from one to the next."""


def check_installed(who: str) -> None:
    """Whether Megatron-Core is here, in a release that was tried. Not collective.

    Args:
        who: the caller that needs it, for the error.

    Raises:
        BackendBlockedError: it is not.
    """
    cure = pip_line("megatron", "core")
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise BackendBlockedError(f"{who} needs Megatron-Core, which is not installed", cure=cure)
    version = metadata.version("megatron-core")
    if not version.startswith(SUPPORTED):
        raise BackendBlockedError(f"{who} drives megatron-core {SUPPORTED}*, and {version} is installed", cure=cure)


def check(section: MegatronConfig) -> None:
    """Check that this engine is installed and supports the section's settings. Not collective.

    Raises:
        BackendBlockedError: it is not installed, or in an untested version.
        UsageError: keys that only the other engine supports.
    """
    check_installed("megatron.engine: megatron_core")
    if section.schedule != "1f1b":
        raise UsageError(
            f"megatron.schedule: {section.schedule} is not offered by megatron.engine: megatron_core",
            cure="Write schedule: 1f1b, or engine: torch.",
        )
    if section.data_parallel == "fsdp":
        raise UsageError(
            "megatron.data_parallel: fsdp is not offered by megatron.engine: megatron_core",
            cure="Write data_parallel: zero1, or engine: torch.",
        )
    if section.data_parallel == "zero1" and section.gradient_clipping is not None:
        raise UsageError(
            "megatron.gradient_clipping is not offered with data_parallel: zero1 by megatron.engine: megatron_core",
            cure="Write accelerator.clip_grad_norm_(model.parameters(), ...) in the script.",
        )
    for key in ("split_points", "tp_plan", "whole_inputs"):
        if getattr(section, key):
            raise UsageError(
                f"megatron.{key} is for megatron.engine: torch; Megatron-Core lays its models out by itself",
                cure=f"Leave {key} out, or write engine: torch.",
            )


@final
class ParallelState:
    """Megatron-Core's groups, like the mesh: ``tp`` innermost, then data, then ``pp``. Collective over all ranks.

    Megatron-Core keeps its groups in one place for the whole process, and a model takes the ones that it finds when it
    is constructed. So the script finds groups of this rank alone, in which its models are whole; inside of
    :meth:`shared` Megatron-Core finds those of the job.

    Args:
        topology: of the job.
        ring: the ranks of the axis ``tp``.

    Raises:
        UsageError: the script formed other groups before.
    """

    def __init__(self, topology: Topology, ring: Ring) -> None:
        import_core()
        from megatron.core import parallel_state

        alone.end()
        wanted = (topology.mesh.sizes["tp"], topology.mesh.sizes["pp"])
        self._ours = not parallel_state.model_parallel_is_initialized()
        if self._ours:
            parallel_state.initialize_model_parallel(*wanted, order="tp-cp-ep-dp-pp")
        present = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if present != wanted:
            raise UsageError(
                f"Megatron-Core was initialised with tp, pp = {present}, the configuration asks for {wanted}",
                cure="Leave initialize_model_parallel to Drivetrain.",
            )
        _random_numbers(topology.device, ring, numbers_coordinate(topology.dp_rank))
        self._groups: dict[str, Any] | None = alone.snapshot()
        alone.begin()
        self._whole = alone.snapshot()
        self._depth = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, Megatron-Core's groups are those of the job. May be nested; not collective."""
        assert self._groups is not None, "released"
        if self._depth == 0:
            alone.restore(self._groups)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                alone.restore(self._whole)

    def release(self) -> None:
        """Destroy the process groups formed here. May be called twice; not collective."""
        if self._groups is not None:
            from megatron.core import parallel_state

            alone.end()
            # The script keeps groups that it formed.
            alone.restore(self._groups)
            if self._ours:
                parallel_state.destroy_model_parallel()
            self._groups = None


def whole_models(device: str) -> None:
    """See :func:`drivetrain_megatron.megatron_core.whole_models`."""
    import_core()
    from megatron.core import parallel_state

    if not alone.is_begun():
        # What there was belonged to a process group that is gone.
        alone.end()
    if parallel_state.model_parallel_is_initialized():
        return
    if not dist.is_initialized():
        kind = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(kind, store=HashStore(), rank=0, world_size=1)
    alone.begin()
    _random_numbers(device, Ring(None))


def _random_numbers(device: str, ring: Ring, coordinate: int = 0) -> None:
    """Dropout inside of shared layers draws other numbers on each rank of the axis ``tp`` and of the data axes."""
    if device == "cpu":
        from drivetrain_megatron.core_engine.device import use_cpu

        use_cpu(ring)
        return
    from megatron.core import tensor_parallel

    with torch.random.fork_rng(devices=[torch.device(device)], device_type="cuda"):
        tensor_parallel.model_parallel_cuda_manual_seed(
            (torch.initial_seed() + coordinate * _COORDINATE_SEEDS) % (1 << 31)
        )


def import_core() -> None:
    """Import Megatron-Core and suppress its messages at import."""
    with warnings.catch_warnings():
        # It warns at import of missing NVIDIA kernels; those of torch are used.
        warnings.simplefilter("ignore")
        import_module("megatron.core.models.gpt.gpt_layer_specs")
        import_module("drivetrain_megatron.core_engine.preparing")
    private_names.check()
    # Without Transformer Engine, 0.16.1 reads this name without defining it.
    vars(import_module("megatron.core.transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
    # It calls deprecated functions of its own and of torch, which users cannot change.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
