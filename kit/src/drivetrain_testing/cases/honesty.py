"""Checks that capabilities are true: what is declared works, and what is not declared is refused at the call."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from drivetrain.cli import self_test
from drivetrain.distributed.collectives import Ranks
from drivetrain.errors import BackendBlockedError, DrivetrainError, UnsupportedError
from drivetrain.topology import AXES
from drivetrain_testing import diagnosis, models
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import assert_same_state, backward, full_state

REFUSED = (UnsupportedError, BackendBlockedError, ValueError)
"""Exceptions of a refusal; each names what to write instead."""

PER_RUN = frozenset({"pipelined", "sharded_save"})
"""Flags that depend on settings, so that a started backend may switch them off."""

PROOFS: dict[str, tuple[str, str]] = {
    "multi_process": ("gradients.dense", "honesty.one_process_only"),
    "averages_gradients": ("gradients.dense", "gradients.dense"),
    "mesh_axes": ("mesh.", "honesty.unlisted_mesh_axes"),
    "devices": ("honesty.devices_are_listed", ""),
    "precisions": ("precision.bf16_policy", "honesty.unlisted_precisions"),
    "pipelined": ("deferred.unrecordable_is_refused", "honesty.pipelined_means_deferred"),
    "replicated": ("honesty.replicas_are_whole_and_equal", "honesty.no_training_alone"),
    "optimizer_spans_models": ("gradients.one_loss_through_two_models", "honesty.one_optimizer_per_model"),
    "sharded_save": ("honesty.every_rank_saves_its_part", "honesty.every_rank_could_save_all"),
    "async_save": ("honesty.saves_beside_training", "honesty.no_saving_beside_training"),
    "join_uneven_inputs": ("honesty.joins_uneven_inputs", "honesty.no_uneven_inputs"),
    "handlers": ("honesty.unlisted_handlers", "honesty.unlisted_handlers"),
}
"""By capability: the case that holds where it is declared, and the one where it is not. A name that ends in a dot is a
family. Empty: a device that is not declared is not there to be tried; an engine that *may* replace an optimizer need
not.
"""


def _refuses(call: Any) -> None:
    with pytest.raises(REFUSED) as caught:
        call()
    assert isinstance(caught.value, DrivetrainError), f"not one of our errors: {caught.value!r}"
    assert caught.value.cure, f"the error names no cure: {caught.value}"


def _ready(kit: Kit, **kwargs: Any) -> tuple[Any, Any, Any]:
    accelerator = kit.accelerator(**kwargs)
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def _backward(accelerator: Any, model: Any, seed: int = 2) -> None:
    x, y = models.dense_data(6, seed=seed)
    accelerator.backward(F.cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device)))


@case(applies=lambda capabilities: not capabilities.multi_process, world_sizes=(2,))
def one_process_only(kit: Kit) -> None:
    """Not ``multi_process``: a world of 2 is refused, not trained twice."""
    _refuses(kit.accelerator)


@case()
def drivetrain_test(kit: Kit) -> None:
    """The checks of ``drivetrain test`` pass, also under each of ``layouts``: gather, gradients, saving, loading."""
    for layout in ({}, *kit.layouts):
        said = f"drivetrain test under {layout}" if layout else "drivetrain test"
        with diagnosis.meaning(said):
            self_test.check(kit.with_config(**layout).accelerator())
        kit.made.pop().end_training()


@case()
def unlisted_mesh_axes(kit: Kit) -> None:
    """An axis that is not in ``mesh_axes`` cannot be larger than 1."""
    for axis in AXES:
        if axis not in kit.capabilities.mesh_axes:
            _refuses(kit.with_config(mesh={axis: 2}).accelerator)


@case()
def unlisted_precisions(kit: Kit) -> None:
    """A precision that is not in ``precisions``, and one that does not exist, are refused."""
    for name in {"no", "bf16", "fp16"} - kit.capabilities.precisions:
        _refuses(lambda name=name: kit.accelerator(mixed_precision=name))
    with pytest.raises(ValueError, match="fp7"):
        kit.accelerator(mixed_precision="fp7")


@case(applies=lambda capabilities: not capabilities.optimizer_spans_models)
def one_optimizer_per_model(kit: Kit) -> None:
    """An optimizer that holds parameters of two models is refused."""
    accelerator = kit.accelerator()
    pair = [nn.Linear(models.FEATURES, 8), nn.Linear(8, models.CLASSES)]
    optimizer = SGD([parameter for model in pair for parameter in model.parameters()], lr=0.1)
    _refuses(lambda: accelerator.prepare(*pair, optimizer))


@case(applies=lambda capabilities: capabilities.join_uneven_inputs)
def joins_uneven_inputs(kit: Kit) -> None:
    """Ranks with different numbers of batches train to their own ends without a hang, and agree on the result."""
    accelerator, model, optimizer = _ready(kit)
    before = full_state(accelerator, model)
    with accelerator.join_uneven_inputs([model]):
        for _ in range(1 + accelerator.process_index):
            _backward(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
    after = full_state(accelerator, model)
    assert any(not torch.equal(after[name], before[name]) for name in after), "nothing was trained"
    everywhere = accelerator.gather(torch.cat([tensor.flatten() for tensor in after.values()]).unsqueeze(0))
    with diagnosis.meaning("after join_uneven_inputs ranks hold different parameters"):
        torch.testing.assert_close(everywhere, everywhere[:1].expand_as(everywhere), rtol=0, atol=kit.atol)


@case(applies=lambda capabilities: not capabilities.join_uneven_inputs)
def no_uneven_inputs(kit: Kit) -> None:
    """``join_uneven_inputs`` is refused."""
    accelerator, model, _ = _ready(kit)

    def join() -> None:
        with accelerator.join_uneven_inputs([model]):
            pass

    _refuses(join)


@case(applies=lambda capabilities: capabilities.replicated)
def no_sync_keeps_gradients_local(kit: Kit) -> None:
    """Inside ``no_sync`` gradients are this rank's own; the backward after it reduces them all."""
    accelerator, model, optimizer = _ready(kit)
    rank, size = accelerator.backend.topology.dp_rank, accelerator.backend.topology.dp_size
    with accelerator.no_sync(model):
        _backward(accelerator, model, seed=60 + rank)
    mine = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    everyones = accelerator.gather(mine.unsqueeze(0))
    if size > 1:
        assert not torch.allclose(everyones[0], everyones[1]), "gradients were reduced inside of no_sync"
    _backward(accelerator, model, seed=70 + rank)
    mine = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    everyones = accelerator.gather(mine.unsqueeze(0))
    with diagnosis.meaning("after no_sync, the backward that reduces left ranks with different gradients"):
        torch.testing.assert_close(everyones, everyones[:1].expand_as(everyones), rtol=0, atol=kit.atol)
    optimizer.step()


