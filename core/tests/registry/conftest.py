"""Toy distributions: folders that ``importlib.metadata`` takes for installed ones, seen by a fresh interpreter."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

EVENTS = {"closed", "commands", "pipeline_split", "step_ended", "trackers"}
"""Hooks of toys that an entry point has to announce."""

GOOD = """
    from drivetrain.backend import BackendInfo, Capabilities, Readiness
    from drivetrain.hookspecs import hookimpl

    @hookimpl
    def drivetrain_backends():
        return [
            BackendInfo(
                name="{name}", summary="A toy.", backend="{package}.heavy:Toy", aliases=("{name}_alias",){more}
            )
        ]
"""

HEAVY = """
    from drivetrain.backend import Backend

    class Toy(Backend):
        def start(self): raise AssertionError
        def prepare(self, model, optimizers=(), *, training=True): raise AssertionError
        def stop(self): raise AssertionError
"""


class Toys:
    """A folder of toy distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        name: str,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        plugin: str | None = None,
        more: str = "",
        heavy: str = HEAVY,
        requires: tuple[str, ...] = (),
        hooks: tuple[str, ...] | None = None,
    ) -> None:
        """Write a distribution ``toy-<name>`` with entry points to the module ``toy_<name>.plugin``.

        ``name`` is one of them, and each hook that the module implements, or ``hooks``.
        """
        distribution = distribution or f"toy-{name}"
        package = distribution.replace("-", "_")
        home = self.folder / package
        home.mkdir(parents=True)
        (home / "__init__.py").touch()
        source = dedent(GOOD).format(name=name, package=package, more=more) if plugin is None else dedent(plugin)
        (home / "plugin.py").write_text(source)
        (home / "heavy.py").write_text(dedent(heavy))
        info = self.folder / f"{package}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        if hooks is None:
            hooks = tuple(set(re.findall(r"def drivetrain_(\w+)", source)) & EVENTS)
        announced = "".join(f"{event} = {package}.plugin\n" for event in hooks)
        (info / "entry_points.txt").write_text(
            f"[drivetrain]\n{name} = {package}.plugin\n[drivetrain.hooks]\n{announced}"
        )

    def remove(self, distribution: str) -> None:
        """Uninstall a distribution, as `pip uninstall` does."""
        package = distribution.replace("-", "_")
        for each in [self.folder / package, *self.folder.glob(f"{package}-*.dist-info")]:
            shutil.rmtree(each)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments where the toys are installed."""
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH", "")]))
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def ask(self, code: str) -> object:
        """Run a few lines that leave their answer in ``answer``; errors come back as ``[class, sentence]``."""
        done = self.run("-c", _FRAME.format(code=repr(dedent(code))))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


_FRAME = """
import json
from drivetrain.errors import DrivetrainError
from drivetrain.registry import get_registry
names = {{"registry": get_registry()}}
try:
    exec({code}, names)
    answer = names["answer"]
except DrivetrainError as error:
    answer = [type(error).__name__, str(error)]
print(json.dumps(answer, default=str))
"""


@pytest.fixture
def toys(tmp_path: Path) -> Toys:
    """An empty folder of toy distributions, beside whatever is really installed."""
    return Toys(tmp_path / "site")
