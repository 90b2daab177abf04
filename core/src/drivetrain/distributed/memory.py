"""Frees device memory and finds a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from drivetrain.backend import Backend
from drivetrain.distributed import call_monitor
from drivetrain.distributed.current import current_backend
from drivetrain.errors import UsageError

logger = logging.getLogger(__name__)

SHRINK = 0.9
"""Factor from one batch size to the next, Accelerate's."""

# Messages of a plain RuntimeError, from torch's CPU allocator, cuDNN's workspace and older device plugins.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the device memory that torch caches.

    Args:
        garbage_collection: collect unreachable Python objects first.
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drop this function's references to some objects, collect garbage and clear the device's cache.

    The caller must drop its own: ``model, optimizer = release_memory(model, optimizer)``.

    Returns:
        ``None`` for each object.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that device or host memory was exhausted."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


@overload
def find_executable_batch_size(
    function: Callable[..., Any],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[..., Any]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Decorate a function so that it runs again with a smaller batch size when it runs out of memory.

    The function gets the batch size as its first argument, which callers leave out. After every attempt the ranks
    vote (collective over the data-parallel ranks): when one of them ran out of memory, all try again with the same,
    smaller size, those that had succeeded too. A size that was found is where the next call starts.

    The vote is taken when the function has ended on every rank. A rank that runs out of memory *between* two
    collectives of the function leaves the others waiting in the second, which the vote would be matched with; ranks of
    equal devices and shapes fail together, which is what makes this useful.

    Args:
        function: what to run; leave it out to write ``@find_executable_batch_size(starting_batch_size=64)``.
        starting_batch_size: first to be tried.
        reduce_batch_size_fn: returns the next size; called with the size that failed, or with nothing if it takes
            nothing. ``None`` takes nine tenths. The smallest answer of all ranks is taken.

    Raises:
        UsageError: a caller passed the batch size itself, or the next size is not smaller.
        RuntimeError: no size above zero is left; the last error is its cause.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    name = getattr(function, "__name__", type(function).__name__)
    size = starting_batch_size

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _refuse_own_batch_size(function, name, args, kwargs)
        if size < 1:
            raise RuntimeError(f"{name}: no batch size above zero is left to try (starting_batch_size={size})")
        while True:
            result, error = _attempt(function, size, args, kwargs)
            backend = current_backend()
            if not _agree(backend, torch.tensor(error is not None), "max"):
                return result
            result = None
            call_monitor.begin_anew()  # the rank that ran out of memory has made fewer calls than others
            clear_device_cache(garbage_collection=True)
            smaller = int(_agree(backend, torch.tensor(_next(reduce_batch_size_fn, size)), "min"))
            logger.info("%s did not fit with a batch size of %d; trying %d.", name, size, smaller)
            if smaller >= size:
                raise UsageError(
                    f"reduce_batch_size_fn went from {size} to {smaller}, which is not smaller",
                    cure="Return a smaller batch size, or leave reduce_batch_size_fn out: it is then halved.",
                )
            if smaller <= 0:
                raise RuntimeError(f"{name} runs out of memory even with a batch size of {size}.") from error
            size = smaller

    return run


def _attempt(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, RuntimeError | MemoryError | None]:
    """The result, or the error when out of memory; other errors propagate."""
    clear_device_cache(garbage_collection=True)
    try:
        return function(size, *args, **kwargs), None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # The frames hold the tensors that did not fit.
        return None, error.with_traceback(None)


def _agree(backend: Backend, value: Tensor, op: Any) -> float:
    return backend.reduce(value.to(backend.topology.device), op).item()


def _next(rule: Callable[..., int] | None, size: int) -> int:
    if rule is None:
        return int(size * SHRINK)
    return int(rule(size) if inspect.signature(rule).parameters else rule())


def _refuse_own_batch_size(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if not parameters:
        raise UsageError(f"{name} takes no batch size", cure=f"Write def {name}(batch_size): ...")
    if parameters[0].name in kwargs or (not takes_any and len(args) + len(kwargs) >= len(parameters)):
        raise UsageError(
            f"{name} gets its batch size from find_executable_batch_size",
            cure=f"Leave {parameters[0].name} out of the call.",
        )
