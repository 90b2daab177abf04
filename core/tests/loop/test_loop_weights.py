"""A window is one big batch: batches that do not divide, several loaders in one loop, ragged labels."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.config import load_config
from drivetrain.data.kept_batches import KeptBatches
from drivetrain.data.plan import Rows
from drivetrain.errors import UsageError
from drivetrain.loop.loss import (
    count_items,
    factors_of_means,
    is_mean_of_labels,
    outputs_below,
    rows_of_terms,
    sums_over_batch,
    weighs_by_rows,
    why_no_mean_of_rows,
)
from drivetrain_testing import spawn

_spec = importlib.util.spec_from_file_location("window_jobs", Path(__file__).with_name("window_jobs.py"))
jobs = importlib.util.module_from_spec(_spec)
sys.modules["window_jobs"] = jobs
_spec.loader.exec_module(jobs)

# float32 sums in another order differ in the last bits; a wrong weight differs by parts of a percent.
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}


def one_batch_a_step(rows: int, batch: int) -> tuple[int, list[torch.Tensor]]:
    """Plain torch, one process, no accumulation."""
    model = jobs.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = jobs.make_data(rows)
    steps = 0
    for _ in range(2):
        for part in zip(x.split(batch), y.split(batch), strict=True):
            F.cross_entropy(model(part[0]), part[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps, jobs.values(model)


def check(results, expected) -> None:
    for steps, weights in results:
        assert steps == expected[0]
        torch.testing.assert_close(weights, expected[1], **TOLERANCE)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.gate("1-2", "3-3")
def test_no_sample_weighs_twice_in_a_window(world, steps):
    results = spawn(jobs.mean_loss, world, 65, 12, steps, "accumulate", "map")
    check(results, one_batch_a_step(65, 12 * world * steps))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("form", ["plain", "sum", "train_step"])
@pytest.mark.gate("*-3")
def test_no_sample_weighs_twice_without_accumulate(world, form):
    check(spawn(jobs.mean_loss, world, 65, 12, 1, form, "map"), one_batch_a_step(65, 12 * world))


@pytest.mark.parametrize("rows", [2, 25, 26])
@pytest.mark.parametrize("form", ["accumulate", "sum", "train_step"])
@pytest.mark.gate("*-25")
def test_ranks_without_a_sample_of_the_last_batch_weigh_nothing(rows, form):
    check(spawn(jobs.mean_loss, 4, rows, 6, 1, form, "map"), one_batch_a_step(rows, 24))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.gate("2-3")
def test_batches_of_a_sampler_weigh_by_their_rows(world, steps):
    # The last round has batches of 12 and of 5, and repeats whole ones.
    results = spawn(jobs.mean_loss, world, 65, 12, steps, "accumulate", "sampler")
    check(results, one_batch_a_step(65, 12 * world * steps))


def test_parts_of_a_batch_that_ranks_share_unevenly_are_refused():
    for text in spawn(jobs.parts_of_an_uneven_batch, 2):
        assert "of which the ranks hold different numbers of samples (4, 3)" in text


# ---- several loaders ------------------------------------------------------------------------------------------------


def by_hand(num_rounds: int, sizes: tuple[int, int], steps: int, batch: int) -> tuple[int, list[torch.Tensor]]:
    """Plain torch: a step after so many rounds and after the last."""
    model = jobs.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = [jobs.make_data(batch * size, seed) for seed, size in enumerate(sizes)]
    done = 0
    for _ in range(2):
        window = []
        for number in range(num_rounds):
            (x, y), (other, _) = (
                [each[(batch * (number % size)) :][:batch] for each in one]
                for one, size in zip(data, sizes, strict=True)
            )
            window.append(F.cross_entropy(model(x), y) + model(other).pow(2).mean())
            if len(window) == steps or number + 1 == num_rounds:
                (sum(window) / len(window)).backward()
                optimizer.step()
                optimizer.zero_grad()
                window, done = [], done + 1
    return done, jobs.values(model)


def test_a_loss_over_two_batches_is_refused_on_every_rank():
    """On one of them alone, the others would go on with another weight, or wait."""
    for said in spawn(jobs.two_batches_of_one_loader, 2):
        assert "the ranks hold 2, 1 samples of this batch, and the loss may be a mean over" in said


@pytest.mark.parametrize("sizes", [(5, 7), (7, 5)])
def test_a_loop_over_several_loaders_leaves_none_active(sizes):
    """At once, and not where Python happens to look for cycles, which differs from rank to rank."""
    assert spawn(jobs.left_by_zip, 1, sizes) == [[None, None]]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("form", "sizes", "rounds"),
    [("zip", (5, 5), 5), ("zip", (5, 7), 5), ("zip", (7, 5), 5), ("cycle", (7, 3), 7), ("cycle", (5, 8), 5)],
)
@pytest.mark.gate("zip-sizes1-*-3", "cycle-sizes3-*-3")
def test_a_loop_over_several_loaders_ends_its_last_window(world, form, sizes, rounds):
    check(spawn(jobs.two_loaders, world, form, sizes, 2), by_hand(rounds, sizes, 2, 2 * world))


@pytest.mark.parametrize("form", ["kept", "endless"])
@pytest.mark.parametrize("sizes", [(5, 5), (6, 6)])
@pytest.mark.gate("sizes0-*")
def test_an_iterator_that_the_script_keeps_ends_no_window(form, sizes):
    check(spawn(jobs.two_loaders, 2, form, sizes, 4), by_hand(sizes[0], sizes, 4, 4))


@pytest.mark.parametrize(("form", "sizes"), [("kept", (7, 3)), ("kept", (5, 9))])
@pytest.mark.gate("kept-sizes1")
def test_a_kept_iterator_may_end_within_the_loop(form, sizes):
    [(steps, _), *_] = spawn(jobs.two_loaders, 2, form, sizes, 2)
    assert steps == 2 * -(-sizes[0] // 2)


def test_an_inner_loop_ends_its_own_windows():
    results = spawn(jobs.nested_loops, 2, 2)
    assert [steps for steps, _ in results] == [6, 6]


def test_one_loss_over_batches_that_are_shared_differently_is_refused():
    for text in spawn(jobs.uneven_pair, 2):
        assert "different numbers of samples in the batches of the loaders of this loop (4, 3; 4, 4)" in text or (
            "(2, 1; 4, 4)" in text
        )


# ---- ragged labels --------------------------------------------------------------------------------------------------


def one_batch_of_labels(batch: int) -> list[torch.Tensor]:
    model = jobs.Speaker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = jobs.sentences()
    for _ in range(2):
        for first in range(0, len(data), batch):
            part = data[first : first + batch]
            model(**{name: torch.stack([each[name] for each in part]) for name in part[0]})["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    return jobs.values(model)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.gate("3")
def test_counted_labels_weigh_the_same_in_every_batch(world):
    for weights in spawn(jobs.count_items, world, 2):
        torch.testing.assert_close(weights, one_batch_of_labels(4 * world), **TOLERANCE)


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 7, (4, 5), generator=generator)
    labels[1, 2:] = -100
    return torch.randn(4, 5, 7, generator=generator, requires_grad=True), labels


def test_what_a_loss_is_a_mean_over_is_read_from_its_graph():
    logits, labels = logits_and_labels()
    flat = logits.flatten(0, 1)
    by_labels = F.cross_entropy(flat, labels.flatten())
    assert count_items(by_labels) == 17
    assert count_items(by_labels.to(torch.float64).clone() / 3) == 17
    assert count_items(F.cross_entropy(logits.transpose(1, 2), labels)) == 17
    positive = labels.clamp(min=0)
    assert count_items(F.cross_entropy(flat, positive.flatten(), ignore_index=3)) == (positive != 3).sum()
    assert count_items(F.mse_loss(logits, torch.zeros_like(logits))) == 140
    assert count_items(flat.pow(2).mean()) == 140
    assert count_items(F.cross_entropy(flat.bfloat16().repeat(99, 1), labels.flatten().repeat(99))) == 17 * 99
    assert count_items(torch.stack([by_labels, by_labels]).sum()) == 17
    two = F.cross_entropy(logits[:, :2].flatten(0, 1), labels[:, :2].flatten())
    assert count_items(two + F.cross_entropy(logits[:, 1:3, :].flatten(0, 1)[:8], labels[:, :2].flatten())) == 8


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), "NllLossBackward0"),
        (lambda x, y: F.cross_entropy(x, y).exp(), "ExpBackward0"),
        (lambda x, y: 1 / F.cross_entropy(x, y), "ReciprocalBackward0"),
        (lambda x, y: F.cross_entropy(x, y) + x.pow(2).mean(), "adds means over 17.0, 140.0 items"),
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), "cannot tell what this loss is a mean over"),
        (lambda x, y: x.pow(2).mean(0)[:1].squeeze(), "cannot tell what this loss is a mean over"),
    ],
)
def test_a_loss_that_is_no_mean_is_not_counted(loss, said):
    logits, labels = logits_and_labels()
    with pytest.raises(UsageError) as caught:
        count_items(loss(logits.flatten(0, 1), labels.flatten()))
    assert said in str(caught.value) or "cannot tell what this loss is a mean over" in str(caught.value)


def test_means_over_labels_are_told_from_means_over_samples():
    logits, labels = logits_and_labels()
    assert is_mean_of_labels(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), None)
    assert is_mean_of_labels(F.cross_entropy(logits.transpose(1, 2), labels), 4)
    assert not is_mean_of_labels(F.cross_entropy(logits[:, 0], labels[:, 0]), 4)
    assert not is_mean_of_labels(F.mse_loss(logits, torch.zeros_like(logits)), 4)
    weight = torch.ones(logits.shape[-1])
    assert is_mean_of_labels(F.cross_entropy(logits[:, 0], labels[:, 0], weight=weight), 4)


def test_a_mean_over_labels_is_said_once(caplog):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(jobs.Speaker())
    batch = {name: value[None] for name, value in jobs.sentences()[0].items()}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
    assert sum("count_items" in record.getMessage() for record in caplog.records) == 1
    accelerator.end_training()


# ---- sums over the batch --------------------------------------------------------------------------------------------

ROWS, RANKS = 5, 3
_layer = torch.nn.Linear(6, 7)
_goals = torch.rand(ROWS, 7, generator=torch.Generator().manual_seed(3))
_labels = torch.arange(ROWS)
_advantage = torch.linspace(-1, 2, ROWS)
_divergence = lambda z: -0.5 * (1 + z - z.pow(2) - z.exp()).sum()  # noqa: E731
_each = lambda z: F.cross_entropy(z, _labels, reduction="none")  # noqa: E731


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.cross_entropy(z, _labels, reduction="sum"),
        lambda z: F.cross_entropy(z, _labels, reduction="sum", label_smoothing=0.1),
        lambda z: F.cross_entropy(z, _goals, reduction="sum"),
        lambda z: F.mse_loss(z, _goals, reduction="sum"),
        lambda z: F.l1_loss(z, _goals, reduction="sum"),
        lambda z: F.smooth_l1_loss(z, _goals, reduction="sum"),
        lambda z: F.huber_loss(z, _goals, reduction="sum"),
        lambda z: F.binary_cross_entropy(z.sigmoid(), _goals, reduction="sum"),
        lambda z: F.binary_cross_entropy_with_logits(z, _goals, reduction="sum"),
        lambda z: F.kl_div(z.log_softmax(-1), _goals, reduction="sum"),
        lambda z: F.poisson_nll_loss(z, _goals, reduction="sum"),
        lambda z: F.cross_entropy(
            z.view(ROWS, 7, 1).expand(-1, -1, 2).transpose(1, 2).flatten(0, 1), _labels.repeat(2), reduction="sum"
        ),
        lambda z: F.cross_entropy(
            z.view(ROWS, 7, 1).expand(-1, -1, 2).transpose(1, 2).flatten(0, 1), _labels.repeat(2), reduction="none"
        ).sum(),
        lambda z: _each(z).sum(),
        lambda z: torch.cat(_each(z).split(2)).sum(),
        lambda z: (z - _goals).pow(2).sum(),
        lambda z: (z - _goals).pow(2).sum(1).sum(),
        lambda z: (z - _goals).pow(2).sum(0).sum(),
        lambda z: (z - _goals).pow(2).mean(1).sum(),
        lambda z: F.mse_loss(z, _goals, reduction="sum") + _divergence(z),
        lambda z: F.mse_loss(z, _goals) + 0.3 * _divergence(z),
        lambda z: (-torch.distributions.Categorical(logits=z).log_prob(_labels) * _advantage).sum(),
        lambda z: torch.stack((_each(z).sum(), z.pow(2).mean())).sum(),
        lambda z: 0.7 * F.cross_entropy(z, _labels, reduction="sum").double() / 1.5,
        lambda z: F.cross_entropy(z, _labels, reduction="sum") + 1e-2 * _layer.weight.pow(2).sum(),
        # Whole numbers that count nothing of what is summed: constants, and the batch of all ranks.
        lambda z: F.cross_entropy(z, _labels, reduction="sum") / (ROWS - 1),
        lambda z: F.cross_entropy(z, _labels, reduction="sum") / (RANKS * ROWS),
        lambda z: (z - _goals).pow(2).sum() / 7,
        lambda z: (_each(z) / 4).sum(),
        lambda z: (_each(z) * (_labels != 2)).sum() / (ROWS * RANKS),
        lambda z: F.cross_entropy(z, _labels, reduction="sum", ignore_index=2) / 3,
        # Loops over single rows.
        lambda z: sum(F.cross_entropy(z[i : i + 1], _labels[i : i + 1]) for i in range(ROWS)),
        lambda z: sum(F.mse_loss(z[i], _goals[i]) for i in range(ROWS)),
        lambda z: sum((z[i] - _goals[i]).pow(2).sum() for i in range(ROWS)) / 2,
        lambda z: sum(_each(z)),
        lambda z: sum(_each(z)[i] for i in range(ROWS)),
        lambda z: -z.log_softmax(-1).gather(1, _labels[:, None]).sum(),
        lambda z: torch.stack([F.mse_loss(z[i], _goals[i]) for i in range(ROWS)]).sum(),
        lambda z: torch.cat([F.mse_loss(z[i], _goals[i])[None] for i in range(ROWS)]).sum(),
        lambda z: torch.stack([each * one for each, one in zip(_each(z), _advantage, strict=True)]).sum(),
        lambda z: torch.cat([each[None] / one for each, one in zip(_each(z), _advantage + 2, strict=True)]).sum() / 2,
    ],
)
def test_a_sum_over_the_batch_is_found(loss):
    assert sums_over_batch(loss(_layer(torch.randn(ROWS, 6))), ROWS, RANKS)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.cross_entropy(z, _labels),
        lambda z: F.cross_entropy(z, _labels, label_smoothing=0.1),
        lambda z: F.cross_entropy(z, _goals),
        lambda z: F.kl_div(z.log_softmax(-1), _goals, reduction="batchmean"),
        lambda z: F.cross_entropy(z, _labels, reduction="sum") / len(z),
        lambda z: F.cross_entropy(z, _labels, reduction="sum") * (1 / len(z)),
        lambda z: F.cross_entropy(z, _labels, reduction="sum") / (_labels != 2).sum(),
        lambda z: F.cross_entropy(z, _labels, reduction="sum", ignore_index=2) / int((_labels != 2).sum()),
        lambda z: (_each(z) * (_labels != 2)).sum() / int((_labels != 2).sum()),
        lambda z: _each(z)[_labels != 2].sum() / 4,
        lambda z: _each(z).masked_fill(_labels == 2, 0).sum() / 4,
        lambda z: torch.where(_labels != 2, _each(z), 0).sum() / 4,
        lambda z: sum(_each(z)) / ROWS,
        lambda z: sum(F.mse_loss(z[i], _goals[i]) for i in range(ROWS)) * RANKS,
        lambda z: sum(F.mse_loss(z[:, i], _goals[:, i]) for i in range(ROWS)),
        lambda z: F.mse_loss(z, _goals) + sum(_layer.weight[i].pow(2).mean() for i in range(ROWS)),
        lambda z: F.mse_loss(z, _goals, reduction="sum") / z.numel(),
        lambda z: F.mse_loss(z, _goals, reduction="sum") * (1 / z.numel()),
        lambda z: (_each(z) / len(z)).sum(),
        lambda z: (_each(z) * torch.full((ROWS,), 1 / ROWS)).sum(),
        lambda z: (_each(z) * _advantage.softmax(0)).sum(),
        lambda z: (_each(z) * z.mean(1).softmax(0)).sum(),
        lambda z: (_each(z) * _goals[:, 0]).sum() / _goals[:, 0].sum(),
        lambda z: 1 - 2 * (z.sigmoid() * _goals).sum() / (z.sigmoid().sum() + _goals.sum()),
        lambda z: sum(F.cross_entropy(z[i : i + 1], _labels[i : i + 1]) for i in range(ROWS)) / ROWS,
        lambda z: torch.stack([F.cross_entropy(z, _labels) for _ in range(ROWS)]).sum(),
        lambda z: torch.cat([F.cross_entropy(z, _labels)[None] for _ in range(ROWS)]).sum(),
        lambda z: torch.stack([each * one for each, one in zip(_each(z), _advantage.softmax(0), strict=True)]).sum(),
        lambda z: (z - _goals).pow(2).sum(1).mean(),
        lambda z: F.cross_entropy(z, _labels) + 1e-2 * sum(each.pow(2).sum() for each in _layer.parameters()),
        lambda z: F.cross_entropy(z, _labels) + _layer.weight[:ROWS].abs().sum(),
        lambda z: F.cross_entropy(z, _labels) + (_layer.weight[:ROWS] @ _layer.weight[:ROWS].T).pow(2).sum(),
        lambda z: ((z[:, :ROWS].T @ z[:, :ROWS]) / ROWS - torch.eye(ROWS)).pow(2).sum(),
        lambda z: z.mean(0)[:ROWS].pow(2).sum(),
        lambda z: z[:, :ROWS].max(0).values.sum(),
        lambda z: z[:, :ROWS].amax(0).sum(),
        lambda z: z[:, :ROWS].median(0).values.sum(),
        lambda z: z[:, :ROWS].prod(0).sum(),
        lambda z: z[:, :ROWS].gather(0, z[:, :ROWS].argsort(0)[:1].expand(ROWS, ROWS)).sum(),
        lambda z: z[:, :ROWS].quantile(0.5, 0).sum(),
        lambda z: z[:, :ROWS].nanquantile(0.5, 0).sum(),
        lambda z: z[:, :ROWS].nanmedian(0).values.sum(),
        lambda z: z[:, :ROWS].mode(0).values.sum(),
        lambda z: z[:, :ROWS].sort(dim=0, stable=True).values[: ROWS // 2].sum(0).pow(2).sum(),
        lambda z: torch.var_mean(z[:, :ROWS], 0)[0].sum(),
        lambda z: z[:, :ROWS].cumsum(0)[-1].sum(),
        lambda z: (z[:, :ROWS].T @ _goals[:, 0]).pow(2).sum(),
        lambda z: (torch.zeros(ROWS, 7).index_add(0, _labels, z) / ROWS).sum(),
        lambda z: F.cross_entropy(z, _labels) + 0.0 * z.sum(),
        lambda z: F.cross_entropy(z, _labels, reduction="sum") * RANKS,
        lambda z: 2 * RANKS * F.cross_entropy(z, _labels, reduction="sum"),
        lambda z: F.cross_entropy(z, _labels, reduction="sum").exp(),
        lambda z: _layer.weight.pow(2).mean(),
    ],
)
def test_what_is_no_sum_over_the_batch_or_not_surely_passes(loss):
    assert not sums_over_batch(loss(_layer(torch.randn(ROWS, 6))), ROWS, RANKS)


@pytest.mark.parametrize(
    ("loss", "samples", "found"),
    [
        (lambda z: 53 / len(z) * _each(z).sum(), 53, False),
        (lambda z: -(53 / len(z)) * sum(_each(z)), 53, False),
        (lambda z: 53 / len(z) * F.cross_entropy(z, _labels, reduction="sum") + _layer.weight.pow(2).sum(), 53, False),
        (lambda z: 53 / len(z) * _each(z).sum() / 1000, 53, False),
        (lambda z: 53 / len(z) * _each(z).sum(), 0, True),
        (lambda z: 53 / len(z) * _each(z).sum(), 54, True),
        (lambda z: 53 / len(z) * _each(z).sum() + F.cross_entropy(z, _labels, reduction="sum") / 7, 53, True),
    ],
)
def test_a_sum_that_estimates_that_of_the_data_set_passes(loss, samples, found):
    assert sums_over_batch(loss(_layer(torch.randn(ROWS, 6))), ROWS, RANKS, samples) is found


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda z: F.cross_entropy(z, _labels, reduction="sum") / (RANKS * ROWS), True),
        (lambda z: (_each(z) / (RANKS * ROWS)).sum(), True),
        (lambda z: F.cross_entropy(z, _labels, reduction="sum") / ROWS, False),
        # More than there are elements: it counts nothing of the sum.
        (lambda z: F.cross_entropy(z, _labels, reduction="sum") / (RANKS * ROWS + 1), True),
    ],
)
def test_a_sum_that_is_divided_by_the_rows_of_all_ranks_is_found(loss, found):
    assert sums_over_batch(loss(_layer(torch.randn(ROWS, 6))), ROWS, RANKS) is found


def test_a_sum_over_one_row_is_its_mean():
    assert not sums_over_batch(_layer(torch.randn(1, 6)).pow(2).sum(), 1, RANKS)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.gate("*-3")
def test_a_sum_over_the_batch_trains_as_on_one_process_or_is_refused(world, factor, by_function):
    for said in spawn(jobs.summed, world, factor, by_function):
        if world == 1 or factor:
            model = jobs.make_model()
            x, y = jobs.make_data(12)
            F.cross_entropy(model(x), y, reduction="sum").backward()
            torch.testing.assert_close(said, [each.grad for each in model.parameters()], **TOLERANCE)
        else:
            assert "the loss is a sum over this rank's 4 rows, and losses are averaged over 3 ranks" in said
            assert "multiply the loss by accelerator.data_parallel_size" in said


def test_a_loss_function_that_returns_means_first_and_sums_later_is_looked_at_again():
    for said in spawn(jobs.sum_after_means, 3, True):
        assert "the loss is a sum over this rank's 4 rows" in said


def test_rows_of_terms():
    kept = torch.randn(8, 6)
    (batch,) = rows_of_terms(F.cross_entropy(_layer(torch.randn(ROWS, 6)), _labels))
    assert ROWS in batch.first
    assert 8 not in batch.first
    assert batch.computes
    one, other = rows_of_terms(F.cross_entropy(_layer(torch.randn(ROWS, 6)), _labels) + _layer(kept).pow(2).mean())
    assert (ROWS in one.first, 8 in one.first) == (True, False)
    assert (ROWS in other.first, 8 in other.first) == (False, True)
    (of_leaf,) = rows_of_terms(_layer(torch.randn(ROWS, 6, requires_grad=True)).pow(2).mean())
    assert of_leaf.computes
    penalties = rows_of_terms(sum(each.pow(2).sum() for each in _layer.parameters()))
    assert not any(each.computes for each in penalties)
    orthogonal = rows_of_terms((_layer.weight @ _layer.weight.T).pow(2).sum())
    assert not any(each.computes for each in orthogonal)
    (loop,) = rows_of_terms(sum(F.mse_loss(_layer(row), torch.zeros(7)) for row in kept))
    assert 8 in loop.first


def _mean(rows: int) -> Tensor:
    return F.cross_entropy(_layer(torch.randn(rows, 6)), torch.zeros(rows, dtype=torch.long))


BY_ALL = {
    "as one factor": lambda rows: _mean(rows) * (rows / 12),
    "as two": lambda rows: _mean(rows) * rows / 12,
    "a sum": lambda rows: _mean(rows) * rows,
    "and a weight": lambda rows: _mean(rows) * (rows / 12) * 0.3,
    "of two terms": lambda rows: (_mean(rows) + 0.1 * _mean(rows)) * (rows / 12),
}
BY_SOMETHING = {
    "of a data set": lambda rows: _mean(rows) * rows / 1000,
    "of a window of this rank": lambda rows: _mean(rows) * (rows / 23),
}
BY_NOTHING = {
    "times the ranks": lambda rows: _mean(rows) * (rows * 2 / 12),
    "and then the ranks": lambda rows: _mean(rows) * (rows / 12) * 2,
    "by the rows of a rank": lambda rows: _mean(rows) * rows / 6,
    "a constant": lambda rows: _mean(rows) * 0.5,
    "another number": lambda rows: _mean(rows) * (0.5 if rows == 6 else 0.3),
    "a tensor": lambda rows: _mean(rows) * torch.tensor(rows / 12),
    "nothing": _mean,
}


@pytest.mark.parametrize("form", [*BY_ALL, *BY_SOMETHING, *BY_NOTHING])
def test_a_share_of_the_batch_is_seen_in_two_batches_of_different_sizes(form):
    loss = {**BY_ALL, **BY_SOMETHING, **BY_NOTHING}[form]
    full, short = factors_of_means(loss(6), 6, 12), factors_of_means(loss(4), 4, 7)
    expected = "by all" if form in BY_ALL else "by something" if form in BY_SOMETHING else "no"
    assert weighs_by_rows(full, short, 2) == weighs_by_rows(short, full, 2) == expected
    assert weighs_by_rows(full, full, 2) == "no"


class InPython(torch.autograd.Function):
    """A layer in Python, as engines write it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, gradient.T @ x


