"""Seeds, saves and restores the XLA device's random number generator, which ``torch.manual_seed`` does not seed.

Its state is one 64-bit number per process.
"""

from __future__ import annotations

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor

from drivetrain.api.engines import DeviceGenerator

_BYTES = 8


def generator() -> DeviceGenerator:
    """Return the generator's interface for the core."""
    return DeviceGenerator(state=_state, set_state=_set_state, seed=xm.set_rng_state)


def _state() -> Tensor:
    number = int(xm.get_rng_state()) % (1 << 64)
    return torch.tensor(list(number.to_bytes(_BYTES, "little")), dtype=torch.uint8)


def _set_state(state: Tensor) -> None:
    xm.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))
