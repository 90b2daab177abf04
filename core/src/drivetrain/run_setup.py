"""Starts the backend of a run from the configuration and the arguments of ``Accelerator``."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakMethod, ref

import torch.distributed as dist
from pydantic import BaseModel

from drivetrain.backend import Backend, BackendInfo, ProcessGroupSettings, RunSettings
from drivetrain.backends import torch_names
from drivetrain.config import ResolvedConfig, load_config, worker_config
from drivetrain.config.locate import DEFAULT
from drivetrain.config.schema import MeshConfig, RankMonitorConfig
from drivetrain.distributed import call_monitor
from drivetrain.distributed.call_monitor import CallMonitor
from drivetrain.distributed.watchdog import default_store
from drivetrain.errors import BackendBlockedError, BackendNotFoundError, ConfigError, DrivetrainError, UsageError
from drivetrain.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
)
from drivetrain.launch.environment import PREDICTION
from drivetrain.launch.worker import of_the_script
from drivetrain.logging import set_rank
from drivetrain.loop.precision import policy_for
from drivetrain.registry import get_registry, pip_line
from drivetrain.topology import ProcessInfo

logger = logging.getLogger(__name__)

_SCRIPT = "the script"


def plan_check(accelerator: Any) -> Any:
    """Return what compares this run with the prediction; see :func:`drivetrain.hookspecs.drivetrain_check_plan`.

    Raises:
        ConfigError: the launcher has predicted nothing.
        BackendNotFoundError: no planner is installed here.
    """
    text = os.environ.get(PREDICTION)
    if text is None:
        raise ConfigError(
            "plan.check compares a run with what `drivetrain launch` predicts before it starts a script, and this one "
            "was started by something else",
            cure="Start it with drivetrain launch, or take `check` out of `plan:`.",
        )
    found = get_registry().check_plan(accelerator, json.loads(text))
    if found is None:
        raise BackendNotFoundError(
            "plan.check needs a planner, and none is installed", cure=f"Run: {pip_line('planner')}"
        )
    return found


# ---- exit handlers --------------------------------------------------------------------------------------------------


def at_exit(close: Callable[[], None]) -> None:
    """Call a bound method when the interpreter ends, if its object is still alive then."""
    method = WeakMethod(close)

    def run() -> None:
        alive = method()
        if alive is not None:
            alive()

    atexit.register(run)


def start_monitor(backend: Backend, settings: RankMonitorConfig, *, compares: bool) -> CallMonitor | None:
    """Start to compare this process's calls with the other ranks'; ``None`` where that is off or cannot be.

    Args:
        backend: started. Ranks of one that forms no process group have no store to compare through.
        settings: of the configuration.
        compares: ``False``: only a standstill is reported, as where another part compares each call.
    """
    topology = backend.topology
    if topology.world_size == 1 or not settings.enabled or not dist.is_initialized():
        return None
    return call_monitor.start(
        default_store(),
        topology.rank,
        topology.world_size,
        topology.dp_size,
        interval=settings.interval_seconds,
        standstill=settings.standstill_seconds,
        compares=compares,
    )


def shorten_tracebacks(*, debug: bool = False) -> None:
    """Show errors of ours that end a script with the script's line, without what we called from there.

    As the launcher does, for scripts that were started otherwise. Another program's ``sys.excepthook`` stays.

    Args:
        debug: show all frames again.
    """
    if sys.excepthook is _show_of_the_script and debug:
        sys.excepthook = sys.__excepthook__
    elif sys.excepthook is sys.__excepthook__ and not debug:
        sys.excepthook = _show_of_the_script


def _show_of_the_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, DrivetrainError):
        sys.stderr.write(of_the_script(kind, error, trace))
    else:
        sys.__excepthook__(kind, error, trace)


def on_failure(report: Callable[[BaseException], None]) -> None:
    """Call a bound method with the exception that ends the script, before the traceback is printed."""
    method = WeakMethod(report)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        alive = method()
        if alive is not None:
            alive(error)
        previous(kind, error, trace)

    sys.excepthook = hook


# ---- choosing a backend ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The chosen backend.

    Args:
        info: its description.
        section: its validated section, or ``None`` when it has none.
        origins: where each key of the section was written, by dotted key below the section.
        implied: what the section says about keys of the core.
    """

    info: BackendInfo
    section: Any = None
    origins: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def settle(self, key: str, script: Any, resolved: ResolvedConfig) -> Any:
        """The value of a key of the core: the script's, else the configuration's, else the one implied by the section.

        Args:
            key: a key of the core's configuration.
            script: what the script passed, ``None`` when nothing.
            resolved: the configuration.

        Raises:
            UsageError: the section contradicts script or configuration.
        """
        configured, origin = getattr(resolved.config, key), resolved.origin(key)
        said = None
        if script is not None:
            said = script, _SCRIPT
        elif origin != DEFAULT:
            said = configured, str(origin)
        theirs = self.implied.get(key)
        if theirs is None:
            return configured if said is None else said[0]
        value, where = theirs
        if said is None:
            logger.info("%s: %s is taken from %s", key, value, where)
        elif said[0] != value:
            raise UsageError(
                f"{key} is {said[0]!r} ({said[1]}) and {value!r} ({where})",
                cure="Say it in one place, or the same in both.",
            )
        return value


