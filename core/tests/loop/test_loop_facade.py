"""The user's object: what prepare returns, what schedulers do, the explicit step, hooks, numbered checkpoints."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.errors import BackendBlockedError, EnvironmentVariableError, UnsupportedError, UsageError
from drivetrain_testing import spawn

_spec = importlib.util.spec_from_file_location("facade_jobs", Path(__file__).with_name("facade_jobs.py"))
jobs = importlib.util.module_from_spec(_spec)
sys.modules["facade_jobs"] = jobs
_spec.loader.exec_module(jobs)

WORLDS = pytest.mark.parametrize("world", [1, 2])


@WORLDS
def test_prepare_keeps_order_names_and_attributes(world):
    for found in spawn(jobs.shape_of_prepare, world):
        names = ["layer.bias", "layer.weight", "scale"]
        assert found.pop("names") == names
        assert found.pop("parameters") == ["layer.weight", "layer.bias"]
        assert found.pop("attribute") == 4
        assert found.pop("method") == "hidden 4"
        assert found.pop("loader length") == 2 // world
        assert found.pop("state") == world
        assert found.pop("children") == ["layer"]
        assert all(found.values()), found


@WORLDS
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_model_and_optimizer_may_be_prepared_apart(world, order):
    # Gradient of the mean of ones @ w is 1 for each of three weights: 3 - 3 * 0.5.
    assert spawn(jobs.optimizer_later, world, order) == [1.5] * world


def test_the_scheduler_moves_once_per_step_whatever_the_world():
    alone = spawn(jobs.scheduler_moves, 1, False, 4)[0]
    assert alone == [1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert spawn(jobs.scheduler_moves, 2, False, 4) == [alone, alone]
    assert spawn(jobs.scheduler_moves, 2, True, 4)[0] == [1 / 3, 1 / 5, 1 / 7, 1 / 9]


@WORLDS
def test_a_plateau_is_the_same_plateau_on_every_world(world):
    # Four flat epochs with patience 1: one reduction after the third, the second not before the fifth.
    for rate in spawn(jobs.plateau, world, 4):
        assert rate == pytest.approx(0.01)


@WORLDS
@pytest.mark.parametrize("ragged", [False, True])
def test_train_step_is_one_big_batch(world, ragged):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = jobs.explicit_data(ragged)
    losses, norms = [], []
    for step in range(3):
        loss = F.cross_entropy(model(x[step * 8 : step * 8 + 8]), y[step * 8 : step * 8 + 8])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for got_losses, got_norms, weights in spawn(jobs.explicit_step, world, ragged):
        assert got_losses == pytest.approx(losses, abs=1e-6)
        assert got_norms == pytest.approx(norms, abs=1e-6)
        torch.testing.assert_close(weights, [p.detach() for p in model.parameters()], atol=1e-6, rtol=1e-5)


@WORLDS
def test_a_trigger_of_one_rank_reaches_all_once(world):
    assert spawn(jobs.triggers, world) == [[True, False]] * world


def test_uneven_inputs_join(tmp_path):
    results = spawn(jobs.uneven, 2, str(tmp_path / "saved"))
    assert [seen for _, seen, _ in results] == [3, 2]
    # Both have the parameters after three steps. With other numbers of steps the save had waited for half an hour.
    assert [step for _, _, step in results] == [3, 3]
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(10.0).view(5, 2)
    for rows in (x[0:2], x[2:4], x[4:5]):
        # A rank without a batch weighs nothing: the last step is that of its one sample.
        model(rows).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights, _, _ in results:
        torch.testing.assert_close(weights, [p.detach() for p in model.parameters()])


@WORLDS
def test_save_hooks_write_beside_and_take_models_out(world, tmp_path):
    for files, mean, _ in spawn(jobs.hooked_save, world, str(tmp_path / "state")):
        assert "mine.pt" in files
        assert "manifest.json" in files
        assert mean == 1.0


@WORLDS
def test_numbered_checkpoints_go_on_after_a_resume(world, tmp_path):
    expected = ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_2", "checkpoint_3", "checkpoint_3"]
    assert spawn(jobs.numbered, world, str(tmp_path)) == [expected] * world
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]


def test_arguments_of_one_engine_are_refused_with_the_section_to_write():
    with pytest.raises(UsageError, match="section `fsdp:`"):
        Accelerator(fsdp_plugin=object())
    with pytest.raises(UsageError, match="section `megatron:`"):
        Accelerator(megatron_lm_plugin=object())
    with pytest.raises(UsageError, match="section `mesh:`"):
        Accelerator(parallelism_config=object())
    with pytest.raises(UsageError, match="takes the path of a YAML file, not a dict"):
        Accelerator(config={"mixed_precision": "bf16"})
    with pytest.raises(TypeError, match="gradient_acumulation_steps"):
        Accelerator(gradient_acumulation_steps=2)


def test_contradictions_and_unknown_words_are_refused():
    accelerator = Accelerator()
    with pytest.raises(UsageError, match="unknown reduction 'avg'"):
        accelerator.reduce(torch.ones(1), reduction="avg")
    with pytest.raises(UsageError, match="was not prepared"):
        accelerator.accumulate(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="mixed_precision"):
        Accelerator(mixed_precision="fp8")
    with pytest.raises(UsageError, match="at least 1"):
        Accelerator(gradient_accumulation_steps=0)
    accelerator.end_training()


def test_one_window_is_all_means_or_all_sums():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum(), num_items=1)
    with accelerator.accumulate(model), pytest.raises(UsageError, match="num_items"):
        accelerator.backward(model(torch.ones(1, 2)).mean())
    accelerator.end_training()


def test_a_denominator_belongs_to_all_losses_of_a_window_and_needs_no_number_of_items():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum(), denominator=2.0)
        with pytest.raises(UsageError, match="with a denominator and without it"):
            accelerator.backward(model(torch.ones(1, 2)).mean())
        with pytest.raises(UsageError, match="both num_items and denominator"):
            accelerator.backward(model(torch.ones(1, 2)).sum(), num_items=1, denominator=2.0)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).mean(), denominator=2.0)
    accelerator.end_training()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).mean())
        with pytest.raises(UsageError, match="with a denominator and without it"):
            accelerator.backward(model(torch.ones(1, 2)).sum(), denominator=2.0)
    accelerator.end_training()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2])
def test_a_known_denominator_has_the_gradients_of_one_big_batch(world_size, length):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, -100, 3, -100, 1, 2, -100, -100, -100, 3, 0])
    F.cross_entropy(model(x), y).backward()
    expected = torch.cat([(one - 0.5 * one.grad).detach().reshape(-1) for one in model.parameters()])
    for found in spawn(jobs.known_denominator, world_size, length):
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)


def test_an_optimizer_without_a_prepared_model_is_refused_at_its_step():
    accelerator = Accelerator()
    weight = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(UsageError, match="Prepare it together with its model"):
        optimizer.step()
    accelerator.end_training()


def test_a_closures_loss_comes_back_from_the_step():
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3))
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 1)).square().mean()
        accelerator.backward(loss)
        seen.append(loss)
        return loss

    assert optimizer.step(closure) is seen[0]
    assert len(seen) > 1
    accelerator.end_training()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_models_of_torchscript_are_refused_in_words():
    accelerator = Accelerator()
    model = nn.Linear(3, 1)
    with pytest.raises(UnsupportedError, match=r"Prepare the module that torch\.jit was given"):
        accelerator.prepare(torch.jit.trace(model, torch.ones(2, 3)))
    outer = accelerator.prepare(nn.Sequential(torch.jit.trace(model, torch.ones(2, 3)), nn.Tanh()))
    assert outer(torch.ones(2, 3)).shape == (2, 1)
    accelerator.end_training()


@pytest.mark.parametrize("initialised", [False, True])
def test_lazy_layers_have_shapes_before_several_ranks_prepare_them(initialised):
    for said in spawn(jobs.lazy_layers, 2, initialised):
        assert said == "" if initialised else "Call the model once on a batch" in said


def test_a_world_that_was_announced_is_never_ignored(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EnvironmentVariableError):
        Accelerator()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendBlockedError, match="one process"):
        Accelerator(distributed_type="single")
    assert os.environ["WORLD_SIZE"] == "2"


def test_a_save_inside_a_window_says_what_it_lacks_and_a_load_begins_a_new_one(tmp_path, caplog):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.save_state(tmp_path / "inside")
    assert "gradients of its 1 micro-batch(es)" in caplog.text
    accelerator.load_state(tmp_path / "inside")
    with accelerator.accumulate(model):
        assert not accelerator.sync_gradients
        accelerator.backward(model(torch.ones(1, 1)).sum())
    with accelerator.accumulate(model):
        assert accelerator.sync_gradients
        accelerator.backward(model(torch.ones(1, 1)).sum())
    caplog.clear()
    accelerator.save_state(tmp_path / "between")
    assert not caplog.text
    accelerator.end_training()


class Strange(nn.Module):
    """Raises what its kind says for a name that it does not know; diffusers' models raise KeyError for some."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(3, 1)

    def __getattr__(self, name):
        for held in ("_modules", "_parameters", "_buffers"):
            if name in self.__dict__.get(held, {}):
                return self.__dict__[held][name]
        raise self.__dict__.get("kind", AttributeError)(name)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("kind", [KeyError, RuntimeError, TypeError])