def test_outputs_below():
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))
    kept, other = net(torch.randn(3, 6)), net(torch.randn(3, 6))
    known = {kept.grad_fn}
    penalty = sum(each.pow(2).sum() for each in net.parameters())
    assert outputs_below(F.linear(kept, net[2].weight).mean() + penalty, known) == (known, False)
    assert outputs_below(kept.mean() + other.mean(), known) == (known, True)
    assert outputs_below(other.mean(), known) == (set(), False)
    own = InPython.apply(torch.randn(3, 6), net[0].weight)
    assert outputs_below(kept.mean() + own.mean(), known) == (known, True)


@pytest.mark.parametrize("how", ["given", "in memory of it", "labels"])
def test_a_short_batch_is_known_while_it_is_held(how):
    kept, rows = KeptBatches(), Rows((2, 1), (2, 1), 3)
    x, y = kept.show(rows, (torch.randn(2, 6), torch.zeros(2, dtype=torch.long)))
    assert kept.rows_of(x) is None  # the current batch
    kept.end()
    assert kept.rows_of({"given": x, "in memory of it": [x[1:].reshape(-1)], "labels": {"y": y}}[how]) is rows
    assert kept.rows_of(torch.randn(2, 6)) is None
    del x, y
    assert kept.rows_of(torch.randn(2, 6)) is None
    assert not kept.held


