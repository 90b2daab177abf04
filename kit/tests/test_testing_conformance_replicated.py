"""The kit passes a backend that derives from :class:`drivetrain.api.ReplicatedBackend` and only averages."""

from __future__ import annotations

import pytest

from drivetrain_testing.suite import *  # noqa: F403

pytestmark = pytest.mark.slow


class Requirements(BaseRequirements):  # noqa: F405
    backend = "averaging"
    world_sizes = (1, 2)
    setup = "replicated_backend:register"
    shared_ranks = True
