"""Accelerate's section ``megatron_lm_config`` and its class ``MegatronLMPlugin``."""

from __future__ import annotations

import pytest

from drivetrain.api import ConfigError, UsageError
from drivetrain.api.programs import load_config
from drivetrain.utils import MegatronLMPlugin
from drivetrain_megatron.accelerate import RULES


def load(tmp_path, *lines):
    file = tmp_path / "config.yaml"
    inner = "".join(f"  megatron_lm_{line}\n" for line in lines)
    file.write_text(f"distributed_type: MEGATRON_LM\nmegatron_lm_config:\n{inner}")
    return load_config(file, environ={})


@pytest.mark.filterwarnings("error")
def test_degrees_and_the_optimizer_are_carried_over(tmp_path):
    loaded = load(
        tmp_path, "tp_degree: 2", "pp_degree: 4", "num_micro_batches: 8", "sequence_parallelism: 'true'",
        "use_distributed_optimizer: true", "recompute_activations: false", "context_parallel_size: 1",
    )  # fmt: skip
    assert loaded.config.distributed_type == "megatron"
    assert loaded.section == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 4,
        "num_micro_batches": 8,
        "sequence_parallel": True,
        "data_parallel": "zero1",
    }
    assert load(tmp_path, "use_custom_fsdp: true").section == {"data_parallel": "fsdp"}
    assert load(tmp_path, "gradient_clipping: 1.0").section == {"gradient_clipping": 1.0}


def test_what_would_change_results_stops(tmp_path):
    with pytest.raises(ConfigError, match="no mesh axis for experts"):
        load(tmp_path, "expert_model_parallel_size: 2")
    with pytest.warns(UserWarning, match=r"call torch\.utils\.checkpoint"):
        assert load(tmp_path, "recompute_activations: true").section == {}


def test_every_key_of_the_section_is_accelerates():
    assert all(key.startswith("megatron_lm_") for key in RULES)
    assert len(RULES) == 27


def test_arguments_of_accelerates_class_become_the_section():
    section = MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4, use_distributed_optimizer=True)
    assert section.model_dump(exclude_unset=True) == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "num_micro_batches": 4,
        "data_parallel": "zero1",
    }
    with pytest.raises(UsageError, match=r"eod_mask_loss=True is not supported; .*no argument 'seq_len'"):
        MegatronLMPlugin(eod_mask_loss=True, seq_len=4)
    with pytest.raises(UsageError, match=r"write mesh\.cp: 2 in the configuration"):
        MegatronLMPlugin(context_parallel_size=2)
