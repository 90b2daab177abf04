"""What a machine is measured to do, and what its allocator keeps; no accelerator."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml
from click.testing import CliRunner

from drivetrain.api import UsageError
from drivetrain.api.programs import pip_line
from drivetrain_planner.allocator import CachingAllocator, reserved
from drivetrain_planner.commands import ELSEWHERE, plan
from drivetrain_planner.machines import HERE, MACHINES, find, kept_file
from drivetrain_planner.measuring import as_file, link, measure

MIB = 2**20

SCRIPT = """
import torch
from torch import nn

def make():
    return nn.Linear(4, 4)

def batch():
    return torch.ones(2, 4)

def loss(output, batch):
    return output.sum()
"""


@pytest.mark.parametrize(("size", "segment"), [(1, 2), (MIB, 2), (3 * MIB, 20), (10 * MIB, 10), (11 * MIB + 1, 12)])
def test_segments_are_those_of_torch(size, segment):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == segment * MIB


def test_a_freed_block_is_cut_and_joined_again():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    first, second = allocator.allocate(12 * MIB), allocator.allocate(12 * MIB)
    assert allocator.reserved == 30 * MIB
    allocator.free(second)
    allocator.free(first)
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 30 * MIB


def test_blocks_of_two_segments_are_not_joined():
    log = [(1, 12 * MIB), (2, 12 * MIB), (1, 0), (2, 0), (3, 24 * MIB), (3, 0)]
    assert reserved(log) == 48 * MIB


def test_half_precision_logits_stay_beside_their_float_copies():
    """Freed before the larger copies are made, they fit none of them: what runs are seen to reserve beyond tensors."""
    log = [(1, 200 * MIB), (2, 400 * MIB), (1, 0), (3, 400 * MIB), (4, 400 * MIB), (5, 400 * MIB)]
    assert reserved(log, rounds=1) == 1800 * MIB


def test_a_link_from_two_messages():
    """A ring of 4 sends 1.5 times the message: 90 MB in a tenth of a second."""
    found = link(4, 0.002, 0.102, 60_000_000)
    assert (found.latency, found.bandwidth) == (0.002, pytest.approx(9e8))
    assert link(4, 0.002, 0.001, 1000).bandwidth == pytest.approx(1.5e6)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_machine_that_was_not_measured(cache):
    with pytest.raises(UsageError, match="this machine has not been measured"):
        find(HERE)


def test_what_was_measured_is_taken_where_no_machine_is_named(cache, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    kept_file().parent.mkdir()
    kept_file().write_text(yaml.safe_dump({**as_file(MACHINES["cpu"]), "name": "mine", "devices": 2}))
    asked = ["memory", "train.py:make", "--batch", "train.py:batch", "--loss", "train.py:loss", "--json"]
    done = CliRunner().invoke(plan, asked)
    assert done.exit_code == 0, done.output
    assert '"machine": "mine"' in done.output
    assert '"world_size": 2' in done.output
    assert '"machine": "h100"' in CliRunner().invoke(plan, [*asked, "--machine", "h100x8"]).output


def test_a_subcommand_of_another_distribution_is_told_with_its_cure(monkeypatch):
    """The group as it is where that distribution is not installed; where it is, it adds them to this group."""
    monkeypatch.setattr(plan, "commands", {name: each for name, each in plan.commands.items() if name not in ELSEWHERE})
    for name in ("schedule", "show"):
        done = CliRunner().invoke(plan, [name, "--ranks", "2"])
        assert done.exit_code == 2
        assert f"The subcommand 'plan {name}' is not installed. Run: {pip_line('megatron')}" in done.output
    assert "No such command 'chose'" in CliRunner().invoke(plan, ["chose"]).output


def test_a_file_says_what_its_machine_says(tmp_path):
    file = tmp_path / "mine.yaml"
    for machine in MACHINES.values():
        file.write_text(yaml.safe_dump(as_file(machine)))
        assert find(str(file)) == machine


@pytest.mark.parametrize(
    ("text", "told", "corrected"),
    [
        ("- a100", r"holds no keys and values\. Write `base: h100` and what differs from it", "base: a100"),
        (
            "base: h100\nmemry: 40GB",
            r": unknown memry\. The keys are base, name, device_type, memory, devices",
            "base: h100\nmemory: 40GB",
        ),
        (
            "base: h100\nflops: many",
            r": flops cannot be 'many'\. .* everything else numbers",
            "base: h100\nflops: 5e13",
        ),
        (
            "base: h100\ndevices: all",
            r": devices cannot be 'all'\. .* everything else numbers",
            "base: h100\ndevices: 4",
        ),
        (
            "base: h100\ninside: {latency: 2e-5}",
            r": inside cannot be \{'latency': '2e-5'\}\. Links are `\{latency: 2e-5, bandwidth: 1e9\}`",
            "base: h100\ninside: {latency: 2e-5, bandwidth: 1e9}",
        ),
        ("base: h100\nhost: 5", r": host cannot be 5\. Links are", "base: h100\nhost: {latency: 2e-5, bandwidth: 1e9}"),
        (
            "base: h100\nmemory: lots",
            r": memory cannot be 'lots'\. .* sizes such as 24GiB",
            "base: h100\nmemory: 24GiB",
        ),
        ("base: [h100", r"cannot be read: .*\. Name a YAML file, or a machine", "base: h100"),
    ],
)
def test_a_machines_file_that_says_something_else_is_refused_until_it_is_corrected(tmp_path, text, told, corrected):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.compile(told, re.DOTALL)):
        find(str(file))
    file.write_text(corrected)
    base = MACHINES[yaml.safe_load(corrected)["base"]]
    assert find(str(file)).name == "mine"
    assert (find(str(file)) == replace(base, name="mine")) is (list(yaml.safe_load(corrected)) == ["base"])


@pytest.mark.timeout(200)
def test_a_machine_that_cannot_be_measured_is_refused_and_can_be_named(cache):
    with pytest.raises(UsageError, match=r"this machine cannot be measured: .*\. Name one: --machine h100x8"):
        measure(1, seconds=0.01, device_type="cpu", size=10**8)
    assert find("h100x8").devices == 8


@pytest.mark.timeout(200)
def test_a_measured_machine_is_written_where_nothing_is_and_as_yaml(cache, tmp_path):
    def measured(name):
        arguments = ["measure", "--cpu", "--processes", "1", "--seconds", "0.01", "--write", str(tmp_path / name)]
        return CliRunner().invoke(plan, arguments)

    assert f"{tmp_path}/mine.json: a machine's file is YAML. Name it {tmp_path}/mine.yaml." in str(
        measured("mine.json").exception
    )
    assert measured("mine.yaml").exit_code == 0
    assert "mine.yaml is there already. Name another file, or remove it." in str(measured("mine.yaml").exception)
    assert measured("other.yaml").exit_code == 0
    assert find(str(tmp_path / "other.yaml")).device_type == "cpu"


@pytest.mark.timeout(200)
def test_this_machine_is_measured(cache):
    found = measure(2, seconds=0.01, device_type="cpu", size=128)
    assert (found.device_type, found.devices, found.context) == ("cpu", 2, 0)
    assert found.memory > 2**28
    # From a tenth of a slow core to a thousand fast ones.
    assert 1e7 < found.flops < 1e14
    assert 1e6 < found.half_flops < 1e14
    assert 1e7 < found.bandwidth < 1e13
    assert 1e-8 < found.launch < 1e-1
    assert 1e-6 < found.inside.latency < 10
    assert 1e4 < found.inside.bandwidth < 1e12
    assert found.outside == MACHINES["cpu"].outside
    assert found.host != MACHINES["cpu"].host
    assert found.host_bandwidth != MACHINES["cpu"].host_bandwidth
    assert 1e-8 < found.host.latency < 1
    assert 1e6 < found.host.bandwidth < 1e13
    assert 1e6 < found.host_bandwidth < 1e13


def test_a_name_that_no_plan_would_read_is_refused_before_anything_is_measured(cache, tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain_planner.measuring.measure", lambda *_: pytest.fail("it measures"))
    done = CliRunner().invoke(plan, ["measure", "--cpu", "--write", str(tmp_path / "mine.json")])
    assert isinstance(done.exception, UsageError)
    assert f"Name it {tmp_path / 'mine.yaml'}" in str(done.exception)


def test_more_processes_than_can_be(cache, monkeypatch):
    def fails(*_):
        raise UsageError("no")

    monkeypatch.setattr("drivetrain_planner.measuring.measure", fails)
    done = CliRunner().invoke(plan, ["measure", "--cpu"])
    assert isinstance(done.exception, UsageError)
    assert not kept_file().exists()
