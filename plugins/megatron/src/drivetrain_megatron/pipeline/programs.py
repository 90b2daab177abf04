"""Cache of programs that compute recorded values on micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from drivetrain.api import UnsupportedError
from drivetrain_megatron.pipeline import replay
from drivetrain_megatron.pipeline.batches import Rows
from drivetrain_megatron.pipeline.compiling import compiled, example
from drivetrain_megatron.pipeline.deferred import Node
from drivetrain_megatron.pipeline.work import Recording


@final
class Programs:
    """Programs for the recordings of one model, by key."""

    def __init__(self) -> None:
        self._known: dict[Any, replay.Program | UnsupportedError] = {}
        self._shown: set[Any] = set()
        """Keys of recordings of which there was an example."""

    def recordings(self, loss: Node, others: Sequence[Node], rows: Rows, outputs: dict[int, Any]) -> list[Recording]:
        """Return the recordings, with programs, of a loss and of other values that the script may read.

        Args:
            loss: comes first.
            others: left out if they are no sum or mean; reading them before the step runs another forward.
            rows: how the batch is cut.
            outputs: of the model for the first micro-batch, without values.

        Raises:
            UnsupportedError: the loss is no sum or mean over micro-batches.
        """
        found = [self._recording(loss, rows, outputs)]
        for node in others:
            if node is not loss:
                try:
                    found.append(self._recording(node, rows, outputs))
                except UnsupportedError:
                    continue
        return found

    def example(self, loss: Node, rows: Rows, outputs: dict[int, Any]) -> tuple[Tensor, int] | None:
        """See :func:`~drivetrain_megatron.pipeline.compiling.example`; ``None`` but for the first time.

        Args:
            loss: of a batch.
            rows: as for :meth:`recordings`.
            outputs: likewise.
        """
        recording = self._recording(loss, rows, outputs)
        told = replay.key(recording.nodes, rows)
        if told in self._shown:
            return None
        self._shown.add(told)
        return example(recording.program, recording.nodes, rows, outputs)

    def _recording(self, node: Node, rows: Rows, outputs: dict[int, Any]) -> Recording:
        nodes = replay.ordered([node])
        told = replay.key(nodes, rows)
        found = self._known.get(told)
        if found is None:
            try:
                found = compiled(nodes, rows, outputs)
            except UnsupportedError as problem:
                found = copy.copy(problem)
            self._known[told] = found
        if isinstance(found, UnsupportedError):
            # A copy has no traceback, which would keep what this call refers to, and grow with each.
            raise copy.copy(found)
        return Recording(nodes, found)
