"""Scripts are imported by their path, as other people's are: no package, no name on the import path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from drivetrain.testing import spawn

FOLDER = Path(__file__).parent


def load(name):
    module = sys.modules.get(f"script_{name}")
    if module is None:
        spec = importlib.util.spec_from_file_location(f"script_{name}", FOLDER / f"{name}.py")
        module = sys.modules[f"script_{name}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path):
    """``run(script, world, *arguments)``: what each rank's ``main`` returned; ``backend=`` and its section as asked."""

    def start(name, world, *arguments, backend=None, folder="out", **section):
        module = load(name)
        arguments = [str(each) for each in arguments]
        if name in FOLDERS:
            arguments += [FOLDERS[name], str(tmp_path / folder)]
        env = {"DRIVETRAIN_DISTRIBUTED_TYPE": backend} if backend else {}
        env |= {f"DRIVETRAIN_{backend}__{key}".upper(): str(value) for key, value in section.items()}
        return spawn(module.main, world, module.parse_args(arguments), env=env, timeout=50)

    return start


# The option by which a script is told where to write.
FOLDERS = {
    "text_classification": "--output_dir",
    "diffusion": "--output_dir",
    "reinforce": "--output_dir",
    "handlers": "--output_dir",
}
