"""``drivetrain compare``: two real runs of a script, which are the same or of which it says where they come apart."""

from __future__ import annotations

import re

import pytest
import torch

from drivetrain import run_record
from drivetrain.cli.compare import _processes, on_one_process
from drivetrain.config import load_config
from drivetrain.errors import UsageError
from drivetrain.run_comparison import Comparison, Record

SCRIPT = '''
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Accelerator, set_seed

how = sys.argv[1]
if how != "unseeded":
    set_seed(0)
accelerator = Accelerator()


class Noisy(TensorDataset):
    """Draws noise when a sample is read."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(8), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head, self.drop = nn.Linear(8, 16), nn.Linear(16, 4), nn.Dropout(0.5)
        self.loops = nn.LSTM(16, 16, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        h = self.drop(self.first(x).relu())
        if how == "recurrent":
            h = self.loops(h[:, None])[0][:, 0]
        return self.head(torch.dropout(h, 0.5, self.training))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
fixed = torch.Generator().manual_seed(1)
x, y = torch.randn(72, 8, generator=fixed), torch.randint(4, (72,), generator=fixed)
kind = Noisy if how == "noise" else TensorDataset
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(kind(x, y), batch_size=12, shuffle=True))
if how == "halved":
    set_seed(1)
    accelerator.unwrap_model(model).load_state_dict(Net().state_dict())
for step, (x, y) in enumerate(loader):
    if how == "ends" and accelerator.num_processes > 1 and step == 2:
        raise SystemExit(3)
    if how == "short" and step == 2:
        break
    with accelerator.accumulate(model):
        if how == "task":
            x = x - x.mean(0)
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if how == "hand" and step == 1:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(accelerator.num_processes)
        if how == "halved":
            for group in optimizer.param_groups:
                group["lr"] = 1e-6 / accelerator.num_processes
        if how == "late" and step == 1:
            teacher = accelerator.prepare(nn.Linear(8, 4))
        if how == "written":
            model.head.bias.data.add_(0.1 * step * accelerator.num_processes)
        if how != "no step":
            optimizer.step()
            optimizer.zero_grad()
accelerator.print("the script's end")
'''

TRIALS = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Accelerator, set_seed

