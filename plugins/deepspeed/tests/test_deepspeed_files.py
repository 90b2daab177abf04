"""DeepSpeed's files, of the shapes that public examples have, on real engines: imported, followed, and contradicted."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError
from drivetrain.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from drivetrain_testing import spawn

WORLD, BATCH, STEPS, RATE = 2, 4, 4, 0.02
AUTO = "auto"

PRECISIONS = {
    "fp16": {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": AUTO},
}
BATCHES = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": AUTO,
        "warmup_max_lr": AUTO,
        "warmup_num_steps": AUTO,
        "total_num_steps": AUTO,
        "warmup_type": "linear",
    },
}

ZERO_2 = {
    **PRECISIONS,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": AUTO,
        "contiguous_gradients": True,
    },
    **BATCHES,
}
ZERO_3 = {
    **PRECISIONS,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **BATCHES,
}
CLASSIC = {
    "train_batch_size": WORLD * BATCH,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": RATE, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": RATE, "warmup_num_steps": 3, "warmup_type": "linear"},
    },
    "gradient_clipping": 0.1,
    "prescale_gradients": False,
    "fp16": {"enabled": False},
    "wall_clock_breakdown": False,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 50000000},
}


def model() -> nn.Module:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    made.config = type("Config", (), {"hidden_size": 10})()
    return made


def data(rows: int) -> DataLoader:
    torch.manual_seed(4)
    samples = list(
        zip(torch.randn(BATCH * WORLD * STEPS * 2, 6), torch.randn(BATCH * WORLD * STEPS * 2, 3), strict=True)
    )
    return DataLoader(samples, batch_size=rows)


def alone(
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    clip: float | None = None,
    rate: Callable[[int], float] | None = None,
    window: int = 1,
) -> list[float]:
    """Losses of one plain process on the batches of all ranks, with its learning rate by step."""
    network = model()
    optimizer = make(network.parameters())
    losses: list[float] = []
    for index, (x, y) in zip(range(STEPS * window), data(BATCH * WORLD), strict=False):
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate(index)
        loss = F.mse_loss(network(x), y)
        (loss / window).backward()
        losses.append(loss.item())
        if (index + 1) % window == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(network.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train(
    section: Any,
    *,
    dummies: dict[str, Any] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    clip: float | None = None,
    rows: int = BATCH,
    window: int = 1,
    resume: str | None = None,
    settings: str = "",
    **arguments: Any,
) -> tuple[list[float], list[float], str, Accelerator]:
    """Losses over all ranks and learning rates by step, under a section or what ``DeepSpeedPlugin`` made."""
    if isinstance(section, dict):
        folder = Path(f"rank{os.environ['RANK']}")
        folder.mkdir(exist_ok=True)
        (folder / "train.yaml").write_text(f"distributed_type: deepspeed\n{settings}deepspeed: {json.dumps(section)}\n")
        arguments["config"] = load_config(folder / "train.yaml", environ={})
    else:
        arguments["deepspeed_plugin"] = section
    accelerator = Accelerator(cpu=True, **arguments)
    network = model()
    if dummies is None:
        stepper: Any = (optimizer or adam_w)(network.parameters())
        network, stepper, loader = accelerator.prepare(network, stepper, data(rows))
        scheduler = None
    else:
        stepper = DummyOptim(network.parameters(), **dummies.get("optimizer", {}))
        dummy = DummyScheduler(stepper, **dummies.get("scheduler", {}))
        network, stepper, loader, scheduler = accelerator.prepare(network, stepper, data(rows), dummy)
    losses, rates = [], []
    for step, (x, y) in zip(range(STEPS * window), loader, strict=False):
        if resume is not None and step == 2:
            if resume == "save":
                accelerator.save_state("state")
            else:
                accelerator.load_state("state")
        with accelerator.accumulate(network):
            rates.append(stepper.param_groups[0]["lr"])
            loss = F.mse_loss(network(x), y)
            accelerator.backward(loss)
            if clip is not None:
                accelerator.clip_grad_norm_(network.parameters(), clip)
            stepper.step()
            if scheduler is not None:
                scheduler.step()
            stepper.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, rates, type(stepper.optimizer).__name__, accelerator


def adam_w(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def run(*args: Any, **kwargs: Any) -> tuple[list[float], list[float], str]:
    losses, rates, kind, accelerator = train(*args, **kwargs)
    accelerator.end_training()
    return losses, rates, kind


@pytest.fixture
def ds(tmp_path, monkeypatch):
    """Writes DeepSpeed's file and makes its folder the current one; returns a section that names it."""
    monkeypatch.chdir(tmp_path)

    def write(values: dict) -> dict:
        Path("ds.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
        return {"config_file": "ds.json"}

    return write


def job(*args: Any, **kwargs: Any) -> tuple[list[float], list[float], str]:
    return spawn(run, WORLD, *args, **kwargs)[0]


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        spawn(run, WORLD, *args, **kwargs)
    assert "drivetrain.errors." in str(caught.value)
    # Each rank has its own file, and whichever is refused first is told of.
    return str(caught.value).strip().splitlines()[-1].replace("rank1/", "rank0/")


# Sums over ranks are taken in another order than in one batch: some units in the last place of float32.
close = pytest.approx


def same(found: list[float], expected: list[float]) -> None:
    assert found == close(expected, rel=3e-6, abs=3e-7)


# ---- files of public shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [ZERO_2, ZERO_3], ids=["zero2", "zero3"])
@pytest.mark.parametrize("optimizer", [None, OPTIMIZER], ids=["script", "named"])
@pytest.mark.gate("script-zero3", "named-zero2")
def test_files_of_transformers_documents_train_an_unchanged_script(ds, values, optimizer):
    section = ds(values if optimizer is None else {**values, "optimizer": optimizer})
    losses, _, kind = job(section, clip=0.5)
    same(losses, alone(adam_w, clip=0.5))
    assert kind == "AdamW"


def warmup_decay(step: int) -> float:
    """DeepSpeed's WarmupDecayLR, linear, of 2 and 10 updates: 0 for the first update, then counted from 0."""
    at = step - 1
    if at < 0:
        return 0.0
    return RATE * (at / 2 if at < 2 else (10 - at) / (10 - 2))


def test_optimizer_and_schedule_of_the_file_stand_in_for_placeholders(ds):
    section = ds({**ZERO_2, "optimizer": OPTIMIZER, "scheduler": SCHEDULER})
    dummies = {"optimizer": {"lr": RATE}, "scheduler": {"total_num_steps": 10, "warmup_num_steps": 2}}
    losses, rates, kind = job(section, dummies=dummies)
    assert rates == close([warmup_decay(step) for step in range(STEPS)])
    same(losses, alone(lambda found: torch.optim.AdamW(found, lr=RATE, weight_decay=0.0), rate=warmup_decay))
    assert kind == "AdamW"


def warmup(step: int) -> float:
    """DeepSpeed's WarmupLR, linear, of 3 updates, as in CLASSIC."""
    return RATE * min(max(step - 1, 0) / 3, 1.0)


def classic(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)


def test_a_file_of_deepspeeds_own_examples_clips_and_schedules_by_itself(ds):
    losses, rates, _ = job(ds(CLASSIC), optimizer=classic)
    assert rates[1:] == close([warmup(step) for step in range(1, STEPS)])
    same(losses, alone(classic, clip=0.1, rate=warmup))


def test_the_schedule_of_the_file_goes_on_after_a_resume(ds, tmp_path):
    _, rates, _ = job(ds(CLASSIC), optimizer=classic, resume="save")
    _, resumed, _ = job(ds(CLASSIC), optimizer=classic, resume="load")
    assert resumed[2:] == close(rates[2:])
    assert sorted(set(rates[1:])) == close([0.0, RATE / 3, RATE * 2 / 3])


def test_a_precision_and_a_window_of_the_file_hold_where_nobody_else_speaks(ds):
    values = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    losses, *_ = job(ds(values), window=2)
    # bfloat16 has 8 bits of mantissa: forwards differ by some thousandths from float32's.
    assert losses == close(alone(adam_w, window=2), rel=2e-2)
    same(job(ds({"gradient_accumulation_steps": 2}), window=2)[0], alone(adam_w, window=2))


# ---- contradictions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "arguments", "sentence"),
    [
        (
            {"train_micro_batch_size_per_gpu": 8},
            {},
            "train_micro_batch_size_per_gpu: 8 (ds.json:2), but the prepared loaders have 4 samples",
        ),
        ({"train_batch_size": 32}, {}, "train_batch_size: 32 (ds.json:2), but the run has 4 samples a rank x 1"),
        (
            {"gradient_accumulation_steps": 4},
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps is 2 (the script) and 4 (gradient_accumulation_steps, ds.json:2)",
        ),
        (
            {"gradient_accumulation_steps": 4},
            {"settings": "gradient_accumulation_steps: 2\n"},
            "gradient_accumulation_steps is 2 (rank0/train.yaml:2:30) and 4 (gradient_accumulation_steps, ds.json:2)",
        ),
        (
            {"gradient_clipping": 1.0},
            {"clip": 0.5},
            "gradient_clipping: 1 (ds.json:2), but the script calls clip_grad_norm_ with 0.5",
        ),
        (
            {"bf16": {"enabled": True}},
            {"mixed_precision": "no"},
            "mixed_precision is 'no' (the script) and 'bf16' (bf16.enabled, ds.json:3)",
        ),
        (
            {"bf16": {"enabled": False}},
            {"settings": "mixed_precision: bf16\n"},
            "bf16.enabled: false (ds.json:3), but the run has mixed_precision: bf16",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}},
            {},
            'optimizer.type: "AdamW" (ds.json:3), but params.lr: 0.5 (ds.json:5) is 0.02 there',
        ),
        (
            {"optimizer": OPTIMIZER, "scheduler": SCHEDULER},
            {"dummies": {"optimizer": {"lr": RATE}, "scheduler": {"warmup_num_steps": 2}}},
            'scheduler.params.total_num_steps: "auto" (ds.json:17) has nothing to be filled in from',
        ),
    ],
)
def test_a_contradiction_shows_both_sides_and_their_places(ds, values, arguments, sentence):
    assert sentence in refusal(ds(values), **arguments)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"zero_optimization": {"stage": 2, "buckets": 3}},
            "DeepSpeedZeroConfig.buckets: Extra inputs are not permitted [deepspeed ",
        ),
        (
            {"zero_optimization": {"stage": 2}, "prescale_gradients": True, "gradient_predivide_factor": 2.0},
            "DeepSpeed refuses these settings: gradient_predivide_factor != 1.0 is not yet supported with ZeRO-2",
        ),
    ],
)
def test_what_deepspeed_itself_refuses_is_told_in_one_line(ds, values, sentence):
    assert sentence in refusal(ds(values))


