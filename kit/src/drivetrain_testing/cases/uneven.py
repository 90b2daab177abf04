"""Checks epochs that do not divide by the number of ranks: each sample counts once, and a mean is over all samples.

The loader knows how many samples each rank has, and the core says by the ``scale`` of each backward what this rank's
mean weighs. A backend must apply each rank's scale, also if the scales differ between ranks or one is 0.
"""

from __future__ import annotations

from drivetrain_testing.cases.gradients import compare
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import Scenario


def _last_batch(kit: Kit) -> None:
    # 7 samples are 4 and 3, or 3 and 2 and 2, or 2 and 2 and 2 and 1; here at the end of a short window.
    compare(kit, Scenario(micro_steps=5, last_batch=7, window=3, epochs=2))


def _single_sample(kit: Kit) -> None:
    # No rank has as many samples as a sample has features: an engine that looks for the batch's dim finds one.
    compare(kit, Scenario(global_batch=24, micro_steps=2, last_batch=1))


def _joined(kit: Kit, last_batch: int) -> None:
    compare(kit, Scenario(micro_steps=3, last_batch=last_batch, joined=True))
    # Ranks close the last window at different micro-batches.
    compare(kit, Scenario(micro_steps=5, last_batch=last_batch, window=3, joined=True))


@case()
def last_batch(kit: Kit) -> None:
    """Ranks whose last batch is smaller than others' weigh less, and so does a short batch in its window."""
    _last_batch(kit)


@case()
def fewer_samples_than_ranks(kit: Kit) -> None:
    """A rank that is given a repeated sample, to take part in the last step, weighs nothing, with ``num_items`` too."""
    _single_sample(kit)
    compare(kit, Scenario("words", ragged=True, by_items=True, micro_steps=3, last_batch=1, window=2))


@case(applies=lambda capabilities: capabilities.join_uneven_inputs)
def ranks_that_end_early(kit: Kit) -> None:
    """Inside ``join_uneven_inputs`` with ``even_batches=False`` the last step is of the samples that are left."""
    _joined(kit, 1)


@case(applies=lambda capabilities: bool({"dp_replicate", "dp_shard"} & capabilities.mesh_axes), world_sizes=(3,))
def three_ranks(kit: Kit) -> None:
    """All of this on three data-parallel ranks, where two of them may be alike and one is not."""
    axis = "dp_replicate" if "dp_replicate" in kit.capabilities.mesh_axes else "dp_shard"
    along = kit.along(axis, 3)
    _last_batch(along)
    _single_sample(along)
    if kit.capabilities.join_uneven_inputs:
        _joined(along, 2)
