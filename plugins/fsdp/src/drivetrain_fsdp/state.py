"""How a sharded model maps to the portable checkpoint: DTensors under the original names, no gathering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.api import PortableState, TensorSpec, TorchEngine, plain_state_dict, portable


def portable_state(module: nn.Module, optimizers: Sequence[Optimizer], engine: TorchEngine) -> PortableState:
    """This rank's shards themselves, no copy."""
    state = portable.portable_state(module, optimizers)
    state.extra |= engine.state()
    return state


def portable_template(
    module: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, TensorSpec]
) -> PortableState:
    """Sharded as the module is now, whatever the world was that saved."""
    return portable.portable_template(module, optimizers, saved)


def load_portable_state(
    module: nn.Module, optimizers: Sequence[Optimizer], engine: TorchEngine, state: PortableState
) -> None:
    """Take over a filled template."""
    portable.load_portable_state(module, optimizers, state)
    engine.load_state(state.extra)


def full_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the state dict in full, one at a time. Collective over all ranks."""
    for name, tensor in plain_state_dict(module).items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
