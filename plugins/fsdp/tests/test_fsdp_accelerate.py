"""Accelerate's section ``fsdp_config``, versions 1 and 2, and its class ``FullyShardedDataParallelPlugin``."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from drivetrain import Accelerator
from drivetrain.api import ConfigError, UsageError
from drivetrain.api.programs import load_config
from drivetrain.utils import FullyShardedDataParallelPlugin
from drivetrain_testing import spawn

VERSION_2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1e5
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_processes: 2
"""


def load(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_config(file, environ={})


def section(tmp_path, *lines):
    inner = "".join(f"  {line}\n" for line in lines)
    return load(tmp_path, f"distributed_type: FSDP\nfsdp_config:\n{inner}").section


@pytest.mark.filterwarnings("error")
def test_version_2_is_carried_over(tmp_path):
    loaded = load(tmp_path, VERSION_2)
    assert loaded.config.distributed_type == "fsdp"
    assert loaded.section == {
        "activation_checkpointing": True,
        "min_num_params": 100000,
        "cpu_offload": True,
        "reshard_after_forward": False,
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("strategy", "reshard"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("1", True), ("2", False)]
)
def test_strategies_of_version_1(tmp_path, strategy, reshard):
    assert section(tmp_path, f"fsdp_sharding_strategy: {strategy}") == {"reshard_after_forward": reshard}
    assert section(tmp_path, f"fsdp_reshard_after_forward: {strategy}") == {"reshard_after_forward": reshard}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fsdp_sharding_strategy: NO_SHARD", "write distributed_type: ddp"),
        ("fsdp_sharding_strategy: HYBRID_SHARD", "write mesh: {dp_replicate"),
        ("fsdp_auto_wrap_policy: NO_WRAP", "the blocks of the model are units"),
        ("fsdp_backward_prefetch: BACKWARD_POST", "the next unit is always gathered"),
        ("fsdp_activation_checkpointing_offload: true", "stay on the device"),
    ],
)
def test_what_only_costs_time_or_memory_is_mentioned(tmp_path, line, words):
    with pytest.warns(UserWarning, match=words):
        assert section(tmp_path, line) == {}


def test_what_is_unknown_stops_with_a_guess(tmp_path):
    with pytest.raises(ConfigError, match=r":3:\d+: fsdp_config\.fsdp_offload_param: .*mean 'fsdp_offload_params'"):
        section(tmp_path, "fsdp_offload_param: true")


@pytest.mark.filterwarnings("error")
def test_units_are_named_as_there(tmp_path):
    lines = ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap: Block,Head")
    assert section(tmp_path, *lines) == {"transformer_layer_cls": "Block,Head"}


# ---- FullyShardedDataParallelPlugin ---------------------------------------------------------------------------------


class Block(torch.nn.Linear):
    pass


class Head(torch.nn.Linear):
    pass


def given(**arguments):
    return FullyShardedDataParallelPlugin(**arguments).model_dump(exclude_unset=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("arguments", "section"),
    [
        ({}, {}),
        ({"fsdp_version": 2, "reshard_after_forward": False, "cpu_offload": True}, "reshard no, offload"),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "cpu_offload": CPUOffload(True)}, "reshard no, offload"),
        ({"reshard_after_forward": "SHARD_GRAD_OP", "cpu_offload": CPUOffloadPolicy()}, "reshard no, offload"),
        ({"cpu_offload": OffloadPolicy(), "use_orig_params": True, "limit_all_gathers": True}, {"cpu_offload": False}),
        (
            {"auto_wrap_policy": partial(transformer_auto_wrap_policy, transformer_layer_cls={Head, Block})},
            {"transformer_layer_cls": ("Block", "Head")},
        ),
        (
            {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]},
            {"transformer_layer_cls": ("Block",)},
        ),
        (
            {"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=1000)},
            {"min_num_params": 1000},
        ),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE, "activation_checkpointing": True}, "checkpointing"),
    ],
)
def test_arguments_of_accelerates_class_become_the_section(arguments, section):
    spelled = {
        "reshard no, offload": {"reshard_after_forward": False, "cpu_offload": True},
        "checkpointing": {"activation_checkpointing": True},
    }
    assert given(**arguments) == (spelled[section] if isinstance(section, str) else section)


def test_arguments_that_cannot_be_honoured_say_what_to_write():
    with pytest.raises(UsageError, match=r"Accelerator\(mixed_precision='bf16'\).*no argument 'shard'") as caught:
        given(mixed_precision_policy=torch.float16, shard=1)
    assert str(caught.value).startswith("FullyShardedDataParallelPlugin: ")
    with pytest.raises(UsageError, match=r"fsdp: \{wrap: 'package"):
        given(auto_wrap_policy=lambda **_: True)
    with pytest.warns(UserWarning, match=r"sharding_strategy=.*changes nothing: write distributed_type: ddp"):
        assert given(sharding_strategy="NO_SHARD") == {}


def test_what_is_advised_instead_of_arguments_that_cannot_be_honoured_is_taken():
    two_kinds = {"min_num_params": 1000, "transformer_cls_names_to_wrap": ["Block"]}
    with pytest.raises(UsageError, match=r"^FullyShardedDataParallelPlugin: .*\. Change the arguments of FullySharded"):
        given(**two_kinds)
    assert given(min_num_params=1000) == {"min_num_params": 1000}
    assert given(transformer_cls_names_to_wrap=["Block"]) == {"transformer_layer_cls": ("Block",)}
    with pytest.raises(UsageError, match=r"Leave it out of FullyShardedDataParallelPlugin"):
        given(cpu_offload=True, param_init_fn=print)
    assert given(cpu_offload=True) == {"cpu_offload": True}


def trained(arguments):
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(**arguments)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(Block(4, 4), Block(4, 4), Head(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator.distributed_type, accelerator.fsdp_plugin.transformer_layer_cls, losses


def plain():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(4, 4), Block(4, 4), Head(4, 1))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_script_that_brings_the_class_trains_sharded():
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    for name, units, losses in spawn(trained, 2, {"fsdp_version": 2, "auto_wrap_policy": policy}):
        assert (name, units) == ("fsdp", ("Block",))
        assert losses == pytest.approx(plain(), rel=1e-5)  # float32, sums in another order
