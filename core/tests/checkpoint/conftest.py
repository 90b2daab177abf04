from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_NAME = "checkpoint_jobs"


@pytest.fixture(scope="session")
def jobs():
    """The module beside this one, found by path: test folders are not packages."""
    spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name(f"{_NAME}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module
