"""Replaces Megatron-Core's process groups by groups of size 1, so that models are built unsharded.

Megatron-Core keeps its groups in variables of one module, which are replaced here; the release is pinned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

_begun: list[tuple[dist.ProcessGroup, Any]] = []
"""The group of this rank while Megatron-Core finds it, and the group of all ranks then."""


def is_begun() -> bool:
    """Whether :func:`begin` was called, :func:`end` was not, and torch's process group is the one of then."""
    return bool(_begun) and dist.is_initialized() and dist.group.WORLD is _begun[0][1]


def snapshot() -> dict[str, Any]:
    """Return Megatron-Core's variables that hold process groups. Not collective."""
    from megatron.core import parallel_state

    return {
        name: value
        for name, value in vars(parallel_state).items()
        # Buffers belong to no group.
        if name.startswith("_") and name.isupper() and not name.endswith("_BUFFER")
    }


def restore(found: Mapping[str, Any]) -> None:
    """Restore the variables of a snapshot. Not collective."""
    from megatron.core import parallel_state

    vars(parallel_state).update(found)


def begin() -> None:
    """Give Megatron-Core process groups of size 1. Needs torch's process group; not collective."""
    from megatron.core import parallel_state

    assert not _begun, "it does already"
    rank = dist.get_rank()
    group = dist.new_group([rank], use_local_synchronization=True)
    _begun.append((group, dist.group.WORLD))
    restore({name: _of_one(name, value, group, rank) for name, value in snapshot().items()})
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # noqa: SLF001 (what initialize_model_parallel calls)
        parallel_state._set_global_memory_buffer()  # noqa: SLF001


def end() -> None:
    """Remove the process groups of size 1, if there are any. Not collective."""
    from megatron.core import parallel_state

    if not _begun:
        return
    if is_begun():
        dist.destroy_process_group(_begun[0][0])
    _begun.clear()
    parallel_state.destroy_model_parallel()


def _of_one(name: str, value: Any, group: dist.ProcessGroup, rank: int) -> Any:
    """Return the value of one variable of Megatron-Core in a job of one rank."""
    if name.endswith("_GROUPS"):
        return type(value)() if isinstance(value, dict) else None
    if "RANKS" in name:
        return [rank]
    if "GROUP" in name and not name.endswith("_GLOO"):
        return group
    return None
