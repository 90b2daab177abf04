"""Extends training arguments by ranks and devices of the run, and checks settings that belong in its file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
import transformers
import yaml
from accelerate.state import AcceleratorState as TheirAcceleratorState
from accelerate.state import PartialState as TheirState
from accelerate.utils import DistributedType
from accelerate.utils import operations as their_operations

from drivetrain import Accelerator, PartialState, gather, gather_object
from drivetrain.api import UsageError
from drivetrain_transformers import private_names


@final
class RunState:
    """Stands for ``args.distributed_state``: ranks and device of this process, and the number of shares of the data.

    Args:
        state: the process, before there is an accelerator.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._accelerator: Accelerator | None = None

    def follow(self, accelerator: Accelerator) -> None:
        """Use the mesh of the run: under tensor or pipeline parallelism several processes read one share."""
        self._accelerator = accelerator
        show_accelerate(self, accelerator)

    @property
    def num_processes(self) -> int:
        """Number of data-parallel coordinates, by which Trainer multiplies batch sizes; of processes before the run."""
        if self._accelerator is None:
            return self._state.num_processes
        return self._accelerator.backend.topology.dp_size

    @property
    def distributed_type(self) -> DistributedType:
        """A word of Accelerate's that sends Trainer down its general path: one process, or several."""
        return DistributedType.MULTI_GPU if self._state.num_processes > 1 else DistributedType.NO

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return (self._accelerator or self._state).device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._state, name)

    def __deepcopy__(self, _memo: dict[int, Any]) -> RunState:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Arguments are pickled beside a saved model, for programs that are no part of this run.
        return type(None), ()


def set_up(args: transformers.TrainingArguments) -> torch.device:
    """Give training arguments the processes of this run, and refuse what its configuration must say. Collective.

    Returns:
        The device of this process.

    Raises:
        UsageError: the arguments choose an engine.
    """
    private_names.check()
    refuse_engine(args)
    made = getattr(args, "distributed_state", None)
    if isinstance(made, RunState):
        return made.device
    group: dict[str, Any] = {"backend": args.ddp_backend} if args.ddp_backend else {}
    if args.ddp_timeout != type(args).ddp_timeout:
        group["timeout"] = args.ddp_timeout_delta
    state = RunState(PartialState(cpu=args.use_cpu, **group))
    args.distributed_state = state
    setattr(args, private_names.NUM_GPUS, _num_gpus(state))
    show_accelerate(state)
    return state.device


def adopt(args: transformers.TrainingArguments) -> None:
    """Make Transformers' own arguments, whatever they found out about processes, those of this run."""
    if not isinstance(getattr(args, "distributed_state", None), RunState):
        # Where the cached property keeps its value.
        args.__dict__["_setup_devices"] = set_up(args)
    private_names.check_arguments(args, _num_gpus(args.distributed_state))


def _num_gpus(state: RunState) -> int:
    """Devices of this process that Trainer would spread a model over."""
    return 0 if state.device.type == "cpu" else 1


def show_accelerate(state: RunState, accelerator: Accelerator | None = None) -> None:
    """Give Accelerate's singletons, which libraries on top of Trainer ask for ranks, the facts of this run.

    Processes of one tensor-parallel group read one share of the data: they have the same index, so that what they draw
    and what they cut from gathered rows is the same, and ``gather`` returns each row once.

    Args:
        state: the process.
        accelerator: of the run; ``None`` before there is one.
    """
    index = state.process_index if accelerator is None else accelerator.data_parallel_rank
    for singleton in (TheirState, TheirAcceleratorState):
        singleton._shared_state.clear()  # noqa: SLF001
    TheirState._shared_state.update(  # noqa: SLF001
        device=state.device,
        backend=state.backend,
        debug=False,
        fork_launched=False,
        _cpu=state.device.type == "cpu",
        distributed_type=state.distributed_type,
        num_processes=state.num_processes,
        process_index=index,
        local_process_index=state.local_process_index,
    )
    if accelerator is None:
        return
    TheirAcceleratorState._shared_state.update(  # noqa: SLF001
        TheirState._shared_state,  # noqa: SLF001
        _mixed_precision=accelerator.mixed_precision,
        deepspeed_plugins=None,
        parallelism_config=None,
        dynamo_plugin=None,
        torch_tp_plugin=None,
        device_mesh=None,
    )
    # What Accelerate's gather and gather_object call where there are several processes.
    vars(their_operations).update(_gpu_gather=gather, _gpu_gather_object=gather_object)


def refuse_engine(args: transformers.TrainingArguments) -> None:
    """Raise where the arguments choose an engine, with the configuration that says the same."""
    if args.deepspeed:
        section = {"config_file": args.deepspeed} if isinstance(args.deepspeed, str) else {"config": args.deepspeed}
        _refuse("deepspeed", {"distributed_type": "deepspeed", "deepspeed": section})
    if args.fsdp:
        given = args.fsdp_config or {}
        if isinstance(given, str):
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        given = {key.removeprefix("fsdp_"): value for key, value in given.items()}
        if given.get("xla") or given.get("xla_fsdp_v2"):
            raise UsageError(
                "TrainingArguments(fsdp=...) asks for FSDP of torch_xla, which Drivetrain does not run",
                cure="Leave fsdp and fsdp_config out, and write distributed_type: fsdp in the configuration.",
            )
        section = {
            f"fsdp_{key}": ",".join(value) if isinstance(value, list) else value
            for key, value in given.items()
            if value is not None and not key.startswith("xla") and not (key == "min_num_params" and not value)
        }
        _refuse("fsdp", {"distributed_type": "fsdp", "fsdp_config": {"fsdp_version": 2, **section}})
    if args.parallelism_config is not None:
        raise UsageError(
            "TrainingArguments(parallelism_config=...) lays out an engine, which the configuration does here",
            cure="Leave it out, and write the sizes into the section mesh: of the configuration.",
        )


def _refuse(name: str, config: dict[str, Any]) -> None:
    text = "".join(f"\n    {line}" for line in yaml.safe_dump(config, sort_keys=False).splitlines())
    raise UsageError(
        f"TrainingArguments({name}=...) chooses an engine, which the configuration of the launch does here",
        cure=f"Leave it out, and write into the file of `drivetrain launch --config FILE`:{text}",
    )


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Transformers' own, on the processes of a Drivetrain run.

    ``world_size`` is the number of data-parallel processes. ``fsdp``, ``deepspeed`` and ``parallelism_config`` raise
    :class:`~drivetrain.api.UsageError` with the configuration to write instead.
    """

    @cached_property
    def _setup_devices(self) -> torch.device:
        return set_up(self)


@dataclass
class Seq2SeqTrainingArguments(transformers.Seq2SeqTrainingArguments):
    """Transformers' own, as :class:`TrainingArguments`."""

    @cached_property
    def _setup_devices(self) -> torch.device:
        return set_up(self)
