"""Runs the scripts of ``scripts/`` under each backend and compares them with plain torch on one process.

Many scripts share one group of ranks, one after the other, each with an accelerator and a process group of its own. So
do those that follow a script which all ranks were refused. After another failure the rest continue on fresh ranks,
since the failed script may have left the others anywhere.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from parity_common import Result, Script, load
from parity_plain import Plain

from drivetrain import Accelerator
from drivetrain.errors import DrivetrainError
from drivetrain_testing import RankFailedError, spawn

TOLERANCE = 2e-5
"""Largest difference of a loss or a weight, both of the order of 1, after some steps in float32: sums over ranks are
added in another order, and adaptive optimizers magnify that a little in each step. A wrong factor shows in the first
digits."""

SECONDS = 60
"""After which a script hangs; on a free machine one takes less than a second."""

SAME, REFUSED, DIFFERENT, RAW = "same", "refused", "different", "raw error"
DEFECTS = (DIFFERENT, RAW)
RECORD = Path(__file__).with_name("scripts") / "outcomes.json"


@dataclass(frozen=True)
class Place:
    """A backend with its section of the configuration, on a number of processes."""

    name: str
    world_size: int
    config: Mapping[str, Any] = field(default_factory=dict)
    data_parallel: bool = True


@dataclass(frozen=True)
class Matrix:
    """Scripts by places, and the file that keeps how each ended.

    Args:
        load: the scripts by name; called in every rank too.
        places: by name.
        record: JSON: script, place, outcome.
        distances: the record says how far numbers that are the same are apart.
        wanted: whether a script, by name, runs in a place; a script that runs nowhere has no row in the record.
    """

    load: Callable[[], dict[str, Script]]
    places: Mapping[str, Place]
    record: Path
    distances: bool = False
    wanted: Callable[[str, str], bool] = lambda script, place: True


def _deepspeed(stage: int) -> Place:
    return Place(f"deepspeed-{stage}", 2, {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": stage}})


def _megatron(short: str, axis: str) -> Place:
    section = {f"{axis}_parallel_size": 2}
    return Place(short, 2, {"distributed_type": "megatron", "megatron": section}, data_parallel=False)


PLACES = {
    place.name: place
    for place in (
        Place("single", 1, {"distributed_type": "single"}, data_parallel=False),
        Place("ddp-2", 2, {"distributed_type": "ddp"}),
        Place("ddp-3", 3, {"distributed_type": "ddp"}),
        Place("ddp-4", 4, {"distributed_type": "ddp"}),
        Place("fsdp-2", 2, {"distributed_type": "fsdp"}),
        _deepspeed(1),
        _deepspeed(2),
        _deepspeed(3),
        _megatron("tp-2", "tensor"),
        _megatron("pp-2", "pipeline"),
    )
}

ORDINARY = Matrix(load, PLACES, RECORD)
"""The scripts of ``scripts/``."""

PARTS = """
weights_clamped ema_of_parameters ema_of_loaded_weights averaged_from_the_first_step_on
weights_loaded_midway weights_as_one_vector data_assigned saved_by_torch penalties
weights_scaled_before_the_step rows_and_columns_written data_through_another_type data_with_other_strides
initialised_from_each_ranks_seed moved_after_each_step rows_shortened_after_each_step
alternating_parts frozen_for_a_step_under_adam gradual_unfreezing unfreezing_adds_group layer_never_used layer_used_late
parameter_replaced new_head_after_prepare groups_assigned own_optimizer_object double_after_prepare plain_backward
torch_clip_grad_norm torch_clip_grad_value clipped_by_groups gradient_norm_by_hand
gradients_edited_by_rows gradients_scaled gradients_dropped gradients_kept gradients_kept_and_clipped
gradients_zeroed gradients_zeroed_in_place accumulation_by_hand
zero_grad_of_each_part zero_grad_of_one_part zero_grad_of_a_part_before_the_step
hook_after_prepare hook_that_writes_in_place hook_after_accumulate gradient_norms_seen_by_hook
hook_sees_what_the_one_before_returned hooks_of_a_plain_backward
gradients_clamped_in_windows hooks_after_accumulation_in_windows
layer_clamps_itself forward_clamps_a_layer_before_its_call forward_clamps_a_layer_after_its_call
clamped_between_two_ways_in
data_exchanged data_between_forward_and_backward forward_assigns_data channels_last
group_narrowed parameter_moved_between_groups groups_replaced waiting_gradients_clipped
penalty_before_the_forward own_grad_scaler scaler_of_torch
layer_reinitialised parameters_reset listed_before_prepare clips_what_was_listed_before_prepare
gradient_penalty weights_tied_after_prepare embedding_max_norm parts_of_gradients_scaled
functional_call_with_other_values layer_called_alone_clamps_itself_later
adagrad layerwise_optimizer global_norm_optimizer optimizer_state_restored
as_many_steps_as_samples as_many_steps_as_samples_in_one_dim as_many_classes_as_samples
rows_collected_in_new_memory spectral_norm buffers_written counter_in_forward custom_output
two_losses_of_one_forward two_losses_of_one_forward_in_windows gradient_surgery_by_backward
langevin_dynamics weights_dropped_by_draws
noise_on_weights_by_columns weights_by_columns_drawn_anew weights_by_columns_drawn_by_views
weight_read_before_its_layer_runs
decayed_by_attributes_of_parameters attributes_read_in_forward
gradients_left_before_prepare gradients_left_before_prepare_and_zeroed extra_state_beside_weights
elastic_weights pruned_by_moving_scores parameters_by_torch_save
"""
"""Scripts whose numbers depend on how an engine cuts parameters, gradients and states, and where it keeps the parts."""


def load_parts() -> dict[str, Script]:
    """The scripts of :data:`PARTS`, in the order of the files."""
    wanted = set(PARTS.split())
    scripts = {name: each for name, each in load().items() if name in wanted}
    assert scripts.keys() == wanted, wanted - scripts.keys()
    return scripts


def _zero(short: str, stage: int, **section: Any) -> Place:
    section["zero_stage"] = stage
    return Place(f"deepspeed-{short}", 3, {"distributed_type": "deepspeed", "deepspeed": section})


def _cut(short: str, world_size: int, **section: Any) -> Place:
    return Place(short, world_size, {"distributed_type": "megatron", "megatron": section}, data_parallel=False)


IN_PARTS = {"stage3_param_persistence_threshold": 0}
"""Without it stage 3 keeps parameters as small as these whole between their uses."""

def _beside(short: str, ranks: int, data_parallel: str, **section: Any) -> Place:
    section["data_parallel"] = data_parallel
    return Place(short, ranks, {"distributed_type": "megatron", "megatron": section})


LAYOUTS = {
    place.name: place
    for place in (
        Place("fsdp-3", 3, {"distributed_type": "fsdp"}),
        _zero("0", 0),
        _zero("1-of-3", 1),
        _zero("2-offload", 2, offload_optimizer="cpu"),
        _zero("2-round-robin", 2, round_robin_gradients=True),
        _zero("3-of-3", 3),
        _zero("3-in-parts", 3, sub_group_size=60, **IN_PARTS),
        _zero("3-offload", 3, offload_optimizer="cpu", offload_param="cpu", **IN_PARTS),
        _cut("tp-2-sequence", 2, tensor_parallel_size=2, sequence_parallel=True),
        _beside("megatron-dp-2", 2, "ddp"),
        _beside("tp-2-dp-2", 4, "ddp", tensor_parallel_size=2),
        _beside("megatron-zero1-3", 3, "zero1"),
        _beside("tp-2-zero1-2", 4, "zero1", tensor_parallel_size=2),
        _beside("tp-2-fsdp-2", 4, "fsdp", tensor_parallel_size=2),
        _beside("pp-2-fsdp-2", 4, "fsdp", pipeline_parallel_size=2),
        _cut("pp-3", 3, pipeline_parallel_size=3, num_micro_batches=4),
        _cut("pp-2-zbv", 2, pipeline_parallel_size=2, num_micro_batches=4, schedule="zbv"),
    )
}
"""Places with three ranks, which share parameters unevenly and take means that are right by no luck.

