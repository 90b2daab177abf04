"""Implements the ``Accelerator``: prepares, trains, gathers and saves on the chosen backend."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain import checkpoint, run_record, run_setup
from drivetrain.backend import FileConfiguredBackend
from drivetrain.backends.portable import tied_names
from drivetrain.checkpoint.manifest import MANIFEST
from drivetrain.checkpoint.run import RunCheckpoints
from drivetrain.data import metrics
from drivetrain.data.active import ActiveLoaders
from drivetrain.data.kept_batches import KeptBatches
from drivetrain.data.loader import (
    LoadingContext,
    compare_with_other_ranks,
    even_batches_as,
    is_loader,
    prepare_data_loader,
    skip_first_batches,
)
from drivetrain.distributed import call_monitor, current, memory, nested, watchdog
from drivetrain.distributed.collectives import Ranks
from drivetrain.distributed.process_control import ProcessControl
from drivetrain.distributed.watchdog import check_collective, log_call, stop_watching
from drivetrain.distributed_type import DistributedType
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.kwargs import AutocastKwargs, ProfileKwargs
from drivetrain.launch.environment import read_process_info
from drivetrain.loop import batch_norm
from drivetrain.loop.accumulation import TrainingLoop
from drivetrain.loop.gradient_state import GradientState
from drivetrain.loop.interruption import Interruption
from drivetrain.loop.model import prepared_model
from drivetrain.loop.optimizer import PreparedOptimizer, PreparedScheduler
from drivetrain.loop.prepare import Preparer
from drivetrain.loop.profile import profile
from drivetrain.loop.train_step import TrainStepOutput, model_inputs, train_step
from drivetrain.loop.window import Items
from drivetrain.loop.wrappers import extract_model_from_parallel
from drivetrain.parameter_names import original_name
from drivetrain.registry import get_registry
from drivetrain.run_setup import choose_backend, section_at_hand
from drivetrain.tracking import Trackers

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from drivetrain.config import ResolvedConfig
    from drivetrain.kwargs import (
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        KwargsHandler,
        ProjectConfiguration,
    )
    from drivetrain.tracking import GeneralTracker

logger = logging.getLogger(__name__)


class Accelerator(ProcessControl):
    """Runs one training loop on any backend. Construction is collective over all ranks: it forms the process group.

    Every argument has Accelerate's name, meaning and default; what the script passes wins over the configuration that
    the launcher hands over. State lives on the object: several may coexist.

    Args:
        device_placement: move models and batches to :attr:`device`.
        split_batches: as in ``DataLoaderConfiguration``.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``; ``None`` takes the configuration's.
        gradient_accumulation_steps: micro-batches in a window; 1 takes the configuration's.
        cpu: stay on the CPU.
        dataloader_config: how loaders share out samples.
        rng_types: generators synchronised with the main process at each epoch: of ``"torch"``, ``"generator"``, ...
        log_with: experiment trackers, names or instances, or ``"all"``.
        project_dir: folder for checkpoints and logs; an address of fsspec is for checkpoints alone.
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
        desync_watchdog: compare each collective call over the ranks before it is made, and raise where they differ.
        save_on_interrupt: on Ctrl-C or SIGTERM, save the run after the step and stop; as the next checkpoint
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
        run_setup.shorten_tracebacks()
        self._config = resolved = run_setup.with_mesh(run_setup.resolve_config(config), engine_arguments)
        run_setup.shorten_tracebacks(debug=resolved.config.debug)
        process = read_process_info()
        self._choice = choice = choose_backend(resolved, distributed_type, process.world_size, engine_arguments)
        self._handlers = handlers = run_setup.Handlers.of(kwargs_handlers)
        self._loader_config = run_setup.loader_configuration(resolved, dataloader_config, split_batches)
        self._project = run_setup.project_configuration(resolved, project_config, project_dir)
        accumulation = run_setup.accumulation(
            resolved, choice, gradient_accumulation_steps, gradient_accumulation_plugin
        )
        saves_first = run_setup.saves_on_interrupt(resolved, save_on_interrupt, self._project)
        self.device_placement = device_placement
        self.rng_types = rng_types if rng_types is not None else ["generator"]
        self._info = choice.info
        self.backend = run_setup.start_backend(
            choice,
            resolved,
            handlers,
            process,
            mixed_precision=mixed_precision,
            cpu=cpu,
            place_on_device=device_placement,
            sync_batch_norm=sync_batch_norm,
        )
        super().__init__(self.backend)
        current.set_current_backend(self.backend, self._info.name)
        run_setup.name_this_process(self.backend)
        self._closed = False
        self._debug = resolved.config.debug
        self._active = ActiveLoaders(KeptBatches())
        self._dataloaders: list[Any] = []
        self._flag = False
        registry = get_registry()
        checks = resolved.config.plan.check
        self._record: Any = run_record.asked_for()
        self._loop = TrainingLoop(
            self.backend,
            accumulation.num_steps,
            self._active.state,
            sync_with_dataloader=accumulation.sync_with_dataloader,
            sync_each_batch=accumulation.sync_each_batch,
            count_items=resolved.config.count_items if count_items is None else count_items,
            on_step=self._step_ended
            if self._record or saves_first or checks or registry.listens("step_ended")
            else None,
            place=self._active.place,
            kept=self._active.kept,
            num_samples=self._active.num_samples,
        )
        per_process = resolved.config.scheduler.step_per_process
        if step_scheduler_per_process is not None:
            per_process = step_scheduler_per_process
        if self._record is not None:
            self._record.begin(self)
            self._active.record = self._loop.record = self._record
        self._preparer = Preparer(
            self.backend,
            self._loop,
            step_with_optimizer=step_scheduler_with_optimizer,
            # As in Accelerate: with split_batches a script's batch is the global one, and so is its number of steps.
            moves_per_step=self.backend.topology.dp_size if per_process and not self.split_batches else 1,
            compile_options={"backend": dynamo_backend.lower()} if dynamo_backend else None,
        )
        self._checkpoints = RunCheckpoints(
            self.backend, self._loop, self._preparer, self._dataloaders, self._project
        )
        self.gradient_state = GradientState(self._loop, self._active)
        named = log_with if log_with is not None else (resolved.config.log_with or None)
        self._trackers = Trackers(
            named, logging_dir=self._project.logging_dir, is_main_process=self._topology.rank == 0
        )
        watchdog.use_launcher_log()
        watched = resolved.config.desync_watchdog if desync_watchdog is None else desync_watchdog
        self._watchdog = watchdog.watch(self.backend, self._active.batch_index) if watched else None
        self._monitor = run_setup.start_monitor(self.backend, resolved.config.rank_monitor, compares=not watched)
        self._interruption = None
        self._plan_check: Any = None
        if saves_first:
            self._interruption = Interruption(
                self._topology, self._active, self._save_interrupted, self.end_training
            )
        current.remember(self)
        run_setup.at_exit(self._close)
        if registry.listens("failed"):
            run_setup.on_failure(self._failed)
        if checks:
            self._plan_check = run_setup.plan_check(self)

    # ---- prepare ------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers ready, in the order given; one argument returns one object.

        Collective over all ranks. Objects of other kinds come back as they are.

        Args:
            args: what to prepare. An optimizer is best prepared together with its model.
            device_placement: for each argument, whether it is moved to the device; for loaders only.

        Raises:
            UsageError: on every rank and before anything is changed: ranks hold parts of a loader's data, which would
                be shared out a second time, or make a loader with different settings.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise UsageError(
                f"prepare was given {len(args)} objects and a device_placement of {len(device_placement)} entries",
                cure="Pass one true or false for each object, or leave device_placement out.",
            )
        placement = {id(each): place for each, place in zip(args, device_placement or (), strict=False)}

        def load(each: Any) -> Any:
            return self._prepare_loader(each, placement.get(id(each))) if is_loader(each) else each

        compare_with_other_ranks(filter(is_loader, args), self._loader_config, self.backend)
        # Loaders first, since an engine may have to know their batch size when it prepares the model.
        loaded = [load(each) for each in args]
        self._set_batches()
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
                f"prepare_model was given device_placement={device_placement}, and the accelerator has "
                f"device_placement={self.device_placement} for all models",
                cure=f"Leave it out here, or write Accelerator(device_placement={device_placement}).",
            )
        prepared = self._preparer.model(model, training=not evaluation_mode)
        self._loop.find_loose()
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer whose model is prepared already, or will be. State follows its parameters' device.

        Collective over all ranks where it holds parameters of no model, which are compared between them.
        """
        prepared = self._preparer.optimizer(optimizer)
        self._loop.find_loose()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare a scheduler after its optimizer."""
        return self._preparer.scheduler(scheduler)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader: each data-parallel rank reads its share. Collective over all ranks.

        Raises:
            UsageError: on every rank: ranks hold parts of the data, or make loaders with different settings.
        """
        if is_loader(data_loader):
            compare_with_other_ranks([data_loader], self._loader_config, self.backend)
        prepared = self._prepare_loader(data_loader, device_placement, slice_fn_for_dispatch)
        self._set_batches()
        return prepared

    def _prepare_loader(self, data_loader: Any, device_placement: bool | None, slice_fn: Any = None) -> Any:
        place = self.device_placement if device_placement is None else device_placement
        prepared = prepare_data_loader(
            data_loader, self._context, put_on_device=place, slice_fn_for_dispatch=slice_fn
        )
        if not any(prepared is each for each in self._dataloaders):
            self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The same loader, its next iteration starting at batch ``num_batches`` of the epoch (an absolute number)."""
        return skip_first_batches(dataloader, num_batches)

    def init_empty_weights(self) -> AbstractContextManager[Any]:
        """Context in which to construct a model for its backend: see :meth:`drivetrain.api.Backend.init_context`."""
        context: AbstractContextManager[Any] = self.backend.init_context()
        return context

    # ---- training step ------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        num_items: Items | None = None,
        *,
        denominator: float | Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Add this micro-batch's gradients. Collective over data-parallel ranks where gradients are reduced.

        After the last backward of a window each gradient is that of
        *(sum over data-parallel ranks and micro-batches of the loss) / denominator*.

        Args:
            loss: 0-d: a mean, or with ``num_items`` a sum.
            num_items: how many items (tokens that count, samples) ``loss`` is a sum over on this rank. The denominator
                is then their number over all ranks and micro-batches, so that ragged batches weigh as one big batch
                would. Without it the mean of each batch weighs by the samples that the loader says it has, or, with
                ``count_items``, by the items that the loss is a mean over.
            denominator: the denominator itself, the same on every rank, where the script knows it: the number of items
                of the whole window, or of data-parallel processes for losses that it weighs by itself. ``loss`` is then
                taken as it is, by no weight of the loader's, and nothing is communicated. With all losses of a window
                or with none.
            kwargs: for ``loss.backward``, when no model was prepared. With one ``retain_graph``, where another loss of
                the same forward follows, and ``gradient``, the weights of a loss that is no single number, as in torch;
                without ``num_items`` and ``denominator`` they add up to 1.

        Raises:
            UnsupportedError: another of ``kwargs`` with a prepared model, such as ``create_graph``; or ``retain_graph``
                under an engine that runs one backward for each forward (ZeRO 3, pipelines).
            UsageError: with ``count_items``, a loss that does not say what it is a mean over; ``denominator`` beside
                ``num_items`` or losses without it.
        """
        self._loop.backward(loss, num_items, denominator, **kwargs)

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """One micro-batch: gradients are reduced, and optimizers step, only where a window ends.

        A window ends after ``gradient_accumulation_steps`` micro-batches or with the last one of the loader's last
        batch; a short window is averaged over the micro-batches that it has.

        Args:
            models: whose window this is, each set of models having its own; none means all prepared ones.
        """
        return self._loop.accumulate(tuple(map(self._preparer.find, models)))

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Context in which backward does not reduce gradients; a later one outside does. For manual accumulation."""
        return self._preparer.find(model).no_sync()

    def trigger_sync_in_backward(self, model: Any) -> AbstractContextManager[None]:
        """Context in which backward reduces gradients, also inside :meth:`no_sync` and before a window ends."""
        return self._preparer.find(model).no_sync(held=False)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip gradients to a global norm, where a window ends. Collective where parameters are sharded.

        Returns:
            The norm before clipping over all mesh axes: a plain 0-d tensor, the same on every rank. A non-finite one
            makes the step skip. Inside an open window nothing is clipped, and it is the norm of the window before (0
            in the first), since gradients that still miss micro-batches have none that ranks agree on.
        """
        return self._loop.clip_grad_norm(parameters, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp gradient elements to ``[-clip_value, clip_value]``, where a window ends."""
        self._loop.clip_grad_value(parameters, float(clip_value))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take the loss scale out of gradients before the step does (fp16); clipping does it by itself."""
        chosen = self._preparer.optimizers if optimizer is None else [optimizer]
        for each in chosen:
            if not isinstance(each, PreparedOptimizer):
                raise UsageError(
                    f"unscale_gradients was given a {type(each).__name__} that is not prepared",
                    cure="Pass the optimizer that accelerator.prepare returned, or no optimizer for all of them.",
                )
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
        prepared = self._preparer.find(model)
        optimizers = [optimizer for optimizer in self._preparer.optimizers if prepared in optimizer.models]
        return train_step(
            self._loop, prepared, optimizers, batches, loss_fn, num_items=num_items, inputs=inputs, max_norm=max_norm
        )

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Context that computes in the precision of a model's forward, for example for an expensive loss."""
        handler = autocast_handler or self._handlers.of_type(AutocastKwargs)
        context: AbstractContextManager[Any] = self.backend.autocast(handler.enabled)
        return context

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Context in which ranks may run out of batches at different times.

        Args:
            joinables: the prepared models that train in the context.
            even_batches: override the loaders' setting meanwhile.
        """
        trainables = [self._preparer.find(each).trainable for each in joinables if isinstance(each, nn.Module)]
        batch_norm.refuse_uneven(trainable.module for trainable in trainables)
        even = even_batches_as(self._dataloaders, even_batches)
        with watchdog.unwatched(), even, self._loop.uneven(), self.backend.join(trainables):
            yield

    # ---- communication --------------------------------------------------------------------------------------------

    def gather(self, tensor: Any, *, gradients: bool = False) -> Any:
        """Concatenate each tensor of a tree along dim 0 over data-parallel ranks; 0-d becomes 1-d. Collective.

        Args:
            tensor: shape ``(n, ...)`` each, of which ``(dp_size * n, ...)`` come back, the same on every rank.
            gradients: keep the graph, for a loss that compares rows (contrastive losses), which each rank computes of
                all rows: ``backward`` sends each row's gradient to the rank that has it, and is collective there too.
        """
        return metrics.gather(tensor, self.backend, debug=self._debug, gradients=gradients)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Every sample of the current global batch exactly once, in order: padding and repeats cut. Collective.

        Args:
            input_data: a tree of tensors whose dim 0 is this rank's batch, or objects.
            use_gather_object: gather pickled objects: lists are joined, anything else becomes one entry a rank.

        Raises:
            UsageError: rows that cannot be distinguished from padding.
        """
        check_collective("gather_for_metrics")
        return metrics.gather_for_metrics(input_data, self._context, use_gather_object=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"none"`` of each tensor of a tree over data-parallel ranks.

        Collective. Raises :class:`UsageError` for any other word.
        """
        return nested.reduce(tensor, reduction, scale, self.backend, debug=self._debug)  # type: ignore[arg-type]

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Bring each tensor of a tree to the largest size along ``dim`` over data-parallel ranks. Collective."""
        return nested.pad_across_processes(tensor, dim, pad_index, pad_first, self.backend, debug=self._debug)

    def set_trigger(self) -> None:
        """Set a flag that every rank sees at the next :meth:`check_trigger`."""
        self._flag = True

    def check_trigger(self) -> bool:
        """Whether any rank has set its flag since the last call; resets it. Collective."""
        check_collective("check_trigger")
        topology = self.backend.topology
        if topology.dp_size == topology.world_size:
            flag = torch.tensor([int(self._flag)], device=self.device)
            seen = bool(self.backend.reduce(flag, "max").item())
        else:
            seen = any(Ranks(self.backend).gather(self._flag))
        self._flag = False if seen else self._flag
        return seen

    # ---- weights and state ------------------------------------------------------------------------------------------

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model itself: what ``prepare`` returns is the user's own object.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: accepted either way: there is no such wrapper.
            keep_torch_compile: ``False`` takes off what ``torch.compile`` and torch's ``checkpoint_wrapper`` have put
                around it and its parts. Where there is such a part, the result is a copy of the modules around it, with
                the same parameters and buffers, that no engine trains; the model itself is left as it is.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Full weights under the names of the user's own module. Collective where parameters are sharded.

        What ``torch.compile`` and torch's ``checkpoint_wrapper`` add to the names of a part is left out.

        Returns:
            On every rank if the backend replicates parameters, else on the main process (CPU) and empty elsewhere.
        """
        prepared = prepared_model(model)
        if prepared is None:
            return {original_name(name): value for name, value in model.state_dict().items()}
        if self.backend.capabilities.replicated:
            log_call("get_state_dict")
            return {original_name(name): value for name, value in prepared.trainable.full_state_dict()}
        # First, since an engine may refuse it to a rank that is alone in it, which has then made no call.
        named = prepared.trainable.full_state_dict()
        check_collective("get_state_dict")
        # Every rank walks through all of it, since gathering is collective, but only the main process keeps it.
        tied = tied_names(prepared.trainable.module)
        whole: dict[str, Any] = {}
        for wrapped, tensor in named:
            name = original_name(wrapped)
            if self.is_main_process:
                whole[name] = whole[tied[name]] if tied.get(name) in whole else _on_cpu(tensor)
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
        prepared = prepared_model(model)
        module = model if prepared is None else prepared.trainable.module
        named = model.state_dict().items() if prepared is None else prepared.trainable.full_state_dict()
        checkpoint.export_model(
            ((original_name(name), tensor) for name, tensor in named),
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
                this run until :meth:`end_training`. An address, as ``"s3://bucket/run"``, names a folder on a storage
                that fsspec reaches; it is text, not a ``Path``, and nobody guards it against a second run.
            safe_serialization: nothing in a checkpoint is a pickle; ``False`` warns.
            blocking: ``False`` returns once the state is copied into host memory, and a thread writes it. The next
                :meth:`save_state`, :meth:`load_state`, :meth:`wait_for_checkpoint` or :meth:`end_training` waits for it
                and raises if it failed. Hooks and observers run in the calling thread only.
            save_model_func_kwargs: none has a meaning here; any raises.

        Returns:
            The checkpoint's folder, or its address.

        Raises:
            CheckpointError: this save failed, or no file system is installed for the address, or the save before failed
                in the background; then this one was not begun. Or another living run saves in the folder; nothing was
                changed then.
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
        """Save an interrupted run. Collective."""
        folder = self._interrupted_folder()
        return self.save_state(None if folder is None else str(folder))

    def _interrupted_folder(self) -> checkpoint.Folder | None:
        """Return the folder of an interrupted run; ``None`` where checkpoints are numbered, and this is one of them."""
        if self._project.automatic_checkpoint_naming:
            return None
        return checkpoint.folder_of(str(self._project.project_dir)) / "interrupted"

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
        """Load a saved run after ``prepare``; loaders continue where they were. Collective; changes all or nothing.

        Args:
            input_dir: the folder or its address; ``None`` takes the newest complete one under automatic naming.
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
        """The experiment trackers in use, in the order of ``log_with``.

        A process that does not feed one has a stand-in, whose attributes and methods are all there and do nothing.
        """
        return list(self._trackers.shown)

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers named in ``log_with``, on the main process."""
        self._trackers.init(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> GeneralTracker | Any:
        """One tracker; ``unwrap`` gives the library's own object."""
        return self._trackers.get(name, unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log values to every tracker, on the main process."""
        self._trackers.log(values, step, log_kwargs)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Profile a block with ``torch.profiler``, one trace per rank."""
        return profile(profile_handler or self._handlers.of_type(ProfileKwargs), self.backend.topology)

    # ---- end of training --------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop all prepared objects so that their memory can be freed; returns one ``None`` for each object.

        What is warned of, or looked at, once for each model begins anew with the next one. Objects and hooks that were
        registered for checkpoints stay, an :class:`EMA` apart, with all that they refer to.
        """
        self._loop.release()
        self._preparer.clear()
        self._dataloaders.clear()
        self._checkpoints.averages.clear()
        return memory.release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """As :meth:`free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Finish the trackers and release the process group. Collective over all ranks; may be called twice.

        Waits for a save in the background. Raises :class:`CheckpointError` when that failed, after everything else.

        While an exception is handled, as in ``finally`` after an error of the script, it waits for no other rank and
        compares nothing with them: they may be elsewhere, and the script's error is what counts.
        """
        if self._closed:
            return
        failed = sys.exc_info()[0] is not None
        if not failed:
            check_collective("end_training")
            call_monitor.agree()
        try:
            self.wait_for_checkpoint()
        finally:
            self._trackers.finish()
            self._loop.release()
            if not failed:
                self.backend.barrier()
            self._close()

    def _close(self) -> None:
        """Release the engines, then the process group. Not collective: the script may have failed."""
        if self._closed:
            return
        self._closed = True
        call_monitor.stop(self._monitor)
        stop_watching(self._watchdog)
        if self._interruption is not None:
            self._interruption.close()
        self._checkpoints.close()
        if self._plan_check is not None:
            self._plan_check.close()
        if self._record is not None:
            self._record.close()
        self._tell("closed")
        self._loop.release()
        current.forget_backend(self.backend)
        self.backend.stop()

    def _tell(self, event: str, **details: Any) -> None:
        registry = get_registry()
        if registry.listens(event):
            registry.notify(event, accelerator=self, **details)

    def _step_ended(self, step: int, skipped: bool) -> None:
        self._tell("step_ended", step=step, skipped=skipped)
        if self._plan_check is not None:
            self._plan_check.step_ended(step, skipped)
        if self._interruption is not None:
            if step == 1 and self.is_main_process:
                self._say_interrupted()
            self._interruption.stepped()
        if self._record is not None:
            self._record.step_ended()

    def _say_interrupted(self) -> None:
        """Name the state of an interrupted run that this one did not load."""
        folder = self._interrupted_folder()
        if folder is not None and (folder / MANIFEST).exists():
            logger.warning(
                "This run begins anew, and %s holds one that saved itself when it was told to stop. "
                'accelerator.load_state("%s") before the first step goes on from there; the next interruption '
                "replaces it.",
                folder,
                folder,
            )

    def _failed(self, error: BaseException) -> None:
        get_registry().notify("failed", accelerator=self, error=error)

    # ---- properties under Accelerate's names ------------------------------------------------------------------------

    @property
    def state(self) -> Accelerator:
        """The same facts under the name that Accelerate's scripts use: ``accelerator.state.num_processes``."""
        return self

    def destroy_process_group(self) -> None:
        """As :meth:`end_training`: what scripts call on ``state`` at their end."""
        self.end_training()

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """As that of ``AcceleratorState``."""
        current.forget_accelerators()
        if reset_partial_state:
            current.forget_all()

    def __getattr__(self, name: str) -> Any:
        """``<backend>_plugin``: that backend's section if it is this run's, else ``None``, for scripts that ask."""
        engine = name.removesuffix("_plugin")
        if engine == name or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return section_at_hand(self._choice, engine)

    def __repr__(self) -> str:
        place = f"process {self.process_index} of {self._topology.world_size}, local {self.local_process_index}"
        group = self._topology.communication_backend
        return (
            f"{type(self).__name__}({self.distributed_type}, {place}, {self.device}, communication backend: {group}, "
            f"mixed precision: {self.mixed_precision})"
        )

    @property
    def initialized(self) -> bool:
        """Always ``True``: the state is complete when the accelerator is made."""
        return True

    @property
    def debug(self) -> bool:
        """Whether collectives compare shapes first."""
        return self._debug

    @property
    def distributed_type(self) -> DistributedType:
        """Name of the backend; a string that compares equal to ``DistributedType.<any name it goes by>``."""
        return DistributedType(self._info.name, self.device.type)

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return str(self._job.settings.precision.name)

    @property
    def native_amp(self) -> bool:
        """Whether forwards compute in another dtype than the parameters'."""
        return self._job.settings.precision.compute is not None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, when there is one."""
        return self._job.scaler

    @property
    def multi_device(self) -> bool:
        """Whether several processes train together."""
        return self.use_distributed

    @property
    def step(self) -> int:
        """Optimizer steps so far, skipped ones included; part of the checkpoint."""
        return self._loop.step

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes a window, so that ``optimizer.step()`` acts."""
        return self._loop.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._loop.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a full window."""
        return self._loop.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._loop.set_steps(value)
        self._set_batches()

    def _set_batches(self) -> None:
        """Give the script's batch sizes to an engine that has its own configuration file."""
        if not isinstance(self._job, FileConfiguredBackend):
            return
        totals = [loader.total_batch_size for loader in self._dataloaders]
        sizes = [total // self._topology.dp_size for total in totals if total is not None]
        self._job.set_batches(sizes, self._loop.steps)

    def _along(self, axis: str) -> int:
        return self._topology.mesh.coordinates(self._topology.rank)[axis]

    @property
    def data_parallel_rank(self) -> int:
        """This process's data-parallel coordinate: ranks that share it see the same samples."""
        return self._topology.dp_rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """Position along ``dp_shard``."""
        return self._along("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Position along ``tp``."""
        return self._along("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Position along ``pp``."""
        return self._along("pp")

    @property
    def context_parallel_rank(self) -> int:
        """Position along ``cp``."""
        return self._along("cp")

    @property
    def is_fsdp2(self) -> bool:
        """Whether the backend goes by this name."""
        return "fsdp2" in {name.lower() for name in (self._info.name, *self._info.aliases)}

    parallelism_config = None
    """The mesh is a section of the configuration, and then ``backend.topology.mesh``."""

    torch_device_mesh = None
    """As :attr:`parallelism_config`."""

    fp8_backend = None
    """No backend computes in fp8."""

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """Settings of prepared loaders."""
        return self._loader_config

    @property
    def split_batches(self) -> bool:
        """The script's batch size is the global one."""
        return self._loader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """The main process reads all batches and hands them out."""
        return self._loader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Samples repeat at the end of an epoch so that every rank gets the same number of batches."""
        return self._loader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._loader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """As configured; the order is a function of seed and epoch either way."""
        return self._loader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Batches are copied to the device without waiting."""
        return self._loader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """As configured; prepared loaders carry their position either way."""
        return self._loader_config.use_stateful_dataloader

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Folders, naming and limit of checkpoints."""
        return self._project

    @property
    def project_dir(self) -> Any:
        """Folder for checkpoints."""
        return self._project.project_dir

    @property
    def logging_dir(self) -> Any:
        """Folder for experiment trackers."""
        return self._project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self._project.iteration

    @cached_property
    def _context(self) -> LoadingContext:
        seed = self._loader_config.data_seed
        return LoadingContext(
            backend=self.backend,
            config=self._loader_config,
            # Collective over all ranks.
            base_seed=int(self.backend.broadcast_object(torch.initial_seed() if seed is None else seed)),
            put_on_device=self.device_placement,
            active=self._active,
            rng_types=tuple(self.rng_types),
            interruption=self._interruption,
        )

    # Read by code written for a trainer class; copies, since changes to them would have no effect.
    @property
    def _models(self) -> list[Any]:
        return self._preparer.models

    @property
    def _optimizers(self) -> list[Any]:
        return list(self._preparer.optimizers)

    @property
    def _schedulers(self) -> list[Any]:
        return list(self._preparer.schedulers)

    @property
    def _custom_objects(self) -> list[Any]:
        return list(self._checkpoints.custom)


def _on_cpu(value: Any) -> Any:
    """A value of a state dict in host memory; what ``get_extra_state`` returns need not be a tensor."""
    return value.cpu() if isinstance(value, Tensor) else value


def _refuse(call: str, given: dict[str, Any]) -> None:
    """Arguments that Accelerate hands to the save or load function of one engine."""
    if given:
        raise UsageError(
            f"{call} does not know {', '.join(sorted(given))}: every backend writes and reads one format",
            cure="Leave it out.",
        )
