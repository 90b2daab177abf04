"""Checks the gradient contract: (sum over ranks and micro-batches of the loss) / denominator, for many models.

Plain gradient descent shows a wrong factor that an adaptive optimizer would hide.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from drivetrain.errors import UnsupportedError, UsageError
from drivetrain_testing import diagnosis, models
from drivetrain_testing.hygiene import own_environment
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import (
    Scenario,
    accelerated,
    adamw,
    assert_same,
    assert_same_state,
    backward,
    full_state,
    reference,
    sgd,
    share,
)


def compare(kit: Kit, scenario: Scenario, **kwargs: Any) -> None:
    """The scenario through ``Accelerator`` ends where plain torch ends."""
    accelerator = kit.accelerator(gradient_accumulation_steps=scenario.window, **kwargs)
    topology = accelerator.backend.topology
    actual, expected = accelerated(scenario, accelerator, topology.dp_size), reference(scenario)
    try:
        assert_same(actual, expected, kit.atol)
    except AssertionError as error:
        said = diagnosis.norms(actual.norms, expected.norms, scenario.max_norm, topology.dp_size)
        named = set(actual.state) == set(expected.state)
        if named and diagnosis.all_failed(kit.shared, topology.world_size, f"{len(kit.made)}"):
            again = kit.accelerator(gradient_accumulation_steps=scenario.window, **kwargs)
            said = "; ".join(filter(None, (diagnosis.explain(scenario, again), said)))
        raise AssertionError(f"{said}\n{error}" if said else str(error)) from error


@case()
def dense(kit: Kit) -> None:
    """Mean losses, every sample counts."""
    compare(kit, Scenario())


@case(guards="accelerate#3193, transformers#34191")
def ragged_labels(kit: Kit) -> None:
    """Losses summed over labels of which some do not count; one micro-batch of some rank has none that count."""
    compare(kit, Scenario("words", ragged=True, by_items=True, global_batch=4))


@case(guards="accelerate#3193, transformers#34191")
def counted_labels(kit: Kit) -> None:
    """``count_items``: the loss that a model returns, a mean over ragged labels, is that of one big batch.

    Where several ranks compute one loss together, along ``tp`` or ``pp``, it may be refused.
    """
    scenario = Scenario("speaking", ragged=True, counted=True, micro_steps=3, last_batch=7, window=2)
    try:
        compare(kit, scenario, count_items=True)
    except (UnsupportedError, UsageError) as error:
        mesh = kit.made[-1].backend.topology.mesh
        if mesh.dp_size == mesh.world_size or "count_items" not in str(error):
            raise


@case(guards="transformers#35203")
def empty_micro_batch(kit: Kit) -> None:
    """A rank's micro-batch, and a whole micro-step, in which no label counts: no NaN, no weight."""
    words, labels = models.ragged_data(4 * 4)
    labels[:2] = models.IGNORED
    labels[8:12] = models.IGNORED
    scenario = Scenario("words", ragged=True, by_items=True, global_batch=4, data=(words, labels))
    compare(kit, scenario)
    compare(kit, replace(scenario, window=2))


@case()
def explicit_step(kit: Kit) -> None:
    """``train_step`` follows the same curve, losses and norms included."""
    compare(kit, Scenario(explicit=True, max_norm=0.3))
    compare(kit, Scenario("words", ragged=True, by_items=True, global_batch=4, window=3, explicit=True))


@case()
def frozen_parameters(kit: Kit) -> None:
    """Parameters that are not trained stay as they are and stop no rank."""
    compare(kit, Scenario("frozen"))


@case(guards="accelerate#3870, accelerate#4171")
def tied_weights(kit: Kit) -> None:
    """A table used twice gets the sum of both gradients and stays one tensor."""
    scenario = Scenario("words", ragged=True, by_items=True, global_batch=4, optimizer=adamw)
    compare(replace(kit, atol=max(kit.atol, 1e-5)), scenario)


