"""Routes the output of workers to the terminal and to files, and keeps its end for failure reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from drivetrain.config.schema import OutputConfig
from drivetrain.errors import ConfigError
from drivetrain.wording import cut

STDOUT, STDERR = 1, 2
"""The streams of a process, as the bits that stand for them in ``tee`` and ``redirects``."""

_CHUNK = 1 << 16
_REST_SECONDS = 1.0
"""Timeout for the end of streams after all workers have ended: child processes of a worker may hold them open."""

_LONGEST = 1 << 14
"""Bytes of a line; a longer one is cut, so that a worker that writes no line ends cannot fill the launcher's memory."""

TAIL = 30
"""Lines kept of a stream that is not shown: a traceback, or the message of a C++ library that aborts."""

_WARNING = re.compile(r"^.+:\d+: \w*Warning: ")
"""First line of what Python's ``warnings`` writes; the line of source code below it is indented."""


def restore_terminal() -> None:
    """Show the cursor and end the line, where there is a terminal.

    A progress bar hides the one and leaves the other unfinished, and a worker that was stopped cannot repair it. Its
    echo is as it was: workers are not in the group of processes that may change that.
    """
    file = next((each for each in (sys.stderr, sys.stdout) if each is not None and each.isatty()), None)
    if file is not None:
        file.write("\x1b[?25h\n")
        file.flush()


@dataclass(frozen=True)
class Route:
    """Destination of one stream of one rank.

    Args:
        shown: on the launcher's own stream.
        prefixed: with the rank in front of each line.
        filed: into a file below ``log_dir``.
    """

    shown: bool
    prefixed: bool
    filed: bool

    @property
    def inherited(self) -> bool:
        """Whether the worker inherits the terminal, so that progress bars detect it."""
        return self.shown and not (self.prefixed or self.filed)


def routes(config: OutputConfig, processes_here: int, first_rank: int = 0) -> list[tuple[Route, Route]]:
    """Return the destinations of stdout and stderr, by local rank.

    Args:
        config: the user's settings.
        processes_here: ranks on this machine.
        first_rank: the lowest of them.
    """
    shown_ranks = config.shown_ranks(processes_here, first_rank)
    asks_for_files = config.log_dir is not None and config.tee is None and config.redirects is None
    found = []
    for local_rank in range(processes_here):
        tee = config.tee_of(local_rank)
        redirects = config.redirects_of(local_rank) & ~tee
        stdout, stderr = (
            Route(
                shown=(shown := local_rank in shown_ranks and not redirects & bit),
                prefixed=shown and (bool(tee & bit) or len(shown_ranks) > 1),
                filed=config.log_dir is not None and (bool((tee | redirects) & bit) or asks_for_files),
            )
            for bit in (STDOUT, STDERR)
        )
        found.append((stdout, stderr))
    return found


