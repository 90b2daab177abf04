"""One small tree of errors with one grammar: what happened, whose it is, what to type next.

Every class that a user's own mistake can cause derives from ``ValueError`` (or the built-in that fits better), so that
a script may catch it without importing this module.
"""

from __future__ import annotations


class DrivetrainError(Exception):
    """Base of every error that Drivetrain raises on purpose.

    Args:
        what: one sentence, what happened, without a full stop.
        whose: who it belongs to: a distribution with its version, a file with its line, a rank. May be empty.
        cure: what to type or change next, a whole sentence. May be empty.
    """

    def __init__(self, what: str, *, whose: str = "", cure: str = "") -> None:
        self.what, self.whose, self.cure = what, whose, cure
        super().__init__(what, whose, cure)

    def __str__(self) -> str:
        whose = f" [{self.whose}]" if self.whose else ""
        return f"{self.what}{whose}." + (f" {self.cure}" if self.cure else "")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.whose, self.cure))


def _rebuild(kind: type[DrivetrainError], what: str, whose: str, cure: str) -> DrivetrainError:
    return kind(what, whose=whose, cure=cure)


class UsageError(DrivetrainError, ValueError):
    """A call whose arguments or whose moment cannot be right."""


class UnsupportedError(DrivetrainError, NotImplementedError):
    """A call that the chosen backend cannot honour; says why and what to write instead."""


class ConfigError(DrivetrainError, ValueError):
    """Mistakes in a configuration, all of them at once; ``what`` holds one line for each."""


class EnvironmentVariableError(DrivetrainError, ValueError):
    """A launcher's environment that is incomplete or contradicts itself."""


class BackendError(DrivetrainError):
    """Base of what can go wrong between a name in a configuration and a running backend."""


class BackendNotFoundError(BackendError, ValueError):
    """No installed plugin brings a backend of this name."""


class BackendConflictError(BackendError, ValueError):
    """Two distributions claim one name."""


class BackendBrokenError(BackendError, ImportError):
    """The plugin that brings this backend could not be imported."""


class BackendBlockedError(BackendError, RuntimeError):
    """The backend is installed but cannot run here: a requirement, a device, the size of the world."""


class ContractMismatchError(BackendError, RuntimeError):
    """Plugin and core speak different versions of the backend contract."""


class CollectiveMismatchError(DrivetrainError, RuntimeError):
    """Ranks disagree about a collective (operation, shape or dtype); raised in debug mode before it can hang."""


class CheckpointError(DrivetrainError, ValueError):
    """Base of what can go wrong with a checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint at this place."""


class CheckpointCorruptError(CheckpointError):
    """A file of the checkpoint is missing, truncated or altered."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is sound but is not of this model, optimizer or script."""


class LaunchError(DrivetrainError, RuntimeError):
    """Workers could not be started, or one of them failed."""
