"""The accelerator of a Trainer: Drivetrain's, with the further attributes of Accelerate's that Trainer uses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final
from weakref import ref

from torch import Tensor, nn
from transformers import GenerationMixin

from drivetrain import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradientState,
)
from drivetrain.api import PortableState, TensorSpec, UnsupportedError, UsageError
from drivetrain.api.programs import checkpoint
from drivetrain_transformers import private_names

if TYPE_CHECKING:
    from drivetrain_transformers.trainer import Trainer


@final
class SyncState:
    """``accelerator.gradient_state`` with what Trainer sets and reads of Accelerate's."""

    def __init__(self, accelerator: TrainerAccelerator, state: GradientState, plugin_kwargs: dict[str, Any]) -> None:
        self._accelerator = ref(accelerator)
        self._state = state
        self.plugin_kwargs = plugin_kwargs
        """Field of the accumulation plugin; Trainer reads ``sync_each_batch``."""

    def _set_sync_gradients(self, value: bool) -> None:
        accelerator = self._accelerator()
        assert accelerator is not None, "its gradient state is in use"
        accelerator.sync_gradients = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class TrainerAccelerator(Accelerator):
    """Drivetrain's accelerator as a Trainer sees it. Construction is collective over all ranks.

    Trainer branches on the plugins and the type of Accelerate's engines. Here it finds none, under every backend, and
    takes its general path; ``num_processes`` is the number of data-parallel coordinates.

    Args:
        trainer: whose accelerator it is.
        arguments: what Trainer passes to Accelerate's ``Accelerator``, in its classes.

    Raises:
        UsageError, UnsupportedError: a setting that has another place here, or none.
    """

    deepspeed_plugin = None
    fsdp_plugin = None

    def __init__(self, trainer: Trainer, **arguments: Any) -> None:
        self._trainer = ref(trainer)
        accumulation = arguments.pop("gradient_accumulation_plugin").to_kwargs()
        loading = arguments.pop("dataloader_config")
        super().__init__(
            cpu=trainer.args.use_cpu,
            gradient_accumulation_plugin=GradientAccumulationPlugin(**{"num_steps": 1, **accumulation}),
            **_translated(trainer, arguments),
        )
        self._loader_config = _loading(self._loader_config, loading, trainer)
        # Trainer counts micro-batches and normalises losses itself.
        self.gradient_state: Any = SyncState(self, self.gradient_state, accumulation)
        self.factor: Any = None
        """Called at each backward: what the loss is multiplied by after Trainer's own factors; ``None`` for nothing."""
        self.applied: Any = None
        """Factor of the last loss."""

    # ---- facts ------------------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of data-parallel coordinates: Trainer counts samples and tokens by it."""
        return self.backend.topology.dp_size

    @property
    def process_index(self) -> int:
        """Data-parallel coordinate: trainers cut their part out of gathered rows by it."""
        return self.backend.topology.dp_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of all processes."""
        return self.backend.topology.rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self.backend.topology.rank == self.backend.topology.world_size - 1

    # ---- prepare ----------------------------------------------------------------------------------------------------

    def is_prepared(self, model: Any) -> bool:
        """Whether this accelerator trains the model."""
        return any(model is each for each in self._models)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """See the base class. Sharded models generate as long as any rank does, since each token takes collectives."""
        prepared = super().prepare(*args, device_placement=device_placement)
        self._generate_together()
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See the base class, and :meth:`prepare`."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        self._generate_together()
        return prepared

    def _generate_together(self) -> None:
        if self.backend.capabilities.replicated or self.num_processes == 1:
            return
        for model in self._models:
            for part in model.modules():
                if isinstance(part, GenerationMixin):
                    private_names.generate_together(part)

    def free_memory(self, *objects: Any) -> list[None]:
        """Like the base class, but keeps the Trainer's own model and optimizer if they are prepared together.

        Trainer calls it at the beginning of ``train()``, and prepares again what an evaluation has prepared before; an
        engine cannot shard a model twice.
        """
        trainer = self._trainer()
        keeps = (
            trainer is not None
            and not objects
            and self.is_prepared(trainer.model)
            and any(trainer.optimizer is each for each in self._optimizers)
        )
        if not keeps:
            return super().free_memory(*objects)
        self._dataloaders.clear()
        return []

    def keep_only_loader(self, loader: Any) -> None:
        """Leave the loaders of evaluations out of checkpoints."""
        self._dataloaders[:] = [each for each in self._dataloaders if each is loader]

    # ---- training step ----------------------------------------------------------------------------------------------

    def shares(self) -> tuple[float, bool]:
        """Weight of a mean over this rank's rows of the batch that was yielded last, and whether any of them count.

        Means weigh by their samples where the last global batch is cut into unequal parts. A rank for which there was
        none left holds a repeated sample, that counts for nothing.
        """
        current = self._active.current
        rows = None if current is None else current.rows
        if rows is None or not rows.counted:
            return 1.0, True
        real = rows.real[self.backend.topology.dp_rank]
        return (1.0 if rows.even else real * self.num_processes / rows.total), real > 0

    def backward(self, loss: Tensor, num_items: Any = None, **kwargs: Any) -> None:
        """Add the gradients of a loss whose mean over the data-parallel ranks is wanted, as Trainer computes it."""
        if kwargs.pop("learning_rate", None) is not None:
            raise UnsupportedError(
                "LOMO and AdaLOMO step inside of backward, without gradients that could be reduced or checkpointed",
                cure='Choose another optimizer: TrainingArguments(optim="adamw_torch").',
            )
        kwargs.pop("scale_wrt_gas", None)
        if num_items is not None or "denominator" in kwargs:
            super().backward(loss, num_items, **kwargs)
            return
        self.applied = None if self.factor is None else self.factor()
        if self.applied is not None:
            loss = loss * self.applied
        super().backward(loss, denominator=float(self.num_processes), **kwargs)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, model: nn.Module, folder: Path) -> None:
        """Load a prepared model's weights alone from a folder of :meth:`save_state`. Collective over all ranks."""
        view = _WeightsOf(self._preparer.find(model).trainable)
        with warnings.catch_warnings():
            # That the rest of the state is passed over is what is wanted.
            warnings.filterwarnings("ignore", category=UserWarning)
            checkpoint.load(folder, checkpoint.TrainingState([view]), self.backend, strict=False)

    def load_tensors(self, model: nn.Module, tensors: Mapping[str, Tensor], scratch: Path) -> None:
        """Load whole tensors, the same on every rank, into a prepared model of any layout. Collective over all ranks.

        Args:
            model: prepared.
            tensors: by the model's names; what is not among them is left as it is.
            scratch: a folder that is written and deleted: each rank reads its part from there.
        """
        full = {f"model.{name}": tensor for name, tensor in tensors.items()}
        view = _WeightsOf(self._preparer.find(model).trainable, full)
        checkpoint.save(scratch, checkpoint.TrainingState([view]), self.backend)
        try:
            self.load_weights(model, scratch)
        finally:
            self.wait_for_everyone()
            if self.is_main_process:
                _remove(scratch)
            self.wait_for_everyone()


