"""Experiment trackers: the base class, the trackers known by name, and those of one run.

A tracker's library is imported only when a run starts it. Those that need one are the distribution drivetrain-trackers.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from drivetrain.errors import UsageError
from drivetrain.logging import current_rank, get_logger
from drivetrain.registry import known_extras, pip_line
from drivetrain.wording import did_you_mean, listed, sentences

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


class _Nothing:
    """Stands for a tracking library's object on a process that does not feed it.

    Every attribute, call and item is this object again and does nothing, so that a script needs no ``if`` around them.
    Where a number or a path is asked of it, it raises: only the main process has one.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # What Python and copies ask an object for is not the library's.
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        """Let every error pass."""

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __format__(self, how: str) -> str:
        if how:
            self._refuse()
        return repr(self)

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(
            f"a value of a tracker's run was read on rank {current_rank()}, which has a stand-in without values: the "
            "main process alone feeds the tracker",
            cure="Read it under `if accelerator.is_main_process:`; drivetrain.broadcast_object_list hands it to the "
            "other processes.",
        )

    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __neg__ = __abs__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __round__ = _refuse
    __int__ = __float__ = __index__ = __fspath__ = _refuse


class _BlankTracker(GeneralTracker):
    """A tracker on a process that does not feed it: its own methods, and those of its library's object, do nothing."""

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(_Nothing(), name)


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

Kind = type[GeneralTracker]

_BUILT_IN: dict[str, str | Kind] = {"jsonl": "drivetrain.tracking.jsonl:JSONLTracker"}
_registered: dict[str, str | Kind] = {}


def register_tracker_class(kind: Kind) -> Kind:
    """Make a tracker known to ``log_with`` by its ``name``, in this process; works as a decorator.

    Raises:
        UsageError: it is no :class:`GeneralTracker`, has no name, or the name is taken by another class.
    """
    name = getattr(kind, "name", None)
    if not (isinstance(kind, type) and issubclass(kind, GeneralTracker) and isinstance(name, str) and name):
        raise UsageError(f"{kind!r} is not a tracker", cure="Derive a class from GeneralTracker and give it a `name`.")
    taken = known_trackers().get(name.lower(), kind)
    if taken is not kind:
        raise UsageError(f"the tracker name {name!r} is taken by {taken}", cure="Choose another name.")
    _registered[name.lower()] = kind
    return kind


def known_trackers() -> dict[str, str | Kind]:
    """Every tracker by lower-case name: from plugins, built in, registered; a later one overrides an earlier one.

    Returns:
        Classes, or ``"package.module:Class"`` where they are.
    """
    from drivetrain.registry import get_registry

    plugins = {name.lower(): target for name, target in get_registry().trackers().items()}
    return {**plugins, **_BUILT_IN, **_registered}


