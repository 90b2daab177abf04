"""Runs chosen tests again and again while every core is busy: ``python tests/repeat.py 20 core/tests/launch``.

What waits, uses ports or starts processes can pass a hundred times on a quiet machine and fail on a busy one. The load
is one busy process for each core, at the priority of the tests. Every argument after the count is pytest's.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def spin() -> None:
    """Keep one core busy until the process is ended, or its parent is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(10_000))


def main() -> int:
    """Run pytest under load; its exit code."""
    count, *arguments = sys.argv[1:]
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in busy:
        process.start()
    repeated = ["--count", str(int(count)), "--repeat-scope", "session"]
    command = [sys.executable, "-m", "pytest", "-q", *repeated, *arguments]
    try:
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    finally:
        for process in busy:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