def choose_backend(
    resolved: ResolvedConfig, distributed_type: str | None, world_size: int, engine_arguments: Mapping[str, Any]
) -> Choice:
    """The backend that the script names, else the configuration, else the best for the world.

    Args:
        resolved: the configuration.
        distributed_type: the script's argument, or ``None``.
        world_size: number of processes.
        engine_arguments: further arguments of ``Accelerator``; ``<backend>_plugin`` may be that backend's section.

    Raises:
        UsageError: arguments that are no section, or that contradict the choice.
        TypeError: an unknown argument.
        BackendError, ConfigError: see :class:`drivetrain.registry.Registry` and the configuration.
    """
    registry = get_registry()
    given = _section_argument(engine_arguments)
    asked = distributed_type or resolved.config.distributed_type
    if given is not None:
        name, _ = given
        if asked is not None and registry.canonical(asked) != name:
            raise UsageError(
                f"the script passes settings of the backend {name!r}, but {asked!r} was chosen",
                cure=f"Choose distributed_type: {name}, or leave the argument out.",
            )
        asked = name
    info = registry.info(asked) if asked else registry.default(world_size)
    section_type = registry.load_section(info)
    if section_type is None:
        return Choice(info)
    if given is not None:
        section, origins = _from_script(section_type, given[1], info.name, resolved)
    else:
        section = resolved.validated_section(section_type, info.name)
        prefix = f"{info.name}."
        found = {key: origin for key, origin in resolved.origins.items() if key.startswith(prefix)}
        origins = {key.removeprefix(prefix): str(origin) for key, origin in found.items()}
    return Choice(info, section, origins, {} if info.implied is None else info.implied(section, origins))


def section_at_hand(choice: Choice, engine: str) -> Any:
    """The run's section where ``engine`` names its backend, else ``None``: what ``accelerator.<engine>_plugin`` is.

    Raises:
        AttributeError: there is no backend of this name.
    """
    try:
        return choice.section if get_registry().resolve(engine) == choice.info.name else None
    except BackendNotFoundError as error:
        if "pip install" in error.cure and "Did you mean" not in error.cure:
            return None  # A backend that is not installed here, hence not this run's.
        raise AttributeError(f"there is no backend {engine!r}, hence no {engine}_plugin") from error