def late_change() -> None:
    _, _, _, accelerator = train({"config_file": "ds.json"})
    accelerator.gradient_accumulation_steps = 3


def own_scheduler() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"config_file": "ds.json"})
    network = model()
    optimizer = adam_w(network.parameters())
    accelerator.prepare(network, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))


@pytest.mark.parametrize(
    ("values", "what", "sentence"),
    [
        ({"gradient_accumulation_steps": 1}, late_change, "1 (ds.json:2), but the run accumulates 3 micro-batches"),
        ({"scheduler": SCHEDULER}, own_scheduler, '"WarmupDecayLR" (ds.json:3), but the script has prepared a StepLR'),
    ],
)
def test_what_the_script_says_later_is_compared_then(ds, values, what, sentence):
    ds(values)
    with pytest.raises(AssertionError) as caught:
        spawn(what, WORLD)
    assert sentence in str(caught.value)


def as_accelerates_examples() -> tuple[str, str, list[float]]:
    """The question by which scripts of Accelerate choose between real objects and stand-ins."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))
    plugin = accelerator.state.deepspeed_plugin
    network = model()
    make = torch.optim.AdamW if plugin is None or "optimizer" not in plugin.deepspeed_config else DummyOptim
    optimizer = make(network.parameters(), lr=RATE)
    if plugin is None or "scheduler" not in plugin.deepspeed_config:
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    else:
        scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, data(BATCH), scheduler)
    losses = []
    for _, (x, y) in zip(range(STEPS), loader, strict=False):
        loss = F.mse_loss(network(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
    return make.__name__, type(scheduler.scheduler).__name__, losses


@pytest.mark.parametrize("named", [False, True])
def test_a_script_chooses_stand_ins_by_the_dictionary(ds, named):
    ds({**ZERO_2, **({"optimizer": OPTIMIZER, "scheduler": SCHEDULER} if named else {})})
    optimizer, scheduler, losses = spawn(as_accelerates_examples, WORLD)[0]
    assert (optimizer, scheduler) == (("DummyOptim", "WarmupDecayLR") if named else ("AdamW", "LambdaLR"))
    decay = 0.0 if named else 0.01  # DummyOptim's own, as in Accelerate, and torch's.
    expected = alone(
        lambda found: torch.optim.AdamW(found, lr=RATE, weight_decay=decay), rate=warmup_decay if named else None
    )
    same(losses, expected)


# ---- DeepSpeedPlugin ------------------------------------------------------------------------------------------------


def with_plugin(arguments: dict[str, Any], **further: Any) -> tuple[list[float], str]:
    losses, _, _, accelerator = train(DeepSpeedPlugin(**arguments), **further)
    name = accelerator.distributed_type
    accelerator.end_training()
    return losses, name


def test_a_plugin_of_accelerates_scripts_is_the_section():
    arguments = {"zero_stage": 3, "gradient_accumulation_steps": 2, "gradient_clipping": 0.2}
    losses, name = spawn(with_plugin, WORLD, arguments, window=2)[0]
    assert name == "deepspeed"
    same(losses, alone(adam_w, clip=0.2, window=2))


def test_a_plugin_may_hold_a_file_or_a_dictionary(ds):
    ds(ZERO_3)
    same(spawn(with_plugin, WORLD, {"hf_ds_config": "ds.json"})[0][0], alone(adam_w))
    assert DeepSpeedPlugin(hf_ds_config=ZERO_2).config == ZERO_2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"zero_stage": 4}, "less than or equal to 3"),
        ({"zero3_init_flag": True}, "init_empty_weights"),
        ({"enable_msamp": True}, "takes no enable_msamp"),
        ({"is_train_batch_min": False}, "takes no is_train_batch_min=False here. Leave it out"),
        ({"offload_optimizer_device": "disk"}, "DeepSpeedPlugin: .* Change its arguments."),
        ({"hf_ds_config": "none.json"}, "there is no file 'none.json'"),
        ({"hf_ds_config": {"zero_optimization": {"stage": 1}}, "zero_stage": 2}, "zero_stage: 2 contradicts"),
    ],
)
def test_a_plugin_that_cannot_be_right_says_so(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        DeepSpeedPlugin(**arguments)


# ---- what it says on the way ----------------------------------------------------------------------------------------


def printed(stage: int) -> tuple[str, str]:
    """Everything that a rank writes while it makes an engine, trains and saves with default logging."""
    streams, kept = [Path(f"{name}{os.environ['RANK']}") for name in ("out", "err")], [os.dup(1), os.dup(2)]
    for number, path in enumerate(streams, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    try:
        for optimizer in (adam_w, lambda found: torch.optim.SGD(found, lr=RATE)):
            train({"zero_stage": stage}, optimizer=optimizer, clip=0.5)[3].end_training()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        for number, before in enumerate(kept, 1):
            os.dup2(before, number)
    # Torch 2.9 itself prints this whenever gloo connects ranks.
    output = re.sub(r"^\[Gloo\] Rank .*\n", "", streams[0].read_text(), flags=re.MULTILINE)
    return output, streams[1].read_text()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.gate("3")
def test_nothing_is_printed_at_the_default_level(stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert spawn(printed, WORLD, stage) == [("", "")] * WORLD


def logged() -> tuple[list[str], list[str], bool]:
    """Records of DeepSpeed's logger during a run, and whether it is as before afterwards."""
    import deepspeed  # noqa: F401

    theirs = logging.getLogger("DeepSpeed")
    before = (list(theirs.handlers), theirs.level, theirs.propagate)
    seen: list[logging.LogRecord] = []
    catcher = logging.Handler()
    catcher.emit = seen.append  # type: ignore[method-assign]
    logging.getLogger("drivetrain_deepspeed").addHandler(catcher)
    logging.getLogger("drivetrain_deepspeed").setLevel(logging.INFO)
    accelerator = train({"zero_stage": 1, "steps_per_print": 2})[3]
    theirs.info("engine says")
    theirs.warning("careful")
    theirs.error("broken %d", 7)
    found = [f"{record.levelname} {record.getMessage()}" for record in seen]
    names = [record.name for record in seen if record.name != "drivetrain_deepspeed.engine"]
    accelerator.end_training()
    return found, names, before == (list(theirs.handlers), theirs.level, theirs.propagate)


