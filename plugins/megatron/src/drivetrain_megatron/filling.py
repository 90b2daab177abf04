"""Materializes parameters and buffers that are on the meta device, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.api import Topology, UsageError
from drivetrain_sharding import Recording, recording_of, temporary


@dataclass(frozen=True)
class _Empty:
    """A tensor without memory: all of its names, itself as it was constructed, and where that was recorded."""

    names: list[str]
    made: Tensor
    recording: Recording


@final
class Filling:
    """Tensors of one module that need values. Construct it before the module is changed.

    Args:
        module: as it was constructed.

    Raises:
        UsageError: tensors on meta that were made outside of ``init_context``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = _empty(module.named_parameters(remove_duplicate=False))
        self._buffers = _empty(module.named_buffers(remove_duplicate=False))

    def __bool__(self) -> bool:
        return bool(self._parameters or self._buffers)

    @torch.no_grad()
    def fill(
        self, module: nn.Module, topology: Topology, device: torch.device, part: Callable[[str, Tensor], Tensor]
    ) -> None:
        """Construct each tensor on rank 0, give it to all, and keep this rank's part of it. Collective over all ranks.

        One whole parameter is in memory at a time.

        Args:
            module: with tensors on meta, of the dtypes that they shall have.
            topology: the job.
            device: where the parts are kept.
            part: ``part(name, whole)``, what this rank keeps of a parameter, by its first name.
        """
        for empty in self._buffers:
            now = module.get_buffer(empty.names[0])
            value = _from_rank_zero(empty, topology).to(device, now.dtype, copy=True)
            for name in empty.names:
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, value)
        for empty in self._parameters:
            now = module.get_parameter(empty.names[0])
            whole = _from_rank_zero(empty, topology).to(now.dtype)
            kept = part(empty.names[0], whole)
            parameter = nn.Parameter(kept.to(device, copy=kept is whole), requires_grad=now.requires_grad)
            for name in empty.names:
                path, _, leaf = name.rpartition(".")
                module.get_submodule(path).register_parameter(leaf, parameter)


def _empty(named: Iterable[tuple[str, Tensor]]) -> list[_Empty]:
    found: dict[int, _Empty] = {}
    for name, tensor in named:
        if not tensor.is_meta:
            continue
        if id(tensor) in found:
            found[id(tensor)].names.append(name)
            continue
        recording = recording_of(tensor)
        if recording is None:
            raise UsageError(
                f"{name} lies on the meta device, and how it would have been initialised is not known",
                cure="Construct the model inside of `with accelerator.init_empty_weights():`, without device='meta', "
                "and change its dtype there too.",
            )
        found[id(tensor)] = _Empty([name], tensor.detach(), recording)
    return list(found.values())


def _from_rank_zero(empty: _Empty, topology: Topology) -> Tensor:
    """Broadcast the full tensor from rank 0. Collective over all ranks."""
    full = empty.recording.value(empty.made) if topology.rank == 0 else None
    if topology.world_size == 1 and full is not None:
        return full
    like = empty.made
    num_bytes = like.numel() * like.element_size()
    # As bytes: not every communication backend carries every dtype.
    on_cpu = topology.device == "cpu"
    sent = temporary(num_bytes) if on_cpu else torch.empty(num_bytes, dtype=torch.uint8, device=topology.device)
    whole = sent.view(like.dtype).view(like.shape)
    if full is not None:
        whole.copy_(full)
    if num_bytes:
        dist.broadcast(sent, src=0)
    return whole
