"""Runs Megatron-Core's model by Megatron-Core's schedules: training calls are deferred until the loss is known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from drivetrain.api import UsageError
from drivetrain_megatron.core_engine.calls import Batch
from drivetrain_megatron.core_engine.description import Description
from drivetrain_megatron.core_engine.parallel_state import ParallelState
from drivetrain_megatron.pipeline import replay
from drivetrain_megatron.pipeline.batches import Rows
from drivetrain_megatron.pipeline.calls import ModelCall
from drivetrain_megatron.pipeline.compiling import uncut
from drivetrain_megatron.pipeline.deferred import Node, read
from drivetrain_megatron.pipeline.passage import Crossing
from drivetrain_megatron.pipeline.programs import Programs
from drivetrain_megatron.pipeline.values import leaves, rebuilt
from drivetrain_megatron.pipeline.work import Work

logger = logging.getLogger(__name__)

_MANY_FORMS = 256
"""Batch shapes whose output on the meta device is cached; it takes a tenth of a millisecond to make."""


@dataclass(frozen=True)
class _Way:
    """Structure and shapes of a call's output, without values."""

    output: Any
    crossings: Sequence[Crossing] = ()


@final
class CorePipeline:
    """One model over the ranks of the axes ``tp`` and ``pp``.

    Args:
        module: the user's model.
        groups: Megatron-Core's, of ranks.
        wrapped: this rank's part in Megatron-Core's data parallelism.
        description: of the whole.
        group: the ranks of the pipeline.
        device: of this rank.
        num_parts: micro-batches in a batch; ``None``: as many as stages.
        prepared: called before each run, which reads parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: ParallelState,
        wrapped: DistributedDataParallel,
        description: Description,
        group: dist.ProcessGroup,
        device: str,
        num_parts: int | None,
        prepared: Callable[[], None],
    ) -> None:
        self._module, self._groups, self._wrapped, self._description = module, groups, wrapped, description
        self.group, self._device, self._prepared = group, torch.device(device), prepared
        self._num_stages = dist.get_world_size(group)
        self._last = dist.get_rank(group) == self._num_stages - 1
        self._num_parts = num_parts or self._num_stages
        self._programs = Programs()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._ways: dict[Hashable, _Way] = {}
        self._warned = False
        self.version = 0
        """Grows with each change of the parameters."""

    def changed(self) -> None:
        """Parameters have other values now: outputs of calls before are not to be had any more."""
        self.version += 1

    # ---- what a script calls ----------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output that the model will have, with deferred tensors."""
        batch = self._batch(args, kwargs)
        rows = Rows.of(len(batch.input_ids), self._num_parts)
        return ModelCall(self, batch, rows, self._way(batch), self.version).outputs()

    @torch.no_grad()
    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward; every rank gets the output. Collective over ``tp`` and ``pp``."""
        batch = self._batch(args, kwargs)
        way = self._way(batch)
        return self._everywhere(self._forward(batch, way, training=self._module.training), way.output)

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """Return the batch of a call; raises if this layout does not support it."""
        batch = self._description.calls.read(args, kwargs)
        length, degree = batch.input_ids.shape[1], self._wrapped.config.tensor_model_parallel_size
        if self._wrapped.config.sequence_parallel and length % degree:
            raise UsageError(
                f"sequence_parallel shares {length} positions over {degree} ranks, which do not divide them",
                cure=f"Pad sequences to a multiple of {degree}, or leave sequence_parallel out.",
            )
        limit = self._description.gpt["max_sequence_length"]
        if self._description.looked_up and length > limit:
            raise UsageError(f"{length} positions, and the model has {limit}", cure="Cut the sequences.")
        return batch

    def _way(self, batch: Batch) -> _Way:
        """The output's containers, with tensors that have shapes only."""
        way = self._ways.get(batch.form)
        if way is None:
            with self._fake:
                way = _Way(self._description.calls.absent(batch, self._device))
            if len(self._ways) == _MANY_FORMS:
                self._ways.clear()
            self._ways[batch.form] = way
        return way

    # ---- training ---------------------------------------------------------------------------------------------------

    def train(self, call: ModelCall[Batch, _Way], loss: Node, scaled: Callable[[Tensor], Tensor]) -> None:
        """Run the schedule, forward and backward of ``scaled(loss)``; then values are known. Collective.

        Args:
            call: the call of the loss.
            loss: recorded, 0-d.
            scaled: what backward starts from, given a loss whose mean over micro-batches is the batch's.
        """
        rows, batch = call.rows, call.arguments
        parts = [batch.part(rows, index) for index in range(len(rows))]
        ways = [self._way(part) for part in parts]
        outputs = dict(enumerate(leaves(ways[0].output)))
        recordings = self._programs.recordings(loss, call.living(), rows, outputs)
        work = Work(parts, ways, rows, recordings, ())
        wanted = {node.place for each in recordings for node in each.nodes if node.func is None}

        def finish(index: int, computed: Tensor) -> tuple[Tensor, dict[str, Any]]:
            found = scaled(
                work.finish(index, self._outputs(computed, parts[index], ways[index].output, len(rows), wanted))
            )
            return found, {}

        def labels(index: int) -> Tensor | None:
            calls, model = self._description.calls, self._wrapped.module
            return calls.labels(model, parts[index], ways[index].output, wanted) if self._last else None

        self._run(parts, finish, labels, forward_only=False, training=True)
        work.share(self._num_stages - 1, self.group, self._device)
        read(loss)
        call.finish()

    def read(self, call: ModelCall[Batch, _Way], node: Node) -> Any:
        """A node's value by running forward once more, without dropout. Collective over ``tp`` and ``pp``."""
        if call.version != self.version:
            raise UsageError(
                "a value of the model's output is read after the optimizer stepped, and backward did not compute it",
                cure="Read it before optimizer.step(); numbers that exist when backward is called stay readable.",
            )
        if not self._warned:
            self._warned = True
            logger.warning(
                "The output of a model under megatron.engine: megatron_core is read before accelerator.backward(loss) "
                "computed it: the model runs once more, forward only. Read losses after backward."
            )
        nodes = replay.ordered([node])
        found: Any = None
        with torch.no_grad():
            output = self._forward(call.arguments, call.way, training=False)
            if output is not None:
                whole = Rows.of(call.rows.size, 1)
                found = replay.run(uncut(nodes), nodes, whole, 0, dict(enumerate(leaves(output))))[id(node)]
            return self._everywhere(found, node.absent)

    # ---- runs -------------------------------------------------------------------------------------------------------

    def _run(
        self,
        parts: Sequence[Batch],
        finish: Callable[[int, Tensor], Any],
        labels: Callable[[int], Tensor | None],
        *,
        forward_only: bool,
        training: bool,
    ) -> list[Any]:
        """Megatron-Core's schedule over the parts; on the last stage what ``finish`` returned. Collective.

        Args:
            parts: micro-batches.
            finish: given the number of a part and what the model computed.
            labels: of a part, for a model that computes losses by itself.
            forward_only: without backward.
            training: with dropout.
        """
        self._prepared()
        if self._wrapped.training != training:
            self._wrapped.train(training)
        config = self._wrapped.config
        rows, length = parts[0].input_ids.shape
        config.variable_seq_lengths = len({part.input_ids.shape for part in parts}) > 1

        def step(following: Any, model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            index, part = next(following)
            computed = model(part.input_ids, part.positions, part.masked, labels=labels(index))
            return computed, lambda computed, non_loss_data=False: finish(index, computed)  # noqa: ARG005 (its signature)

        with self._groups.shared():
            found: list[Any] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(enumerate(parts)),
                model=self._wrapped,
                num_microbatches=len(parts),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return found

    def _forward(self, batch: Batch, way: _Way, *, training: bool) -> Any:
        """The output on the last stage, ``None`` on others. Collective over ``tp`` and ``pp``."""
        rows = Rows.of(len(batch.input_ids), self._num_parts)
        parts = [batch.part(rows, index) for index in range(len(rows))]
        places = set(range(len(leaves(way.output))))

        def finish(index: int, computed: Tensor) -> Any:
            return leaves(self._outputs(computed, parts[index], self._way(parts[index]).output, len(rows), places))

        found = self._run(parts, finish, lambda _: None, forward_only=True, training=training)
        if not self._last:
            return None
        together = [
            torch.stack(each).mean(0)
            if not each[0].dim()
            else torch.cat(each)
            if isinstance(each[0], Tensor)
            else each[0]
            for each in zip(*found, strict=True)
        ]
        return rebuilt(way.output, together)

    def _outputs(self, computed: Tensor, batch: Batch, absent: Any, num_parts: int, wanted: set[int]) -> Any:
        """See :meth:`drivetrain_megatron.core_engine.calls.Calls.outputs`."""
        model = self._wrapped.module
        return self._description.calls.outputs(model, computed, batch, absent, num_parts, wanted)

    def _everywhere(self, value: Any, like: Any) -> Any:
        """The last stage's tensors on every rank. Collective over the pipeline.

        Args:
            value: on the last stage.
            like: the same without values.
        """
        if self._num_stages == 1:
            return value
        found = []
        for mine, absent in zip(leaves(value if self._last else like), leaves(like), strict=True):
            one = mine
            if isinstance(absent, Tensor):
                one = mine if self._last else torch.empty(absent.shape, dtype=absent.dtype, device=self._device)
                one = one.detach().contiguous()
                dist.broadcast(one, group=self.group, group_src=self._num_stages - 1)
            found.append(one)
        return rebuilt(like, found)
