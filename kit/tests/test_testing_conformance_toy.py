"""The kit passes a right backend that is nothing like ours."""

from __future__ import annotations

import pytest

from drivetrain_testing.suite import *  # noqa: F403

# The same cases run for `ddp` in `make test`.
pytestmark = pytest.mark.slow


class Requirements(BaseRequirements):  # noqa: F405
    backend = "toy"
    world_sizes = (2,)
    setup = "toy_backend:register"
