"""Scripts are imported by their path, as other people's are: no package, no name on the import path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from drivetrain.distributed import watchdog
from drivetrain_testing import spawn

FOLDER = Path(__file__).parent


def load(name):
    module = sys.modules.get(f"script_{name}")
    if module is None:
        spec = importlib.util.spec_from_file_location(f"script_{name}", FOLDER / f"{name}.py")
        module = sys.modules[f"script_{name}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def impatient(name, arguments, seconds):
    """A script's ``main``, on ranks that wait for each other only so long."""
    watchdog.PATIENCE_SECONDS = watchdog.LATER_PATIENCE_SECONDS = seconds
    if importlib.util.find_spec("drivetrain_megatron") is not None:
        from drivetrain_megatron import meeting

        meeting.PATIENCE_SECONDS = seconds
    return load(name).main(arguments)


@pytest.fixture
def run(tmp_path):
    """``run(script, world, *arguments)``: what each rank's ``main`` returned; ``backend=`` and its section as asked.

    ``patience=`` is how many seconds ranks wait for each other where they need not all come; ``dataloader=`` are keys
    of that section of the configuration.
    """

    def start(name, world, *arguments, backend=None, folder="out", patience=None, dataloader=None, **section):
        module = load(name)
        arguments = [str(each) for each in arguments]
        if name in FOLDERS:
            arguments += [FOLDERS[name], str(tmp_path / folder)]
        env = {"DRIVETRAIN_DISTRIBUTED_TYPE": backend} if backend else {}
        env |= {f"DRIVETRAIN_{backend}__{key}".upper(): str(value) for key, value in section.items()}
        env |= {f"DRIVETRAIN_DATALOADER__{key}".upper(): str(value) for key, value in (dataloader or {}).items()}
        asked = module.parse_args(arguments)
        job = (module.main, world, asked) if patience is None else (impatient, world, name, asked, patience)
        return spawn(*job, env=env, timeout=60)

    return start


# The option by which a script is told where to write.
FOLDERS = {
    "text_classification": "--output_dir",
    "diffusion": "--output_dir",
    "reinforce": "--output_dir",
    "handlers": "--output_dir",
}
