"""``drivetrain compare``: two real runs of a script, which are the same or of which it says where they come apart."""

from __future__ import annotations

import re

import pytest
import torch

from drivetrain.cli.compare import Comparison, Record, _processes, on_one_process
from drivetrain.config import load_config
from drivetrain.errors import UsageError

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

    def forward(self, x):
        return self.head(self.drop(self.first(x).relu()))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
fixed = torch.Generator().manual_seed(1)
x, y = torch.randn(72, 8, generator=fixed), torch.randint(4, (72,), generator=fixed)
kind = Noisy if how == "noise" else TensorDataset
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(kind(x, y), batch_size=12, shuffle=True))
for step, (x, y) in enumerate(loader):
    if how == "ends" and accelerator.num_processes > 1 and step == 2:
        raise SystemExit(3)
    if how == "short" and step == 2:
        break
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        if how == "task":
            loss = loss + 9 * (x.mean() * model(x)).square().mean()
        accelerator.backward(loss)
        if how == "hand" and step == 1:
            for p in model.parameters():
                p.grad.mul_(accelerator.num_processes)
        if how != "no step":
            optimizer.step()
            optimizer.zero_grad()
accelerator.print("the script's end")
'''


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
    assert lines[-1] == "The same: 3 steps leave the same weights."
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
    ],
)
@pytest.mark.gate("noise-*", "hand-*")
def test_it_says_where_two_runs_come_apart(how, said, compare):
    options = ("--tolerance", "1e-5") if how == "hand" else ()
    done = compare(how, *options)
    assert done.returncode == 1, done.stderr
    assert said in done.stdout


@pytest.mark.slow
def test_batches_of_the_scripts_own_size_for_each_process_are_named(compare):
    done = compare("plain", "--set", "dataloader.split_batches=false")
    assert done.returncode == 1
    assert "12 / 24" in done.stdout
    assert "other numbers: 12 rows on one process, 24 as configured." in done.stdout


def test_a_run_that_fails_is_not_compared(compare):
    done = compare("ends")
    assert done.returncode == 3
    assert "This run failed after 2 steps, so that nothing is compared." in done.stderr
    assert "weights" not in done.stdout


@pytest.mark.slow
def test_a_script_that_ends_before_is_compared_as_far_as_it_goes(compare):
    done = compare("short")
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("The same: 2 steps leave the same weights.\n")
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


def record(folder, *steps):
    """A record of weights before and after steps."""
    folder.mkdir()
    for number, weights in enumerate(steps):
        torch.save({name: torch.tensor(value) for name, value in weights.items()}, folder / f"{number}.pt")
    one = {"rows": 4.0, "sum": 1.0, "squares": 2.0, "loss": 1.0}
    return Record(folder, [one] * (len(steps) - 1), "ddp on 2 processes")


def test_a_difference_is_a_share_of_what_the_weights_have_changed(tmp_path):
    one = record(tmp_path / "one", {"w": [100.0, 0.0]}, {"w": [100.0, 1.0]})
    other = record(tmp_path / "other", {"w": [100.0, 0.0]}, {"w": [100.0, 1.02]})
    assert not Comparison(one, other, 0.01).same
    assert Comparison(one, other, 0.03).same
    assert "(2e-02 of their change): w" in Comparison(one, other, 0.01).table()[-2]


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
    other = record(tmp_path / "other", {"w": [0.0]}, {"w": [1.05]})._replace(precision="bf16")
    assert "computes in bf16, whose rounding" in Comparison(one, other, 0.01).verdict()
    assert Comparison(one, other._replace(precision="no"), 0.1).verdict() == "The same: 1 step leaves the same weights."


def test_models_of_other_weights_are_refused(tmp_path):
    one, other = record(tmp_path / "one", {"w": [1.0]}), record(tmp_path / "other", {"v": [1.0]})
    with pytest.raises(UsageError, match="other weights: v, w differs"):
        Comparison(one, other, 0.01)
