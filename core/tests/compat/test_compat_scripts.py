"""What scripts written for Accelerate do with names, enums, copies and schedulers."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import pickle
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import Accelerator, DistributedType, PartialState, load_config
from drivetrain.compat.paths import _PATHS
from drivetrain.errors import UsageError
from drivetrain.utils import (
    compare_versions,
    find_executable_batch_size,
    get_logger,
    init_empty_weights,
    is_compiled_module,
    is_peft_model,
    is_torch_version,
    save,
    str_to_bool,
)
from drivetrain_testing import spawn


@pytest.mark.parametrize("path", sorted(_PATHS))
def test_module_paths_of_accelerate_hold_the_public_names(path: str) -> None:
    module = importlib.import_module(f"drivetrain.{path}")
    assert module.set_seed is drivetrain.set_seed
    assert module.__all__ == drivetrain.__all__
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018


def test_other_paths_do_not_exist() -> None:
    for path in ("utils.no_such_module", "no_such_module", "hooks.below"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"drivetrain.{path}")


def test_names_of_distributed_types() -> None:
    kind = DistributedType
    assert kind.FSDP == "fsdp" == kind("FSDP") == kind["fsdp"]
    assert (kind.FSDP.value, kind.FSDP.name, str(kind.FSDP), f"{kind.FSDP}") == ("fsdp", "FSDP", "fsdp", "fsdp")
    assert kind.MULTI_GPU != kind.MULTI_CPU
    assert kind.MULTI_GPU == "ddp" == kind.MULTI_CPU
    assert kind.NO == "single" == kind("no")
    assert "single" in kind
    assert "MULTI_GPU" in kind
    assert "no_such_backend" not in kind
    assert {"single", "ddp", "fsdp"} <= set(kind)
    assert {kind.FSDP: 1}["fsdp"] == 1
    assert json.dumps(kind.FSDP) == '"fsdp"'
    for one in (kind.FSDP, kind.MULTI_GPU):
        again = pickle.loads(pickle.dumps(one))
        assert (again, again.device_type) == (one, one.device_type)


def kinds() -> list[bool]:
    accelerator = Accelerator(cpu=True, config=load_config(overrides={"distributed_type": "ddp"}, environ={}))
    kind = DistributedType
    found = [
        one == kind.MULTI_CPU and one != kind.MULTI_GPU and one == "ddp" and one in (kind.NO, kind.MULTI_CPU)
        for one in (accelerator.distributed_type, PartialState().distributed_type)
    ]
    accelerator.end_training()
    return found


def test_a_branch_for_one_device_is_not_taken_on_another() -> None:
    assert spawn(kinds, 2) == [[True, True]] * 2


def prepared() -> tuple[Accelerator, Any, Any, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2, shuffle=True)
    return (accelerator, *accelerator.prepare(model, optimizer, schedule, loader))


def test_copies_and_pickles() -> None:
    _, model, optimizer, schedule, loader = prepared()
    model(torch.ones(1, 2)).sum().backward()
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(made) is torch.optim.AdamW
        assert made.param_groups[0]["lr"] == 1.0
        assert made.param_groups[0]["params"][0] is not model.weight
        assert torch.equal(made.param_groups[0]["params"][0], model.weight)
    assert type(copy.deepcopy(schedule)) is torch.optim.lr_scheduler.StepLR
    next(iter(loader))
    passes = []
    for made in (copy.deepcopy(loader), copy.copy(loader)):
        torch.manual_seed(3)  # which a shuffled pass draws its order from
        passes.append([batch[0] for batch in made])
    assert all(map(torch.equal, *passes))
    with pytest.raises(UsageError, match="base_dataloader"):
        pickle.dumps(loader)


# torch's, for every loop that moves its scheduler first.
SCHEDULER_FIRST = pytest.mark.filterwarnings(r"ignore:Detected call of `lr_scheduler.step\(\)`:UserWarning")


@SCHEDULER_FIRST
def test_a_scheduler_moves_where_no_step_is_due() -> None:
    accelerator, model, optimizer, schedule, _ = prepared()
    for _ in range(3):  # to where a run stopped
        schedule.step()
    assert schedule.get_last_lr() == [0.125]
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum() * (float("inf") if step == 2 else 1.0))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert schedule.get_last_lr() == [0.125 * 0.5**3]  # the third step was skipped


@SCHEDULER_FIRST
def test_a_scheduler_before_its_optimizer_in_a_window() -> None:
    accelerator, model, optimizer, schedule, _ = prepared()
    accelerator.gradient_accumulation_steps = 2
    for _ in range(6):
        with accelerator.accumulate(model):
            schedule.step()
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert schedule.get_last_lr() == [0.5**3]


def moves(split_batches: bool) -> float:
    overrides = {"distributed_type": "ddp", "scheduler": {"step_per_process": True}}
    accelerator = Accelerator(
        cpu=True, split_batches=split_batches, config=load_config(overrides=overrides, environ={})
    )
    model: Any = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    schedule.step()
    rate: float = schedule.get_last_lr()[0]
    accelerator.end_training()
    return rate


@pytest.mark.parametrize(("split_batches", "rate"), [(False, 0.125), (True, 0.5)])
def test_moves_per_process_are_for_batches_of_a_process(split_batches: bool, rate: float) -> None:
    assert spawn(moves, 3, split_batches) == [rate] * 3


def reduces() -> list[bool]:
    accelerator = Accelerator(cpu=True, config=load_config(overrides={"distributed_type": "ddp"}, environ={}))
    model: Any = accelerator.prepare(nn.Linear(2, 1))
    x = torch.full((1, 2), float(accelerator.process_index))
    found = []
    for inside in (False, True):
        model.zero_grad()
        with accelerator.no_sync(model):
            loss = model(x).sum()
            if inside:
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(loss)
            else:
                accelerator.backward(loss)
        found.append(bool(torch.equal(model.weight.grad, torch.full((1, 2), 0.5))))
    accelerator.end_training()
    return found


def test_a_backward_inside_no_sync_can_reduce() -> None:
    assert spawn(reduces, 2) == [[False, True]] * 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch.compile's own
def test_small_functions() -> None:
    assert is_torch_version(">=", "2.9")
    assert not is_torch_version("<", "2.9")
    assert compare_versions("torch", ">", "1.0")
    assert [str_to_bool(word) for word in ("Yes", "off", "1")] == [1, 0, 1]
    for bad in (lambda: str_to_bool("maybe"), lambda: compare_versions("torch", "~", "1")):
        with pytest.raises(ValueError, match=r"maybe|compares"):
            bad()
    model = nn.Linear(2, 2)
    assert is_compiled_module(torch.compile(model))
    assert not is_compiled_module(model)
    assert not is_peft_model(model)
    with pytest.raises(RuntimeError, match="starting_batch_size=0"):
        find_executable_batch_size(lambda batch_size: batch_size, starting_batch_size=0)()
    accelerator = Accelerator(cpu=True)
    assert accelerator.unwrap_model(nn.DataParallel(model)) is model
    assert accelerator.dataloader_config.split_batches is False
    accelerator.end_training()


def test_models_without_memory_before_there_is_an_accelerator() -> None:
    drivetrain.AcceleratorState._reset_state()
    with init_empty_weights():
        model = nn.BatchNorm1d(3)
    assert (model.weight.is_meta, model.running_mean.is_meta) == (True, False)
    assert isinstance(model.weight, nn.Parameter)
    with init_empty_weights(include_buffers=True):
        assert nn.BatchNorm1d(3).running_mean.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_models_without_memory_after_the_training_has_ended() -> None:
    accelerator = Accelerator(cpu=True)
    with init_empty_weights():
        assert not nn.Linear(2, 2).weight.is_meta  # one process keeps the values that it draws
    accelerator.end_training()
    with init_empty_weights():
        assert nn.Linear(2, 2).weight.is_meta


def test_shared_tensors_are_named(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.ones(2)
    with caplog.at_level(logging.WARNING):
        save({"one": weight, "two": weight}, tmp_path / "both.safetensors", safe_serialization=True)
    assert "two as one" in caplog.text
    assert list(load_file(tmp_path / "both.safetensors")) == ["one"]


def test_a_loggers_stacklevel_is_the_callers() -> None:
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.lineno)  # type: ignore[method-assign]
    logger = get_logger("stacklevels", log_level="INFO")
    logger.logger.addHandler(handler)

    def through() -> None:
        logger.info("here", stacklevel=2)

    logger.info("here")
    through()
    here = sys._getframe().f_lineno
    assert found == [here - 2, here - 1]
