"""Converts Accelerate's section ``megatron_lm_config``; accepts ``MegatronLMPlugin`` with Accelerate's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.api.accelerate import Rule, flag, number, section_from_arguments, whole
from drivetrain_megatron.config import MegatronConfig

_OFF = (False, "false", "False", "no")
_RECOMPUTE = Rule(
    instead="call torch.utils.checkpoint.checkpoint in the model's blocks", nothing=_OFF, changes_results=False
)
_EXPERTS = Rule(instead="there is no mesh axis for experts; leave it at 1", nothing=(1,))


def _in_the_model(what: str) -> Rule:
    return Rule(instead=f"the model is the script's; set its {what} there", nothing=_OFF)


def _distributed_optimizer(value: Any) -> Mapping[str, Any]:
    return {"megatron.data_parallel": "zero1"} if flag(value) else {}


def _custom_fsdp(value: Any) -> Mapping[str, Any]:
    return {"megatron.data_parallel": "fsdp"} if flag(value) else {}


_RULES: Mapping[str, Rule] = {
    "tp_degree": Rule(to="megatron.tensor_parallel_size", convert=whole),
    "pp_degree": Rule(to="megatron.pipeline_parallel_size", convert=whole),
    "num_micro_batches": Rule(to="megatron.num_micro_batches", convert=whole),
    "sequence_parallelism": Rule(to="megatron.sequence_parallel", convert=flag),
    "context_parallel_size": Rule(to="mesh.cp", convert=whole, nothing=(1,)),
    "expert_model_parallel_size": _EXPERTS,
    "expert_tensor_parallel_size": _EXPERTS,
    "decoder_last_pipeline_num_layers": Rule(
        instead="name the modules at which stages begin: megatron: {split_points: [...]}", changes_results=False
    ),
    "use_distributed_optimizer": Rule(into=_distributed_optimizer),
    "use_custom_fsdp": Rule(into=_custom_fsdp),
    "optimizer_cpu_offload": Rule(
        instead="the optimizer's state stays on the device", nothing=_OFF, changes_results=False
    ),
    "overlap_cpu_optimizer_d2h_h2d": Rule(why="it has a meaning only with megatron_lm_optimizer_cpu_offload"),
    "use_precision_aware_optimizer": Rule(instead="states of the optimizer are float32; remove it", nothing=_OFF),
    "gradient_clipping": Rule(to="megatron.gradient_clipping", convert=number, nothing=(0, 0.0)),
    "recompute_activations": _RECOMPUTE,
    "recompute_granularity": _RECOMPUTE,
    "recompute_method": _RECOMPUTE,
    "recompute_num_layers": _RECOMPUTE,
    "attention_backend": _in_the_model("attention"),
    "attention_dropout": _in_the_model("attention_dropout"),
    "hidden_dropout": _in_the_model("hidden_dropout"),
    "attention_softmax_in_fp32": _in_the_model("softmax"),
    "use_rotary_position_embeddings": _in_the_model("position embeddings"),
    "eod_mask_loss": Rule(instead="set the labels that shall not count to -100 in the script", nothing=_OFF),
    "calculate_per_token_loss": Rule(
        instead="sum the loss over tokens and write accelerator.backward(loss_sum, num_items=tokens)", nothing=_OFF
    ),
    "no_load_optim": Rule(
        instead="`drivetrain checkpoint export` takes the model out of a checkpoint; load that file", nothing=_OFF
    ),
    "no_save_optim": Rule(instead="write accelerator.save_model(model, FOLDER)", nothing=_OFF, changes_results=False),
}

RULES: Mapping[str, Rule] = {f"megatron_lm_{key}": rule for key, rule in _RULES.items()}
"""Conversion rules by key of ``megatron_lm_config``."""


def MegatronLMPlugin(**given: Any) -> MegatronConfig:  # noqa: N802 (the name that scripts import)
    """The section ``megatron:`` from the arguments of Accelerate's class of this name.

    For ``Accelerator(megatron_lm_plugin=...)``. Arguments about data, schedules, logging and training steps of
    Megatron-LM's own have no meaning here: the script's loop does all of that.

    Args:
        given: ``tp_degree``, ``pp_degree``, ``num_micro_batches``, ``sequence_parallelism``,
            ``use_distributed_optimizer``, ... as there.

    Raises:
        UsageError: arguments that are not known, or that cannot be honoured, with what to write instead.
    """
    return section_from_arguments("MegatronLMPlugin", given, _RULES, "megatron", MegatronConfig)