``tp-2-sequence`` has two, since no plan divides these models by three; under ``zbv`` each of two ranks holds two stages
of four, the outer ones or the inner ones.
"""

APART = Matrix(load_parts, LAYOUTS, RECORD.with_name("layouts.json"))
"""The scripts of :data:`PARTS` in the other layouts of each engine; no columns of the documents' table."""


ADVISED_PLACES = {
    place.name: place
    for place in (
        _deepspeed(0),
        Place("pp-1", 2, {"distributed_type": "megatron", "megatron": {"pipeline_parallel_size": 1}}),
        replace(
            PLACES["pp-2"],
            name="pp-2-one-piece",
            config={"distributed_type": "megatron", "megatron": {"pipeline_parallel_size": 2, "num_micro_batches": 1}},
        ),
        *(
            replace(
                PLACES[name],
                name=f"{name}-dispatch",
                config={**PLACES[name].config, "dataloader": {"dispatch_batches": True}},
            )
            for name in ("tp-2", "pp-2")
        ),
    )
}
"""Settings that refusals advise and that are no place of the table."""

_NAMED = (
    ("distributed_type: ddp", lambda place: "ddp-2"),
    ("use one process", lambda place: "single"),
    ("zero_stage: 0", lambda place: "deepspeed-0"),
    ("zero_stage 0, 1 or 2", lambda place: "deepspeed-2"),
    ("zero_stage: 2", lambda place: "deepspeed-2"),
    ("pipeline_parallel_size: 1", lambda place: "pp-1"),
    ("without tensor_parallel_size and pipeline_parallel_size", lambda place: "pp-1"),
    ("num_micro_batches: 1", lambda place: f"{place}-one-piece"),
)
"""Words of a refusal that advise other settings, and the place that has them."""

