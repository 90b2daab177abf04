"""What becomes of what workers write: which ranks are shown, which go to files, what the report of a failure quotes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from drivetrain.config.schema import OutputConfig
from drivetrain.errors import ConfigError, cut
from drivetrain.launch.failures import explain, read_failures
from drivetrain.launch.streams import Pump, Seen, Stream

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest

STREAMS = {"stdout": 1, "stderr": 2}
"""The streams of a process, with the bit that stands for each in ``tee`` and ``redirects``."""

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"

INHERIT = ""
"""A path that leaves a stream as it is: a rank that is shown alone keeps the terminal for itself."""


@dataclass(frozen=True)
class Route:
    """Where one stream of one rank goes.

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
        """The worker writes to the terminal itself, so that progress bars know it for one."""
        return self.shown and not (self.prefixed or self.filed)


def route(config: OutputConfig, local_rank: int, stream: str, processes_here: int, first_rank: int = 0) -> Route:
    """Where a stream goes.

    Args:
        config: what the user wrote.
        local_rank: whose stream.
        stream: ``"stdout"`` or ``"stderr"``.
        processes_here: ranks on this machine.
        first_rank: the lowest of them.
    """
    bit = STREAMS[stream]
    teed = bool(config.tee_of(local_rank) & bit)
    redirected = bool(config.redirects_of(local_rank) & bit) and not teed
    ranks = config.shown_ranks(processes_here, first_rank)
    asks_for_files = config.log_dir is not None and config.tee is None and config.redirects is None
    shown = local_rank in ranks and not redirected
    return Route(
        shown=shown,
        prefixed=shown and (teed or len(ranks) > 1),
        filed=config.log_dir is not None and (teed or redirected or asks_for_files),
    )


@dataclass
class Streams:
    """Paths by local rank: of the streams (:data:`INHERIT` = the launcher's own), and of the record of an exception."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)


class Output:
    """Gives each worker its streams and its file for a failure, whenever workers are started. A context manager.

    Torch's agent takes it for its ``LogsSpecs``.

    Args:
        config: what the user wrote; ``None`` = every worker writes where the launcher does.
        folder: an existing folder that ends with the launch.
    """

    def __init__(self, config: OutputConfig | None, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._starts = 0
        self._restarts = "0"
        self._pump: Pump | None = None
        self._seen = Seen()
        self._hidden: dict[int, Stream] = {}
        self._logs = None if config is None or config.log_dir is None else Path(config.log_dir) / _run_name()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def root_log_dir(self) -> str:
        """The agent puts it into its own log."""
        return str(self._logs or self._folder)

    @property
    def role(self) -> str:
        """What the agent calls the workers, in ``ROLE_NAME`` of their environment."""
        return OutputConfig().role if self._config is None else self._config.role

    @property
    def records(self) -> Path:
        """Where the workers that were started last record their exceptions."""
        return self._folder / f"start_{self._starts - 1}"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """:meth:`open`, as torch's agent asks for it."""
        from torch.distributed.elastic.multiprocessing import LogsDest

        streams = self.open(envs)
        return LogsDest(stdouts=streams.stdouts, stderrs=streams.stderrs, error_files=streams.error_files)

    def open(self, envs: dict[int, dict[str, str]]) -> Streams:
        """Called before workers are started, for the first time and after a failure.

        Args:
            envs: environments by local rank; each is told where to record an exception.
        """
        if self._starts:
            self.close()
            self._report_restart(envs[0])
        self._starts += 1
        self._hidden.clear()
        self._restarts = envs[0].get(_RESTARTS, "0")
        streams, first = Streams(), int(envs[0]["RANK"])
        for local_rank, environment in envs.items():
            own = self.records / str(local_rank)
            own.mkdir(parents=True)
            environment["TORCHELASTIC_ERROR_FILE"] = str(own / "error.json")
            streams.error_files[local_rank] = str(own / "error.json")
            for stream, paths in (("stdout", streams.stdouts), ("stderr", streams.stderrs)):
                paths[local_rank] = INHERIT
                if self._config is not None:
                    way = route(self._config, local_rank, stream, len(envs), first)
                    paths[local_rank] = self._open(way, first + local_rank, stream, own)
        return streams

    def close(self) -> None:
        """Show and file everything that the workers wrote. May be called twice."""
        if self._pump is not None:
            self._pump.close()
            self._pump = None

    def last_words(self, rank: int) -> str:
        """The end of what a rank wrote to stderr, to stand in a report; empty when it was shown, or there is none."""
        stream = self._hidden.get(rank)
        if stream is None or not any(stream.tail):
            return ""
        lines = [f"  {cut(line, 2_000)}" for line in stream.tail]
        return "\n".join([f"rank {rank} wrote to stderr, in the end:", *lines, ""])

    def _open(self, way: Route, rank: int, stream: str, own: Path) -> str:
        """Where a worker finds this stream: the path of a pipe, nowhere, or as the launcher's own."""
        if way.inherited:
            return INHERIT
        if not way.shown and not way.filed and stream == "stdout":
            return os.devnull  # of a rank that nobody sees only the errors are kept
        terminal: TextIO | None = None
        if way.shown:
            terminal = sys.stdout if stream == "stdout" else sys.stderr
        prefix = f"[{self.role}{rank}] " if way.prefixed else ""
        seen = self._seen if stream == "stderr" else None
        opened = Stream(rank, prefix, terminal, self._file(rank, stream) if way.filed else None, seen)
        if stream == "stderr" and not way.shown:
            self._hidden[rank] = opened
        if self._pump is None:
            self._pump = Pump()
        self._pump.connect(own / stream, opened)
        return str(own / stream)

    def _file(self, rank: int, stream: str) -> Path:
        assert self._logs is not None
        folder = self._logs / self.records.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank_{rank}.{stream}.log"

    def _report_restart(self, environment: Mapping[str, str]) -> None:
        """Say who failed before the workers are started again, since afterwards nobody could."""
        failures = read_failures({}, self.records)
        ranks = [failures[0].rank] if failures else sorted(self._hidden)
        told = "".join(map(self.last_words, ranks)) + (f"{explain(failures)}\n" if failures else "")
        count = environment.get(_RESTARTS, "0")
        why = "since machines came or went"  # which does not count as a restart
        if count != self._restarts:
            why = f"restart {count} of {environment['TORCHELASTIC_MAX_RESTARTS']}"
        sys.stderr.write(f"{told}the workers are started again: {why}\n")


def check(config: OutputConfig, processes_here: int) -> None:
    """Refuse what would show or keep nothing.

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
    """One sentence about what will not be seen, and how to see it; empty when all of it will be."""
    first = machine_rank * processes_here
    shown = [rank for rank in range(processes_here) if route(config, rank, "stdout", processes_here, first).shown]
    where = "" if config.log_dir is None else f"Output is filed in {config.log_dir}."
    if len(shown) == processes_here:
        return where
    ranks = f"rank {', '.join(str(first + rank) for rank in shown)}" if shown else "no rank of this machine"
    what = f"Output of {ranks} is shown; --local_ranks_filter all shows every rank"
    return f"{what}. {where}" if where else f"{what}, --log_dir FOLDER files them."


def _run_name() -> str:
    """Folders of several runs sort by time and never meet."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