def _section_argument(given: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Backend and value of the one argument ``<backend>_plugin`` that is a section; refuses everything else."""
    found: list[tuple[str, Any]] = []
    for name, value in given.items():
        engine = name.removesuffix("s").removesuffix("_plugin")
        if engine == name.removesuffix("s") and name != "parallelism_config":
            raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}")
        if value is None:
            continue
        if isinstance(value, Mapping | BaseModel) and name.endswith("_plugin"):
            found.append((get_registry().resolve(engine), value))
            continue
        place = "mesh:" if name == "parallelism_config" else f"{engine.removesuffix('_lm')}:"
        raise UsageError(
            f"Accelerator takes no {name} like this; what an engine needs stands in the configuration",
            cure=f"Write it in the section `{place}` of the config file (`drivetrain config` makes one).",
        )
    if len(found) > 1:
        raise UsageError("one run has one backend, and settings of two were passed", cure="Keep one of them.")
    return found[0] if found else None


def _from_script(
    section_type: type[BaseModel], given: Any, name: str, resolved: ResolvedConfig
) -> tuple[BaseModel, dict[str, str]]:
    """Validate the section that the script passed; the configuration must not have one too."""
    if resolved.section_for(name):
        raise UsageError(
            f"the script passes the settings of {name!r}, and the configuration has a section `{name}:`",
            cure="Keep one of the two.",
        )
    values = dict(given) if isinstance(given, Mapping) else given.model_dump(exclude_unset=True)
    if isinstance(given, BaseModel) and not isinstance(given, section_type):
        raise UsageError(
            f"the settings of {name!r} are a {section_type.__module__}.{section_type.__name__} or a mapping of its "
            f"keys, not a {type(given).__name__}",
            cure=f"Import {section_type.__name__} from there, or write a dict of these settings.",
        )
    script = ResolvedConfig(resolved.config, {name: values})
    return script.validated_section(section_type, name), dict.fromkeys(values, _SCRIPT)


# ---- starting the backend -------------------------------------------------------------------------------------------

_DEFAULTS = {
    kind.__name__: kind() for kind in (AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
}
"""The handlers that the core reads, as they are when the script passes none."""


@dataclass(frozen=True)
class Handlers:
    """The user's keyword handlers, by class name.

    Args:
        by_name: all of them, by class name.
    """

    by_name: Mapping[str, Any]

    @classmethod
    def of(cls, handlers: Sequence[Any] | None) -> Handlers:
        """Sort a list. Raises :class:`UsageError` for two of one class or something that is no handler."""
        by_name: dict[str, Any] = {}
        for handler in handlers or ():
            name = type(handler).__name__
            if not isinstance(handler, KwargsHandler):
                raise UsageError(f"{handler!r} is not a keyword handler", cure="Pass instances of the *Kwargs classes.")
            if name in by_name:
                raise UsageError(f"two {name} were given", cure="Pass one of each class.")
            by_name[name] = handler
        return cls(by_name)

    def of_type(self, kind: type[Any]) -> Any:
        """The handler of this class, or one with the defaults."""
        return self.by_name.get(kind.__name__) or _DEFAULTS[kind.__name__]

    def for_backend(self, info: BackendInfo) -> dict[str, Any]:
        """Those that the backend reads; warns once of handlers that nothing reads."""
        unread = sorted(self.by_name.keys() - _DEFAULTS.keys() - info.capabilities.handlers)
        if unread:
            logger.warning("%s has no meaning under the backend %r and is not used.", ", ".join(unread), info.name)
        return {name: handler for name, handler in self.by_name.items() if name in info.capabilities.handlers}


def resolve_config(config: ResolvedConfig | str | Path | None) -> ResolvedConfig:
    """The script's configuration, else the launcher's, else defaults and environment."""
    if isinstance(config, ResolvedConfig):
        return config
    if config is not None and not isinstance(config, (str, os.PathLike)):
        raise UsageError(
            f"Accelerator(config=...) takes the path of a YAML file, not a {type(config).__name__}",
            cure="Write the keys to a file and give its path; mixed_precision, gradient_accumulation_steps, "
            "split_batches and others are arguments of Accelerator too.",
        )
    return worker_config(os.environ) if config is None else load_config(config)


def with_mesh(resolved: ResolvedConfig, arguments: dict[str, Any]) -> ResolvedConfig:
    """The configuration with the mesh that the script passes as ``parallelism_config``.

    Args:
        resolved: the configuration.
        arguments: further arguments of ``Accelerator``; that one is taken out.

    Raises:
        UsageError: both set an axis, to different sizes.
    """
    given = arguments.get("parallelism_config")
    if not isinstance(given, ParallelismConfig):
        return resolved
    del arguments["parallelism_config"]
    written, asked = resolved.config.mesh.sizes(), given.sizes()
    for axis in [axis for axis in asked if written.get(axis, asked[axis]) != asked[axis]]:
        where = resolved.origin(f"mesh.{axis}")
        raise UsageError(
            f"parallelism_config says {axis}_size={asked[axis]}, and mesh.{axis} is {written[axis]} ({where})",
            cure="Say it in one place, or the same in both.",
        )
    mesh = MeshConfig(**{**written, **asked})
    return replace(resolved, config=resolved.config.model_copy(update={"mesh": mesh}))


def start_backend(
    choice: Choice,
    resolved: ResolvedConfig,
    handlers: Handlers,
    process: ProcessInfo,
    *,
    mixed_precision: str | None,
    cpu: bool,
    place_on_device: bool,
    sync_batch_norm: bool | None = None,
) -> Backend:
    """Check and start the chosen backend in this process. Collective over all ranks.

    Script arguments that are given win over the configuration.

    Raises:
        BackendNotFoundError, BackendBlockedError, ...: see :class:`drivetrain.registry.Registry`.
        UsageError: the backend's section contradicts what script or configuration say.
    """
    config, registry, info = resolved.config, get_registry(), choice.info
    spoken = None if mixed_precision is None else str(getattr(mixed_precision, "value", mixed_precision)).lower()
    precision = choice.settle("mixed_precision", spoken, resolved)
    device_type = "cpu" if cpu or config.use_cpu else None
    mesh = config.mesh.sizes()
    scaler, autocast = handlers.of_type(GradScalerKwargs), handlers.of_type(AutocastKwargs)
    policy = policy_for(
        precision,
        output=config.output_dtype,
        scaler=scaler.to_dict(),
        autocast_cache=autocast.cache_enabled,
    )
    if refusal := _refusal(info, process, policy.name, mesh):
        raise BackendBlockedError(refusal[0], whose=registry.owner(info.name), cure=refusal[1])
    given, group = handlers.of_type(InitProcessGroupKwargs), config.process_group
    timeout = group.timeout_seconds if given.timeout is None else given.timeout.total_seconds()
    settings = RunSettings(
        process=process,
        mesh=mesh,
        section=choice.section,
        precision=policy,
        device_type=device_type,
        process_group=ProcessGroupSettings(
            communication_backend=given.backend or group.communication_backend,
            init_method=given.init_method or group.init_method,
            timeout_seconds=timeout,
        ),
        handlers=handlers.for_backend(info),
        place_on_device=place_on_device,
        origins=choice.origins,
        name=info.name,
        sync_batch_norm=config.sync_batch_norm if sync_batch_norm is None else sync_batch_norm,
    )
    torch_names.check()
    backend = registry.load_backend(info)(settings)
    backend.start()
    return backend


def _refusal(
    info: BackendInfo, process: ProcessInfo, precision: str, mesh: Mapping[str, int]
) -> tuple[str, str] | None:
    """The requested setting that the backend does not support, with the cure; ``None`` when it supports all."""
    able = info.capabilities
    if process.world_size > 1 and not able.multi_process:
        return (
            f"the backend {info.name!r} runs in one process, but {process.launcher} started {process.world_size}",
            "Start one process, or choose a backend for several (`drivetrain backends` lists them).",
        )
    if precision not in able.precisions:
        return (
            f"the backend {info.name!r} has no mixed_precision={precision!r}",
            f"Choose one of {', '.join(sorted(able.precisions))}.",
        )
    if unknown := [axis for axis, size in mesh.items() if size > 1 and axis not in able.mesh_axes]:
        axes = ", ".join(sorted(able.mesh_axes)) or "none"
        return (
            f"the backend {info.name!r} has no mesh axis {', '.join(unknown)} (it has: {axes})",
            "Remove it from `mesh:`, or choose another backend.",
        )
    return None


def loader_configuration(
    resolved: ResolvedConfig, given: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    """The script's loader configuration, else the file's; ``split_batches`` may be given besides either."""
    config = given if given is not None else DataLoaderConfiguration(**resolved.config.dataloader.model_dump())
    if split_batches is None or split_batches == config.split_batches:
        return config
    if given is not None and config.split_batches:
        raise UsageError(
            "split_batches=False contradicts DataLoaderConfiguration(split_batches=True)",
            cure="Write it in one place: DataLoaderConfiguration(split_batches=...).",
        )
    return replace(config, split_batches=split_batches)


def project_configuration(
    resolved: ResolvedConfig, given: ProjectConfiguration | None, project_dir: str | Path | None
) -> ProjectConfiguration:
    """The script's project configuration, with a folder from any source that has one."""
    project = given or ProjectConfiguration()
    folder = project.project_dir or project_dir or resolved.config.project_dir
    if folder is not None and project.project_dir is None:
        project.set_directories(folder)
    return project


def saves_on_interrupt(resolved: ResolvedConfig, given: bool | None, project: ProjectConfiguration) -> bool:
    """Whether the run saves itself on a signal. Raises :class:`UsageError` when it has no folder."""
    wanted = resolved.config.save_on_interrupt if given is None else given
    if wanted and project.project_dir is None:
        raise UsageError(
            "save_on_interrupt has no folder to save in", cure="Set project_dir, in the configuration or the script."
        )
    return wanted


def accumulation(
    resolved: ResolvedConfig, choice: Choice, steps: int, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin:
    """Length of a window: the script's, else the configuration's, else the one implied by the backend's section.

    Raises:
        UsageError: the script gives it twice, or the section contradicts it.
    """
    configured = resolved.config.gradient_accumulation_steps
    if plugin is not None and steps != 1:
        raise UsageError(
            "both gradient_accumulation_steps and gradient_accumulation_plugin were given",
            cure="Put the number into GradientAccumulationPlugin(num_steps=...).",
        )
    said = plugin.num_steps if plugin is not None else steps
    if configured not in (1, said) and said != 1:
        logger.warning(
            "The script's gradient_accumulation_steps=%d is used; the configuration says %d (%s).",
            said,
            configured,
            resolved.origin("gradient_accumulation_steps"),
        )
    spoken = None if plugin is None and steps == 1 else said
    settled = choice.settle("gradient_accumulation_steps", spoken, resolved)
    return plugin if plugin is not None else GradientAccumulationPlugin(num_steps=settled)


def name_this_process(backend: Backend) -> None:
    """Set the rank for logging, without keeping a finished backend alive."""
    weak = ref(backend)

    def barrier() -> None:
        alive = weak()
        if alive is not None:
            alive.barrier()

    set_rank(backend.topology.rank, backend.topology.world_size, barrier)
