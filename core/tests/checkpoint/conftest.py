from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def _module(name):
    """A module beside this one, found by path: test folders are not packages."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def jobs():
    """``checkpoint_jobs.py``."""
    return _module("checkpoint_jobs")


@pytest.fixture(scope="session")
def background():
    """``background_jobs.py``."""
    return _module("background_jobs")


@pytest.fixture(scope="session")
def killing(jobs):
    """``kill_jobs.py``."""
    return _module("kill_jobs")
