"""What a plugin describes as data, and what a backend is told at birth: frozen records, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.topology import Place

CONTRACT = 1
"""Version of this contract. It grows when an old plugin would be wrong under the new core, or the other way round."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend declares it can do. The conformance kit proves each flag, both ways.

    ``pipelined`` and ``sharded_save`` say what settings may ask for: a backend whose settings ask for less says so in
    :meth:`~drivetrain.api.Backend.start`, see ``Backend.capabilities``. All others hold for every run.

    Args:
        multi_process: trains over several processes. When ``False`` a world larger than 1 is refused.
        mesh_axes: mesh axes that may be larger than 1.
        devices: device types it runs on; empty means every type that torch knows.
        precisions: values of ``mixed_precision`` that it interprets.
        owns_optimizer: ``prepare`` may replace the optimizer by the engine's own.
        pipelined: a forward in training mode is deferred until the loss is known.
        accumulates_without_sync: ``synchronise_gradients(False)`` really skips communication; what then stays on a rank
            is the gradient of ``loss * scale * dp_size``, with which LocalSGD steps.
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


@dataclass(frozen=True, slots=True)
class Statement:
    """One value that somebody wrote, and where, for an error that shows both sides.

    Args:
        value: as it was read.
        where: in words: ``ds.json:12``, ``train.yaml:3:18``, ``the script``.
    """

    value: Any
    where: str


def nothing_implied(_section: Any, _origins: Mapping[str, str]) -> Mapping[str, Statement]:
    """A section that says nothing about the core's keys."""
    return {}


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
        implied: what the backend's own section says about ``mixed_precision`` and ``gradient_accumulation_steps``, by
            key, given the validated section and where each of its keys was written (``RunSettings.origins``). It holds
            where neither script nor configuration says anything; where one does and differs, the core raises.
        names: ``{"Name": "package.module:Name"}``: what scripts of Accelerate import for this engine, found by
            ``from drivetrain.utils import Name`` too.
        imports: by the name of a section of Accelerate's configuration files, ``"package.module:RULES"``: a mapping
            from each key of that section to the :class:`drivetrain.api.Rule` that says what becomes of it. The module
            imports nothing heavy.
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
    implied: Callable[[Any, Mapping[str, str]], Mapping[str, Statement]] = nothing_implied
    names: Mapping[str, str] = field(default_factory=dict)
    imports: Mapping[str, str] = field(default_factory=dict)


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
class Feeding:
    """How a backend wants batches to come to its device. The default: one copy, when the batch is shown.

    Args:
        ahead: copy the next batch in a thread while the script works on this one. Samples are still read by the
            script's own thread, so that random numbers are drawn in the same order.
        send: brings one tensor of a batch to the device, in that thread; ``None`` = ``tensor.to(device)``. Where the
            engine's own ``to`` must not run beside the script, this is what may.
        filler: fill the last batch of an epoch up to the size of the others, for a device that compiles anew for each
            shape: rows are repeated, and their labels become this number, which the loss must ignore. What is gathered
            for metrics leaves them out. ``None`` leaves batches as they are.
    """

    ahead: bool = False
    send: Callable[[Any], Any] | None = None
    filler: int | None = None


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
        origins: where each key of the section that was given was written, by dotted key below the section.
        name: under which the backend was chosen: ``BackendInfo.name``; empty for one that is made by hand.
        sync_batch_norm: batch norms take their statistics over all data-parallel ranks; see
            :meth:`drivetrain.api.Backend.synchronise_batch_norm`.
    """

    place: Place = field(default_factory=Place)
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