@case()
def buffers(kit: Kit) -> None:
    """Float and integer buffers live on, and are part of the state; a parameter without dims is trained."""
    compare(kit, Scenario("counting"))


@case()
def layer_norm(kit: Kit) -> None:
    """A block as people build it, for several epochs."""
    compare(kit, Scenario("normed", epochs=3, window=2))


@case()
def unused_parameters(kit: Kit) -> None:
    """Parameters without a gradient are unchanged, with the settings that the backend needs for that."""
    section = {**kit.config.get(kit.backend, {}), **kit.unused_parameters}
    compare(kit.with_config(**{kit.backend: section}) if section else kit, Scenario("branching"))


@case()
def rank_zero_starts(kit: Kit) -> None:
    """Ranks that built different parameters all train rank 0's."""
    accelerator = kit.accelerator()
    model = models.build("dense", seed=100 + accelerator.process_index)
    optimizer = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    with diagnosis.meaning("after prepare the parameters are not those that rank 0 built"):
        assert_same_state(full_state(accelerator, model), dict(models.build("dense", seed=100).state_dict()), 0.0)


@case()
def buffers_start_alike(kit: Kit) -> None:
    """Ranks whose buffers differ before ``prepare`` all go on from rank 0's."""
    accelerator = kit.accelerator()
    model: Any = models.build("counting")
    model.scale.fill_(0.25 * (1 + accelerator.process_index))
    model.calls.fill_(7 + accelerator.process_index)
    model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
    start = full_state(accelerator, model)
    everywhere = accelerator.gather(torch.stack([start["scale"].flatten()[0], start["calls"].float()]).unsqueeze(0))
    said = f"after prepare the buffers are not those of rank 0: scale and calls by rank are {everywhere.tolist()}"
    assert everywhere.tolist() == [[0.25, 7.0]] * len(everywhere), said


@case(guards="pytorch#177844, pytorch#185239")
def parameters_that_are_no_floats(kit: Kit) -> None:
    """Integer and boolean parameters are unchanged, also under reduced precision; the other parameters train."""
    compare(kit, Scenario("indexed"))
    for name in sorted(kit.capabilities.precisions - {"no"}):
        accelerator = kit.accelerator(mixed_precision=name)
        model: Any = models.build("indexed")
        model, _ = accelerator.prepare(model, sgd(model))
        state = full_state(accelerator, model)
        for key, expected in models.build("indexed").state_dict().items():
            if not expected.is_floating_point():
                dtype = f"mixed_precision {name}: prepare made the {expected.dtype} parameter {key} {state[key].dtype}"
                assert state[key].dtype == expected.dtype, dtype
                assert torch.equal(state[key], expected), f"mixed_precision {name}: prepare changed {key}"


@case()
def parameter_groups(kit: Kit) -> None:
    """Groups keep their own learning rate and weight decay, and a rate set by the script is used."""

    def two_groups(model: nn.Module) -> SGD:
        slow, fast = [group.parameters() for group in model.children()]
        return SGD([{"params": slow, "weight_decay": 0.3}, {"params": fast, "lr": 0.05}], lr=0.4)

    compare(kit, Scenario(optimizer=two_groups))


@case(guards="accelerate#3585")
def several_models(kit: Kit) -> None:
    """Two models with an optimizer each, stepping in turns as a generator and a discriminator do."""
    accelerator = kit.accelerator()
    x, y = models.dense_data(48)
    plain = [models.build("dense", seed=1), models.build("normed", seed=2)]
    steps = [SGD(model.parameters(), lr=0.5) for model in plain]
    prepared: Any = [models.build("dense", seed=1), models.build("normed", seed=2)]
    optimizers: Any = [SGD(model.parameters(), lr=0.5) for model in prepared]
    prepared[0], optimizers[0], prepared[1], optimizers[1] = accelerator.prepare(
        prepared[0], optimizers[0], prepared[1], optimizers[1]
    )
    for turn in range(4):
        which, rows = turn % 2, slice(12 * turn, 12 * turn + 12)
        steps[which].zero_grad()
        backward(F.cross_entropy(plain[which](x[rows]), y[rows]))
        steps[which].step()
        mine, labels = share(accelerator, x[rows], y[rows])
        accelerator.backward(F.cross_entropy(prepared[which](mine), labels))
        optimizers[which].step()
        optimizers[which].zero_grad()
    for number, (model, expected) in enumerate(zip(prepared, plain, strict=True), start=1):
        with diagnosis.meaning(f"model {number} of two, each with an optimizer of its own"):
            assert_same_state(full_state(accelerator, model), dict(expected.state_dict()), kit.atol)


