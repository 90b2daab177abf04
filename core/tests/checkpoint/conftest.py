from __future__ import annotations

import background_jobs
import checkpoint_jobs
import kill_jobs
import pytest


@pytest.fixture(scope="session")
def jobs():
    """``checkpoint_jobs.py``."""
    return checkpoint_jobs


@pytest.fixture(scope="session")
def background():
    """``background_jobs.py``."""
    return background_jobs


@pytest.fixture(scope="session")
def killing():
    """``kill_jobs.py``."""
    return kill_jobs
