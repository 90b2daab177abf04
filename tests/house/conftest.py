"""Describes the distributions of this repository and their source files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Distribution:
    """One folder with a pyproject.toml.

    Args:
        folder: where it is.
        project: its table `[project]`.
    """

    folder: Path
    project: dict[str, Any]

    @property
    def package(self) -> Path:
        return self.folder / "src" / self.project["name"].replace("-", "_")

    @property
    def has_backend(self) -> bool:
        """Whether it brings a backend: it is found by its entry point. Others are imported by name, when asked for."""
        return "drivetrain" in self.project.get("entry-points", {})

    @property
    def is_library(self) -> bool:
        """Whether it is there for other plugins alone: some depend on it, and no entry point leads to it."""
        needed = {line.partition(">")[0] for found in distributions() for line in found.project["dependencies"]}
        return not self.project.get("entry-points") and self.project["name"] in needed

    @property
    def sources(self) -> list[Path]:
        return sorted((self.folder / "src").rglob("*.py"))


def distributions() -> list[Distribution]:
    """Every distribution: the core, the kit, the plugins."""
    files = [ROOT / "core/pyproject.toml", ROOT / "kit/pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    return [Distribution(file.parent, tomllib.loads(file.read_text(encoding="utf-8"))["project"]) for file in files]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def core() -> Distribution:
    return distributions()[0]


@pytest.fixture(scope="session")
def house() -> list[Distribution]:
    return distributions()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`plugin` is every distribution under plugins/, `engine` each of them that brings a backend."""
    plugins = distributions()[2:]
    for name, found in (("plugin", plugins), ("engine", [plugin for plugin in plugins if plugin.has_backend])):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, found, ids=[plugin.folder.name for plugin in found])
