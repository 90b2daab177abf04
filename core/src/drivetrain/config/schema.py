"""The schema of configuration files: every key with its type, default and description.

Names follow Accelerate's files wherever the two mean the same. A backend's own keys live in a section named after it,
described by the plugin's model, which should derive from :class:`~drivetrain.config.fields.Section`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, create_model, field_validator, model_validator

from drivetrain.config.fields import Integer, Number, Section, names, not_bool
from drivetrain.config.keys import CORE_KEYS
from drivetrain.topology import AXES, GRID


def _precision(value: Any) -> Any:
    """YAML reads a bare ``no`` as False."""
    if value is False:
        return "no"
    if isinstance(value, str):
        value = value.strip().lower()
        if value == "fp8":
            raise ValueError("'fp8' is not supported; write bf16 (or fp16, or 'no')")
    return value


def _backend_name(value: Any) -> Any:
    """``NO`` and ``no`` are False in YAML and mean the backend that answers to ``no``."""
    return "no" if value is False else value


def _ids(value: Any) -> Any:
    """``0``, ``0,2``, ``[0, 2]`` and UUIDs; ``all`` is nothing special."""
    if isinstance(value, bool):
        raise ValueError("expected ids such as [0, 2], or all")  # noqa: TRY004 - pydantic wants it
    if isinstance(value, int):
        return [str(value)]
    if isinstance(value, str) and value.strip().lower() == "all":
        return None
    value = names(value)
    return [str(each) if type(each) is int else each for each in value] if isinstance(value, list) else value


def _local_ranks(value: Any) -> Any:
    """``0``, ``0,2``, ``[0, 2]`` and ``all``."""
    if isinstance(value, str) and value.strip().lower() == "all":
        return "all"
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return [int(each) if each.isdecimal() else each for each in names(value)] if isinstance(value, str) else value


_BY_RANK = re.compile(r"(\d{1,6}:[0-3])(,\d{1,6}:[0-3])*")


def _streams(value: Any) -> Any:
    """``0`` to ``3`` for every rank, or ``0:3,1:2`` by local rank, as torchrun reads them."""
    text = str(value).replace(" ", "")
    if value is None or text == "0":
        return None
    if text in ("1", "2", "3") or _BY_RANK.fullmatch(text):
        return text
    raise ValueError("write 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank: 0:3,1:2")


def _by_rank(streams: str | None) -> dict[int, int]:
    """``'0:3,1:2'`` as ``{0: 3, 1: 2}``; empty for one number that is meant for all."""
    if streams is None or ":" not in streams:
        return {}
    return {int(rank): int(number) for rank, number in (part.split(":") for part in streams.split(","))}


def _streams_of(streams: str | None, local_rank: int) -> int:
    return _by_rank(streams).get(local_rank, 0) if ":" in (streams or "") else int(streams or 0)


def _machines(value: Any) -> Any:
    """``2``, or the fewest and the most as ``1:4``."""
    text = str(not_bool(value)).replace(" ", "")
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return int(text)
    if re.fullmatch(r"\d+:\d+", text) and 1 <= (fewest := int(text.split(":")[0])) <= (most := int(text.split(":")[1])):
        return fewest if fewest == most else f"{fewest}:{most}"
    raise ValueError("write a number from 1, or the fewest and the most machines as in 1:4")


def machine_range(machines: int | str) -> tuple[int, int]:
    """The fewest and the most machines that ``num_machines`` allows."""
    fewest, _, most = str(machines).partition(":")
    return int(fewest), int(most or fewest)


Count = Annotated[Integer, Field(ge=1)]
Index = Annotated[Integer, Field(ge=0)]
Seconds = Annotated[Number, Field(gt=0, le=1e9, allow_inf_nan=False)]
"""Up to 30 years: what waits counts in nanoseconds of 64 bits."""


_SIZES: dict[str, Any] = {axis.name: (Count | None, Field(None, description=axis.description)) for axis in GRID}
_AxisSizes: Any = create_model("_AxisSizes", __base__=Section, **_SIZES)


class MeshConfig(_AxisSizes):
    """Sizes of the mesh axes, outermost first; null leaves the choice to the backend."""

    def sizes(self) -> dict[str, int]:
        """Sizes of the configured axes, by name; empty without a mesh."""
        asked = {axis: getattr(self, axis) for axis in AXES}
        return {axis: size for axis, size in asked.items() if size is not None}


class ProcessGroupConfig(Section):
    """Settings of the default process group."""

    communication_backend: str | None = Field(
        None, description="gloo, nccl, xccl, ...; null takes torch's choice for the device."
    )
    init_method: str | None = Field(None, description="As in torch.distributed; null means env://.")
    timeout_seconds: Seconds | None = Field(
        None, description="How long a collective may wait; null takes torch's default."
    )


class RendezvousConfig(Section):
    """Timeouts for machines of a job that wait for each other."""

    timeout_seconds: Seconds = Field(600.0, description="Within which all machines have to come.")
    last_call_seconds: Seconds = Field(
        30.0, description="With num_machines: 2:4, how long to wait for a further machine once there are two."
    )
    lost_after_seconds: Seconds = Field(15.0, description="After which a machine that gives no sign of life is lost.")
    run_id: str | None = Field(
        None,
        description="Name of the run: launchers with another one are refused; null takes the scheduler's job number,"
        " and compares configuration and command.",
    )


class DataLoaderConfig(Section):
    """Settings of prepared data loaders, which share out their samples."""

    split_batches: bool = Field(
        False, description="The script's batch size is the global one, cut among the ranks, instead of each rank's own."
    )
    dispatch_batches: bool | None = Field(
        None, description="The main process reads all batches and hands them out; null means no."
    )
    even_batches: bool = Field(
        True, description="Give every rank the same number of batches, a repeated sample where none is left for it."
    )
    use_seedable_sampler: bool = Field(
        False, description="Shuffle by seed and epoch, instead of by torch's global state as the plain loader does."
    )
    data_seed: Integer | None = Field(
        None, description="Shuffle by this seed and the epoch; null: see use_seedable_sampler."
    )
    non_blocking: bool = Field(False, description="Copy batches to the device without waiting (needs pinned memory).")
    use_stateful_dataloader: bool = Field(
        False, description="Accepted either way: prepared loaders always carry their position."
    )


class OutputConfig(Section):
    """Settings for the output of the processes of a launch: what is shown and what is kept."""

    local_ranks_filter: Annotated[list[Index] | Literal["all"] | None, BeforeValidator(_local_ranks)] = Field(
        None, description="Local ranks that each machine shows: [0, 1] or all; null: rank 0 of the job, all with tee."
    )
    log_dir: str | None = Field(
        None, description="Folder that gets one file for each rank and stream, of every rank; null keeps none."
    )
    tee: Annotated[str | None, BeforeValidator(_streams)] = Field(
        None,
        description="Streams that are shown with the rank in front, and filed if there is a log_dir: 0 none, 1 stdout,"
        " 2 stderr, 3 both; or by local rank, '0:3,1:2'.",
    )
    redirects: Annotated[str | None, BeforeValidator(_streams)] = Field(
        None, description="Streams that go to log_dir and are not shown; numbers as for tee."
    )
    role: str = Field("rank", description="The word before the rank where lines have it in front: [rank0].")

    @model_validator(mode="after")
    def _redirects_go_somewhere(self) -> Self:
        if self.redirects is not None and self.log_dir is None:
            raise ValueError("redirects needs a folder; set log_dir")
        return self

    def tee_of(self, local_rank: int) -> int:
        """The streams of a rank that are shown and filed: 1 stdout, 2 stderr, 3 both."""
        return _streams_of(self.tee, local_rank)

    def redirects_of(self, local_rank: int) -> int:
        """The streams of a rank that are only filed."""
        return _streams_of(self.redirects, local_rank)

    def shown_ranks(self, processes_here: int, first_rank: int) -> Sequence[int]:
        """Local ranks whose output is shown unless it is redirected, on the machine whose ranks begin there."""
        if self.local_ranks_filter == "all" or (self.local_ranks_filter is None and self.tee is not None):
            return range(processes_here)
        if self.local_ranks_filter is None:
            return [0] if first_rank == 0 else []
        return self.local_ranks_filter

    def named_ranks(self) -> list[int]:
        """Local ranks that are written out anywhere in this section."""
        chosen = self.local_ranks_filter if isinstance(self.local_ranks_filter, list) else []
        return sorted({*chosen, *_by_rank(self.tee), *_by_rank(self.redirects)})


class PlanConfig(Section):
    """Model and batch for which ``distributed_type: auto`` and ``drivetrain-planner`` choose a layout."""

    model: str | None = Field(
        None, description="package.module:function or file.py:function that returns the model, or a config.json."
    )
    batch: str | None = Field(None, description="A function, named likewise, that returns a micro-batch of a process.")
    loss: str | None = Field(
        None, description="A function of the model's output and the batch; null takes the output's own loss."
    )
    machine: str | None = Field(
        None, description="What it runs on: h100x8, a YAML file of numbers, ...; null: cpu where use_cpu is set."
    )
    memory: str | None = Field(None, description="Of one device, such as 24GiB; null takes the machine's.")
    global_batch: Count | None = Field(
        None, description="Samples of an optimizer step; null: one micro-batch of each process."
    )
    optimizer: str = Field("AdamW", description="The class of torch.optim that the script uses.")
    optimizer_args: dict[str, Any] = Field(
        default_factory=dict, description="Its arguments, as far as they add state: {momentum: 0.9}."
    )
    samples: Count = Field(1, description="Sequences of a micro-batch that is made for a config.json.")
    length: Count = Field(1024, description="Tokens of each of them.")
    file: str = Field("train.auto.yaml", description="Where the choice is written, and read the next time.")
    check: bool = Field(
        False,
        description="Compare memory and seconds of the first optimizer steps with what is predicted for this "
        "configuration; needs model, batch and `drivetrain launch`.",
    )


class RankMonitorConfig(Section):
    """Compares the calls of several processes beside the training."""

    enabled: bool = Field(
        True,
        description="Compare, in a thread, which calls the ranks have made, for which batches and with which settings;"
        " ranks that are apart raise, ranks that wait for long are reported.",
    )
    interval_seconds: Seconds = Field(1.0, description="Between two comparisons; longer beyond 1,000 processes.")
    standstill_seconds: Seconds = Field(60.0, description="Without a call, after which ranks that wait are reported.")


class SchedulerConfig(Section):
    """Settings of prepared learning-rate schedulers."""

    step_per_process: bool = Field(
        False,
        description="Move the scheduler once per process at each optimizer step (Accelerate's way) instead of once.",
    )


class Config(Section):
    """The core's keys. Sections of backends stand beside them in the file but are kept apart, as they are theirs."""

    distributed_type: Annotated[str | None, BeforeValidator(_backend_name)] = Field(
        None,
        description="The backend that trains; null takes the best installed one for the number of processes, auto lets"
        " drivetrain-planner choose one for `plan:`.",
    )
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(_precision)] = Field(
        "no", description="'no', bf16 or fp16."
    )
    gradient_accumulation_steps: Count = Field(1, description="Micro-batches between two optimizer steps.")
    count_items: bool = Field(
        False,
        description="Weigh a mean loss by what it is a mean over (labels that count), as one big batch would; reads it "
        "from the loss, and sums it over the ranks once a window.",
    )
    num_processes: Count | None = Field(
        None, description="Processes over all machines; null takes one per accelerator, or one."
    )
    num_machines: Annotated[int | str, BeforeValidator(_machines)] = Field(
        1, description="Machines in the job; 2:4 starts with two to four of them and goes on while two are left."
    )
    machine_rank: Index = Field(0, description="Index of this machine, from 0.")
    main_process_ip: str | None = Field(None, description="Address of machine 0, where the others meet.")
    main_process_port: Annotated[Integer, Field(ge=0, le=65535)] | None = Field(
        None, description="Port on that machine; null or 0 takes a free one when there is a single machine."
    )
    rdzv_backend: Literal["c10d", "static"] = Field(
        "c10d", description="Accepted either way: machines are numbered by machine_rank, and may come back."
    )
    max_restarts: Index = Field(0, description="How often failed workers are started again, all together.")
    monitor_interval: Seconds = Field(0.1, description="Seconds between two looks at the workers.")
    accelerator_ids: Annotated[list[str] | None, BeforeValidator(_ids)] = Field(
        None, description="Accelerators of this machine, in order: [0, 2] or UUIDs; null means all, [] the CPU."
    )
    device_order: Literal["pci_bus_id", "fastest_first"] | None = Field(
        None, description="Which accelerator is number 0 (CUDA_DEVICE_ORDER): pci_bus_id or fastest_first."
    )
    use_cpu: bool = Field(False, description="Stay on the CPU even where there is an accelerator.")
    debug: bool = Field(
        False, description="Compare shapes and dtypes over the ranks before each collective; show all frames of errors."
    )
    desync_watchdog: bool = Field(
        False,
        description="Compare each collective call over the ranks before it is made: operation, shapes, dtypes and line "
        "of the script; ranks that are apart, or that do not come within process_group.timeout_seconds, raise.",
    )
    save_on_interrupt: bool = Field(
        False, description="Told to end by Ctrl-C or SIGTERM, save the run in project_dir after the step, then stop."
    )
    sync_batch_norm: bool = Field(
        False,
        description="Take the statistics of batch norms in training over the batches of all data-parallel processes,"
        " as one process with the global batch does, instead of over each process's own.",
    )
    log_with: Annotated[list[str], BeforeValidator(names)] = Field(
        default_factory=list, description="Experiment trackers by name, e.g. [jsonl, tensorboard], or all."
    )
    project_dir: str | None = Field(None, description="Folder for checkpoints and logs.")
    output_dtype: Literal["float32", "compute"] = Field(
        "float32",
        description="Dtype of a model's floating outputs under mixed precision: float32, or compute (left alone).",
    )
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    process_group: ProcessGroupConfig = Field(default_factory=ProcessGroupConfig)
    rendezvous: RendezvousConfig = Field(default_factory=RendezvousConfig)
    dataloader: DataLoaderConfig = Field(default_factory=DataLoaderConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    rank_monitor: RankMonitorConfig = Field(default_factory=RankMonitorConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)

    @field_validator("machine_rank")
    @classmethod
    def _machine_exists(cls, value: int, info: ValidationInfo) -> int:
        machines = info.data.get("num_machines")
        # 1 is the default, for which the launcher asks the cluster: drivetrain.launch.plan compares that.
        if machines not in (None, 1) and value >= machine_range(machines)[1]:
            raise ValueError(f"machine {value} does not exist among num_machines: {machines}; count from 0")
        return value


assert frozenset(Config.model_fields) == CORE_KEYS, "config/keys.py lists the fields of Config"
