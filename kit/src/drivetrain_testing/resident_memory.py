"""Measures how far a piece of a test raises the memory of its process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self


class ResidentMemory:
    """Watches this process's anonymous resident memory from a thread, inside a ``with``.

    Attributes:
        grown: bytes that it had more than at the beginning, at its highest; set at the end.
    """

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._first = self._highest = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.grown = max(self._highest, self._now()) - self._first

    def _watch(self) -> None:
        while not self._stop.wait(0.0005):
            self._highest = max(self._highest, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the system does not say")
