"""What of the contract still holds when workers train alone: the kit's cases, in rounds of one local step.

Joined without momentum such a round is data parallelism for plain SGD, so most cases hold. ``gaps`` are those that
cannot, each with its reason; this is no conformance test, which is ``test_diloco_conformance.py``.
"""

from __future__ import annotations

from typing import ClassVar

from drivetrain_testing.suite import BaseRequirements, pytest_generate_tests, test_conformance

__all__ = ["Requirements", "pytest_generate_tests", "test_conformance"]

OWN_CLIPPING = "each worker clips its own gradients, whose norm is not that of their mean"
OWN_ADAM = "the mean of Adam's steps is not Adam's step on the mean gradient"
OTHER_ROUNDS = "its three workers have rounds of several steps, and their weights are read inside of one"
OWN_GRADIENTS = "gradients stay on their worker; what is averaged are the parameters, after the step"


class Requirements(BaseRequirements):
    backend = "diloco"
    world_sizes = (2,)
    certifies = False
    section: ClassVar = {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    shared_ranks = True
    gaps: ClassVar = {
        "gradients.explicit_step": OWN_CLIPPING,
        "gradients.tied_weights": OWN_ADAM,
        "windows.adaptive_windows": OWN_ADAM,
        "clipping.clips_as_one_process_does": OWN_CLIPPING,
        "clipping.leaves_small_gradients": OWN_CLIPPING,
        "clipping.same_norm_everywhere": OWN_CLIPPING,
        "clipping.not_finite_is_skipped": OWN_CLIPPING,
        "clipping.other_norms": OWN_CLIPPING,
        "mesh.dp_replicate": OWN_CLIPPING,
        "clipping.clips_by_value": OWN_CLIPPING,
        "loose.clipped_with_a_model": OWN_CLIPPING,
        "honesty.no_sync_keeps_gradients_local": OWN_GRADIENTS,
        "honesty.trains_alone_and_averages": "joined after every step, no worker is alone for two",
        "state.resumed_equals_uninterrupted": OWN_ADAM,
        "uneven.three_ranks": OTHER_ROUNDS,
        "scripts.gradients_that_are_edited": OWN_GRADIENTS,
        "scripts.hooks_of_parameters": OWN_GRADIENTS,
        "scripts.forwards_that_write": "what a worker writes is joined with the others at the end of the round",
        "scripts.three_ranks": OTHER_ROUNDS,
    }
