"""What is chosen, and what is said about it; no process group."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import yaml
from click.testing import CliRunner
from planner_examples import EXAMPLES, shown
from planner_grid import estimates_of, request_for
from torch import nn

from drivetrain.api import UsageError
from drivetrain.api.programs import load_config
from drivetrain_planner import Estimate, Traffic
from drivetrain_planner.choosing import BESIDE, SHARE, choose, weigh
from drivetrain_planner.commands import plan
from drivetrain_planner.machines import Link, find
from drivetrain_planner.optimizers import optimizer_costs
from drivetrain_planner.report import lines
from drivetrain_planner.requests import Asked, request

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, inputs):
        for block in self.blocks:
            inputs = torch.relu(block(inputs))
        return inputs

class Reading(Net):
    def forward(self, inputs):
        return super().forward(inputs) * inputs.sum().item()

def batch():
    return torch.ones(8, 64)

def loss(output, batch):
    return output.pow(2).mean()
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return ["train.py:Net", "--batch", "train.py:batch", "--loss", "train.py:loss"]


def run(*arguments):
    return CliRunner().invoke(plan, [*map(str, arguments)])


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory):
    return EXAMPLES["Llama-3-8B"].choice(tmp_path_factory.mktemp("llama"))


@pytest.mark.slow
def test_llama_8b_on_eight_80_gb_cards(llama_8b):
    """The worked example of the planner's notes: replicas never, fsdp only when it recomputes."""
    assert [each.estimate.title for each in llama_8b.fitting] == ["fsdp, recompute", "tp 8"]
    rejected = {each.estimate.title: each for each in llama_8b.rejected}
    assert set(rejected) >= {"ddp", "zero 1", "zero 2", "zero 3", "fsdp", "single"}
    # 16 bytes a parameter, and DDP's buckets.
    ddp = rejected["ddp"].estimate.resident
    parameters = 8_030_261_248
    assert ddp["parameters"] == 4 * parameters
    assert ddp["optimizer states"] == pytest.approx(8 * parameters, rel=1e-6)
    assert ddp["buckets"] == pytest.approx(4 * parameters, rel=1e-6)
    fsdp = rejected["fsdp"].estimate.resident
    assert fsdp["parameters"] == pytest.approx(4 * parameters / 8, rel=1e-6)
    # A Llama layer keeps s b h (12 + 4 g + 8 f / h) bytes, and float32 copies in its two norms 8 s b h more; then come
    # logits in float32.
    samples, width, layers = 8192, 4096, 32
    kept = layers * samples * width * (12 + 4 * 0.25 + 8 * 14336 / 4096 + 8)
    # In float32, for the loss and in the output that the script keeps.
    logits = (4 + 4) * samples * 128256
    assert rejected["fsdp"].estimate.trace.saved == pytest.approx(kept + logits, rel=0.02)


@pytest.mark.slow
def test_the_documents_example_is_what_is_printed(llama_8b):
    """Of the how-to: Llama-3-8B on eight H100."""
    documented("Llama-3-8B", llama_8b)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "Llama-3-8B"])
def test_the_other_examples_are_what_is_printed(name, tmp_path):
    documented(name, EXAMPLES[name].choice(tmp_path))


def documented(name, choice):
    block = shown(name)
    assert sum(line.startswith("->") for line in block) == bool(choice.fitting)
    assert len(block) > 4
    assert set(block) <= {line.rstrip() for line in lines(choice, explain=True)}


@pytest.mark.slow
def test_flops_of_llama_8b(llama_8b):
    """6 P T for the matrices but the embedding's, and attention of the whole square: 4 + 10 layers s^2 width."""
    trace = next(each for each in llama_8b.rejected if each.estimate.title == "fsdp").estimate.trace
    matrices = 8_030_261_248 - 128256 * 4096
    tokens = 8192
    attention = 14 * 32 * tokens * tokens * 4096
    counted = sum(each.flops * each.count for each in (*trace.forward, *trace.backward))
    assert counted == pytest.approx(6 * matrices * tokens + attention, rel=0.05)


