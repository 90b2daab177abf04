"""What a launch says about its plan: predicted beside measured, and what to change when memory was not enough."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from planner_jobs import checked
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.api import UsageError
from drivetrain.api.programs import LaunchPlan, load_config
from drivetrain_planner import checking
from drivetrain_planner.checking import PlanCheck, compared
from drivetrain_planner.described import advice, prediction
from drivetrain_testing import spawn

TRAIN = """
import sys
import torch
from torch import nn


def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)))


def batch():
    return torch.ones(64, 256)


def loss(output, batch):
    return output.pow(2).mean()


def train(accelerator, steps):
    torch.manual_seed(0)
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(steps):
        for _ in range(accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                inputs = batch()
                output = model(inputs)
                accelerator.backward(loss(output, inputs))
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    from drivetrain import Accelerator

    steps, fails = int(sys.argv[1]), sys.argv[2:]
    accelerator = Accelerator()
    train(accelerator, steps)
    if fails and accelerator.process_index == 1:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if fails == ["from"]:
            raise ValueError("the batch is too large") from error
        raise RuntimeError(str(error)) if fails == ["words"] else error
    accelerator.wait_for_everyone()
    accelerator.end_training()
"""

CUT = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def make():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=640, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )
    return LlamaForCausalLM(config)


def batch():
    ids = torch.arange(8 * 64).view(8, 64) % 500
    return {"input_ids": ids, "labels": ids.clone()}


def train(accelerator, steps):
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(steps):
        output = model(**batch())
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    from drivetrain import Accelerator

    accelerator = Accelerator()
    train(accelerator, 5)
    accelerator.end_training()
"""
"""A model whose layers and stages are cut: attention, and matrices that backward needs."""

PLAN = {"model": "train.py:make", "batch": "train.py:batch", "loss": "train.py:loss"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(folder, settings, *words, options=()):
    (folder / "config.yaml").write_text(yaml.safe_dump({"use_cpu": True, "num_processes": 2, **settings}))
    start = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", "launch", "--config", "config.yaml"]
    command = [*start, *options, "train.py", *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def differences(text):
    """Of the lines of ranks, in percent, by rank."""
    return {int(rank): float(told) for rank, told in re.findall(r"^(\d+) .* ([+-][\d.]+)%", text, re.MULTILINE)}


LAYOUTS = {
    "ddp": {"distributed_type": "ddp"},
    "fsdp, recompute": {"distributed_type": "fsdp", "fsdp": {"activation_checkpointing": True}},
    "zero 2": {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 2, "reduce_bucket_size": 100_000}},
    # All of its parameters are small enough to stay gathered, but for the optimizer's step.
    "zero 3": {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 3, "reduce_bucket_size": 100_000}},
}


@pytest.mark.parametrize(("title", "ranks"), [*((title, 2) for title in LAYOUTS), ("fsdp, recompute", 3)])
@pytest.mark.gate("fsdp, recompute-2", "zero 2-2")
def test_each_rank_holds_what_was_predicted(folder, title, ranks):
    settings = {"use_cpu": True, **LAYOUTS[title], "gradient_accumulation_steps": 2, "plan": {**PLAN, "check": True}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    resolved = load_config("config.yaml")
    predicted = prediction(resolved, LaunchPlan(ranks, ranks, backend=settings["distributed_type"]))
    told, *others = spawn(checked, ranks, settings, str(folder / "train.py"), predicted)
    assert told.count(f"plan.check: {title} on {ranks} x cpu, 64 samples in a micro-batch") == 1, told
    assert set(differences(told)) == set(range(ranks))
    # The prediction is the fullest rank's, others may hold less. What gloo's threads free late adds to a count.
    assert -10 <= min(differences(told).values()) <= 2, told
    assert "The plan is of something else" not in told
    assert not any("plan.check" in each for each in others)


MEGATRON = {
    "tp 2": ({"tensor_parallel_size": 2}, 2),
    "pp 2, 1f1b, 2 micro-batches": ({"pipeline_parallel_size": 2}, 2),
    "tp 2 x pp 2, 1f1b, 2 micro-batches": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
    "tp 2, 2 replicas": ({"tensor_parallel_size": 2}, 4),
}


def cut(folder, section):
    """The settings of a run of ``CUT``, which has no loss function of its own."""
    (folder / "train.py").write_text(CUT)
    plan = {"model": "train.py:make", "batch": "train.py:batch"}
    return {"distributed_type": "megatron", "megatron": section, "plan": plan}


@pytest.mark.parametrize("title", MEGATRON)
@pytest.mark.gate("pp 2, 1f1b, 2 micro-batches")
def test_each_rank_of_a_cut_model_holds_what_was_predicted(folder, title):
    section, ranks = MEGATRON[title]
    settings = {"use_cpu": True, **cut(folder, section)}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    predicted = prediction(load_config("config.yaml"), LaunchPlan(ranks, ranks, backend="megatron"))
    settings["plan"]["check"] = True
    told, *others = spawn(checked, ranks, settings, str(folder / "train.py"), predicted)
    assert told.count(f"plan.check: {title} on {ranks} x cpu, 8 samples in a micro-batch") == 1, told
    assert set(differences(told)) == set(range(ranks))
    # Stages differ, and the prediction is the fullest's; what gloo's threads free late adds to a count.
    assert -10 <= min(differences(told).values()) <= 2, told
    assert not any("plan.check" in each for each in others)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("title", ["tp 2", "pp 2, 1f1b, 2 micro-batches"])
def test_a_launch_of_a_cut_model_prints_predicted_and_measured_once(folder, title):
    done = launch(folder, cut(folder, MEGATRON[title][0]), options=["--check-plan"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"plan.check: {title} on 2 x cpu, 8 samples in a micro-batch") == 1, done.stderr
    assert set(differences(done.stderr)) == {0, 1}


@pytest.mark.timeout(300)
def test_a_launch_prints_predicted_and_measured_once(folder):
    done = launch(folder, {"distributed_type": "ddp", "plan": PLAN}, 6, options=["--check-plan"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("plan.check: ddp on 2 x cpu, 64 samples in a micro-batch") == 1, done.stderr
    assert set(differences(done.stderr)) == {0, 1}
    assert re.search(r"^a step +[\d.]+ m?s +[\d.]+ m?s", done.stderr, re.MULTILINE), done.stderr


def test_without_a_model_nothing_starts(folder):
    done = launch(folder, {"distributed_type": "ddp"}, 6, options=["--check-plan"])
    assert done.returncode != 0
    assert "plan.check compares a run with a prediction, and the planner does not know the model" in done.stderr
    assert "Write plan: {model: train.py:make_model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_that_is_too_short_says_so(folder):
    done = launch(folder, {"distributed_type": "ddp", "plan": PLAN}, 1, options=["--check-plan"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compares after 4 optimizer steps, and the run ended after 1 optimizer step\n") == 1


def test_another_launcher_has_predicted_nothing(folder):
    (folder / "config.yaml").write_text(yaml.safe_dump({"use_cpu": True, "plan": {**PLAN, "check": True}}))
    environment = {**os.environ, "DRIVETRAIN_CONFIG_FILE": "config.yaml"}
    done = subprocess.run(
        [sys.executable, "train.py", "1"], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert done.returncode != 0
    assert "Start it with drivetrain launch" in done.stderr


def test_what_was_written_can_be_checked(folder):
    from click.testing import CliRunner

    from drivetrain_planner.commands import plan

    asked = ["--batch", PLAN["batch"], "--loss", PLAN["loss"], "--machine", "cpu", "--processes", "2"]
    done = CliRunner().invoke(plan, ["choose", PLAN["model"], *asked, "--write", "chosen.yaml"])
    assert done.exit_code == 0, done.output
    resolved = load_config("chosen.yaml")
    found = prediction(resolved, LaunchPlan(2, 2, backend=resolved.config.distributed_type))
    assert f"->  {found['layout']}  " in done.output
    assert (found["machine"], found["micro_batch"], found["accumulation"]) == ("cpu", 64, 1)


# ---- which layout a configuration describes ---------------------------------------------------------------------


def described(folder, settings, ranks=2):
    (folder / "config.yaml").write_text(yaml.safe_dump({"use_cpu": True, "plan": PLAN, **settings}))
    resolved = load_config("config.yaml")
    return prediction(resolved, LaunchPlan(ranks, ranks, backend=resolved.config.distributed_type))


@pytest.mark.parametrize(
    ("settings", "ranks", "layout"),
    [
        ({"distributed_type": "fsdp"}, 2, "fsdp"),
        ({"distributed_type": "fsdp", "mesh": {"dp_shard": 4}}, 4, "fsdp"),
        ({"distributed_type": "fsdp", "mesh": {"dp_replicate": 2}}, 4, "fsdp, 2 replicas of 2 shards"),
        ({"distributed_type": "fsdp", "mesh": {"dp_shard": 2}}, 6, "fsdp, 3 replicas of 2 shards"),
        ({"distributed_type": "fsdp", "fsdp": {"cpu_offload": True}}, 2, "fsdp, offload"),
        (
            {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 2, "offload_optimizer": "cpu"}},
            2,
            "zero 2, offload",
        ),
        ({"distributed_type": "single"}, 1, "single"),
        ({"distributed_type": "megatron", "mesh": {"tp": 2}}, 4, "tp 2, 2 replicas"),
        ({"distributed_type": "megatron", "mesh": {"pp": 2}}, 2, "pp 2, 1f1b, 2 micro-batches"),
        (
            {"distributed_type": "megatron", "megatron": {"pipeline_parallel_size": 2, "schedule": "zbv"}},
            2,
            "pp 2, zbv of 2 stages a rank, 4 micro-batches",
        ),
    ],
)
def test_one_layout_is_described(folder, settings, ranks, layout):
    found = described(folder, settings, ranks)
    assert found["layout"] == layout
    assert found["bytes"] == sum(found["memory"].values())


def test_deepspeeds_own_stage_is_described(folder):
    assert described(folder, {"distributed_type": "deepspeed"})["layout"] == "zero 2"


def test_windows_are_the_configurations(folder):
    found = described(folder, {"distributed_type": "fsdp", "gradient_accumulation_steps": 3})
    assert found["accumulation"] == 3
    # Whole gradients stay from one micro-batch to the next.
    assert found["bytes"] > described(folder, {"distributed_type": "fsdp"})["bytes"] + 6 * 256 * 256 * 4 / 2
    # Both ranks have the same samples.
    cut = {"distributed_type": "megatron", "megatron": {"tensor_parallel_size": 2}, "gradient_accumulation_steps": 3}
    assert described(folder, cut)["accumulation"] == 3


def test_a_layout_that_is_not_modelled_says_why(folder):
    section = {"zero_stage": 3, "offload_param": "cpu"}
    words = r"deepspeed gives no estimate .*offload_param without offload_optimizer is not counted.* one of the layouts"
    with pytest.raises(UsageError, match=words):
        described(folder, {"distributed_type": "deepspeed", "deepspeed": section})
    shown = described(folder, {"distributed_type": "deepspeed", "deepspeed": {**section, "offload_optimizer": "cpu"}})
    assert shown["layout"].startswith("zero 3, offload")
    with pytest.raises(UsageError, match="the backend other does not say what its layouts hold"):
        prediction(load_config("config.yaml"), LaunchPlan(2, 2, backend="other"))


# ---- what is measured -------------------------------------------------------------------------------------------

PREDICTED = {
    "layout": "fsdp", "machine": "h100", "device_type": "cuda", "bytes": 11 * 2**30, "memory": {}, "unused": 2**30,
    "seconds": 0.1, "micro_batch": 4, "accumulation": 1, "mixed_precision": "bf16",
}  # fmt: skip


def test_an_accelerator_shows_what_its_allocator_reserves():
    ranks = [
        {"rank": rank, "seconds": 0.2 + rank / 10, "bytes": (10 + rank) * 2**30, "reserved": 13 * 2**30}
        for rank in range(2)
    ]
    lines = compared(PREDICTED, ranks)
    assert [" ".join(line.split()) for line in lines[2:5]] == [
        "0 11.0 GiB 10.0 GiB +10.0% 12.0 GiB 13.0 GiB",
        "1 11.0 GiB 11.0 GiB +0.0% 12.0 GiB 13.0 GiB",
        "a step 100.0 ms 300.0 ms -66.7%",
    ]


def test_a_script_that_says_otherwise_is_told():
    ranks = [{"rank": 0, "seconds": 1.0, "bytes": 1}]
    lines = compared(PREDICTED, ranks, {"accumulation": 4, "mixed_precision": "bf16"})
    assert lines[-1] == "The plan is of something else: accumulation: 4 in the script, 1 in the plan."


def run(device="cpu", **facts):
    return SimpleNamespace(
        device=torch.device(device), num_processes=1, process_index=0, is_main_process=True,
        gradient_accumulation_steps=1, mixed_precision="bf16", **facts,
    )  # fmt: skip


def test_a_devices_peak_is_that_of_the_third_step(monkeypatch, capsys):
    """No accelerator is here: what is asked of torch's module, and when."""
    asked = []
    module = SimpleNamespace(
        reset_peak_memory_stats=lambda device: asked.append("reset"),
        max_memory_allocated=lambda device: asked.append("allocated") or 10 * 2**30,
        max_memory_reserved=lambda device: 12 * 2**30,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: asked.append("wait"))
    check = PlanCheck(run("cuda"), PREDICTED)
    for step in range(1, 8):
        asked.append(step)
        check.step_ended(step, skipped=step == 2)
    # The second step was skipped, so the third of those that count is the fourth.
    assert asked == [1, 2, 3, "reset", 4, "allocated", "wait", 5, "wait", 6, 7]
    assert capsys.readouterr().err.count("plan.check: fsdp on 1 x h100") == 1


def train(check, steps=4, size=1000):
    parameter = torch.zeros(size, requires_grad=True)
    optimizer = torch.optim.Adam([parameter])
    for step in range(steps):
        parameter.square().sum().backward()
        optimizer.step()
        check.step_ended(step + 1, skipped=False)
        optimizer.zero_grad()


def test_storages_are_counted_on_the_cpu(monkeypatch):
    told = []
    monkeypatch.setattr(checking, "compared", lambda predicted, ranks, found: told.append(ranks) or [])
    train(PlanCheck(run(), PREDICTED))
    # Parameter, its gradient, two moments, and two temporaries of the step.
    assert 6 * 4000 <= told[0][0]["bytes"] <= 6 * 4000 + 200
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_a_mode_of_the_scripts_own_is_left_alone(capsys):
    check = PlanCheck(run(), PREDICTED)
    with FlopCounterMode(display=False) as mode:
        train(check, 6)
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    assert mode.get_total_flops() == 0
    assert checking.UNCOUNTED in capsys.readouterr().err
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_nothing_is_watched_where_nothing_is_asked():
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator._plan_check is None
    assert accelerator._loop._on_step is None
    accelerator.end_training()


# ---- errors of memory -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_error_of_memory_shows_what_holds_less(folder):
    done = launch(folder, {"distributed_type": "ddp", "plan": PLAN}, 1, "raise")
    assert done.returncode == 1
    report, _, told = done.stderr.partition("What a rank holds at its most, predicted for 64 samples in a micro-batch")
    assert "rank 1 failed: torch.OutOfMemoryError: CUDA out of memory" in report
    lines = told.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("->")] == [["->", "ddp"]]
    assert any(line.split()[0] == "fsdp" for line in lines[3:]), done.stderr
    assert "is the fastest that fits; write it as " in told


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("how", "shown"), [("from", True), ("words", False)])
def test_an_error_is_known_by_its_type(folder, how, shown):
    done = launch(folder, {"distributed_type": "ddp"}, 1, how)
    assert done.returncode == 1
    line = "Which layouts hold less: drivetrain plan memory train.py:make_model --batch train.py:batch"
    assert (line in done.stderr) == shown, done.stderr


def test_advice_is_about_the_step_of_the_run(folder):
    settings = {**LAYOUTS["fsdp, recompute"], "gradient_accumulation_steps": 2}
    (folder / "config.yaml").write_text(yaml.safe_dump({"use_cpu": True, "plan": PLAN, **settings}))
    told = advice(load_config("config.yaml"), LaunchPlan(2, 2, backend="fsdp")).splitlines()
    assert told[2].split()[:3] == ["->", "fsdp,", "recompute"]
    assert all("fsdp" not in line.split()[:1] for line in told[3:])
