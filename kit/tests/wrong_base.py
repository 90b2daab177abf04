"""What the wrong backends have in common: one mistake each, of the kinds that have been made in public.

Each class says in its docstring what is wrong, and in ``caught_by`` which cases see it.
"""

from __future__ import annotations

from typing import ClassVar

from toy_backend import ToyBackend

MISTAKES: dict[str, type[Mistake]] = {}
"""By name of the backend."""


class Mistake(ToyBackend):
    """A toy backend gone wrong."""

    caught_by: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        MISTAKES[cls.__name__.lower()] = cls
