"""Annotates shardings of parameters and batches over the devices of one process (GSPMD).

Results are those of one device for all annotations, which only change memory and communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import numpy as np
import torch_xla.distributed.spmd as xs
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api.engines import trees
from drivetrain.api.programs import get_registry
from drivetrain_xla import layout
from drivetrain_xla.config import XLAConfig


@final
class DeviceMesh:
    """The devices of this process as a mesh, and shardings over it.

    Args:
        sizes: of the axes ``dp_replicate``, ``dp_shard`` and ``tp``; their product is the number of devices.
        section: the user's settings.
    """

    def __init__(self, sizes: Mapping[str, int], section: XLAConfig) -> None:
        self.sizes, self._section = dict(sizes), section
        self._data_size = sizes["dp_replicate"] * sizes["dp_shard"]
        axes = tuple(sizes)
        num_devices = self._data_size * sizes["tp"]
        devices = np.arange(num_devices)
        self._parameters = xs.Mesh(devices, tuple(sizes[axis] for axis in axes), axes)
        # Both data axes as one: torch_xla cannot cut a dim of a batch along two.
        self._specs: dict[int, layout.Spec] = {}
        shape = (self._data_size,) if sizes["tp"] == 1 else (self._data_size, sizes["tp"])
        self._batches = xs.Mesh(devices, shape, ("data", "tp")[: len(shape)])

    def place(self, module: nn.Module) -> None:
        """Annotate parameters; buffers and what cannot be cut are replicated. Local; twice is as once."""
        cuts = self._cuts(module)
        names: dict[int, str | None] = {}
        for path, part in module.named_modules():
            for parameter in part.parameters(recurse=False):
                # The first module decides the sharding of a tied parameter.
                names.setdefault(id(parameter), cuts.get(path))
        for parameter in module.parameters():
            self._mark(parameter, names[id(parameter)])

    def place_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Annotate optimizer state like its parameter, where it has the parameter's shape."""
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                spec = self._specs.get(id(parameter))
                for value in state.values():
                    if spec is not None and isinstance(value, Tensor) and value.shape == parameter.shape:
                        xs.mark_sharding(value, self._parameters, spec)

    def separate_backwards(self, module: nn.Module) -> None:
        """Keep XLA from fusing the backward passes of blocks, which would hold the gradients of all at once."""
        if self.sizes["dp_shard"] == 1 or not self._section.backward_barrier:
            return
        lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
        for block in max(lists, key=len, default=[]):
            xs.apply_backward_optimization_barrier(block)

    def batch_sharding(self, tensor: Tensor) -> xs.ShardingSpec | None:
        """Return the sharding of a batch tensor: its first dim over the data axes; ``None`` = replicated.

        A tensor with fewer dims than the mesh is replicated: torch_xla cannot shard it during the copy.
        """
        if not self._divides(tensor) or tensor.dim() < len(self._batches.mesh_shape):
            return None
        return xs.ShardingSpec(self._batches, _batch_spec(tensor))

    def produced(self, output: Any) -> None:
        """Note that a model's outputs are cut like its batch, so that parameters are gathered rather than outputs."""
        if self.sizes["dp_shard"] > 1:
            trees.recursively_apply(self._produced, output)

    def _produced(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "xla" and self._divides(tensor):
            xs.mark_sharding(tensor, self._batches, _batch_spec(tensor))
        return tensor

    def _divides(self, tensor: Tensor) -> bool:
        return bool(tensor.dim() and tensor.shape[0] and tensor.shape[0] % self._data_size == 0)

    def _mark(self, parameter: Tensor, cut: str | None) -> None:
        spec = layout.parameter_spec(
            tuple(parameter.shape), self.sizes, cut, min_elements=self._section.min_shard_elements
        )
        if any(spec):
            xs.mark_sharding(parameter, self._parameters, spec)
            self._specs[id(parameter)] = spec

    def _cuts(self, module: nn.Module) -> dict[str, str]:
        """Return the style of each sharded module along ``tp``."""
        if self.sizes["tp"] == 1:
            return {}
        names = [name for name, _ in module.named_modules()]
        plan: Mapping[str, str] | None = self._section.tensor_parallel_plan
        if not plan:
            plan = get_registry().tensor_parallel_plan(module, self.sizes["tp"])
        if plan is not None:
            return layout.chosen_cuts(names, plan)
        return {name: "colwise" for name, part in module.named_modules() if isinstance(part, nn.Linear)}


def _batch_spec(tensor: Tensor) -> tuple[str | None, ...]:
    return ("data", *[None] * (tensor.dim() - 1))