DRAWN = ("unseeded_augmentation",)
"""Scripts that draw for a batch, for which a refusal of values that differ advises dispatch_batches."""


def advised_places(cell: Outcome, place: str) -> list[str]:
    """The places whose settings a refusal advises, which was met in a place."""
    return [to(place) for words, to in _NAMED if words in cell.text]


@cache
def _advised() -> frozenset[tuple[str, str]]:
    told = {
        (script, place)
        for script, row in recorded().items()
        for met, cell in row.items()
        if cell.kind == REFUSED
        for place in advised_places(cell, met)
    } | {(script, f"{met}-dispatch") for script in DRAWN for met in ("tp-2", "pp-2")}
    again = {
        (script, place)
        for script, row in recorded(ADVISED).items()
        for place, cell in row.items()
        if cell.kind == REFUSED and (script, place) in told
    }
    # Where a script is refused with the settings too, those that follow it show that the advice works there.
    return frozenset(
        told | {(name, place) for name, one in load().items() for script, place in again if script in one.follows}
    )


def _is_advised(script: str, place: str) -> bool:
    return (script, place) in _advised()


ADVISED = Matrix(load, ADVISED_PLACES, RECORD.with_name("advised.json"), wanted=_is_advised)
"""Scripts that are refused, in the places whose settings their refusals advise."""


@dataclass(frozen=True)
class Outcome:
    """How a script ended in a place.

    Args:
        kind: one of :data:`SAME`, :data:`REFUSED`, :data:`DIFFERENT`, :data:`RAW`.
        text: the refusal's or error's own words, or what differs and by how much.
        traceback: of a failure; not recorded.
        apart: the greatest difference of a number; infinite where it cannot be told.
    """

    kind: str
    text: str = ""
    traceback: str = field(default="", compare=False)
    apart: float = field(default=0.0, compare=False)