def test_a_model_whose_attributes_raise_what_they_like_is_prepared_and_saved(tmp_path, kind):
    accelerator = Accelerator()
    strange = Strange(kind)
    model, optimizer, other = accelerator.prepare(strange, torch.optim.SGD(strange.parameters(), lr=1.0), Odd(kind))
    before = accelerator.get_state_dict(model)["layer.bias"].clone()
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    assert accelerator.get_state_dict(model)["layer.bias"] == before - 2.0
    assert isinstance(other, Odd)
    with pytest.raises(UsageError, match="Odd cannot be saved"):
        accelerator.register_for_checkpointing(other)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    accelerator.end_training()


class Odd:
    """No loader, no scheduler, no model; says so by any exception."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __getattr__(self, name):
        raise self.__dict__["kind"](name)


def test_a_script_may_end_a_window_by_itself():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batches = torch.arange(12.0).reshape(2, 2, 3)
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model):
            if number == 1:
                accelerator.sync_gradients = True
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            assert accelerator.sync_gradients is (number == 1)
    torch.testing.assert_close(model.weight.detach(), before - batches.mean((0, 1)))
    accelerator.end_training()


CLAMP = (lambda grad: grad.clamp(-0.1, 0.1)), "is not linear"
LOOK = (lambda grad: None), "returns nothing"


def windows_with(hook, *, accumulated=False, batches=2, **counted):
    """The model after an epoch of windows of two micro-batches, with a hook on its weight."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    loader = DataLoader(torch.ones(batches, 2), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    weight = model.weight
    (weight.register_post_accumulate_grad_hook if accumulated else weight.register_hook)(hook)
    try:
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum(), **counted)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        accelerator.end_training()
    return model


