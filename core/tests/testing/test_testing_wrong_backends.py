"""The kit catches every wrong backend, by the cases that are meant to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import wrong_backends

from drivetrain.errors import DrivetrainError
from drivetrain.testing import RankFailedError
from drivetrain.testing.kit import Kit, all_cases, run_case
from drivetrain.testing.requirements import BaseRequirements

CATCHES = [(name, case) for name, kind in wrong_backends.MISTAKES.items() for case in kind.caught_by]


@pytest.mark.parametrize(("mistake", "case"), CATCHES)
def test_mistake_is_caught(mistake: str, case: str, tmp_path: Path) -> None:
    class Requirements(BaseRequirements):
        backend = mistake
        setup = "wrong_backends:register"

    assert case in all_cases()
    with pytest.raises(RankFailedError) as caught:
        run_case(case, Kit.of(Requirements, 2, tmp_path), 2)
    # Caught by what a case states, not by a mistake of the mistake's own or by a broken connection.
    assert isinstance(caught.value.cause, AssertionError | DrivetrainError), caught.value
    assert re.search(NAMED.get((mistake, case), "."), str(caught.value.cause)), str(caught.value.cause)


NAMED = {
    ("keepsnoaccount", "scripts.steps_without_the_accelerator"): r"^loss\.backward\(\): no error",
    ("knowsfirstparametersonly", "scripts.layers_that_come_later"): "^a layer replaced after prepare: no error",
    ("knowsfirstparametersonly", "scripts.parameters_that_are_unfrozen"): "^parameters unfrozen after prepare: no",
    ("reducesitsownforward", "scripts.methods_that_do_not"): "^methods past the model's call: no error",
    ("trainsacopy", "scripts.parameters_that_are_written"): "^a script that loads parameters: no error",
    ("keepsownstatistics", "evaluation.statistics_are_alike"): "evaluates with other statistics",
    ("forgetsworldsize", "gradients.dense"): "step 1: all gradients are 2 of the reference = data-parallel size; ",
    ("averagestwice", "gradients.dense"): "step 1: all gradients are 0.5 of the reference = 1 / data-parallel size",
    ("ignoresscale", "windows.full_windows"): "all gradients are .* of the reference = .*micro-batches of the window",
    ("dropsmicrobatches", "windows.full_windows"): "they are those of the last micro-batch of the window alone",
    ("neverzeroes", "gradients.dense"): "step 2; the 1 before it are right: .* zero_grad left them in place",
    ("countsbyitself", "gradients.dense"): "all are zero: optimizer.step\\(\\) changed no parameter",
    ("onerateforall", "gradients.parameter_groups"): "gradients of every step are right; .* parameter groups",
    ("clipsperrank", "clipping.clips_as_one_process_does"): "ranks that clipped their own gradients each",
    ("clipsnothing", "clipping.clips_as_one_process_does"): "clip_grad_norm_ had no effect: .* without clipping",
    ("neverreduces", "gradients.dense"): "would step with gradients of this rank alone",
    ("normafterclipping", "clipping.clips_as_one_process_does"): "returned the norm after clipping, not the one before",
    ("clampsnothing", "clipping.clips_by_value"): "clip_grad_value_ had no effect",
    ("stepsonoverflow", "clipping.not_finite_is_skipped"): "skipped is not True|not finite was applied",
    ("gathersbackwards", "collectives.gather_nested"): "parts are all there, in the order .1, 0. instead of by rank",
    ("meansforsums", "collectives.reductions"): "the mean, 1 / data-parallel size of the sum",
    ("forgetsmoments", "state.load_undoes"): "brought back parameters and buffers, and not the optimizer's state",
    ("forgetsbuffers", "state.load_undoes"): "did not bring back the parameters and buffers that were saved",
    ("trainsownstart", "gradients.rank_zero_starts"): "after prepare the parameters are not those that rank 0 built",
    ("servesonemodel", "gradients.several_models"): "would step with gradients of this rank alone",
    ("prefixesnames", "honesty.parameter_names_are_the_users"): "the state dict names module.first.weight",
    ("stepsacopy", "honesty.optimizer_is_the_users"): "another optimizer than the user.s",
    ("givesparts", "scripts.state_dicts"): "'shape' do not match",
    ("copiestied", "scripts.state_dicts"): "tied parameters were saved as two",
    ("nobarrier", "collectives.main_process_goes_first"): "let in before the main process was done",
}
"""By mistake and case, what the kit says that is wrong."""


def test_there_are_enough() -> None:
    assert len(wrong_backends.MISTAKES) >= 12
    assert set(CATCHES) >= NAMED.keys()