class _WeightsOf:
    """The weights of a prepared model without its optimizers, as saves and loads see it.

    Args:
        trainable: the engine's model.
        full: whole tensors that are saved in the place of the model's own.
    """

    def __init__(self, trainable: Any, full: Mapping[str, Tensor] | None = None) -> None:
        self._trainable, self._full = trainable, full
        self.module: nn.Module = trainable.module
        self.optimizers: list[Any] = []

    def portable_state(self) -> PortableState:
        return PortableState(dict(self._full or {}))

    def portable_template(self, saved: Mapping[str, TensorSpec], /) -> PortableState:
        template = self._trainable.portable_template({})
        tensors = {name: one for name, one in template.tensors.items() if name.startswith("model.")}
        tied = {key: value for key, value in template.extra.items() if key == "tied"}
        return PortableState(tensors, extra=tied)

    def load_portable_state(self, state: PortableState, /) -> None:
        self._trainable.load_portable_state(PortableState(state.tensors))


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _loading(configured: DataLoaderConfiguration, given: Any, trainer: Trainer) -> DataLoaderConfiguration:
    """The configuration's settings of loaders, where Trainer's arguments say no more than Accelerate's defaults.

    The seed of the order is the arguments' ``data_seed``, else the configuration's, else the arguments' ``seed``.
    """
    defaults, args = DataLoaderConfiguration(), trainer.args
    names = ("split_batches", "dispatch_batches", "even_batches", "non_blocking")
    said = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(defaults, name)}
    seeds = (args.data_seed, configured.data_seed, args.seed)
    return replace(configured, data_seed=next(seed for seed in seeds if seed is not None), **said)


def _translated(trainer: Trainer, given: dict[str, Any]) -> dict[str, Any]:
    """Translate Trainer's arguments of Accelerate's accelerator to Drivetrain's."""
    args = trainer.args
    given.pop("fsdp_plugin"), given.pop("deepspeed_plugin")  # refused with the arguments already
    result: dict[str, Any] = {}
    # "no" is what arguments say that say nothing; the configuration may know better.
    precision = given.pop("mixed_precision")
    result["mixed_precision"] = None if precision == "no" else precision
    names = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
    ddp = {name.removeprefix("ddp_"): getattr(args, name) for name in names if getattr(args, name) is not None}
    given.pop("kwargs_handlers")
    result["kwargs_handlers"] = [DistributedDataParallelKwargs(**ddp)] if ddp else []
    given.pop("dynamo_plugin", None)
    if args.torch_compile:
        if args.torch_compile_mode is not None:
            raise UsageError(
                "TrainingArguments(torch_compile_mode=...) has no place in a run of Drivetrain",
                cure="Compile the model before it is given to the Trainer: model.compile(mode=...).",
            )
        result["dynamo_backend"] = args.torch_compile_backend
    parallelism = given.pop("parallelism_config", None)
    if parallelism is not None:
        raise UnsupportedError(
            "the model was sharded while it was loaded, by Transformers (tp_plan=, distributed_config=)",
            cure="Load it whole, and let the configuration shard it: mesh: {tp: 2} with distributed_type: megatron.",
        )
    if given:
        raise UnsupportedError(
            f"this version of Transformers passes {', '.join(sorted(given))} to Accelerator",
            cure=f"Install the release that is tested: pip install transformers=={private_names.TESTED}.",
        )
    return result
