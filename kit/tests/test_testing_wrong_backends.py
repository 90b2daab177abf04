"""The kit catches every wrong backend, by the cases that are meant to."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import wrong_backends

from drivetrain.errors import DrivetrainError
from drivetrain_testing import RankFailedError, spawn
from drivetrain_testing.cases import state
from drivetrain_testing.kit import Kit, all_cases, run_case, run_in_rank
from drivetrain_testing.requirements import BaseRequirements

CATCHES = [(name, case) for name, kind in wrong_backends.MISTAKES.items() for case in kind.caught_by]


def catches():
    """Yield all of them; `make test` takes one of each family of cases."""
    seen = Counter()
    for name, case in CATCHES:
        family = case.partition(".")[0]
        seen[family] += 1
        yield pytest.param(name, case, marks=[pytest.mark.slow] * (seen[family] > 1))


@pytest.mark.parametrize(("mistake", "case"), list(catches()))
@pytest.mark.turns(2)
def test_mistake_is_caught(mistake: str, case: str, tmp_path: Path) -> None:
    class Requirements(BaseRequirements):
        backend = mistake
        setup = "wrong_backends:register"

    world_size = max(all_cases()[case].world_sizes or (2,))
    with pytest.raises(RankFailedError) as caught:
        run_case(case, Kit.of(Requirements, world_size, tmp_path), world_size)
    # Caught by what a case states, not by a mistake of the mistake's own or by a broken connection.
    assert isinstance(caught.value.cause, AssertionError | DrivetrainError), caught.value
    assert re.search(NAMED[mistake, case], str(caught.value.cause)), str(caught.value.cause)


NAMED = {
    ("knowsitselfonly", "apart.parts_of_the_data"): "^a loader of this rank's part: no error in prepare",
    ("knowsitselfonly", "apart.settings_of_loaders"): "^a batch size for each rank: no error in prepare",
    ("letsrankspart", "apart.skipped_batches"): "^ranks that skip different batches: no error, neither at the end",
    ("settingsbytherank", "apart.right_training_agrees"): r"(?s)^ranks are apart since call .* step at .*settings",
    ("seedseachforward", "randomness.masks_of_each_rank"): "^data-parallel ranks draw the same masks in step 1",
    ("seedseachforward", "randomness.masks_of_an_explicit_step"): "^data-parallel ranks draw the same masks",
    ("drawsinbackward", "randomness.masks_of_each_rank"): "^the script's numbers differ among ranks after a step",
    ("drawsalike", "order.follows_the_plain_loader"): (
        "^shuffle=True: epoch 0 leaves torch's global generator in another state than a plain loop"
    ),
    ("seedsbytherank", "randomness.masks_of_each_rank"): "^the script's numbers differ among ranks after a step",
    ("keepsastream", "randomness.masks_go_on_after_a_load"): "",
    ("tearsmemory", "scripts.parameters_in_one_memory"): "^two parameters in one memory: no error",
    ("stepsonnothing", "scripts.steps_without_a_backward"): r"^optimizer.step\(\) before any backward: it did not r",
    ("readsmemory", "scripts.weights_of_other_strides"): "^a script that transposes a weight: no error",
    ("laysoutbyrows", "scripts.weights_of_other_strides"): "^noise for weights by columns: no error",
    ("keepseveryoptimizer", "scripts.later_optimizers"): "^two optimizers hold the parameter head.weight",
    ("knowstensorsintrees", "scripts.outputs_of_any_type"): "^an output that is a dataclass: no error",
    ("runshooksonparts", "scripts.hooks_of_parameters"): "^a hook that clamps a gradient: no error",
    ("letsreplicaspart", "scripts.forwards_that_write"): "^a forward that writes to a parameter: no error",
    ("stepsitsowngradients", "scripts.gradients_that_are_edited"): "^a script that halves gradients: no error",
    ("takesanytensor", "scripts.tensors_of_no_model"): "^a tensor of no prepared model: no error, and rank . is .* off",
    ("scalesitsownlosses", "loose.in_the_optimizer_of_a_model"): "^parameters beside .* in its optimizer: no error",
    ("scalesitsownlosses", "loose.in_an_optimizer_of_their_own"): "^parameters beside .* of their own: no error",
    ("addsfortwo", "scripts.three_ranks"): "^methods past the model's call: no error",
    ("lendscopies", "scripts.averages"): r"^the weights inside EMA.averaged\(\): no error",
    ("allowscopiesofparts", "scripts.copies"): "^a deep copy has other weights",
    ("forwardstoanother", "scripts.attributes_that_forward_reads"): "^an attribute set after prepare: no error",
    ("synchronisesnothing", "evaluation.synchronised_statistics"): "^sync_batch_norm: batch norms do not take the sta",
    ("keepsownstatistics", "evaluation.buffers_of_a_batch"): "^a buffer of a batch is .* without a word",
    ("keepsnoaccount", "scripts.steps_without_the_accelerator"): r"^loss\.backward\(\): no error",
    ("knowsfirstparametersonly", "scripts.layers_that_come_later"): "^a layer replaced after prepare: no error",
    ("knowsfirstparametersonly", "scripts.parameters_that_are_unfrozen"): "^parameters unfrozen after prepare: no",
    ("reducesitsownforward", "scripts.methods_that_do_not"): "^methods past the model's call: no error",
    ("trainsacopy", "scripts.parameters_that_are_written"): "^a script that loads parameters: no error",
    ("keepsownstatistics", "evaluation.statistics_are_alike"): "evaluates with other statistics",
    ("forgetsworldsize", "gradients.dense"): "step 1: all gradients are 2 of the reference = data-parallel size; ",
    ("claimstosum", "gradients.dense"): "step 1: all gradients are 0.5 of the reference = 1 / data-parallel size",
    ("averagestwice", "gradients.dense"): "step 1: all gradients are 0.5 of the reference = 1 / data-parallel size",
    ("ignoresscale", "windows.full_windows"): "all gradients are .* of the reference = .*micro-batches of the window",
    ("dropsmicrobatches", "windows.full_windows"): "they are those of the last micro-batch of the window alone",
    ("neverzeroes", "gradients.dense"): "step 2; the 1 before it are right: .* zero_grad left them in place",
    ("countsbyitself", "gradients.dense"): "all are zero: optimizer.step\\(\\) changed no parameter",
    ("capturesrates", "scheduling.moves_before_training"): "^param_groups has the right rates, and steps were made wit",
    ("gathersitself", "scheduling.metric_of_each_rank"): "^ranks have other learning rates: ",
    ("onerateforall", "gradients.parameter_groups"): "gradients of every step are right; .* parameter groups",
    ("clipsperrank", "clipping.clips_as_one_process_does"): "ranks that clipped their own gradients each",
    ("clipsnothing", "clipping.clips_as_one_process_does"): "clip_grad_norm_ had no effect: .* without clipping",
    ("neverreduces", "gradients.dense"): "step with gradients of this rank's samples alone",
    ("normafterclipping", "clipping.clips_as_one_process_does"): "returned the norm after clipping, not the one before",
    ("clampsnothing", "clipping.clips_by_value"): "clip_grad_value_ had no effect",
    ("stepsonoverflow", "clipping.not_finite_is_skipped"): "skipped is not True|not finite was applied",
    ("gathersbackwards", "collectives.gather_nested"): "parts are all there, in the order .1, 0. instead of by rank",
    ("meansforsums", "collectives.reductions"): "the mean, 1 / data-parallel size of the sum",
    ("forgetsmoments", "state.load_undoes"): "brought back parameters and buffers, and not the optimizer's state",
    ("forgetsbuffers", "state.load_undoes"): "did not bring back the parameters and buffers that were saved",
    ("trainsownstart", "gradients.rank_zero_starts"): "after prepare the parameters are not those that rank 0 built",
    ("servesonemodel", "gradients.several_models"): "step with gradients of this rank's samples alone",
    ("prefixesnames", "honesty.parameter_names_are_the_users"): "the state dict names module.first.weight",
    ("stepsacopy", "honesty.optimizer_is_the_users"): "another optimizer than the user.s",
    ("givesparts", "scripts.state_dicts"): "'shape' do not match",
    ("copiestied", "scripts.state_dicts"): "tied parameters were saved as two",
    ("keepsitsbuffers", "state.load_undoes"): "did not bring back the parameters and buffers that were saved",
    ("bakesinthescale", "uneven.last_batch"): "means that weigh the same in every micro-batch, however many samples",
    ("bakesinthescale", "uneven.fewer_samples_than_ranks"): "means that weigh the same on every rank, however many sam",
    (
        "bakesinthescale",
        "uneven.three_ranks",
    ): "means that weigh the same .*, however many samples each of them is over",
    ("neverweighsnothing", "uneven.fewer_samples_than_ranks"): "step 2; the 1 before it .* plus those of repeated samp",
    ("neverweighsnothing", "uneven.three_ranks"): "step 2; the 1 before it .* plus those of repeated samples, which",
    ("takesonescaleforall", "gradients.counted_labels"): "that weigh the same on every rank, however many labels each",
    ("dividesbythepresent", "uneven.ranks_that_end_early"): "step 3; the 2 before it are right: .* 2 of the reference",
    ("dividesbythepresent", "uneven.three_ranks"): "1.5 of the reference = data-parallel size / ranks that have a sam",
    ("leavesthosethatendbehind", "honesty.joins_uneven_inputs"): "^after join_uneven_inputs ranks hold different param",
    ("forgetsmoments", "state.resumed_equals_uninterrupted"): "brought back the parameters, and the run then goes ano",
    ("savespart", "state.load_undoes"): "missing in the checkpoint: model.calls",
    ("savespart", "state.resumed_equals_uninterrupted"): "missing in the checkpoint: model.second.bias",
    ("forgetslossscale", "state.loss_scale_travels"): "did not bring back the loss scale: 32768.0 is 65536.0",
    ("prefixesnames", "gradients.dense"): r"names differ from the user's: .*\['module.first.bias', .* are not the user",
    ("claimsshards", "honesty.every_rank_saves_its_part"): "parameters are held by several ranks, each of which would",
    (
        "gathersbackwards",
        "evaluation.each_sample_once_in_order",
    ): r"came back as \[2, 3, 0, 1, .*order of ranks is wrong",
    ("meansforsums", "gradients.ragged_labels"): "all gradients are 2 of the reference = data-parallel size; ",
    ("leavesvariables", "gradients.dense"): "^left behind: environment variable WRONG_BACKEND_WAS_HERE",
    ("leavesvariables", "gradients.start_stop_start"): "^end_training left environment variables behind",
    ("leavesdtype", "gradients.dense"): "^left behind: default dtype: torch.float32 became torch.float64",
    ("leavesdtype", "clipping.leaves_small_gradients"): "^left behind: default dtype: torch.float32 became torch.fl",
    ("leavesprocessgroup", "gradients.dense"): "^left behind: default process group",
    ("leavesthread", "gradients.dense"): r"thread left behind: Thread-1 \(wait\)",
    ("takessignals", "gradients.dense"): "^left behind: handler of SIGTERM: .*SIG_DFL.* became .*SIG_IGN",
    ("leavesdefaultdevice", "clipping.leaves_small_gradients"): "^left behind: default device: .*cpu.* became .*meta",
    ("servesonemodel", "gradients.one_loss_through_two_models"): "step with gradients of this rank's samples alone",
    ("claimspipeline", "honesty.pipelined_means_deferred"): "^pipelined is True, and the output .* is a Tensor",
    ("claimsanaxis", "mesh.tp"): "^the mesh is .*'tp': 1.*, although mesh.tp is 2",
    (
        "saysonedoesanother",
        "honesty.a_run_can_what_is_described",
    ): "^join_uneven_inputs is True in the description, False in",
    ("claimstowait", "honesty.trains_alone_and_averages"): "^gradients were reduced in every step, although synchroni",
    ("keepsownbuffers", "gradients.buffers_start_alike"): "^after prepare the buffers are not those of rank 0: ",
    (
        "castseverything",
        "gradients.parameters_that_are_no_floats",
    ): "prepare made the torch.int64 parameter order torch.f",
    ("forgetsrates", "state.parameter_groups_come_back"): "did not bring back the parameter groups that were saved: ",
    ("forgetsworldsize", "gradients.ragged_labels"): "all gradients are 2 of the reference = data-parallel size; ",
    ("averagestwice", "gradients.explicit_step"): "every norm is 0.5 of the reference = 1 / data-parallel size",
    ("ignoresscale", "gradients.ragged_labels"): "all gradients are 3 of the reference = items of the step / data-para",
    ("ignorescorrection", "windows.partial_window"): "0.25 of the reference .* when scale_gradients.. does nothing",
    ("ignorescorrection", "windows.ragged_windows"): "as they are when scale_gradients.. does nothing",
    ("dropsmicrobatches", "windows.ragged_windows"): "they are those of the last micro-batch of the window alone",
    ("countsbyitself", "windows.partial_window"): "step 2; .* all are zero: optimizer.step.. changed no parameter",
    ("alwaysreduces", "honesty.no_sync_keeps_gradients_local"): "^gradients were reduced inside of no_sync",
    ("clipsperrank", "clipping.same_norm_everywhere"): "^ranks see different norms",
    ("normafterclipping", "clipping.same_norm_everywhere"): "returned the norm after clipping, 0.01, not the one bef",
    ("hidestheskip", "clipping.not_finite_is_skipped"): "skipped is not True",
    ("hidestheskip", "precision.overflow_is_skipped"): "^an overflow on the last rank: optimizer_step_was_skipped ",
    ("lowprecisionparameters", "precision.bf16_policy"): "^mixed_precision bf16: after prepare parameters are torch.b",
    ("fullprecisioncompute", "precision.bf16_policy"): "^mixed_precision bf16: forward computed in torch.float32, ",
    ("fullprecisioncompute", "precision.fp16_policy"): "^mixed_precision fp16: forward computed in torch.float32, ",
    ("nobarrier", "collectives.main_process_goes_first"): "let in before the main process was done",
}
"""By mistake and case, what the kit says that is wrong."""


def test_buffers_that_do_not_travel_are_named(tmp_path: Path) -> None:
    class Requirements(BaseRequirements):
        backend = "keepsitsbuffers"
        setup = "wrong_backends:register"

    [(_, saved)] = spawn(run_in_rank, 1, state.departure, Kit.plain("single", tmp_path))
    [(_, loaded), _] = spawn(run_in_rank, 2, state.arrival, Kit.of(Requirements, 2, tmp_path))
    with pytest.raises(AssertionError, match=r"^load_state did not bring back the buffers that another job saved"):
        state.assert_arrived(saved, loaded)


def test_there_are_enough() -> None:
    assert len(wrong_backends.MISTAKES) >= 12
    assert set(CATCHES) == NAMED.keys(), "every mistake is caught by a case, and named by it"