class RefusedByAll(Exception):  # noqa: N818 (no error: how a script ended)
    """Every rank knows that one of them was refused something, and none waits for another: the next script can run.

    Args:
        outcome: the refusal of this rank, or of the first that has one.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


def together(accelerator: Any, call: Callable[[], list[float]]) -> list[float]:
    """What a call gives, unless a rank was refused it; the others learn of that by files, and their ranks live on.

    Fresh ranks for each refusal take seconds, and a pipeline refuses most methods of a parameter on the ranks that do
    not have it.

    Raises:
        RefusedByAll: a rank was.
    """
    found: list[float] = []
    words = ""
    refusal: DrivetrainError | None = None
    try:
        found = call()
    except DrivetrainError as error:
        refusal, words = error, _told(error)
    if accelerator.num_processes == 1:
        if refusal is not None:
            raise refusal
        return found
    files = [Path(accelerator.project_dir, f"told-{rank}") for rank in range(accelerator.num_processes)]
    written = files[accelerator.process_index].with_suffix(".part")
    written.write_text(words, encoding="utf-8")
    written.rename(files[accelerator.process_index])
    begun = time.monotonic()
    while not all(file.exists() for file in files):
        if refusal is not None and time.monotonic() - begun > PATIENCE:
            raise refusal  # another rank waits for this one in a collective
        time.sleep(0.002)
    every = [words] * bool(words) + [file.read_text(encoding="utf-8") for file in files]
    if told := next(filter(None, every), ""):
        raise RefusedByAll(Outcome(REFUSED, told)) from refusal
    return found


PATIENCE = 5
"""Seconds that a refused rank waits for what the others say."""

SHORT_PATIENCE = 1
"""The same where ranks are rarely refused at unlike times, and fresh ones are all that it costs."""


def train_in_rank(
    load_scripts: Callable[[], dict[str, Script]], config: Mapping[str, Any] | None, names: list[str], folder: str
) -> None:
    """Be a rank: run these scripts in turn and write each result; ``None`` runs them in plain torch."""
    scripts = load_scripts()
    rank = os.environ["RANK"]
    # A script is run as users run theirs: a warning is printed.
    warnings.simplefilter("default")
    for number, name in enumerate(names):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(f"---- {name}", flush=True)
        # torch.compile turns it off for the whole process, and an earlier script may have compiled.
        torch.distributions.Distribution.set_default_validate_args(True)
        found: Result | Outcome
        try:
            found = _train(scripts[name], config, Path(folder, quote(name, safe="")))
        except RefusedByAll as refused:
            found = refused.outcome
        with Path(folder, f"{quote(name, safe='')}.{rank}").open("wb") as file:
            pickle.dump(found, file)
        gc.collect()
        if not number:
            gc.freeze()  # What the first one has imported, which each collection after it would walk.
    faulthandler.cancel_dump_traceback_later()


def _train(script: Script, config: Mapping[str, Any] | None, folder: Path) -> Result:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    if config is None:
        return script.train(Plain(str(folder))) if script.reference is None else script.reference()
    file = folder / f"config-{os.environ['RANK']}.yaml"
    loading = {"split_batches": True, **config.get("dataloader", {})}
    file.write_text(json.dumps({**config, "use_cpu": True, "dataloader": loading}), encoding="utf-8")
    accelerator = Accelerator(config=str(file), project_dir=str(folder), **script.settings)
    try:
        found = script.train(accelerator)
    except RefusedByAll:
        accelerator.end_training()
        raise
    except DrivetrainError as error:
        if not _refused_everywhere(accelerator):
            raise
        accelerator.end_training()
        raise RefusedByAll(Outcome(REFUSED, _told(error), traceback.format_exc())) from None
    accelerator.end_training()
    return found


def _refused_everywhere(accelerator: Any) -> bool:
    """Whether each rank says the same in time: none waits for another in a collective, and all can go on."""
    ranks = range(accelerator.num_processes)
    Path(accelerator.project_dir, f"refused-{accelerator.process_index}").touch()
    begun = time.monotonic()
    while not all(Path(accelerator.project_dir, f"refused-{rank}").exists() for rank in ranks):
        if time.monotonic() - begun > SHORT_PATIENCE:
            return False
        time.sleep(0.002)
    return True


def _results(names: Iterable[str], world_size: int, folder: str) -> dict[str, list[Any]]:
    """By rank, results of the scripts that every rank finished; or how each ended that no rank did."""
    found = {}
    for name in names:
        files = [Path(folder, f"{quote(name, safe='')}.{rank}") for rank in range(world_size)]
        if all(file.exists() for file in files):
            found[name] = [pickle.loads(file.read_bytes()) for file in files]
    return found


def references(names: list[str], matrix: Matrix = ORDINARY) -> dict[str, Result]:
    """What plain torch gives, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        # One that fails here is a mistake in the script; the log's last line names it.
        spawn(train_in_rank, 1, matrix.load, None, names, folder, timeout=SECONDS * len(names))
        return {name: results[0] for name, results in _results(names, 1, folder).items()}


def outcomes(
    place: Place, names: list[str], expected: Mapping[str, Result], matrix: Matrix = ORDINARY
) -> dict[str, Outcome]:
    """How each of these scripts ends there."""
    scripts = matrix.load()
    found: dict[str, Outcome] = {}
    remaining = list(names)
    while remaining:
        with tempfile.TemporaryDirectory() as folder:
            failure = None
            try:
                spawn(
                    train_in_rank, place.world_size, matrix.load, place.config, remaining, folder,
                    timeout=SECONDS * len(remaining),
                )  # fmt: skip
            except RankFailedError as error:
                failure = error
            results = _results(remaining, place.world_size, folder)
            for name, ranks in results.items():
                refused = next((each for each in ranks if isinstance(each, Outcome)), None)
                found[name] = refused or compared(ranks, expected[name], scripts[name].tolerance or TOLERANCE)
            if failure is not None:
                # Ranks that went on are at most one script ahead of the one that failed.
                name = next(name for name in remaining if name not in results)
                found[name] = failed(failure)
            remaining = [name for name in remaining if name not in found]
    return {name: found[name] for name in names}


