"""Registers conformance cases and runs them on ranks, each with a :class:`Kit`.

A case is a function that runs on every rank of a small real job and raises when the backend breaks the contract.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain_testing.hygiene import unchanged
from drivetrain_testing.processes import RankFailedError, spawn
from drivetrain_testing.requirements import BaseRequirements

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.backend import Capabilities

T = TypeVar("T")
CONFIG_FILE = "DRIVETRAIN_CONFIG_FILE"


@dataclass(frozen=True)
class Case:
    """One statement about every backend.

    Args:
        name: ``family.function``, as gaps name it.
        function: what each rank runs.
        guards: the public report of somebody else's bug that it guards against, if there is one.
        applies: says from the capabilities whether the case makes sense; a case about a flag that is ``False`` is
            written as a case of its own, which expects the documented error.
        world_sizes: worlds it makes sense on; empty = all.
    """

    name: str
    function: Callable[[Kit], Any]
    guards: str
    applies: Callable[[Capabilities], bool]
    world_sizes: tuple[int, ...]


_CASES: dict[str, Case] = {}
"""Every case by name, filled by importing the modules in :data:`FAMILIES`."""

FAMILIES = (
    "gradients",
    "windows",
    "uneven",
    "clipping",
    "loose",
    "precision",
    "scheduling",
    "data",
    "order",
    "randomness",
    "apart",
    "collectives",
    "evaluation",
    "deferred",
    "scripts",
    "honesty",
    "mesh",
    "state",
)
"""Modules under ``drivetrain_testing.cases``."""

CONTRACT = (
    "gradients.ragged_labels",
    "gradients.empty_micro_batch",
    "gradients.explicit_step",
    "windows.ragged_windows",
    "clipping.clips_as_one_process_does",
    "state.resumed_equals_uninterrupted",
)
"""Cases whose numbers depend on the number of ranks: what to run on one more world when all cases run on another."""

USER_MODEL = "brought"
"""Family of cases that train a user's model."""


def case(
    *,
    guards: str = "",
    applies: Callable[[Capabilities], bool] = lambda _: True,
    world_sizes: tuple[int, ...] = (),
) -> Callable[[Callable[[Kit], T]], Callable[[Kit], T]]:
    """Register a function as a case under ``<module>.<function>``; see :class:`Case`."""

    def register(function: Callable[[Kit], T]) -> Callable[[Kit], T]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        assert name not in _CASES, name
        _CASES[name] = Case(name, function, guards, applies, world_sizes)
        return function

    return register


def all_cases() -> dict[str, Case]:
    """Every standard case, in order of the families."""
    return {name: case for family in FAMILIES for name, case in _family(family).items()}


def user_model_cases() -> dict[str, Case]:
    """The cases that train a model of the user's."""
    return _family(USER_MODEL)


def _family(family: str) -> dict[str, Case]:
    importlib.import_module(f"drivetrain_testing.cases.{family}")
    return {name: case for name, case in _CASES.items() if name.startswith(f"{family}.")}


