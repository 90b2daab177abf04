"""Maps a model on an XLA device to the portable checkpoint: full tensors in host memory, under the original names.

Its tensors cannot be written directly: they have no address, and reading one runs the recorded graph. So they are
fetched together, after one synchronisation; sharded ones are gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import PortableState, TensorSpec, plain_state_dict, portable


def portable_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> PortableState:
    """Copies in host memory, as large as the model with its optimizer. The device has nothing left to do."""
    state = portable.portable_state(module, optimizers)
    lazy = {name: tensor for name, tensor in state.tensors.items() if tensor.device.type == "xla"}
    state.tensors |= zip(lazy, to_host(list(lazy.values())), strict=True)
    return state


def portable_template(
    module: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, TensorSpec]
) -> PortableState:
    """Return full tensors in host memory."""
    template = portable.portable_template(module, optimizers, saved)
    template.tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in template.tensors.items()
    }
    return template


def load_portable_state(module: nn.Module, optimizers: Sequence[Optimizer], state: PortableState) -> None:
    """Take over a filled template; optimizer state goes to where this optimizer keeps it."""
    specs = {
        name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in state.tensors.items()
    }
    live = portable.portable_template(module, optimizers, specs).tensors
    state.tensors = {
        name: tensor.to(live[name].device) if name.startswith("optim.") and name in live else tensor
        for name, tensor in state.tensors.items()
    }
    portable.load_portable_state(module, optimizers, state)


def full_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the state dict in host memory, one at a time; a tied one is one tensor under each name."""
    copies: dict[int, Tensor] = {}
    tied = _seen_twice(module)
    for name, tensor in plain_state_dict(module, keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            yield name, tensor  # What a module gives by get_extra_state.
        elif id(tensor) in tied:
            yield name, copies.setdefault(id(tensor), tensor.detach().cpu())
        else:
            yield name, tensor.detach().cpu()


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in host memory, fetched together. Waits for the device."""
    fetched: list[Tensor] = xm._maybe_convert_to_cpu(tensors)  # noqa: SLF001  (what xm.save does)
    return fetched


def _seen_twice(module: nn.Module) -> set[int]:
    found = Counter(id(tensor) for tensor in plain_state_dict(module, keep_vars=True).values())
    return {key for key, count in found.items() if count > 1}