def test_a_choice_is_written_and_read_back(net, tmp_path):
    done = run("choose", *net, "--machine", "cpu", "--processes", "2", "--global_batch", "32", "--write", "train.yaml")
    assert done.exit_code == 0, done.output
    written = yaml.safe_load((tmp_path / "train.yaml").read_text())
    assert written["distributed_type"] == "ddp"
    assert written["gradient_accumulation_steps"] == 2
    assert load_config(tmp_path / "train.yaml").config.num_processes == 2
    assert "->  ddp" in done.output
    assert "not single: it trains in one process, and 2 are asked for" in done.output
    again = run("choose", *net, "--machine", "cpu", "--processes", "2", "--write", "train.yaml")
    assert isinstance(again.exception, UsageError)


def test_an_explanation_says_what_is_not_counted(net):
    done = run("choose", *net, "--machine", "cpu", "--processes", "2", "--explain")
    assert done.exit_code == 0, done.output
    assert "not counted: what kernels allocate inside of themselves" in done.output
    assert re.search(r"^not asked: dp, .*which give no estimates$", done.output, re.MULTILINE), done.output
    assert "not offered: context parallelism, since no installed backend has the mesh axis cp" in done.output
    assert "not offered: expert parallelism" in done.output


def test_offload_is_counted_where_it_is_asked_for_and_never_chosen(net, tmp_path):
    plain = json.loads(run("choose", *net, "--machine", "h100x2", "--json").stdout)
    assert not any("offload" in each["title"] for each in (*plain["fitting"], *plain["rejected"]))
    (tmp_path / "offload.yaml").write_text("fsdp: {cpu_offload: true}\n")
    done = run("choose", *net, "--machine", "h100x2", "--config", "offload.yaml", "--json")
    found = next(each for each in json.loads(done.stdout)["fitting"] if each["title"] == "fsdp, offload")
    shards = next(each for each in plain["fitting"] if each["title"] == "fsdp")
    assert found["settings"]["fsdp"]["cpu_offload"]
    # Behind all that keep the optimizer on the device, whose steps are shorter besides.
    uses_host = [bool(each["host"]) for each in json.loads(done.stdout)["fitting"]]
    assert uses_host == sorted(uses_host)
    assert len(set(uses_host)) == 2
    assert found["seconds"]["host copies"] > 0
    assert sum(found["seconds"].values()) > sum(shards["seconds"].values()) + found["seconds"]["host optimizer"]
    for part in ("parameters", "optimizer states"):
        assert found["host"][part] == shards["resident"][part]
        assert not found["resident"][part]


WIDE = """
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(16))

    def forward(self, inputs):
        for block in self.blocks:
            inputs = torch.relu(block(inputs))
        return inputs


def batch():
    return torch.ones(8, 1024)


def loss(output, batch):
    return output.pow(2).mean()
"""


@pytest.fixture
def wide(tmp_path, monkeypatch):
    (tmp_path / "wide.py").write_text(WIDE)
    monkeypatch.chdir(tmp_path)
    return ["wide.py:Wide", "--batch", "wide.py:batch", "--loss", "wide.py:loss", "--machine", "rtx4090"]


def test_offload_is_offered_where_nothing_fits_without(wide):
    """64 MiB of parameters, as much of gradients and twice of states, beside a driver's gibibyte."""
    done = run("choose", *wide, "--memory", "1500MiB")
    assert done.exit_code == 0, done.output
    assert re.search(r"^->  fsdp, offload +1\.0 GiB", done.output, re.MULTILINE), done.output
    instead = "more or larger devices, a smaller micro-batch or bf16 may fit without."
    assert f"Nothing fits without offload, whose steps are slow; {instead}" in done.output
    # Shards, their gradients and two moments of 16 matrices with their biases.
    assert "fsdp, offload needs 256.3 MiB of host memory for each rank, 256.3 MiB on a machine." in done.output
    assert re.search(r"^not single: 1\.\d GiB > 1\.2 GiB", done.output, re.MULTILINE), done.output
    assert re.search(r"^not zero 2, offload: ", done.output, re.MULTILINE), done.output
    assert "offload" not in run("choose", *wide, "--memory", "24GiB").output
    assert "offload" not in run("memory", *wide, "--memory", "24GiB").output


