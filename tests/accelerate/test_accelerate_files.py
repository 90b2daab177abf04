"""Accelerate's files and commands as they stand: its templates, the files of Hugging Face's pages, real launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drivetrain.config import load_config
from drivetrain.config.accelerate_file import judge_file
from drivetrain.errors import ConfigError
from drivetrain.registry import get_registry

BIN = Path(sys.executable).parent
LAUNCHERS = ("DRIVETRAIN_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "CUDA_", "ZE_")

FSDP_1 = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
}
FSDP_2 = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_version": 2,
}
ASKED = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
}
"""What `accelerate config` writes into every file."""


def mesh(**sizes):
    axes = {f"parallelism_config_{axis}_size": sizes.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp", "cp")}
    return {"parallelism_config": axes}


FILES = {
    # examples/config_yaml_templates
    "single_accelerator": {"distributed_type": "NO", "mixed_precision": "bf16"},
    "multi_gpu": {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 2},
    "multi_xpu": {"distributed_type": "MULTI_XPU", "mixed_precision": "bf16", "num_processes": 2},
    "multi_node": {
        "distributed_type": "MULTI_GPU",
        "machine_rank": 0,
        "main_process_ip": "1234",
        "main_process_port": 9999,
        "num_machines": 2,
        "num_processes": 8,
        "rdzv_backend": "static",
        "same_network": False,
    },
    "deepspeed": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "../templates/zero_stage1.json", "zero3_init_flag": False},
        "num_processes": 2,
    },
    "fsdp": {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2, "fsdp_config": FSDP_1},
    # examples/slurm, examples/torch_native_parallelism and tests/test_configs
    "context_parallel": {**ASKED, "distributed_type": "FSDP", "fsdp_config": FSDP_2, **mesh(dp_shard=2, cp=4)},
    "hybrid": {**ASKED, "distributed_type": "FSDP", "fsdp_config": FSDP_2, **mesh(dp_replicate=2, dp_shard=2, tp=2)},
    "mpi": {
        **ASKED,
        "distributed_type": "MULTI_CPU",
        "use_cpu": True,
        "ipex_config": {"ipex": True},
        "mpirun_config": {"mpirun_ccl": "1", "mpirun_hostfile": "/home/user/hostfile"},
        "num_machines": 4,
        "main_process_ip": "127.0.0.1",
        "num_processes": 16,
    },
    "megatron": {
        "distributed_type": "MEGATRON_LM",
        "num_processes": 4,
        "megatron_lm_config": {
            "megatron_lm_tp_degree": 2,
            "megatron_lm_sequence_parallelism": True,
            "megatron_lm_pp_degree": 2,
            "megatron_lm_num_micro_batches": 4,
            "megatron_lm_recompute_activations": False,
            "megatron_lm_use_distributed_optimizer": True,
        },
    },
    "without_prefixes": {"distributed_type": "FSDP", "fsdp_config": {"version": 2, "offload_params": True}},
}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a file from a folder beside the one in which DeepSpeed's is, with warnings as errors."""
    here, templates = tmp_path / "work", tmp_path / "templates"
    here.mkdir()
    templates.mkdir()
    (templates / "zero_stage1.json").write_text('{"zero_optimization": {"stage": 1}}')
    monkeypatch.chdir(here)

    def run(values):
        Path("default_config.yaml").write_text(yaml.safe_dump(values))
        return load_config("default_config.yaml", environ={})

    return run


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_file_is_in_one_pile_and_it_loads(load, name):
    values = FILES[name]
    written = {f"{key}.{inner}" if isinstance(value, dict) else key
               for key, value in values.items() for inner in (value if isinstance(value, dict) else ("",))}  # fmt: skip
    verdicts = judge_file(values, get_registry())
    assert sorted(verdict.key for verdict in verdicts) == sorted(written)
    assert not [verdict for verdict in verdicts if verdict.pile == "not supported"]
    loaded = load(values)
    assert loaded.config.distributed_type == get_registry().resolve(values["distributed_type"])


