"""``make bench``: measure side by side with the bare engine and with peers, in an environment of their own.

``--here`` measures in the interpreter that runs this file, with those peers that it has. Other options: ``--help``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-bench"
DECLARED = [
    ROOT / name
    for name in (
        "locks/dev.txt",
        "requirements-build.txt",
        "requirements-bench.txt",
        "core/pyproject.toml",
        "kit/pyproject.toml",
        "plugins/ddp/pyproject.toml",
        "plugins/deepspeed/pyproject.toml",
        "plugins/fsdp/pyproject.toml",
        "plugins/megatron/pyproject.toml",
        "plugins/planner/pyproject.toml",
        "plugins/sharding/pyproject.toml",
    )
]


def environment() -> Path:
    """The interpreter of ``.venv-bench``, made or brought up to date when what it is made from has changed."""
    stamp = ENVIRONMENT / ".installed"
    declared = hashlib.sha256(b"".join(path.read_bytes() for path in DECLARED)).hexdigest()
    python = ENVIRONMENT / "bin" / "python"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == declared:
        return python
    print("Installing the peers into .venv-bench: about a minute the first time.", flush=True)
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-r", "requirements-build.txt"], cwd=ROOT, check=True)
    subprocess.run([*install, "--no-build-isolation", "-r", "requirements-bench.txt"], cwd=ROOT, check=True)
    stamp.write_text(declared, encoding="utf-8")
    return python


def main(arguments: list[str]) -> int:
    """Run ``benchmarks.measure`` with these arguments; its exit code."""
    # Help needs no peers.
    here = not {"--here", "-h", "--help"}.isdisjoint(arguments)
    python = sys.executable if here else str(environment())
    # One thread, as every rank has: what is measured is Python, and two ranks share two cores.
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    passed = [argument for argument in arguments if argument != "--here"]
    command = [python, "-m", "benchmarks.measure", *passed]
    # Paths in the arguments are the caller's, so its folder stays; the package is found by the search path.
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, env=settings, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
