from __future__ import annotations

import pytest

from drivetrain import logging as ours
from drivetrain import tracking


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """Each test is rank 0 of 1, and leaves neither a rank nor a tracker class behind."""
    for name in ("RANK", "WORLD_SIZE", "DRIVETRAIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tracking, "_registered", {})
    monkeypatch.setattr(ours, "_process", ours._Process())
    monkeypatch.setattr(tracking._logger, "_warned", set())
