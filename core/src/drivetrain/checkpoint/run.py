"""Implements ``save_state`` and ``load_state``: the contents of a run's checkpoints and the names of their folders."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch.utils.hooks import RemovableHandle

from drivetrain.backend import Backend, name_of
from drivetrain.checkpoint import owner
from drivetrain.checkpoint.folder import Naming
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.remote import Folder, folder_of
from drivetrain.distributed import call_monitor
from drivetrain.distributed.collectives import Ranks
from drivetrain.distributed.trees import attribute
from drivetrain.distributed.watchdog import MainProcessOnlyCall, check_collective, log_call
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.kwargs import ProjectConfiguration
from drivetrain.loop.accumulation import TrainingLoop
from drivetrain.loop.ema import EMA
from drivetrain.loop.model import plain_state_dict
from drivetrain.loop.prepare import Preparer

if TYPE_CHECKING:
    from drivetrain.checkpoint.saver import Saver, TrainingState

logger = logging.getLogger(__name__)

Hooks = OrderedDict[int, Callable[..., Any]]


@final
class RunCheckpoints:
    """The checkpoints of one accelerator.

    Args:
        backend: the started backend.
        trainer: its step count goes along.
        preparer: its models, optimizers and schedulers go along.
        loaders: prepared loaders, whose position goes along.
        project: folder, naming and limit.
    """

    def __init__(
        self,
        backend: Backend,
        trainer: TrainingLoop,
        preparer: Preparer,
        loaders: Sequence[Any],
        project: ProjectConfiguration,
    ) -> None:
        self._backend, self._trainer, self._preparer, self._loaders = backend, trainer, preparer, loaders
        self._project = project
        self.custom: list[Any] = []
        self.averages: list[EMA] = []
        self.save_hooks: Hooks = OrderedDict()
        self.load_hooks: Hooks = OrderedDict()
        self._run: str | None = None  # Which run's checkpoints these are; known from the first save or load on.
        self._begun_anew = True  # Until it goes on from one, or has saved one under a number.
        self._saver: Saver | None = None
        """Made by the first save: torch's checkpoints take a while to import."""
        self._num_loaders: dict[Folder, int] = {}
        """Counts the loaders that were prepared by the time of each checkpoint that this accelerator wrote."""
        topology = backend.topology
        # Where the main process holds all that the others hold, it could save without them.
        self._others_may_stay_away = backend.capabilities.replicated and topology.dp_size == topology.world_size
        lost = "the checkpoint is written without their random state"
        self._saving = MainProcessOnlyCall(topology, "save_state", lost)
        lost = "the model is written without waiting for them"
        self._exporting = MainProcessOnlyCall(topology, "save_model", lost)

    @staticmethod
    def hook(hooks: Hooks, function: Callable[..., Any]) -> RemovableHandle:
        """Register a function in one of the two tables."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = function
        return handle

    def register(self, objects: Sequence[Any]) -> None:
        """Register objects of the user's, which must have ``state_dict`` and ``load_state_dict``.

        A new average replaces those that do not fit their model any more.
        """
        averages = [each for each in objects if isinstance(each, EMA) and each not in self.averages]
        if averages:
            self.averages = [*(each for each in self.averages if each.fits), *averages]
        objects = [each for each in objects if not isinstance(each, EMA)]
        wrong = [
            type(each).__name__
            for each in objects
            if not (callable(attribute(each, "state_dict")) and callable(attribute(each, "load_state_dict")))
        ]
        if wrong:
            raise UsageError(
                f"{', '.join(wrong)} cannot be saved: it has no state_dict() and load_state_dict()",
                cure="Give it both methods, or save it yourself with accelerator.save.",
            )
        self.custom.extend(objects)

    def wait(self) -> Folder | None:
        """Wait for the background save; returns its folder, or ``None``. Raises when it failed."""
        return None if self._saver is None else self._saver.wait()

    def close(self) -> None:
        """Wait as well, and release the folders and the resources of background saves. Not collective."""
        if self._saver is not None:
            self._saver.close()
        owner.release()

    def save(self, output_dir: str | Folder | None, *, blocking: bool = True) -> Folder:
        """Write one checkpoint, or begin to. Collective over all ranks. Returns its folder.

        Where every rank holds everything, the main process may also be the only one that calls it, as scripts for other
        libraries do: it then writes what it has.

        Args:
            output_dir: the folder or its address; ``None`` takes the next one under automatic naming, which alone are
                counted.
            blocking: see ``Accelerator.save_state``.
        """
        if not blocking and not self._backend.capabilities.async_save:
            raise UnsupportedError(
                f"save_state(blocking=False) copies the state and writes it while training goes on, which "
                f"{name_of(self._backend)} does not support",
                cure="Leave blocking at True.",
            )
        self._catch_up()
        automatic = self._project.automatic_checkpoint_naming
        if self._run is None:
            self._run = secrets.token_hex(4)  # The main process's counts, as all of a checkpoint's info does.
        naming = self._naming() if automatic and output_dir is None else None
        path = folder_of(self._given(output_dir, "save_state")) if naming is None else naming.folder
        self._num_loaders[path.absolute()] = len(self._loaders)
        alone = not self._called_by_all(self._saving)
        if alone and self._backend.topology.rank != 0:
            # Too late: the main process has written without this rank.
            return path
        if alone:
            call_monitor.raise_if_apart()
        else:
            call_monitor.agree()  # nothing is written by ranks that are apart
        ranks = Ranks(self._backend, alone=alone)
        info: dict[str, Any] = {"run": self._run} if automatic else {}
        if naming is not None:
            claim = partial(naming.claim_next, begun_anew=self._begun_anew)
            naming.iteration, self._begun_anew = ranks.on_main("claim the folder", claim), False
            path, info["iteration"] = naming.path, naming.iteration
            self._num_loaders[path.absolute()] = len(self._loaders)
        if self._trainer.unfinished:
            logger.warning(
                "This checkpoint is saved inside an accumulation window: the gradients of its %d micro-batch(es) so "
                "far are not part of it. Save where accelerator.sync_gradients is true to lose nothing.",
                self._trainer.unfinished,
            )
        hooks = self._run_save_hooks if self.save_hooks else None
        prune = partial(naming.prune, path) if naming is not None else None
        if self._saver is None:
            from drivetrain.checkpoint.saver import Saver

            self._saver = Saver(self._backend)
        if blocking:
            self._saver.save(path, self._state(), info=info, hooks=hooks, alone=alone)
            if prune is not None:
                ranks.on_main("remove older checkpoints", prune)
        else:
            self._saver.start(path, self._state(), info=info, hooks=hooks, alone=alone, afterwards=prune)
        if naming is not None:
            # In the background too: the next save needs a name. One that fails leaves its number out.
            self._project.iteration = naming.iteration + 1
        call_monitor.saved(path)
        return path

    def load(self, input_dir: str | Folder | None, *, strict: bool = True) -> tuple[Folder, Manifest]:
        """Read one checkpoint, the newest when none is named. Collective over all ranks."""
        check_collective("load_state")
        self._catch_up()
        automatic = self._project.automatic_checkpoint_naming
        if input_dir is None and not automatic:
            self._given(input_dir, "load_state")
        naming = self._naming() if automatic else None
        ranks = Ranks(self._backend)
        if input_dir is None and naming is not None:
            path = ranks.on_main("find the newest checkpoint", naming.latest)
        else:
            path = folder_of(str(input_dir))
        before = self._num_loaders.get(path.absolute(), len(self._loaders))
        newer = frozenset(f"loader.{index}" for index in range(before, len(self._loaders)))
        state = replace(self._state(), newer=newer, ended=_ended)
        hooks = self._run_load_hooks if self.load_hooks else None
        from drivetrain.checkpoint.loader import load

        manifest = load(path, state, self._backend, strict=strict, hooks=hooks)
        self._trainer.step = int(state.counters["step"])
        self._trainer.abandon_windows()
        for optimizer in self._preparer.optimizers:
            optimizer.forget_writes()
        if naming:
            self._project.iteration = ranks.on_main("number its checkpoints", partial(naming.resumed, manifest))
            run = str(manifest.info.get("run", ""))
            if run or path.absolute().parent == naming.folder.absolute():  # Others' begin a run of their own here.
                self._run, self._begun_anew = run, False
        return path, manifest

    def _catch_up(self) -> None:
        """Synchronise an asynchronous device, and find out which steps it applied."""
        for optimizer in self._preparer.optimizers:
            optimizer.settle()
        self._backend.sync()

    def all_export(self) -> bool:
        """Whether all ranks are in this ``save_model``; else the main process writes without waiting for the others."""
        return self._called_by_all(self._exporting)

    def _called_by_all(self, call: MainProcessOnlyCall) -> bool:
        """Whether all ranks make this call; checked only where the main process could save without the others."""
        if not self._others_may_stay_away:
            check_collective(call.call)
            return True
        return call.called_by_all(self._trainer.step, log_call(call.call))

    def _run_save_hooks(self, folder: Path) -> set[int]:
        """Run the script's save hooks; returns the models that they removed from the list."""
        models = list(self._preparer.models)
        # As they are: a parameter of which a rank has a part may refuse to be detached.
        live = not self._backend.capabilities.replicated
        weights = [plain_state_dict(model, keep_vars=live) for model in models]
        kept = list(weights)
        for hook in list(self.save_hooks.values()):
            hook(models, kept, str(folder))
        return _taken_out(weights, kept)

    def _run_load_hooks(self, folder: Path) -> set[int]:
        """Run the script's load hooks; returns the models that they removed from the list."""
        models = list(self._preparer.models)
        kept = list(models)
        for hook in list(self.load_hooks.values()):
            hook(kept, str(folder))
        return _taken_out(models, kept)

    def _state(self) -> TrainingState:
        from drivetrain.checkpoint.saver import TrainingState

        objects: dict[str, Any] = {f"scheduler.{index}": each for index, each in enumerate(self._preparer.schedulers)}
        objects |= {f"loader.{index}": each for index, each in enumerate(self._loaders)}
        objects |= {f"custom.{index}": each for index, each in enumerate(self.custom)}
        if self._trainer.loose.parameters:
            objects["loose_parameters"] = self._trainer.loose
        return TrainingState(
            trainables=[*(model.trainable for model in self._trainer.models), *self.averages],
            averages=len(self.averages),
            objects=objects,
            counters={"step": self._trainer.step},
            remember={f"loader.{index}": each.remember for index, each in enumerate(self._loaders)},
            rng=True,
        )

    def _naming(self) -> Naming:
        folder = folder_of(self._given(self._project.project_dir, "automatic checkpoint naming")) / "checkpoints"
        return Naming(folder, self._project.total_limit, self._project.iteration, self._run or "")

    @staticmethod
    def _given(folder: Any, what: str) -> Any:
        if folder is None:
            raise UsageError(
                f"{what} needs a folder",
                cure="Pass one, or set project_dir with ProjectConfiguration(automatic_checkpoint_naming=True).",
            )
        return folder


def _ended(name: str, state: Any) -> bool:
    """Whether this is the state of a loader that is not in the middle of a pass, as those of evaluations are."""
    return name.startswith("loader.") and bool(state.get("finished") or not state.get("consumed"))


def _taken_out(before: Sequence[Any], after: Sequence[Any]) -> set[int]:
    """Indices of the objects that a hook removed from its list."""
    left = {id(each) for each in after}
    return {index for index, each in enumerate(before) if id(each) not in left}
