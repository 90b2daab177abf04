"""Keyword handlers: dataclasses that scripts pass to :class:`drivetrain.Accelerator`. Imports no torch.

Names, fields and defaults follow Accelerate's. What a value means is decided where it is read:
``DataLoaderConfiguration`` by the loaders, ``DistributedDataParallelKwargs`` by a backend that names it in
``Capabilities.handlers``, and so on. A value that cannot be honoured raises or warns on construction.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any

from drivetrain.errors import UsageError
from drivetrain.topology import AXES


def _require(condition: bool, what: str, cure: str = "") -> None:
    if not condition:
        raise UsageError(what, cure=cure)


def _warn(message: str) -> None:
    # user -> generated __init__ -> __post_init__ -> here
    warnings.warn(message, UserWarning, stacklevel=4)


@dataclass
class KwargsHandler:
    """Base of the dataclasses for ``Accelerator(kwargs_handlers=[...])``, one of each class."""

    def to_dict(self) -> dict[str, Any]:
        """Every field by name; values are not copied."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """The fields whose value differs from the default, by name."""
        changed: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            if value is not default and value != default:
                changed[each.name] = value
        return changed


# ---- data and checkpoints -------------------------------------------------------------------------------------------


@dataclass
class DataLoaderConfiguration:
    """Settings of prepared data loaders, which share out their samples.

    Args:
        split_batches: the script's batch size is the global one and is cut among the ranks.
        dispatch_batches: the main process reads and distributes every batch; ``None`` means no. (Accelerate's ``None``
            means yes for iterable datasets, at about twenty times the cost per batch.)
        even_batches: give every rank the same number of batches, a repeated sample where there is none left for it.
        use_seedable_sampler: ``shuffle=True`` without a generator gives an order that is a function of the seed and the
            epoch, which ``set_epoch`` chooses. Otherwise it is the one that torch draws from its global state.
        data_seed: seed of that order, which it asks for too; ``None`` takes one from the main process's random state.
        non_blocking: copy batches to the device without waiting.
        use_stateful_dataloader: accepted either way: prepared loaders always carry their position.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        _require(
            self.data_seed is None or (isinstance(self.data_seed, int) and not isinstance(self.data_seed, bool)),
            f"data_seed must be a whole number, not {self.data_seed!r}",
        )


