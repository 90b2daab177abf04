"""Applies a tensor-parallel plan to a model: shards its parameters, which modules see in their full shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from drivetrain.api import UnsupportedError
from drivetrain_megatron.compiled import refuse_compiling
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.cut import CutTensor, as_cut, detect_anomalies, local_part
from drivetrain_megatron.tensor.layout import Layout
from drivetrain_megatron.tensor.packing import Packing, remember
from drivetrain_megatron.tensor.plan import Plan, make_plan
from drivetrain_megatron.tensor.randomness import start_alike
from drivetrain_megatron.tensor.sharded import Sharded, full_tensor, sharded
from drivetrain_sharding import refuse_as_data


@dataclass
class TensorParallel:
    """A model after :func:`apply_tensor_parallel`.

    Args:
        plan: what was cut.
        ring: the ranks of the axis ``tp``.
        mesh: the same as a mesh; ``None`` where the ring is simulated, and parts are plain tensors.
        layouts: for each cut parameter, by its first name, how.
        keeps_strides: a cut parameter has the strides of the whole; else those of a tensor that lies row by row.
        undo: takes the hooks off the modules again.
    """

    plan: Plan
    ring: Ring
    mesh: DeviceMesh | None
    layouts: dict[str, Layout] = field(default_factory=dict)
    keeps_strides: bool = True
    undo: list[Callable[[], None]] = field(default_factory=list)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard of a parameter as a DTensor, or all of one that is not sharded. Not collective.

        Args:
            name: the parameter's first name.
            whole: its value; no gradient flows through this.
        """
        layout = self.layouts.get(name)
        if layout is None:
            return whole
        own = self.ring.part(whole, layout).clone()
        if self.mesh is None:
            return own
        strides = whole.stride() if self.keeps_strides else None
        return as_cut(as_dtensor(own, layout, self.mesh, strides), layout, self.ring)


def apply_tensor_parallel(module: nn.Module, mesh: DeviceMesh, section: MegatronConfig) -> TensorParallel:
    """Cut a module's parameters in place. Collective over the mesh; every rank must hold the same values before.

    Parameters that the plan names become ``DTensor`` parameters, sharded over the mesh, that hold only this rank's
    part; tied ones stay tied. The others stay as they are, the same on every rank.

    Args:
        module: the user's module, or the part of it that a pipeline stage has.
        mesh: the axis ``tp``.
        section: ``tp_plan`` and ``sequence_parallel`` are read.

    Raises:
        UsageError: as :func:`~drivetrain_megatron.tensor.plan.make_plan`.
    """
    ring = Ring(mesh.get_group(), sequence_parallel=section.sequence_parallel)
    plan = make_plan(module, ring.size, section.tp_plan)
    # fully_shard takes parameters that lie row by row; random numbers like its shards are refused.
    done = TensorParallel(plan, ring, mesh, keeps_strides=section.data_parallel != "fsdp")
    start_alike(ring, mesh.device_type)
    detect_anomalies()
    refuse_as_data(CutTensor)
    _cut(module, done)
    packed = {name: layout for name, layout in done.layouts.items() if layout.parts is not None}
    remember(module, Packing(packed, ring.size))
    return done


def simulate_tensor_parallel(module: nn.Module, plan: Plan, ring: Ring) -> TensorParallel:
    """Like :func:`apply_tensor_parallel`, for rank 0 of a simulated group and without values. Not collective.

    Args:
        module: its parameters are fake tensors.
        plan: of the model.
        ring: the simulated group.
    """
    done = TensorParallel(plan, ring, None)
    _cut(module, done)
    return done


def _cut(module: nn.Module, done: TensorParallel) -> None:
    """Replace the parameters of the plan by their shards, which modules see in their full shape."""
    ring, homes = done.ring, _homes(module)
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    uses: dict[nn.Module, list[_Use]] = {}
    for key, places in homes.items():
        name = names[key]
        cut = done.plan.cuts.get(name)
        if cut is None:
            continue
        whole = places[0][0].get_parameter(places[0][1])
        layout = Layout(tuple(whole.shape), cut.dim % whole.dim(), cut.parts)
        done.layouts[name] = layout
        parameter = nn.Parameter(done.part(name, whole.detach()), requires_grad=whole.requires_grad)
        if whole.grad is not None:  # Of a backward before prepare.
            parameter.grad = done.part(name, whole.grad)
        users = [module.get_submodule(scope) for scope in sorted(done.plan.used_in.get(name, ()))]
        for holder, attribute in places:
            holder.register_parameter(attribute, parameter)
            use = _Use(holder, attribute, layout, name)
            for user in [holder, *users]:
                uses.setdefault(user, []).append(use)
    for user, wanted in uses.items():
        done.undo.append(_install(user, wanted, ring))
    done.undo.append(_WholeForHooks(module).undo)


