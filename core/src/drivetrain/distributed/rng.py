"""Seeds random number generators, synchronises them over ranks, and captures their state for a checkpoint."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.backend import Backend
from drivetrain.distributed.current import current_backend, started_backend
from drivetrain.errors import UsageError
from drivetrain.launch.environment import read_process_info

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceGenerator:
    """The generator of a device type without a torch module, which ``torch.manual_seed`` does not seed.

    Args:
        state: returns the state as a CPU tensor of bytes.
        set_state: sets such a state.
        seed: seeds it with a number from 0 to 2**64 - 1.
    """

    state: Callable[[], Tensor]
    set_state: Callable[[Tensor], None]
    seed: Callable[[int], None]


_generators: dict[str, DeviceGenerator] = {}


def register_device_generator(device_type: str, generator: DeviceGenerator) -> None:
    """Register this device type's generator for :func:`set_seed`, checkpoints and synchronisation.

    Called by a backend in ``start``; seeds it as torch's own generators are seeded. Once a process counts.
    """
    if device_type not in _generators:
        _generators[device_type] = generator
        generator.seed(torch.initial_seed())


# Numpy's global generator is the one that datasets and augmentations draw from.
_numpy = np.random
_NUMPY_SEEDS = 1 << 32


@dataclass
class _Policy:
    """Rank-related settings of the last :func:`set_seed`."""

    device_specific: bool | None = None
    added: int = 0


_policy = _Policy()


def draws_alike() -> bool:
    """Whether the script requested the same random numbers on all ranks, in forwards and in reads too."""
    return _policy.device_specific is False


def script_draws_apart() -> bool:
    """Whether the script requested different random numbers of its own on data-parallel coordinates."""
    return _policy.device_specific is True


def added_to_seed() -> int:
    """Return the offset that the last :func:`set_seed` added to its seed on this rank."""
    return _policy.added


def set_seed(seed: int, device_specific: bool | None = None, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators, on the CPU and on every accelerator. Not collective.

    Peers along ``tp``, ``pp`` and ``cp`` hold parts of one model and draw the same numbers in any case.

    Args:
        seed: from 0 to 2**32 - 1.
        device_specific: which random numbers ranks of other data-parallel coordinates draw. ``None``: the script draws
            the same on all of them (initial weights, splits); forwards of prepared models (dropout) and reads of
            prepared loaders (augmentation) draw other numbers on each. ``True``: the script draws other numbers too,
            since the coordinate is added to the seed; without an accelerator the global rank. ``False``: all draw the
            same, in forwards and reads too. Holds until the next call.
        deterministic: also make torch refuse operations without a deterministic implementation. CUDA needs the
            environment variable ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` for that; torch says so when it is missing.

    Raises:
        UsageError: a seed that is out of range.
    """
    if not 0 <= seed < _NUMPY_SEEDS:
        raise UsageError(f"seed {seed} is out of range", cure="Choose one from 0 to 4294967295.")
    _policy.device_specific, _policy.added = device_specific, 0
    if device_specific:
        started = started_backend()
        _policy.added = started[0].topology.dp_rank if started is not None else read_process_info(os.environ).rank
        seed += _policy.added
    seed_all(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed_all(seed: int) -> None:
    """Seed the generators that :func:`set_seed` seeds, and leave what it said about ranks as it is."""
    random.seed(seed)
    _numpy.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)
    for generator in _generators.values():
        generator.seed(seed)


