"""Every environment that a test or a benchmark uses is installed from a lock file that names all of it."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]

LOCKED = {
    "locks/dev.txt": [f"requirements-{name}.txt" for name in ("build", "dev", "bench", "optimizers")],
    "locks/xla.txt": ["plugins/xla/environment/torch.txt", "plugins/xla/environment/requirements.txt"],
}
"""Each lock file with the requirements that `make lock` makes it from."""


def locked(lock: str) -> list[Requirement]:
    """What a lock holds; a package stands there once for each set of versions of Python that needs its own."""
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith(("#", " "))]


def applying(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def declared(file: str) -> Iterator[Requirement]:
    """Third-party requirements of a file, those of our distributions and their extras that it names included."""
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        editable = re.fullmatch(r"-e \./([a-z/_]+)(?:\[(.+)\])?", line)
        if editable:
            project = tomllib.loads((ROOT / editable[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            extras = editable[2].split(",") if editable[2] else []
            found = [*project["dependencies"]]
            for extra in extras:
                found += project["optional-dependencies"][extra]
            yield from (each for each in map(Requirement, found) if not each.name.startswith("drivetrain"))
        elif line and not line.startswith(("#", "-c ")):
            yield Requirement(line)


@pytest.mark.parametrize("lock", LOCKED)
def test_what_is_declared_is_locked(lock):
    versions = {canonicalize_name(one.name): one for one in locked(lock) if applying(one)}
    for file in LOCKED[lock]:
        for wanted in filter(applying, declared(file)):
            one = versions.get(canonicalize_name(wanted.name))
            assert one is not None, f"{wanted} of {file} is not in {lock}: make lock"
            (pin,) = one.specifier
            assert pin.operator == "==", one
            fits = wanted.specifier.contains(pin.version, prereleases=True)
            assert fits, f"{file} asks for {wanted}, {lock} has {pin}: make lock"


def test_tools_that_build_and_check_the_distributions_are_locked():
    tools = re.findall(r'"-m", "([a-z]+)"', (ROOT / "tests/packaging/dist.py").read_text(encoding="utf-8"))
    assert {"uv", "twine"} <= set(tools)
    assert set(tools) <= {each.name for each in declared("requirements-dev.txt")}


def test_what_is_installed_is_locked():
    """Transitive requirements too: nothing came into this environment past the lock."""
    versions = {canonicalize_name(one.name): one for one in locked("locks/dev.txt") if applying(one)}
    brought_by_python = {"pip"}
    # Not all of sys.path: setuptools puts a folder there with copies of packages of its own.
    places = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for found in metadata.distributions(path=places):
        name = canonicalize_name(found.name)
        if name in brought_by_python or name.startswith("drivetrain"):
            continue
        assert name in versions, f"{name} {found.version} is not in locks/dev.txt: make lock"
        # The CPU build of torch is 2.13.0+cpu.
        version = Version(Version(found.version).public)
        assert versions[name].specifier.contains(version, prereleases=True), f"{found.version}: {versions[name]}"


def test_no_recipe_installs_past_a_lock():
    """Each `pip install` of a requirements file is constrained by that file's own first lines, or by its caller."""
    for lock, files in LOCKED.items():
        constrained = f"-c {lock}"
        if lock == "locks/xla.txt":
            assert '"-c", LOCK' in (ROOT / "plugins/xla/environment/make.py").read_text(encoding="utf-8")
            continue
        for file in files:
            assert constrained in (ROOT / file).read_text(encoding="utf-8").splitlines(), file
    known = {Path(file).name for files in LOCKED.values() for file in files}
    listed = subprocess.run(
        ["git", "ls-files", "Makefile", ".ci", "*.py", "*.sh"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    installing = re.compile(r"""pip["',\s]+install["',\s][^\n]*""")
    for file in listed.stdout.split():
        if "/src/" in file or "tests/" in file or "docs/" in file:
            continue  # sentences that tell a user what to type, and tests of them
        for command in installing.findall((ROOT / file).read_text(encoding="utf-8")):
            names = set(re.findall(r"requirements[a-z-]*\.txt", command))
            assert names <= known, f"{file}: {command}"

