"""Environment variables for a while, and back again: what scripts and tests of scripts wrap around a call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Set variables inside of the block; afterwards each is what it was before.

    Args:
        variables: by name, which is written in upper case; values become text.
    """
    given = {name.upper(): str(value) for name, value in variables.items()}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """No variables at all inside of the block; afterwards those of before, whatever the block has set."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