for width in (16, 32):
    set_seed(0)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(36, 8), torch.randint(4, (36,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=12))
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def compare(drivetrain, tmp_path):
    """Run the script above on two processes; ``compare("noise", "--steps", "2")``."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(how, *options, processes=2):
        return drivetrain("compare", "--cpu", "--num_processes", processes, *options, "train.py", how)

    return run


BACKENDS = {
    "ddp": ("--distributed_type", "ddp"),
    "fsdp": ("--distributed_type", "fsdp", "--gradient_accumulation_steps", "2"),
    "zero3": ("--distributed_type", "deepspeed", "--set", "deepspeed.zero_stage=3"),
    "pp": ("--distributed_type", "megatron", "--set", "megatron.pipeline_parallel_size=2"),
}


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.gate("ddp", "pp")
def test_an_ordinary_script_is_the_same(backend, compare):
    done = compare("plain", "--steps", "3", *BACKENDS[backend], processes=3 if backend == "ddp" else 2)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "The same: 3 steps change the weights alike."
    rows = 24 if backend == "fsdp" else 12
    assert [re.sub(r"\(.*\)", "", line).split()[:3] for line in lines[4:7]] == [
        [str(step), str(rows), "same"] for step in (1, 2, 3)
    ]
    assert "the script's end" not in done.stdout


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unseeded", "The weights differ before the first step. Call set_seed(...)"),
        ("noise", "and the step reads other numbers: as many rows (12) with other values."),
        ("task", "Up to step 1 weights and data are the same, and in it the loss is "),
        ("hand", "Up to step 2 weights, data and loss are the same, and the step leaves other weights."),
        ("halved", "Up to step 1 weights, data and loss are the same, and the step leaves other weights."),
        ("written", "Up to step 2 the runs are the same; before it the weights were changed by other means"),
    ],
)
@pytest.mark.gate("noise-*", "halved-*")
def test_it_says_where_two_runs_come_apart(how, said, compare):
    options = ("--tolerance", "1e-4") if how == "hand" else ()  # Adam takes little notice of a factor
    done = compare(how, *options)
    assert done.returncode == 1, done.stderr
    assert said in done.stdout


@pytest.mark.slow
def test_batches_of_the_scripts_own_size_for_each_process_are_named(compare):
    done = compare("plain", "--set", "dataloader.split_batches=false")
    assert done.returncode == 1
    assert "12 / 24" in done.stdout
    assert "other numbers: 12 (single on 1 process) and 24 (ddp on 2 processes) rows." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["recurrent", "late"])
def test_dropout_between_recurrent_layers_and_models_of_later_steps_are_no_difference(how, compare):
    done = compare(how)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_of_another_file_takes_the_place_of_one_process(compare, tmp_path):
    (tmp_path / "fsdp.yaml").write_text("distributed_type: fsdp\nnum_processes: 2\n")
    done = compare("plain", "--against", "fsdp.yaml", "--distributed_type", "ddp", "--steps", "2", processes=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fsdp on 2 processes (fsdp.yaml) / ddp on 3 processes\n" in done.stdout
    assert done.stdout.endswith("The same: 2 steps change the weights alike.\n")


@pytest.mark.slow
def test_a_setting_of_training_in_one_file_alone_is_a_difference(compare, tmp_path):
    (tmp_path / "zero.yaml").write_text(
        "distributed_type: deepspeed\ndeepspeed: {zero_stage: 2, gradient_clipping: 1.0e-3}\n"
    )
    options = ("--distributed_type", "fsdp", "--tolerance", "1e-4")
    done = compare("plain", "--against", "zero.yaml", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "deepspeed on 2 processes (zero.yaml) / fsdp on 2 processes\n" in done.stdout
    assert "such as gradient_clipping in a section" in done.stdout


def test_trials_of_several_accelerators_are_one_record(drivetrain, tmp_path):
    (tmp_path / "trials.py").write_text(TRIALS)
    done = drivetrain("compare", "--cpu", "--num_processes", 2, "--steps", 5, "trials.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("The same: 5 steps change the weights alike.\n")


def test_a_run_that_fails_is_compared_up_to_there(compare):
    done = compare("ends")
    assert done.returncode == 2
    assert "The run on 2 processes (ddp) failed with exit code 3. Optimizer steps before: 2." in done.stderr
    assert done.stdout.endswith(
        "they end after different numbers of steps: 5 (single on 1 process) and 2 (ddp on 2 processes).\n"
    )


@pytest.mark.slow
def test_a_script_that_ends_before_is_compared_as_far_as_it_goes(compare):
    done = compare("short")
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("The same: 2 steps change the weights alike.\n")
    assert done.stdout.count("the script's end") == 2


@pytest.mark.slow
def test_a_script_without_a_step_is_refused(compare):
    done = compare("no step")
    assert done.returncode == 2
    assert "train.py ended without an optimizer step of a model that accelerator.prepare returned" in done.stderr
    assert "Prepare model and optimizer, and let the script train for at least one step." in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--distributed_type", "auto"), "Name the backend: --distributed_type ddp"),
        (("--num_machines", "2", "--main_process_ip", "10.0.0.1"), "Write --num_machines 1"),
    ],
)
def test_what_one_command_cannot_compare_is_refused(options, said, compare):
    done = compare("plain", *options)
    assert done.returncode
    assert said in done.stderr


def test_two_processes_are_taken_where_no_number_is_given_and_the_backend_allows():
    def asked(**given):
        return _processes(load_config(overrides={"use_cpu": True, **given}, environ={}))

    assert asked() == "2"
    assert asked(num_processes=3) == "3"
    assert asked(distributed_type="single") is None
    assert asked(distributed_type="fsdp") == "2"


def test_one_process_has_neither_mesh_nor_section(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "distributed_type: megatron\nnum_processes: 4\nmesh: {tp: 2}\nmegatron: {pipeline_parallel_size: 2}\n"
        "gradient_accumulation_steps: 3\n"
    )
    one = on_one_process(load_config(tmp_path / "c.yaml", environ={}))
    assert (one.config.distributed_type, one.config.num_processes, one.sections) == ("single", 1, {})
    assert one.config.mesh.sizes() == {}
    assert one.config.gradient_accumulation_steps == 3
    assert not [key for key in one.origins if key.startswith(("mesh.", "megatron"))]


def record(folder, *weights, losses=1.0, **of):
    """A record of steps, of which each begins with what the last has left."""
    folder.mkdir(parents=True)
    tensors = [{f"0.{name}": torch.tensor(value) for name, value in each.items()} for each in weights]
    for step, after in enumerate(tensors[1:], 1):
        torch.save(after, folder / f"{step}-after.pt")
    torch.save(tensors[0], folder / "1-before.pt")
    one = {"rows": 4.0, "sum": 1.0, "squares": 2.0, "loss": losses}
    return Record(folder, [one] * (len(weights) - 1), "ddp on 2 processes", **of)


def compared(folder, one, other, tolerance=0.01, **of):
    """The comparison of two runs of one step, each given as weights before and after it."""
    return Comparison(record(folder / "one", *one), record(folder / "other", *other, **of), tolerance)


def test_a_difference_is_a_share_of_what_the_step_has_changed(tmp_path):
    start = {"w": [100.0, 0.0]}
    found = compared(tmp_path, [start, {"w": [100.0, 1.0]}], [start, {"w": [100.0, 1.02]}])
    assert not found.same
    assert "different (2e-02 of it): w" in found.table()[-2]


def test_a_large_buffer_hides_nothing(tmp_path):
    start, end = {"w": [0.0], "seen": [0.0]}, {"w": [1e-4], "seen": [50.0]}
    one = record(tmp_path / "one", start, end, buffers={"0.seen"})
    other = record(tmp_path / "other", start, {**end, "w": [5e-5]}, buffers={"0.seen"})
    assert not Comparison(one, other, 0.01).same


def test_the_last_digits_of_weights_are_rounding(tmp_path):
    other = 1.0 + torch.finfo(torch.float32).eps
    assert compared(tmp_path, [{"w": [1.0]}, {"w": [1.0]}], [{"w": [1.0]}, {"w": [other]}]).same


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_in_one_run_is_a_difference(value, tmp_path):
    found = compared(tmp_path, [{"w": [0.0]}, {"w": [1.0]}], [{"w": [0.0]}, {"w": [value]}], losses=float("nan"))
    assert found.apart
    assert "different (finite in one run alone): w" in found.table()[-2]


def test_weights_that_are_finite_in_no_run_are_mentioned(tmp_path):
    broken = [{"w": [0.0]}, {"w": [float("nan")]}]
    found = compared(tmp_path, broken, broken)
    assert found.same
    assert found.verdict() == "The same, and in both runs weights are not finite after step 1."


def test_a_small_difference_counts_where_the_losses_differ(tmp_path):
    one = record(tmp_path / "one", {"w": [0.0]}, {"w": [1.0]})
    other = record(tmp_path / "other", {"w": [0.0]}, {"w": [1.002]})
    assert Comparison(one, other, 0.01).same
    lower = other._replace(steps=[{**other.steps[0], "loss": 0.999}])
    assert not Comparison(one, lower, 0.01).same
    assert "in it the loss is 0.999 instead of 1." in Comparison(one, lower, 0.01).verdict()
    assert Comparison(one, one._replace(steps=lower.steps), 0.01).same


def test_rounding_is_named_where_the_script_computes_in_half_precision(tmp_path):
    one = record(tmp_path / "one", {"w": [0.0]}, {"w": [1.0]})
    other = record(tmp_path / "other", {"w": [0.0]}, {"w": [1.05]}, precision="bf16")
    assert "computes in bf16, whose rounding" in Comparison(one, other, 0.01).verdict()
    in_float32 = Comparison(one, other._replace(precision="no"), 0.1)
    assert in_float32.verdict() == "The same: 1 step changes the weights alike."


def test_models_of_other_weights_and_of_none_are_refused(tmp_path):
    with pytest.raises(UsageError, match="models of other weights, such as v"):
        compared(tmp_path / "a", [{"w": [1.0]}] * 2, [{"v": [1.0]}] * 2)
    with pytest.raises(UsageError, match="have no weights to compare"):
        compared(tmp_path / "b", [{}, {}], [{}, {}])


def test_complex_weights_are_recorded_as_pairs_of_numbers():
    value = torch.tensor([1 + 2j])
    assert run_record._real(value).tolist() == [[1.0, 2.0]]
    assert run_record._equal(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    assert not run_record._equal(torch.tensor([1.0]), torch.tensor([1.0, 1.0]))
