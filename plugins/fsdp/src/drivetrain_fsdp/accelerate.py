"""Converts Accelerate's section ``fsdp_config`` and the arguments of ``FullyShardedDataParallelPlugin``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from drivetrain.api.accelerate import Rule, flag, section_from_arguments, whole
from drivetrain_fsdp.config import FSDPConfig

_HYBRID = (
    "write mesh: {{dp_replicate: <machines>, dp_shard: <ranks of one machine>}} and fsdp: {{reshard_after_forward: {}}}"
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Strategies in the order of their numbers in old files, from 1."""


def _word(value: Any) -> str:
    """A name in upper case, from text, a number, or a member of one of torch's enums."""
    return str(value).rpartition(".")[2].upper()


def _strategy(value: Any) -> Mapping[str, Any]:
    """FSDP1's strategies, as names or numbers."""
    name = _word(value)
    if name.isdecimal() and 1 <= int(name) <= len(_STRATEGIES):
        name = _STRATEGIES[int(name) - 1]
    if name == "NO_SHARD":
        raise ValueError("write distributed_type: ddp")
    if name.startswith("HYBRID"):
        raise ValueError(_HYBRID.format("false" if name.endswith("2") else "true"))
    if name not in _STRATEGIES:
        raise ValueError(f"known are {', '.join(_STRATEGIES)}")
    return {"fsdp.reshard_after_forward": name == "FULL_SHARD"}


def _reshard(value: Any) -> Mapping[str, Any]:
    """A truth value in version 2, a strategy in version 1."""
    try:
        return {"fsdp.reshard_after_forward": flag(value)}
    except ValueError:
        return _strategy(value)


def _policy(value: Any) -> Mapping[str, Any]:
    if _word(value) in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
        return {}
    raise ValueError("the blocks of the model are units in any case; choose them by fsdp: {transformer_layer_cls: ...}")


def _ahead(value: Any) -> Mapping[str, Any]:
    return {"fsdp.forward_prefetch": 1} if flag(value) else {}


def _behind(value: Any) -> Mapping[str, Any]:
    if _word(value) in ("BACKWARD_PRE", "1"):
        return {}
    raise ValueError("the next unit is always gathered while the present one computes")


RULES: Mapping[str, Rule] = {
    "fsdp_version": Rule(why="torch's fully_shard (FSDP2) trains, whichever version the other keys are of"),
    "fsdp_reshard_after_forward": Rule(into=_reshard, changes_results=False),
    "fsdp_sharding_strategy": Rule(into=_strategy, changes_results=False),
    "fsdp_cpu_offload": Rule(to="fsdp.cpu_offload", convert=flag),
    "fsdp_offload_params": Rule(to="fsdp.cpu_offload", convert=flag),
    "fsdp_auto_wrap_policy": Rule(into=_policy, changes_results=False),
    "fsdp_transformer_layer_cls_to_wrap": Rule(to="fsdp.transformer_layer_cls"),
    "fsdp_min_num_params": Rule(to="fsdp.min_num_params", convert=whole, nothing=(0,)),
    "fsdp_backward_prefetch": Rule(into=_behind, changes_results=False),
    "fsdp_backward_prefetch_policy": Rule(into=_behind, changes_results=False),
    "fsdp_forward_prefetch": Rule(into=_ahead),
    "fsdp_activation_checkpointing": Rule(to="fsdp.activation_checkpointing", convert=flag),
    "fsdp_activation_checkpointing_offload": Rule(
        instead="recomputed activations stay on the device", nothing=(False, "false"), changes_results=False
    ),
    "fsdp_state_dict_type": Rule(why="a checkpoint is always written in shards and loads under any backend"),
    "fsdp_use_orig_params": Rule(why="parameters always keep their names"),
    "fsdp_sync_module_states": Rule(why="every rank always starts from the same values"),
    "fsdp_cpu_ram_efficient_loading": Rule(
        why="a model built under accelerator.init_empty_weights() is filled shard by shard, one built whole is cut"
    ),
}
"""Conversion rules by key of ``fsdp_config``."""


_A_FUNCTION = "name a function that gives the units in the configuration: fsdp: {wrap: 'package.module:function'}"


def _policy_of(value: Any) -> Mapping[str, Any]:
    """Convert a wrapping policy of torch, whose arguments select the units."""
    keywords = value.keywords if isinstance(value, functools.partial) else {}
    if "transformer_layer_cls" in keywords:
        names = sorted(each.__name__ for each in keywords["transformer_layer_cls"])
        return {"fsdp.transformer_layer_cls": tuple(names)}
    if "min_num_params" in keywords:
        return {"fsdp.min_num_params": int(keywords["min_num_params"])}
    if callable(value):
        raise ValueError(_A_FUNCTION)  # noqa: TRY004 - the rules report ValueErrors
    return _policy(value)


def _offloads(value: Any) -> bool:
    """Convert a boolean, or torch's ``CPUOffload`` or ``CPUOffloadPolicy``, distinguished by their names."""
    kind = type(value).__name__
    if kind == "CPUOffload":
        return bool(value.offload_params)
    return kind == "CPUOffloadPolicy" or (kind != "OffloadPolicy" and flag(value))


_ARGUMENTS: Mapping[str, Rule] = {
    **{key.removeprefix("fsdp_"): rule for key, rule in RULES.items()},
    "fsdp_version": RULES["fsdp_version"],
    "transformer_cls_names_to_wrap": RULES["fsdp_transformer_layer_cls_to_wrap"],
    "auto_wrap_policy": Rule(into=_policy_of),
    "cpu_offload": Rule(to="fsdp.cpu_offload", convert=_offloads),
    "mixed_precision_policy": Rule(instead="write Accelerator(mixed_precision='bf16')"),
    "ignored_modules": Rule(instead="freeze them, or keep them outside of the model that is prepared"),
    "param_init_fn": Rule(instead="construct the model in `with accelerator.init_empty_weights():`"),
    "limit_all_gathers": Rule(why="FSDP2 bounds what is gathered in any case"),
    "state_dict_config": RULES["fsdp_state_dict_type"],
    "optim_state_dict_config": RULES["fsdp_state_dict_type"],
}
"""Conversion rules by argument of the class."""


def FullyShardedDataParallelPlugin(**given: Any) -> FSDPConfig:  # noqa: N802 (the name that scripts import)
    """The section ``fsdp:`` from the arguments of Accelerate's class of this name.

    For ``Accelerator(fsdp_plugin=...)``.

    Args:
        given: ``fsdp_version``, ``sharding_strategy``, ``reshard_after_forward``, ``auto_wrap_policy`` (a name, or
            torch's policies in a ``functools.partial``), ``transformer_cls_names_to_wrap``, ``min_num_params``,
            ``cpu_offload``, ``activation_checkpointing``, ``forward_prefetch``, ... as there; text, numbers and
            members of torch's enums alike.

    Raises:
        UsageError: arguments that are unknown or unsupported, with what to write instead.
    """
    return section_from_arguments("FullyShardedDataParallelPlugin", given, _ARGUMENTS, "fsdp", FSDPConfig)