def compared(results: list[Result], expected: Result, tolerance: float = TOLERANCE) -> Outcome:
    """Losses of every rank, and weights of every rank that holds them, against the reference."""
    losses, weights = expected
    for rank, (found_losses, found_weights) in enumerate(results):
        if len(found_losses) != len(losses):
            return Outcome(DIFFERENT, f"{len(found_losses)} losses instead of {len(losses)}")
        # The main process holds all; another one holds the same, a part, or nothing.
        missing = weights.keys() - found_weights.keys() if rank == 0 else set()
        extra = found_weights.keys() - weights.keys()
        if missing or extra:
            return Outcome(DIFFERENT, f"weights missing: {sorted(missing)}, not expected: {sorted(extra)}")
    apart = max(_distance(torch.tensor(found), torch.tensor(losses)) for found, _ in results)
    worst, where = apart, "losses"
    for rank, (_, found_weights) in enumerate(results):
        for name, weight in found_weights.items():
            if weight.shape != weights[name].shape:
                return Outcome(DIFFERENT, f"{name} has shape {tuple(weight.shape)}")
            apart = _distance(weight, weights[name])
            if apart > worst:
                worst, where = apart, f"{name} of rank {rank}"
    if worst <= tolerance:
        return Outcome(SAME, apart=worst)
    return Outcome(DIFFERENT, f"{worst:.1e} in {where}", apart=worst)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.numel() == 0:
        return 0.0
    wide = torch.complex128 if found.is_complex() else torch.float64
    apart = (found.to(wide) - expected.to(wide)).abs().max().item()
    return apart if apart == apart else float("inf")  # noqa: PLR0124 - not a number differs from everything


def failed(error: RankFailedError) -> Outcome:
    """Whether it was a refusal: an error of Drivetrain's own classes, which says what to write instead."""
    cause = error.cause
    if isinstance(cause, DrivetrainError):
        return Outcome(REFUSED, _told(cause), error.traceback)
    text = " ".join(error.what.partition(": ")[2].split())
    if text.startswith("died with exit code 1,"):
        text = f"hangs, ended after {SECONDS} s"  # what `dump_traceback_later` ends a rank with
    return Outcome(RAW, _general(text)[:300], error.traceback)


def _told(error: DrivetrainError) -> str:
    return f"{type(error).__name__}: {_general(' '.join(str(error).split()))}"


def _general(text: str) -> str:
    """Without what changes from run to run."""
    text = re.sub(r"/\S*/tmp\S*|/tmp/\S+", "FOLDER", text)
    text = re.sub(r"[\w./-]*/((?:tests|plugins|core)/[\w./-]+|site-packages/[\w./-]+)", r"\1", text)
    return re.sub(r"\b0x[0-9a-f]+", "0x...", text)


def recorded(matrix: Matrix = ORDINARY) -> dict[str, dict[str, Outcome]]:
    """The committed outcomes: script, place, outcome."""
    if not matrix.record.exists():
        return {}
    rows = json.loads(matrix.record.read_text(encoding="utf-8"))
    return {script: {place: _cell(cell) for place, cell in row.items()} for script, row in rows.items()}


def _cell(written: str | dict[str, str]) -> Outcome:
    return Outcome(written) if isinstance(written, str) else Outcome(*next(iter(written.items())))


def record(found: Mapping[str, Mapping[str, Outcome]], matrix: Matrix = ORDINARY) -> None:
    """Write these outcomes over the committed ones, and forget scripts that are gone."""
    scripts, before = matrix.load(), recorded(matrix)
    rows: dict[str, Any] = {}
    for name in scripts:
        told = {
            place: replace(cell, text=f"{cell.apart:.0e}") if matrix.distances and cell.kind == SAME else cell
            for place, cell in found.get(name, {}).items()
        }
        row = {**before.get(name, {}), **told}
        written = {
            place: cell.kind if not cell.text else {cell.kind: cell.text}
            for place in matrix.places
            if (cell := row.get(place)) is not None and runs(scripts[name], matrix.places[place], matrix)
        }
        if written:
            rows[name] = written
    matrix.record.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def runs(script: Script, place: Place, matrix: Matrix = ORDINARY) -> bool:
    """Whether the script has numbers to compare there, and is among those that run there."""
    return not (script.whole_batch and place.data_parallel) and matrix.wanted(script.name, place.name)