@case(applies=lambda capabilities: not capabilities.replicated)
def no_training_alone(kit: Kit) -> None:
    """Parameters in parts: ``LocalSGD`` over several ranks is refused."""
    from drivetrain import LocalSGD

    accelerator, model, _ = _ready(kit)
    if accelerator.backend.topology.dp_size > 1:
        _refuses(lambda: LocalSGD(accelerator, model, local_sgd_steps=2))
    LocalSGD(accelerator, model, local_sgd_steps=2, enabled=False)


@case(applies=lambda capabilities: capabilities.replicated)
def trains_alone_and_averages(kit: Kit) -> None:
    """``LocalSGD``: ranks take two steps on their own data, then all hold the mean of their parameters."""
    from drivetrain import LocalSGD

    accelerator, model, optimizer = _ready(kit)
    ends = []
    size = accelerator.backend.topology.dp_size
    together = models.build("dense")
    all_steps = SGD(together.parameters(), lr=0.5)
    for turn in range(2):
        all_steps.zero_grad()
        for rank in range(size):
            x, y = models.dense_data(6, seed=10 * rank + turn)
            backward(F.cross_entropy(together(x), y) / size)
        all_steps.step()
    for rank in range(size):
        plain = models.build("dense")
        step = SGD(plain.parameters(), lr=0.5)
        for turn in range(2):
            x, y = models.dense_data(6, seed=10 * rank + turn)
            step.zero_grad()
            backward(F.cross_entropy(plain(x), y))
            step.step()
        ends.append(plain.state_dict())
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for turn in range(2):
            _backward(accelerator, model, seed=10 * accelerator.backend.topology.dp_rank + turn)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    expected = {name: torch.stack([end[name] for end in ends]).mean(0) for name in ends[0]}
    end = full_state(accelerator, model)
    said = "after LocalSGD's ranks trained alone, parameters are not the mean of those that each rank would have alone"
    if all(torch.allclose(end[name], tensor, atol=1e-5) for name, tensor in together.state_dict().items()):
        said = "gradients were reduced in every step, although synchronise_gradients(False) asked to keep them local"
    with diagnosis.meaning(said):
        assert_same_state(end, expected, kit.atol)