@pytest.mark.parametrize("rows", [Rows((2, 2), (2, 2), 4), Rows((2, 1), (2, 1), 3)])
def test_a_kept_batch_is_forgotten_when_its_memory_is_used_again(rows):
    kept, data = KeptBatches(), torch.randn(8, 6)
    first = kept.show(Rows((2, 1), (2, 1), 3), data[5:7])
    kept.end()
    assert kept.rows_of(first)
    kept.show(rows, data[:5])
    assert kept.rows_of(first)
    kept.show(rows, data[6:8])
    kept.end()
    assert kept.rows_of(data[5:6]) is None


def test_each_kind_of_loss_is_looked_at():
    for said in spawn(jobs.sum_after_means, 3):
        assert "the loss is a sum over this rank's 4 rows" in said


def by_rows(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 4).float()


TELLS_OF_HOOKS = hasattr((torch.ones(2, requires_grad=True) * torch.ones(2)).grad_fn._raw_saved_other, "unpack_hook")
"""torch 2.9 does not tell whether reading what a node saves would run a checkpoint again, and nothing is read."""


def normalised(weights: Tensor) -> Tensor:
    return (weights - weights.mean()) / (weights.std() + 1e-8)


SOME = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
"""A mask of six rows."""

NO_MEANS_OF_ROWS = {
    "sqrt": lambda net, x, y: F.mse_loss(net(x), hot(y)).sqrt(),
    "log": lambda net, x, y: 0.5 * F.mse_loss(net(x), hot(y)).log() + by_rows(net(x), y).mean(),
    "log10": lambda net, x, y: -10 * torch.log10(1 / F.mse_loss(net(x), hot(y))),
    **{
        f"{name}()": lambda net, x, y, of=of: of(F.mse_loss(net(x), hot(y)))
        for name, of in {
            "log2": torch.log2,
            "expm1": torch.expm1,
            "rsqrt": torch.rsqrt,
            "erf": torch.erf,
            "silu": F.silu,
            "specialentr": torch.special.entr,
        }.items()
    },
    "div": lambda net, x, y: 1 - 2 * (net(x).softmax(1) * hot(y)).sum() / (net(x).softmax(1).sum() + len(x)),
    "divided by a number": lambda net, x, y: (x[:, 0].abs() * by_rows(net(x), y)).sum() / x[:, 0].abs().sum(),
    "divided by the number of elements that a mask leaves": lambda net, x, y: (
        (by_rows(net(x), y) * SOME).mean() / SOME.mean()
    ),
    "a sum, divided by a number": lambda net, x, y: torch.einsum("b,b->", by_rows(net(x), y), SOME) / SOME.sum(),
    "over 4 elements": lambda net, x, y: by_rows(net(x), y)[:4].mean(),
    "topk": lambda net, x, y: by_rows(net(x), y).topk(3).values.mean(),
    "over 8 elements": lambda net, x, y: F.mse_loss(net(x)[:2], hot(y)[:2]),
    "max": lambda net, x, y: by_rows(net(x), y).max(),
    "median": lambda net, x, y: by_rows(net(x), y).median(),
    "logsumexp": lambda net, x, y: by_rows(net(x), y).logsumexp(0),
    "norm": lambda net, x, y: (net(x) - hot(y)).norm(),
    "cumsum": lambda net, x, y: (net(x)[:, 0].cumsum(0) - x[:, 0]).square().mean(),
    "logcumsumexp": lambda net, x, y: (net(x)[:, 0].logcumsumexp(0) - net(x)[:, 0]).mean(),
    "mean": lambda net, x, y: (net(x) - net(x).mean(0)).square().mean(),
    "std": lambda net, x, y: ((net(x)[:, 0] / net(x)[:, 0].std()) - x[:, 0]).square().mean(),
    "var": lambda net, x, y: F.relu(1 - net(x).var(0)).sum() / len(x),
    "softmax": lambda net, x, y: (by_rows(net(x), y).softmax(0) * x[:, 0]).mean(),
    "compares them": lambda net, x, y: F.cross_entropy(net(x) @ net(x).T, torch.arange(len(x))),
    "compares them with one another": lambda net, x, y: F.relu(1 - (net(x)[:, None] - net(x)[None])).mean(),
    "compares them with": lambda net, x, y: torch.cdist(net(x), net(x)).mean(),
    "normalised": lambda net, x, y: -(by_rows(net(x), y).exp() * normalised(x[:, 0])).mean(),
    "normalised over": lambda net, x, y: torch.minimum(
        by_rows(net(x), y) * normalised(x[:, 0]), by_rows(net(x), y).clamp(0.8, 1.2) * normalised(x[:, 0])
    ).mean(),
    "weighs them": lambda net, x, y: (by_rows(net(x), y) * x[:, 0].softmax(0)).sum(),
    "weighs them by numbers": lambda net, x, y: (by_rows(net(x), y) * (x[:, 0].abs() / x[:, 0].abs().mean())).mean(),
    "leaves labels out": lambda net, x, y: F.cross_entropy(net(x), y.masked_fill(y == y[0], -100)),
}
MEANS_OF_ROWS = {
    "cross_entropy": lambda net, x, y: F.cross_entropy(net(x), y),
    "labels smoothed": lambda net, x, y: F.cross_entropy(net(x), y, label_smoothing=0.1),
    "weights of rows": lambda net, x, y: (x[:, 0].abs() * by_rows(net(x), y)).mean(),
    "a sum over the number": lambda net, x, y: by_rows(net(x), y).sum() / len(x),
    "a sum over a tensor": lambda net, x, y: by_rows(net(x), y).sum() / torch.tensor(float(len(x))),
    "a loop": lambda net, x, y: sum(F.mse_loss(net(one), hot(label)) for one, label in zip(x, y, strict=True)) / len(x),
    "a loop of roots": lambda net, x, y: (
        sum((net(one) - hot(label)).pow(2).sum().sqrt() for one, label in zip(x, y, strict=True)) / len(x)
    ),
    "a number without nan": lambda net, x, y: F.mse_loss(net(x), hot(y)).nan_to_num(),
    "one number of a tensor": lambda net, x, y: F.mse_loss(net(x), hot(y)).repeat(1).roll(1).flip(0).unbind()[0],
    "parts": lambda net, x, y: by_rows(net(x), y)[:3].mean() / 2 + by_rows(net(x), y)[3:].mean() / 2,
    "a root of each row": lambda net, x, y: (net(x) - hot(y)).pow(2).sum(1).sqrt().mean(),
    "a norm of the weights": lambda net, x, y: F.cross_entropy(net(x), y) + net.weight.pow(2).sum().sqrt(),
    "a product of the weights": lambda net, x, y: (
        F.cross_entropy(net(x), y) + (net.weight @ net.weight.T - torch.eye(4)).pow(2).sum()
    ),
    "a bound on a norm": lambda net, x, y: F.cross_entropy(net(x), y) + (0.05 * net.weight.norm() - 0.01).relu(),
    "an angle of weights": lambda net, x, y: (
        F.cross_entropy(net(x), y) + F.cosine_similarity(net.weight[0], net.weight[1], dim=0)
    ),
    "learned weights": lambda net, x, y: F.cross_entropy(net(x), y) * (-net.bias[0]).exp() + net.bias[0],
    "learned weights of a stack": lambda net, x, y: (
        torch.stack([F.cross_entropy(net(x), y), F.mse_loss(net(x), hot(y))]) * (-net.bias[:2]).exp() + net.bias[:2]
    ).sum(),
    "a mean of a stack": lambda net, x, y: torch.stack([F.cross_entropy(net(x), y), F.mse_loss(net(x), hot(y))]).mean(),
    "centres": lambda net, x, y: F.cross_entropy(net(x) @ torch.ones(4, 6), y),
    "one row of weights for each row": lambda net, x, y: F.cross_entropy(net(x) @ net.weight[:, :1].repeat(1, 6), y),
    "a mean over classes of means": lambda net, x, y: F.mse_loss(net(x), hot(y), reduction="none").mean(0).mean(),
    "a distribution for each row": lambda net, x, y: (net(x).softmax(1) * hot(y)).sum(1).mean(),
    "the largest of each row": lambda net, x, y: net(x).max(1).values.mean() + net(x).std(1).mean(),
    "a part of each row": lambda net, x, y: (net(x) / net(x).norm(dim=1, keepdim=True)).square().mean(),
    "labels of -1 and 1": lambda net, x, y: F.relu(1 - net(x)[:, 0] * torch.tensor([1.0, -1.0] * 3)).mean(),
    "a sum of halves": lambda net, x, y: (by_rows(net(x), y) * torch.tensor([0.0, 2.0] * 3)).mean(),
    "some over the number": lambda net, x, y: by_rows(net(x), y)[SOME > 0].sum() / len(x),
    "a mask of classes": lambda net, x, y: ((net(x) - hot(y)).square() * SOME[:4]).mean() / SOME[:4].mean(),
    "as many of each row": lambda net, x, y: (
        ((net(x) - hot(y)).square() * SOME[:4].expand(6, 4)).mean() / SOME[:4].mean()
    ),
    "a temperature": lambda net, x, y: F.cross_entropy(net(x), y) / torch.tensor(0.7),
    "two heads": lambda net, x, y: F.cross_entropy(net(x), y) + 0.3 * F.mse_loss(net(x), hot(y)),
}