def test_what_the_files_say_arrives(load):
    assert load(FILES["deepspeed"]).section == {"config_file": "../templates/zero_stage1.json"}
    assert load(FILES["without_prefixes"]).section == {"cpu_offload": True}
    assert load(FILES["hybrid"]).config.mesh.sizes() == {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
    assert load(FILES["megatron"]).section == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "num_micro_batches": 4,
        "sequence_parallel": True,
        "data_parallel": "zero1",
    }


TYPES = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU"),
    *("MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "TPU", "MEGATRON_LM"),
)
"""Members of Accelerate's ``DistributedType``, and ``TPU`` of older files."""


@pytest.mark.parametrize("name", TYPES)
def test_every_distributed_type_has_a_backend(name):
    assert get_registry().resolve(name) in get_registry().names()


def test_fp8_stops_and_says_what_to_write(load):
    with pytest.raises(ConfigError, match="'fp8' is not supported; write bf16"):
        load({"distributed_type": "NO", "mixed_precision": "fp8", "fp8_config": {"backend": "TE", "margin": 0}})


def test_what_another_engine_is_told_does_not_stop_a_run(load):
    other = {"megatron_lm_config": {"megatron_lm_eod_mask_loss": True}}
    with pytest.warns(UserWarning, match="eod_mask_loss: true is not supported; set the labels"):
        assert load({"distributed_type": "FSDP", **other}).config.distributed_type == "fsdp"
    with pytest.raises(ConfigError, match="labels that shall not count to -100"):
        load({"distributed_type": "MEGATRON_LM", **other})


# ---- real launches ----------------------------------------------------------------------------------------------

TRAIN = """
import json, sys, torch
from torch import nn
from drivetrain import Accelerator

class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.dense(x))

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(BertLayer(), BertLayer(), nn.Linear(8, 1))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loss = model(torch.ones(4, 8)).float().square().mean()
accelerator.backward(loss)
optimizer.step()
state = [str(accelerator.distributed_type), accelerator.num_processes, accelerator.mixed_precision, loss.item()]
if accelerator.is_main_process:
    print(json.dumps(state))
accelerator.end_training()
"""


def launch(folder, *arguments, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    done = subprocess.run(
        [BIN / "drivetrain", "launch", *map(str, arguments)],
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_files_of_accelerate_start_a_run(tmp_path):
    """That of `accelerate config` on a CPU, and that of Hugging Face's page "Accelerate", which shards."""
    (tmp_path / "train.py").write_text(TRAIN)
    page = {
        **FSDP_1,
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
    }
    del page["fsdp_backward_prefetch"], page["fsdp_activation_checkpointing"]
    files = {
        "cpu": {**ASKED, "distributed_type": "MULTI_CPU", "mixed_precision": "no", "num_processes": 2, "use_cpu": True},
        "page": {
            **ASKED,
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "num_processes": 2,
            "fsdp_config": page,
        },
    }
    found = {}
    for name, values in files.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**values, "num_processes": 2}))
        found[name] = json.loads(launch(tmp_path, "--config_file", file, "--cpu", "train.py").stdout)
    assert found["cpu"][:3] == ["ddp", 2, "no"]
    assert found["page"][:3] == ["fsdp", 2, "bf16"]
    # One loss of about 0.1 in float32 and in bfloat16, which has 8 bits: a few parts in a hundred.
    assert found["page"][3] == pytest.approx(found["cpu"][3], rel=0.05)


SEE = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(('CUDA_', 'ZE_'))}))"


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        # The page "Accelerator selection": which, in which order, none at all, and by which numbering.
        ({"CUDA_VISIBLE_DEVICES": "0,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["--num_processes", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, ["--num_processes=2"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"ZE_AFFINITY_MASK": "2,0", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}, ["--num_processes", "2"]),
    ],
)
@pytest.mark.gate("variables0-*", "variables3-*")
def test_commands_of_the_page_on_selection(tmp_path, variables, arguments):
    (tmp_path / "trainer-program.py").write_text(SEE)
    done = launch(tmp_path, *arguments, "trainer-program.py", **variables)
    assert json.loads(done.stdout) == variables
    assert ("on 2 processes" if arguments else "on 1 process") in done.stderr
