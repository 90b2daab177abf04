"""A copy of a model without memory: its tensors have shapes but no values, so a forward costs nothing and shows all.

A tensor that depends on a parameter comes out without a value; one that depends on inputs and buffers alone (a mask, a
rotary table, shifted labels) has its true one. That difference is what a pipeline is cut by.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from drivetrain.api import UnsupportedError

NO_VALUE = (
    torch._subclasses.fake_tensor.DataDependentOutputException,  # noqa: SLF001 (torch has no public name for them)
    torch._subclasses.fake_tensor.DynamicOutputShapeException,  # noqa: SLF001
)
"""Raised where a program asks for a value that is not there."""


def is_absent(value: Any) -> bool:
    """Whether this is a tensor without a value."""
    return isinstance(value, FakeTensor)


@final
class Blanks:
    """Makes parameters without memory.

    Args:
        device: where their values would be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def absent_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter of the same shape and dtype, without memory."""
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        absent = self.mode.fake_tensor_converter.from_meta_and_device(self.mode, like, self._device)
        made = nn.Parameter(absent, requires_grad=parameter.requires_grad)
        # Torch's own way of copying asks for the address of memory that is not there; scripts copy models.
        made.__deepcopy__ = lambda memo: self.absent_parameter(made)  # type: ignore[method-assign]  # noqa: ARG005
        return made


@final
class Skeleton:
    """The model's structure with parameters that have no values; buffers are copies with values.

    Args:
        module: a whole model; it stays as it is.
        device: where its inputs will be, though it may be elsewhere yet.

    Raises:
        UnsupportedError: the model cannot be copied.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.blanks = Blanks(device)
        self.mode = self.blanks.mode
        memo: dict[int, Any] = {id(one): self.blanks.absent_parameter(one) for one in module.parameters()}
        try:
            self.module: nn.Module = copy.deepcopy(module, memo)
        except Exception as problem:
            raise UnsupportedError(
                f"{type(module).__name__} cannot be cut into pipeline stages: it cannot be copied ({problem})",
                cure="Keep what cannot be copied (locks, files, process groups) outside of the module, or use "
                "pipeline_parallel_size: 1.",
            ) from problem
        for part in self.module.modules():
            for name, buffer in list(part._buffers.items()):  # noqa: SLF001 (the order in which they were registered)
                if buffer is not None and not buffer.is_meta:
                    part._buffers[name] = buffer.to(device)  # noqa: SLF001
        self.opaque: dict[str, Exception] = {}
        """Modules whose inside asks for values, and how; their output is taken to be shaped like their first tensor."""
        for name, part in self.module.named_modules():
            _make_robust(part, name, self.opaque)

    def absent(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor without a value."""
        with self.mode:
            return torch.empty(shape, dtype=dtype, device=device)


def _make_robust(module: nn.Module, name: str, opaque: dict[str, Exception]) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            with quiet():
                return inner(*args, **kwargs)
        except (RuntimeError, NotImplementedError, *NO_VALUE) as problem:
            given = [one for one in (*args, *kwargs.values()) if is_absent(one) and one.is_floating_point()]
            if not given or not name:
                raise
            opaque.setdefault(name, problem)
            return torch.empty_like(given[0])

    module.forward = forward


@contextmanager
def quiet() -> Iterator[None]:
    """Torch logs a traceback for each operator that cannot run without values, before it raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
