"""Draws random numbers in the order of memory that the script gave a parameter, where ZeRO lays it out row by row.

DeepSpeed keeps parameters in flat buffers. ``torch.randn_like(p)`` and ``p.normal_()`` fill memory in its order, and
would give each element of a transposed weight, or of one in ``channels_last``, another number than on one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain_sharding import with_strides


class LaidByRows(Tensor):
    """A view of such a parameter, as ``p.data`` is.

    Attributes:
        its_strides: those that it would have on one process.
    """

    its_strides: tuple[int, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (what torch's own subclasses use)
            return run_in_order(func, args, kwargs or {}, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            copied = with_strides(self.as_subclass(Tensor).detach().clone(), self.its_strides)
            return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            plain = with_strides(self.as_subclass(Tensor), self.its_strides)
            return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def run_in_order(func: Any, args: Any, kwargs: Mapping[str, Any], strides: Mapping[int, tuple[int, ...]]) -> Any:
    """Run one operation as if parameters had the script's strides. Not collective.

    Args:
        func: called without ``__torch_function__``.
        args: of it, with parameters among them and views of them.
        kwargs: of it.
        strides: of the parameters, by identity.
    """
    order = _Order()
    for one in pytree.tree_leaves((args, kwargs)):
        its = one.its_strides if isinstance(one, LaidByRows) else strides.get(id(one))
        if its is not None:
            order.remember(one, its)
    if func is Tensor.contiguous and len(args) == 1 and not kwargs:
        # Of memory that lies row by row already it would be the tensor itself, and no copy.
        return args[0].clone()
    with order:
        found = func(*args, **kwargs)
    return pytree.tree_map_only(Tensor, order.as_view, found)


@final
class _Order(TorchDispatchMode):
    """Runs operations on tensors whose strides are not those of one process.

    Random ones run on copies with those strides. Results that share memory with such a tensor are remembered with the
    strides that they would have, which the same operation on meta tensors tells; other results get them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[Any, tuple[Tensor, tuple[int, ...]]] = {}
        """Tensors, so that no other one comes to lie in their memory, and their strides on one process."""

    def remember(self, tensor: Tensor, strides: Iterable[int]) -> None:
        self._known[_place(tensor)] = tensor, tuple(strides)

    def as_view(self, found: Tensor) -> Tensor:
        if type(found) is not Tensor or found.layout is not torch.strided or _place(found) not in self._known:
            return found
        view = found.as_subclass(LaidByRows)
        view.its_strides = self._its(found)
        return view

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if _is_strided(one)]
        if all(_place(one) not in self._known for one in tensors):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        found = func(*args, **kwargs)
        if func._schema.is_mutable:  # noqa: SLF001 (torch has no other word)
            return found
        try:
            expected = func(*pytree.tree_map_only(Tensor, self._on_meta, args), **kwargs)
        except (NotImplementedError, RuntimeError):
            # Strides are all that it would tell: no kernel on meta, another tensor among the keywords.
            return found
        return pytree.tree_map(self._followed([_storage(one) for one in tensors]), found, expected)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        written: list[tuple[Tensor, Tensor]] = []

        def laid(one: Tensor) -> Tensor:
            copied = with_strides(one, self._its(one)) if _is_strided(one) else one
            if copied is not one:
                written.append((one, copied))
            return copied

        found = func(*pytree.tree_map_only(Tensor, laid, args), **pytree.tree_map_only(Tensor, laid, kwargs))
        if not func._schema.is_mutable:  # noqa: SLF001
            return found
        for one, copied in written:
            if found is copied:
                one.copy_(copied)
                return one
        return found

    def _followed(self, storages: list[int]) -> Any:
        def follow(found: Any, expected: Any) -> Any:
            if not _is_strided(found) or found.stride() == expected.stride():
                return found
            if _storage(found) not in storages:
                return with_strides(found, expected.stride())
            self.remember(found, expected.stride())
            return found

        return follow

    def _its(self, tensor: Tensor) -> tuple[int, ...]:
        known = self._known.get(_place(tensor))
        return tensor.stride() if known is None else known[1]

    def _on_meta(self, tensor: Tensor) -> Tensor:
        if not _is_strided(tensor):
            return tensor
        return torch.empty_strided(tensor.shape, self._its(tensor), dtype=tensor.dtype, device="meta")


def _is_strided(one: Any) -> bool:
    return isinstance(one, Tensor) and one.layout is torch.strided


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 (its identity)
    return address
