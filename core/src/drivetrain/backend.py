"""The backend contract: what a plugin describes as data, and the two small classes that it implements.

Nothing here imports torch; a plugin's light module (``plugin.py``) can use :class:`BackendInfo` and
:class:`Capabilities`, its heavy module (``backend.py``) implements :class:`Backend` and :class:`Trainable`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from drivetrain.topology import Mesh, Place, Topology

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

CONTRACT = 1
"""Version of this contract. It grows when an old plugin would be wrong under the new core, or the other way round."""

ReduceOp = Literal["sum", "mean", "max", "min"]


# ---- description: data, read before anything heavy is imported ----------------------------------------------------


@dataclass(frozen=True)
class Capabilities:
    """What a backend declares it can do. The conformance kit proves each flag, both ways.

    Args:
        multi_process: trains over several processes. When ``False`` a world larger than 1 is refused.
        mesh_axes: mesh axes that may be larger than 1.
        devices: device types it runs on; empty means every type that torch knows.
        precisions: values of ``mixed_precision`` that it interprets.
        owns_optimizer: ``prepare`` may replace the optimizer by the engine's own.
        pipelined: a forward in training mode is deferred until the loss is known.
        accumulates_without_sync: ``synchronise_gradients(False)`` really skips communication.
        replicated: every rank of the data-parallel group holds all parameters, so they may be averaged (LocalSGD).
        multiple_models: several models can be prepared in one process.
        optimizer_spans_models: one optimizer may hold parameters of several models.
        clip_by_value: ``clip_grad_value`` works.
        other_norms: ``clip_grad_norm`` takes norms other than 2.
        sharded_save: a save writes from every rank at once, each its own part.
        async_save: tensors can be staged so that a save runs beside the training.
        join_uneven_inputs: ``join`` works.
        handlers: class names of the keyword handlers that it reads (``Accelerator(kwargs_handlers=[...])``).
    """

    multi_process: bool = True
    mesh_axes: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    precisions: frozenset[str] = frozenset({"no", "bf16", "fp16"})
    owns_optimizer: bool = False
    pipelined: bool = False
    accumulates_without_sync: bool = True
    replicated: bool = True
    multiple_models: bool = True
    optimizer_spans_models: bool = True
    clip_by_value: bool = True
    other_norms: bool = True
    sharded_save: bool = False
    async_save: bool = False
    join_uneven_inputs: bool = False
    handlers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Readiness:
    """Answer of a probe: can this backend run on this machine?

    Args:
        ready: it can.
        reason: one sentence why not (or a remark when it can).
        cure: what to type next.
    """

    ready: bool
    reason: str = ""
    cure: str = ""


def always_ready() -> Readiness:
    """Probe of a backend that runs wherever torch does."""
    return Readiness(True)


@dataclass(frozen=True)
class BackendInfo:
    """A backend's description, returned by the hook ``drivetrain_backends``.

    Args:
        name: lower case; also the entry point, the config section and the end of the distribution's name.
        summary: one line for tables.
        backend: ``"package.module:Class"``, imported only when the backend is chosen.
        aliases: other names people write, in any case (``MULTI_GPU``).
        api: version of this contract that the plugin was written for.
        config: ``"package.module:Model"``, a pydantic model of the config section; ``None`` when there is none.
        requires: requirements such as ``"deepspeed>=0.18"``, checked against installed versions before import.
        capabilities: see :class:`Capabilities`.
        probe: can it run here? Imports nothing heavy.
        preference: who is taken when the user names no backend: the highest that fits the world (a backend that is
            not ``multi_process`` fits a world of 1). ``None``: only when named.
    """

    name: str
    summary: str
    backend: str
    aliases: tuple[str, ...] = ()
    api: int = CONTRACT
    config: str | None = None
    requires: tuple[str, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    probe: Callable[[], Readiness] = always_ready
    preference: int | None = None


# ---- what a backend is told -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrecisionPolicy:
    """What ``mixed_precision`` means, the same under every backend. Dtypes are torch's names, ``None`` = leave alone.

    ======== ================== ======= ========= ======= ============
    name     parameters         compute gradients output  loss scaling
    ======== ================== ======= ========= ======= ============
    ``no``   as the user made   same    same      same    no
    ``bf16`` float32 (trained)  bf16    float32   float32 no
    ``fp16`` float32 (trained)  fp16    float32   float32 dynamic
    ======== ================== ======= ========= ======= ============

    Args:
        parameters: dtype of parameters that require gradients, hence of the optimizer's state.
        compute: dtype of matrix products (autocast or the engine's own means).
        reduce: dtype in which gradients are summed over ranks.
        output: dtype to which floating outputs of the compute dtype are cast.
        loss_scaling: scale the loss dynamically against underflow.
        scaler: arguments of the loss scaler (``GradScalerKwargs``).
        autocast_cache: ``cache_enabled`` of autocast; ``None`` = torch's default.
    """

    name: Literal["no", "bf16", "fp16"] = "no"
    parameters: str | None = None
    compute: str | None = None
    reduce: str | None = None
    output: str | None = None
    loss_scaling: bool = False
    scaler: Mapping[str, Any] = field(default_factory=dict)
    autocast_cache: bool | None = None


@dataclass(frozen=True)
class ProcessGroupSettings:
    """How the default process group is formed when none exists.

    Args:
        communication_backend: gloo, nccl, xccl, ...; ``None`` = torch's choice for the device.
        init_method: as in ``torch.distributed.init_process_group``; ``None`` = ``env://``.
        timeout_seconds: ``None`` = torch's default for the communication backend.
    """

    communication_backend: str | None = None
    init_method: str | None = None
    timeout_seconds: float | None = None


@dataclass(frozen=True)
class RunSettings:
    """Everything a backend is told at birth.

    Args:
        place: ranks, as the launcher gave them.
        mesh: requested axis sizes by name; empty when the user asked for none, then the backend chooses.
        section: the validated config section (an instance of the model named by ``BackendInfo.config``), or ``None``.
        precision: the policy to interpret.
        device_type: ``"cpu"``, ``"cuda"``, ...; ``None`` = what ``torch.accelerator`` finds, else the CPU.
        process_group: how to form the process group.
        handlers: the user's keyword handlers that this backend reads, by class name.
        place_on_device: move parameters to the device in ``prepare``.
    """

    place: Place = field(default_factory=Place)
    mesh: Mapping[str, int] = field(default_factory=dict)
    section: Any = None
    precision: PrecisionPolicy = field(default_factory=PrecisionPolicy)
    device_type: str | None = None
    process_group: ProcessGroupSettings = field(default_factory=ProcessGroupSettings)
    handlers: Mapping[str, Any] = field(default_factory=dict)
    place_on_device: bool = True


# ---- what a backend returns -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one optimizer step, the same on every rank.

    Args:
        skipped: the update was not applied (non-finite gradients); parameters are untouched.
        grad_norm: norm before clipping where it was computed for this step, else ``None``.
    """

    skipped: bool = False
    grad_norm: Tensor | None = None


@dataclass
class PortableState:
    """A trainable's state in the words of the original module, for the portable checkpoint.

    Args:
        tensors: ``model.<fqn>`` for parameters and persistent buffers, ``optim.<fqn>.<slot>`` for optimizer state.
            Values are plain tensors when every rank holds all of it, DTensors when it is sharded.
        optimizers: for each optimizer its parameter groups, each with ``"params"`` (names, in order) beside its
            hyper-parameters (numbers, booleans, strings, None, lists of these).
        extra: further JSON-able state of the engine, such as the loss scaler's.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    optimizers: list[list[dict[str, Any]]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Global shape and torch dtype name (``"float32"``) of one saved tensor."""

    shape: tuple[int, ...]
    dtype: str


# ---- the two classes ------------------------------------------------------------------------------------------------


class Trainable(ABC):
    """One prepared model with its optimizers. Two models are two trainables.

    **The gradient contract.** After the last backward of an accumulation window, each parameter's gradient is that of
    *(sum over all data-parallel ranks and micro-batches of the loss) / denominator*. The core owns the window and the
    denominator: :meth:`backward` is told a ``scale`` per micro-batch, and :meth:`scale_gradients` once at the end of a
    window whose denominator was not known before. A backend keeps no counter of its own.

    An engine that *averages* over ``dp_size`` ranks multiplies the loss by ``scale * dp_size``, one that *sums* by
    ``scale``.

    Attributes:
        module: the user's own module with its original parameter names (parameters may be sharded by now).
        optimizers: what really steps, in the order given to ``prepare``.
    """

    module: nn.Module
    optimizers: list[Optimizer]

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What ``model(...)`` runs: the engine's forward under the policy. Collective where the engine's is."""

    @abstractmethod
    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        """Add the gradients of ``sum over data-parallel ranks of loss * scale``.

        Collective over the data-parallel axes when gradients are synchronised. ``loss`` is 0-d. When one loss depends
        on several trainables this is called on one of them; it must reach the parameters of all.
        """

    @abstractmethod
    def synchronise_gradients(self, enabled: bool) -> None:
        """Whether the following forwards and backwards reduce gradients over ranks.

        The core calls it with ``False`` before each micro-batch of a window but the last, and with ``True`` before the
        last; after that one, gradients of the whole window must be reduced.
        """

    @abstractmethod
    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by ``factor`` (the same on every rank), after the last backward of a window."""

    @abstractmethod
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip so that the global norm of these parameters' gradients is at most ``max_norm``.

        Collective. Returns the norm *before* clipping: a plain 0-d float tensor on the device, global over all mesh
        axes, the same on every rank. A non-finite norm clips nothing and makes the next :meth:`optimizer_step` skip.
        An engine whose gradients cannot be touched may clip at the step; the value returned is the same.
        """

    @abstractmethod
    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp each gradient element to ``[-clip_value, clip_value]``; needs the capability ``clip_by_value``."""

    @abstractmethod
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Apply one update; ``optimizer`` is one of ``optimizers``. Collective where the engine's step is.

        Skips when the loss scaler overflowed or the last clipping norm was not finite; then parameters and optimizer
        state stay untouched. The verdict is the same on every rank.
        """

    @abstractmethod
    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters."""

    @abstractmethod
    def portable_state(self) -> PortableState:
        """The whole state under original names. Collective only if the engine must gather; it should not have to."""

    @abstractmethod
    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        """Tensors to be filled from a checkpoint that holds ``saved``, laid out as this engine wants them.

        Contains this model's ``model.*`` entries always, and ``optim.*`` entries for the slots found in ``saved``
        (an optimizer that has never stepped has none of its own yet).
        """

    @abstractmethod
    def load_portable_state(self, state: PortableState) -> None:
        """Take over a filled template: parameters, buffers, optimizer state, parameter groups, extra. Collective."""

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Take the loss scale out of this optimizer's gradients before its step; default nothing: they carry none."""
        return

    def shares(self, parameters: Sequence[Tensor]) -> bool:
        """Whether any of these is this model's, as it is now or, where the engine replaced it, as it was before."""
        return not {id(each) for each in parameters}.isdisjoint(map(id, self.module.parameters()))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take an optimizer that was prepared after its model. Collective where ``prepare`` is.

        The default fits an engine whose parameters are still the objects that the optimizer holds; one that replaced
        them finds them again by name.
        """
        self.optimizers.append(optimizer)

    @abstractmethod
    def release(self) -> None:
        """Let go of the engine (wrappers, hooks, communication) but keep ``module`` usable. May be called twice."""

    def forward_backward(
        self,
        micro_batches: Sequence[tuple[tuple[Any, ...], dict[str, Any], Any]],
        loss_fn: Callable[[Any, Any], Tensor],
        scale: float | Tensor,
    ) -> Tensor:
        """Run one whole accumulation window: forward and backward of each micro-batch, synchronising at the last.

        Args:
            micro_batches: for each micro-batch the model's positional and keyword arguments and the batch itself.
            loss_fn: ``loss_fn(model_output, batch)``, a 0-d tensor.
            scale: as in :meth:`backward`.

        Returns:
            Sum over this rank's micro-batches of ``loss``, detached, 0-d. A pipelined engine overrides this and returns
            it on every stage.
        """
        from drivetrain.runtime.windows import loop_forward_backward

        return loop_forward_backward(self, micro_batches, loss_fn, scale)

    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full tensor of each parameter and persistent buffer, one at a time, in ``state_dict`` order.

        Collective where parameters are sharded: every rank iterates to the end, and holds one gathered tensor at most.
        """
        yield from self.module.state_dict().items()


class Backend(ABC):
    """This process's place in the job; one per run. Created, started, used, stopped, in that order.

    Attributes:
        capabilities: the same data as in :class:`BackendInfo`.
        settings: what the run asked for.
        topology: set by :meth:`start`.
        scaler: the ``torch.amp.GradScaler`` in use, when the backend scales losses with one.
    """

    capabilities: ClassVar[Capabilities]
    settings: RunSettings
    topology: Topology
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings

    @abstractmethod
    def start(self) -> Topology:
        """Form (or join) the process group or runtime, pick the device, lay the mesh. Collective over all ranks.

        Sets and returns ``self.topology``. An existing default process group is used as it is, never torn down.
        """

    @abstractmethod
    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True
    ) -> Trainable:
        """Make a model ready, together with the optimizers that hold its parameters. Collective over all ranks.

        Joint, since sharding may change the parameters. Moves the model to the device (unless the settings forbid),
        applies the precision policy to its parameters, makes all ranks start from rank 0's values.

        Args:
            model: the user's module.
            optimizers: those that hold parameters of this model; they may hold others' too.
            training: ``False`` prepares for evaluation only: no gradient machinery.
        """

    @abstractmethod
    def stop(self) -> None:
        """Leave what :meth:`start` formed; nothing of ours stays behind. May be called twice. Not collective."""

    def init_context(self) -> AbstractContextManager[Any]:
        """Entered around model construction (meta device, ``zero.Init``); default nothing."""
        return nullcontext()

    def sync(self) -> None:
        """Run what a lazy device has recorded; default nothing."""
        return

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The precision policy's compute context, for code outside of a model's forward."""
        from drivetrain.runtime.precision import autocast

        return autocast(self.settings.precision, self.topology.device, enabled)

    def join(self, trainables: Sequence[Trainable]) -> AbstractContextManager[Any]:
        """Let ranks run out of batches at different times; needs the capability ``join_uneven_inputs``."""
        from drivetrain.errors import UnsupportedError

        raise UnsupportedError(
            f"{type(self).__name__} cannot join uneven inputs",
            cure="Keep even_batches=True so that every rank gets the same number of batches.",
        )

    # Collectives on tensors and objects. The defaults are torch.distributed on the default group: the data-parallel
    # axes for gather and reduce, all ranks for broadcast, objects and barrier. With one process they are local.

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate along dim 0 over the data-parallel ranks, by coordinate. Same shape on every rank, dim >= 1."""
        from drivetrain.runtime import collectives

        return collectives.all_gather(tensor, self.topology)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce over the data-parallel ranks; every rank gets the result, ``tensor`` itself is left as it was."""
        from drivetrain.runtime import collectives

        return collectives.all_reduce(tensor, op, self.topology)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Everyone gets global rank ``src``'s tensor; shape and dtype agree on every rank."""
        from drivetrain.runtime import collectives

        return collectives.broadcast(tensor, src, self.topology)

    def gather_object(self, obj: Any) -> list[Any]:
        """One picklable object from every data-parallel rank, by coordinate."""
        from drivetrain.runtime import collectives

        return collectives.all_gather_object(obj, self.topology)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Everyone gets global rank ``src``'s picklable object."""
        from drivetrain.runtime import collectives

        return collectives.broadcast_object(obj, src, self.topology)

    def barrier(self) -> None:
        """Wait until every rank of the job is here."""
        from drivetrain.runtime import collectives

        collectives.barrier(self.topology)


__all__ = [
    "CONTRACT",
    "Backend",
    "BackendInfo",
    "Capabilities",
    "Mesh",
    "Place",
    "PortableState",
    "PrecisionPolicy",
    "ProcessGroupSettings",
    "Readiness",
    "ReduceOp",
    "RunSettings",
    "StepResult",
    "TensorSpec",
    "Topology",
    "Trainable",
    "always_ready",
]
