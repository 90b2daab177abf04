"""The ``Accelerator``: prepares models, optimizers and loaders, and trains, gathers and saves on the chosen backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.data.active import ActiveLoaders
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.kwargs import AutocastKwargs
from drivetrain.launch.environment import read_place
from drivetrain.registry import get_registry
from drivetrain.runtime import assembly, at_hand, last_call, lifetime, loading, sync_batch_norm, watchdog
from drivetrain.runtime.choosing import choose_backend
from drivetrain.runtime.current import set_current_backend
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.interruption import Interruption
from drivetrain.runtime.optimizer import PreparedOptimizer
from drivetrain.runtime.preparing import Preparer
from drivetrain.runtime.run_state import RunCheckpoints
from drivetrain.runtime.scheduler import PreparedScheduler
from drivetrain.runtime.services import RunServices
from drivetrain.runtime.train_step import TrainStepOutput, model_inputs, train_step
from drivetrain.runtime.training import Trainer
from drivetrain.runtime.windows import Items

if TYPE_CHECKING:
    from drivetrain.config import ResolvedConfig
    from drivetrain.kwargs import (
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        KwargsHandler,
        ProjectConfiguration,
    )


class Accelerator(RunServices):
    """One training loop on any backend. Collective over all ranks: it forms the process group.

    Every argument has Accelerate's name, meaning and default; what the script passes wins over the configuration that
    the launcher hands over. State lives on the object: several may coexist.

    Args:
        device_placement: move models and batches to :attr:`device`.
        split_batches: as in ``DataLoaderConfiguration``.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``; ``None`` takes the configuration's.
        gradient_accumulation_steps: micro-batches in a window; 1 takes the configuration's.
        cpu: stay on the CPU.
        dataloader_config: how loaders share out samples.
        rng_types: generators brought in step with the main process at each epoch: of ``"torch"``, ``"generator"``, ...
        log_with: experiment trackers, names or instances, or ``"all"``.
        project_dir: folder for checkpoints and logs.
        project_config: the same and more; wins over ``project_dir``.
        gradient_accumulation_plugin: in place of ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: schedulers move once per applied update; ``False``: at every call.
        kwargs_handlers: ``DistributedDataParallelKwargs``, ``GradScalerKwargs``, ...; one of each class.
        dynamo_backend: compile every model with this ``torch.compile`` backend.
        config: a configuration or its file; ``None`` takes the launcher's, else defaults.
        distributed_type: name of the backend; ``None`` takes the configuration's, else the best for the world.
        engine_arguments: ``<backend>_plugin``: that backend's section, as its model or a mapping; chooses it, too.
            ``parallelism_config``: sizes of the mesh, a ``ParallelismConfig``.
        step_scheduler_per_process: move schedulers once per process at each update, Accelerate's way.
        desync_watchdog: compare each collective call over the ranks before it is made, and raise where they are apart.
        save_on_interrupt: told to end (Ctrl-C, SIGTERM), save the run after the step and stop; as the next checkpoint
            with automatic naming, else as ``project_dir/interrupted``. The exit code is 75 after SIGTERM.
        sync_batch_norm: batch norms take their statistics over the batches of all data-parallel processes.
        count_items: weigh a mean loss by what it is a mean over (labels that count), as one big batch would. Reads that
            from the loss, and sums it over the ranks once a window.

    Raises:
        UsageError: arguments that contradict each other.
        BackendError: the backend is missing, broken or cannot run here.
        ConfigError: mistakes in the configuration.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        rng_types: list[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        config: ResolvedConfig | str | Path | None = None,
        distributed_type: str | None = None,
        step_scheduler_per_process: bool | None = None,
        desync_watchdog: bool | None = None,
        save_on_interrupt: bool | None = None,
        sync_batch_norm: bool | None = None,
        count_items: bool | None = None,
        **engine_arguments: Any,
    ) -> None:
        self._config = resolved = assembly.with_mesh(assembly.resolve_config(config), engine_arguments)
        self._choice = choice = choose_backend(resolved, distributed_type, read_place().world_size, engine_arguments)
        self._handlers = handlers = assembly.Handlers.of(kwargs_handlers)
        self._loader_config = assembly.loader_configuration(resolved, dataloader_config, split_batches)
        self._project = assembly.project_configuration(resolved, project_config, project_dir)
        accumulation = assembly.accumulation(
            resolved, choice, gradient_accumulation_steps, gradient_accumulation_plugin
        )
        saves_first = assembly.saves_on_interrupt(resolved, save_on_interrupt, self._project)
        self.device_placement = device_placement
        self.rng_types = rng_types if rng_types is not None else ["generator"]
        self._info = choice.info
        self.backend = assembly.start_backend(
            choice,
            resolved,
            handlers,
            mixed_precision=mixed_precision,
            cpu=cpu,
            place_on_device=device_placement,
            sync_batch_norm=sync_batch_norm,
        )
        set_current_backend(self.backend, self._info.name)
        assembly.name_this_process(self.backend)
        self._closed = False
        self._last_norm: Tensor | None = None
        self._debug = resolved.config.debug
        self._active = ActiveLoaders()
        self._dataloaders: list[Any] = []
        self._loading: loading.LoadingContext | None = None
        self._flag = False
        registry = get_registry()
        self._trainer = Trainer(
            self.backend,
            accumulation.num_steps,
            self._active.state,
            sync_with_dataloader=accumulation.sync_with_dataloader,
            sync_each_batch=accumulation.sync_each_batch,
            count_items=resolved.config.count_items if count_items is None else count_items,
            on_step=self._step_ended if saves_first or registry.listens("step_ended") else None,
        )
        per_process = resolved.config.scheduler.step_per_process
        if step_scheduler_per_process is not None:
            per_process = step_scheduler_per_process
        self._preparer = Preparer(
            self.backend,
            self._trainer,
            step_with_optimizer=step_scheduler_with_optimizer,
            moves_per_step=self.backend.topology.dp_size if per_process else 1,
            compile_options={"backend": dynamo_backend.lower()} if dynamo_backend else None,
        )
        self._checkpoints = RunCheckpoints(
            self.backend, self._trainer, self._preparer, self._dataloaders, self._project
        )
        self.gradient_state = GradientState(self._trainer, self._active)
        self._trackers = assembly.trackers(resolved, log_with, self._project, self.backend)
        last_call.use_launchers_file()
        watched = resolved.config.desync_watchdog if desync_watchdog is None else desync_watchdog
        self._watchdog = watchdog.watch(self.backend, self._active) if watched else None
        self._interruption = None
        if saves_first:
            topology = self.backend.topology
            self._interruption = Interruption(topology, self._active, self._save_interrupted, self.end_training)
        at_hand.remember(self)
        lifetime.at_exit(self._close)
        if registry.listens("failed"):
            lifetime.on_failure(self._failed)

    # ---- prepare ------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers ready, in the order given; one argument returns one object.

        Collective over all ranks. Objects of other kinds come back as they are.

        Args:
            args: what to prepare. An optimizer is best prepared together with its model.
            device_placement: for each argument, whether it is moved to the device; for loaders only.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise UsageError(f"device_placement has {len(device_placement)} entries for {len(args)} objects")
        placement = {id(each): place for each, place in zip(args, device_placement or (), strict=False)}

        def load(each: Any) -> Any:
            return self._prepare_loader(each, placement.get(id(each))) if loading.is_loader(each) else each

        # Loaders first, since an engine may have to know their batch size when it prepares the model.
        loaded = [load(each) for each in args]
        self._meet_batches()
        prepared = self._preparer.prepare(loaded)
        registry = get_registry()
        if registry.listens("prepared"):
            registry.notify("prepared", accelerator=self, objects=tuple(prepared))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model alone; ``evaluation_mode`` leaves the gradient machinery out. Collective over all ranks."""
        if device_placement is not None and device_placement != self.device_placement:
            raise UnsupportedError(
                "placement is decided for all models at once",
                cure="Pass device_placement to Accelerator(...).",
            )
        return self._preparer.model(model, training=not evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer whose model is prepared already, or will be. State follows its parameters' device."""
        return self._preparer.optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare a scheduler after its optimizer."""
        return self._preparer.scheduler(scheduler)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader: each data-parallel rank reads its share. Collective over all ranks at the first one."""
        prepared = self._prepare_loader(data_loader, device_placement, slice_fn_for_dispatch)
        self._meet_batches()
        return prepared

    def _prepare_loader(self, data_loader: Any, device_placement: bool | None, slice_fn: Any = None) -> Any:
        place = self.device_placement if device_placement is None else device_placement
        prepared = loading.prepare_data_loader(
            data_loader, self._context(), put_on_device=place, slice_fn_for_dispatch=slice_fn
        )
        if not any(prepared is each for each in self._dataloaders):
            self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The same loader, its next iteration starting at batch ``num_batches`` of the epoch (an absolute number)."""
        return loading.skip_first_batches(dataloader, num_batches)

    def init_empty_weights(self) -> AbstractContextManager[Any]:
        """Construct a model in here as its backend wants it: see :meth:`drivetrain.api.Backend.init_context`."""
        context: AbstractContextManager[Any] = self.backend.init_context()
        return context

    # ---- the step -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, num_items: Items | None = None, **kwargs: Any) -> None:
        """Add this micro-batch's gradients. Collective over data-parallel ranks where gradients are reduced.

        After the last backward of a window each gradient is that of
        *(sum over data-parallel ranks and micro-batches of the loss) / denominator*.

        Args:
            loss: 0-d: a mean, or with ``num_items`` a sum.
            num_items: how many items (tokens that count, samples) ``loss`` is a sum over on this rank. The denominator
                is then their number over all ranks and micro-batches, so that ragged batches weigh as one big batch
                would. Without it the mean of each batch weighs by the samples that the loader says it has, or, with
                ``count_items``, by the items that the loss is a mean over.
            kwargs: for ``loss.backward``, when no model was prepared.

        Raises:
            UsageError: with ``count_items``, a loss that does not say what it is a mean over.
        """
        self._trainer.backward(loss, num_items, **kwargs)

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """One micro-batch: gradients are reduced, and optimizers step, only where a window ends.

        A window ends after ``gradient_accumulation_steps`` micro-batches or with the last one of the loader's last
        batch; a short window is averaged over the micro-batches that it has.

        Args:
            models: whose window this is, each set of models having its own; none means all prepared ones.
        """
        return self._trainer.accumulate([self._preparer.record_of(model) for model in models])

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Backwards in here stay on this rank until a later one outside. For windows of your own making."""
        return self._preparer.record_of(model).no_sync()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip gradients to a global norm, where a window ends. Collective where parameters are sharded.

        Returns:
            The norm before clipping over all mesh axes: a plain 0-d tensor, the same on every rank. A non-finite one
            makes the step skip. Inside an open window nothing is clipped, and it is the norm of the window before (0
            in the first), since gradients that still miss micro-batches have none that ranks agree on.
        """
        if self.sync_gradients:
            norm = self._trainer.clip_grad_norm(_tensors(parameters), float(max_norm), float(norm_type))
            self._last_norm = norm
        elif self._last_norm is None:
            self._last_norm = torch.zeros((), device=self.device)
        return self._last_norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp gradient elements to ``[-clip_value, clip_value]``, where a window ends."""
        if self.sync_gradients:
            self._trainer.clip_grad_value(_tensors(parameters), float(clip_value))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take the loss scale out of gradients before the step does (fp16); clipping does it by itself."""
        chosen = self._preparer.optimizers if optimizer is None else [optimizer]
        for each in chosen:
            if not isinstance(each, PreparedOptimizer):
                raise UsageError("this optimizer was not prepared", cure="Pass what prepare returned.")
            each.unscale()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """The last step that was due, of any optimizer, left the parameters untouched."""
        return any(optimizer.step_was_skipped for optimizer in self._preparer.optimizers)

    def train_step(
        self,
        model: Any,
        batches: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        num_items: Callable[[Any], Items] | None = None,
        inputs: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] = model_inputs,
        max_norm: float | None = None,
    ) -> TrainStepOutput:
        """One whole optimizer step as a function: forward, backward, clip, step, zero. Collective over all ranks.

        The explicit form of the loop, the same on every backend; a pipelined one needs it where its deferred output
        cannot record what a script does. Schedulers are the script's to move.

        Args:
            model: a prepared model whose optimizer is prepared too.
            batches: one batch, or a list of them: the micro-batches of one window.
            loss_fn: ``loss_fn(model_output, batch)``: a 0-d mean, or with ``num_items`` a sum.
            num_items: ``num_items(batch)``: what the loss of a batch is a sum over.
            inputs: ``inputs(batch)`` -> positional and keyword arguments of the model. By default a mapping is given as
                keywords, of a tuple or list the first element, anything else as it is.
            max_norm: clip to this global norm.
        """
        record = self._preparer.record_of(model)
        optimizers = self._preparer.optimizers_of(record)
        return train_step(
            self._trainer, record, optimizers, batches, loss_fn, num_items=num_items, inputs=inputs, max_norm=max_norm
        )

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Compute in here as a model's forward does; for a loss that is worth it."""
        handler = autocast_handler or self._handlers.of_type(AutocastKwargs)
        context: AbstractContextManager[Any] = self.backend.autocast(handler.enabled)
        return context

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Ranks may run out of batches at different times in here.

        Args:
            joinables: the prepared models that train in here.
            even_batches: override the loaders' setting meanwhile.
        """
        trainables = [self._preparer.record_of(each).trainable for each in joinables if isinstance(each, nn.Module)]
        sync_batch_norm.refuse_uneven(trainable.module for trainable in trainables)
        even = loading.even_batches_as(self._dataloaders, even_batches)
        with watchdog.unwatched(), even, self._trainer.uneven(), self.backend.join(trainables):
            yield


def _tensors(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
