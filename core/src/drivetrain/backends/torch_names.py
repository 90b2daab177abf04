"""Checks the private names of torch that the core and the plugins of this repository use, before a backend starts.

Decision record 72 says what each is for. One that torch has renamed would end in an ``AttributeError`` in the middle of
a step, and one that is set in a wrong number; here it ends in a sentence. Names of engines are their plugins'.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn
from torch.distributed import distributed_c10d

from drivetrain.errors import BackendBlockedError

TESTED = "2.13.0"
"""The release that ``locks/dev.txt`` holds."""

_OF_C = (
    *("DisableTorchFunction", "DisableTorchFunctionSubclass", "_EnableTorchFunction", "_current_graph_task_id"),
    *("_current_autograd_node", "_functorch", "_get_privateuse1_backend_name", "_storage_Use_Count"),
    "_will_engine_execute_node",
)
_OF_MODULES = (
    *("_buffers", "_call_impl", "_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"),
    *("_backward_pre_hooks", "_load_from_state_dict", "_non_persistent_buffers_set", "_parameters"),
)
_OF_PARAMETERS = ("_backward_hooks", "_is_view", "_post_accumulate_grad_hooks", "_version")


@cache
def check() -> None:
    """Raise where the installed torch lacks a name. Once in a process; not collective.

    Raises:
        BackendBlockedError: it does.
    """
    for owner, names in _wanted():
        BackendBlockedError.check_names(owner, names, library="torch", tested=TESTED, user="drivetrain")


def _wanted() -> Iterator[tuple[object, tuple[str, ...]]]:
    """Owners and their names; an owner is looked up after its own name was checked."""
    yield torch, ("_C",)
    yield torch._C, _OF_C  # noqa: SLF001
    yield torch._C._functorch, ("peek_interpreter_stack",)  # noqa: SLF001
    yield nn.Module(), _OF_MODULES
    yield nn.SyncBatchNorm, ("_check_non_zero_input_channels",)
    yield nn.modules.batchnorm, ("_NormBase",)
    yield nn.modules.module, ("_has_any_global_hook",)
    parameter = nn.Parameter(torch.empty(0))
    yield parameter, _OF_PARAMETERS
    yield parameter.untyped_storage(), ("_cdata",)
    yield torch.Tensor, ("_make_wrapper_subclass", "_values")
    yield torch.amp.GradScaler, ("_found_inf_per_device",)
    yield torch.autograd, ("_engine_run_backward",)
    yield torch.autograd.Variable, ("_execution_engine",)
    yield torch.ops.aten.add.Tensor, ("_overloadpacket", "_schema")
    yield distributed_c10d, ("_get_default_store",)
