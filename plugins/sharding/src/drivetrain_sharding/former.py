"""Makes parameters raise that an engine has replaced, if a script still uses them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from drivetrain.api import UsageError


class FormerParameters:
    """The parameters of a module before they are replaced, by identity; they are not kept alive.

    Args:
        module: nothing of it replaced yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(one): (name, weakref.ref(one)) for name, one in module.named_parameters()}

    def name(self, parameter: Tensor) -> str | None:
        """The name that a parameter had; ``None`` when it was not one of them."""
        name, alive = self._names.get(id(parameter), ("", None))
        return name if alive is not None and alive() is parameter else None

    def close(self, module: nn.Module, instead: str, when: str = "accelerator.prepare") -> None:
        """Make the replaced parameters raise where they are used, since that would not affect the model.

        Args:
            module: with its present parameters.
            instead: who put what in their place: ``"fsdp put a sharded one"``.
            when: what it happened in.
        """
        present = set(map(id, module.parameters()))
        for name, alive in self._names.values():
            one: Any = alive()
            if type(one) is nn.Parameter and id(one) not in present:
                one.__class__ = _Replaced
                vars(one)["drivetrain_instead"] = instead
                vars(one)["drivetrain_when"] = when
                vars(one)["drivetrain_place"] = weakref.ref(module), name

    def replaced(self, parameters: Iterable[Tensor], module: nn.Module) -> bool:
        """Whether any of these was one of them and is in the module no more."""
        present = set(map(id, module.parameters()))
        return any(id(one) not in present and self.name(one) is not None for one in parameters)

    def include(self, parameters: Iterable[Tensor]) -> bool:
        """Whether any of these tensors is one of the former parameters."""
        return any(self.name(parameter) is not None for parameter in parameters)


_ABOUT = frozenset(
    {
        *("shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "__len__", "stride", "is_contiguous"),
        *("dtype", "device", "layout", "get_device", "itemsize", "element_size", "nbytes", "names", "name", "__repr__"),
        *("requires_grad", "is_leaf", "grad_fn", "retains_grad", "output_nr", "_version", "_backward_hooks"),
        *("is_floating_point", "is_complex", "is_signed", "is_sparse", "is_quantized", "is_nested", "is_inference"),
        *("is_cuda", "is_cpu", "is_xpu", "is_hpu", "is_npu", "is_mps", "is_mtia", "is_xla", "is_meta", "is_mkldnn"),
    }
)
"""Attributes that may be read from a replaced parameter: its successor has the same."""


class _Replaced(nn.Parameter):
    """A parameter that is no longer part of the model."""

    drivetrain_instead: str
    drivetrain_when: str
    drivetrain_place: tuple[weakref.ref[nn.Module], str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow metadata of the parameter, and raise for operations that read, write or compute with its values."""
        name = str(getattr(func, "__name__", func))
        if name == "__get__":
            name = str(func.__self__.__name__)
        if name not in _ABOUT:
            _refuse(name, *_replaced((args, kwargs)))
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(*args, **kwargs or {})

    @property
    def grad(self) -> Any:
        _refuse("grad", self)

    @grad.setter
    def grad(self, value: Any) -> None:
        """Allow setting it to ``None``."""
        if value is not None:
            _refuse("grad", self)


def successors(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that a model has now in place of those that were replaced; others stay. Not collective.

    For calls that mean "these parameters of the model", whenever they were listed, as gradient clipping does.
    """
    return [_successor(one) if isinstance(one, _Replaced) else one for one in parameters]


def _successor(one: _Replaced) -> Tensor:
    place, name = one.drivetrain_place
    module = place()
    return one if module is None else module.get_parameter(name)


def _replaced(value: Any) -> Iterable[_Replaced]:
    if isinstance(value, _Replaced):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _replaced(each)


def _refuse(name: str, one: _Replaced, *_: Any) -> NoReturn:
    raise UsageError(
        f"`{name}` was used on a parameter that was taken from the model before {one.drivetrain_when}; "
        f"{one.drivetrain_instead} in its place, and this one is no longer trained",
        cure=f"Call model.parameters() after {one.drivetrain_when.removeprefix('accelerator.')}, also to renew a list "
        "that was made before. Pass an optimizer to prepare together with its model.",
    )
