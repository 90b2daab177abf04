"""Applies ``fully_shard`` to the units and the root of a model, as configured."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from drivetrain.api import PrecisionPolicy, Topology, UnsupportedError, UsageError, collectives, dtype_of
from drivetrain_fsdp import private_names
from drivetrain_fsdp.buffers import state_buffers, unchanged_buffers
from drivetrain_fsdp.config import FSDPConfig
from drivetrain_fsdp.units import choose_units, owners
from drivetrain_sharding import has_other_strides, keep_class_name, parameter_groups, with_strides

logger = logging.getLogger(__name__)

_KEEPS_STATISTICS = (nn.modules.batchnorm._NormBase,)  # noqa: SLF001 (the common base of batch and instance norms)
"""Layers whose kernels require parameters in the dtype of their running statistics, float32."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""On the CPU their kernels take no float32 input beside low-precision parameters."""

FLOATS_ALONE = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
"""Up to torch 2.11 ``fully_shard`` makes each shard a parameter that requires gradients, which integers cannot be."""


@dataclass
class Plan:
    """Plan of a module's sharding; created before anything is changed.

    Args:
        units: modules that are gathered separately, children before parents, without the root.
        blocks: those of them that the configuration chose; checkpointed, compiled, prefetched.
        whole: parameters that cannot be sharded.
    """

    units: list[nn.Module]
    blocks: list[nn.Module]
    whole: list[nn.Parameter]


@dataclass
class Sharded:
    """A module after :func:`shard`.

    Args:
        root: the module itself.
        modules: every unit and the root.
        stay_whole: those whose parameters stay gathered after a forward.
        undo: removes what was added to the modules besides sharding.
    """

    root: FSDPModule
    modules: list[FSDPModule]
    stay_whole: list[FSDPModule]
    undo: list[Callable[[], None]] = field(default_factory=list)


def plan(module: nn.Module, config: FSDPConfig, policy: PrecisionPolicy) -> Plan:
    """Choose units and replicated parameters. The policy's dtypes are already applied.

    The trained parameters of a unit must have one dtype: a leaf module of another one becomes a unit of its own, and a
    parameter beside others of another dtype in one module is replicated.
    """
    blocks = choose_units(module, config)
    whole = [each for each in module.parameters() if not (each.dim() and each.numel() and _is_cut(each))]
    home = owners(module, blocks)
    tops = {id(module), *map(id, blocks)}
    trained = {
        part: [one for one in part.parameters(recurse=False) if one.requires_grad and one.dim()]
        for part in module.modules()
    }
    sizes: dict[int, Counter[torch.dtype]] = {}
    for part, parameters in trained.items():
        for parameter in parameters:
            sizes.setdefault(id(home[id(part)]), Counter())[parameter.dtype] += parameter.numel()
    apart = set()
    for part, parameters in trained.items():
        if not parameters:
            continue
        main = sizes[id(home[id(part)])].most_common(1)[0][0]
        odd = [parameter for parameter in parameters if parameter.dtype != main]
        is_leaf = id(part) not in tops and not any(True for _ in part.children())
        if is_leaf and (len(odd) == len(parameters) or (policy.compute and isinstance(part, _KEEPS_STATISTICS))):
            apart.add(id(part))
        else:
            whole.extend(odd)
    chosen = apart | set(map(id, blocks))
    return Plan([part for part in module.modules() if id(part) in chosen][::-1], blocks, whole)


def _is_cut(parameter: Tensor) -> bool:
    """Whether ``fully_shard`` of the installed torch takes parameters of this dtype."""
    return gets_gradients(parameter) or not FLOATS_ALONE


def gets_gradients(parameter: Tensor) -> bool:
    """Whether a parameter is of a dtype that can have a gradient."""
    return parameter.is_floating_point() or parameter.is_complex()


def shard(
    module: nn.Module, plan: Plan, config: FSDPConfig, policy: PrecisionPolicy, mesh: DeviceMesh, topology: Topology
) -> Sharded:
    """Shard a module in place, from rank 0's values. Collective over all ranks.

    Parameters on meta stay there, as shards. At most one unit is whole on the device at a time.
    """
    low = MixedPrecisionPolicy(
        # Autocast runs too and casts what operators take, so that inputs keep the precision they come in.
        param_dtype=None if policy.compute is None else dtype_of(policy.compute),
        reduce_dtype=None if policy.reduce is None else dtype_of(policy.reduce),
        cast_forward_inputs=False,
    )
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    undo: list[Callable[[], None]] = []
    for block in plan.blocks or [module]:
        if config.activation_checkpointing:
            undo.append(_checkpoint(block))
        if config.compile:
            block.compile(**({"backend": config.compile} if isinstance(config.compile, str) else {}))
    if policy.compute is not None and topology.device == "cpu":
        undo.extend(_cast_norm_inputs(module))
    ignored = set(plan.whole)
    for parameter in plan.whole:
        parameter.data = with_strides(_placed(parameter, topology), parameter.stride())
    strides = _strides(module)
    modules = [*plan.units, module]
    for unit in modules:
        for parameter in unit.parameters():
            # Parameters of inner units are shards by now.
            if not (parameter.is_meta or parameter in ignored or isinstance(parameter, DTensor)):
                parameter.data = _placed(parameter, topology)
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=full if isinstance(unit, _KEEPS_STATISTICS) else low,
            offload_policy=_offloading(config, topology),
            ignored_params=ignored,
        )
        keep_class_name(unit)
        _keep_strides(unit, strides)
    sharded = Sharded(_as_sharded(module), [_as_sharded(unit) for unit in modules], [], undo)
    after = config.reshard_after_forward
    sharded.stay_whole = [sharded.root] if after is None else [] if after is True else sharded.modules
    _prefetch([_as_sharded(block) for block in reversed(plan.blocks)], sharded.root, config)
    if config.reduce_unused_parameters:
        _reduce_unused(sharded.root)
    for method in dict.fromkeys([*config.forward_methods, *_beside_forward(module)]):
        if not callable(getattr(module, method, None)):
            raise UsageError(
                f"fsdp.forward_methods: {type(module).__name__} has no method {method!r}",
                cure="Name methods of the prepared model that compute with its parameters, or leave it out.",
            )
        register_fsdp_forward_method(module, method)
        setattr(module, method, _outside_inference_mode(getattr(module, method)))
    return sharded


