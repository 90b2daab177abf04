"""Every test of every distribution runs under the hygiene plugin of the conformance kit."""

from __future__ import annotations

pytest_plugins = ["drivetrain.testing.plugin"]
