"""Controls DeepSpeed's global state: its import, the environment that it reads, and its side effects."""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from drivetrain.api import ProcessInfo
from drivetrain_deepspeed import private_names
from drivetrain_deepspeed.logs import Tamed

_ACCELERATOR = "DS_ACCELERATOR"


def load(kind: str) -> Any:
    """Import DeepSpeed for this device type, or turn an imported one to it; returns the package.

    The environment is as before afterwards: DeepSpeed reads ``DS_ACCELERATOR`` once.
    """
    with environment({_ACCELERATOR: kind}), warnings.catch_warnings():
        # Deprecations concern its authors; a script can do nothing about them.
        for category in (DeprecationWarning, FutureWarning, SyntaxWarning):
            warnings.simplefilter("ignore", category)
        package = importlib.import_module("deepspeed")
        accelerators: Any = importlib.import_module("deepspeed.accelerator.real_accelerator")
        if accelerators.get_accelerator().device_name() != kind:
            accelerators.ds_accelerator = None
            accelerators.get_accelerator()
    return package


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for a while; whatever the block sets, as DeepSpeed does on import, goes too."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def surroundings(process: ProcessInfo) -> Iterator[None]:
    """Set up global state while DeepSpeed creates an engine or partitions a model, and restore it.

    * ``LOCAL_RANK``, which it reads from the environment.
    * No shared-memory collectives: DeepSpeed asks the compiler which of its ops it could build, and compiles this one
      (half a minute, and an error without a compiler); it serves inference only, and crashes with groups smaller than
      the job.
    * Barriers name the device of this rank, of which torch would warn otherwise; see :func:`_on_own_device`.
    * Values are not sent from rank 0 again, which ``prepare`` has done, and 0-d parameters can be sent.
    * ``torch.nn.functional.linear`` is as before afterwards; see :func:`linear_of_stage_3`.
    * So is the flag that autocast is on, which later engines would read.
    * Deprecation warnings are suppressed: the first engine imports modules that emit some.
    """
    with environment({"LOCAL_RANK": str(process.local_rank)}), _attributes(_replacements()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _replacements() -> list[tuple[Any, str, Any]]:
    engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    autocast = importlib.import_module("deepspeed.runtime.torch_autocast")
    parts = importlib.import_module("deepspeed.runtime.zero.partition_parameters").Init
    collectives = importlib.import_module("deepspeed.comm.torch")
    communication = collectives.TorchBackend
    return [
        (collectives, "build_shm_op", lambda: None),
        (communication, "barrier", _on_own_device(communication.barrier)),
        (engine, "_broadcast_model", lambda _: None),
        (parts, "_zero_init_param", _cut_first(parts._zero_init_param)),  # noqa: SLF001
        (functional, "linear", functional.linear),
        (autocast, "TORCH_AUTOCAST_INITIALIZED", False),
        (autocast, "TORCH_AUTOCAST_DTYPE", None),
    ]


def _on_own_device(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for the other ranks on the device that this rank has taken.

    The process group is bound to no device, although that would answer torch as well: groups of some ranks are split
    from a bound one, and a split waits for all ranks of the job.
    """
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if accelerator.device_name() == "cpu":
        return theirs

    def barrier(self: Any, group: Any = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
        return theirs(self, group, async_op, device_ids or [accelerator.current_device()])

    return barrier


def _cut_first(theirs: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
    """Send a parameter from rank 0 and cut it, also one without dims, which theirs cannot view as bytes."""
    comm = importlib.import_module("deepspeed.comm")

    def cut(self: Any, parameter: Any) -> None:
        if parameter.dim():
            theirs(self, parameter)
            return
        self._convert_to_deepspeed_param(parameter)
        group = self.get_partition_dp_group(parameter)
        root = 0 if group == comm.get_world_group() else comm.get_global_rank(group, 0)
        comm.broadcast(parameter.data.reshape(1), root, group)
        parameter.partition()

    return cut


@contextmanager
def _attributes(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes for a while."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    for owner, name, value in values:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class _Linear:
    """``torch.nn.functional.linear`` as it is outside of a forward of stage 3, and how many are inside."""

    inside = 0
    plain: Any = None


@contextmanager
def linear_of_stage_3() -> Iterator[None]:
    """A linear layer that keeps no gathered weight for its backward, as DeepSpeed puts in place for good.

    Here it is in place only while a model of stage 3 runs forward and backward. Where torch calls no hooks of
    parameters after a recomputation (see :func:`_calls_hooks`), a checkpoint computes with the plain layer: it keeps
    no weights anyway.
    """
    if not _Linear.inside:
        _Linear.plain = functional.linear
    functional.linear = _linear()
    _Linear.inside += 1
    try:
        yield
    finally:
        _Linear.inside -= 1
        if not _Linear.inside:
            functional.linear = _Linear.plain


@cache
def _linear() -> Callable[..., Tensor]:
    theirs: Callable[..., Tensor] = importlib.import_module("deepspeed.runtime.zero.linear").zero3_linear_wrap
    return theirs if _calls_hooks() else _where_kept(theirs, private_names.saved_tensor_hooks())


def _calls_hooks() -> bool:
    """Whether torch calls hooks of a parameter that an autograd function has saved under ``use_reentrant=False``.

    Torch 2.9 does not. This plugin learns by such hooks which parameters have a gradient.
    """
    called: list[bool] = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: called.append(True))  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        checkpoint(_Saves.apply, weight, use_reentrant=False).backward()
    return bool(called)


class _Saves(torch.autograd.Function):
    """A function that saves its argument, as DeepSpeed's linear layer does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Save it."""
        ctx.save_for_backward(weight)
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Read what was saved, which computes it again."""
        (weight,) = ctx.saved_tensors
        return gradient * 2 * torch.ones_like(weight)


def _where_kept(theirs: Callable[..., Tensor], checkpoints: Callable[[], object]) -> Callable[..., Tensor]:
    def linear(*args: Any, **kwargs: Any) -> Tensor:
        layer = theirs if checkpoints() is None else _Linear.plain
        return layer(*args, **kwargs)

    return linear


class _Held:
    """Number of active backends in this process."""

    holders = 0
    logs: Tamed | None = None


def hold(process: ProcessInfo) -> None:
    """One more backend is at work."""
    if not _Held.holders:
        _Held.logs = Tamed(process.rank, process.world_size)
    _Held.holders += 1


def let_go() -> None:
    """One fewer; with the last one go DeepSpeed's references to process groups and modules. Not collective."""
    _Held.holders -= 1
    if _Held.holders:
        return
    assert _Held.logs is not None
    _Held.logs.release()
    importlib.import_module("deepspeed.utils.groups")._release_process_group_references()  # noqa: SLF001
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb = None
    forget_modules()


def forget_modules() -> None:
    """Clear the caches of modules that DeepSpeed's stage 3 keeps beyond its engines. Not collective.

    A cache of a method holds every module that was run, with its engine, its optimizer and their weights.
    """
    importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
    coordinator = importlib.import_module(private_names.COORDINATOR).PartitionedParameterCoordinator
    method = getattr(coordinator, private_names.RELEASES)
    # The cache is wrapped for profiling.
    cached = inspect.getclosurevars(method).nonlocals.get("func", method)
    if hasattr(cached, "cache_clear"):
        cached.cache_clear()
