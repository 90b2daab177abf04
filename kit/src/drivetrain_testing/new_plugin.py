"""The command ``drivetrain new-plugin``: writes a package that brings a backend and passes the conformance kit."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import click

from drivetrain.api import hookimpl
from drivetrain.errors import UsageError
from drivetrain.wording import sentences

FILES = {
    ".gitignore": "gitignore",
    "README.md": "README.md",
    "conftest.py": "conftest.py",
    "pyproject.toml": "pyproject.toml",
    "src/{package}/__init__.py": "package.py",
    "src/{package}/backend.py": "backend.py",
    "src/{package}/config.py": "config.py",
    "src/{package}/plugin.py": "plugin.py",
    "src/{package}/py.typed": "py.typed",
    "tests/test_{name}_conformance.py": "test_conformance.py",
}
"""Files to write, by path in the new folder: the file in ``plugin_template``, without its suffix ``.txt``."""

REPLICATED = FILES | {
    "README.md": "README_replicated.md",
    "src/{package}/backend.py": "backend_replicated.py",
    "src/{package}/plugin.py": "plugin_replicated.py",
    "tests/test_{name}_conformance.py": "test_conformance_replicated.py",
}
"""Like :data:`FILES`, for a backend that keeps a replica in every process."""


@hookimpl
def drivetrain_commands(group: click.Group) -> None:
    """Add ``drivetrain new-plugin``."""
    group.add_command(new_plugin)


@click.command("new-plugin")
@click.argument("name")
@click.option("--folder", metavar="FOLDER", help="Where to write; drivetrain-NAME when it is not given.")
@click.option("--replicated", is_flag=True, help="Keep a replica in every process and average gradients.")
def new_plugin(name: str, folder: str | None, *, replicated: bool) -> None:
    """Write a package that brings the backend NAME, to be filled with an engine.

    It installs, is found by `drivetrain backends` and passes the conformance kit: as a copy of `single`, or with
    --replicated on several processes, which average gradients.
    """
    check_name(name)
    words = words_of(name)
    target = Path(folder or words["distribution"])
    write(target, words, REPLICATED if replicated else FILES)
    click.echo(f"Wrote {target}, {len(FILES)} files. Its README.md tells the next step; to begin:")
    click.echo(f'    cd {target}\n    pip install --editable ".[test,lint]"\n    pytest')


def check_name(name: str) -> None:
    """See that a backend may be called so.

    Raises:
        UsageError: no lower-case identifier, a word that YAML or the configuration reads otherwise, or somebody's name.
    """
    import yaml

    from drivetrain.config.keys import CORE_KEYS, may_be_foreign

    owner = _owner(name)
    if owner is not None:
        raise UsageError(f"the backend name {name!r} is taken", whose=owner, cure="Choose another name.")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.startswith("drivetrain"):
        plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).removeprefix("drivetrain").strip("_")
        guess = f"Try: drivetrain new-plugin {plain}" if re.match("[a-z]", plain) else ""
        raise UsageError(
            f"{name!r} cannot be a backend's name",
            cure=sentences(
                "It is lower-case letters, digits and _, begins with a letter, and not with drivetrain.", guess
            ),
        )
    if name in CORE_KEYS or may_be_foreign(name):
        raise UsageError(
            f"{name!r} is a key of the configuration file, and a backend's section is named after the backend",
            cure="Choose another name.",
        )
    if yaml.safe_load(name) != name:
        raise UsageError(f"YAML reads {name} as {yaml.safe_load(name)!r}, not as a name", cure="Choose another name.")


def _owner(name: str) -> str | None:
    """Return the distribution of a backend of this name or alias, installed or not; ``None`` if unknown."""
    from drivetrain.registry import get_registry, known_extras

    for report in get_registry().reports():
        if name.lower() in {report.name.lower(), *(alias.lower() for alias in report.aliases)}:
            return f"{report.distribution} {report.version}".strip()
    return f"drivetrain-{name.lower()}" if name.lower() in known_extras() else None


def words_of(name: str) -> dict[str, str]:
    """Return the replacement of each mark of the template."""
    from drivetrain import __version__

    major, minor = __version__.split(".")[:2]
    return {
        "name": name,
        "NAME": name.upper(),
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "package": f"drivetrain_{name}",
        "distribution": f"drivetrain-{name.replace('_', '-')}",
        "core": f">={major}.{minor},<{major}.{int(minor) + 1}",
    }


def write(target: Path, words: dict[str, str], files: dict[str, str]) -> None:
    """Write the files of the template, each mark replaced by its word.

    Raises:
        UsageError: something is there already, or the folder cannot be written to.
    """
    template = resources.files("drivetrain_testing") / "plugin_template"
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(
                f"{target} exists already, nothing was written", cure="Remove it, or write elsewhere: --folder FOLDER."
            )
        for path, source in files.items():
            text = (template / f"{source}.txt").read_text(encoding="utf-8")
            for mark, word in words.items():
                text = text.replace("{{" + mark + "}}", word)
            file = target / path.format_map(words)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8") as new:
                new.write(text)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror}", whose=str(error.filename), cure="Choose another --folder."
        ) from error
