"""Implements torch's pipeline stages with micro-batches of different shapes.

Torch's own ``PipelineStage`` requires every micro-batch to have the shape of the first. Here each shape is known
beforehand (:mod:`.passage`), so that the last batch of an epoch may be uneven; only values are exchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    reverse_closure,
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor

from drivetrain.api import DrivetrainError, UnsupportedError
from drivetrain_megatron.pipeline.values import Meta

logger = logging.getLogger(__name__)


def _writes_to(parameter: Tensor) -> int:
    """Return torch's version counter of a parameter."""
    return 0 if parameter.is_inference() else parameter._version  # noqa: SLF001 (torch counts writes)


@final
class StageModule(nn.Module):
    """Module that torch's stage calls: computes one micro-batch of one stage.

    Args:
        compute: ``compute(index, received)``: a tuple for the next stage, or the loss.
        held: the parameters of this stage by name.
        model: the class of the whole model.
    """

    def __init__(
        self, compute: Callable[[int, tuple[Tensor, ...]], Any], held: Mapping[str, nn.Parameter], model: str
    ) -> None:
        super().__init__()
        self._compute, self._held, self._model = compute, dict(held), model
        self._writes: list[int] = []

    def begin(self) -> None:
        """Note how often each parameter was written to before a run."""
        self._writes = [_writes_to(one) for one in self._held.values()]

    def refusal(self, *, frozen: bool = False) -> UnsupportedError | None:
        """Explains why a backward failed, if the forward of this run has written to a parameter.

        Args:
            frozen: look at parameters without gradients alone, where no backward fails.
        """
        for (name, one), before in zip(self._held.items(), self._writes, strict=True):
            if _writes_to(one) != before and not (frozen and one.requires_grad):
                why = "does so once for each micro-batch"
                if not frozen:
                    why = "the backward of an earlier micro-batch needs it as it was"
                return UnsupportedError(
                    f"the forward of a pipeline stage writes to the parameter {name} of {self._model}, and {why}",
                    cure="Write to parameters after optimizer.step() (`with torch.no_grad(): p.clamp_(-1, 1)`), use "
                    "torch.nn.utils.parametrize for a weight that is computed from another, or "
                    "megatron.num_micro_batches: 1.",
                )
        return None

    def forward(self, *received: Tensor, index: int) -> Any:
        """Compute a micro-batch."""
        return self._compute(index, received)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters whose gradients a split backward computes in its weight step."""
        yield from (one for one in self._held.values() if one.requires_grad)


@final
class Stage(_PipelineStageBase):
    """A stage whose micro-batches may differ in shape.

    Args:
        module: computes it.
        index: which stage.
        num_stages: of how many.
        device: where it computes.
        group: the ranks of the pipeline.
    """

    def __init__(
        self, module: StageModule, index: int, num_stages: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(module, index, num_stages, device, group)
        self._module = module
        self._incoming: Sequence[Sequence[Meta]] = ()
        self._outgoing: Sequence[Sequence[Meta]] = ()
        self._values: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._can_split: dict[tuple[Any, ...], bool] = {}
        self._whole: set[int] = set()
        """Micro-batches whose backward was not split."""

    def expect(self, incoming: Sequence[Sequence[Meta]], outgoing: Sequence[Sequence[Meta]]) -> None:
        """Set the shapes that each micro-batch of the next run receives and sends."""
        self._incoming, self._outgoing = incoming, outgoing
        self._module.begin()
        if hasattr(self, "_stage_meta"):
            # Since 2.12 (or before) torch looks at their number.
            counted: Any = tuple(incoming[0])
            self._stage_meta.inputs = counted
        self.chunks = len(incoming)

    def check_written(self) -> None:
        """Refuse a forward that wrote to a frozen parameter, such as a teacher's, in each of several micro-batches."""
        refusal = self._module.refusal(frozen=True) if len(self._incoming) > 1 else None
        if refusal is not None:
            raise refusal

    def clear_runtime_states(self) -> None:
        """Discard the state of the previous run."""
        self.fwd_cache.clear()
        self.bwd_cache.clear()
        self.output_chunks.clear()
        self._values.clear()
        self._gradients.clear()
        self._whole.clear()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a micro-batch's values; allocates memory at the call."""
        if self.is_first:
            return []
        values = [meta.empty(self.device) for meta in self._incoming[fwd_chunk_id]]
        self._values[fwd_chunk_id] = values
        return [self._receive(value, self.stage_index - 1) for value in values]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a micro-batch's values to the next stage."""
        if self.is_last:
            return []
        values, _ = self.fwd_cache[fwd_chunk_id]
        return [self._send(value.detach(), self.stage_index + 1) for value in values]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of what was sent, where it is trained."""
        if not self.has_backward or self.is_last:
            return []
        gradients = [meta.empty(self.device) if meta.trained else None for meta in self._outgoing[bwd_chunk_id]]
        self._gradients[bwd_chunk_id] = gradients
        return [self._receive(one, self.stage_index + 1) for one in gradients if one is not None]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of what was received, where it is trained."""
        if not self.has_backward or self.is_first:
            return []
        return [
            self._send(one, self.stage_index - 1) for one in self.get_local_bwd_output(bwd_chunk_id) if one is not None
        ]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro-batch; all of it where torch would compute wrong gradients of weights by themselves."""
        if not full_backward and not self.is_first and not self._splits(bwd_chunk_id, loss):
            self._whole.add(bwd_chunk_id)
            full_backward = True
        with self._saying_what_was_written():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def _splits(self, index: int, loss: Tensor | None) -> bool:
        """Return :func:`can_split`, cached by shapes."""
        weights = list(self.submod.parameters())
        told = (*self._incoming[index], *map(id, weights))
        if told not in self._can_split:
            outputs, received = self.fwd_cache[index]
            ends = [loss] if self.is_last and loss is not None else list(outputs)
            self._can_split[told] = can_split(ends, received, weights)
            if not self._can_split[told]:
                logger.info("Stage %d computes the gradients of its weights at once.", self.stage_index)
        return self._can_split[told]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Backward of the weights, where it was left for now."""
        if bwd_chunk_id in self._whole:
            self._whole.discard(bwd_chunk_id)
            return
        with self._saying_what_was_written():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @contextmanager
    def _saying_what_was_written(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            refusal = None if isinstance(error, DrivetrainError) else self._module.refusal()
            if refusal is None:
                raise
            raise refusal from error

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """The gradients of what was received; zeros where the loss does not depend on it."""
        # Older releases of torch have one more for each keyword of a stage's forward, which needs no gradient.
        found = self.bwd_cache.pop(mb_index)[: len(self._incoming[mb_index])]
        return tuple(
            None if not meta.trained else meta.empty(self.device).zero_() if one is None else one
            for one, meta in zip(found, self._incoming[mb_index], strict=True)
        )

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the values of the stage before, which is on this rank."""
        self._values[mb_index] = [value.detach() for value in prev_stage_outputs]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients from the next stage, which is on this rank."""
        self._gradients[mb_index] = list(next_stage_bwd_outputs)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        trains = self.has_backward and torch.is_grad_enabled()
        return tuple(
            value.requires_grad_(trains and meta.trained)
            for value, meta in zip(self._values.pop(fwd_chunk_id), self._incoming[fwd_chunk_id], strict=True)
        )

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        return tuple(self._gradients.pop(bwd_chunk_id))

    def _rank_of(self, stage: int) -> int:
        """Global rank that has a stage."""
        assert self.group is not None
        return dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])

    def _receive(self, memory: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, memory, self._rank_of(stage), self.group)

    def _send(self, value: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, value.contiguous(), self._rank_of(stage), self.group)

    def _validate_fwd_input(self, *_: Any) -> None:
        """Shapes are known; older releases of torch would compare them with those of a first micro-batch."""

    def _validate_fwd_outputs(self, *_: Any) -> None:
        """See :meth:`_validate_fwd_input`."""

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        """Shapes are known."""

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        """Shapes are known."""

    def _create_grad_recv_info(self, act_send_info: dict[int, list[Any]]) -> tuple[Any, ...]:
        """Return nothing: shapes are known beforehand."""
        return ()