def _homes(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules and attributes that hold each parameter, by identity."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for attribute, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((part, attribute))
    return found


def as_dtensor(own: Tensor, layout: Layout, mesh: DeviceMesh, strides: tuple[int, ...] | None = None) -> DTensor:
    """This rank's part as a DTensor. One that is packed has its parts' shares one behind another.

    Args:
        own: the part.
        layout: how the whole is cut.
        mesh: the axis ``tp``.
        strides: of the whole, row by row if left out. Random numbers are drawn in the whole's order of memory.
    """
    stride = strides or torch.empty(layout.shape, device="meta").stride()
    shape = torch.Size(layout.shape)
    return DTensor.from_local(own, mesh, [Shard(layout.dim)], run_check=False, shape=shape, stride=stride)


@dataclass(frozen=True)
class _Use:
    """A sharded parameter that a module's forward reads: its module, attribute and cut."""

    holder: nn.Module
    attribute: str
    layout: Layout
    name: str


_ENTERED: list[Callable[[], None]] = []
"""Callbacks that restore the parameters of each module whose forward is running, outermost first."""


def is_running() -> bool:
    """Whether a forward is running in which parameters appear in their full shape."""
    return bool(_ENTERED)


@contextmanager
def parameters_come_back() -> Iterator[None]:
    """However a forward in here ends: torch runs no hooks where a pipeline leaves it because the next stage begins."""
    depth = len(_ENTERED)
    try:
        yield
    finally:
        while len(_ENTERED) > depth:
            _ENTERED.pop()()


def _nothing() -> None:
    """Do nothing: no parameters were replaced."""


def _refuse_missing(homes: list[dict[str, Any]], uses: list[_Use]) -> None:
    """Raise where the script has put something else in the place of a cut parameter, as pruning does."""
    for home, use in zip(homes, uses, strict=True):
        if use.attribute not in home:
            raise UnsupportedError(
                f"{use.name} was a parameter, cut over tensor-parallel ranks, when the model was prepared, and the "
                "script has replaced it by something else",
                cure="Prune and parametrize a model before accelerator.prepare(model, optimizer).",
            )


def _install(user: nn.Module, uses: list[_Use], ring: Ring) -> Callable[[], None]:
    """While the module's forward runs, its cut parameters are :class:`Sharded`; otherwise they are parameters."""
    put_aside: list[list[Any]] = []

    def places(module: nn.Module) -> list[dict[str, Any]]:
        # A copy of a module has these hooks too, and parameters of its own.
        return [(module if use.holder is user else use.holder)._parameters for use in uses]  # noqa: SLF001

    def enter(module: nn.Module, *_: Any) -> None:
        homes = places(module)
        try:
            refuse_compiling(module)
            _refuse_missing(homes, uses)
        except UnsupportedError:
            _ENTERED.append(_nothing)  # `leave` is called all the same.
            raise
        before = [home[use.attribute] for home, use in zip(homes, uses, strict=True)]
        put_aside.append(before)
        for home, use, parameter in zip(homes, uses, before, strict=True):
            if isinstance(parameter, DTensor) or ring.group is None:
                # Gradients are off where a later pipeline stage begins its forward, and on where it reads this.
                with torch.enable_grad():
                    layout = parameter.tp_layout if isinstance(parameter, CutTensor) else use.layout
                    part = local_part(parameter) if isinstance(parameter, DTensor) else parameter
                    home[use.attribute] = sharded(part, layout, ring, use.name)
        _ENTERED.append(lambda: put_back(module))

    def put_back(module: nn.Module) -> None:
        for home, use, parameter in zip(places(module), uses, put_aside.pop(), strict=True):
            home[use.attribute] = parameter

    def leave(*_: Any) -> None:
        _ENTERED.pop()()

    handles = [user.register_forward_pre_hook(enter), user.register_forward_hook(leave, always_call=True)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _whole_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return whole_tensors((args, kwargs))


def _whole_output(_: nn.Module, _args: Any, output: Any) -> Any:
    return whole_tensors(output)


class _WholeForHooks:
    """Gives modules with backward hooks whole inputs and outputs, so that the hooks get whole gradients.

    Args:
        module: the whole model, with whose forwards new hooks are looked for.
    """

    def __init__(self, module: nn.Module) -> None:
        self._handles: dict[nn.Module, list[Any]] = {}
        self._next_id = -1
        """The next hook of this process, of any tensor or module, that is not looked for yet."""
        self._look_handle = module.register_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, _: Any) -> None:
        if RemovableHandle.next_id == self._next_id:
            return
        for part in module.modules():
            if (part._backward_hooks or part._backward_pre_hooks) and part not in self._handles:  # noqa: SLF001
                self._handles[part] = [
                    part.register_forward_pre_hook(_whole_inputs, with_kwargs=True),
                    part.register_forward_hook(_whole_output),
                ]
        self._next_id = RemovableHandle.next_id

    def undo(self) -> None:
        """Take the hooks off the modules again."""
        for handle in (self._look_handle, *(one for several in self._handles.values() for one in several)):
            handle.remove()


def whole_tensors(value: Any) -> Any:
    """A nested output with whole tensors in place of sharded ones. Collective over the axis ``tp``."""
    if isinstance(value, Tensor):
        return full_tensor(value)
    if isinstance(value, dict):
        for key, each in list(value.items()):
            if _holds_part(each):
                value[key] = whole_tensors(each)
        return value
    if type(value) in {list, tuple}:
        return type(value)(whole_tensors(each) for each in value)
    return value


def _holds_part(value: Any) -> bool:
    return any(True for _ in _parts(value))


def _parts(value: Any) -> Iterator[Sharded]:
    if isinstance(value, Sharded):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _parts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _parts(each)


__all__ = ["TensorParallel", "apply_tensor_parallel", "as_dtensor", "whole_tensors"]
