"""Making the engine of one model: its optimizer, its dictionary, and what is noted before DeepSpeed takes over."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

from drivetrain.api import DummyOptim, UnsupportedError, UsageError, original_module
from drivetrain_deepspeed import compiling, quiet
from drivetrain_deepspeed.driving import Driver
from drivetrain_deepspeed.engine_config import hidden_size_of
from drivetrain_deepspeed.optimizers import ScriptOptimizer, engine_optimizer
from drivetrain_deepspeed.several import SeveralOptimizers
from drivetrain_deepspeed.state import EngineState, RecordedGroups

if TYPE_CHECKING:
    from drivetrain_deepspeed.backend import DeepSpeedBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MadeEngine:
    """What a trainable works with.

    Args:
        driver: of the engine; ``None`` where the model is not trained.
        state: for checkpoints.
        optimizers: what really steps, in the order of the script's.
    """

    driver: Driver | None
    state: EngineState
    optimizers: list[Optimizer]


def make_engine(backend: DeepSpeedBackend, model: nn.Module, optimizers: Sequence[Optimizer]) -> MadeEngine:
    """Make an engine for a model and its optimizers; for evaluation without any. Collective over all ranks.

    Raises:
        UsageError: optimizer and section contradict each other, or DeepSpeed could not take this optimizer.
    """
    module = original_module(model)
    if not optimizers:
        return _evaluating(backend, model, module)
    for optimizer in optimizers:
        _check(optimizer, module)
    described = _described(backend, optimizers)
    config = _dictionary(backend, module, described)
    recorded = [RecordedGroups.of(optimizer) for optimizer in optimizers]
    client: Optimizer | None = optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)
    given: dict[str, Any] = {"optimizer": client}
    if described is not None:
        assert isinstance(optimizers[0], DummyOptim)
        given = {"model_parameters": optimizers[0].given_groups()}
    engine = _initialize(backend, model, config, **given)
    steps = list(optimizers)
    if described is not None:
        steps = [engine.basic_optimizer]
        recorded = [RecordedGroups(recorded[0].parameters, tuple(steps[0].param_groups), steps[0])]
    parameters = {
        id(optimizer): frozenset(id(parameter) for group in its.parameters for parameter in group)
        for optimizer, its in zip(steps, recorded, strict=True)
    }
    driver = Driver(engine, backend.topology, backend.loss_scale, parameters, backend.config.clipping)
    return MadeEngine(driver, EngineState(module, engine.optimizer, recorded), steps)


def _evaluating(backend: DeepSpeedBackend, model: nn.Module, module: nn.Module) -> MadeEngine:
    """Stage 3 keeps a model in parts for evaluation too; under the other stages it needs no engine."""
    if backend.config.stage < 3:
        return MadeEngine(None, EngineState(module, None), [])
    engine = _initialize(backend, model, _dictionary(backend, module, None))
    return MadeEngine(None, EngineState(module, engine.optimizer), [])


def _initialize(backend: DeepSpeedBackend, model: nn.Module, config: dict[str, Any], **given: Any) -> Any:
    installed = backend.deepspeed.git_version_info.installed_ops
    try:
        with compiling.guard(config, installed), quiet.surroundings(backend.settings.place):
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
    """Share out the parameters under stage 3, where DeepSpeed would ask a whole number for the dtype of training.

    It asks the first parameter, and where the processor or accelerator computes in float16 it insists on a float.
    """
    dtypes = [parameter.dtype for parameter in model.parameters()]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    if backend.config.stage == 3 and floats and dtypes[0] != floats[0]:
        backend.deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=floats[0])


def _config_error() -> type[Exception]:
    kind: type[Exception] = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfigError
    return kind


def reason(error: Exception) -> str:
    """What DeepSpeed says, on one line; of pydantic each key with what is wrong."""
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
            cure="Make one optimizer for each model, and loose parameters part of a model.",
        )
    if optimizer.state:
        raise UnsupportedError(
            f"this {type(optimizer).__name__} has stepped already, and DeepSpeed would forget its state",
            cure="Prepare it before its first step; load the state afterwards with accelerator.load_state.",
        )
    for index, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            raise UnsupportedError(
                f"parameter group {index} of {type(optimizer).__name__} holds no trained parameter, which DeepSpeed "
                "does not take",
                cure="Leave frozen parameters out of the optimizer.",
            )
