"""Names that scripts import from Accelerate: they work, or say what to write instead."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import Accelerator, DataLoaderDispatcher, DataLoaderShard, ParallelismConfig, load_config, utils
from drivetrain.compat.absent import INSTEAD
from drivetrain.errors import AbsentNameError, UsageError
from drivetrain.registry import pip_line
from drivetrain.utils import clear_environment, convert_outputs_to_fp32, convert_to_fp32, patch_environment
from drivetrain_testing import spawn


def test_variables_come_and_go(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    found = []

    def fails():
        with patch_environment(kept=1, new="x"):
            found.extend([os.environ["KEPT"], os.environ["NEW"]])
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fails()
    assert found == ["1", "x"]
    assert (os.environ["KEPT"], "NEW" in os.environ) == ("before", False)
    with clear_environment():
        assert not os.environ
        os.environ["NEW"] = "x"
    assert (os.environ["KEPT"], "NEW" in os.environ) == ("before", False)


def double(x):
    return {"half": x.to(torch.bfloat16) * 2, "count": x.long(), "name": "kept"}


def test_outputs_become_float32_wherever_they_are():
    forward = convert_outputs_to_fp32(double)
    assert forward.__name__ == "double"
    for function in (forward, pickle.loads(pickle.dumps(forward))):
        found = function(torch.ones(2))
        assert (found["half"].dtype, found["count"].dtype, found["name"]) == (torch.float32, torch.int64, "kept")
    assert convert_to_fp32([torch.ones(1, dtype=torch.float16)])[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("is_rich_available", True),
        ("is_pytest_available", True),
        ("is_comet_ml_available", False),
        ("is_megatron_lm_available", None),
        ("is_deepspeed_available", find_spec("deepspeed") is not None),
        ("is_mlu_available", False),
        ("is_cuda_available", torch.cuda.is_available()),
        ("is_bf16_available", None),
        ("is_fp8_available", False),
        ("is_torch_distributed_available", True),
        ("is_torch_xla_available", None),
    ],
)
def test_what_is_available_is_answered_with_any_of_accelerates_arguments(name, expected):
    answer = getattr(utils, name)()
    assert answer is expected if expected is not None else isinstance(answer, bool)


def test_arguments_of_probes_and_names_of_nobody(monkeypatch, tmp_path):
    assert utils.is_npu_available(check_device=True) is False
    assert utils.is_mps_available(min_version="1.12") in (True, False)
    assert utils.is_torch_xla_available(check_is_tpu=True) is False
    with pytest.raises(AttributeError, match="no attribute 'is_nothing_available'"):
        _ = utils.is_nothing_available
    (tmp_path / "comet_ml").mkdir()  # as trackers leave behind
    monkeypatch.syspath_prepend(tmp_path)
    assert utils.is_comet_ml_available() is False


@pytest.mark.parametrize("name", INSTEAD)
def test_a_name_without_a_meaning_says_what_to_write(name):
    with pytest.raises(AbsentNameError, match="drivetrain has no") as caught:
        getattr(utils, name)
    assert isinstance(caught.value, ImportError)
    assert caught.value.cure.endswith(".") or ":" in caught.value.cure
    assert not any(name in dir(module) for module in (drivetrain, utils))


def test_a_name_of_an_engine_that_is_not_installed_names_the_extra(monkeypatch):
    monkeypatch.setattr("drivetrain.registry.known_extras", lambda: ("warp",))
    with pytest.raises(ImportError, match=rf"{re.escape(pip_line('NAME'))}, NAME one of warp"):
        from drivetrain.utils import WarpPlugin  # noqa: F401


def loaders(dispatch):
    accelerator = Accelerator(cpu=True, dataloader_config=drivetrain.DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    return isinstance(loader, DataLoaderShard), isinstance(loader, DataLoaderDispatcher)


def test_a_prepared_loader_is_of_the_kind_that_it_is():
    assert spawn(loaders, 2, False) == [(True, False)] * 2
    assert spawn(loaders, 2, True) == [(False, True)] * 2
    assert not isinstance(DataLoader([1]), DataLoaderShard)
    with pytest.raises(UsageError, match=r"a DataLoaderShard is not made by hand.*accelerator\.prepare"):
        DataLoaderShard([1, 2])


def meshed(**sizes):
    accelerator = Accelerator(
        cpu=True, distributed_type="fsdp", parallelism_config=ParallelismConfig(**sizes), config=load_config(environ={})
    )
    return accelerator.backend.topology.mesh.sizes


def test_sizes_of_the_mesh_come_from_the_script():
    assert [mesh["dp_shard"] for mesh in spawn(meshed, 2, dp_shard_size=2, dp_replicate_size=1)] == [2, 2]
    assert [mesh["dp_replicate"] for mesh in spawn(meshed, 2, dp_shard_size=1, dp_replicate_size=2)] == [2, 2]


def test_sizes_that_cannot_be_say_why():
    with pytest.raises(UsageError, match=r"dp_shard_size=1, and mesh\.dp_shard is 2 \(flag"):
        Accelerator(
            parallelism_config=ParallelismConfig(dp_shard_size=1),
            config=load_config(overrides={"mesh.dp_shard": 2}, environ={}),
        )
    for wrong, words in (
        ({"sp_size": 2}, "Write cp_size"),
        ({"tp_size": 0}, "at least 1"),
        ({"tp_handler": 1}, "section"),
    ):
        with pytest.raises(UsageError, match=words):
            ParallelismConfig(**wrong)
    with pytest.raises(UsageError, match="Accelerator takes no parallelism_config like this"):
        Accelerator(parallelism_config={"tp_size": 2})


def test_modules_are_attributes_after_the_import_of_the_package_alone():
    program = "import drivetrain; print(drivetrain.utils.set_seed.__name__, drivetrain.state.PartialState.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set_seed PartialState\n"
    with pytest.raises(AttributeError, match="module 'drivetrain' has no attribute 'nothing'"):
        _ = drivetrain.nothing


def test_classes_of_trackers_are_where_scripts_import_them():
    from drivetrain.tracking import JSONLTracker, WandBTracker

    assert (JSONLTracker.name, WandBTracker.name) == ("jsonl", "wandb")
    with pytest.raises(ImportError, match="cannot import name 'NoTracker'"):
        from drivetrain.tracking import NoTracker  # noqa: F401
