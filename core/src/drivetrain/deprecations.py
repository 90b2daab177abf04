"""The list of deprecations, each with the release that removes it. A test fails while a removed one is still listed.

To deprecate something, add a line here and call :func:`warn` where it is used. In the release that the line names,
the line and whatever calls :func:`warn` with its key are removed together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True)
class Deprecation:
    """One deprecated name or option.

    Args:
        what: the name, as users write it.
        since: the release that warned first.
        ends: the first release without it.
        instead: what to write in its place, a whole sentence.
    """

    what: str
    since: str
    ends: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what} is deprecated since {self.since} and ends in {self.ends}. {self.instead}"


DEPRECATIONS = {
    "unused_parameters": Deprecation(
        what="unused_parameters = None in the Requirements of a conformance test",
        since="0.1",
        ends="0.2",
        instead='Write gaps = {"gradients.unused_parameters": "the reason"}.',
    ),
}
"""By the key that :func:`warn` is called with."""


def warn(key: str, *, stacklevel: int = 2) -> None:
    """Warn of the use of a deprecated name: what to write instead, and until when it works."""
    warnings.warn(str(DEPRECATIONS[key]), FutureWarning, stacklevel=stacklevel + 1)


def ended(deprecations: Iterable[Deprecation], version: str) -> list[Deprecation]:
    """Return the deprecations that a release must no longer contain."""
    return [each for each in deprecations if Version(each.ends) <= Version(version)]
