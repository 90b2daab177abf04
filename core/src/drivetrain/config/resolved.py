"""A loaded configuration: typed values, the sections of backends, and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from drivetrain.config.fields import Section
from drivetrain.config.keys import AUTO
from drivetrain.config.locate import DEFAULT, Origin, Path, Problem, Tree
from drivetrain.config.problems import MOST_PROBLEMS, known_keys, model_problems, spell_out, unknown_key
from drivetrain.config.schema import Config
from drivetrain.errors import ConfigError
from drivetrain.wording import cut

if TYPE_CHECKING:
    from drivetrain.registry import Registry

_FORMAT = 1

_LONGEST_LINE = 1_000
"""Characters of one mistake. The longest of ours, all keys at the top of a file, has 500."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class ResolvedConfig:
    """The result of :func:`drivetrain.config.load_config`, which the launcher passes to its workers.

    Args:
        config: the core's keys.
        sections: the keys that were given for each backend, by its name, as they were written.
        origins: where each value came from, by dotted key (``mesh.tp``, ``ddp.static_graph``); a key that is not there
            has its default.
    """

    config: Config = field(default_factory=Config)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)

    @property
    def section(self) -> dict[str, Any]:
        """Keys given for the backend that ``distributed_type`` names; empty when it names none."""
        return self.section_for(self.config.distributed_type)

    def section_for(self, name: str | None) -> dict[str, Any]:
        """Keys given for a backend, by its canonical name; empty when there are none."""
        return dict(self.sections.get(name, {})) if name is not None else {}

    def validated_section(self, model_type: type[Model], name: str | None = None) -> Model:
        """The section of a backend as its own model.

        Args:
            model_type: the plugin's model.
            name: the backend; ``None`` = the one that ``distributed_type`` names.

        Raises:
            ConfigError: keys or values that the model refuses, all of them, each at its place.
        """
        name = name or self.config.distributed_type or ""
        model, problems = check_section(model_type, name, self.section_for(name), self.tree())
        if model is None:
            raise mistakes(problems)
        return model

    def origin(self, key: str) -> Origin:
        """Return the origin of the value of a dotted key."""
        return self.origins.get(key, DEFAULT)

    def tree(self) -> Tree:
        """The values that were given, with their origins."""
        places: dict[Path, Origin] = {tuple(key.split(".")): origin for key, origin in self.origins.items()}
        values = {**self.config.model_dump(exclude_unset=True), **self.sections}
        return Tree(values, places, dict(places))

    def to_json(self) -> str:
        """One line of text that :meth:`from_json` turns back into an equal object."""
        given = {key: [o.kind, o.source, o.line, o.column] for key, o in self.origins.items()}
        values = self.config.model_dump(mode="json", exclude_unset=True)
        return json.dumps({"format": _FORMAT, "values": values, "sections": self.sections, "origins": given})

    @classmethod
    def from_json(cls, text: str) -> ResolvedConfig:
        """The object that :meth:`to_json` wrote. Raises :class:`ConfigError` for anything else."""
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise ConfigError(
                    f"the configuration handed over has format {data['format']}, this version reads {_FORMAT}",
                    cure="Let the launcher and the workers use the same version of drivetrain.",
                )
            config = Config.model_validate(data["values"])
            origins = {key: Origin(*fields) for key, fields in data["origins"].items()}
            return cls(config, data["sections"], origins)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, ValidationError) as error:
            raise ConfigError(
                f"this is not a configuration that drivetrain wrote: {error}",
                cure="Unset DRIVETRAIN_CONFIG; to name a file, use DRIVETRAIN_CONFIG_FILE.",
            ) from error


def leaves(
    values: Mapping[str, Any] | BaseModel, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and value of every leaf; sections of the core are expanded."""
    pairs = values.items() if isinstance(values, Mapping) else iter(values)
    for key, value in pairs:
        path = (*prefix, str(key))
        if isinstance(value, (Section, Mapping)) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def check_section(
    model_type: type[Model], name: str, values: Mapping[str, Any], tree: Tree
) -> tuple[Model | None, list[Problem]]:
    """Validate the section of a backend, with positions from ``tree``.

    A model that does not forbid unknown keys would drop them silently; they are mistakes too, unless it has
    ``extra="allow"``.

    Returns:
        The model, or ``None`` with what is wrong.
    """
    problems: list[Problem] = []
    extra = model_type.model_config.get("extra")
    if extra not in ("forbid", "allow"):
        known = known_keys(model_type)
        names = {*known, *model_type.model_fields}
        problems += [Problem(tree.key((name, key)), unknown_key(key, known)) for key in values if key not in names]
    try:
        model = model_type.model_validate(spell_out(model_type, values))
    except ValidationError as error:
        problems += model_problems(error, model_type, (name,), tree)
        return None, problems
    except Exception as error:  # noqa: BLE001 - said at the section; pydantic passes on what it does not know
        said = f"{model_type.__module__}, failed ({cut(f'{type(error).__name__}: {error}', 200)})"
        problems.append(Problem(tree.key((name,)), f"{name}: a check of this section's own, {said}"))
        return None, problems
    return (None, problems) if problems else (model, [])


def mistakes(problems: list[Problem]) -> ConfigError:
    """One error for all problems, in the order of the file."""
    ordered = sorted(dict.fromkeys(problems), key=lambda each: (each.origin, each.sentence))
    lines = [cut(str(each), _LONGEST_LINE) for each in ordered[:MOST_PROBLEMS]]
    count = "1 mistake" if len(ordered) == 1 else f"{len(ordered)} mistakes"
    count = f"more than {MOST_PROBLEMS} mistakes" if len(ordered) > MOST_PROBLEMS else count
    return ConfigError("\n".join([*lines, f"{count} in the configuration"]))


# ---- origins of values ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One key with its value and origin."""

    key: str
    value: Any
    origin: Origin

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data; values without JSON type become text."""
        plain = isinstance(self.value, (str, int, float, bool, list, dict, type(None)))
        return {"key": self.key, "value": self.value if plain else str(self.value), "origin": str(self.origin)}


def rows(resolved: ResolvedConfig, registry: Registry | None = None) -> list[Row]:
    """Every key of the core, every key of the chosen backend's section, and what other sections were given.

    Args:
        resolved: a loaded configuration.
        registry: of the backends; ``None`` = the process's registry. Used only when a backend was chosen.

    Raises:
        BackendError: the chosen backend is missing or broken.
    """
    found = list(leaves(resolved.config))
    chosen = resolved.config.distributed_type
    if chosen not in (None, AUTO):
        if registry is None:
            from drivetrain.registry import get_registry

            registry = get_registry()
        section = resolved.section
        model_type = registry.load_section(registry.info(chosen))
        if model_type is not None:
            section = resolved.validated_section(model_type).model_dump(mode="json", by_alias=True)
        found += leaves(section, (chosen,))
    found += leaves({name: values for name, values in resolved.sections.items() if name != chosen})
    return [Row(".".join(path), value, resolved.origin(".".join(path))) for path, value in found]
