"""Public names for backends that Accelerate has too: rules for its configuration files, and its placeholders.

The rules import no torch; a placeholder is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.config.accelerate_rules import Rule, flag, number, section_from_arguments, whole
from drivetrain.lazy import on_first_use

if TYPE_CHECKING:
    from drivetrain.loop.placeholders import DummyOptim, DummyScheduler

__getattr__ = on_first_use(__name__, {"drivetrain.loop.placeholders": ("DummyOptim", "DummyScheduler")})

__all__ = ["DummyOptim", "DummyScheduler", "Rule", "flag", "number", "section_from_arguments", "whole"]