@dataclass
class ProjectConfiguration:
    """Where a run keeps its files.

    Args:
        project_dir: folder for checkpoints and, unless ``logging_dir`` says otherwise, for logs. An address, as
            ``"s3://bucket/run"``, is for checkpoints alone: trackers that write files need a ``logging_dir`` then.
        logging_dir: folder for experiment trackers.
        automatic_checkpoint_naming: ``save_state()`` writes ``project_dir/checkpoints/checkpoint_<n>``.
        total_limit: how many of those to keep; ``None`` keeps all.
        iteration: number of the next one.
        save_on_each_node: ``save`` writes once per machine instead of once, for folders that machines do not share.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        _require(
            self.total_limit is None or self.total_limit >= 1,
            f"total_limit must be at least 1, not {self.total_limit}",
            "Leave it out to keep every checkpoint.",
        )
        _require(self.iteration >= 0, f"iteration must not be negative, but is {self.iteration}")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Take ``project_dir``, and use it for logs too when it is a local folder and no ``logging_dir`` was given."""
        if isinstance(project_dir, str):
            project_dir = project_dir.removeprefix("file://")
        self.project_dir = project_dir
        if self.logging_dir is None and "://" not in str(project_dir):
            self.logging_dir = project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings by which micro-batches form an accumulation window.

    Args:
        num_steps: micro-batches in a window.
        adjust_scheduler: must stay ``True``: the scheduler moves once per applied optimizer step in any case.
        sync_with_dataloader: the end of a loader ends the window, so that no gradient is carried into the next epoch.
        sync_each_batch: reduce gradients at every micro-batch (more communication, less memory).
    """

    num_steps: int
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        _require(
            isinstance(self.num_steps, int) and not isinstance(self.num_steps, bool) and self.num_steps >= 1,
            f"num_steps must be a whole number of at least 1, not {self.num_steps!r}",
        )
        if not self.adjust_scheduler:
            _warn(
                "adjust_scheduler=False changes nothing: a prepared scheduler moves once per applied optimizer step, "
                "whatever the length of the accumulation window."
            )


# ---- engines --------------------------------------------------------------------------------------------------------


class DDPCommunicationHookType(StrEnum):
    """Communication hooks, which compress gradients between ranks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``, for the backends that use it.

    Args:
        dim: dim along which inputs are scattered; torch has only 0 left.
        broadcast_buffers: rank 0's buffers overwrite the others' before each forward.
        bucket_cap_mb: size of a gradient bucket in MiB.
        find_unused_parameters: look for parameters that got no gradient after each forward.
        check_reduction: without meaning in torch by now.
        gradient_as_bucket_view: gradients share memory with the buckets.
        static_graph: the graph is the same in every step.
        comm_hook: one of :class:`DDPCommunicationHookType`, as member or as text.
        comm_wrapper: ``"fp16"`` or ``"bf16"`` around the hook, or ``"no"``.
        comm_state_option: arguments of the hook's state (``matrix_approximation_rank`` ... of PowerSGD).
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: str = DDPCommunicationHookType.NO
    comm_wrapper: str = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hooks = [str(hook) for hook in DDPCommunicationHookType]
        # As text or as a member of an enum, ours or Accelerate's.
        self.comm_hook = str(getattr(self.comm_hook, "value", self.comm_hook)).lower()
        self.comm_wrapper = str(getattr(self.comm_wrapper, "value", self.comm_wrapper)).lower()
        _require(self.comm_hook in hooks, f"unknown comm_hook {self.comm_hook!r}", f"Write one of {', '.join(hooks)}.")
        _require(
            self.comm_wrapper in hooks[:3],
            f"unknown comm_wrapper {self.comm_wrapper!r}",
            f"Write one of {', '.join(hooks[:3])}.",
        )
        _require(self.dim == 0, f"dim={self.dim} is not possible", "torch scatters along dim 0 only; leave it out.")
        _require(self.bucket_cap_mb > 0, f"bucket_cap_mb must be positive, not {self.bucket_cap_mb}")
        if self.check_reduction:
            _warn("check_reduction=True changes nothing: torch no longer has such a check.")
        if self.comm_state_option and "power_sgd" not in self.comm_hook:
            _warn(f"comm_state_option changes nothing with comm_hook={self.comm_hook!r}: only PowerSGD has a state.")


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Settings of the default process group.

    Args:
        backend: communication backend; ``None`` takes torch's choice for the device. (Accelerate's default is the word
            ``"nccl"``, which it overrides on a CPU; here a name that is written is meant.)
        init_method: as in ``torch.distributed.init_process_group``.
        timeout: how long a collective may wait; ``None`` takes torch's default for the communication backend.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        _require(
            self.timeout is None or isinstance(self.timeout, timedelta),
            f"timeout must be a datetime.timedelta, not {self.timeout!r}",
            "Write timeout=timedelta(seconds=...).",
        )
        _require(
            self.timeout is None or self.timeout.total_seconds() > 0,
            f"timeout must be positive, not {self.timeout}",
        )


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of the loss scaler under ``mixed_precision="fp16"``; they mean nothing elsewhere.

    Args:
        init_scale: first factor.
        growth_factor: what it is multiplied by after ``growth_interval`` steps without overflow.
        backoff_factor: what it is multiplied by after an overflow.
        growth_interval: see above.
        enabled: ``False`` trains without loss scaling.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        _require(self.init_scale > 0, f"init_scale must be positive, not {self.init_scale}")
        _require(self.growth_factor > 1, f"growth_factor must be above 1, not {self.growth_factor}")
        _require(0 < self.backoff_factor < 1, f"backoff_factor must lie between 0 and 1, not {self.backoff_factor}")
        _require(self.growth_interval >= 1, f"growth_interval must be at least 1, not {self.growth_interval}")


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of autocast.

    Args:
        enabled: ``False`` runs the block in the parameters' own dtype.
        cache_enabled: keep casted weights within one forward; ``None`` = torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class ParallelismConfig:
    """Sizes of mesh axes, for ``Accelerator(parallelism_config=...)``: what ``mesh:`` says in a configuration.

    Args:
        dp_replicate_size: ranks that hold whole replicas; here and below ``None`` leaves the choice to the backend.
        dp_shard_size: ranks that share the parameters in shards.
        tp_size: ranks that share each matrix.
        cp_size: ranks that share one sequence.
        cp_backend: without meaning: the backend decides how a sequence is shared.
        sp_size: must stay 1: a sequence is shared along ``cp``.
        sp_backend: without meaning, as ``cp_backend``.
        tp_handler: must stay ``None``, as the next two: a backend's section says how it works.
        cp_handler: see ``tp_handler``.
        sp_handler: see ``tp_handler``.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    def __post_init__(self) -> None:
        _require(self.sp_size in (None, 1), f"sp_size={self.sp_size} is not supported", "Write cp_size.")
        for axis, size in self.sizes().items():
            _require(size >= 1, f"{axis}_size must be at least 1, not {size}", "Leave it out, or write 1.")
        for name in ("tp_handler", "cp_handler", "sp_handler"):
            _require(
                getattr(self, name) is None,
                f"{name} is not supported",
                "Leave it out; the backend's section in the configuration says how it works.",
            )

    def sizes(self) -> dict[str, int]:
        """The axes that were asked for, by name."""
        asked = {axis: getattr(self, f"{axis}_size", None) for axis in AXES}
        return {axis: size for axis, size in asked.items() if size is not None}


PROFILE_ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")
"""Activities that the profiler can record."""


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of the profiler that ``accelerator.profile`` opens.

    Args:
        activities: some of :data:`PROFILE_ACTIVITIES`; ``None`` watches everything there is.
        schedule_option: arguments of ``torch.profiler.schedule`` (``wait``, ``warmup``, ``active``, ``repeat``,
            ``skip_first``, ``skip_first_wait``).
        on_trace_ready: called with the profiler when a trace is ready.
        record_shapes: note the shapes of operator inputs.
        profile_memory: note allocations.
        with_stack: note source lines.
        with_flops: estimate floating-point operations.
        with_modules: note the hierarchy of modules.
        output_trace_dir: write one chrome trace per rank into this folder.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        _known("activity", self.activities or (), PROFILE_ACTIVITIES)
        options = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")
        _known("schedule_option", self.schedule_option or (), options)
        _require(
            self.schedule_option is None or {"wait", "warmup", "active"} <= set(self.schedule_option),
            "schedule_option needs wait, warmup and active",
        )


def _known(what: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    unknown = [name for name in given if name not in known]
    _require(not unknown, f"unknown {what} {', '.join(map(repr, unknown))}", f"Write some of {', '.join(known)}.")
