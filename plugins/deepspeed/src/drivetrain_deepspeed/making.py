"""Creates the engine of one model: optimizer, configuration, and records taken before DeepSpeed changes the model."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

from drivetrain.api import UnsupportedError, UsageError, original_module
from drivetrain.api.accelerate import DummyOptim
from drivetrain_deepspeed import compiling, elementwise, private_names, quiet, rank_state
from drivetrain_deepspeed.driving import Driver
from drivetrain_deepspeed.engine_config import hidden_size_of
from drivetrain_deepspeed.first_steps import compare_buckets, compare_gathers
from drivetrain_deepspeed.forward_writes import WatchedForwards, refuse_max_norm
from drivetrain_deepspeed.groups import refuse_states
from drivetrain_deepspeed.guard import Guard
from drivetrain_deepspeed.layout import flat_groups, num_elements
from drivetrain_deepspeed.loading import load_in_parts, refuse_hidden_outputs
from drivetrain_deepspeed.optimizers import ScriptOptimizer, engine_optimizer
from drivetrain_deepspeed.several import SeveralOptimizers
from drivetrain_deepspeed.state import EngineState, RecordedGroups
from drivetrain_sharding import AssignmentRefusal, has_other_strides, pickle_as_made

if TYPE_CHECKING:
    from drivetrain_deepspeed.backend import DeepSpeedBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MadeEngine:
    """Objects of one engine that a trainable uses.

    Args:
        driver: of the engine; ``None`` where the model is not trained.
        state: for checkpoints.
        optimizers: those that step, in the order of the script's.
        guard: of the module's parameters; ``None`` where no engine was made.
    """

    driver: Driver | None
    state: EngineState
    optimizers: list[Optimizer]
    guard: Guard | None = None


def _refuse_float64(module: nn.Module) -> None:
    """Raise :class:`UnsupportedError` where DeepSpeed would make a model in float64 one in float32 without a word."""
    for name, parameter in module.named_parameters():
        if parameter.dtype is torch.float64:
            raise UnsupportedError(
                f"{name} of {type(module).__name__} is torch.float64, and DeepSpeed trains in float32, bfloat16 or "
                "float16",
                cure="Write model.float() before prepare, or distributed_type: ddp, which trains in float64.",
            )


def make_engine(backend: DeepSpeedBackend, model: nn.Module, optimizers: Sequence[Optimizer]) -> MadeEngine:
    """Make an engine for a model and its optimizers; for evaluation without any. Collective over all ranks.

    Raises:
        UsageError: optimizer and section contradict each other, or DeepSpeed could not take this optimizer.
    """
    module = original_module(model)
    if not optimizers:
        return _evaluating(backend, model, module)
    _refuse_float64(module)
    refuse_max_norm(module, backend.config.stage, backend.topology.dp_size)
    for optimizer in optimizers:
        _check(optimizer, module)
        elementwise.check(optimizer, backend.config.stage)
    described = _described(backend, optimizers)
    _refuse_shared_parameters(optimizers, module)
    config = _dictionary(backend, module, described)
    recorded = [RecordedGroups.of(optimizer) for optimizer in optimizers]
    # DeepSpeed silently replaces an Adagrad by a new one of one group, unknown to the script and its schedule.
    adagrads = [each for each in optimizers if isinstance(each, torch.optim.Adagrad)] if backend.config.stage else []
    for adagrad in adagrads:
        adagrad.state.clear()
    several = len(optimizers) > 1 or adagrads
    client: Optimizer | None = SeveralOptimizers(optimizers) if several else optimizers[0]
    given: dict[str, Any] = {"optimizer": client}
    if described is not None:
        assert isinstance(optimizers[0], DummyOptim)
        elementwise.check_described(str(described["type"]), backend.config.stage)
        given = {"model_parameters": optimizers[0].given_groups()}
    strides = _strides(module) if backend.config.stage else {}
    if backend.config.stage == 3:
        _refuse_empty(module)
        _make_contiguous(module)
    of_script = _attributes(module)
    engine = _initialize(backend, model, config, **given)
    private_names.check_engine(engine)
    steps = list(optimizers)
    if described is not None:
        steps = [engine.basic_optimizer]
        recorded = [RecordedGroups(recorded[0].parameters, tuple(steps[0].param_groups), steps[0])]
    for adagrad in adagrads:
        _fill_adagrad(adagrad, engine.optimizer)
    guard = Guard(module, backend.config.stage, strides)
    _write_as_made(of_script, backend.config.stage)
    held = [
        (optimizer, [parameter for group in its.parameters for parameter in group])
        for optimizer, its in zip(steps, recorded, strict=True)
    ]
    driver = Driver(engine, backend.topology, backend.loss_scale, held, guard, backend.config.clipping)
    driver.extra_hooks = _close_ways_around(optimizers, guard, backend.config.stage)
    if backend.config.stage in (1, 2):
        driver.extra_hooks.append(AssignmentRefusal(module, f"ZeRO stage {backend.config.stage} shares out over ranks"))
    if backend.config.stage:
        client = engine.basic_optimizer
        every = steps if any(client is each for each in steps) else [*steps, client]
        refuse_states(every, [held_by for _, held_by in held], guard, backend.config.stage)
    rank_state.serve(steps, driver.zero, backend.topology)
    if backend.config.stage in (1, 2):
        compare_buckets(module, driver.zero, backend.topology)
    if backend.config.stage == 3:
        load_in_parts(module)
        driver.refuse_second_derivatives_in_forward()
        offload = engine.optimizer.parameter_offload
        zero = engine._config.zero_config  # noqa: SLF001
        quantised = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
        order = compare_gathers(module, engine.optimizer, backend.topology)
        driver.watched = WatchedForwards(
            module, offload.forward_hooks, guard, backend.topology, order, exact=not quantised
        )
        driver.extra_hooks += [*refuse_hidden_outputs(module), driver.watched]
    return MadeEngine(driver, EngineState(module, engine.optimizer, recorded), steps, guard)


def _strides(module: nn.Module) -> dict[int, tuple[int, ...]]:
    """Strides of the parameters that do not lie row by row, by identity."""
    return {id(each): each.stride() for each in module.parameters() if has_other_strides(each)}


def _make_contiguous(module: nn.Module) -> None:
    """Stage 3 compares parameters between ranks byte by byte, as views that only contiguous ones have."""
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _refuse_empty(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not num_elements(parameter):
            raise UnsupportedError(
                f"the parameter {name} of {type(module).__name__} has no element, and ZeRO stage 3 cannot gather it",
                cure="Make it a buffer (register_buffer), or leave it out, or write deepspeed: {zero_stage: 2}.",
            )


def _evaluating(backend: DeepSpeedBackend, model: nn.Module, module: nn.Module) -> MadeEngine:
    """Stage 3 keeps a model in parts for evaluation too; under the other stages it needs no engine."""
    if backend.config.stage < 3:
        return MadeEngine(None, EngineState(module, None), [])
    _refuse_empty(module)
    engine = _initialize(backend, model, _dictionary(backend, module, None))
    load_in_parts(module)
    return MadeEngine(None, EngineState(module, engine.optimizer), [], Guard(module, backend.config.stage))


def _attributes(module: nn.Module) -> dict[nn.Parameter, frozenset[str]]:
    """Names of what is set on each parameter."""
    return {parameter: frozenset(vars(parameter)) for parameter in module.parameters()}


def _write_as_made(of_script: Mapping[nn.Parameter, frozenset[str]], stage: int) -> None:
    """Leave out of a pickled parameter what DeepSpeed has set on it since. In stage 3 none is whole."""
    for parameter, names in of_script.items() if stage < 3 else ():
        pickle_as_made(parameter, vars(parameter).keys() - names)


def _fill_adagrad(adagrad: torch.optim.Adagrad, zero: Any) -> None:
    """State for the flat partitions, as its constructor makes it for parameters."""
    for flat in flat_groups(zero):
        start = zero.optimizer.param_groups[flat.group]["initial_accumulator_value"]
        adagrad.state[flat.flat] = {"step": torch.tensor(0.0), "sum": torch.full_like(flat.flat.detach(), start)}


def _close_ways_around(optimizers: Sequence[Optimizer], guard: Guard, stage: int) -> list[Any]:
    """Make calls of the script's own optimizer that would not train its model raise. Returns hook handles."""
    hooks: list[Any] = []

    def no_group(_: Any) -> None:
        raise UnsupportedError(
            "DeepSpeed lays out the parameters of all groups when they are prepared, and takes no group afterwards",
            cure="Prepare a new optimizer of all groups, whose state begins anew: optimizer = "
            "accelerator.prepare(torch.optim.AdamW(groups)). Or give parameters that train later to an optimizer of "
            "their own before prepare, which does not step yet.",
        )

    def by_itself(name: str) -> UsageError:
        return UsageError(
            f"step() or zero_grad() of the {name} that was given to prepare was called: under ZeRO it holds partitions "
            "of the parameters, which have no gradients",
            cure="Call zero_grad() and step() of the optimizer that accelerator.prepare returned.",
        )

    def no_step(optimizer: Optimizer, *_: Any) -> None:
        if not guard.engine_at_work:
            raise by_itself(type(optimizer).__name__)

    def no_zero_grad(name: str, *_: Any, **__: Any) -> None:
        # With offload these are the buffers to which DeepSpeed copies gradients, and it does not make them again.
        raise by_itself(name)

    no_step.only_reads = True  # type: ignore[attr-defined]
    for optimizer in optimizers:
        optimizer.add_param_group = no_group  # type: ignore[method-assign,assignment]
        if stage and not isinstance(optimizer, DummyOptim):
            kind = type(optimizer).__name__
            if "_optimizer_step_pre_hooks" not in vars(optimizer):
                raise UnsupportedError(
                    f"{kind} inherits from torch.optim.Optimizer and has not called its __init__, so that the engine "
                    "cannot watch its steps",
                    cure=f"Call `super().__init__(params, defaults)` in {kind}.__init__, and set attributes after it.",
                )
            hooks.append(optimizer.register_step_pre_hook(no_step))
            optimizer.zero_grad = partial(no_zero_grad, kind)  # type: ignore[method-assign]
    return hooks


