"""Where a configuration value came from, and where in a file a mistake sits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["default", "file", "environment", "flag"]

PRECEDENCE: tuple[Kind, ...] = ("default", "file", "environment", "flag")
"""Who speaks louder, quietest first."""


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Source of one value.

    Args:
        kind: which layer of :data:`PRECEDENCE`.
        source: the file's name, the environment variable or the flag; empty for a default.
        line: line in the file, from 1; 0 when the source has no lines.
        column: column in that line, from 1; 0 when the source has no lines.
    """

    kind: Kind
    source: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        """``default``, ``train.yaml:3:18``, ``environment variable DRIVETRAIN_DEBUG`` or ``flag --debug``."""
        if self.kind == "default":
            return "default"
        if self.kind == "file":
            return f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        return f"environment variable {self.source}" if self.kind == "environment" else f"flag {self.source}"

    def at_least(self, kind: Kind) -> bool:
        """Whether this origin speaks as loud as ``kind`` or louder."""
        return PRECEDENCE.index(self.kind) >= PRECEDENCE.index(kind)


DEFAULT = Origin("default")
