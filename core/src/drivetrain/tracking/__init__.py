"""Experiment trackers: the base class, the trackers known by name, and those of one run.

A tracker's package is imported only when a run starts it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from drivetrain.errors import UsageError, did_you_mean, listed, sentences
from drivetrain.logging import current_rank, get_logger
from drivetrain.registry import pip_line

_logger = get_logger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
Self_ = TypeVar("Self_")


class GeneralTracker:
    """Base of every tracker. A subclass has three attributes besides its methods, on the class or set in ``__init__``.

    - ``name``: what ``log_with`` calls it.
    - ``requires_logging_directory``: then it is made by ``cls(run_name, logging_dir, **init_kwargs)``, else by
      ``cls(run_name, **init_kwargs)``.
    - ``tracker``: the tracking library's own object, usually a property.

    ``main_process_only = False`` uses it on every process; otherwise only on the main process.
    """

    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [attribute for attribute in needed if attribute not in dir(self)]
        if missing and not _blank:
            raise UsageError(
                f"the tracker {type(self).__name__} lacks {listed(missing)}",
                cure="Give the class these attributes, or set them before super().__init__().",
            )

    def start(self) -> None:
        """Begin the run; called once, after construction."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's hyper-parameters; called once after :meth:`start` when there are some."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one moment.

        Args:
            values: by name.
            step: the moment; ``None`` leaves it to the tracker.
            **kwargs: what the script gave for this tracker in ``log_kwargs``.
        """

    def finish(self) -> None:
        """End the run; called once."""


def on_main_process(
    method: Callable[Concatenate[Self_, P], R],
) -> Callable[Concatenate[Self_, P], R | None]:
    """Let a tracker's method run on the main process alone, unless its ``main_process_only`` is ``False``."""

    @functools.wraps(method)
    def wrapper(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if getattr(self, "main_process_only", True) and current_rank() != 0:
            return None
        return method(self, *args, **kwargs)

    return wrapper


# ---- known trackers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    """A tracker by name: its class or where that is, and the packages it needs."""

    name: str
    target: str | type[GeneralTracker]
    packages: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [package for package in self.packages if not _installed(package)]

    def load(self) -> type[GeneralTracker]:
        """The class. Raises :class:`UsageError` when it cannot be imported."""
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"the tracker {self.name!r} could not be imported: {error}",
                whose=self.target,
                cure="Install what it needs, or leave it out of log_with.",
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, GeneralTracker)):
            raise UsageError(f"the tracker {self.name!r} does not derive from GeneralTracker", whose=self.target)
        return kind


_BUILT_IN = (
    _Known("jsonl", "drivetrain.tracking.jsonl:JSONLTracker"),
    _Known("mlflow", "drivetrain.tracking.mlflow:MLflowTracker", ("mlflow",)),
    _Known("tensorboard", "drivetrain.tracking.tensorboard:TensorBoardTracker", ("tensorboard",)),
    _Known("trackio", "drivetrain.tracking.trackio:TrackioTracker", ("trackio",)),
    _Known("wandb", "drivetrain.tracking.wandb:WandBTracker", ("wandb",)),
)
"""Each that needs a package is an extra of the core, by the same name."""

_registered: dict[str, _Known] = {}


def _installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A folder without code, such as the one `wandb` writes its runs to, is a namespace package and has no origin.
    return spec is not None and spec.origin is not None


def register_tracker_class(kind: type[GeneralTracker]) -> type[GeneralTracker]:
    """Make a tracker known to ``log_with`` by its ``name``, in this process; works as a decorator.

    Raises:
        UsageError: it is no :class:`GeneralTracker`, has no name, or the name is taken by another class.
    """
    name = getattr(kind, "name", None)
    if not (isinstance(kind, type) and issubclass(kind, GeneralTracker) and isinstance(name, str) and name):
        raise UsageError(f"{kind!r} is not a tracker", cure="Derive a class from GeneralTracker and give it a `name`.")
    taken = known_trackers().get(name.lower())
    if taken is not None and taken.target is not kind:
        raise UsageError(f"the tracker name {name!r} is taken by {taken.target}", cure="Choose another name.")
    _registered[name.lower()] = _Known(name, kind)
    return kind


