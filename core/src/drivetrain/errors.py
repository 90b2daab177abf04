"""Exceptions of Drivetrain; each message says what happened, what it belongs to, and what to do next.

Every class that a user's own mistake can cause derives from ``ValueError`` (or the built-in that fits better), so that
a script may catch it without importing this module. Causes and cures are shown in the reference as they stand here.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from drivetrain.wording import installed, listed


class DrivetrainError(Exception):
    """Base of every error that Drivetrain raises on purpose.

    Args:
        what: one sentence, what happened, without a full stop.
        whose: what it belongs to: a distribution with its version, a file with its line, a rank. May be empty.
        cure: what to type or change next, a whole sentence. May be empty.
    """

    usual_cure = ""
    """Stands in place of a cure where none is given."""

    def __init__(self, what: str, *, whose: str = "", cure: str = "") -> None:
        self.what, self.whose, self.cure = what, whose, cure or self.usual_cure
        super().__init__(what, whose, self.cure)

    def __str__(self) -> str:
        whose = f" [{self.whose}]" if self.whose else ""
        return f"{self.what}{whose}." + (f" {self.cure}" if self.cure else "")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.whose, self.cure))


def _rebuild(kind: type[DrivetrainError], what: str, whose: str, cure: str) -> DrivetrainError:
    return kind(what, whose=whose, cure=cure)


class UsageError(DrivetrainError, ValueError):
    """A call with invalid arguments or at the wrong time.

    Cause: an argument that contradicts another one or the run, or a call at the wrong time, as
    ``backward`` before ``prepare``.

    Cure: change the call; the message says what to write.
    """


class AbsentNameError(DrivetrainError, ImportError):
    """A name that scripts import from Accelerate, and that does not exist here.

    Cause: it has no meaning here, or the backend that brings it is not installed.

    Cure: the message says what to write or to install instead.
    """


class UnsupportedError(DrivetrainError, NotImplementedError):
    """A call that the chosen backend does not support; says why and what to write instead.

    Cause: the engine underneath has no such thing; ``drivetrain backends`` lists what each backend can do.

    Cure: write what the message names, or choose a backend that can.
    """


class ConfigError(DrivetrainError, ValueError):
    """Mistakes in a configuration, all of them at once; ``what`` holds one line for each.

    Cause: an unknown key, a value of the wrong type or range, or two values that contradict each other.

    Cure: change the file at the line and column of the message, the variable or the flag; ``drivetrain config show``
    says who set what.
    """


class EnvironmentVariableError(DrivetrainError, ValueError):
    """A launcher's environment that is incomplete or contradicts itself.

    Cause: some of ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and the like are missing or disagree, often left over in a
    shell.

    Cure: start the script with one launcher, or unset what an earlier one left.
    """


class BackendError(DrivetrainError):
    """Base of errors between a name in a configuration and a running backend.

    Cause: never raised itself; the classes below say which step failed.

    Cure: ``drivetrain backends`` shows every backend with its owner and what is wrong with it.
    """


class BackendNotFoundError(BackendError, ValueError):
    """No installed plugin provides a backend of this name.

    Cause: a misspelt name, or a plugin that is not installed in this environment.

    Cure: take the name that the message guesses, or run its pip command.
    """


class BackendConflictError(BackendError, ValueError):
    """Two distributions claim one name.

    Cause: two installed plugins bring a backend, tracker or section of the same name.

    Cure: uninstall one of the two; the message names both with their versions.
    """


class BackendBrokenError(BackendError, ImportError):
    """The plugin that brings this backend could not be imported.

    Cause: the plugin or something that it imports is damaged or too old, or an answer of the plugin is not what it must
    be.

    Cure: reinstall or upgrade the distribution of the message; ``drivetrain backends`` shows the traceback.
    """


class BackendBlockedError(BackendError, RuntimeError):
    """The backend is installed but cannot run here: a requirement, a device, the size of the world.

    Cause: a missing or too old engine, a release of it whose internals differ, no device of the kind it needs, or a
    number of processes that does not fit.

    Cure: the message says what to install or to change.
    """

    @classmethod
    def check_names(cls, owner: object, names: Iterable[str], *, library: str, tested: str, user: str) -> None:
        """Raise where an object of another library lacks attributes that a plugin uses. Not collective.

        A plugin declares the private names of its engine that it reads, replaces or sets, and checks them before it
        does: one that the engine has renamed would end in an ``AttributeError`` in the middle of a step, and one that
        is set in a wrong number.

        Args:
            owner: a module, a class, or an object, which is named by its class.
            names: of its attributes.
            library: the distribution that it should be from, such as ``"deepspeed"``.
            tested: the release that the plugin is tested with.
            user: the distribution that uses the names.

        Raises:
            BackendBlockedError: a name is missing.
        """
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            raise cls.of_renamed(owner, f"has no {listed(missing)}", library=library, tested=tested, user=user)

    @classmethod
    def of_renamed(cls, owner: object, lack: str, *, library: str, tested: str, user: str) -> BackendBlockedError:
        """The error for a release of another library that is not as a plugin expects it.

        Args:
            owner: as for :meth:`check_names`.
            lack: what is wrong with it, a verb first.
            library: the distribution that it should be from.
            tested: the release that the plugin is tested with.
            user: the distribution that needs it.
        """
        named = owner if isinstance(owner, (type, ModuleType)) else type(owner)
        place = named.__name__ if isinstance(named, ModuleType) else f"{named.__module__}.{named.__qualname__}"
        return cls(
            f"{place} {lack}, which {user} needs of {installed(library)}",
            whose=installed(user),
            cure=f"If another package has replaced it, import that package later or not at all; else install the "
            f"release that {user} is tested with, pip install {library}=={tested}, or a newer {user}, and report it.",
        )


class ContractMismatchError(BackendError, RuntimeError):
    """Plugin and core use different versions of the backend contract.

    Cause: one of the two was upgraded without the other.

    Cure: upgrade the one that is behind; the message has the pip command.
    """


class CollectiveMismatchError(DrivetrainError, RuntimeError):
    """Ranks disagree about a collective (operation, shape, dtype, line); raised before it can hang.

    Cause: ranks took different branches (``continue`` or ``break`` on one), have other settings, or hold tensors of
    different shapes. Calls, batches and settings are compared beside the training, so that this may be raised a
    little later; before each call, with lines and absence, with ``desync_watchdog: true``. Shapes are compared on the
    CPU and by ``gather_for_metrics`` always, elsewhere with ``debug: true``.

    Cure: make the call on every rank with the same structure; ``pad_across_processes`` evens out shapes.
    """


class CheckpointError(DrivetrainError, ValueError):
    """Base of errors with checkpoints.

    Cause: a save that failed, a folder that cannot be read or written, or one of the classes below.

    Cure: as the message says; the last complete checkpoint is never harmed by a failed save.
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint at this path.

    Cause: a wrong path, or a run that ended before its first save was complete.

    Cure: give the folder that holds ``manifest.json``.
    """


class CheckpointCorruptError(CheckpointError):
    """A file of the checkpoint is missing, truncated or altered.

    Cause: an incomplete copy, a full or failing disk, or an edit.

    Cure: copy the folder again or load an older one; ``drivetrain checkpoint inspect`` checks every file.
    """

    usual_cure = "Copy the checkpoint again from where it came, or load an older one."


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is intact but is not of this model, optimizer or script.

    Cause: names, shapes, parameter groups or registered objects differ from those of the run that saved.

    Cure: build the objects as that run did; ``strict=False`` loads what fits and says what it left out.
    """


class LaunchError(DrivetrainError, RuntimeError):
    """Workers could not be started, or one of them failed.

    Cause: a script that raised (its traceback is above), a port in use, a machine that did not arrive, or too little
    memory.

    Cure: repair the first failure that the message shows; the others follow from it.
    """