def _initialize(backend: DeepSpeedBackend, model: nn.Module, config: dict[str, Any], **given: Any) -> Any:
    installed = backend.deepspeed.git_version_info.installed_ops
    backend.takes_apart(original_module(model))
    try:
        with compiling.guard(config, installed), quiet.surroundings(backend.settings.process):
            _cut_by_a_float(backend, model, config)
            engine, *_ = backend.deepspeed.initialize(model=model, config=config, **given)
    except (AssertionError, ValueError, NotImplementedError, _config_error()) as error:
        raise UsageError(
            f"DeepSpeed refuses these settings: {reason(error)}",
            whose=f"deepspeed {backend.deepspeed.__version__}",
            cure="Change them in the section `deepspeed:`, its file or its dictionary.",
        ) from error
    return engine


def _cut_by_a_float(backend: DeepSpeedBackend, model: nn.Module, config: dict[str, Any]) -> None:
    """Partition the parameters under stage 3 of a model whose first parameter is an integer.

    DeepSpeed takes the dtype of training from the first parameter, and requires a float if the device supports float16.
    """
    dtypes = [parameter.dtype for parameter in model.parameters()]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    if backend.config.stage == 3 and floats and dtypes[0] != floats[0]:
        backend.deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=floats[0])


def _config_error() -> type[Exception]:
    kind: type[Exception] = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfigError
    return kind