class Output:
    """Gives each worker its streams and its file for a failure, whenever workers are started.

    Args:
        config: the user's settings; ``None`` = every worker writes where the launcher does.
        folder: an existing folder that ends with the launch.
    """

    def __init__(self, config: OutputConfig | None, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._starts = 0
        self._streams: list[Stream] = []
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self._hidden: dict[int, Stream] = {}
        self._logs = None if config is None or config.log_dir is None else Path(config.log_dir) / _run_name()

    @property
    def records(self) -> Path:
        """Folder in which the current workers record their exceptions."""
        return self._folder / f"start_{self._starts - 1}"

    def open(self, first_rank: int, processes_here: int) -> list[tuple[int | None, int | None, str]]:
        """Return the streams and record files of workers to be started, by local rank.

        Returns:
            stdout and stderr as :class:`subprocess.Popen` takes them: a file descriptor, ``DEVNULL``, or ``None`` for
            the launcher's own; descriptors are the caller's to close. And the file in which it records an exception.
        """
        self._starts += 1
        self._hidden.clear()
        found = []
        inherited = Route(shown=True, prefixed=False, filed=False)
        all_routes = [(inherited, inherited)] * processes_here
        if self._config is not None:
            all_routes = routes(self._config, processes_here, first_rank)
        for local_rank, (stdout, stderr) in enumerate(all_routes):
            folder, rank = self.records / str(local_rank), first_rank + local_rank
            folder.mkdir(parents=True)
            opened = self._open(stdout, rank, "stdout"), self._open(stderr, rank, "stderr")
            found.append((*opened, str(folder / "error.json")))
        return found

    def close(self) -> None:
        """Show and file everything that the workers wrote. May be called twice.

        Processes that outlive the workers are not waited for, and nothing of what they write later is shown.
        """
        end = time.monotonic() + _REST_SECONDS
        for stream in self._streams:
            stream.join(end - time.monotonic())
        self._streams.clear()

    def last_words(self, rank: int) -> str:
        """Return the end of a rank's stderr for a report; empty if it was shown, or there is none."""
        stream = self._hidden.get(rank)
        if stream is None or not any(stream.tail):
            return ""
        lines = [f"  {cut(line, 2_000)}" for line in stream.tail]
        return "\n".join([f"rank {rank} wrote to stderr, in the end:", *lines, ""])

    def _open(self, way: Route, rank: int, name: str) -> int | None:
        """Open this stream for a worker."""
        if way.inherited:
            return None
        if not way.shown and not way.filed and name == "stdout":
            return subprocess.DEVNULL  # only stderr of a rank that is not shown is kept
        assert self._config is not None
        file: Path | None = None
        if way.filed:
            assert self._logs is not None
            file = self._logs / self.records.name / f"rank_{rank}.{name}.log"
            file.parent.mkdir(parents=True, exist_ok=True)
        terminal: TextIO | None = None
        if way.shown:
            terminal = sys.stdout if name == "stdout" else sys.stderr
        prefix = f"[{self._config.role}{rank}] " if way.prefixed else ""
        stream = Stream(rank, prefix, terminal, file, self._seen if name == "stderr" else None)
        if name == "stderr" and not way.shown:
            self._hidden[rank] = stream
        self._streams.append(stream)
        return stream.connect(self._lock)


class Stream:
    """One stream of one rank.

    Args:
        rank: global rank.
        prefix: stands in front of each line that is shown.
        terminal: where lines are shown; ``None`` = nowhere.
        file: where every byte is written; ``None`` = nowhere.
        seen: warnings that were shown so far, each with the rank that showed it; ``None`` where none are expected.
    """

    def __init__(
        self, rank: int, prefix: str, terminal: TextIO | None, file: Path | None, seen: dict[str, int] | None
    ) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._rank, self._prefix, self._terminal, self._seen = rank, prefix, terminal, seen
        self._file = None if file is None else file.open("ab", buffering=0)
        self._path = file
        self._rest = b""
        self._skips_source = False
        self._joined = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def connect(self, lock: threading.Lock) -> int:
        """Return the write end of a pipe, which the caller closes; a thread takes what is written there.

        Args:
            lock: of all streams that are shown in one place, so that lines do not mix.
        """
        reads, writes = os.pipe()
        self._lock = lock
        self._thread = threading.Thread(target=self._read, args=(reads,), name="drivetrain-output", daemon=True)
        self._thread.start()
        return writes

    def join(self, seconds: float) -> None:
        """Take what is written until the pipe is closed at its other end, or for so long."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))
        with self._lock:
            self._joined = True
            self.finish()

    def _read(self, pipe: int) -> None:
        with open(pipe, "rb", buffering=0) as file:
            while data := file.read(_CHUNK):
                with self._lock:
                    if self._joined:
                        return
                    self.feed(data)

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
        """Handle the end of the stream."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        if self._file is not None:
            self._file.close()

    def _line(self, raw: bytes) -> None:
        # What a terminal shows in the end of a line that was overwritten.
        line = raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self.tail.append(line)
        if self._terminal is None or self._is_old(line):
            return
        try:
            self._terminal.write(f"{self._prefix}{line}\n")
            self._terminal.flush()
        except BrokenPipeError:
            self._terminal = None  # the reader, `head` for instance, has closed the pipe; the run goes on

    def _is_old(self, line: str) -> bool:
        """Whether this line belongs to a warning that another rank has shown."""
        if self._skips_source and line.startswith("  "):
            self._skips_source = False
            return True
        if self._seen is None or not _WARNING.match(line):
            return False
        # A rank may repeat its own warnings: the script decides that.
        self._skips_source = self._seen.setdefault(line, self._rank) != self._rank
        return self._skips_source

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:  # a full disk does not end the run, but is reported
            sys.stderr.write(f"warning: no more is written to {self._path}: {error}\n")
            self._file.close()
            self._file = None


def check(config: OutputConfig, processes_here: int) -> None:
    """Refuse settings that have no effect.

    Raises:
        ConfigError: a rank is named that this machine does not have, or ``log_dir`` cannot be a folder.
    """
    missing = [rank for rank in config.named_ranks() if rank >= processes_here]
    if missing:
        raise ConfigError(
            f"output: local rank {missing[0]} is named, but this machine has {processes_here}",
            cure="Local ranks count the processes of one machine, from 0.",
        )
    try:
        if config.log_dir is not None:
            Path(config.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output.log_dir: {config.log_dir!r} cannot hold files: {error.strerror}",
            cure="Name a folder, or one that can be made: --log_dir FOLDER.",
        ) from error


def describe(config: OutputConfig, processes_here: int, machine_rank: int = 0) -> str:
    """One sentence about output that is not shown, and how to see it; empty when all of it is shown."""
    first = machine_rank * processes_here
    shown = [rank for rank, (stdout, _) in enumerate(routes(config, processes_here, first), first) if stdout.shown]
    where = "" if config.log_dir is None else f"Output is filed in {config.log_dir}."
    if len(shown) == processes_here:
        return where
    ranks = f"rank {', '.join(map(str, shown))}" if shown else "no rank of this machine"
    what = f"Output of {ranks} is shown; --local_ranks_filter all shows every rank"
    return f"{what}. {where}" if where else f"{what}, --log_dir FOLDER files them."


def _run_name() -> str:
    """A folder name that sorts by time and is unique to the run."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
