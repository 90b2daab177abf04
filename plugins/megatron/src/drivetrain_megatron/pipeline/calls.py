"""State of one training call of a pipelined model, until the optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor

from drivetrain.api import UnsupportedError
from drivetrain_megatron.pipeline.batches import Dims, Rows
from drivetrain_megatron.pipeline.deferred import TRAIN_STEP, Deferred, Node, outputs, read
from drivetrain_megatron.pipeline.passage import Crossing
from drivetrain_megatron.pipeline.replay import LossFunction
from drivetrain_megatron.pipeline.values import leaves, rebuilt


class Way(Protocol):
    """Trace of a forward: output and stage boundaries."""

    @property
    def output(self) -> Any:
        """Output of the model, without values."""

    @property
    def crossings(self) -> Sequence[Crossing]:
        """Boundary activations of each cut."""


ArgumentsT = TypeVar("ArgumentsT")
WayT = TypeVar("WayT", bound=Way)


class Reader(Protocol):
    """Runs the forward of a call again to read a value."""

    def read(self, call: ModelCall[Any, Any], node: Node) -> Any:
        """A node's value now."""


@final
class ModelCall(Generic[ArgumentsT, WayT]):
    """Arguments and deferred output of one call of the model.

    Args:
        reader: runs it forward when a value is read too early.
        arguments: of the whole batch, as the reader keeps them.
        rows: how the batch is cut.
        way: how it goes through the model.
        version: of the parameters.
        dims: in which each leaf of the arguments has the rows; unused if the batch is not split.
        trained: which parameters required gradients, where the forward runs later.
    """

    def __init__(
        self,
        reader: Reader,
        arguments: ArgumentsT,
        rows: Rows,
        way: WayT,
        version: int,
        dims: Dims = (),
        trained: tuple[bool, ...] = (),
    ) -> None:
        self._reader = reader
        self.arguments, self.rows, self.way, self.version = arguments, rows, way, version
        self.dims, self.trained = dims, trained
        self._given: list[weakref.ref[Deferred]] = []
        self._filled: list[tuple[Tensor, Node]] = []
        self.recorded_only = False
        """Reads raise: the caller accepts a function in place of the output."""

    @property
    def model(self) -> object:
        """Object that identifies the model: it runs all of its calls."""
        return self._reader

    def outputs(self) -> Any:
        """The model's output with deferred tensors."""
        return rebuilt(
            self.way.output,
            [
                outputs(Node(self, leaf, place=place)) if isinstance(leaf, Tensor) else leaf
                for place, leaf in enumerate(leaves(self.way.output))
            ],
        )

    def watch(self, tensor: Deferred) -> None:
        """The script was given a deferred tensor."""
        self._given.append(weakref.ref(tensor))

    def living(self) -> list[Node]:
        """Recorded values that the script still refers to and that are not computed."""
        alive = [ref() for ref in self._given]
        self._given = [weakref.ref(one) for one in alive if one is not None]
        return [one.node for one in alive if one is not None and one.node.value is None and not one.node.absent.dim()]

    def fill(self, tensor: Tensor, node: Node) -> None:
        """A plain number gets this node's value when it is known."""
        self._filled.append((tensor, node))

    @torch.no_grad()
    def finish(self) -> None:
        """Backward is over and its numbers are known."""
        for tensor, node in self._filled:
            tensor.copy_(read(node))
        self._filled.clear()

    def read(self, node: Node) -> Any:
        """A node's value now. Collective over the pipeline."""
        if self.recorded_only:
            raise UnsupportedError("a value of the output is read while a loss is recorded", cure=TRAIN_STEP)
        return self._reader.read(self, node)

    def loss(self, function: Callable[[Any, Any], Tensor], output: Any, batch: Any) -> Node:
        """A loss that is computed by a function from outputs with values, one micro-batch at a time.

        Args:
            function: ``function(output, batch)``, a sum or a mean over samples.
            output: of this call.
            batch: tensors as long as the batch are cut with it.
        """
        found = [leaf.node if isinstance(leaf, Deferred) else leaf for leaf in leaves(output)]
        number = self._number(next(leaf for leaf in found if isinstance(leaf, Node)).absent)
        return Node(self, number, LossFunction(function), (rebuilt(output, found), batch))

    @staticmethod
    def _number(like: Tensor) -> Tensor:
        return like.new_zeros(())