def reason(error: Exception) -> str:
    """Return DeepSpeed's error on one line; of pydantic errors each key with its problem."""
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)
        return "; ".join(f"{error.title}.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _dictionary(backend: DeepSpeedBackend, module: nn.Module, optimizer: dict[str, Any] | None) -> dict[str, Any]:
    config, open_keys = backend.config.dictionary(hidden_size_of(module), optimizer)
    if open_keys:
        logger.info(
            "%s: the model has no config.hidden_size to fill in %s, which have DeepSpeed's own defaults.",
            type(module).__name__,
            ", ".join(open_keys),
        )
    return config


def _described(backend: DeepSpeedBackend, optimizers: Sequence[Optimizer]) -> dict[str, Any] | None:
    """The optimizer that the section describes, where the script leaves it to that."""
    found = [
        engine_optimizer(
            backend.config.written,
            ScriptOptimizer(
                type(optimizer).__name__,
                placeholder=isinstance(optimizer, DummyOptim),
                given=optimizer.given if isinstance(optimizer, DummyOptim) else {},
                defaults=optimizer.defaults,
                groups=optimizer.param_groups,
            ),
            backend.topology.device.partition(":")[0],
        )
        for optimizer in optimizers
    ]
    if len(found) > 1 and any(each is not None for each in found):
        raise UsageError(
            "DummyOptim stands for the one optimizer that DeepSpeed makes, and this model has several",
            cure="Prepare real optimizers, e.g. torch.optim.AdamW(...).",
        )
    return found[0]


def _check(optimizer: Optimizer, module: nn.Module) -> None:
    mine = {id(parameter) for parameter in module.parameters()}
    if any(id(parameter) not in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise UnsupportedError(
            f"this {type(optimizer).__name__} holds parameters that are not of {type(module).__name__}, and DeepSpeed "
            "steps one model at a time",
            cure="Make an optimizer for each model, and one for all parameters that are of no model, and prepare them "
            "all: accelerator.prepare(model, optimizer, other).",
        )
    if optimizer.state and not _is_fresh(optimizer):
        raise UnsupportedError(
            f"this {type(optimizer).__name__} has state of its parameters already, and DeepSpeed would forget it",
            cure="Prepare it before its first step; load the state afterwards with accelerator.load_state. An "
            "optimizer of your own may make its state in the first step instead of in its constructor.",
        )
    for index, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            raise UnsupportedError(
                f"parameter group {index} of {type(optimizer).__name__} holds no trained parameter, which DeepSpeed "
                "does not take",
                cure="Leave frozen parameters out of the optimizer, and a group that is empty without them: "
                "AdamW([group for group in groups if group['params']]).",
            )


def _refuse_shared_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise where two optimizers that are prepared together hold the same parameter. Not collective.

    Raises:
        UnsupportedError: two do.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        shared = [parameter for number, parameter in held.items() if number in owners and number in names]
        if shared:
            first = shared[0]
            others = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
            raise UnsupportedError(
                f"{type(owners[id(first)]).__name__} and {type(optimizer).__name__} both hold the parameter "
                f"{names[id(first)]} of {type(module).__name__}{others}, and DeepSpeed lays out each parameter for one "
                "optimizer",
                cure="Give each parameter to one optimizer. Where the second is for a later phase, prepare it when "
                "that begins: optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.01)), which "
                "takes the place of the first.",
            )
        owners |= dict.fromkeys(held, optimizer)


def _is_fresh(optimizer: Optimizer) -> bool:
    """An Adagrad fills its state when it is made; it has not stepped as long as its counts are 0."""
    known = isinstance(optimizer, torch.optim.Adagrad)
    return known and not any(float(slots["step"]) for slots in optimizer.state.values())
