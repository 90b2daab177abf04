from __future__ import annotations

import foreign_makers
import pytest


@pytest.fixture(scope="session")
def makers():
    """``foreign_makers.py``."""
    return foreign_makers
