"""Which backend, and what its own section says about the run: settled before anything of it is imported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from drivetrain.backend import BackendInfo, Statement
from drivetrain.config import ResolvedConfig
from drivetrain.config.origin import DEFAULT
from drivetrain.errors import BackendNotFoundError, UsageError
from drivetrain.registry import get_registry

logger = logging.getLogger(__name__)

_SCRIPT = "the script"


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
    implied: Mapping[str, Statement] = field(default_factory=dict)

    def settle(self, key: str, script: Any, resolved: ResolvedConfig) -> Any:
        """The value of a key of the core: the script's, else the configuration's, else what the section says of it.

        Args:
            key: a key of the core's configuration.
            script: what the script passed, ``None`` when nothing.
            resolved: the configuration.

        Raises:
            UsageError: the section says something else than script or configuration.
        """
        configured, origin = getattr(resolved.config, key), resolved.origin(key)
        said = None
        if script is not None:
            said = Statement(script, _SCRIPT)
        elif origin != DEFAULT:
            said = Statement(configured, str(origin))
        theirs = self.implied.get(key)
        if theirs is None:
            return configured if said is None else said.value
        if said is None:
            logger.info("%s: %s is taken from %s", key, theirs.value, theirs.where)
            return theirs.value
        if said.value != theirs.value:
            raise UsageError(
                f"{key} is {said.value!r} ({said.where}) and {theirs.value!r} ({theirs.where})",
                cure="Say it in one place, or the same in both.",
            )
        return said.value


def choose_backend(
    resolved: ResolvedConfig, distributed_type: str | None, world_size: int, engine_arguments: Mapping[str, Any]
) -> Choice:
    """The backend that the script names, else the configuration, else the best for the world.

    Args:
        resolved: the configuration.
        distributed_type: the script's word, or ``None``.
        world_size: number of processes.
        engine_arguments: further arguments of ``Accelerator``; ``<backend>_plugin`` may be that backend's section.

    Raises:
        UsageError: arguments that are no section, or that contradict the choice.
        TypeError: a word that is no argument anywhere.
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
        origins = {key.removeprefix(prefix): str(origin) for key, origin in found.items() if origin != DEFAULT}
    return Choice(info, section, origins, info.implied(section, origins))


def section_at_hand(choice: Choice, engine: str) -> Any:
    """The run's section where ``engine`` names its backend, else ``None``: what ``accelerator.<engine>_plugin`` is.

    Raises:
        AttributeError: nobody knows a backend of this name.
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
    """The section that the script passed; the configuration must not have one too."""
    if resolved.section_for(name):
        raise UsageError(
            f"the script passes the settings of {name!r}, and the configuration has a section `{name}:`",
            cure="Keep one of the two.",
        )
    values = dict(given) if isinstance(given, Mapping) else given.model_dump(exclude_unset=True)
    if isinstance(given, BaseModel) and not isinstance(given, section_type):
        raise UsageError(
            f"the settings of {name!r} are a {section_type.__module__}.{section_type.__name__} or a mapping of its "
            f"keys, not a {type(given).__name__}"
        )
    script = ResolvedConfig(resolved.config, {name: values})
    return script.validated_section(section_type, name), dict.fromkeys(values, _SCRIPT)
