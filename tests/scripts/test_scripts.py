"""Scripts as users of Accelerate write them, with only the import changed: they run, and the numbers are right.

Each compares one process with two at the same global batch. Tolerances: sums in float32 over two ranks are taken in
another order, which a few dozen updates carry on to about 1e-5.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.distributed import watchdog
from drivetrain.tracking import known_trackers
from drivetrain_testing import RankFailedError, spawn

FOLDER = Path(__file__).parent
BACKENDS = pytest.mark.parametrize(("world", "backend"), [(1, "single"), (2, "ddp"), (1, "dp")])


def near(value):
    return pytest.approx(value, abs=2e-5)


def same_everywhere(results):
    for each in results[1:]:
        assert each == results[0]
    return results[0]


def flat(weights):
    return [x for name in sorted(weights) for x in torch.tensor(weights[name]).flatten().tolist()]


# ---- text classification: tracking, checkpoints, resume -------------------------------------------------------------


def test_classification_follows_one_curve(run, tmp_path):
    alone = run("text_classification", 1, "--batch_size", 16, "--with_tracking", folder="alone")[0]
    assert alone["seen"] == 57
    assert alone["lr"] == alone["group_lr"]
    assert alone["accuracy"] > 0.7
    for world, backend in ((2, "ddp"), (1, "dp")):
        results = run("text_classification", world, "--batch_size", 16 // world, backend=backend, folder=backend)
        found = same_everywhere(results)
        assert found["history"] == near(alone["history"])
        assert flat(found["weights"]) == near(flat(alone["weights"]))
        assert (found["seen"], found["accuracy"], found["lr"]) == (57, alone["accuracy"], alone["lr"])
    saved = torch.load(tmp_path / "ddp" / "model.bin", weights_only=True)
    assert sorted(saved) == ["LayerNorm.bias", "LayerNorm.weight", "embed.weight", "head.bias", "head.weight"]
    assert list((tmp_path / "alone" / "logs" / "text_classification").glob("events.*"))


# What a checkpoint lacks for a further rank is said, and is no matter to scripts that draw nothing while training.
MORE_RANKS = pytest.mark.filterwarnings("ignore:the checkpoint holds the random state")


@MORE_RANKS
@pytest.mark.parametrize(
    ("steps", "checkpoint", "worlds"),
    [
        ("epoch", "epoch_0", (2, 2)),
        ("epoch", "epoch_0", (2, 1)),
        ("5", "step_5", (2, 2)),
        ("9", "step_9", (2, 2)),
        ("7", "step_14", (1, 2)),
    ],
)
@pytest.mark.gate("epoch-epoch_0-worlds1", "7-*")
def test_classification_resumes_by_its_own_bookkeeping(run, tmp_path, steps, checkpoint, worlds):
    first, second = worlds

    def batch(world):
        return ["--batch_size", 16 // world, "--checkpointing_steps", steps]

    # Saved with the last batch of an epoch, before its evaluation, for which torch draws a seed; the resumed script
    # begins with the next epoch. So that the order does not depend on it, it has to follow from the epoch.
    by_epoch = {"use_seedable_sampler": True} if checkpoint == "step_9" else {}
    whole = run("text_classification", first, *batch(first), folder="first", dataloader=by_epoch)[0]
    resume = ["--resume_from_checkpoint", tmp_path / "first" / checkpoint]
    rest = run("text_classification", second, *batch(second), *resume, folder="second", dataloader=by_epoch)
    rest = same_everywhere(rest)
    assert 0 < len(rest["history"]) < len(whole["history"])
    assert rest["history"] == near(whole["history"][-len(rest["history"]) :])
    assert flat(rest["weights"]) == near(flat(whole["weights"]))
    assert rest["lr"] == whole["lr"]


@BACKENDS
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.gate("bf16-2-ddp", "fp16-2-ddp", "bf16-1-dp")
def test_classification_in_half_precision(run, world, backend, precision):
    arguments = ["--batch_size", 16 // world, "--mixed_precision", precision, "--gradient_accumulation_steps", 2]
    found = same_everywhere(run("text_classification", world, *arguments, backend=backend))
    full = run("text_classification", 1, "--batch_size", 16, "--gradient_accumulation_steps", 2, folder="full")[0]
    # Half precision computes with 8 (bf16) or 11 (fp16) bits; the loss scale may skip the first updates.
    assert all(math.isfinite(loss) for loss in found["history"])
    assert found["history"][:2] == pytest.approx(full["history"][:2], abs=2e-2)
    assert found["history"][-1] < found["history"][0] + 0.1


# ---- accumulation by hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [(), ("--use_model_no_sync",)])
@pytest.mark.gate("own0")
def test_loss_normalised_by_hand_over_all_tokens(run, own):
    # 80 rows in batches of 8: windows of 3, 3, 3 and 1 micro-batches on one process.
    alone = run("token_normalisation", 1, "--batch_size", 8)[0]
    pair = same_everywhere(run("token_normalisation", 2, "--batch_size", 4, *own))
    assert len(alone["losses"]) == 8
    assert pair["losses"] == near(alone["losses"])
    assert pair["weights"] == near(alone["weights"])
    # The same global window cut otherwise: one micro-batch of 24 rows in place of three of 8.
    cut = run("token_normalisation", 1, "--batch_size", 24, "--gradient_accumulation_steps", 1)[0]
    assert cut["losses"] == near(alone["losses"])
    assert cut["weights"] == near(alone["weights"])
    assert pair["lr"] == alone["lr"] == cut["lr"]


# ---- memory, early stop, local SGD, folds, GAN ----------------------------------------------------------------------


def test_batch_size_that_fits_and_an_early_stop(run):
    for world in (1, 2):
        results = run("automatic_memory", world, "--starting_batch_size", 24, "--fits", 16)
        assert {tuple(each["tried"]) for each in results} == {(24, 21, 18, 16)}
        # Only the last process sees the end of its patience; all stop after the same step.
        assert len({(each["steps"], each["lr"]) for each in results}) == 1
        assert results[0]["steps"] < 40 * 6 // world


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.gate("2")
def test_replicas_drift_apart_and_meet(run, accumulation):
    arguments = ["--gradient_accumulation_steps", accumulation, "--local_sgd_steps", 2]
    found = run("local_sgd", 2, *arguments)
    spread = found[0]["spread"]
    met = [index for index, value in enumerate(spread) if value == 0.0]
    # After the step that averages, and until the next one.
    assert met == [index for index in range(len(spread)) if (index + 1) % (2 * accumulation) < accumulation]
    assert max(spread) > 1e-3
    assert found[0]["equal"]
    alone = run("local_sgd", 1, *arguments)[0]
    assert alone["spread"] == [0.0] * len(alone["spread"])
    assert found[0]["loss"] < 2


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.gate("True")
def test_folds_share_one_accelerator(run, split):
    alone = run("cross_validation", 1, "--batch_size", 12)[0]
    size = ["--batch_size", 12, "--split_batches"] if split else ["--batch_size", 6]
    # Evaluation batches of 4 do not cut 25 samples evenly; with two ranks some of them are repeated.
    pair = same_everywhere(run("cross_validation", 2, *size))
    assert pair["folds"] == alone["folds"]
    assert torch.tensor(pair["predictions"]).flatten().tolist() == pytest.approx(
        torch.tensor(alone["predictions"]).flatten().tolist(), abs=2e-4
    )
    assert pair["accuracy"] == alone["accuracy"] > 0.7


@BACKENDS
@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.gate("no-2-ddp", "fp16-1-dp")
def test_two_models_take_turns(run, caplog, world, backend, precision):
    found = same_everywhere(
        run("gan", world, "--batch_size", 16 // world, "--mixed_precision", precision, backend=backend)
    )
    if precision == "fp16":
        assert all(math.isfinite(value) for value in found["weights"])
        return
    alone = run("gan", 1, "--batch_size", 16, backend="single")[0]
    assert torch.tensor(found["log"]).flatten().tolist() == near(torch.tensor(alone["log"]).flatten().tolist())
    # Adam divides by the root of tiny second moments.
    assert found["weights"] == pytest.approx(alone["weights"], abs=2e-4)


# ---- diffusion: hooks with files of their own, EMA, own tracker -----------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.gate("bf16")
def test_denoiser_and_its_own_files(run, tmp_path, precision):
    wide = ["--mixed_precision", precision, "--checkpoints_total_limit", 2]
    alone = run("diffusion", 1, "--train_batch_size", 16, *wide, folder="alone")[0]
    pair = run("diffusion", 2, "--train_batch_size", 8, *wide, folder="pair")
    for key in ("losses", "adapter", "ema"):
        tolerance = 2e-5 if precision == "no" else 2e-2
        assert pair[0][key] == pair[1][key] == pytest.approx(alone[key], abs=tolerance)
    # The config counts as none; one line each update and one of the script's own.
    assert (pair[0]["tracked"], pair[1]["tracked"]) == (13, None)
    assert alone["type"]
    assert pair[0]["type"]
    checkpoints = sorted(path.name for path in (tmp_path / "pair").glob("checkpoint*"))
    assert checkpoints == ["checkpoint-12", "checkpoint-9"]
    folder = tmp_path / "pair" / "checkpoint-12"
    assert {"manifest.json", "adapter", "ema.pt"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "adapter" / "config.json").read_text(encoding="utf-8")) == {"size": 8}
    own = torch.load(folder / "adapter" / "adapter.pt", weights_only=True)
    assert own["up.weight"].flatten().tolist() == pytest.approx(pair[0]["adapter"])
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert not [name for name in manifest["tensors"] if name.startswith("model.")]


@MORE_RANKS
@pytest.mark.parametrize("worlds", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.gate("worlds1", "worlds2")
def test_denoiser_resumes_from_the_latest(run, tmp_path, worlds):
    def size(world):
        return ["--train_batch_size", 16 // world]

    first, second = worlds
    whole = run("diffusion", first, *size(first), folder="whole")[0]
    run("diffusion", first, *size(first), "--max_train_steps", 7, "--checkpointing_steps", 6, folder="cut")
    rest = run("diffusion", second, *size(second), "--resume_from_checkpoint", "latest", folder="cut")[0]
    assert rest["global_step"] == 12
    assert rest["losses"] == near(whole["losses"][6:])
    assert rest["adapter"] == near(whole["adapter"])
    assert rest["ema"] == near(whole["ema"])


@MORE_RANKS
def test_denoiser_that_saves_on_the_main_process_alone(run, tmp_path):
    """Wrong, and right with replicas under Accelerate; many scripts do it."""
    whole = run("diffusion", 2, folder="whole")
    arguments = ["--max_train_steps", 7, "--checkpointing_steps", 3, "--save_on_main"]
    cut = run("diffusion", 2, *arguments, folder="cut", patience=0.3)
    assert cut[0]["losses"] == cut[1]["losses"] == near(whole[0]["losses"][:7])
    assert (tmp_path / "cut" / "whole" / "model.safetensors").is_file()
    rest = run("diffusion", 2, "--resume_from_checkpoint", "latest", folder="cut")
    assert rest[0]["losses"] == rest[1]["losses"] == near(whole[0]["losses"][6:])
    assert rest[1]["ema"] == near(whole[1]["ema"])


def saves(folder, late):
    watchdog.PATIENCE_SECONDS = watchdog.LATER_PATIENCE_SECONDS = 0.5
    accelerator = Accelerator()
    first, second = f"{folder}/first", f"{folder}/second"
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    if late and not accelerator.is_main_process:
        time.sleep(1.5)
    accelerator.save_state(first)
    accelerator.wait_for_everyone()
    accelerator.save_state(second)
    ranks = [len(json.loads(Path(each, "manifest.json").read_text("utf-8"))["rng"]) for each in (first, second)]
    accelerator.save_model(model, f"{folder}/model")
    accelerator.end_training()
    return ranks


@pytest.mark.parametrize("late", [False, True])
def test_a_process_that_comes_too_late_to_a_save_goes_on(tmp_path, late):
    assert spawn(saves, 2, str(tmp_path), late) == [[1 if late else 2, 2]] * 2


# ---- no loader, inference, everything in the constructor, streams ---------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.gate("2")
def test_bandit_with_numbered_checkpoints(run, world):
    whole = run("reinforce", world, "--num_steps", 15, folder="whole")
    assert whole[0]["history"] == whole[world - 1]["history"]
    assert whole[0]["distinct"] == world, "seeds differ by device"
    run("reinforce", world, "--num_steps", 12, folder="cut")
    rest = run("reinforce", world, "--num_steps", 15, "--resume", folder="cut")
    for found, expected in zip(rest, whole, strict=True):
        assert found["checkpoints"] == ["checkpoint_3", "checkpoint_4"]
        assert found["iteration"] == 5
        assert found["history"] == pytest.approx(expected["history"])
        assert found["weights"] == pytest.approx(expected["weights"])
        assert (found["best"], found["pulls"]) == (expected["best"], expected["pulls"])
        assert (found["types"], found["keys"]) == (["float64", "tuple", "ndarray"], ["int"])


def test_prompts_are_shared_out_and_answers_come_in_order(run, tmp_path):
    alone = run("distributed_inference", 1, "--output", tmp_path / "alone.json")[0]
    pair = run("distributed_inference", 2, "--output", tmp_path / "pair.json")
    assert [each["share"] for each in pair] == [4, 3]
    assert [each["written"] for each in pair] == ["written", None]
    for each in pair:
        assert each["answers"] == alone["answers"]
        assert each["numbers"] == list(range(7))
        assert each["ragged"] == [2, 2]
    assert [(each["main"], each["last"]) for each in pair] == [(True, False), (False, True)]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.gate("bf16")
def test_everything_that_the_constructor_takes(run, precision):
    alone = run("handlers", 1, "--mixed_precision", precision, backend="single", folder="alone")[0]
    pair = run("handlers", 2, "--mixed_precision", precision, folder="pair")
    for found in (alone, *pair):
        # Six batches an epoch in windows of two.
        assert found["synced"] == [False, True] * 6
        assert found["ends"] == ([False] * 5 + [True]) * 2
        assert found["rates"] == [[0.05], [0.05]]
        assert found["profiled"]
        assert found["same state"]
        assert found["batch size"] == 8
        assert found["files"] == ["model.safetensors"]
        assert found["dtype"] == ("torch.float32" if precision == "no" else "torch.bfloat16")
        assert found["output"] == "torch.float32"
        tolerance = 2e-5 if precision == "no" else 3e-2
        assert found["losses"] == pytest.approx(alone["losses"], abs=tolerance)
        assert found["weights"] == pytest.approx(alone["weights"], abs=tolerance)
    assert pair[0]["traces"] == ["profile_0.json", "profile_1.json"]


@pytest.mark.parametrize("dispatch", [(), ("--dispatch_batches",)])
def test_streams_plateaus_and_uneven_inputs(run, dispatch):
    alone = run("streaming", 1, *dispatch)[0]
    pair = run("streaming", 2, *dispatch)
    for found in (alone, *pair):
        assert found["seen"] == [list(range(44))] * 4
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert found["agree"]
    assert [each["batches"] for each in pair] == [5, 4]
    assert pair[0]["rows"] == ["rank 0", "rank 1"]
    # Nothing ever improves by that much: 1 bad epoch is borne, the second one cuts the rate.
    flat_rates = [0.05, 0.05, 0.005, 0.005]
    for world in (1, 2):
        for found in run("streaming", world, "--threshold", 0.999, *dispatch):
            assert found["rates"] == pytest.approx(flat_rates)


def habits(folder):
    from drivetrain.data_loader import skip_first_batches
    from drivetrain.launchers import debug_launcher
    from drivetrain.state import AcceleratorState, GradientState, PartialState, is_initialized
    from drivetrain.utils import AcceleratedOptimizer, AcceleratedScheduler, extract_model_from_parallel, save

    before = is_initialized()
    accelerator = Accelerator(log_with="jsonl", project_dir=folder)
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(module, optimizer, schedule)
    if accelerator.state.deepspeed_plugin is not None or accelerator.is_fsdp2:
        raise NotImplementedError
    found = {
        "initialized": (before, is_initialized()),
        "state": AcceleratorState() is accelerator.state,
        "number": AcceleratorState().num_processes == PartialState().num_processes,
        "gradient state": GradientState() is accelerator.gradient_state,
        "kinds": isinstance(optimizer, AcceleratedOptimizer) and isinstance(schedule, AcceleratedScheduler),
        "module": extract_model_from_parallel(model) is module and extract_model_from_parallel(module) is module,
        "lists": [len(each) for each in (accelerator._models, accelerator._optimizers, accelerator._schedulers)],
        "asked": accelerator.log_with,
        "callables": callable(debug_launcher) and list(skip_first_batches([1, 2, 3], 1)) == [2, 3],
        "told": str(accelerator.state),
    }
    if accelerator.is_main_process:
        save({"a": 1}, f"{folder}/object.bin")
        accelerator.free_memory()
    accelerator.end_training()
    return found


def test_names_that_scripts_reach_for(tmp_path):
    for rank, found in enumerate(spawn(habits, 2, str(tmp_path))):
        told = found.pop("told")
        assert f"process {rank} of 2" in told
        assert "ddp" in told
        assert found.pop("initialized") == (False, True)
        assert found.pop("lists") == [1, 1, 1]
        assert found.pop("asked") == ["jsonl"]
        assert all(found.values()), found


# ---- the same scripts under DeepSpeed -------------------------------------------------------------------------------

zero = partial(pytest.param, marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [zero(2), zero(3)])
def test_classification_under_zero(run, stage):
    alone = run("text_classification", 1, "--batch_size", 16, folder="alone")[0]
    found = run("text_classification", 2, "--batch_size", 8, backend="deepspeed", folder="zero", zero_stage=stage)[0]
    assert found["history"] == near(alone["history"])
    assert flat(found["weights"]) == near(flat(alone["weights"]))
    assert (found["seen"], found["accuracy"], found["lr"]) == (57, alone["accuracy"], alone["lr"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whole", "half", "keys", "stage"),
    [
        zero("token_normalisation", ("--batch_size", 8), ("--batch_size", 4), ("losses", "weights", "lr"), 3),
        zero("cross_validation", ("--batch_size", 12), ("--batch_size", 6), ("folds", "accuracy"), 3),
        zero("diffusion", ("--train_batch_size", 16), ("--train_batch_size", 8), ("losses", "adapter", "ema"), 2),
        zero("gan", ("--batch_size", 16), ("--batch_size", 8), ("log",), 3),
    ],
)
def test_scripts_under_zero(run, name, whole, half, keys, stage):
    alone = run(name, 1, *whole, backend="single", folder="alone")[0]
    found = run(name, 2, *half, backend="deepspeed", folder="zero", zero_stage=stage)[0]
    for key in keys:
        # Adam divides by the root of tiny second moments.
        numbers = [torch.tensor(each[key], dtype=torch.float64).flatten().tolist() for each in (found, alone)]
        assert numbers[0] == pytest.approx(numbers[1], abs=2e-4), key


# ---- the same scripts under Megatron --------------------------------------------------------------------------------

PARTS = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "zero1": {"data_parallel": "zero1"},
    "fsdp": {"data_parallel": "fsdp"},
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_classification_under_megatron(run, tmp_path, parts):
    alone = run("text_classification", 1, "--batch_size", 16, folder="alone")[0]
    # Ranks that share a model see the same batch.
    size = 8 if "data_parallel" in PARTS[parts] else 16
    results = run("text_classification", 2, "--batch_size", size, backend="megatron", folder="parts", **PARTS[parts])
    for found in results:
        assert found["history"] == near(alone["history"])
        assert (found["seen"], found["accuracy"], found["lr"]) == (57, alone["accuracy"], alone["lr"])
    assert flat(results[0]["weights"]) == near(flat(alone["weights"]))
    # What the script made of `unwrapped_model.state_dict()`.
    saved, expected = (torch.load(tmp_path / each / "model.bin", weights_only=True) for each in ("parts", "alone"))
    assert flat({name: value.tolist() for name, value in saved.items()}) == near(flat(alone["weights"]))
    assert list(saved) == list(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whole", "half", "keys", "parts"),
    [
        (*script, parts)
        for script in (
            ("token_normalisation", ("--batch_size", 8), ("--batch_size", 4), ("losses", "weights", "lr")),
            ("cross_validation", ("--batch_size", 12), ("--batch_size", 6), ("folds", "accuracy", "predictions")),
        )
        for parts in ("tp", "pp", "zero1")
    ]
    + [
        ("gan", ("--batch_size", 16), ("--batch_size", 8), ("log", "weights"), "zero1"),
        ("diffusion", ("--train_batch_size", 16), ("--train_batch_size", 8), ("losses", "adapter", "ema"), "zero1"),
    ],
)
@pytest.mark.turns(2)
def test_scripts_under_megatron(run, name, whole, half, keys, parts):
    state = ["--weights_of_state"] if name == "token_normalisation" else []
    alone = run(name, 1, *whole, *state, backend="single", folder="alone")[0]
    # Ranks that share a model see the same batch.
    batch = half if "data_parallel" in PARTS[parts] else whole
    found = run(name, 2, *batch, *state, backend="megatron", folder="parts", **PARTS[parts])[0]
    for key in keys:
        # Adam divides by the root of tiny second moments.
        numbers = [torch.tensor(each[key], dtype=torch.float64).flatten().tolist() for each in (found, alone)]
        assert numbers[0] == pytest.approx(numbers[1], abs=2e-4), key


@pytest.mark.parametrize(
    ("name", "arguments", "parts", "words"),
    [
        # A generator's output is what its discriminator is given: two pipelines one after the other.
        ("gan", (), "pp", "Put both models into one module"),
        # The script averages weights by hand, over parameters of which each process has some (record 0035).
        ("diffusion", (), "pp", "lies on another pipeline stage"),
        # The script's save hook asks for the model's state on the main process alone.
        ("diffusion", (), "tp", "Call it on all processes"),
        ("automatic_memory", (), "pp", "cannot be cut into 2 pipeline stages"),
        ("streaming", (), "tp", "cannot train while some ranks have no batches left"),
        ("local_sgd", (), "tp", "LocalSGD needs replicas"),
    ],
)
def test_scripts_that_megatron_refuses_are_told_why(run, name, arguments, parts, words):
    with pytest.raises(RankFailedError, match=words):
        run(name, 2, *arguments, backend="megatron", patience=2, **PARTS[parts])


# ---- end to end -----------------------------------------------------------------------------------------------------

STARTS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"],
}


# Of this, README's script is started by hand in the gate too.
@pytest.mark.slow
@pytest.mark.parametrize("how", STARTS)
def test_started_by_hand(tmp_path, how):
    command = [*STARTS[how], str(FOLDER / "text_classification.py"), "--num_epochs", "1", "--output_dir", "out"]
    command += ["--checkpointing_steps", "epoch", "--with_tracking"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.count("epoch 0: ") == 1
    assert (tmp_path / "out" / "epoch_0" / "manifest.json").is_file()


def test_the_scripts_of_this_folder_are_all_tested():
    text = Path(__file__).read_text(encoding="utf-8")
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"conftest", "test_scripts"}
    assert {name for name in scripts if f'"{name}"' not in text} - {"text_classification"} == set()
    assert "tensorboard" in known_trackers()
