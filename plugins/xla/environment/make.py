"""Makes the environment of the torch_xla tests: torch 2.9 and torch_xla 2.9, once a machine, shared by all checkouts.

    python make.py .venv-xla

What is large goes into the user's cache folder, below a name that changes with this folder's content; the virtual
environment beside the sources holds this checkout's own distributions and a path to the rest. It cannot be the one of
the other tests: torch_xla 2.9 is linked to torch 2.9, and no newer one is published.

The download is one gigabyte. With a C compiler and readelf at hand, stand-ins take the place of the three gigabytes of
CUDA libraries that torch 2.9's wheel wants loaded (see standins.py); without, pip brings those too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LOCK = ROOT / "locks" / "xla.txt"
DISTRIBUTIONS = ("core", "kit", "plugins/sharding", "plugins/ddp", "plugins/fsdp", "plugins/xla")
PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest Python that torch_xla 2.9 and this tree both work with."""


def cache_folder() -> Path:
    """Where the large part lives: named by everything that decides what is in it."""
    mark = hashlib.blake2b(digest_size=6)
    for file in (HERE / "torch.txt", HERE / "requirements.txt", HERE / "standins.py", LOCK):
        mark.update(file.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return base / "drivetrain" / f"torch-xla-2.9-{version}-{mark.hexdigest()}"


def run(*words: str | Path) -> None:
    """Run a command; it ends this program when it fails."""
    subprocess.run([str(word) for word in words], check=True)


def fill_cache(python: Path, target: Path) -> None:
    """Install the large part beside its place and move it there whole, so that a build that was cut leaves nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        place = Path(folder, "packages")
        quiet = ("--quiet", "--disable-pip-version-check")
        install = (python, "-m", "pip", "install", *quiet, "--target", place, "-c", LOCK)
        light = shutil.which("cc") is not None and shutil.which("readelf") is not None
        run(*install, *(("--no-deps",) if light else ()), "-r", HERE / "torch.txt")
        run(*install, "-r", HERE / "requirements.txt")
        if light:
            run(python, HERE / "standins.py", place / "torch")
        try:
            place.rename(target)
        except OSError:
            # Another checkout was faster; what it built is the same.
            if not target.is_dir():
                raise


def main() -> None:
    """Build what is missing."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        mine = ".".join(map(str, sys.version_info[:2]))
        sys.exit(f"torch_xla 2.9 has no build for Python {mine}: use 3.11 to 3.13")
    venv, packages = Path(sys.argv[1]), cache_folder()
    python, mark = venv / "bin" / "python", venv / ".installed"
    declared = [ROOT / each / "pyproject.toml" for each in DISTRIBUTIONS]
    content = "\n".join((str(packages), *DISTRIBUTIONS))
    known = packages.is_dir() and mark.exists() and mark.read_text(encoding="utf-8") == content
    if known and all(file.stat().st_mtime < mark.stat().st_mtime for file in declared):
        return
    if not python.exists():
        run(sys.executable, "-m", "venv", venv)
    if not packages.is_dir():
        sys.stdout.write(f"Installing torch 2.9 and torch_xla into {packages}: a gigabyte, once a machine.\n")
        sys.stdout.flush()
        fill_cache(python, packages)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "torch_xla.pth").write_text(f"{packages}\n", encoding="utf-8")
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    run(*install, "--no-build-isolation", *(word for each in DISTRIBUTIONS for word in ("-e", ROOT / each)))
    mark.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