def __getattr__(name: str) -> Any:
    """Find the class of a known tracker by its own name: ``from drivetrain.tracking import WandBTracker``."""
    if not name.startswith("_"):
        for target in known_trackers().values():
            if isinstance(target, str) and target.endswith(f":{name}"):
                return getattr(importlib.import_module(target.removesuffix(f":{name}")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def resolve(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> dict[str, Kind | GeneralTracker]:
    """The trackers of ``log_with`` by lower-case name: of names, classes, instances, a list of these, or ``"all"``.

    Raises:
        UsageError: an unknown name, one that is not installed, no folder for a tracker that needs one.
    """
    found: dict[str, Kind | GeneralTracker] = {}
    several = isinstance(log_with, Sequence) and not isinstance(log_with, str)
    for each in log_with if several else [] if log_with is None else [log_with]:
        if isinstance(each, GeneralTracker):
            found[_name(each).lower()] = each
            continue
        if isinstance(each, type) and issubclass(each, GeneralTracker):
            name, kind = _name(each).lower(), each
        else:
            name = str(getattr(each, "value", each)).lower()  # text, or an enum such as Accelerate's LoggerType
            if name == "all":
                found = {**_everything(logging_dir), **found}
                continue
            kind = _find(name)
        if logging_dir is None and _needs_directory(kind):
            raise UsageError(
                f"the tracker {name!r} writes files and was given no folder",
                cure="Pass a local project_dir to the Accelerator (or logging_dir in a ProjectConfiguration).",
            )
        found[name] = kind
    return found


def _everything(logging_dir: str | os.PathLike[str] | None) -> dict[str, Kind]:
    able = {name: _load(name, target) for name, target in known_trackers().items()}
    left_out = [name for name, kind in able.items() if logging_dir is None and _needs_directory(kind)]
    if left_out:
        _logger.warning("log_with='all' leaves out %s: there is no local project_dir to write to.", listed(left_out))
    return {name: kind for name, kind in able.items() if name not in left_out}


def _find(name: str) -> Kind:
    known = {**_BUILT_IN, **_registered}  # without asking a plugin
    if name not in known:
        known = known_trackers()
    if name in known:
        return _load(name, known[name])
    extras = known_extras("drivetrain-trackers[{}]")
    if name in extras:
        raise UsageError(f"the tracker {name!r} is not installed", cure=f"Run: {pip_line(name)}")
    raise UsageError(
        f"no tracker is called {name!r}; there are {listed(known)}",
        cure=sentences(did_you_mean(name, {*known, *extras}), "Register your own with register_tracker_class."),
    )


def _load(name: str, target: str | Kind) -> Kind:
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the tracker {name!r} could not be imported: {error}",
            whose=target,
            cure="Install what it needs, or leave it out of log_with.",
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, GeneralTracker)):
        raise UsageError(
            f"the tracker {name!r} does not derive from GeneralTracker",
            whose=target,
            cure="Derive its class from drivetrain.tracking.GeneralTracker, or leave it out of log_with.",
        )
    return kind


def _needs_directory(kind: Kind) -> bool:
    return bool(getattr(kind, "requires_logging_directory", False))


def _name(tracker: Kind | GeneralTracker) -> str:
    fallback = tracker.__name__ if isinstance(tracker, type) else type(tracker).__name__
    return str(getattr(tracker, "name", fallback))


# ---- trackers of a run ----------------------------------------------------------------------------------------------


class Trackers:
    """The trackers of one run. Nothing here is collective.

    Args:
        log_with: see :func:`resolve`; mistakes are raised here, not at the first log.
        logging_dir: folder for those that write files.
        is_main_process: ``None`` = rank 0 is.

    Attributes:
        running: the trackers between ``init`` and ``finish``, on the processes that use them.
        shown: those of the run in the order of ``log_with``, with a stand-in that does nothing for each that this
            process does not feed.
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
        self.shown: list[GeneralTracker] = []
        self._warned: set[str] = set()
        self._failures: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """Return the names of the requested trackers, the same on every process."""
        return [_name(each) for each in self._asked.values()]

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
        for name, asked in self._asked.items():
            tracker: Any = asked
            if isinstance(asked, type) and self._fed_here(asked):
                where = (self.logging_dir,) if _needs_directory(asked) else ()
                tracker = tracker(project_name, *where, **chosen.get(name, {}))
            if self._fed_here(tracker):
                tracker.start()
                self.running.append(tracker)
            self.shown.append(tracker if self._fed_here(tracker) else _BlankTracker(_name(asked)))
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
            self._warn_once("log() was called while no tracker runs; call init_trackers(project_name) before.")
        chosen = self._of_each(log_kwargs, "log_kwargs")
        for tracker in self.running:
            kwargs = chosen.get(_name(tracker).lower(), {})
            self._guard(tracker, "log", functools.partial(tracker.log, dict(values), step=step, **kwargs))

    def get(self, name: str, unwrap: bool = False) -> Any:
        """One tracker by name, or with ``unwrap`` the tracking library's own object.

        On a process that does not feed it, one whose attributes and methods are all there and do nothing.

        Raises:
            UsageError: this run has no tracker of that name, or, on a process that feeds it, ``init`` was not called.
        """
        for tracker in self.running:
            if _name(tracker).lower() == name.lower():
                return getattr(tracker, "tracker", None) if unwrap else tracker
        if name.lower() not in self._asked:
            has = listed(self.names)
            raise UsageError(f"this run has no tracker {name!r}; it has {has}", cure="Add it to log_with.")
        if self._fed_here(self._asked[name.lower()]):
            raise UsageError(f"the tracker {name!r} is not running", cure="Call init_trackers(project_name) before.")
        return _Nothing() if unwrap else _BlankTracker(name)

    def finish(self) -> None:
        """End every tracker; one that raises is named in the log, as in :meth:`log`. May be called twice."""
        running, self.running = self.running, []
        self.shown.clear()
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

    def _fed_here(self, tracker: Kind | GeneralTracker) -> bool:
        return self._is_main or not tracker.main_process_only

    def _of_each(self, given: Mapping[str, Mapping[str, Any]] | None, argument: str) -> dict[str, Mapping[str, Any]]:
        chosen = {name.lower(): kwargs for name, kwargs in (given or {}).items()}
        strangers = chosen.keys() - self._asked.keys()
        if strangers and self._is_main:
            self._warn_once(f"{argument} names {listed(strangers)}, which this run does not feed.")
        return chosen

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            _logger.warning("%s", sentence)


__all__ = [
    "GeneralTracker",
    "Trackers",
    "known_trackers",
    "on_main_process",
    "register_tracker_class",
]
