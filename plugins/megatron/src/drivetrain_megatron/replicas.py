"""Averages gradients over the data-parallel ranks in buckets, once per accumulation window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.api import LocalGradients, UnsupportedError, UsageError
from drivetrain_megatron import agreement
from drivetrain_sharding import laid_out_as

_BUCKET_BYTES = 25 << 20
"""Bucket size, that of torch's DDP: large enough to hide latency, small enough to copy twice."""


@final
class Replicas:
    """Averages gradients over the ranks that hold the same parameters.

    An average leaves as it is what was averaged before, so a window may be reduced at each of its micro-batches.

    Args:
        group: the data-parallel ranks of one pipeline and tensor coordinate.
        size: how many they are.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self._group, self._size = group, size
        self._local: dict[nn.Module, LocalGradients | None] = {}
        """By model: what notices its gradients that no average has reached."""
        self._rounds = 0

    def add(self, module: nn.Module, local: LocalGradients | None) -> None:
        """Add a model that is trained; in the same order on every rank.

        Args:
            module: the model.
            local: is told of each average; ``None`` where there is nothing to average.
        """
        self._local[module] = local

    def forget(self, module: nn.Module) -> None:
        """Remove a model that is not trained any more; one that was not added is none."""
        self._local.pop(module, None)

    def average_all(self, module: nn.Module) -> None:
        """Average over a model and the others: a loss may reach several, as a generator's by way of its discriminator.

        A gradient that is averaged already stays as it is; one of which more is to come is averaged again then.
        Collective over the data-parallel ranks.

        Args:
            module: of the model whose loss it is; of the others those are averaged that have gradients on any rank.
        """
        self.average(module.parameters())
        for local in self._local.values():
            if local is not None:  # what no rank's backward has reached has no gradient
                local.reduced()
        others = [one for one in self._local if one is not module]
        if self._size == 1 or not others:
            return
        reached = [any(parameter.grad is not None for parameter in one.parameters()) for one in others]
        device = next((one.device for one in module.parameters()), None)
        flags = torch.tensor(reached, dtype=torch.float32, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        for one, flag in zip(others, flags.tolist(), strict=True):
            if flag:
                self.average(one.parameters())

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> None:
        """Give each parameter the mean of its gradients. Collective over the data-parallel ranks.

        A rank on which a parameter has no gradient counts as zero; where none has one it stays without. Parameters in
        shards are passed over: torch has reduced their gradients.

        Raises:
            UnsupportedError: a gradient is sparse.
            UsageError: the parameters themselves differ between replicas.
        """
        if self._size == 1:
            return
        replicated = [one for one in parameters if not _in_shards(one)]
        self._compare(replicated)
        for bucket in buckets([one for one in replicated if one.requires_grad]):
            self._average(bucket)

    def _compare(self, parameters: list[Tensor]) -> None:
        """Compare the values of replicas in rounds 0, 1, 2, 4, 8, ...: it reads them all, and waits for the device.

        A forward that writes what it computes from a rank's own samples makes them differ; so does a script. The
        optimizer's step under zero1 would hide it.
        """
        number = self._rounds
        self._rounds += 1
        if number & (number - 1) or not parameters:
            return
        told = agreement.digest(parameters, local_part(parameters[0]).device)
        both = torch.stack([told, -told])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        highest, negated_lowest = both.tolist()
        if highest != -negated_lowest:
            raise UsageError(
                "the parameters of a model are not the same on all data-parallel ranks: a forward, a hook or the "
                "script has written different values to them",
                cure="Write the same values on every rank: compute them from gathered or averaged ones "
                "(accelerator.gather, accelerator.reduce(values, 'mean')), seed random ones alike "
                "(drivetrain.utils.set_seed), or use rank 0's (drivetrain.utils.broadcast).",
            )

    def _average(self, bucket: list[Tensor]) -> None:
        for one in bucket:
            if one.grad is not None and one.grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"a parameter of shape {tuple(one.shape)} has a sparse gradient, and several data-parallel ranks "
                    "of megatron add up dense ones",
                    cure="Make the embedding with sparse=False and step it by a dense optimizer, or use "
                    "distributed_type: ddp.",
                )
        lacking = [one for one in bucket if one.grad is None]
        # One flag per parameter is reduced too, to distinguish "no gradient on any rank" from zero.
        present = torch.tensor([one.grad is not None for one in bucket], dtype=local_part(bucket[0]).dtype)
        parts = [
            torch.zeros_like(local_part(one)).flatten() if one.grad is None else local_part(one.grad).flatten()
            for one in bucket
        ]
        flat = torch.cat([*parts, present.to(parts[0].device)])
        dist.all_reduce(flat, group=self._group)
        counts = flat[-len(bucket) :]
        flat.div_(self._size)
        somewhere = counts.tolist() if lacking else None  # Reading it waits for the device.
        start = 0
        for index, one in enumerate(bucket):
            shape = local_part(one).shape
            mean = flat[start : start + shape.numel()].view(shape)
            start += shape.numel()
            if one.grad is not None:
                local_part(one.grad).copy_(mean)
            elif somewhere is not None and somewhere[index] > 0:
                one.grad = laid_out_as(one, mean.clone())


def _in_shards(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "dp" in (parameter.device_mesh.mesh_dim_names or ())


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a DTensor; a plain tensor as it is."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one device and dtype together, in order, up to the size of a bucket."""
    alike: dict[object, list[Tensor]] = {}
    for one in parameters:
        local = local_part(one)
        alike.setdefault((local.device, local.dtype), []).append(one)
    for group in alike.values():
        bucket: list[Tensor] = []
        held = 0
        for one in group:
            size = local_part(one).numel() * local_part(one).element_size()
            if bucket and held + size > _BUCKET_BYTES:
                yield bucket
                bucket, held = [], 0
            bucket.append(one)
            held += size
        if bucket:
            yield bucket