@pytest.mark.parametrize("kind", [*NO_MEANS_OF_ROWS, *MEANS_OF_ROWS])
def test_a_loss_that_is_no_mean_of_its_rows_is_known(kind: str) -> None:
    if not TELLS_OF_HOOKS and ("normalised" in kind or "weighs them" in kind):
        pytest.skip("the installed torch does not tell whether reading what a node saves would run a checkpoint again")
    torch.manual_seed(1)
    net, x, y = nn.Linear(5, 4), torch.randn(6, 5), torch.arange(6) % 4
    found = why_no_mean_of_rows({**NO_MEANS_OF_ROWS, **MEANS_OF_ROWS}[kind](net, x, y), 6)
    assert (found is not None and kind in found.why) if kind in NO_MEANS_OF_ROWS else found is None, found


def test_a_sum_times_the_ranks_is_meant_as_it_is() -> None:
    net, x, y = nn.Linear(5, 4), torch.randn(6, 5), (torch.arange(6) % 4).masked_fill(SOME == 0, -100)
    for total in (by_rows(net(x), y).sum(), F.cross_entropy(net(x), y, reduction="sum")):
        assert why_no_mean_of_rows(total * 3 / torch.tensor(13), 6, 3) is None
        assert why_no_mean_of_rows(total / torch.tensor(13), 6, 3) is not None


