"""What the core settles with a backend's own section, and the stand-ins for what an engine's file describes."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import Accelerator, DummyOptim, DummyScheduler
from drivetrain.api import BackendInfo, DistributedBackend, FileConfiguredBackend, hookimpl
from drivetrain.backends.single import SingleBackend
from drivetrain.config import ResolvedConfig, load_config
from drivetrain.errors import BackendBrokenError, BackendNotFoundError, ConfigError, UsageError
from drivetrain.registry import get_registry, reset_registry
from drivetrain.run_setup import accumulation, choose_backend


class ToySection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    precision: str | None = None
    steps: int | None = None


class Other(BaseModel):
    steps: int = 1


def implied(section, origins):
    """The file of an engine that says precision and accumulation too."""
    found = {"mixed_precision": section.precision, "gradient_accumulation_steps": section.steps}
    where = {"mixed_precision": "precision", "gradient_accumulation_steps": "steps"}
    return {key: (value, origins[where[key]]) for key, value in found.items() if value is not None}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    module = types.ModuleType("toy_choice")
    module.ToySection = ToySection
    monkeypatch.setitem(sys.modules, "toy_choice", module)

    class Plugin:
        @hookimpl
        def drivetrain_backends(self):
            section = "toy_choice:ToySection"
            names = {"ToyPlugin": "toy_choice:ToySection", "ToyNothing": "toy_choice:nothing"}
            return [
                BackendInfo("toy", "a toy", "toy_choice:Toy", ("toys",), config=section, implied=implied, names=names)
            ]

    reset_registry()
    get_registry().register(Plugin(), name="toy")
    yield
    reset_registry()


def resolve(tmp_path, text):
    path = tmp_path / "train.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, environ={})


def settled(resolved, key, script=None):
    return choose_backend(resolved, None, 1, {}).settle(key, script, resolved)


def test_a_section_speaks_where_nobody_else_does(tmp_path):
    resolved = resolve(tmp_path, "distributed_type: toy\ntoy: {precision: bf16, steps: 4}\n")
    assert settled(resolved, "mixed_precision") == "bf16"
    choice = choose_backend(resolved, None, 1, {})
    assert accumulation(resolved, choice, 1, None).num_steps == 4
    assert choice.origins["steps"].endswith("train.yaml:2:31")


def test_script_and_configuration_may_say_the_same(tmp_path):
    resolved = resolve(tmp_path, "distributed_type: toy\nmixed_precision: bf16\ntoy: {precision: bf16, steps: 4}\n")
    assert settled(resolved, "mixed_precision") == "bf16"
    assert settled(resolved, "mixed_precision", "bf16") == "bf16"
    assert accumulation(resolved, choose_backend(resolved, None, 1, {}), 4, None).num_steps == 4


def test_a_contradiction_shows_both_sides(tmp_path):
    resolved = resolve(tmp_path, "distributed_type: toy\nmixed_precision: 'no'\ntoy: {precision: bf16, steps: 4}\n")
    with pytest.raises(UsageError, match=r"'no' \(.*train.yaml:2:18\) and 'bf16' \(.*train.yaml:3:18\)"):
        settled(resolved, "mixed_precision")
    with pytest.raises(UsageError, match=r"'fp16' \(the script\) and 'bf16'"):
        settled(resolved, "mixed_precision", "fp16")
    with pytest.raises(UsageError, match=r"2 \(the script\) and 4 \(.*train.yaml:3:31\)"):
        accumulation(resolved, choose_backend(resolved, None, 1, {}), 2, None)


@pytest.mark.parametrize("given", [ToySection(steps=3), {"steps": 3}])
def test_a_script_may_pass_the_section(given):
    choice = choose_backend(ResolvedConfig(), None, 1, {"toy_plugin": given, "fsdp_plugin": None})
    assert (choice.info.name, choice.section) == ("toy", ToySection(steps=3))
    assert choice.implied["gradient_accumulation_steps"] == (3, "the script")
    assert choose_backend(ResolvedConfig(), "TOYS", 1, {"toy_plugin": given}).info.name == "toy"


def test_a_section_from_the_script_that_cannot_be_right(tmp_path):
    with pytest.raises(UsageError, match="'toy', but 'single' was chosen"):
        choose_backend(ResolvedConfig(), "single", 1, {"toy_plugin": {}})
    with pytest.raises(UsageError, match="the script passes the settings of 'toy', and the configuration has"):
        choose_backend(resolve(tmp_path, "toy: {steps: 2}\n"), None, 1, {"toy_plugin": {"steps": 3}})
    with pytest.raises(ConfigError, match="unknown key 'step'; did you mean 'steps'"):
        choose_backend(ResolvedConfig(), None, 1, {"toy_plugin": {"step": 3}})
    with pytest.raises(UsageError, match="a mapping of its keys, not a Other"):
        choose_backend(ResolvedConfig(), None, 1, {"toy_plugin": Other()})
    with pytest.raises(UsageError, match="section `toy:`"):
        choose_backend(ResolvedConfig(), None, 1, {"toy_plugin": object()})
    with pytest.raises(UsageError, match="section `toy:`"):
        choose_backend(ResolvedConfig(), None, 1, {"toy_plugins": {"one": {"steps": 3}}})
    with pytest.raises(BackendNotFoundError):
        choose_backend(ResolvedConfig(), None, 1, {"nobodys_plugin": {}})


def test_a_name_of_an_engine_is_found_among_accelerates():
    assert importlib.import_module("drivetrain.utils").ToyPlugin is ToySection
    with pytest.raises(BackendBrokenError, match="toy_choice:nothing could not be imported"):
        _ = drivetrain.ToyNothing
    with pytest.raises(AttributeError, match="no attribute 'NobodysPlugin'"):
        _ = drivetrain.NobodysPlugin


def test_a_script_may_ask_whose_section_holds():
    accelerator = Accelerator()
    assert (accelerator.single_plugin, accelerator.state.toy_plugin) == (None, None)
    with pytest.raises(AttributeError, match="no backend 'nobodys'"):
        _ = accelerator.nobodys_plugin
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'plugin_of_nobody'"):
        _ = accelerator.plugin_of_nobody
    accelerator.end_training()


# ---- what a backend is told of batches ------------------------------------------------------------------------------


def test_an_engine_with_a_file_is_told_how_the_script_batches(monkeypatch):
    told = []

    class WithFile(FileConfiguredBackend, DistributedBackend):
        capabilities = SingleBackend.capabilities
        start, stop = SingleBackend.start, SingleBackend.stop

        def set_batches(self, sizes, accumulation_steps):
            told.append((list(sizes), accumulation_steps))

        def file_scheduler(self, scheduler, optimizers):
            return None

        def prepare(self, *args, **kwargs):
            told.append("prepare")
            return SingleBackend.prepare(self, *args, **kwargs)

    monkeypatch.setattr("drivetrain.backends.single.SingleBackend", WithFile)
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = torch.nn.Linear(1, 1)
    loader, whole = DataLoader(range(12), batch_size=4), DataLoader(range(12), batch_size=None)
    accelerator.prepare(model, loader, whole)
    accelerator.gradient_accumulation_steps = 2
    accelerator.prepare_data_loader(DataLoader(range(12), batch_size=6))
    assert told == [([4], 3), "prepare", ([4], 2), ([4, 6], 2)]
    accelerator.end_training()


# ---- stand-ins ------------------------------------------------------------------------------------------------------


def test_stand_ins_have_nothing_to_stand_for_without_an_engine():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"DummyOptim .* single has no such file"):
        accelerator.prepare(model, DummyOptim(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(UsageError, match=r"DummyScheduler .* there is none"):
        accelerator.prepare(DummyScheduler(optimizer, total_num_steps=4))
    accelerator.end_training()


def test_a_dummy_scheduler_with_a_recipe_makes_it_for_what_steps():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def halve(stepped):
        return torch.optim.lr_scheduler.StepLR(stepped, 1, gamma=0.5)

    dummy = DummyScheduler(optimizer, lr_scheduler_callable=halve)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, dummy)
    rates = []
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.125]
    accelerator.end_training()