def _beside_forward(module: nn.Module) -> list[str]:
    """Methods that call parts of the model past its forward: ``generate`` of an encoder with a decoder."""
    config = getattr(module, "config", None)
    encodes = getattr(config, "is_encoder_decoder", False) is True
    return ["generate"] if encodes and callable(getattr(module, "generate", None)) else []


def _outside_inference_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with gradients off where inference mode was on: parameters gathered in it could never be trained."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(mode=False), torch.no_grad():
            return method(*args, **kwargs)

    return call


def check_reshard(config: FSDPConfig, ranks: int) -> None:
    """Raise :class:`UsageError` when parameters cannot be kept in shards over so many ranks."""
    number = config.reshard_after_forward
    if number is None or isinstance(number, bool):
        return
    if not 1 < number < ranks or ranks % number:
        able = [size for size in range(2, ranks) if ranks % size == 0]
        raise UsageError(
            f"fsdp.reshard_after_forward: {number} does not divide the {ranks} ranks of the axis dp_shard into groups",
            cure=f"Write {', '.join(map(str, [*able, 'true']))} or false.",
        )


def _placed(parameter: Tensor, topology: Topology) -> Tensor:
    """Rank 0's values on the device, in the order of memory that ``fully_shard`` takes. Collective over all ranks."""
    data = parameter.detach().to(topology.device).contiguous()
    # Into its own memory: a copy for each parameter would fragment the heap.
    return data.copy_(collectives.broadcast(data, 0, topology)) if topology.world_size > 1 else data


def _strides(module: nn.Module) -> dict[tuple[nn.Module, str], tuple[int, ...]]:
    """Strides of the parameters that do not lie row by row, by the modules that hold them and their names there."""
    return {
        (part, name): parameter.stride()
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False)
        if has_other_strides(parameter)
    }


def _keep_strides(unit: nn.Module, strides: Mapping[tuple[nn.Module, str], tuple[int, ...]]) -> None:
    """Give shards the strides of the full parameters, which torch's random numbers depend on. Not collective.

    ``fully_shard`` takes parameters row by row only, and its shards lie so. Strides of a DTensor are those of the full
    tensor, and what is computed from it has strides computed from them.
    """
    if not strides:
        return
    groups = parameter_groups([_as_sharded(unit)], "drivetrain-fsdp")
    private_names.check(groups)
    for one in (each for group in groups for each in group.fsdp_params):
        place = one._module_info  # noqa: SLF001
        its = strides.get((place.module, place.param_name))
        if its is None:
            continue
        old, local = one.sharded_param, one.sharded_param.detach().to_local()
        laid = DTensor.from_local(local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=its)
        one.sharded_param = nn.Parameter(laid, requires_grad=old.requires_grad)
        one._sharding_spec = one.sharded_param._spec  # noqa: SLF001
        for holder, name in zip(
            (place.module, *place.shared_modules), (place.param_name, *place.shared_param_names), strict=True
        ):
            holder.register_parameter(name, one.sharded_param)


def _offloading(config: FSDPConfig, topology: Topology) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    # Pinning needs an accelerator.
    return CPUOffloadPolicy(pin_memory=config.pin_memory and topology.device != "cpu")


def _as_sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _checkpoint(module: nn.Module) -> Callable[[], None]:
    """Recompute this module's activations in backward. Inside of FSDP's hooks, and without a wrapper in the names."""
    inner = module.forward
    counts = bool(state_buffers(module))

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), unchanged_buffers(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        if counts:
            kwargs["context_fn"] = contexts
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    module.forward = forward

    def undo() -> None:
        module.__dict__.pop("forward", None)

    return undo


def _cast_norm_inputs(module: nn.Module) -> list[Callable[[], None]]:
    def cast(norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        weight = norm.weight
        if not args or not isinstance(weight, Tensor) or args[0].dtype == weight.dtype:
            return args
        return (args[0].to(weight.dtype), *args[1:])

    return [part.register_forward_pre_hook(cast).remove for part in module.modules() if isinstance(part, _NORMS)]


def _prefetch(blocks: Sequence[FSDPModule], root: FSDPModule, config: FSDPConfig) -> None:
    """Prefetch blocks in their order in the model."""
    ahead, back = config.forward_prefetch, config.backward_prefetch or 0
    if ahead and blocks:
        root.set_modules_to_forward_prefetch(list(blocks[:ahead]))
    for place, block in enumerate(blocks):
        if ahead:
            block.set_modules_to_forward_prefetch(list(blocks[place + 1 : place + 1 + ahead]))
        if back:
            block.set_modules_to_backward_prefetch(list(reversed(blocks[max(place - back, 0) : place])))
    if back and blocks:
        root.set_modules_to_backward_prefetch(list(reversed(blocks[-back:])))


def _reduce_unused(root: FSDPModule) -> None:
    switch = getattr(root, "set_reduce_scatter_unused_params", None)
    if switch is None:
        raise UnsupportedError(
            f"fsdp.reduce_unused_parameters needs a newer torch than {torch.__version__}",
            cure="Upgrade torch, or let every rank use the same parameters in each step.",
        )
    switch(True)
