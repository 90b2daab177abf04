"""Abstract base classes that a backend implements.

Nothing here imports torch. A plugin's light module (``plugin.py``) uses the records of ``description.py``, its heavy
module (``backend.py``) implements :class:`Backend` and :class:`Trainable`. Both import them from ``drivetrain.api``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.description import (
    CONTRACT,
    BackendInfo,
    Capabilities,
    Feeding,
    PrecisionPolicy,
    ProcessGroupSettings,
    Readiness,
    RunSettings,
    Statement,
    always_ready,
    nothing_implied,
)
from drivetrain.topology import Mesh, Place, Topology

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

ReduceOp = Literal["sum", "mean", "max", "min"]


# ---- what a backend returns -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one optimizer step, the same on every rank.

    Args:
        skipped: the update was not applied (non-finite gradients); parameters are untouched.
        grad_norm: norm before clipping where it was computed for this step, else ``None``.
        pending: for a device that runs behind the host: waits for it, puts right what the host counted for an update
            that was not applied, and returns ``skipped``. Called once: before the optimizer's next step, or when
            somebody asks for the verdict, a learning rate or a state. ``skipped`` then means nothing.
    """

    skipped: bool = False
    grad_norm: Tensor | None = None
    pending: Callable[[], bool] | None = None


@dataclass
class PortableState:
    """A trainable's state in the words of the original module, for the portable checkpoint.

    Args:
        tensors: ``model.<fqn>`` for parameters and persistent buffers, ``optim.<fqn>.<slot>`` for optimizer state.
            Values are plain tensors when every rank holds all of it; sharded ones are DTensors or, where an engine cuts
            a tensor as one row of elements, :class:`drivetrain.api.FlatShard`.
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
        settles_buffers: the engine itself gives every rank the main process's buffers before they are used in
            evaluation (see :class:`drivetrain.api.Buffers`); else the core does, once a window.
    """

    module: nn.Module
    optimizers: list[Optimizer]
    settles_buffers: bool = False

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

    def live_tensors(self) -> dict[str, Any]:
        """What is trained on this rank, as ``model.<fqn>``: live memory, to be read and written. Not collective.

        Parameters and persistent buffers; where the engine trains copies in higher precision, those. Layouts are the
        engine's. After writing, :meth:`load_portable_state` of an empty state derives what follows.
        """
        from drivetrain.runtime import portable

        return dict(portable.live_tensors(self.module))

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Take the loss scale out of this optimizer's gradients before its step; default nothing: they carry none."""
        return

    def has_unreduced_gradients(self) -> bool:
        """Whether some gradient holds contributions of this rank alone; default ``False``. Not collective.

        The core asks before each optimizer step and refuses it, unless the script keeps gradients on their rank
        (``no_sync``, LocalSGD). An engine that reduces gradients in every backward that reaches its parameters,
        whoever calls it, leaves the default.
        """
        return False

    def before_unprepared_step(self, optimizer: Optimizer) -> None:
        """Called before an optimizer that was never prepared, or the script's own object of one that was, steps.

        Default nothing: its parameters are what is trained. An engine that trains copies of them raises
        :class:`~drivetrain.api.UsageError` here. Not collective.
        """
        return

    def before_registration(self, parent: nn.Module, name: str, value: Any) -> None:
        """Called before the script registers a submodule, parameter or buffer ``name`` on a part of the model.

        Default nothing: it is the model's from then on. An engine that cannot take it in raises
        :class:`~drivetrain.api.UnsupportedError`, and nothing is registered. Not collective.
        """
        return

    def before_conversion(self) -> None:
        """Called before ``model.to(...)``, ``.double()``, ``.half()`` and the like. As :meth:`before_registration`."""
        return

    def before_copy(self) -> None:
        """Called before the model is copied or pickled as an object of the user's class.

        Default nothing: the module is whole on this rank. An engine that holds parts of it raises
        :class:`~drivetrain.api.UnsupportedError`. Not collective.
        """
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
        from drivetrain.runtime.model import plain_state_dict

        yield from plain_state_dict(self.module).items()

    def before_state_dict(self, *, replicated: bool) -> None:
        """Called before the script's ``model.state_dict()``, which ``save_pretrained`` calls too. Not collective.

        The one rule of all engines: what comes back is the whole state, or this raises. The default allows it where
        every rank holds all parameters. An engine may allow more where its tensors stand for whole ones in all that a
        script does to them, ``torch.save`` included.

        Args:
            replicated: the backend's capability of that name.

        Raises:
            UsageError: this rank holds parts only.
        """
        if not replicated:
            from drivetrain.errors import UsageError

            raise UsageError(
                f"{type(self.module).__name__}.state_dict() would be this rank's part of a model that is sharded",
                cure="On every rank write accelerator.get_state_dict(model), which is whole on the main process, or "
                "accelerator.save_model(model, folder). save_pretrained takes the former as its argument state_dict.",
            )


