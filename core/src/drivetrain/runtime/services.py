"""What an accelerator does beside the training step: communication, checkpoints, trackers, profiling, the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain import checkpoint
from drivetrain.checkpoint.ranks import Ranks
from drivetrain.errors import UsageError
from drivetrain.kwargs import ProfileKwargs
from drivetrain.registry import get_registry
from drivetrain.runtime import assembly, loading, memory, nested
from drivetrain.runtime.at_hand import extract_model_from_parallel
from drivetrain.runtime.current import forget_backend
from drivetrain.runtime.facts import RunFacts
from drivetrain.runtime.last_call import note
from drivetrain.runtime.model import record_of
from drivetrain.runtime.portable import tied_names
from drivetrain.runtime.profile import profile
from drivetrain.runtime.run_state import RemovableHandle, RunCheckpoints
from drivetrain.runtime.watchdog import meet, stop_watching

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from drivetrain.data.active import ActiveLoaders
    from drivetrain.runtime.interruption import Interruption
    from drivetrain.runtime.preparing import Preparer
    from drivetrain.runtime.watchdog import Watchdog
    from drivetrain.tracking import GeneralTracker, Trackers


class RunServices(RunFacts):
    """Services of one run. Methods marked collective must be called by every rank."""

    _preparer: Preparer
    _checkpoints: RunCheckpoints
    _trackers: Trackers
    _watchdog: Watchdog | None
    _interruption: Interruption | None
    _handlers: assembly.Handlers
    _dataloaders: list[Any]
    _loading: loading.LoadingContext | None
    _active: ActiveLoaders
    device_placement: bool
    rng_types: list[str]
    _flag: bool
    _closed: bool

    def _context(self) -> loading.LoadingContext:
        if self._loading is None:
            self._loading = loading.LoadingContext(
                backend=self.backend,
                config=self._loader_config,
                base_seed=assembly.data_seed(self._loader_config, self.backend),
                put_on_device=self.device_placement,
                active=self._active,
                rng_types=tuple(self.rng_types),
                interruption=self._interruption,
            )
        return self._loading

    # ---- communication --------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor of a tree along dim 0 over data-parallel ranks; 0-d becomes 1-d. Collective."""
        return nested.gather(tensor, self.backend, debug=self._debug)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Every sample of the current global batch exactly once, in order: padding and repeats cut. Collective.

        Args:
            input_data: a tree of tensors whose dim 0 is this rank's batch, or objects.
            use_gather_object: gather pickled objects: lists are joined, anything else becomes one entry a rank.

        Raises:
            UsageError: rows that cannot be told from padding.
        """
        meet("gather_for_metrics")
        return loading.gather_for_metrics(input_data, self._context(), use_gather_object=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"none"`` of each tensor of a tree over data-parallel ranks.

        Collective. Raises :class:`UsageError` for any other word.
        """
        return nested.reduce(tensor, reduction, scale, self.backend, debug=self._debug)  # type: ignore[arg-type]

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Bring each tensor of a tree to the largest size along ``dim`` over data-parallel ranks. Collective."""
        return nested.pad_across_processes(tensor, dim, pad_index, pad_first, self.backend, debug=self._debug)

    def set_trigger(self) -> None:
        """Raise a flag that every rank sees at the next :meth:`check_trigger`."""
        self._flag = True

    def check_trigger(self) -> bool:
        """Whether any rank has raised its flag since the last call; lowers it. Collective."""
        meet("check_trigger")
        topology = self.backend.topology
        if topology.dp_size == topology.world_size:
            flag = torch.tensor([int(self._flag)], device=self.device)
            seen = bool(self.backend.reduce(flag, "max").item())
        else:
            seen = any(Ranks(self.backend).gather(self._flag))
        self._flag = False if seen else self._flag
        return seen

    # Read by code in the manner of a trainer class; lists of their own, since a change would not be noticed.
    @property
    def _models(self) -> list[Any]:
        return list(self._preparer.models)

    @property
    def _optimizers(self) -> list[Any]:
        return list(self._preparer.optimizers)

    @property
    def _schedulers(self) -> list[Any]:
        return list(self._preparer.schedulers)

    @property
    def _custom_objects(self) -> list[Any]:
        return list(self._checkpoints.custom)

    # ---- weights and state ------------------------------------------------------------------------------------------

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model itself: what ``prepare`` returns is the user's own object.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: accepted either way: there is no such wrapper.
            keep_torch_compile: keep the ``torch.compile`` wrapper that the script put around it.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Full weights under original names. Collective where parameters are sharded.

        Returns:
            On every rank if the backend replicates parameters, else on the main process (CPU) and empty elsewhere.
        """
        record = record_of(model)
        if record is None:
            state: dict[str, Any] = model.state_dict()
            return state
        if self.backend.capabilities.replicated:
            note("get_state_dict")
            return dict(record.trainable.full_state_dict())
        meet("get_state_dict")
        # Every rank walks through all of it, since gathering is collective, but only the main process keeps it.
        tied = tied_names(record.trainable.module)
        whole: dict[str, Any] = {}
        for name, tensor in record.trainable.full_state_dict():
            if self.is_main_process:
                whole[name] = whole[tied[name]] if tied.get(name) in whole else tensor.cpu()
        return whole

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Save an object on the main process (on each machine's first with ``save_on_each_node``). Not collective."""
        writes = self.is_local_main_process if self._project.save_on_each_node else self.is_main_process
        if writes:
            checkpoint.save_object(obj, f, safe_serialization)

    def save_model(
        self,
        model: Any,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write weights as safetensors that Transformers loads: one file, or several with an index.

        Collective, one tensor being gathered at a time. Where each rank holds everything, the main process may call it
        alone; it waits for the others for a while. Raises :class:`CheckpointError` when the folder cannot be written.
        """
        self.backend.sync()
        record = record_of(model)
        module = model if record is None else record.trainable.module
        named = model.state_dict().items() if record is None else record.trainable.full_state_dict()
        checkpoint.export_model(
            iter(named),
            save_directory,
            max_shard_size=max_shard_size,
            safe_serialization=safe_serialization,
            is_main=self.is_main_process,
            tied=tied_names(module),
            backend=self.backend if self._checkpoints.all_export() else None,
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects with the run; they have ``state_dict`` and ``load_state_dict``."""
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook(models, weights, folder)`` before each save; a model whose weights it takes out is not saved."""
        return self._checkpoints.hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook(models, folder)`` before each load of files that are whole; a model it takes out is not loaded."""
        return self._checkpoints.hook(self._checkpoints.load_hooks, hook)

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save the whole run: models, optimizers, schedulers, scaler, data position, RNG, registered objects.

        Collective. The folder is complete or absent, whatever happens; it loads under any backend and world size. Where
        each rank holds everything, the main process may call it alone, as scripts written for replicas do: it waits for
        the others for a while, says that their random state is missing, and writes.

        Args:
            output_dir: the folder; ``None`` takes the next number under ``automatic_checkpoint_naming``. It belongs to
                this run until :meth:`end_training`.
            safe_serialization: nothing in a checkpoint is a pickle; ``False`` warns.
            blocking: ``False`` returns once the state is copied into host memory, and a thread writes it. The next
                :meth:`save_state`, :meth:`load_state`, :meth:`wait_for_checkpoint` or :meth:`end_training` waits for it
                and raises if it failed. Hooks run, and observers are told that it is saved, in none but this thread.
            save_model_func_kwargs: none has a meaning here; any raises.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: this save failed, or the one before did in the background; then this one was not begun. Or
                another living run saves in the folder; nothing was changed then.
            UnsupportedError: the backend cannot save with ``blocking=False``.
        """
        if not safe_serialization:
            logger.warning("safe_serialization=False changes nothing: a checkpoint holds no pickles.")
        _refuse("save_state", save_model_func_kwargs)
        self.wait_for_checkpoint()
        path = self._checkpoints.save(output_dir, blocking=blocking)
        if blocking:
            self._tell("checkpoint_saved", path=path)
        return str(path)

    def _save_interrupted(self) -> str:
        """Save a run that was told to end. Collective."""
        project = self._project
        folder = None if project.automatic_checkpoint_naming else Path(str(project.project_dir), "interrupted")
        return self.save_state(folder)

    def wait_for_checkpoint(self) -> None:
        """Wait until what ``save_state(..., blocking=False)`` began is complete; at once when nothing runs.

        Every rank's part must be written, so all ranks must have begun the same saves.

        Raises:
            CheckpointError: it failed, on every rank; older checkpoints are untouched.
        """
        path = self._checkpoints.wait()
        if path is not None:
            self._tell("checkpoint_saved", path=path)

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Take up a saved run after ``prepare``; loaders continue where they were. Collective; changes all or nothing.

        Args:
            input_dir: the folder; ``None`` takes the newest complete one under automatic naming.
            load_kwargs: none has a meaning here: ``map_location`` warns, any other raises, as any
                ``load_model_func_kwargs``.
            strict: raise when names of the model and the checkpoint differ.

        Returns:
            The folder that was loaded.

        Raises:
            CheckpointError: not found, damaged, or not of this model.
        """
        others = {**(load_kwargs or {}), **load_model_func_kwargs}
        if others.pop("map_location", None) is not None:
            logger.warning("map_location changes nothing: each tensor is read to where it is used.")
        _refuse("load_state", others)
        self.wait_for_checkpoint()
        path, _ = self._checkpoints.load(input_dir, strict=strict)
        self._tell("checkpoint_loaded", path=path)
        return str(path)

    # ---- trackers and profiling -------------------------------------------------------------------------------------

    @property
    def log_with(self) -> list[str]:
        """Names of the trackers that were asked for."""
        return self._trackers.names

    @property
    def trackers(self) -> list[Any]:
        """The experiment trackers in use."""
        return list(self._trackers.running)

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers named in ``log_with``, on the main process."""
        self._trackers.init(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> GeneralTracker | Any:
        """One tracker; ``unwrap`` gives the library's own object."""
        return self._trackers.get(name, unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Give values to every tracker, on the main process."""
        self._trackers.log(values, step, log_kwargs)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Profile a block with ``torch.profiler``, one trace per rank."""
        return profile(profile_handler or self._handlers.of_type(ProfileKwargs), self.backend.topology)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything prepared so that it can be collected; returns one ``None`` for each object."""
        self._trainer.release()
        self._preparer.clear()
        self._dataloaders.clear()
        self._checkpoints.averages.clear()
        return memory.release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """As :meth:`free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Finish the trackers and leave the process group in order. Collective over all ranks; may be called twice.

        Waits for a save in the background. Raises :class:`CheckpointError` when that failed, after everything else.
        """
        if self._closed:
            return
        meet("end_training")
        try:
            self.wait_for_checkpoint()
        finally:
            self._trackers.finish()
            self._trainer.release()
            self.backend.barrier()
            self._close()

    def _close(self) -> None:
        """Let go of the engines, then of the process group. Not collective: the script may have failed."""
        if self._closed:
            return
        self._closed = True
        stop_watching(self._watchdog)
        if self._interruption is not None:
            self._interruption.close()
        self._checkpoints.close()
        self._tell("closed")
        self._trainer.release()
        forget_backend(self.backend)
        self.backend.stop()

    def _tell(self, event: str, **details: Any) -> None:
        registry = get_registry()
        if registry.listens(event):
            registry.notify(event, accelerator=self, **details)

    def _step_ended(self, step: int, skipped: bool) -> None:
        self._tell("step_ended", step=step, skipped=skipped)
        if self._interruption is not None:
            self._interruption.stepped()

    def _failed(self, error: BaseException) -> None:
        get_registry().notify("failed", accelerator=self, error=error)


def _refuse(call: str, given: dict[str, Any]) -> None:
    """Arguments that Accelerate hands to the save or load function of one engine."""
    if given:
        raise UsageError(
            f"{call} does not know {', '.join(sorted(given))}: every backend writes and reads one format",
            cure="Leave it out.",
        )