@pytest.mark.slow  # The memory of offload under ZeRO is held to a measured one in test_planner_memory.py.
def test_zero_offloads_what_it_is_asked_for(wide, tmp_path):
    def found(stage, **keys):
        section = {"deepspeed": {"zero_stage": stage, "reduce_bucket_size": 2**21, **keys}}
        (tmp_path / "zero.yaml").write_text(yaml.safe_dump(section))
        asked = ("--config", "zero.yaml", "--nodes", "2", "--global_batch", "32", "--json")
        every = json.loads(run("choose", *wide, *asked).stdout)
        return next(each for each in (*every["fitting"], *every["rejected"]) if each["backend"] == "deepspeed")

    for stage in (1, 2, 3):
        plain, moved = found(stage), found(stage, offload_optimizer="cpu")
        assert moved["title"] == f"zero {stage}, offload"
        assert moved["settings"]["deepspeed"] == {"zero_stage": stage, "offload_optimizer": "cpu"}
        assert moved["host"]["optimizer states"] == plain["resident"]["optimizer states"]
        assert "optimizer states" not in moved["memory"]
        assert moved["bytes"] < plain["bytes"]
        assert moved["seconds"]["optimizer"] == 0 < moved["seconds"]["host optimizer"]
        pageable = found(stage, offload_optimizer="cpu", offload_optimizer_pin_memory=False)
        assert pageable["seconds"]["host copies"] > moved["seconds"]["host copies"]
    older = found(3, config={"zero_optimization": {"cpu_offload": True}})
    assert (older["title"], older["host"]) == ("zero 3, offload", moved["host"])
    everything = found(3, offload_optimizer="cpu", offload_param="cpu")
    assert everything["title"] == "zero 3, offload of parameters too"
    assert everything["bytes"] < moved["bytes"]
    assert everything["host"]["parameters"] == 2 * moved["host"]["parameters"]

    def written(offload):
        return {"config": {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}}

    nvme = {"offload_optimizer": "nvme", "offload_optimizer_nvme_path": str(tmp_path)}

    for keys, told in (
        ({"offload_param": "cpu"}, "offload_param without offload_optimizer is not counted"),
        (nvme, "offload_optimizer to another place than the CPU's memory is not counted"),
        (written({"device": "cpu", "ratio": 0.5}), "offload_optimizer with ratio: 0.5 is not counted"),
        (written({"device": "cpu", "super_offload": True}), "offload_optimizer with super_offload is not counted"),
    ):
        # Neither what the engine would hold nor what it would hold without is shown.
        row = found(3, **keys)
        assert told in row["verdict"]
        assert not row["memory"]


def test_seconds_of_a_host_are_its_links_and_its_memorys():
    machine = replace(find("h100x4"), host=Link(1e-3, 1e9), host_bandwidth=1e10)
    assert machine.traffic(Traffic("host_copy", 1, 2 * 10**9, 5)) == pytest.approx(2.005)
    asked = replace(request_for("gpt2", 4), device_type="cuda")
    trace = asked.trace((), (), None)
    made = Estimate(
        "one", "one", "one", 1, trace=trace, host={"parameters": 1}, stepped_in_host=10**8,
        traffic=[Traffic("host_copy", 1, 10**9, 1, overlaps=False)],
    )  # fmt: skip
    found = weigh(made, asked, machine).seconds
    assert found["host copies"] == pytest.approx(1.001, rel=0.01)
    # Four processes at once, each 3 + 2 x 2 times the bytes of its parameters.
    assert found["host optimizer"] == pytest.approx(4 * 7 * 10**8 / 1e10)
    assert found["optimizer"] == 0


def test_what_ranks_exchange_costs_more_on_a_cpu():
    """There the cores that compute also copy and add up, and gloo reduces everything on every rank."""
    scattered, reduced = (Traffic(operation, 4, 10**9, 1) for operation in ("reduce_scatter", "all_reduce"))
    hidden = {}
    for name in ("cpu", "h100x4"):
        machine = replace(find(name), devices=4)
        asked = replace(request_for("gpt2", 4), device_type=machine.device_type)
        made = Estimate("one", "one", "one", 1, trace=asked.trace((), (), None), traffic=[reduced], copied=10**8)
        found = weigh(made, asked, machine).seconds
        hidden[name] = machine.traffic(reduced) - found["communication"]
        assert found["copies"] == pytest.approx(10**8 / machine.bandwidth)
        assert machine.traffic(scattered) == pytest.approx(machine.traffic(reduced) / (1 if name == "cpu" else 2), 0.02)
    assert hidden["cpu"] == pytest.approx(0)
    assert hidden["h100x4"] == pytest.approx((1 - BESIDE) * found["computation"])
    assert "copies" not in weigh(replace(made, copied=0), asked, machine).seconds