@pytest.mark.parametrize(("hook", "why"), [CLAMP, LOOK])
def test_hooks_that_see_a_guess_at_the_number_of_items_are_refused(hook, why):
    with pytest.raises(UsageError, match=rf"weight has a hook by register_hook that {why}.*denominator=n"):
        windows_with(hook, num_items=1)
    with pytest.raises(UsageError, match="finds what is accumulated so far"):
        windows_with(lambda parameter: None, accumulated=True, num_items=1)


@pytest.mark.parametrize("hook", [CLAMP[0], LOOK[0]])
def test_hooks_are_given_true_gradients_where_the_denominator_is_known(hook):
    windows_with(hook, denominator=2.0)
    windows_with(hook)
    # One backward is a window: its items are summed before it.
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 1))
    model.weight.register_hook(hook)
    accelerator.backward(model(torch.ones(1, 2)).sum(), num_items=1)
    assert model.weight.grad.abs().max() <= 1
    accelerator.end_training()


def test_linear_hooks_see_a_guess_and_train_the_same():
    plain = windows_with(lambda grad: None)
    halved = windows_with(lambda grad: grad * 0.5, num_items=3)
    # From the same start, by 0.1 * 1 and by 0.1 * 2 / 6 * 0.5.
    torch.testing.assert_close(halved.weight - plain.weight, torch.full((1, 2), 0.1 - 0.1 / 6))


def test_a_hook_that_is_not_linear_is_refused_in_a_window_that_is_shorter_than_expected():
    with pytest.raises(UsageError, match=r"is not linear.*number of samples by which a window divides"):
        windows_with(CLAMP[0], batches=3)
    # What it looks at is the gradient over the window's length, as in a plain loop.
    windows_with(LOOK[0], batches=3)


def test_a_hook_set_in_mid_run_is_tried():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 1))

    def half_a_window():
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum(), num_items=1)

    for _ in range(2):
        half_a_window()
    model.bias.register_hook(CLAMP[0])
    with pytest.raises(UsageError, match="bias has a hook"):
        half_a_window()
    accelerator.end_training()
