"""Finds parameters that a script writes to, so that the ranks of a pipeline can compare them.

A rank has the values of its own stages alone. A script that writes to a parameter does so on every rank, and those
without its values pass over it. If one rank alone runs these lines, as under ``if accelerator.is_main_process:``, part
of the model changes, and no values that ranks have in common show it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, final

import torch
from torch import nn

from drivetrain.api import UsageError

_VERSION: Any = attrgetter("_version")


@final
class ScriptWrites:
    """Parameters that were written to in place, outside of what the engine does, since ranks have last compared them.

    Told by torch's version counters, which parameters of other stages have too: what passes over such a parameter
    counts a write to it. Writes through ``parameter.data`` have no version.

    Args:
        module: whose parameters.
        in_shards: data-parallel ranks share them out, and a write to a shard has another version: none is found.
    """

    def __init__(self, module: nn.Module, *, in_shards: bool) -> None:
        self._module, self._in_shards = module, in_shards
        self._written: set[str] = set()
        self._in_engine = False
        self.renew()

    def renew(self) -> None:
        """Look at the parameters that the module has now."""
        named = {} if self._in_shards else dict(self._module.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        self.leave()

    def look(self) -> None:
        """Note what the script has written to since :meth:`leave`."""
        now = self._now()
        if now != self._versions:
            versions = zip(self._names, now, self._versions, strict=True)
            self._written |= {name for name, after, before in versions if after != before}

    def leave(self) -> None:
        """Leave out what was written since :meth:`look`: the engine did."""
        self._versions = self._now()

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """Context of what is not the script's; within another one it changes nothing."""
        if self._in_engine:
            yield
            return
        self.look()
        self._in_engine = True
        try:
            yield
        finally:
            self._in_engine = False
            self.leave()

    def taken(self) -> list[str]:
        """Return the names, and begin anew."""
        self.look()
        self.leave()
        names, self._written = sorted(self._written), set()
        return names

    def _now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (what torch's own subclasses use)
            return list(map(_VERSION, self._parameters))


def digest(names: Iterable[str]) -> int:
    """A number for the comparison of names over ranks."""
    return zlib.crc32("\n".join(names).encode())


def differ(model: str, names: Sequence[str]) -> UsageError:
    """The error for a script that has written to other parameters on other ranks.

    Args:
        model: class of the model.
        names: of parameters that were written to on this rank.
    """
    few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return UsageError(
        f"since the last backward the script has written to parameters of {model} on some processes of a pipeline "
        f"alone, or to other ones on each: here to {few or 'none'}",
        cure="Write on every process, not under `if accelerator.is_main_process:`; each writes to what its stages "
        "have, and passes over the rest.",
    )