def known_trackers() -> dict[str, _Known]:
    """Every tracker by lower-case name: from plugins, built in, registered; a later one overrides an earlier one."""
    from drivetrain.registry import get_registry

    plugins = {name.lower(): _Known(name, target) for name, target in get_registry().trackers().items()}
    return {**plugins, **_of_ours()}


def _of_ours() -> dict[str, _Known]:
    """Those that are known without asking a plugin."""
    return {**{each.name: each for each in _BUILT_IN}, **_registered}


Asked = str | type[GeneralTracker] | GeneralTracker


def _as_list(log_with: Any) -> list[Any]:
    if log_with is None:
        return []
    return list(log_with) if isinstance(log_with, Sequence) and not isinstance(log_with, str) else [log_with]


def resolve(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> list[_Known | GeneralTracker]:
    """The trackers of ``log_with``: names, classes, instances, a list of these, or ``"all"`` for all that can run here.

    Raises:
        UsageError: an unknown name, a package that is not installed, no folder for a tracker that needs one.
    """
    found: dict[str, _Known | GeneralTracker] = {}
    for each in _as_list(log_with):
        if isinstance(each, GeneralTracker):
            found[str(getattr(each, "name", type(each).__name__)).lower()] = each
        elif isinstance(each, type) and issubclass(each, GeneralTracker):
            name = str(getattr(each, "name", each.__name__))
            found[name.lower()] = _with_directory(_Known(name, each), logging_dir)
        elif _word(each) == "all":
            found = {**_everything(logging_dir), **found}
        else:
            found[_word(each)] = _with_directory(_named(each), logging_dir)
    return list(found.values())


def _word(name: Any) -> str:
    """A name as text, given as text or as a member of an enum such as Accelerate's ``LoggerType``."""
    return str(getattr(name, "value", name)).lower()


def _named(name: Any) -> _Known:
    tracker = _of_ours().get(_word(name)) or (known := known_trackers()).get(_word(name))
    if tracker is None:
        raise UsageError(
            f"no tracker is called {_word(name)!r}; there are {listed(known)}",
            cure=sentences(did_you_mean(_word(name), known), "Register your own with register_tracker_class."),
        )
    missing = tracker.missing()
    if missing:
        raise UsageError(
            f"the tracker {tracker.name!r} needs {listed(missing)}, which is not installed",
            cure=f"Run: {pip_line(tracker.name)}",
        )
    return tracker


def _needs_directory(tracker: _Known) -> bool:
    return bool(getattr(tracker.load(), "requires_logging_directory", False))


def _with_directory(tracker: _Known, logging_dir: str | os.PathLike[str] | None) -> _Known:
    if logging_dir is None and _needs_directory(tracker):
        raise UsageError(
            f"the tracker {tracker.name!r} writes files and was given no folder",
            cure="Pass project_dir to the Accelerator (or logging_dir in a ProjectConfiguration).",
        )
    return tracker


def _everything(logging_dir: str | os.PathLike[str] | None) -> dict[str, _Known | GeneralTracker]:
    able = {name: tracker for name, tracker in known_trackers().items() if not tracker.missing()}
    left_out = [name for name, tracker in able.items() if logging_dir is None and _needs_directory(tracker)]
    if left_out:
        _logger.warning("log_with='all' leaves out %s: there is no project_dir to write to.", listed(left_out))
    return {name: tracker for name, tracker in able.items() if name not in left_out}


# ---- trackers of a run ----------------------------------------------------------------------------------------------


class Trackers:
    """The trackers of one run. Nothing here is collective.

    Args:
        log_with: see :func:`resolve`; mistakes are raised here, not at the first log.
        logging_dir: folder for those that write files.
        is_main_process: ``None`` = rank 0 is.

    Attributes:
        running: the trackers between ``init`` and ``finish``, on the processes that use them.
    """

    def __init__(
        self,
        log_with: Any = None,
        logging_dir: str | os.PathLike[str] | None = None,
        is_main_process: bool | None = None,
    ) -> None:
        self.logging_dir = logging_dir
        self._asked = resolve(log_with, logging_dir)
        self._is_main = current_rank() == 0 if is_main_process is None else is_main_process
        self.running: list[GeneralTracker] = []
        self._failures: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """What was asked for, by name, the same on every process."""
        return [str(getattr(each, "name", type(each).__name__)) for each in self._asked]

    def init(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every tracker; those of an earlier ``init`` are finished first.

        Args:
            project_name: the run's name (the project, in some trackers' words).
            config: hyper-parameters to keep.
            init_kwargs: further arguments by tracker name.
        """
        self.finish()
        chosen = self._of_each(init_kwargs, "init_kwargs")
        for asked in self._asked:
            tracker = asked if isinstance(asked, GeneralTracker) else self._make(asked, project_name, chosen)
            if tracker is not None and self._fed_here(tracker):
                tracker.start()
                self.running.append(tracker)
        if config is not None:
            for tracker in self.running:
                tracker.store_init_configuration(dict(config))

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values to every tracker; a script without trackers may call this too.

        A tracker that raises is named in the log, the first time with its traceback, and the training goes on: it would
        end on this process alone, while the others wait for it in their next collective.

        Args:
            values: by name.
            step: the moment.
            log_kwargs: further arguments by tracker name.
        """
        if not self._asked:
            return
        if not self.running and self._is_main:
            _logger.warning_once("log() was called while no tracker runs; call init_trackers(project_name) before.")
        chosen = self._of_each(log_kwargs, "log_kwargs")
        for tracker in self.running:
            kwargs = chosen.get(_name(tracker), {})
            self._guard(tracker, "log", functools.partial(tracker.log, dict(values), step=step, **kwargs))

    def get(self, name: str, unwrap: bool = False) -> Any:
        """One tracker by name, or with ``unwrap`` the tracking library's own object.

        On a process that does not feed it: a blank tracker whose methods do nothing.

        Raises:
            UsageError: this run has no tracker of that name, or ``init`` was not called.
        """
        for tracker in self.running:
            if _name(tracker) == name.lower():
                return getattr(tracker, "tracker", None) if unwrap else tracker
        if name.lower() not in [each.lower() for each in self.names]:
            has = listed(self.names)
            raise UsageError(f"this run has no tracker {name!r}; it has {has}", cure="Add it to log_with.")
        if self._is_main:
            raise UsageError(f"the tracker {name!r} is not running", cure="Call init_trackers(project_name) before.")
        return GeneralTracker(_blank=True)

    def finish(self) -> None:
        """End every tracker; one that raises is named in the log, as in :meth:`log`. May be called twice."""
        running, self.running = self.running, []
        for tracker in reversed(running):
            self._guard(tracker, "finish", tracker.finish)
        for name, count in self._failures.items():
            if count > 1:
                _logger.error("the tracker %r failed %d times in this run", name, count, main_process_only=False)
        self._failures.clear()

    def _guard(self, tracker: GeneralTracker, method: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            name = _name(tracker)
            self._failures[name] += 1
            if self._failures[name] == 1:
                _logger.exception("the tracker %r failed in %s", name, method, main_process_only=False)

    def _make(self, known: _Known, project_name: str, chosen: Mapping[str, Mapping[str, Any]]) -> GeneralTracker | None:
        kind: Any = known.load()
        if not self._fed_here(kind):
            return None
        where = (self.logging_dir,) if getattr(kind, "requires_logging_directory", False) else ()
        tracker: GeneralTracker = kind(project_name, *where, **chosen.get(known.name.lower(), {}))
        return tracker

    def _fed_here(self, tracker: GeneralTracker | type[GeneralTracker]) -> bool:
        return self._is_main or not tracker.main_process_only

    def _of_each(self, given: Mapping[str, Mapping[str, Any]] | None, argument: str) -> dict[str, Mapping[str, Any]]:
        chosen = {name.lower(): kwargs for name, kwargs in (given or {}).items()}
        strangers = set(chosen) - {name.lower() for name in self.names}
        if strangers and self._is_main:
            _logger.warning_once("%s names %s, which this run does not feed.", argument, listed(strangers))
        return chosen


def _name(tracker: GeneralTracker) -> str:
    return str(getattr(tracker, "name", type(tracker).__name__)).lower()


__all__ = [
    "GeneralTracker",
    "Trackers",
    "known_trackers",
    "on_main_process",
    "register_tracker_class",
]
