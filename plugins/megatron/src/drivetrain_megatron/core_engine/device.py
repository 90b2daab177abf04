"""Runs Megatron-Core on machines without CUDA: redirects its calls of ``torch.cuda`` to the CPU.

Megatron-Core names the device ``"cuda"`` in its own code. On a CPU, and only there, the modules of ``megatron.core``
see a stand-in for the name ``torch`` that replaces ``torch.cuda`` and creates tensors on the CPU; the rest of torch is
unchanged, and so is torch for all other modules. Sharding, autograd functions, schedules, messages and the reduction of
gradients are Megatron-Core's own. Not covered on a CPU: NCCL, streams, fused kernels, CUDA's random numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.randomness import own_stream

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "zeros_like", "empty_like")
_NOTHING: Callable[..., None] = lambda *_, **__: None  # noqa: E731 (a table of answers reads better)
_CUDA: dict[str, Callable[..., Any]] = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": _NOTHING,
    "empty_cache": _NOTHING,
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
}


class _StandIn(ModuleType):
    """A module that defines some names itself and forwards the others to the real one."""

    def __init__(self, real: ModuleType, answers: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(answers)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return factory(*args, **kwargs)

    return make


_TORCH = _StandIn(
    torch, {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES} | {"cuda": _StandIn(torch.cuda, _CUDA)}
)


def use_cpu(ring: Ring) -> None:
    """Let Megatron-Core run on this CPU. May be called again, also for another ring.

    Args:
        ring: the ranks of the axis ``tp``; dropout inside of shared layers draws other numbers on each.
    """
    from megatron.core.tensor_parallel import layers, random

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = _TORCH  # type: ignore[attr-defined]
    # It would recommend an environment variable of CUDA.
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    random._CUDA_RNG_STATE_TRACKER = _Streams(ring)  # noqa: SLF001 (the only way in)
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True  # noqa: SLF001
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # noqa: SLF001
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # noqa: SLF001


class _Streams:
    """Random numbers of this rank's own inside of shared layers; a function of the default generator's state."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        assert not states, "there are none of its own"

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        with own_stream(self._ring, torch.empty(0)):
            yield


class Here(TorchFunctionMode):
    """Inside, ``tensor.cuda()`` leaves a tensor where it is, and ``tensor.type()`` names a type of CUDA.

    For construction only: of a model with tied embeddings, and of the distributed optimizer, which checks types.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        found = func(*args, **(kwargs or {}))
        if func is Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found