@case(applies=lambda capabilities: capabilities.replicated)
def replicas_are_whole_and_equal(kit: Kit) -> None:
    """``replicated``: every rank holds all parameters, in full shape, equal after training."""
    accelerator, model, optimizer = _ready(kit)
    for step in range(2):
        _backward(accelerator, model, seed=80 + accelerator.backend.topology.dp_rank + 10 * step)
        optimizer.step()
        optimizer.zero_grad()
    shapes = {name: tuple(parameter.shape) for name, parameter in accelerator.unwrap_model(model).named_parameters()}
    assert shapes == {name: tuple(parameter.shape) for name, parameter in models.build("dense").named_parameters()}
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyones = accelerator.gather(mine.unsqueeze(0))
    with diagnosis.meaning("replicated, and after two steps ranks hold different parameters"):
        torch.testing.assert_close(everyones, everyones[:1].expand_as(everyones), rtol=0, atol=0)


@case()
def pipelined_means_deferred(kit: Kit) -> None:
    """``pipelined`` and only that makes the output of a training forward something else than a tensor with a value."""
    accelerator, model, _ = _ready(kit)
    x, _ = models.dense_data(6)
    output = model(x.to(accelerator.device))
    deferred = type(output) is not torch.Tensor
    declared = accelerator.backend.capabilities.pipelined
    said = f"pipelined is {declared}, and the output of a training forward is a {type(output).__name__}"
    assert deferred is declared, said


@case()
def a_run_can_what_is_described(kit: Kit) -> None:
    """A started backend declares what its description does; ``pipelined`` and ``sharded_save`` may be switched off."""
    accelerator = kit.accelerator()
    for name, described in dataclasses.asdict(kit.capabilities).items():
        started = getattr(accelerator.backend.capabilities, name)
        narrower = name in PER_RUN and described and not started
        assert started == described or narrower, f"{name} is {described!r} in the description, {started!r} in this run"


@case()
def devices_are_listed(kit: Kit) -> None:
    """The device that was picked is one of ``devices``, where the backend lists any."""
    accelerator = kit.accelerator()
    listed = kit.capabilities.devices
    assert not listed or accelerator.device.type in listed, f"trains on {accelerator.device}, declares {sorted(listed)}"


@case()
def optimizer_is_the_users(kit: Kit) -> None:
    """The user's own object steps, and a setting changed on it is used."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    own = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, own)
    assert optimizer.optimizer is own, "prepare returned another optimizer than the user's"
    before = full_state(accelerator, model)
    own.param_groups[0]["lr"] = 0.0
    _backward(accelerator, model)
    optimizer.step()
    with diagnosis.meaning("parameters moved though the learning rate of the user's optimizer is 0: another one steps"):
        assert_same_state(full_state(accelerator, model), before, 0.0)


@case(applies=lambda capabilities: capabilities.sharded_save)
def every_rank_saves_its_part(kit: Kit) -> None:
    """``sharded_save``: ranks hold the parameters once together, or ``dp_replicate`` times where that was asked for."""
    accelerator, model, optimizer = _ready(kit)
    _backward(accelerator, model)
    optimizer.step()
    if not accelerator.backend.capabilities.sharded_save:
        _assert_held_by_all(accelerator, model)
        return
    mesh, copies = accelerator.backend.topology.mesh, kit.config.get("mesh", {}).get("dp_replicate", 1)
    boxes = {
        (name, *box)
        for name, tensor in model._drivetrain.trainable.portable_state().tensors.items()  # noqa: SLF001
        if tensor.dim()
        for box in _boxes(tensor)
    }
    held = sum(math.prod(sizes) for _, _, sizes in boxes)
    total = sum(parameter.numel() for parameter in models.build("dense").parameters())
    everyones = Ranks(accelerator.backend).gather(boxes)
    together = sum(math.prod(sizes) for _, _, sizes in set().union(*everyones))
    assert together == total, f"sharded_save: all ranks together hold {together} different elements of {total}"
    if mesh.dp_size == mesh.world_size:  # Along other axes some parameters are whole by design.
        every = sum(math.prod(sizes) for part in everyones for _, _, sizes in part)
        twice = (
            f"sharded_save: ranks hold {every} elements of the {total * copies} that {copies} replica(s) have: some "
        )
        assert every == total * copies, f"{twice}parameters are held by several ranks, each of which would save them"
    if mesh.world_size > copies:
        assert held < total, "sharded_save: one rank holds all parameters of its replica"


@case(applies=lambda capabilities: not capabilities.sharded_save)
def every_rank_could_save_all(kit: Kit) -> None:
    """Not ``sharded_save``: every rank holds every full tensor, so that any of them can write it."""
    accelerator, model, optimizer = _ready(kit)
    _backward(accelerator, model)
    optimizer.step()
    _assert_held_by_all(accelerator, model)


def _assert_held_by_all(accelerator: Any, model: Any) -> None:
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in models.build("dense").state_dict().items()}
    held = {
        name: [sizes for _, sizes in _boxes(tensor)]
        for name, tensor in model._drivetrain.trainable.portable_state().tensors.items()  # noqa: SLF001
        if name in shapes
    }
    for everyones in Ranks(accelerator.backend).gather(held):
        said = f"not sharded_save, and a rank holds {everyones}, not every tensor whole"
        assert everyones == {name: [shape] for name, shape in shapes.items()}, said


def _boxes(tensor: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of this rank's shards of a tensor, as torch's planners read them."""
    listing = getattr(tensor, "__create_chunk_list__", None)
    if listing is None:
        return [((0,) * tensor.dim(), tuple(tensor.shape))]
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in listing()]


