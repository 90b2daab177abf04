"""The class in which a backend's conformance module says what to test: which backend, on which world sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, ClassVar

from drivetrain.backend import Capabilities
from drivetrain.wording import did_you_mean, sentences


class BaseRequirements:
    """Derive a class named ``Requirements`` from this in the test module that imports the suite.

    Attributes:
        backend: the backend's name, as in ``distributed_type``.
        world_sizes: worlds to run the cases on. A world of 1 shows that the backend works alone; a backend that is
            ``multi_process`` needs a larger one, or a mesh of several devices.
        section: the config section under the backend's name.
        mesh: axis sizes by world size, e.g. ``{4: {"dp_replicate": 2, "tp": 2}}``; a world that is not named leaves the
            choice to the backend.
        unused_parameters: additions to the section under which parameters may stay without a gradient.
        axis_sections: by mesh axis, the config section under which that axis is tried alone; empty where the backend's
            defaults will do.
        layouts: by world size, further configurations under which ``drivetrain test`` is run: each a mapping of keys of
            the configuration file, such as ``{"mesh": {"dp_replicate": 2, "tp": 2}}`` or a section of the backend.
        device: device type to train on; ``None`` = the best there is.
        atol: largest difference from the single-process run in float32.
        atol_reason: why ``atol`` is larger than the kit's own; needed then.
        gaps: cases that this backend cannot pass, by name, each with its reason. Each becomes ``xfail(reason=...,
            strict=True)``: a case that passes in spite of it fails, and so does a gap that names no case. The only way
            to switch a case off.
        shared_ranks: run up to fifty cases in one group of ranks, one after the other, in less than a third of the
            time. A case that does not pass there is run again on ranks of its own, and that counts.
        setup: ``"module:function"`` called without arguments in every rank first; for a backend that is not installed.
        model: ``"module:build"``: run the cases for a user's model on it too; see :mod:`drivetrain_testing.user_model`.
        certifies: the module is a conformance test: it runs all of the kit, and counts in the closing table and the
            report. ``False`` for one that only borrows cases.
    """

    backend: ClassVar[str]
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2)
    section: ClassVar[Mapping[str, Any]] = {}
    mesh: ClassVar[Mapping[int, Mapping[str, int]]] = {}
    unused_parameters: ClassVar[Mapping[str, Any] | None] = {}
    axis_sections: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    layouts: ClassVar[Mapping[int, Iterable[Mapping[str, Any]]]] = {}
    device: ClassVar[str | None] = "cpu"
    atol: ClassVar[float] = 1e-6
    atol_reason: ClassVar[str] = ""
    gaps: ClassVar[Mapping[str, str]] = {}
    shared_ranks: ClassVar[bool] = False
    setup: ClassVar[str] = ""
    model: ClassVar[str] = ""
    certifies: ClassVar[bool] = True


def mistakes(requirements: type[BaseRequirements], capabilities: Capabilities, applying: Iterable[str]) -> list[str]:
    """Return what is wrong with a module's requirements, one sentence each.

    Args:
        requirements: the module's class.
        capabilities: what its backend declares.
        applying: names of the cases that apply to them.
    """
    found = _unknown_names(requirements) + _wrong_gaps(requirements.gaps, list(applying))
    worlds = requirements.world_sizes
    if not worlds or any(world < 1 for world in worlds):
        found.append(f"world_sizes {worlds!r} run no case")
    alone = all(max(world, prod(requirements.mesh.get(world, {}).values())) == 1 for world in worlds)
    if worlds and alone and capabilities.multi_process:
        found.append(f"{requirements.backend} declares multi_process, but no world of more than one process is tested")
    if requirements.atol > BaseRequirements.atol and not requirements.atol_reason.strip():
        found.append(f"atol {requirements.atol:g} is larger than {BaseRequirements.atol:g} without an atol_reason")
    return found


def _unknown_names(requirements: type[BaseRequirements]) -> list[str]:
    """Attributes that nothing reads: a misspelt one would have no effect, without a word."""
    known = set(BaseRequirements.__annotations__)
    written = {
        name
        for kind in requirements.__mro__[: requirements.__mro__.index(BaseRequirements)]
        for name in vars(kind)
        if not name.startswith("_")
    }
    return [
        sentences(f"Requirements.{name} is nothing that the kit reads.", did_you_mean(name, known))
        for name in sorted(written - known)
    ]


def _wrong_gaps(gaps: Mapping[str, str], applying: list[str]) -> list[str]:
    found = [
        sentences(f"the gap {name!r} names no case that applies here.", did_you_mean(name, applying))
        for name in gaps
        if name not in applying
    ]
    return found + [f"the gap {name!r} has no reason" for name, reason in gaps.items() if not str(reason).strip()]
