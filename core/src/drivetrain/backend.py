"""Abstract base classes that a backend implements.

Nothing here imports torch. A plugin's ``plugin.py`` describes the backend by the dataclasses below, its ``backend.py``
implements :class:`Backend` and :class:`Trainable`. Both import them from ``drivetrain.api``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.topology import ProcessInfo, Topology

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from drivetrain.loop.gradient_hooks import GradientHook

CONTRACT = 3
"""Version of this contract. It grows when an old plugin would be wrong under the new core, or the other way round."""


@dataclass(frozen=True)
class Capabilities:
    """Declares what a backend can do. The conformance kit proves each flag, both ways.

    ``pipelined`` and ``sharded_save`` say what settings may ask for: a backend whose settings ask for less says so in
    :meth:`~drivetrain.api.Backend.start`, see ``Backend.capabilities``. All others hold for every run.

    Args:
        multi_process: trains over several processes. When ``False`` a world larger than 1 is refused.
        averages_gradients: over the data-parallel ranks, as DDP does, where an engine without it sums them. The core
            multiplies the ``scale`` of a loss by ``dp_size`` for it.
        mesh_axes: mesh axes that may be larger than 1.
        devices: device types it runs on; empty means every type that torch knows.
        precisions: values of ``mixed_precision`` that it interprets.
        pipelined: a forward in training mode is deferred until the loss is known.
        replicated: every rank of the data-parallel group holds all parameters, and ``synchronise_gradients(False)``
            leaves a rank's own gradients on it: ranks may step alone and be averaged (LocalSGD), for which the
            backend averages gradients too.
        optimizer_spans_models: one optimizer may hold parameters of several models.
        sharded_save: a save writes from every rank at once, each its own part.
        async_save: tensors can be staged so that a save runs beside the training.
        join_uneven_inputs: ``join`` works.
        handlers: class names of the keyword handlers that it reads (``Accelerator(kwargs_handlers=[...])``).
    """

    multi_process: bool = True
    averages_gradients: bool = False
    mesh_axes: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    precisions: frozenset[str] = frozenset({"no", "bf16", "fp16"})
    pipelined: bool = False
    replicated: bool = True
    optimizer_spans_models: bool = True
    sharded_save: bool = False
    async_save: bool = False
    join_uneven_inputs: bool = False
    handlers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Readiness:
    """Result of a probe: whether the backend can run on this machine.

    Args:
        ready: it can.
        reason: one sentence why not (or a remark when it can).
        cure: what to type next.
    """

    ready: bool
    reason: str = ""
    cure: str = ""


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
        probe: can it run here? Imports nothing heavy. By default it can wherever torch does.
        preference: which backend is taken when the user names none: the highest that fits the world (a backend that is
            not ``multi_process`` fits a world of 1). ``None``: only when named.
        implied: for an engine with a configuration file of its own, named by the section: what it says about
            ``mixed_precision`` and ``gradient_accumulation_steps``, by key a pair of the value and, in words, where it
            is written (``ds.json:12``); given the validated section and where each of its keys was written
            (``RunSettings.origins``). It holds where neither script nor configuration says anything; where one does and
            differs, the core raises.
        names: ``{"Name": "package.module:Name"}``: what scripts of Accelerate import for this engine, found by
            ``from drivetrain.utils import Name`` too.
        imports: by the name of a section of Accelerate's configuration files, ``"package.module:RULES"``: a mapping
            from each key of that section to the :class:`drivetrain.api.accelerate.Rule` that says what becomes of it.
            The module imports nothing heavy.
    """

    name: str
    summary: str
    backend: str
    aliases: tuple[str, ...] = ()
    api: int = CONTRACT
    config: str | None = None
    requires: tuple[str, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    probe: Callable[[], Readiness] = lambda: Readiness(ready=True)
    preference: int | None = None
    implied: Callable[[Any, Mapping[str, str]], Mapping[str, tuple[Any, str]]] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    imports: Mapping[str, str] = field(default_factory=dict)


# ---- settings -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrecisionPolicy:
    """Defines ``mixed_precision`` in the same way for every backend. Dtypes are torch's names, ``None`` = leave alone.

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
    """Settings by which the default process group is formed when none exists.

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
    """Settings of a run, given to a backend on construction.

    Args:
        process: ranks, as the launcher gave them.
        mesh: requested axis sizes by name; empty when the user asked for none, then the backend chooses.
        section: the validated config section (an instance of the model named by ``BackendInfo.config``), or ``None``.
        precision: the policy to interpret.
        device_type: ``"cpu"``, ``"cuda"``, ...; ``None`` = what ``torch.accelerator`` finds, else the CPU.
        process_group: how to form the process group.
        handlers: the user's keyword handlers that this backend reads, by class name.
        place_on_device: move parameters to the device in ``prepare``.
        origins: where each key of the section that was given was written, by dotted key below the section.
        name: under which the backend was chosen: ``BackendInfo.name``; empty for one that is made by hand.
        sync_batch_norm: batch norms take their statistics over all data-parallel ranks; see
            :meth:`drivetrain.api.Backend.synchronise_batch_norm`.
    """

    process: ProcessInfo = field(default_factory=ProcessInfo)
    mesh: Mapping[str, int] = field(default_factory=dict)
    section: Any = None
    precision: PrecisionPolicy = field(default_factory=PrecisionPolicy)
    device_type: str | None = None
    process_group: ProcessGroupSettings = field(default_factory=ProcessGroupSettings)
    handlers: Mapping[str, Any] = field(default_factory=dict)
    place_on_device: bool = True
    origins: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    sync_batch_norm: bool = False


ReduceOp = Literal["sum", "mean", "max", "min"]


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one optimizer step, the same on every rank.

    Args:
        skipped: the update was not applied (non-finite gradients); parameters are untouched.
        grad_norm: norm before clipping where it was computed for this step, else ``None``.
        pending: for a device that runs behind the host: waits for it, puts right what the host counted for an update
            that was not applied, and returns ``skipped``. Called once: before the optimizer's next step, or when
            the script asks for the result, a learning rate or a state. ``skipped`` then means nothing.
    """

    skipped: bool = False
    grad_norm: Tensor | None = None
    pending: Callable[[], bool] | None = None


@dataclass
class PortableState:
    """A trainable's state under the names of the original module, for the portable checkpoint.

    Args:
        tensors: ``model.<fqn>`` for parameters and persistent buffers, ``optim.<fqn>.<slot>`` for optimizer state.
            Values are plain tensors when every rank holds all of it; sharded ones are DTensors or, where an engine cuts
            a tensor otherwise, tensors that wrap their local elements (``__tensor_flatten__``) and that
            ``torch.distributed.checkpoint`` asks for their chunks (``__create_chunk_list__``).
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


# ---- abstract base classes ------------------------------------------------------------------------------------------


class Trainable(ABC):
    """One prepared model with its optimizers. Two models are two trainables.

    **The gradient contract.** After the last backward of an accumulation window, each parameter's gradient is that of
    *(sum over all data-parallel ranks and micro-batches of the loss) / denominator*. The core owns the window and the
    denominator: it passes a ``scale`` to :meth:`backward`, and calls :meth:`scale_gradients` at the end of a
    window whose denominator was not known before. A backend keeps no counter of its own.

    The loss is multiplied by ``scale`` and by nothing else. An engine that *averages* gradients over the ranks where
    the contract says *sum* declares ``averages_gradients``; its ``scale`` holds the factor ``dp_size``.

    Attributes:
        module: the user's own module with its original parameter names (parameters may be sharded by now).
        optimizers: what really steps, in the order given to ``prepare``.
        settles_buffers: the engine itself broadcasts the main process's buffers before they are used in
            evaluation (see :class:`drivetrain.api.engines.Buffers`); else the core does, once a window.
        communicates_in_forward: forwards with gradients gather parameters or exchange activations, so that ranks must
            call several models in the same order; the core compares it.
    """

    module: nn.Module
    optimizers: list[Optimizer]
    settles_buffers: bool = False
    communicates_in_forward: bool = False

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``model(...)``: the engine's forward under the policy. Collective where the engine's is."""

    @abstractmethod
    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        """Add the gradients of ``loss * scale``, summed (or averaged) over the data-parallel ranks.

        Collective over the data-parallel axes when gradients are synchronised. ``loss`` is 0-d. When one loss depends
        on several trainables this is called on one of them; it must reach the parameters of all.
        """

    def retaining_graph(self) -> AbstractContextManager[Any]:
        """Context in which :meth:`backward` keeps the graph, as ``loss.backward(retain_graph=True)`` does.

        Raises:
            UnsupportedError: the engine runs one backward for each forward, as by default.
        """
        raise UnsupportedError(
            "backward() does not take retain_graph here: the engine runs one backward for each forward",
            cure="Add up the losses of one forward: accelerator.backward(first + second).",
        )

    def example_loss(self, loss: Tensor, rows: int) -> tuple[Tensor, int] | None:
        """A loss whose autograd graph shows how this one is computed, and over how many rows; ``None`` for none.

        Only an engine that defers forward overrides it: with a loss of the same program over other values, once for
        each program.

        Args:
            loss: what the script passes to ``backward``, or its loss function returned.
            rows: samples of this rank's batch.
        """
        return loss, rows

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
        """Clamp each gradient element to ``[-clip_value, clip_value]``."""

    @abstractmethod
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Apply one update; ``optimizer`` is one of ``optimizers``. Collective where the engine's step is.

        Skips when the loss scaler overflowed or the last clipping norm was not finite; then parameters and optimizer
        state stay untouched. The result is the same on every rank.
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

    @abstractmethod
    def live_tensors(self) -> dict[str, Any]:
        """The tensors trained on this rank, as ``model.<fqn>``: live memory, to be read and written. Not collective.

        Parameters and persistent buffers; where the engine trains copies in higher precision, those. Layouts are the
        engine's. After writing, :meth:`load_portable_state` of an empty state derives what follows.
        """

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Take the loss scale out of this optimizer's gradients before its step; default nothing: they carry none."""
        return

    def has_unreduced_gradients(self) -> bool:
        """Whether some gradient holds contributions of this rank alone; default ``False``. Not collective.

        The core asks before each optimizer step and refuses it, unless the script keeps gradients on their rank
        (``no_sync``, LocalSGD). An engine that reduces gradients in every backward that reaches its parameters,
        also one that the script calls, leaves the default.
        """
        return False

    @abstractmethod
    def gradient_hooks(self) -> Iterable[GradientHook]:
        """The script's hooks on gradients of parameters. Not collective.

        :func:`drivetrain.api.hooks_of` returns those that torch knows of. An engine that keeps hooks elsewhere adds
        them, one that sets hooks of its own on parameters leaves these out.
        """

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
        """Whether any of these tensors belongs to this model, now or before the engine replaced its parameters."""
        return not {id(each) for each in parameters}.isdisjoint(map(id, self.module.parameters()))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take an optimizer that was prepared after its model. Collective where ``prepare`` is.

        The default fits an engine whose parameters are still the objects that the optimizer holds; one that replaced
        them finds them again by name. A model that was prepared with ``training=False`` is trained from here on: the
        core prepares it anew where ``capabilities.replicated``, and another engine makes now what it left out.
        """
        self.optimizers.append(optimizer)

    def remove_optimizer(self, optimizer: Optimizer) -> None:
        """Forget an optimizer that a later one replaces, which :meth:`add_optimizer` is given next. Not collective.

        The core calls this where the later one holds parameters of it. Where the script goes on to step it all the
        same, it is added again; an engine that steps a parameter by one optimizer alone refuses that.
        """
        self.optimizers[:] = [each for each in self.optimizers if each is not optimizer]

    @abstractmethod
    def release(self) -> None:
        """Release the engine (wrappers, hooks, communication) but keep ``module`` usable. May be called twice."""

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
        total: Tensor | None = None
        for index, (args, kwargs, batch) in enumerate(micro_batches):
            self.synchronise_gradients(index == len(micro_batches) - 1)
            loss = loss_fn(self.forward(*args, **kwargs), batch)
            self.backward(loss, scale)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a window has a micro-batch"
        return total

    @abstractmethod
    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full tensor of each parameter and persistent buffer, one at a time, in ``state_dict`` order.

        Collective where parameters are sharded: every rank iterates to the end, and holds one gathered tensor at most.

        Raises:
            UsageError: an engine that does not gather for some of the ranks alone may refuse here; at the call, not at
                the first tensor, since all ranks count as having made the call from then on.
        """

    def before_state_dict(self, *, replicated: bool) -> None:
        """Called before the script's ``model.state_dict()``, which ``save_pretrained`` calls too. Not collective.

        With every engine ``state_dict`` returns the whole state, or this raises. The default allows it where every rank
        holds all parameters. An engine may allow more where its tensors behave as whole ones in every operation of a
        script, ``torch.save`` included.

        Args:
            replicated: the backend's capability of that name.

        Raises:
            UsageError: this rank holds parts only.
        """
        if not replicated:
            raise UsageError(
                f"{type(self.module).__name__}.state_dict() would be this rank's part of a model that is sharded",
                cure="On every rank write accelerator.get_state_dict(model), which is whole on the main process, or "
                "accelerator.save_model(model, folder). save_pretrained takes the former as its argument state_dict.",
            )


class Backend(ABC):
    """The engine in this process; one per run. Created, started, used and stopped, in that order.

    A backend whose processes communicate by ``torch.distributed`` derives from
    :class:`drivetrain.api.DistributedBackend`, which has the collectives.

    Attributes:
        capabilities: the same data as in :class:`BackendInfo`; where this run's settings make no pipeline or keep
            everything on every rank, :meth:`start` sets a copy with ``pipelined`` or ``sharded_save`` switched off.
        settings: what the run asked for.
        topology: set by :meth:`start`.
        scaler: the ``torch.amp.GradScaler`` in use, when the backend scales losses with one.
    """

    capabilities: Capabilities
    settings: RunSettings
    topology: Topology
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings

    @abstractmethod
    def start(self) -> Topology:
        """Form (or join) the process group or runtime, select the device, build the mesh. Collective over all ranks.

        Sets and returns ``self.topology``. An existing default process group is used as it is, never torn down.
        """

    @abstractmethod
    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
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
        """Destroy what :meth:`start` created. May be called twice. Not collective."""

    def init_context(self) -> AbstractContextManager[Any]:
        """Entered around model construction (meta device, ``zero.Init``); default nothing."""
        return nullcontext()

    @abstractmethod
    def synchronise_batch_norm(self, model: nn.Module) -> None:
        """Let batch norms take their statistics over all data-parallel ranks. Not collective.

        Called before :meth:`prepare` for each model that is trained, where ``settings.sync_batch_norm`` asks for it.
        An engine that cannot raises :class:`~drivetrain.api.UnsupportedError`.
        """

    def sync(self) -> None:
        """Run what a lazy device has recorded; default nothing. Not collective.

        Called at the end of each optimizer step, and before a state is saved, loaded or exported.
        """
        return

    def place_batch(
        self, batch: Any, rows: int, full_rows: int, move: Callable[[Any], Any] | None
    ) -> tuple[Callable[[], Any] | None, int]:
        """Start to move a batch to the device. Not collective.

        Called when the batch was read, one batch before it is yielded; by default it is copied when it is yielded.

        Args:
            batch: what the loader collated.
            rows: samples in it.
            full_rows: samples in a full batch of this loader, 0 where there is no such number.
            move: copies a batch to the device; ``None`` where the script wants its batches left where they are.

        Returns:
            A function that returns the batch on its device, called when it is yielded, or ``None`` for ``move``; and
            its number of rows, more than ``rows`` where padding rows were added whose labels a loss ignores. Every rank
            pads its batch to this size. Values gathered for metrics leave them out.
        """
        return None, rows

    @abstractmethod
    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The precision policy's compute context, for code outside of a model's forward."""

    def join(self, trainables: Sequence[Trainable]) -> AbstractContextManager[Any]:
        """Let ranks run out of batches at different times; needs the capability ``join_uneven_inputs``."""
        raise UnsupportedError(
            f"the backend {name_of(self)} cannot train while some ranks have no batches left",
            cure="Leave join_uneven_inputs out, and keep even_batches=True, which gives every rank the same number of "
            "batches.",
        )

    # Collectives on tensors and objects: over the data-parallel axes for gather and reduce, over all ranks for
    # broadcast, objects and barrier. With one process they are local.

    @abstractmethod
    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate along dim 0 over the data-parallel ranks, by coordinate. Same shape on every rank, dim >= 1."""

    @abstractmethod
    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce over the data-parallel ranks; every rank gets the result, ``tensor`` itself is left as it was."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Send global rank ``src``'s tensor to every rank; shape and dtype agree on every rank."""

    @abstractmethod
    def gather_object(self, obj: Any) -> list[Any]:
        """One picklable object from every data-parallel rank, by coordinate."""

    @abstractmethod
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Send global rank ``src``'s picklable object to every rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank of the job has made this call."""


def name_of(backend: Backend) -> str:
    """Return what ``distributed_type`` calls a backend, or the name of its class where it was made by hand."""
    return backend.settings.name or type(backend).__name__


class FileConfiguredBackend(Backend):
    """A backend whose engine has its own configuration file, which may overlap with the script's arguments.

    The file is what the section names or holds. ``BackendInfo.implied`` tells the core what it says of precision and
    accumulation; here it is compared with the script's batches, and may describe optimizer and schedule. Only under
    such a backend can ``DummyOptim`` and ``DummyScheduler`` be prepared.
    """

    @abstractmethod
    def set_batches(self, sizes: Sequence[int], accumulation_steps: int) -> None:
        """Compare how the script batches its data with what the file says. Not collective.

        Called before each :meth:`prepare`, and again when a loader is prepared or the window's length changes.

        Args:
            sizes: samples in a full batch of one data-parallel rank, for each prepared loader that has such a number.
            accumulation_steps: micro-batches in a full window.

        Raises:
            UsageError: the file says something else.
        """

    @abstractmethod
    def file_scheduler(self, scheduler: Any, optimizers: Sequence[Optimizer]) -> Any | None:
        """The file's scheduler, which replaces the script's; ``None`` where the file names none. Not collective.

        Args:
            scheduler: what the script prepared, a ``DummyScheduler`` where it leaves the schedule to the file.
            optimizers: what really steps, of those whose learning rate it sets.

        Raises:
            UsageError: both name a schedule.
        """
