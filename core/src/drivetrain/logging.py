"""Rank-aware logging on top of the standard library's. Imports no torch.

``get_logger(__name__).info("...")`` logs on the main process only, with ``main_process_only=False`` on every process,
and with ``in_order=True`` on one rank after the other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.errors import EnvironmentVariableError, UsageError

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


@dataclass
class _Process:
    """Ranks of this process; ``None`` until set."""

    rank: int | None = None
    world_size: int | None = None
    barrier: Callable[[], None] | None = None


_process = _Process()


def set_rank(rank: int, world_size: int = 1, barrier: Callable[[], None] | None = None) -> None:
    """Set this process's rank, which then takes precedence over the environment.

    Args:
        rank: global rank.
        world_size: number of processes.
        barrier: waits for all of them; ``in_order=True`` needs it. It must not keep a finished run alive.
    """
    _process.rank, _process.world_size, _process.barrier = rank, world_size, barrier


def current_rank() -> int:
    """Global rank of this process: as set, else the variable ``RANK``, else 0."""
    return _process.rank if _process.rank is not None else _variable("RANK", 0)


def current_world_size() -> int:
    """Number of processes: as set, else the variable ``WORLD_SIZE``, else 1."""
    return _process.world_size if _process.world_size is not None else _variable("WORLD_SIZE", 1)


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise EnvironmentVariableError(
            f"the environment variable {name} must be a whole number, not {text!r}",
            cure=f"Unset {name}, or start the script with `drivetrain launch`.",
        ) from error


class RankLogger(_Adapter):
    """A standard logger whose methods take ``main_process_only=True`` and ``in_order=False`` besides the usual."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned: set[tuple[Any, ...]] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Nothing to add: unlike the base class, keep the caller's ``extra``."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log on the processes that were asked for.

        Collective over all processes with ``main_process_only=False, in_order=True``: every process must make the call,
        and the barrier is passed whatever the level is on this one.

        Args:
            level: as in the standard library.
            msg: as in the standard library.
            *args: as in the standard library.
            **kwargs: ``main_process_only`` (default ``True``), ``in_order`` (default ``False``: one rank after the
                other) and those of the standard library.

        Raises:
            UsageError: ``in_order`` on several processes before an Accelerator or PartialState exists.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if not main_process_only and in_order:
            self._in_order(level, msg, args, kwargs)
            return
        if in_order:
            self.warning_once("in_order=True changes nothing: only the main process logs; add main_process_only=False")
        if not main_process_only or current_rank() == 0:
            self.logger.log(level, msg, *args, **kwargs)

    def _in_order(self, level: int, msg: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        world_size, barrier = current_world_size(), _process.barrier
        if world_size > 1 and barrier is None:
            raise UsageError(
                "in_order=True lets processes log one after the other, and they are not connected yet",
                cure="Create the Accelerator (or PartialState) before this message.",
            )
        kwargs["stacklevel"] += 1
        for rank in range(world_size):
            if rank == current_rank():
                self.logger.log(level, msg, *args, **kwargs)
            if barrier is not None:
                barrier()

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """As ``warning``, but the same message with the same arguments is given once per logger object."""
        key = (str(msg), *map(str, args))
        if key not in self._warned:
            self._warned.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.log(logging.WARNING, msg, *args, **kwargs)


_loggers: dict[str, RankLogger] = {}


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """The logger of this name, the same object each time.

    Args:
        name: as in ``logging.getLogger``, usually ``__name__``.
        log_level: ``"INFO"`` ... or a number; ``None`` takes the variable ``DRIVETRAIN_LOG_LEVEL``; when that is not
            set either, the level stays as it is.

    Raises:
        UsageError: the level is not one that ``logging`` knows.
    """
    logger = _loggers.setdefault(name, RankLogger(logging.getLogger(name)))
    level = log_level if log_level is not None else os.environ.get("DRIVETRAIN_LOG_LEVEL")
    if level is not None:
        try:
            logger.setLevel(level.upper() if isinstance(level, str) else level)
        except (ValueError, TypeError) as error:
            known = ", ".join(logging.getLevelNamesMapping())
            raise UsageError(f"unknown log level {level!r}", cure=f"Write one of {known}.") from error
    return logger