@case(applies=lambda capabilities: capabilities.optimizer_spans_models)
def one_loss_through_two_models(kit: Kit) -> None:
    """A loss that depends on two models reaches both; one optimizer holds the parameters of both."""
    accelerator = kit.accelerator()
    x, y = models.dense_data(12)

    def pair() -> tuple[nn.Module, nn.Module]:
        with models.seeded(5):
            return nn.Linear(models.FEATURES, 8), nn.Linear(8, models.CLASSES)

    body, head = pair()
    step = SGD([*body.parameters(), *head.parameters()], lr=0.5)
    backward(F.cross_entropy(head(torch.tanh(body(x))), y))
    step.step()
    first, second = pair()
    both: Any = SGD([*first.parameters(), *second.parameters()], lr=0.5)
    first, second, both = accelerator.prepare(first, second, both)
    mine, labels = share(accelerator, x, y)
    accelerator.backward(F.cross_entropy(second(torch.tanh(first(mine))), labels))
    both.step()
    for words, model, expected in (("first", first, body), ("second", second, head)):
        with diagnosis.meaning(f"the {words} of two models that one loss went through"):
            assert_same_state(full_state(accelerator, model), dict(expected.state_dict()), kit.atol)


@case()
def several_optimizers(kit: Kit) -> None:
    """Two optimizers share the parameters of one model."""
    accelerator = kit.accelerator()
    x, y = models.dense_data(12)
    plain, model = models.build("dense"), models.build("dense")
    for each in (SGD(plain.first.parameters(), lr=0.5), SGD(plain.second.parameters(), lr=0.1)):
        plain.zero_grad()
        backward(F.cross_entropy(plain(x), y))
        each.step()
    first: Any = SGD(model.first.parameters(), lr=0.5)
    second: Any = SGD(model.second.parameters(), lr=0.1)
    model, first, second = accelerator.prepare(model, first, second)
    mine, labels = share(accelerator, x, y)
    for each in (first, second):
        accelerator.backward(F.cross_entropy(model(mine), labels))
        each.step()
        first.zero_grad()
        second.zero_grad()
    assert_same_state(full_state(accelerator, model), dict(plain.state_dict()), kit.atol)


@case(guards="accelerate#2463")
def two_accelerators(kit: Kit) -> None:
    """Two accelerators with different settings live side by side; ending one leaves the other at work."""
    first = kit.accelerator()
    second = kit.accelerator(gradient_accumulation_steps=2)
    dp_size = first.backend.topology.dp_size
    one, two = Scenario(), Scenario("normed", window=2)
    assert_same(accelerated(one, first, dp_size), reference(one), kit.atol)
    kit.made.remove(first)
    first.end_training()
    assert_same(accelerated(two, second, dp_size), reference(two), kit.atol)


@case()
def start_stop_start(kit: Kit) -> None:
    """A process may train, end, and train again, even if some rank is late."""
    for _ in range(3):
        environment = own_environment()
        compare(kit, Scenario())
        kit.made.pop().end_training()
        # Who meets under the same names again could read what a late rank 0 left there the time before.
        time.sleep(0.2 if environment.get("RANK") == "0" else 0.0)
        assert own_environment() == environment, "end_training left environment variables behind"