def test_a_number_that_may_be_of_all_ranks_is_told() -> None:
    net, x, y = nn.Linear(5, 4), torch.randn(6, 5), torch.arange(6) % 4
    some = by_rows(net(x), y)[:4].sum()
    for loss in (some / 4.5, some / torch.tensor(4.5), some * (1 / 4.5)):
        found = why_no_mean_of_rows(loss, 6)
        assert found is not None
        assert found.divided_by == pytest.approx(4.5)
    masked = why_no_mean_of_rows((by_rows(net(x), y) * SOME).sum() / SOME.sum(), 6)
    assert masked is not None
    assert masked.divided_by == 0
    mean = why_no_mean_of_rows(by_rows(net(x), y)[:4].mean(), 6)
    assert mean is not None
    assert mean.divided_by == 0


def test_a_mask_within_a_single_row_is_known() -> None:
    net, x, target = nn.Linear(5, 4), torch.randn(1, 5), torch.zeros(1, 4)
    left, every = torch.tensor([[1.0, 0.0, 1.0, 1.0]]), torch.ones(1, 4)

    def mean_over(mask: Tensor) -> Tensor:
        return (F.mse_loss(net(x), target, reduction="none") * mask).sum() / mask.sum()

    found = why_no_mean_of_rows(mean_over(left), 1)
    assert found is not None
    assert "a mask leaves" in found.why
    assert why_no_mean_of_rows(mean_over(every), 1) is None
    assert why_no_mean_of_rows(F.mse_loss(net(x), target).sqrt() / torch.tensor(0.7), 1) is None


def padding_begins_later(ranks_rows: int) -> list[str]:
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain").addHandler(listener)
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "ddp", "use_cpu": True}, environ={}))
    mask = torch.ones(8 * ranks_rows, 4)
    mask[4 * ranks_rows :: 3, 2:] = 0.0
    data = DataLoader(TensorDataset(torch.randn(8 * ranks_rows, 5), mask), batch_size=ranks_rows)
    net = nn.Linear(5, 4)
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
    for x, left in data:
        accelerator.backward((net(x).square() * left).sum() / left.sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return [text for text in told if "not the mean of what" in text]


def test_padding_that_begins_in_a_later_batch_is_known() -> None:
    first, second = spawn(padding_begins_later, 2, 4)
    assert len(first) == 1
    assert not second
