"""Registers DDP's communication hooks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel.distributed import DistributedDataParallel

from drivetrain.api import UsageError

OPTIONS = ("comm_hook", "comm_wrapper", "comm_state_option")
"""Options of the hook, not of DDP itself."""

_PLAIN: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
_POWER_SGD: dict[str, Callable[..., Any]] = {
    "power_sgd": powerSGD_hook.powerSGD_hook,
    "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": default_hooks.bf16_compress_wrapper,
}


def register(
    wrapper: DistributedDataParallel,
    comm_hook: str = "no",
    comm_wrapper: str = "no",
    comm_state_option: Mapping[str, Any] | None = None,
) -> None:
    """Register the hook of this name; ``"no"`` leaves DDP's own all-reduce.

    Raises:
        UsageError: options that the chosen hook would not read.
    """
    comm_hook, comm_wrapper, options = str(comm_hook), str(comm_wrapper), dict(comm_state_option or {})
    if comm_hook not in _POWER_SGD and (comm_wrapper != "no" or options):
        raise UsageError(
            f"comm_wrapper={comm_wrapper!r} and comm_state_option={options} belong to a power_sgd hook, "
            f"comm_hook is {comm_hook!r}",
            cure="Set comm_hook to 'power_sgd' or 'batched_power_sgd', or leave the other two out.",
        )
    if comm_hook == "no":
        return
    if comm_hook in _PLAIN:
        wrapper.register_comm_hook(None, _PLAIN[comm_hook])
        return
    if comm_hook not in _POWER_SGD:
        known = ", ".join(("no", *_PLAIN, *_POWER_SGD))
        raise UsageError(f"unknown comm_hook {comm_hook!r}", cure=f"Use one of {known}.")
    hook = _POWER_SGD[comm_hook]
    if comm_wrapper != "no":
        hook = _WRAPPERS[comm_wrapper](hook)
    wrapper.register_comm_hook(powerSGD_hook.PowerSGDState(process_group=None, **options), hook)