def can_split(outputs: Sequence[Tensor], received: Sequence[Any], weights: Sequence[Tensor]) -> bool:
    """Whether torch can compute gradients of what was received first, and those of the weights later.

    It keeps the gradients at the nodes where weights join the path from the outputs back to the received values, and
    continues from there. A weight that joins it nowhere (behind frozen parameters, or in a decoder before it attends to
    its encoder) gets no gradient; if weights share some of these nodes but not all, some count twice. It never
    finds a ``DTensor``: forward computes with a local tensor in its place. Older releases count more of them twice
    (:func:`splits_rightly`).

    Args:
        outputs: of the stage, or its loss.
        received: its inputs.
        weights: its trained parameters.
    """
    if any(isinstance(weight, DTensor) for weight in weights) or not splits_rightly():
        return False
    edges = construct_reverse_graph([_origin(one) for one in outputs if one.requires_grad])
    starts = [_origin(one) for one in received if isinstance(one, Tensor) and one.requires_grad]
    way, _ = reverse_closure(starts, set(), edges)
    places: dict[Any, set[Any]] = {}
    for weight in weights:
        # What no output depends on needs no gradient. Lookups would add to this dictionary.
        if (start := _origin(weight)) in edges:
            _, met = reverse_closure([start], way, edges)
            if not met or any(places.setdefault(place, met) != met for place in met):
                return False
    return True


def _origin(tensor: Tensor) -> Any:
    """Return the ``grad_fn`` of a tensor that requires gradients; the gradient accumulator of a leaf."""
    return _get_grad_fn_or_grad_acc(tensor)


@cache
def splits_rightly() -> bool:
    """Whether torch's split backward computes the same weight gradients as a full backward.

    Torch 2.9 counts twice the gradients behind a second node where a weight joins the path, and adds up the gradients
    of all outputs of such a node as if they were of its first. The check runs a graph that has both: the gradient of
    ``(r + w) * w + 10 * (r + 2 * w)`` by ``w`` is ``r + 2 * w + 20``.
    """

    def tried() -> bool:
        received, weight = (nn.Parameter(torch.tensor(value, device="cpu")) for value in (3.0, 2.0))
        first, second = _Sums.apply(received, weight)  # type: ignore[no-untyped-call]  # As torch declares it.
        _, groups = stage_backward_input([first * weight + 10 * second], None, [received], iter([weight]))
        stage_backward_weight(iter([weight]), groups)
        return weight.grad is not None and weight.grad.item() == 27.0

    # Modes of the caller, such as one for tensors without values, are those of its thread.
    with ThreadPoolExecutor(1) as other:
        return other.submit(tried).result()


class _Sums(torch.autograd.Function):
    """Returns ``r + w`` and ``r + 2 * w``: an operation with two outputs."""

    @staticmethod
    def forward(_: Any, received: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return received + weight, received + 2 * weight

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        first, second = gradients
        return first + second, first + 2 * second