@case(applies=lambda capabilities: capabilities.async_save)
def saves_beside_training(kit: Kit) -> None:
    """``async_save``: what is saved is the state at the call, however the training goes on meanwhile."""
    accelerator, model, optimizer = _ready(kit)
    _backward(accelerator, model)
    optimizer.step()
    optimizer.zero_grad()
    for name in ("first", "second"):
        saved = full_state(accelerator, model)
        accelerator.save_state(str(kit.shared / name), blocking=False)
        for step in range(3):
            _backward(accelerator, model, seed=30 + step)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.wait_for_checkpoint()
        after = full_state(accelerator, model)
        assert any(not torch.equal(after[key], saved[key]) for key in after), "nothing was trained"
        accelerator.load_state(str(kit.shared / name))
        assert_same_state(full_state(accelerator, model), saved, 0.0)


@case(applies=lambda capabilities: not capabilities.async_save)
def no_saving_beside_training(kit: Kit) -> None:
    """``save_state(blocking=False)`` is refused, and nothing is written."""
    accelerator, _, _ = _ready(kit)
    _refuses(lambda: accelerator.save_state(str(kit.shared / "beside"), blocking=False))
    assert not (kit.shared / "beside").exists()


@case()
def unlisted_handlers(kit: Kit) -> None:
    """A keyword handler that no part reads is refused or warned about, never dropped without a word."""
    from drivetrain import DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(bucket_cap_mb=5)
    if type(handler).__name__ in kit.capabilities.handlers:
        kit.accelerator(kwargs_handlers=[handler])
        return
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain").addHandler(listener)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kit.accelerator(kwargs_handlers=[handler])
        except REFUSED as error:
            told.append(str(error))
        finally:
            logging.getLogger("drivetrain").removeHandler(listener)
    told += [str(warning.message) for warning in caught]
    assert any("DistributedDataParallelKwargs" in sentence for sentence in told), f"dropped without a word: {told}"


@case()
def parameter_names_are_the_users(kit: Kit) -> None:
    """No ``module.`` prefix in a state dict, whatever wraps the model; ``load_state_dict`` takes it back."""
    accelerator, model, _ = _ready(kit)
    names = list(models.build("dense").state_dict())
    found = list(full_state(accelerator, model))
    assert found == names, f"the state dict names {', '.join(found)}, not {', '.join(names)}"
    other = models.build("dense", seed=9)
    plain = accelerator.unwrap_model(model)
    assert type(plain).__name__ == type(other).__name__
    if kit.capabilities.replicated:
        assert list(model.state_dict()) == names
        model.load_state_dict(other.state_dict())
        assert_same_state(full_state(accelerator, model), dict(other.state_dict()), 0.0)
