"""A program that is started without Python in front, and is not there."""

from __future__ import annotations

import pytest

from drivetrain.config import load_config
from drivetrain.errors import UsageError
from drivetrain.launch.script import launch


@pytest.mark.parametrize("name", ["no-such-program", "./no-such-program"])
def test_a_program_that_is_not_there_is_a_mistake_of_the_users(name):
    with pytest.raises(UsageError, match=f"there is no program '{name}'"):
        launch(load_config(overrides={"num_processes": "2", "use_cpu": "true"}, environ={}), [name], no_python=True)
