"""Say where each value of a configuration came from: what ``drivetrain config show`` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.config.load import Backends
from drivetrain.config.locate import DEFAULT, Origin
from drivetrain.config.resolved import ResolvedConfig, leaves


@dataclass(frozen=True, slots=True)
class Row:
    """One key with its value and where that came from."""

    key: str
    value: Any
    origin: Origin

    def to_dict(self) -> dict[str, Any]:
        """For JSON output; a value that JSON does not know becomes text."""
        plain = isinstance(self.value, (str, int, float, bool, list, dict, type(None)))
        return {"key": self.key, "value": self.value if plain else str(self.value), "origin": str(self.origin)}


def rows(resolved: ResolvedConfig, registry: Backends | None = None) -> list[Row]:
    """Every key of the core, every key of the chosen backend's section, and what other sections were given.

    Args:
        resolved: a loaded configuration.
        registry: who knows the backends; ``None`` = the process's registry. Asked only when a backend was chosen.

    Raises:
        BackendError: the chosen backend is gone or broken by now.
    """
    found = [_row(resolved, path, value) for path, value in leaves(resolved.config)]
    chosen = resolved.config.distributed_type
    if chosen is not None:
        found += [_row(resolved, (chosen, *path), value) for path, value in _section(resolved, chosen, registry)]
    others = {name: values for name, values in resolved.sections.items() if name != chosen}
    return found + [_row(resolved, path, value) for path, value in leaves(others)]


def _row(resolved: ResolvedConfig, path: tuple[str, ...], value: Any) -> Row:
    key = ".".join(path)
    return Row(key, value, resolved.origins.get(key, DEFAULT))


def _section(resolved: ResolvedConfig, name: str, registry: Backends | None) -> list[tuple[tuple[str, ...], Any]]:
    """The section of a backend with its defaults filled in."""
    if registry is None:
        from drivetrain.registry import get_registry

        registry = get_registry()
    model_type = registry.load_section(registry.info(name))
    if model_type is None:
        return list(leaves(resolved.section_for(name)))
    values = resolved.validated_section(model_type, name).model_dump(mode="json", by_alias=True)
    return list(leaves(values))
