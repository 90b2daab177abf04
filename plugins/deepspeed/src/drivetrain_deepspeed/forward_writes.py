"""Modules that write to their own parameters in forward.

Under ZeRO stage 3 such a write goes to what was gathered for this forward, and is lost with it. Under the other stages
it is kept, and differs between ranks where it depends on the samples that a rank reads, as in an embedding with
``max_norm``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn

from drivetrain.api import Topology, UnsupportedError, collectives
from drivetrain_deepspeed.guard import Guard, in_parts
from drivetrain_deepspeed.layout import partition_of, partitioned
from drivetrain_sharding import SameOrder


def refuse_max_norm(module: nn.Module, stage: int, dp_size: int) -> None:
    """Raise where an embedding would renormalise other rows on each rank, or lose them. Not collective."""
    if stage < 3 and dp_size == 1:
        return
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            why = (
                "ZeRO stage 3 drops what a forward writes to parameters"
                if stage == 3
                else "each rank would write those that its own samples read"
            )
            raise UnsupportedError(
                f"{name or 'the model'} ({type(layer).__name__}) of {type(module).__name__} has max_norm, by which "
                f"each forward writes to the rows that it reads, and {why}",
                cure="Make it without max_norm and shorten rows in forward: rows * (max_norm / rows.norm(dim=-1, "
                "keepdim=True).clamp(min=max_norm)), or use one process.",
            )


_VERSION = attrgetter("_version")


@final
class WatchedForwards:
    """Stage 3: compares torch's counts of writes around each forward of the model, and values around some.

    Values are those of each module's own parameters, before and after its first forward in training, and again in the
    model's forwards 1, 2, 4, 8, ...: torch does not count what is written through ``data``. Before the first in
    training, forwards in evaluation are compared too. One module's parameters are kept at a time, and those of the
    modules that it is called by.

    A module may write to parameters of its children, too, which are gathered when it reads them. Each rank compares
    its own part with what was gathered, and the ranks agree at the end of such a forward of the model.

    Args:
        module: the user's, after DeepSpeed has set its hooks.
        theirs: handles of DeepSpeed's hooks on forwards.
        guard: of the module's parameters.
        topology: the job.
        order: compares the first collectives over ranks.
        exact: what is gathered has the values of the parts: it was not quantised on the way.
    """

    def __init__(
        self,
        module: nn.Module,
        theirs: Sequence[Any],
        guard: Guard,
        topology: Topology,
        order: SameOrder,
        *,
        exact: bool,
    ) -> None:
        self._module, self._guard, self._topology, self._exact = module, guard, topology, exact
        self._order = order
        self._pieces = {id(piece.parameter): piece for piece in partitioned(module)}
        self._written = 0
        """Place in `_pieces`, counted from 1, of a parameter that was written to outside of its own module."""
        self._handles: dict[nn.Module, list[Any]] = {}
        self._before: dict[nn.Module, list[tuple[Any, int, Tensor]]] = {}
        self._theirs = {handle.id for handle in theirs}
        self._parameters = [piece.parameter for piece in self._pieces.values()]
        self._number = 0
        self._compare_values()

    def _compare_values(self) -> None:
        """Compare values in the next forward in training of each layer."""
        for layer in self._module.modules():
            if layer not in self._handles and any(id(each) in self._pieces for each in layer.parameters()):
                before = layer.register_forward_pre_hook(self._begin)
                after = layer.register_forward_hook(self._end)
                # DeepSpeed's hook releases the parameters; hooks before it write to gathered ones too.
                hooks: Any = layer._forward_hooks  # noqa: SLF001
                earlier = [number for number in hooks if number != after.id]
                first = next((place for place, number in enumerate(earlier) if number in self._theirs), len(earlier))
                for number in earlier[first:]:
                    hooks.move_to_end(number)
                self._handles[layer] = [before, after]

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of the model, with gradients.

        Raises:
            UnsupportedError: it has written to parameters.
        """
        number = self._number
        self._number += 1
        if number and not number & (number - 1):
            self._compare_values()
        before = list(map(_VERSION, self._parameters))
        output = forward(*args, **kwargs)
        after = list(map(_VERSION, self._parameters))
        if after != before:
            place = next(place for place, count in enumerate(before) if after[place] != count)
            raise self._guard.lost(type(self._module).__name__, id(self._parameters[place]))
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, layer: nn.Module, _: Any) -> None:
        if layer in self._handles:
            held = [each for each in layer._parameters.values() if each is not None and not in_parts(each)]  # noqa: SLF001
            self._compare_parts(held)
            self._before[layer] = [(each, each._version, each.detach().clone()) for each in held]  # noqa: SLF001

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, layer: nn.Module, _inputs: Any, _output: Any) -> None:
        for parameter, version, values in self._before.pop(layer, ()):
            if in_parts(parameter):
                continue
            # In-place operations count, also those that change nothing this time; those on `data` do not.
            if parameter._version != version or not torch.equal(parameter.detach(), values):  # noqa: SLF001
                raise self._guard.lost(type(layer).__name__, id(parameter))
        if layer in self._handles:
            self._compare_parts(layer.parameters())
        if layer.training:
            if layer is self._module and layer in self._handles and torch.is_grad_enabled():
                self._agree()
            for handle in self._handles.pop(layer, ()):
                handle.remove()

    def _compare_parts(self, parameters: Iterable[Any]) -> None:
        """Record gathered parameters whose values differ from this rank's partition."""
        # The script may call a layer directly before its writes to small parameters are taken in.
        if self._written or not self._exact or not self._guard.engine_at_work:
            return
        for each in parameters:
            piece = self._pieces.get(id(each))
            if piece is not None and piece.numel and not in_parts(each):
                part = partition_of(each)[: piece.numel]
                whole = each.detach().reshape(-1)[piece.start : piece.start + piece.numel]
                if not torch.equal(part.to(whole.device), whole):
                    self._written = 1 + list(self._pieces).index(id(each))
                    return

    def _agree(self) -> None:
        """Raise on every rank where one has noted a parameter. Collective."""
        found = torch.tensor([self._written], device=self._topology.device)
        if self._topology.world_size > 1:
            if not self._order.over:
                self._order.meet(f"ends the forward of {type(self._module).__name__}")
            found = collectives.all_reduce(found, "max", self._topology)
        if number := int(found):
            raise self._guard.lost(type(self._module).__name__, list(self._pieces)[number - 1])

    def remove(self) -> None:
        """Stop comparing: the engine goes."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
