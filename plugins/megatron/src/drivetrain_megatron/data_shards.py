"""Implements ``DataShard``, the DTensor of ``data_parallel: fsdp``, which raises where DTensor is silently wrong.

Scripts read and write such parameters, gradients and states element by element, and take numbers over all elements:
sums, norms, maxima. DTensor is right there. It is not, or depends on how tensor parallelism has cut the tensor, where
an operation asks for places: views that are copies, rows, random numbers, other memory, plain tensors beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from drivetrain.api import DrivetrainError, UnsupportedError
from drivetrain_sharding import leaves_ranks_out

_aten = torch.ops.aten

_ELEMENT_BY_ELEMENT = {
    *("alias", "clone", "copy_", "detach", "fill_", "is_same_size", "lift_fresh", "zero_", "_to_copy"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
}
"""Operations that do not depend on where elements are, beside those that torch calls pointwise."""

_KEPT = {"_foreach_norm", "_foreach_max"}
"""Operations on lists that reduce each tensor; all others of their family are element by element."""

_CURE = (
    "Write `data_parallel: zero1`, under which parameters and gradients are whole between steps. "
    "accelerator.get_state_dict(model) reads them, accelerator.unwrap_model(model).load_state_dict(...) writes them."
)

_SAVE = (
    "On every rank write accelerator.save(accelerator.get_state_dict(model), path), or accelerator.save_model(model, "
    "folder)."
)

_plain = False


@contextmanager
def plain_shards() -> Iterator[None]:
    """Context in which operations are DTensor's; only this package's code may run in it."""
    global _plain  # noqa: PLW0603 (asked by each operation)
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


class DataShard(DTensor):
    """A parameter in shards over data-parallel ranks, its gradient or state, or what was computed from them."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; below autograd. A number over all elements is collective over the shards' mesh."""
        kwargs = kwargs or {}
        if _plain:
            return DTensor.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is _aten._local_scalar_dense.default:  # noqa: SLF001 (what .item(), float() and bool() run)
            return args[0].full_tensor().item()
        args, kwargs = _on_one_mesh(args, kwargs)
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        plain = [one for one in tensors if not isinstance(one, DTensor)]
        if any(one.numel() != 1 for one in plain):
            _refuse(func, "beside a plain tensor")
        if plain and torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            _refuse(func, "beside a number of this rank")
        by_element = _is_by_element(func)
        if not isinstance(args[0] if args else None, (list, tuple)) and not _are_cut_alike(tensors):
            _refuse(func, "beside one of another shape or layout")
        if func._schema.is_mutable and not by_element:  # noqa: SLF001 (torch has no other word)
            _refuse(func, "to write to")
        try:
            if not by_element:
                return _number(func, types, args, kwargs)
            result = DTensor.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except DrivetrainError:
            raise
        except (AssertionError, NotImplementedError, RuntimeError) as problem:
            raise _refusal(func, "in an operation that parts cannot follow") from problem
        return pytree.tree_map_only(DTensor, as_shard, result)

    @property
    def data(self) -> Any:
        """The values, as ``detach()`` gives them."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise UnsupportedError(
            "param.data = ... gives a parameter in shards over data-parallel ranks other memory, which the engine does "
            "not see",
            cure=_CURE,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = self.detach().clone()
        return copied.requires_grad_(self.is_leaf and self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refusal("pickle", "to write", _SAVE)

    def storage(self) -> NoReturn:
        """Raise: safetensors calls this in ``save_pretrained``."""
        raise _refusal("storage()", "to write", _SAVE)

    def tolist(self) -> NoReturn:
        """Raise: elements of other ranks are not here."""
        _refuse("tolist()", "to read")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise: elements of other ranks are not here."""
        _refuse("numpy()", "to read")

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        """Raise: elements of other ranks are not here."""
        _refuse("from_dlpack", "to read")


def as_shard(tensor: DTensor) -> DTensor:
    """Make a DTensor a :class:`DataShard`, in place."""
    if type(tensor) is DTensor:
        tensor.__class__ = DataShard
    return tensor


def refuse_autograd(parameter: Tensor) -> None:
    """Raise where a backward reaches a parameter itself: what a forward computes with is gathered from it."""

    def refuse(_: Tensor) -> NoReturn:
        _refuse("backward", "to differentiate outside of the model's forward")

    if parameter.is_floating_point() or parameter.is_complex():
        trains = parameter.requires_grad
        parameter.requires_grad_()  # as register_hook wants it; one that is frozen may train later
        # The method of the class: that of a parameter is the script's.
        Tensor.register_hook(parameter, refuse)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trains)


def _is_by_element(func: Any) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    name = func._schema.name.partition("::")[2]  # noqa: SLF001
    on_lists = name.startswith(("_foreach_", "_amp_foreach_")) and name not in _KEPT
    return torch.Tag.pointwise in func.tags or name in _ELEMENT_BY_ELEMENT or on_lists


def _on_one_mesh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make numbers that every rank has plain where they are on another mesh than tensors in shards. Not collective.

    Tensor parallelism leaves some parameters whole, which are cut over the data-parallel ranks alone.
    """
    cut = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, DTensor)]
    if len({one.device_mesh for one in cut}) == 1:
        return args, kwargs
    mesh = next((one for one in cut if not _is_number(one)), cut[0]).device_mesh
    moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        DTensor,
        lambda one: _everywhere(one.full_tensor(), mesh) if _is_number(one) and one.device_mesh != mesh else one,
        (args, kwargs),
    )
    return moved


def _are_cut_alike(tensors: list[Any]) -> bool:
    """Whether tensors of more than one number have their elements in the same places."""
    return len({(one.shape, one.placements) for one in tensors if isinstance(one, DTensor) and one.numel() != 1}) <= 1


def _is_number(tensor: DTensor) -> bool:
    return tensor.numel() == 1 and all(isinstance(one, Replicate) for one in tensor.placements)


def _number(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute numbers over all elements, or a list of numbers; raise for other results. Collective over the mesh."""
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, DTensor)]
    with plain_shards():
        of_numbers = all(map(_is_number, tensors))
        if of_numbers or any(map(leaves_ranks_out, tensors)):
            # Reductions such as max raise on ranks without elements.
            args, kwargs = pytree.tree_map_only(DTensor, lambda one: one.full_tensor(), (args, kwargs))
            result = func(*args, **kwargs)
        else:
            result = DTensor.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        is_number = all(one.numel() == 1 for one in pytree.tree_leaves(result) if isinstance(one, Tensor))
        if not (is_number or of_numbers) or torch.Tag.nondeterministic_seeded in func.tags:
            _refuse(func, "whose result depends on the places of elements")
        wholes = pytree.tree_map_only(DTensor, lambda one: one.full_tensor(), result)
        return pytree.tree_map_only(Tensor, lambda one: _everywhere(one, tensors[0].device_mesh), wholes)


def _everywhere(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a number that every rank has."""
    return as_shard(DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False))


def _refuse(func: Any, what: str) -> NoReturn:
    raise _refusal(func, what)


def _refusal(func: Any, what: str, cure: str = _CURE) -> UnsupportedError:
    return UnsupportedError(
        f"{func} was given a tensor in shards over data-parallel ranks (data_parallel: fsdp) {what}; megatron computes "
        "with such tensors element by element, and numbers over all elements, such as sums and norms",
        cure=cure,
    )