@dataclass(frozen=True)
class Kit:
    """Context of a case. It is pickled and sent to the ranks.

    Args:
        backend: name of the backend under test.
        config: the configuration file's content.
        unused_parameters: see :class:`BaseRequirements`.
        axis_sections: see there.
        atol: see there.
        setup: see there.
        folder: an empty folder that all ranks see.
        model: ``"module:build"`` of a model of the user's, else empty.
        layouts: those of this world, see :class:`BaseRequirements`.
        timeout: seconds that the ranks of one case may take.
        made: the accelerators that the case made in this rank; ended by :func:`run_in_rank`.
    """

    backend: str
    config: Mapping[str, Any]
    unused_parameters: Mapping[str, Any]
    axis_sections: Mapping[str, Mapping[str, Any]]
    atol: float
    setup: str
    folder: str
    model: str = ""
    layouts: tuple[Mapping[str, Any], ...] = ()
    timeout: float = 60.0
    made: list[Accelerator] = field(default_factory=list)

    @classmethod
    def of(cls, requirements: type[BaseRequirements], world_size: int, folder: Path, model: str = "") -> Kit:
        """The kit that these requirements ask for; ``model`` is one named on the command line."""
        config: dict[str, Any] = {"distributed_type": requirements.backend}
        if requirements.section:
            config[requirements.backend] = dict(requirements.section)
        if requirements.mesh.get(world_size):
            config["mesh"] = dict(requirements.mesh[world_size])
        if requirements.device == "cpu":
            config["use_cpu"] = True
        return cls(
            requirements.backend,
            config,
            requirements.unused_parameters or {},
            requirements.axis_sections,
            requirements.atol,
            requirements.setup,
            str(folder),
            model or requirements.model,
            tuple(requirements.layouts.get(world_size, ())),
        )

    @classmethod
    def plain(cls, backend: str, folder: Path, atol: float = BaseRequirements.atol) -> Kit:
        """An installed backend on the CPU with its default section."""
        config = {"distributed_type": backend, "use_cpu": True}
        return cls(backend, config, {}, {}, atol, "", str(folder))

    def with_config(self, **config: Any) -> Kit:
        """A kit whose configuration file has these keys too; its accelerators are ended with this kit's."""
        return self.replaced({**self.config, **config})

    def with_model(self, target: str) -> Kit:
        """A kit with a model of the user's; ``target`` is ``"module:build"``."""
        return replace(self, model=target)

    def replaced(self, config: Mapping[str, Any]) -> Kit:
        """A kit with another configuration file; its accelerators are ended with this kit's."""
        return replace(self, config=config)

    def along(self, axis: str, size: int) -> Kit:
        """A kit of so many processes along one mesh axis, under the section that the requirements name for it."""
        config = {key: value for key, value in self.config.items() if key != self.backend}
        section = self.axis_sections.get(axis)
        if section:
            config[self.backend] = dict(section)
        return self.replaced({**config, "mesh": {axis: size}})

    def accelerator(self, **kwargs: Any) -> Accelerator:
        """An ``Accelerator`` of the backend under test, configured by a file as a user's script is."""
        from drivetrain import Accelerator

        path = Path(self.folder) / f"config-{os.environ.get('RANK', '0')}-{len(self.made)}.yaml"
        path.write_text(json.dumps(self.config), encoding="utf-8")  # JSON is YAML
        before = os.environ.get(CONFIG_FILE)
        os.environ[CONFIG_FILE] = str(path)
        try:
            accelerator = Accelerator(**kwargs)
        finally:
            os.environ.pop(CONFIG_FILE)
            if before is not None:
                os.environ[CONFIG_FILE] = before
        self.made.append(accelerator)
        return accelerator

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that the backend declares."""
        from drivetrain.registry import get_registry

        return get_registry().info(self.backend).capabilities

    @property
    def shared(self) -> Path:
        """The folder that all ranks see."""
        return Path(self.folder)


def prepare_rank(setup: str) -> None:
    """Call ``"module:function"``, if any; in the parent process too, for a backend that is not installed."""
    if setup:
        module, _, function = setup.partition(":")
        getattr(importlib.import_module(module), function)()


def run_in_rank(function: Callable[[Kit], T], kit: Kit) -> T:
    """Run a case's function in a rank, end its accelerators, and see that the process is as it was before.

    The process group of a multi-process backend goes with the last accelerator.
    """
    import torch

    prepare_rank(kit.setup)
    torch.manual_seed(0)
    with unchanged():
        result = function(kit)
        while kit.made:
            kit.made.pop().end_training()
    return result


def function_of(name: str) -> Callable[[Kit], Any]:
    """The function of a standard case or of one for a model of the user's."""
    return _family(name.partition(".")[0])[name].function


def _named_case(name: str, kit: Kit) -> Any:
    return run_in_rank(function_of(name), kit)


def run_case(name: str, kit: Kit, world_size: int, *, timeout: float | None = None) -> list[Any]:
    """Run a case on fresh ranks, within ``timeout`` or the kit's; its results by rank. Raises what a rank raised."""
    __tracebackhide__ = True
    return spawn(_named_case, world_size, name, kit, timeout=kit.timeout if timeout is None else timeout)


def passed_together(kits: Mapping[str, Kit], world_size: int, folder: Path) -> frozenset[str]:
    """Run these cases in turn; the names of those that passed on every rank.

    Each case has accelerators and a process group of its own and must leave the process as it found it. The first
    failure ends the group, since its other ranks may be waiting for the one that failed; the cases that come after it
    have not passed then. Nothing is said about a failure: it is to be repeated on ranks of its own, for a clean report.

    Args:
        kits: a kit for each case, with a folder of its own.
        world_size: number of ranks.
        folder: an empty folder that all ranks see.
    """
    with contextlib.suppress(RankFailedError):  # Told by the same case on fresh ranks, whose word counts.
        timeout = sum(kit.timeout for kit in kits.values()) / 20 + 30
        spawn(_in_turn, world_size, dict(kits), str(folder), timeout=timeout)
    return frozenset.intersection(*(_passed(folder / f"passed-{rank}") for rank in range(world_size)))


def _passed(told: Path) -> frozenset[str]:
    return frozenset(told.read_text(encoding="utf-8").split() if told.exists() else ())


def _in_turn(kits: Mapping[str, Kit], folder: str) -> None:
    with (Path(folder) / f"passed-{os.environ['RANK']}").open("w", buffering=1, encoding="utf-8") as passed:
        for name, kit in kits.items():
            run_in_rank(function_of(name), kit)
            passed.write(f"{name}\n")