@pytest.mark.parametrize(
    ("section", "operation", "overlaps"),
    [
        ({}, "all_reduce", False),
        ({"reduce_scatter": False, "overlap_comm": True}, "all_reduce", True),
        ({"config": {"zero_optimization": {"use_multi_rank_bucket_allreduce": False}}}, "reduce_scatter", False),
    ],
)
def test_zero_2_reduces_as_its_configuration_says(section, operation, overlaps):
    asked = request_for("gpt2", 2, sections={"deepspeed": {"zero_stage": 2, **section}})
    first = estimates_of(asked, "zero 2").traffic[0]
    assert (first.operation, first.overlaps) == (operation, overlaps)


def test_json_has_every_layout(net):
    found = json.loads(run("choose", *net, "--machine", "cpu", "--processes", "3", "--json").stdout)
    assert {each["backend"] for each in found["fitting"]} >= {"ddp", "fsdp"}
    assert found["fitting"][0]["bytes"] == sum(found["fitting"][0]["memory"].values())


def test_memory_has_a_line_for_each_layout(net):
    done = run("memory", *net, "--machine", "cpu", "--processes", "2")
    assert [line.split("  ")[0] for line in done.output.splitlines()][1:4] == ["ddp", "fsdp", "fsdp, recompute"]


def test_a_batch_that_does_not_divide_is_refused(net):
    done = run("choose", *net, "--machine", "cpu", "--processes", "2", "--global_batch", "20")
    assert isinstance(done.exception, UsageError)
    assert "a global batch of 20 is not a multiple of the 8 samples of a micro-batch" in str(done.exception)


def test_what_is_too_large_says_by_how_much(net):
    done = run("choose", *net, "--machine", "cpu", "--processes", "2", "--memory", "150KB")
    assert isinstance(done.exception, UsageError)
    assert " KiB > 117.2 KiB, which is 80% of 146.5 KiB; " in str(done.exception)


def test_the_users_section_is_kept(net, tmp_path):
    (tmp_path / "mine.yaml").write_text("fsdp: {activation_checkpointing: true, reshard_after_forward: true}\n")
    found = json.loads(
        run("choose", *net, "--machine", "cpu", "--processes", "2", "--config", "mine.yaml", "--json").stdout
    )
    assert [each["title"] for each in found["fitting"] if each["backend"] == "fsdp"] == ["fsdp, recompute"]


def test_a_model_that_reads_values_is_refused(net):
    done = run("choose", "train.py:Reading", *net[1:], "--machine", "cpu")
    assert isinstance(done.exception, UsageError)
    assert "Reading cannot be traced without values" in str(done.exception)


def test_t5_cannot_be_computed_twice():
    assert "cannot be traced" in estimates_of(request_for("t5", 2), "fsdp, recompute").refused


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """Installs a distribution whose entry point is a function, for one test."""
    folder = tmp_path / "stranger-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[drivetrain.estimates]\nhalf = stranger:estimates\n")
    monkeypatch.syspath_prepend(tmp_path)

    def register(function):
        module = ModuleType("stranger")
        module.estimates = function
        monkeypatch.setitem(sys.modules, "stranger", module)

    return register


def chosen(net):
    machine = find("cpu", 2)
    return choose(request(Asked(net[0], 2, batch=net[2], loss=net[4]), machine), machine)


def test_a_strangers_layout_takes_part(net, plugin):
    def estimates(request):
        trace = request.trace((), (), None)
        settings = {"distributed_type": "half"}
        return [Estimate("half", "half", "half", 5, settings=settings, memory={"all": 1}, trace=trace)]

    plugin(estimates)
    assert chosen(net).best.estimate.title == "half"


def test_a_plugin_that_fails_is_named(net, plugin):
    def estimates(request):
        raise RuntimeError("no idea")

    plugin(estimates)
    found = chosen(net)
    assert found.complaints == ["stranger 1.0 could not estimate its layouts: RuntimeError: no idea"]
    assert found.fitting


@pytest.mark.parametrize(
    ("name", "arguments", "state"), [("AdamW", {}, 2.0), ("sgd", {}, 0.0), ("SGD", {"momentum": 0.9}, 1.0)]
)
def test_an_optimizers_state_is_counted(name, arguments, state):
    costs = optimizer_costs(name, arguments)
    assert costs.per_element == state
    parameters = [nn.Parameter(torch.ones(7, 3)), nn.Parameter(torch.ones(50))]
    optimizer = getattr(torch.optim, costs.name)(parameters, lr=0.1, **arguments)
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert costs.state([each.nbytes for each in parameters]) == sum(each.nbytes for each in held)


