"""Normalizes keys of DeepSpeed's dictionary: deprecated and alternative names become the one that the section uses."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from drivetrain_deepspeed.jsonfile import JsonFile, Keys, read_json

_OF_STAGE_3 = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
    *("max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
    *("use_all_reduce_for_fetch_params", "allgather_sequential"),
)
_ZERO = "zero_optimization"
_NAMES: Mapping[Keys, Keys] = {
    ("bfloat16",): ("bf16",),
    **{(_ZERO, name): (_ZERO, f"stage3_{name}") for name in _OF_STAGE_3},
    (_ZERO, "stage3_gather_fp16_weights_on_model_save"): (_ZERO, "stage3_gather_16bit_weights_on_model_save"),
}
_SWITCHES: Mapping[Keys, Keys] = {
    (_ZERO, "cpu_offload"): (_ZERO, "offload_optimizer"),
    (_ZERO, "cpu_offload_param"): (_ZERO, "offload_param"),
}
"""Older names that turn on what has keys of its own today."""


def read_settled(path: str) -> JsonFile:
    """A file with one name for each place, lines included. Raises ``ValueError``: unreadable, or two names of one."""
    file = read_json(path)
    lines = dict(file.lines)
    for old, new in {**_NAMES, **_SWITCHES}.items():
        lines |= {(*new, *keys[len(old) :]): line for keys, line in file.lines.items() if keys[: len(old)] == old}
    return replace(file, values=settled(file.values), lines=lines)


def settled(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same dictionary with one name for each place.

    Raises:
        ValueError: two names of one place.
    """
    result = deepcopy(dict(values))
    for old, new in {**_NAMES, **_SWITCHES}.items():
        holder = result if len(old) == 1 else result.get(_ZERO)
        if not isinstance(holder, dict) or old[-1] not in holder:
            continue
        value = holder.pop(old[-1])
        if old in _SWITCHES and not value:
            continue
        if new[-1] in holder:
            raise ValueError(f"'{'.'.join(old)}' and '{'.'.join(new)}' are two names of one key; keep one")
        holder[new[-1]] = {"device": "cpu"} if old in _SWITCHES else value
    return result