def synchronize_rng_state(
    rng_type: str | None = None, generator: torch.Generator | None = None, backend: Backend | None = None
) -> None:
    """Broadcast the main process's state of one generator. Collective over all ranks.

    Args:
        rng_type: ``"torch"`` (CPU), ``"python"``, ``"numpy"``, ``"generator"`` (the given), ``"device"``, or the type
            of this process's accelerator (``"cuda"``, ``"xpu"``, ...).
        generator: for ``"generator"``.
        backend: what to run on; ``None`` = the newest started.

    Raises:
        UsageError: another type, an accelerator that this process does not use, or no generator where one is needed.
    """
    backend = backend or current_backend()
    device = torch.device(backend.topology.device)
    if rng_type == "generator":
        if generator is None:
            raise UsageError("rng type 'generator' needs a generator", cure="Pass generator=torch.Generator().")
        generator.set_state(backend.broadcast_object(generator.get_state()))
    elif rng_type == "torch":
        torch.set_rng_state(backend.broadcast_object(torch.get_rng_state()))
    elif rng_type == "python":
        random.setstate(backend.broadcast_object(random.getstate()))
    elif rng_type == "numpy":
        _numpy.set_state(backend.broadcast_object(_numpy.get_state()))
    elif rng_type == "device" or (rng_type == device.type and device.type != "cpu"):
        if device.type != "cpu":
            set_device_state(device, backend.broadcast_object(device_state(device)))
    else:
        raise UsageError(
            f"rng type {rng_type!r} cannot be synchronised by a process on {device.type}",
            cure="Choose 'torch', 'python', 'numpy', 'generator' or 'device'.",
        )


def synchronize_rng_states(
    rng_types: Iterable[str], generator: torch.Generator | None = None, backend: Backend | None = None
) -> None:
    """:func:`synchronize_rng_state` for several types, in order. Collective over all ranks."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator, backend)


def capture_rng(device: str = "cpu") -> dict[str, Any]:
    """State of all of this process's generators as numbers, strings, arrays and CPU tensors. Not collective.

    Args:
        device: this process's device; its generator is captured too unless it is the CPU.
    """
    version, words, gauss = random.getstate()
    captured: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": _numpy.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    place = torch.device(device)
    if place.type != "cpu":
        captured["device"] = {"type": place.type, "state": device_state(place).cpu()}
    return captured


def restore_rng(captured: Mapping[str, Any], device: str = "cpu") -> None:
    """Restore a state that :func:`capture_rng` made. Not collective.

    The state of an accelerator is taken over by the same type only; on another type its generator keeps its state and a
    warning is logged.

    Args:
        captured: what ``capture_rng`` returned, possibly after a round trip through JSON and tensors.
        device: this process's device.
    """
    python = captured["python"]
    random.setstate((int(python["version"]), tuple(torch.as_tensor(python["words"]).tolist()), python["gauss"]))
    _numpy.set_state(_arrays(captured["numpy"]))
    torch.set_rng_state(torch.as_tensor(captured["torch"], dtype=torch.uint8).cpu())
    place = torch.device(device)
    saved = captured.get("device")
    saved_type = "cpu" if saved is None else saved["type"]
    if saved_type != place.type:
        logger.warning(
            "random state of %s was saved, this process runs on %s: its generator keeps its state.",
            saved_type,
            place.type,
        )
    elif saved is not None:
        # On the CPU, as generators take it, whatever device the script has made torch's default.
        set_device_state(place, torch.as_tensor(saved["state"], dtype=torch.uint8).cpu())


def registered_generator(device_type: str) -> DeviceGenerator | None:
    """Return the generator registered for a device type, if any."""
    return _generators.get(device_type)


def device_state(device: torch.device) -> Tensor:
    """State of an accelerator's generator; a kind that has one device only (mps) takes no index."""
    if device.type in _generators:
        return _generators[device.type].state()
    module = torch.get_device_module(device)
    state: Tensor = module.get_rng_state(device) if ":" in str(device) else module.get_rng_state()
    return state


def set_device_state(device: torch.device, state: Tensor) -> None:
    """Set what :func:`device_state` returned."""
    if device.type in _generators:
        _generators[device.type].set_state(state)
        return
    module = torch.get_device_module(device)
    if ":" in str(device):
        module.set_rng_state(state, device)
    else:
        module.set_rng_state(state)


def _arrays(value: Any) -> Any:
    """Numpy's state with arrays as they are, or, from older versions, as integers beside their dtype."""
    if isinstance(value, Mapping):
        if set(value) == {"dtype", "values"}:
            return torch.as_tensor(value["values"]).numpy().astype(value["dtype"])
        return {key: _arrays(child) for key, child in value.items()}
    return value