@pytest.mark.parametrize(
    ("name", "arguments", "device_type", "moved"),
    [
        ("SGD", {}, "cpu", 3),  # Reads parameter and gradient, writes the parameter.
        ("SGD", {}, "cuda", 3),  # The same in one kernel for all parameters.
        ("SGD", {"momentum": 0.9}, "cpu", 8),  # Scales the momentum, adds the gradient, and steps by it.
        ("AdamW", {"fused": True}, "cpu", 8),  # Reads and writes parameter, gradient and both moments at once.
    ],
)
def test_what_a_step_reads_and_writes(name, arguments, device_type, moved):
    assert optimizer_costs(name, arguments, device_type).moved == pytest.approx(moved, abs=0.001)


def test_an_optimizer_in_several_kernels_moves_more():
    assert optimizer_costs("AdamW").moved > 2 * optimizer_costs("AdamW", {"fused": True}).moved


def test_the_simplest_of_those_that_are_as_fast_is_taken(monkeypatch):
    asked = request_for("gpt2", 1)
    made = {"backend": "single", "family": "one", "trace": asked.trace((), (), None)}
    found = [
        Estimate("quickest", rank=3, **made, accumulation=100),
        Estimate("nearly", rank=2, **made, accumulation=102),
        Estimate("simplest", rank=1, **made, accumulation=105),
    ]
    monkeypatch.setattr("drivetrain_planner.choosing.ask", lambda request: (found, []))
    order = choose(asked, find("cpu")).fitting
    assert [each.estimate.title for each in order] == ["nearly", "quickest", "simplest"]


def test_variants_are_asked_for_where_one_could_be_chosen(monkeypatch):
    request, machine = request_for("gpt2", 1), find("cpu")
    made = {"backend": "single", "family": "one", "trace": request.trace((), (), None)}
    asked = []

    def variants_of(title, *offered):
        def variants(time, memory):
            asked.append(title)
            assert (time, memory) == (machine, round(SHARE * machine.memory))
            for each in offered:
                asked.append(each.title)
                yield each

        return variants

    def estimate(title, **given):
        return Estimate(title, rank=1, **{**made, **given})

    quicker = estimate("quicker", accumulation=100, idle=0.1)
    found = [
        estimate("waits", accumulation=100, idle=0.5, variants=variants_of("waits", quicker, estimate("not needed"))),
        # Without waiting it would take as long as what fits.
        estimate("hopeless", accumulation=400, idle=0.5, variants=variants_of("hopeless", estimate("never"))),
        estimate("fits", accumulation=190),
        estimate("too large", memory={"all": 2**50}, accumulation=50, variants=variants_of("too large")),
    ]
    monkeypatch.setattr("drivetrain_planner.choosing.ask", lambda request: (found, []))
    choice = choose(request, machine)
    assert [each.estimate.title for each in choice.fitting] == ["quicker", "fits", "hopeless"]
    assert [each.estimate.title for each in choice.rejected] == ["too large"]
    assert asked == ["too large", "waits", "quicker"]


def test_variants_that_cannot_be_estimated_leave_the_layout(monkeypatch):
    request = request_for("gpt2", 1)

    def variants(time, memory):
        raise RuntimeError("no idea")

    own = Estimate("own", "single", "one", 1, trace=request.trace((), (), None), idle=0.5, variants=variants)
    monkeypatch.setattr("drivetrain_planner.choosing.ask", lambda request: ([own], []))
    choice = choose(request, find("cpu"))
    assert choice.best.estimate.title == "own"
    assert choice.complaints == ["variants of own could not be estimated: RuntimeError('no idea')"]


def test_state_of_another_shape_is_refused():
    with pytest.raises(UsageError, match="which the planner does not count"):
        optimizer_costs("Adafactor")


def test_machines(tmp_path):
    assert find("h100x8").devices == 8
    text = "base: rtx4090\ndevices: 2\nmemory: 48GiB\ninside: {latency: 1e-5, bandwidth: 2e10}\n"
    (tmp_path / "mine.yaml").write_text(text)
    mine = find(str(tmp_path / "mine.yaml"))
    assert (mine.memory, mine.devices, mine.inside.bandwidth, mine.flops) == (48 * 2**30, 2, 2e10, 60e12)
    with pytest.raises(UsageError, match="there is no machine 'h1000'"):
        find("h1000")
