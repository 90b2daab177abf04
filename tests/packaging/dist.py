"""Builds a wheel and an sdist of every distribution of this repository, and checks what is in them.

    make dist

writes them to `runs/dist`. The wheels are made from the sdists, so that a file which an sdist lacks is noticed. Nothing
is published.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "core", ROOT / "kit", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")))


def build(target: Path, folders: tuple[Path, ...] = FOLDERS) -> None:
    """Build each folder's sdist, and its wheel from that, with the build backend of this environment."""
    for number, folder in enumerate(folders, 1):
        begun = time.monotonic()
        options = ["--quiet", "--offline", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(target)]
        command = [sys.executable, "-m", "uv", "build", *options, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{folder.relative_to(ROOT)} cannot be built:\n{done.stdout}{done.stderr}")
        say(f"{number} of {len(folders)}: {folder.relative_to(ROOT)}, {time.monotonic() - begun:.1f} s")


def problems(target: Path) -> Iterator[str]:
    """What is wrong with the files of a folder: each problem as a sentence."""
    projects = {project["name"]: project for project in map(project_of, FOLDERS)}
    wheels = {canonicalize_name(parse_wheel_filename(path.name)[0]): path for path in target.glob("*.whl")}
    sdists = {canonicalize_name(parse_sdist_filename(path.name)[0]): path for path in target.glob("*.tar.gz")}
    versions = {name: project["version"] for name, project in projects.items()}
    for kind, found in (("wheel", wheels), ("sdist", sdists)):
        yield from (f"{name} has no {kind}" for name in projects if name not in found)
        yield from (f"{found[name].name} is of no distribution of ours" for name in found if name not in projects)
    for name in projects.keys() & wheels.keys():
        with zipfile.ZipFile(wheels[name]) as file:
            contents = {each: file.read(each) for each in file.namelist() if not each.endswith("/")}
        yield from (f"{wheels[name].name}: {each}" for each in of_wheel(contents, projects[name], versions))
    for name in projects.keys() & sdists.keys():
        with tarfile.open(sdists[name]) as archive:
            names = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
        yield from (f"{sdists[name].name}: {each}" for each in of_sdist(names, projects[name]))
    yield from of_twine(sorted(target.glob("*.whl")) + sorted(target.glob("*.tar.gz")))


def of_wheel(contents: dict[str, bytes], project: dict[str, Any], versions: dict[str, str]) -> Iterator[str]:
    """What is wrong with a wheel.

    Args:
        contents: its files, by name.
        project: the table `[project]` that it was built from.
        versions: of all our distributions, by name.
    """
    package = project["name"].replace("-", "_")
    info = f"{package}-{project['version']}.dist-info"
    tops = {name.partition("/")[0] for name in contents}
    if tops != {package, info}:
        yield f"holds {', '.join(sorted(tops))}, not {package} and {info} alone"
    needed = (f"{package}/py.typed", f"{info}/licenses/LICENSE")
    yield from (f"has no {name}" for name in needed if name not in contents)
    if unwanted := sorted(name for name in contents if re.search(r"(^|/)(tests|__pycache__)/|\.pyc$", name)):
        yield f"holds {unwanted[0]}"
    if f"{info}/METADATA" not in contents:
        yield "has no METADATA"
        return
    # Raises where a field is not valid by the standard.
    metadata = Metadata.from_email(contents[f"{info}/METADATA"])
    said = {
        "name": metadata.name,
        "version": str(metadata.version),
        "license": metadata.license_expression,
        "requires-python": str(metadata.requires_python),
        "description": metadata.summary,
    }
    yield from (f"says {key} {said[key]!r}, not {project[key]!r}" for key in said if said[key] != project[key])
    if not (metadata.description or "").strip():
        yield "has no long description"
    yield from of_bounds(metadata.requires_dist or [], versions)
    points = contents.get(f"{info}/entry_points.txt", b"").decode()
    groups = {*project.get("entry-points", {}), *(["console_scripts"] if project.get("scripts") else [])}
    yield from (f"has no entry points of the group {group}" for group in groups if f"[{group}]" not in points)


def of_bounds(requirements: list[Requirement], versions: dict[str, str]) -> Iterator[str]:
    """What is wrong with what a distribution asks for of ours: it admits today's, and not the next contract's."""
    for each in requirements:
        name = canonicalize_name(each.name)
        if not name.startswith("drivetrain") or (name == "drivetrain" and each.extras):
            continue  # An extra of the core that names others has their bounds.
        if name not in versions:
            yield f"asks for {each}, which is none of ours"
        elif not each.specifier.contains(versions[name]):
            yield f"asks for {each}, and {name} is {versions[name]}"
        elif each.specifier.contains("0.99") or each.specifier.contains("1.0"):
            yield f"asks for {each}, without an upper bound"


def of_sdist(names: set[str], project: dict[str, Any]) -> Iterator[str]:
    """What is wrong with an sdist, by the names of its files."""
    package = project["name"].replace("-", "_")
    needed = ("pyproject.toml", "README.md", "LICENSE", "PKG-INFO", f"src/{package}/py.typed")
    yield from (f"has no {name}" for name in needed if name not in names)
    if not any(name.startswith("tests/") for name in names):
        yield "has no tests"
    # Its tests need an environment of their own, and so does who runs them from the sdist.
    folders = {"src", "tests", *(["environment"] if package == "drivetrain_xla" else [])}
    strangers = sorted(name for name in names if "/" in name and name.partition("/")[0] not in folders)
    yield from (f"holds {name}" for name in strangers[:3])


def of_twine(files: list[Path]) -> Iterator[str]:
    """What an index would refuse, by the checks of twine, which sends files there: markup that cannot be shown."""
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield f"twine check: {done.stdout}{done.stderr}".strip()


def project_of(folder: Path) -> dict[str, Any]:
    """The table `[project]` of a folder."""
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def say(text: str) -> None:
    """Print a line now."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Build, check, and say where the files are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=ROOT / "runs/dist")
    target = parser.parse_args().target.absolute()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    build(target)
    found = sorted(problems(target))
    clean = "metadata, licences, typed markers, bounds and contents are as they should be; twine finds no fault"
    say("\n".join(found) if found else clean)
    say(f"{len([path for path in target.iterdir() if path.suffix in {'.whl', '.gz'}])} files in {target}")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
