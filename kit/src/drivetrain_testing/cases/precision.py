"""Checks the precision policy: dtypes of parameters and computation, and what an overflow does."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from drivetrain_testing import diagnosis, models
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import Scenario, accelerated, adamw, assert_same_state, full_state, reference

COMPUTE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"bf16": 3e-2, "fp16": 5e-3}
"""Three digits of bfloat16's 8-bit mantissa, and of float16's 11, after four small AdamW-free steps."""


def _list(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(map(str, dtypes)))


def _in_float32(name: str, model: Any, when: str) -> None:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    said = f"mixed_precision {name}: {when} parameters are {_list(dtypes)}; the optimizer steps float32 ones"
    assert dtypes == {torch.float32}, said


def _policy(kit: Kit, name: str) -> None:
    accelerator = kit.accelerator(mixed_precision=name)
    model: Any = models.build("dense")
    module = model
    optimizer: Any = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    _in_float32(name, model, "after prepare")
    x, y = models.dense_data(6)
    output = model(x.to(accelerator.device))
    assert accelerator.mixed_precision == name
    assert output.dtype == torch.float32, f"mixed_precision {name}: the model's output is {output.dtype}, not float32"
    accelerator.backward(F.cross_entropy(output, y.to(accelerator.device)))
    optimizer.step()
    computed = f"mixed_precision {name}: forward computed in {module.seen[-1]}, not in {COMPUTE[name]}"
    assert module.seen[-1] == COMPUTE[name], computed
    _in_float32(name, model, "after a step")
    moments = {
        tensor.dtype
        for state in optimizer.state.values()
        for slot, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and slot != "step"
    }
    assert moments <= {torch.float32}, f"mixed_precision {name}: the optimizer's state is in {_list(moments)}"
    if kit.capabilities.replicated:
        assert moments, "the optimizer has no state after a step"
    with accelerator.autocast():
        inside = torch.ones(2, 2, device=accelerator.device) @ torch.ones(2, 2, device=accelerator.device)
    assert inside.dtype == COMPUTE[name], f"autocast() computes in {inside.dtype}"
    evaluated = model.eval()(x.to(accelerator.device))
    assert evaluated.dtype == torch.float32, f"output in evaluation is {evaluated.dtype}"


@case()
def full_precision(kit: Kit) -> None:
    """``no``: parameters, moments, products and outputs in float32."""
    _policy(kit, "no")


@case(applies=lambda capabilities: "bf16" in capabilities.precisions, guards="accelerate#3979, accelerate#2624")
def bf16_policy(kit: Kit) -> None:
    """``bf16``: float32 parameters and moments, bfloat16 products, float32 outputs."""
    _policy(kit, "bf16")


@case(applies=lambda capabilities: "fp16" in capabilities.precisions)
def fp16_policy(kit: Kit) -> None:
    """``fp16``: float32 parameters and moments, float16 products, float32 outputs."""
    _policy(kit, "fp16")


@case(applies=lambda capabilities: "bf16" in capabilities.precisions, guards="accelerate#3979")
def bf16_model_gets_float32_masters(kit: Kit) -> None:
    """A model that comes in bfloat16 trains in float32 under ``bf16``, and in bfloat16 under ``no``."""
    for name, expected in (("bf16", torch.float32), ("no", torch.bfloat16)):
        accelerator = kit.accelerator(mixed_precision=name)
        model: Any = models.build("dense").to(torch.bfloat16)
        model, _ = accelerator.prepare(model, adamw(model))
        dtypes = {parameter.dtype for parameter in model.parameters()}
        said = f"mixed_precision {name}: a model in bfloat16 has parameters in {_list(dtypes)}, not in {expected}"
        assert dtypes == {expected}, said


def _close(kit: Kit, name: str, scenario: Scenario) -> None:
    accelerator = kit.accelerator(mixed_precision=name, gradient_accumulation_steps=scenario.window)
    actual = accelerated(scenario, accelerator, accelerator.backend.topology.dp_size)
    with diagnosis.meaning(f"mixed_precision {name} leaves the float32 run by more than its rounding"):
        assert_same_state(actual.state, reference(scenario).state, TOLERANCE[name])


@case(applies=lambda capabilities: "bf16" in capabilities.precisions)
def bf16_follows_float32(kit: Kit) -> None:
    """A short bf16 run stays near the float32 one."""
    _close(kit, "bf16", Scenario(window=2))


@case(applies=lambda capabilities: "fp16" in capabilities.precisions)
def fp16_follows_float32(kit: Kit) -> None:
    """A short fp16 run stays near the float32 one: the loss scale is taken out before clipping and stepping."""
    _close(kit, "fp16", Scenario(window=2, max_norm=0.5))


@case(applies=lambda capabilities: "fp16" in capabilities.precisions)
def overflow_is_skipped(kit: Kit) -> None:
    """Under ``fp16`` an overflow on one rank skips the step on all, without any call to clip; the scheduler waits."""
    accelerator = kit.accelerator(mixed_precision="fp16")
    topology = accelerator.backend.topology
    model: Any = models.build("dense")
    optimizer: Any = adamw(model)
    scheduler: Any = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    x, y = models.dense_data(6)
    x, y = x.to(accelerator.device), y.to(accelerator.device)
    rates = []
    for poison in (False, True, False):
        before = full_state(accelerator, model)
        loss = F.cross_entropy(model(x), y)
        if poison and topology.rank == topology.world_size - 1:
            loss = loss * float("inf")
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        said = f"an overflow on the last rank: optimizer_step_was_skipped is not {poison} on rank {topology.rank}"
        assert accelerator.optimizer_step_was_skipped is poison, said
        if poison:
            with diagnosis.meaning("a step that is not finite was applied"):
                assert_same_state(full_state(accelerator, model), before, 0.0)
    assert [round(rate, 9) for rate in rates] == [0.025, 0.025, round(0.05 / 3, 9)], f"learning rates {rates}"
