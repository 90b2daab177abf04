"""What workers write, on its way: read from pipes, shown with the rank in front, filed, the end of it remembered."""

from __future__ import annotations

import os
import re
import selectors
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

_CHUNK = 1 << 16
_LAST = 1 << 20
"""Bytes that are still read from one stream after all workers have ended: what a pipe holds, many times over."""

_LONGEST = 1 << 14
"""Bytes of a line; a longer one is cut, so that a worker that writes no line ends cannot fill the launcher's memory."""

TAIL = 30
"""Lines remembered of a stream that nobody sees: a traceback, or what a C++ library says before it aborts."""

_WARNING = re.compile(r"^.+:\d+: \w*Warning: ")
"""First line of what Python's ``warnings`` writes; the line of source code below it is indented."""


@dataclass
class Seen:
    """Warnings that a rank has shown already, each with that rank."""

    by_line: dict[str, int] = field(default_factory=dict)

    def is_news(self, rank: int, line: str) -> bool:
        """Whether no other rank has shown this line. A rank may repeat itself: its script decides about that."""
        return self.by_line.setdefault(line, rank) == rank


class Stream:
    """One stream of one rank.

    Args:
        rank: global rank.
        prefix: stands in front of each line that is shown.
        terminal: where lines are shown; ``None`` = nowhere.
        file: where every byte is written; ``None`` = nowhere.
        seen: warnings shown so far; ``None`` where warnings are not expected.
    """

    def __init__(self, rank: int, prefix: str, terminal: TextIO | None, file: Path | None, seen: Seen | None) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._rank, self._prefix, self._terminal, self._seen = rank, prefix, terminal, seen
        self._file = None if file is None else file.open("ab", buffering=0)
        self._path = file
        self._rest = b""
        self._skips_source = False

    def feed(self, data: bytes) -> None:
        """Take what was read; complete lines are shown, the rest waits for its end."""
        self._write(data)
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > _LONGEST:
            rest = rest.rpartition(b"\r")[2][-_LONGEST:]  # a progress bar draws over what it wrote before
        self._rest = rest
        for line in lines:
            self._line(line)

    def finish(self) -> None:
        """The stream has ended."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        if self._file is not None:
            self._file.close()

    def _line(self, raw: bytes) -> None:
        # What a terminal would show in the end of a line that was drawn over.
        line = raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self.tail.append(line)
        if self._terminal is None or self._is_old(line):
            return
        try:
            self._terminal.write(f"{self._prefix}{line}\n")
            self._terminal.flush()
        except BrokenPipeError:
            self._terminal = None  # who read it, `head` for instance, has seen enough; the run goes on

    def _is_old(self, line: str) -> bool:
        """Whether this line belongs to a warning that another rank has shown."""
        if self._skips_source and line.startswith("  "):
            self._skips_source = False
            return True
        news = self._seen is None or not _WARNING.match(line) or self._seen.is_news(self._rank, line)
        self._skips_source = not news
        return not news

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:  # a full disk is no reason to end the run, but one to say so
            sys.stderr.write(f"warning: no more is written to {self._path}: {error}\n")
            self._file.close()
            self._file = None


class Pump:
    """A thread that reads the named pipes into which workers write, until all of them are closed.

    The file system's pipes are used, since torch's agent opens the streams of its workers by path.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._stop = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="drivetrain-output", daemon=True)
        self._thread.start()

    def connect(self, path: Path, stream: Stream) -> None:
        """Make a named pipe and hand what comes out of it to a stream."""
        os.mkfifo(path)
        # Without waiting for who writes; and a writer that opens it now finds its reader.
        self._selector.register(os.open(path, os.O_RDONLY | os.O_NONBLOCK), selectors.EVENT_READ, stream)

    def close(self) -> None:
        """Read what is still there, then stop. What lives longer than the workers is not waited for."""
        os.close(self._stop)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._drain(key.fd, key.data)
        self._selector.close()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                if not self._read(key.fd, key.data):
                    self._end(key.fd, key.data)

    def _read(self, fd: int, stream: Stream) -> int:
        """Read once; 0 when nobody writes any more."""
        data = os.read(fd, _CHUNK)
        stream.feed(data)
        return len(data)

    def _drain(self, fd: int, stream: Stream) -> None:
        left = _LAST
        try:
            while left > 0 and (count := self._read(fd, stream)):
                left -= count
        except BlockingIOError:
            # Empty, but a process that a worker left behind holds the other end.
            pass
        self._end(fd, stream)

    def _end(self, fd: int, stream: Stream) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        stream.finish()
