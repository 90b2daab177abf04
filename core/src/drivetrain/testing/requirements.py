"""What a backend's own tests tell the kit: which backend, on which worlds, and what it does not do, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class BaseRequirements:
    """Derive a class named ``Requirements`` from this in the test module that imports the suite.

    Attributes:
        backend: the backend's name, as in ``distributed_type``.
        world_sizes: worlds to run the cases on. A world of 1 shows that the backend works alone.
        section: the config section under the backend's name.
        mesh: axis sizes by world size, e.g. ``{4: {"dp_replicate": 2, "tp": 2}}``; a world that is not named leaves the
            choice to the backend.
        unused_parameters: additions to the section under which parameters may stay without a gradient; ``None`` when
            the backend cannot train such models.
        device: device type to train on; ``None`` = the best there is.
        atol: largest difference from the single-process run in float32. Raise it with a reason only.
        gaps: cases that this backend cannot pass, by name, each with its reason. A gap is an expected failure: a case
            that passes in spite of it fails, and so does a gap that names no case.
        shared_ranks: run the cases of a room in one group of ranks, one after the other, which takes a third of the
            time. A case that does not pass there is run again on ranks of its own, and that counts.
        setup: ``"module:function"`` called without arguments in every rank first; for a backend that is not installed.
    """

    backend: ClassVar[str]
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2)
    section: ClassVar[Mapping[str, Any]] = {}
    mesh: ClassVar[Mapping[int, Mapping[str, int]]] = {}
    unused_parameters: ClassVar[Mapping[str, Any] | None] = {}
    device: ClassVar[str | None] = "cpu"
    atol: ClassVar[float] = 1e-6
    gaps: ClassVar[Mapping[str, str]] = {}
    shared_ranks: ClassVar[bool] = False
    setup: ClassVar[str] = ""