def test_its_records_come_by_our_logger_once_and_with_the_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first, names, restored), (second, _, _) = spawn(logged, WORLD)
    assert first[-3:] == ["INFO engine says", "WARNING careful", "ERROR [rank 0] broken 7"]
    assert any("skipped=" in record for record in first), first
    assert second == ["ERROR [rank 1] broken 7"]
    assert names == []
    assert restored


def test_losses_are_finite_numbers():
    """The references above mean nothing if both sides are NaN."""
    assert all(map(math.isfinite, alone(adam_w)))


# ---- what docs/how-to/deepspeed.md says of gradients ----------------------------------------------------------------


def visible_gradients(stage: int) -> tuple[int | None, int, float]:
    """Parameters with a gradient after backward (``None`` if reading it raises), after the step, and the norm."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": stage})
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam_w(network.parameters()), data(BATCH))
    x, y = next(iter(loader))
    accelerator.backward(F.mse_loss(network(x), y))
    after = None
    if stage == 0:
        after = sum(parameter.grad is not None for parameter in network.parameters())
    else:
        for parameter in network.parameters():
            with pytest.raises(UnsupportedError, match="takes gradients out of the parameters"):
                _ = parameter.grad
    norm = accelerator.clip_grad_norm_(network.parameters(), 1e9).item()
    optimizer.step()
    optimizer.zero_grad()
    end = sum(parameter.grad is not None for parameter in network.parameters())
    accelerator.end_training()
    return after, end, norm


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.gate("0", "3")
def test_gradients_are_visible_under_stage_0_only_and_their_norm_under_all(stage):
    network = model()
    x, y = next(iter(data(BATCH * WORLD)))
    F.mse_loss(network(x), y).backward()
    norm = nn.utils.get_total_norm([parameter.grad for parameter in network.parameters()]).item()
    for after, end, found in spawn(visible_gradients, WORLD, stage):
        assert (after, end) == (4 if stage == 0 else None, 0)
        assert found == close(norm, rel=1e-5)