class Backend(ABC):
    """This process's place in the job; one per run. Created, started, used, stopped, in that order.

    Attributes:
        capabilities: the same data as in :class:`BackendInfo`; where this run's settings make no pipeline or keep
            everything on every rank, :meth:`start` sets a copy with ``pipelined`` or ``sharded_save`` switched off.
        settings: what the run asked for.
        topology: set by :meth:`start`.
        scaler: the ``torch.amp.GradScaler`` in use, when the backend scales losses with one.
        feeding: how batches come to the device; an engine that wants more than a copy sets it in :meth:`start`.
    """

    capabilities: Capabilities
    settings: RunSettings
    topology: Topology
    scaler: torch.amp.GradScaler | None = None
    feeding: Feeding = Feeding()

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

    def meet_batches(self, sizes: Sequence[int], accumulation_steps: int) -> None:
        """Learn how the script batches its data; default nothing. Not collective.

        Called before each :meth:`prepare`, and again when a loader is prepared or the window's length changes, for
        engines whose own configuration may say the same. It raises :class:`~drivetrain.api.UsageError` where that
        differs.

        Args:
            sizes: samples in a full batch of one data-parallel rank, for each prepared loader that has such a number.
            accumulation_steps: micro-batches in a full window.
        """
        return

    def prepare_scheduler(self, scheduler: Any, optimizers: Sequence[Optimizer]) -> Any:
        """The scheduler that moves where the script prepared ``scheduler``; default itself. Not collective.

        Args:
            scheduler: the script's; a ``DummyScheduler`` asks for the one that the engine's configuration describes.
            optimizers: what really steps, of those whose learning rate it sets.
        """
        from drivetrain.runtime.placeholders import scheduler_without_engine

        return scheduler_without_engine(scheduler, type(self).__name__)

    def synchronise_batch_norm(self, model: nn.Module) -> None:
        """Let batch norms take their statistics over all data-parallel ranks. Not collective.

        Called before :meth:`prepare` for each model that is trained, where ``settings.sync_batch_norm`` asks for it.
        The default communicates by ``torch.distributed``; an engine that cannot raises
        :class:`~drivetrain.api.UnsupportedError`.
        """
        from drivetrain.runtime import sync_batch_norm

        sync_batch_norm.convert(model, self.topology)

    def sync(self) -> None:
        """Run what a lazy device has recorded; default nothing. Not collective.

        Called at the end of each optimizer step, and before a state is saved, loaded or exported.
        """
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
    "Feeding",
    "Mesh",
    "Place",
    "PortableState",
    "PrecisionPolicy",
    "ProcessGroupSettings",
    "Readiness",
    "ReduceOp",
    "RunSettings",
    "Statement",
    "StepResult",
    "TensorSpec",
    "Topology",
    "Trainable",
    "always_ready",
    "nothing_implied",
]
