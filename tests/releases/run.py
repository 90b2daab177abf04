"""Runs the quick tests against the oldest and the newest releases that the distributions admit.

    python tests/releases/run.py oldest
    python tests/releases/run.py newest --record
    python tests/releases/run.py oldest --failed --record

Each world has an environment of its own, ``.venv-oldest`` and ``.venv-newest``, made anew when what the distributions
ask for has changed, and the newest also on another day. ``--record`` writes what was installed and how the tests ended
to ``outcomes.json``, from which ``make docs`` makes the table of docs/reference/releases.md. ``--failed`` runs again
what failed in the last run of that world, and records what passes now. Other words are pytest's.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests/releases/tools.txt"
HELD = ROOT / "tests/releases/held.txt"
OUTCOMES = ROOT / "tests/releases/outcomes.json"

EXTRAS = {
    "plugins/megatron": "[core,plot]",
    "plugins/planner": "[plot]",
    "plugins/trackers": "[mlflow,plot,tensorboard,trackio,wandb]",
}
"""Extras with libraries of others. Those of drivetrain-xla need an environment of their own (``make test-xla``)."""

FOLDERS = ("core/tests", "kit/tests", "plugins/*/tests", "tests/accelerate", "tests/parity", "tests/scripts")
"""Tests in which other libraries work; the rest of tests/ is about this tree and its documents."""

LEFT_OUT = ("plugins/xla/tests",)
"""Tests of torch_xla, which is linked to one torch."""

SHOWN = ("torch", "numpy", "pydantic", "transformers", "accelerate", "deepspeed", "megatron-core", "peft", "pytest")
"""Libraries whose versions the summary of a run names."""

BUILDING = ("hatchling>=1.26", "editables", "setuptools>=77")
"""What builds the editable distributions, and DeepSpeed, which comes as source."""


def distributions() -> list[str]:
    """Folders of all distributions of this tree."""
    plugins = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("plugins/*/pyproject.toml"))
    return ["core", "kit", *plugins]


def editable() -> str:
    """All distributions, with the extras that are tested, as lines of a requirements file."""
    return "".join(f"-e ./{each}{EXTRAS.get(each, '')}\n" for each in distributions())


def run(*words: str | Path, text: str | None = None) -> str:
    """Run a command in the root; it ends this program when it fails."""
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=ROOT, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout


class World:
    """An environment with the oldest or the newest releases.

    Args:
        name: ``oldest`` or ``newest``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = ROOT / f".venv-{name}"
        self.python = self.folder / "bin/python"
        self.mark = self.folder / ".installed"
        self.junit = self.folder / "junit.xml"

    def declared(self) -> str:
        """Names what the environment is made of."""
        found = hashlib.blake2b(editable().encode(), digest_size=8)
        for file in (*(ROOT / each / "pyproject.toml" for each in distributions()), TOOLS, HELD):
            project = file.read_bytes()
            if file.suffix == ".toml":
                project = json.dumps(tomllib.loads(project.decode())["project"], sort_keys=True).encode()
            found.update(project)
        day = today() if self.name == "newest" else "-"
        return f"{found.hexdigest()} {day}"

    def make(self, *, keep: bool) -> None:
        """Install the environment unless it is as declared.

        Args:
            keep: take an environment of another day.
        """
        wanted = self.declared()
        found = self.mark.read_text(encoding="utf-8") if self.mark.exists() else ""
        if found == wanted or (keep and found.partition(" ")[0] == wanted.partition(" ")[0]):
            return
        self.mark.unlink(missing_ok=True)
        print(f"Installing the {self.name} releases into {self.folder.name}: some minutes.", flush=True)
        run(sys.executable, "-m", "venv", "--clear", self.folder)
        run(self.python, "-m", "pip", "install", "--quiet", "uv")
        lines = self.lowest() if self.name == "oldest" else TOOLS.read_text(encoding="utf-8")
        torch = next((line for line in lines.splitlines() if line.startswith("torch==")), "torch")
        # pip finds a build of torch that the machine offers; uv reads none of pip's settings, and keeps what is there.
        run(self.python, "-m", "pip", "install", "--quiet", "--no-compile", torch)
        uv = (self.python, "-m", "uv", "pip", "install", "--quiet", "--python", self.python)
        run(*uv, *BUILDING)
        run(*uv, "--no-build-isolation", "-r", "-", text=lines + editable())
        self.mark.write_text(wanted, encoding="utf-8")

    def lowest(self) -> str:
        """Resolve what the distributions ask for to its lowest, and what tests need beside it to its newest.

        Returns:
            one version of each package, as lines of a requirements file.
        """
        resolve = (self.python, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header")
        resolve += ("--python", self.python, "--constraints", HELD, "-")
        found = run(*resolve, "--resolution", "lowest-direct", text=editable())
        pins = "".join(f"{line}\n" for line in found.splitlines() if not line.startswith("-e"))
        found = run(*resolve, text=TOOLS.read_text(encoding="utf-8") + pins)
        return "".join(f"{line}\n" for line in found.splitlines())

    def test(self, words: list[str], *, failed: bool) -> int:
        """Run the quick tests.

        Args:
            words: pytest's arguments; with a path among them, these tests instead of all.
            failed: run only what failed in the last run.

        Returns:
            pytest's exit status.
        """
        cores = min((os.cpu_count() or 1) + 1, 8)
        folders = [path.relative_to(ROOT).as_posix() for each in FOLDERS for path in sorted(ROOT.glob(each))]
        chosen = [word for word in words if (ROOT / word.partition("::")[0]).exists() and not word.startswith("-")]
        paths = [] if chosen else [each for each in folders if each not in LEFT_OUT]
        command = [self.python, "-m", "pytest", "-q", "-o", "console_output_style=classic", "-p", "suite_progress"]
        command += ["-p", "suite_second_run", "--numprocesses", str(cores), "--dist", "loadfile"]
        command += ["-o", f"cache_dir={ROOT}/.pytest_cache/{self.name}", f"--junitxml={self.junit}", "-m", "not slow"]
        command += ["--last-failed", "--last-failed-no-failures", "none"] if failed else []
        # Before 8.4 pytest imports what `-p` names before it reads `pythonpath` of pyproject.toml.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests/plugins")}
        return subprocess.run([*map(str, command), *paths, *words], cwd=ROOT, env=environment, check=False).returncode

    def versions(self) -> dict[str, str]:
        """Name and version of all that is installed and not ours."""
        found = json.loads(run(self.python, "-m", "pip", "list", "--format", "json"))
        return {normal(each["name"]): each["version"] for each in found if not each["name"].startswith("drivetrain")}


def today() -> str:
    """The date, as records have it."""
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


def normal(name: str) -> str:
    """A package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def ended(junit: Path) -> dict[str, list[str]]:
    """Names of tests by how they ended (passed, skipped, failed), from pytest's report."""
    found: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for case in ET.parse(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[kind].append(f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}")
    # A test that passes and whose teardown fails stands there twice.
    found["passed"] = [each for each in found["passed"] if each not in set(found["failed"])]
    return found


def write(records: dict[str, Any]) -> None:
    """Write the records of both worlds."""
    ordered = {name: records[name] for name in ("oldest", "newest") if name in records}
    OUTCOMES.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    print(f"recorded in {OUTCOMES.relative_to(ROOT)}; now: make docs")


def recorded(
    before: dict[str, Any], run_now: dict[str, list[str]] | None, versions: dict[str, str], *, failed: bool
) -> dict[str, Any]:
    """The record of a world after a run.

    Args:
        before: its record of the last complete run.
        run_now: names of tests by how they ended; ``None`` where none ran.
        versions: what was installed.
        failed: whether only what had failed was run again.
    """
    counts: dict[str, Any] = {"passed": None, "skipped": None}
    left, later = [], []
    if run_now is None:
        pass
    elif not failed:
        counts = {kind: len(run_now[kind]) for kind in ("passed", "skipped")}
        left = run_now["failed"]
    else:
        counts = {kind: before[kind] for kind in ("passed", "skipped")}
        cured = set(run_now["passed"])
        left = [each for each in before["failed"] if each not in cured]
        later = [*before["passed_when_run_again"], *(each for each in before["failed"] if each in cured)]
    python = ".".join(map(str, sys.version_info[:2]))
    return {
        "date": today(),
        "python": python,
        **counts,
        "failed": sorted(left),
        "passed_when_run_again": sorted(later),
        "versions": versions,
    }


def main() -> None:
    """Make the environment, run the tests, say how they ended, and record it if that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("world", choices=("oldest", "newest"))
    parser.add_argument("--record", action="store_true", help="write how a run of all tests ended to outcomes.json")
    parser.add_argument("--failed", action="store_true", help="run again what failed in the last run of this world")
    parser.add_argument("--install", action="store_true", help="make the environment and run nothing")
    given, words = parser.parse_known_args()
    if given.record and words:
        parser.error(f"--record takes a run of all tests, or of those that failed (--failed): leave out {words}")
    world = World(given.world)
    world.make(keep=given.failed)
    records = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}
    versions = world.versions()
    if given.install:
        if given.record:
            # What ran with other releases says nothing of these.
            same = records.get(given.world, {}).get("versions") == versions
            write(records if same else records | {given.world: recorded({}, None, versions, failed=False)})
        return
    status = world.test(words, failed=given.failed)
    found = ended(world.junit)
    say = ", ".join(f"{len(names)} {kind}" for kind, names in found.items())
    told = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    print(f"{given.world}: {say}; with {told}")
    if given.record and status not in {0, 1}:
        sys.exit(f"nothing is recorded: pytest ended with {status} before all tests had run")
    if given.record:
        before = records.get(given.world, {})
        if given.failed and before.get("passed") is None:
            sys.exit("--failed --record adds to the record of a complete run, and there is none")
        write(records | {given.world: recorded(before, found, versions, failed=given.failed)})
    sys.exit(status)


if __name__ == "__main__":
    main()
