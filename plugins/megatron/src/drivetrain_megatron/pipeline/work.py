"""Micro-batch program of the last stage: computes the loss and the recorded values of each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.api import UsageError
from drivetrain_megatron.pipeline import replay
from drivetrain_megatron.pipeline.batches import Rows
from drivetrain_megatron.pipeline.calls import ArgumentsT, Way, WayT
from drivetrain_megatron.pipeline.deferred import Node
from drivetrain_megatron.pipeline.reductions import Adjusting, Reduction
from drivetrain_megatron.pipeline.skeleton import is_absent
from drivetrain_megatron.pipeline.values import leaves


@dataclass(frozen=True)
class Recording:
    """Recorded operations that compute one value.

    Args:
        nodes: inputs first, the number last.
        program: how it is computed on a micro-batch.
    """

    nodes: Sequence[Node]
    program: replay.Program

    def frontier(self) -> list[Node]:
        """The nodes whose value is the mean over the micro-batches."""
        return [self.nodes[place] for place in self.program.frontier]


@dataclass
class Work(Generic[ArgumentsT, WayT]):
    """One run over the micro-batches of a call.

    Args:
        batches: arguments of each micro-batch.
        ways: how each goes through the model.
        rows: how the batch is cut.
        recordings: numbers to compute; backward starts from the first.
        counts: what losses inside of the model count over the whole batch.
    """

    batches: Sequence[ArgumentsT]
    ways: Sequence[WayT]
    rows: Rows
    recordings: Sequence[Recording]
    counts: Sequence[Reduction | Tensor]
    _values: dict[int, list[Tensor]] = field(default_factory=dict)

    def adjusting(self) -> Adjusting | None:
        """Return a mode that scales the model's own losses to a micro-batch, if there are any."""
        return Adjusting(self.counts, len(self.rows)) if self.counts else None

    def finish(self, index: int, output: Any) -> Any:
        """Compute every recorded value on one micro-batch, and return the first."""
        outputs = dict(enumerate(leaves(output)))
        first = None
        for recording in self.recordings:
            check(recording.nodes, outputs, self.ways[index])
            results = replay.run(recording.program, recording.nodes, self.rows, index, outputs)
            for node in recording.frontier():
                values = self._values.setdefault(id(node), [])
                if len(values) == index:
                    values.append(results[id(node)].detach().clone())
            if first is None:
                first = results[id(recording.nodes[-1])]
        return first

    def share(self, source: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Every rank learns the numbers from the last stage's. Collective over the pipeline.

        Args:
            source: the last stage's rank in the pipeline.
            group: the ranks of the pipeline.
            device: of this rank.
        """
        nodes = list({id(node): node for recording in self.recordings for node in recording.frontier()}.values())
        sizes = [node.absent.numel() for node in nodes]
        # Counts must stay exact, hence the wide type.
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        if dist.get_rank(group) == source:
            means = [torch.stack([one.double() for one in self._values[id(node)]]).mean(0) for node in nodes]
            flat = torch.cat([mean.flatten().to(device) for mean in means])
        if dist.get_world_size(group) > 1:
            dist.broadcast(flat, group=group, group_src=source)
        for node, part in zip(nodes, torch.split(flat, sizes), strict=True):
            value = part.view(node.absent.shape)
            dtype = node.absent.dtype
            node.known((value if dtype.is_floating_point else value.round()).to(dtype))


def check(nodes: Sequence[Node], outputs: dict[int, Any], way: Way) -> None:
    """Raise :class:`UsageError` when an output that is asked for has no value on the last stage."""
    for node in nodes:
        if node.func is None and is_absent(outputs[node.place]):
            raise UsageError(
                f"the model cannot be cut at {way.crossings[-1].point!r}: its output depends on a value of an earlier "
                "stage that is not an argument of that call",
                cure="Name other split_points, or pass the value through the blocks in between.",
            )
