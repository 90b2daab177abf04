"""What the planner says to input that it cannot plan with: one error with what, whose, and what to type next."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from drivetrain.api import UsageError
from drivetrain_planner.commands import plan

TRAIN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, inputs):
        return self.layer(inputs)


class Reading(Net):
    def forward(self, inputs):
        return super().forward(inputs) * inputs.sum().item()


class ReadsWhenMade(Net):
    def __init__(self):
        super().__init__()
        self.scale = float(torch.ones(3).sum())


def wide(width):
    return nn.Linear(width, width)


def no_model():
    return {"a": 1}


number = 3


def batch():
    return torch.ones(8, 64)


def narrow():
    return torch.ones(8, 63)


def named():
    return {"pixels": torch.ones(8, 64)}


def broken():
    return 1 / 0


def words():
    return "words"


def loss(output, batch):
    return output.pow(2).mean()


def many(output, batch):
    return output


def missing(output, batch):
    return output.logits
"""

PARSES = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--lr", required=True)
parser.parse_args()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "parses.py").write_text(PARSES)
    (tmp_path / "wrong.py").write_text("def make(:\n")
    (tmp_path / "needs.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run(*arguments, command="choose"):
    return CliRunner().invoke(plan, [command, *map(str, arguments)])


def refused(*arguments):
    """The error of a command that fails with one."""
    done = run(*arguments)
    assert isinstance(done.exception, UsageError), (done.output, done.exception)
    return str(done.exception)


CPU = ("--machine", "cpu", "--processes", "2")
FED = ("--batch", "train.py:batch", "--loss", "train.py:loss", *CPU)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("train.py:Nett", r"there is no 'Nett' in 'train.py'. Did you mean train.py:Net\?"),
        ("train.py:number", r"'number' in 'train.py' cannot be called. Name a function that returns the model"),
        ("train.py:no_model", r"'train.py:no_model' returned a dict, not a model"),
        ("train.py:wide", r"'train.py:wide' failed: TypeError: wide\(\) missing 1 required positional argument"),
        ("train.py:ReadsWhenMade", r"'train.py:ReadsWhenMade' failed: \w+: .* \(train.py:23\). .* on the device meta"),
        ("trian.py:Net", r"'trian.py' cannot be imported: .*No such file"),
        ("nowhere_at_all:Net", r"'nowhere_at_all' cannot be imported: .* Name a module or a file"),
        ("needs.py:make", r"It imports 'nowhere_to_be_found', which is to be installed"),
        ("wrong.py:make", r"'wrong.py' cannot be imported: SyntaxError"),
        ("parses.py:make", r"'parses.py' cannot be imported: SystemExit: 2.* belongs below `if __name__"),
        ("train.py", r"'train.py' names no model. Write package.module:function or train.py:function"),
        ("lama.json", r"'lama.json' is no file. Write .*config.json of Transformers"),
        ("empty", r"'empty' has no config.json"),
        ("gpt2", r"'gpt2' names no model. .* of the hub, such as Qwen/Qwen3-0.6B"),
    ],
)
def test_models_that_cannot_be_made(folder, model, told):
    assert re.search(told, refused(model, *FED))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("nobody/no-such-model", r"cannot read a configuration of 'nobody/no-such-model': .* needs the network once"),
        ("other.json", r"cannot read a configuration of 'other.json': ValueError: .* Name a config.json that is here"),
    ],
)
def test_configurations_that_transformers_does_not_read(folder, monkeypatch, model, told):
    transformers = pytest.importorskip("transformers")
    asked = []

    def offline(where):
        asked.append(where)
        raise (OSError if "/" in where else ValueError)(f"no {where} without the network\nand so on")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    assert re.search(told, refused(model, *CPU))
    assert asked == [model]


