"""The conformance kit: standard tests for backends, and tools to write further ones.

``spawn`` runs a function as the ranks of a real gloo job; ``drivetrain_testing.suite`` holds the standard cases that a
plugin's own tests import; ``drivetrain_testing.plugin`` is a pytest plugin (fixtures, the ``gpu`` marker).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.lazy import on_first_use

if TYPE_CHECKING:
    from drivetrain_testing.processes import RankFailedError, RankTimeoutError, preload, spawn

__getattr__ = on_first_use(
    __name__, {"drivetrain_testing.processes": ("RankFailedError", "RankTimeoutError", "preload", "spawn")}
)

__all__ = ["RankFailedError", "RankTimeoutError", "preload", "spawn"]
