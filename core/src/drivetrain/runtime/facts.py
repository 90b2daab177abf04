"""What an accelerator can tell about its run: properties only, under the names that Accelerate's scripts ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.backend import BackendInfo
from drivetrain.runtime.choosing import Choice, section_at_hand
from drivetrain.runtime.process_control import ProcessControl

if TYPE_CHECKING:
    import torch

    from drivetrain.kwargs import DataLoaderConfiguration, ProjectConfiguration
    from drivetrain.runtime.gradient_state import GradientState
    from drivetrain.runtime.training import Trainer


class RunFacts(ProcessControl):
    """Read-only facts about one run, and the few settings that may change while it runs."""

    _info: BackendInfo
    _trainer: Trainer
    _debug: bool
    _loader_config: DataLoaderConfiguration
    _project: ProjectConfiguration
    _dataloaders: list[Any]
    _choice: Choice
    gradient_state: GradientState

    @property
    def state(self) -> RunFacts:
        """The same facts under the name that Accelerate's scripts use: ``accelerator.state.num_processes``."""
        return self

    def __getattr__(self, name: str) -> Any:
        """``<backend>_plugin``: that backend's section if it is this run's, else ``None``, for scripts that ask."""
        engine = name.removesuffix("_plugin")
        if engine == name or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return section_at_hand(self._choice, engine)

    def __repr__(self) -> str:
        place = f"process {self.process_index} of {self.num_processes}, local {self.local_process_index}"
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
    def distributed_type(self) -> str:
        """Canonical name of the backend; compares equal to ``DistributedType.<any name it goes by>``."""
        return self._info.name

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

    # ---- accumulation ----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps so far, skipped ones included; part of the checkpoint."""
        return self._trainer.step

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes a window, so that ``optimizer.step()`` acts."""
        return self._trainer.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._trainer.sync_gradients = value
        for record in self._trainer.records:
            record.ready = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a full window."""
        return self._trainer.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._trainer.set_steps(value)
        self._meet_batches()

    def _meet_batches(self) -> None:
        """Tell the backend how the script batches its data; see :meth:`drivetrain.api.Backend.meet_batches`."""
        totals = [loader.total_batch_size for loader in self._dataloaders]
        sizes = [total // self._topology.dp_size for total in totals if total is not None]
        self._job.meet_batches(sizes, self._trainer.steps)

    # ---- mesh ------------------------------------------------------------------------------------------------------

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

    # ---- engines -------------------------------------------------------------------------------------------------

    @property
    def is_fsdp2(self) -> bool:
        """Whether the backend goes by this name."""
        return "fsdp2" in {name.lower() for name in (self._info.name, *self._info.aliases)}

    @property
    def parallelism_config(self) -> None:
        """``None``: the mesh is a section of the configuration, and then ``backend.topology.mesh``."""

    @property
    def torch_device_mesh(self) -> None:
        """``None``; see :attr:`parallelism_config`."""

    @property
    def fp8_backend(self) -> None:
        """``None``: no backend computes in fp8."""

    # ---- loaders ---------------------------------------------------------------------------------------------------

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

    # ---- project ---------------------------------------------------------------------------------------------------

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