@pytest.mark.parametrize(
    ("batch", "loss", "told"),
    [
        (None, "loss", r"a micro-batch of the model is needed. .* --batch train.py:batch"),
        ("broken", "loss", r"'train.py:broken' failed: ZeroDivisionError: division by zero \(train.py:\d+\)"),
        ("words", "loss", r"the batch holds no tensor with a first dim"),
        (
            "narrow",
            "loss",
            r"Net cannot be traced on this micro-batch: RuntimeError: .*63.* \(train.py:12\). Let --batch",
        ),
        ("named", "loss", r"Net cannot be traced on this micro-batch: TypeError: .*'pixels'.* Let --batch return what"),
        ("batch", None, r"no scalar loss .* has no attribute `loss`. .* --loss train.py:loss_fn"),
        ("batch", "many", r"no scalar loss .* the loss function returned none"),
        ("batch", "missing", r"cannot be traced on this micro-batch: AttributeError: .*'logits'"),
    ],
)
def test_batches_and_losses_that_do_not_belong_to_the_model(folder, batch, loss, told):
    given = [f"--{key}=train.py:{name}" for key, name in (("batch", batch), ("loss", loss)) if name is not None]
    assert re.search(told, refused("train.py:Net", *given, *CPU))


def test_a_forward_that_reads_values_is_told_apart(folder):
    assert "Reading cannot be traced without values" in refused("train.py:Reading", *FED)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--machine", "h1000"), r"there is no machine 'h1000'. Name here, one of h100, .*, or a YAML file"),
        (("--machine", "mine.yaml"), r"mine.yaml cannot be read: .* Name a YAML file, or a machine"),
        (("--machine", "h100x8", "--processes", 12), r"12 processes do not fill machines of 8 devices"),
        (("--nodes", 2, "--processes", 4), r"--nodes and --processes both say .* Leave one of them out"),
        (("--memory", "lots"), r"'lots' is no size. Write 80GB"),
        (("--samples", 4), r"--samples is of the batch that is made .* Leave out --samples, or --batch"),
        (("--optimizer", "Adma"), r"torch.optim has no optimizer 'Adma'. Name one of: .*AdamW"),
        (("--optimizer_args", "{lr: -1}"), r"AdamW cannot be stepped with .*Invalid learning rate"),
        (("--write", "nowhere/train.yaml"), r"there is no folder nowhere for train.yaml"),
        (("--plot", "nowhere/memory.png"), r"there is no folder nowhere for memory.png"),
        (("--write", "train.py"), r"train.py is there already"),
        (
            (*CPU, "--global_batch", 20),
            r"a global batch of 20 is not a multiple of the 8 samples of a micro-batch. Ask for 16 or 24",
        ),
        (
            ("--machine", "cpu", "--processes", 5, "--global_batch", 16),
            r"no layout fits 5 x cpu .*16 is not a multiple of 8 .* Take a global batch that is a multiple of 40",
        ),
        ((*CPU, "--memory", "1KB"), r"no layout fits 2 x cpu \(1000 B each\); the one that holds least, .* > 800 B"),
    ],
)
def test_options_that_cannot_be(folder, options, told):
    fed = ("--batch", "train.py:batch", "--loss", "train.py:loss")
    assert re.search(told, refused("train.py:Net", *fed, *options))


@pytest.mark.parametrize(
    ("wrong", "advised"),
    [
        (("--global_batch", 20), ("--global_batch", 16)),
        (("--processes", 5, "--global_batch", 16), ("--processes", 5, "--global_batch", 40)),
        (("--memory", "1KB"), ("--memory", "1GB")),
        (("--optimizer", "Adma"), ("--optimizer", "AdamW")),
        (("--samples", 4), ()),
    ],
)
def test_what_is_advised_instead_of_options_that_cannot_be_is_planned(folder, wrong, advised):
    fed = ("train.py:Net", *FED[:4], "--machine", "cpu", "--processes", "2")
    refused(*fed, *wrong)
    done = run(*fed, *advised)
    assert done.exit_code == 0, (done.output, done.exception)


def test_no_machines_are_a_usage_error(folder):
    done = run("train.py:Net", *FED[:4], "--nodes", 0)
    assert done.exit_code == 2
    assert "0 is not in the range x>=1" in done.output


def test_nodes_are_filled(folder):
    fed = ("train.py:Net", *FED[:4], "--machine", "h100x2", "--json")
    found = [json.loads(run(*fed, *words, command="memory").stdout) for words in (("--nodes", 2), ("--processes", 4))]
    assert found[0] == found[1]
    assert found[0]["world_size"] == 4


def test_a_machine_that_nobody_named_is_said(folder):
    done = run("train.py:Net", *FED[:4], "--json")
    assert json.loads(done.stdout)["world_size"] == 8
    assert "No machine is named, and none was measured: this is planned for h100x8." in done.stderr
    assert "No machine is named" not in run("train.py:Net", *FED).stderr
