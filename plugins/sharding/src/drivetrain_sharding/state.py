"""Joins the ``extra`` state of ranks that hold different parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def joined_extra(extra: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Join the ``extra`` state of the ranks of a group, each for its own parameters. Collective over the group.

    Mappings are joined, level by level; of other values the last rank's is taken.
    """
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, extra, group=group)
    joined: dict[str, Any] = _joined(everyones)
    return joined


def _joined(parts: Sequence[Any]) -> Any:
    if not all(isinstance(part, dict) for part in parts):
        return parts[-1]
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: _joined([part[key] for part in parts if key in part]) for key in keys}
