"""Materializes parameters and buffers that were constructed on the meta device, one at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drivetrain.api import Topology, UsageError
from drivetrain_fsdp.shards import Reader, from_rank_zero, part_like, replace_buffer, replace_parameter
from drivetrain_fsdp.weights import WeightFiles, check_shape, complain_about_missing, names_of, saved_name
from drivetrain_sharding import Recording, recording_of


@dataclass(frozen=True)
class _Empty:
    """A tensor on meta: its names, the tensor as constructed, and its recording."""

    names: list[str]
    made: Tensor
    recording: Recording


class Filling:
    """The tensors of one module to be materialized.

    To be created before anything changes the module: a cast or sharded tensor is another one, without a recording.

    Args:
        module: as it was constructed.
        weights: files to read instead of initialising, or ``None``; read only when the module has empty tensors.

    Raises:
        UsageError: tensors on meta that were made outside of ``init_context``.
        CheckpointMismatchError: the files are not those of this module.
    """

    def __init__(self, module: nn.Module, weights: str | None) -> None:
        self._parameters = _empty(dict(module.named_parameters(remove_duplicate=False)))
        self._buffers = _empty(dict(module.named_buffers(remove_duplicate=False)))
        self._files = WeightFiles(weights) if weights is not None and self else None
        if self._files is not None:
            missing = []
            for names, parameter in names_of(dict(module.named_parameters(remove_duplicate=False))).values():
                name = saved_name(self._files, names)
                if name is None:
                    missing.append(names[0])
                else:
                    check_shape(self._files, name, parameter)
            complain_about_missing(self._files, missing)

    def __bool__(self) -> bool:
        return bool(self._parameters or self._buffers)

    @torch.no_grad()
    def fill_buffers(self, module: nn.Module, topology: Topology) -> None:
        """Buffers, and with weight files every small tensor that has memory. Collective over all ranks."""
        for empty in self._buffers:
            read = self._reader(empty, topology)
            now = module.get_buffer(empty.names[0])
            value = part_like(now, read, dtype=now.dtype, device=torch.device(topology.device))
            for name in empty.names:
                replace_buffer(module, name, value)
        if self._files is None:
            return
        for names, tensor in names_of(dict(module.state_dict(keep_vars=True))).values():
            saved = saved_name(self._files, names)
            if saved is not None and not tensor.is_meta:
                tensor.copy_(self._files.read(saved, tuple(slice(0, size) for size in tensor.shape)))

    @torch.no_grad()
    def fill_parameters(self, module: nn.Module, topology: Topology, device: torch.device) -> None:
        """Parameters, each in this rank's part, kept on ``device``. Collective over all ranks."""
        for empty in self._parameters:
            now = module.get_parameter(empty.names[0])
            value = part_like(now.detach(), self._reader(empty, topology), dtype=now.dtype, device=device)
            replace_parameter(module, empty.names, value, now.requires_grad)

    def _reader(self, empty: _Empty, topology: Topology) -> Reader:
        files = self._files
        name = None if files is None else saved_name(files, empty.names)
        if files is not None and name is not None:
            return lambda box: files.read(name, box)
        full = empty.recording.value(empty.made) if topology.rank == 0 else None
        return from_rank_zero(full, empty.made, topology)


def _empty(tensors: dict[str, Tensor]) -> list[_Empty]:
    found = []
    for names, tensor in names_of({name: each for name, each in tensors.items() if each.is_meta}).values():
        recording = recording_of(tensor)
        if recording is None:
            raise UsageError(
                f"{names[0]} lies on the meta device, and how it would have been initialised is not known",
                cure="Construct the model inside of `with accelerator.init_empty_weights():`, without device='meta', "
                "and change its dtype there too.",
            )
        found.append(_Empty(names, tensor.detach(), recording))
    return found
