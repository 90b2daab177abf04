"""Checks that every rank writes the same to its copy of the parameters.

A forward or a script that writes values computed from its own samples makes replicas differ. Stages 1 to 3 hide that
with each step, in which every rank gets each shard from its owner: the parameters are equal again, but differ from
those of one process with the full batch. Under stage 3 small parameters are replicated between uses; the others are
written in ``deepspeed.zero.GatheredParameters``, which takes one rank's values.

Bits are compared where all ranks compute on the same kind of device: what they write alike, and stage 0's steps, which
each rank does by itself, then give the same bits. Elsewhere kernels differ, and so do sums: values are compared, and
:data:`ROUNDING` is allowed.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn

from drivetrain.api import Topology, UsageError, collectives

_VERSION = attrgetter("_version")

ROUNDING = 1e-3
"""Tolerance relative to a parameter's norm, between unlike devices: other kernels and orders of summation stay below it
for thousands of steps, of which each adds a last digit of float32, 6e-8 of a value. A write of another value is above
it, unless it is small; on devices of one kind it is found whatever its size."""


@final
class SameWrites:
    """Compares the parameters over ranks before steps 0, 1, 2, 4, 8, ..., and what was written in the steps between.

    Torch counts writes to a tensor, but for those through ``.data``. Where it has counted one, norms and sums of the
    parameters are kept until the next comparison, so that a difference is found by then though a step has hidden it.

    Args:
        module: the user's. Its whole parameters are the same on every rank, as ``prepare`` has made them.
        topology: the job.
        in_parts: stage 3.
    """

    def __init__(self, module: nn.Module, topology: Topology, *, in_parts: bool = False) -> None:
        self._module, self._topology = module, topology
        named: dict[str, Any] = dict(module.named_parameters())
        copies = {name: each for name, each in named.items() if not in_parts or each.ds_persist}
        self._names, self._all = list(copies), list(copies.values())
        self._trained = [each for each in self._all if each.requires_grad]
        self._steps = 0
        self._written: Tensor | None = None
        """Norm and sum of each trained parameter after each write, over all steps with a write."""
        self._alike: bool | None = None
        """All ranks compute on devices of one kind; set in the first comparison."""
        self._writes = self._count()

    @torch.no_grad()
    def check(self) -> None:
        """Compare the writes, before each step. Collective over the data-parallel ranks in steps 0, 1, 2, 4, 8, ...

        Raises:
            UsageError: parameters are not, or were not, the same on all ranks.
        """
        number = self._steps
        self._steps += 1
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (the guard's class; what torch's own subclasses use)
            if self._count() != self._writes:
                # Times the step: one rank's write in another step than the others' is a difference.
                values = _values(self._trained) * (number + 1)
                self._written = values if self._written is None else self._written + values
            if not number & (number - 1) and self._all:
                self._compare()

    def settle(self) -> None:
        """A step has written to the parameters."""
        self._writes = self._count()

    def _count(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return sum(map(_VERSION, self._trained))

    def _compare(self) -> None:
        if self._alike is None:
            self._alike = self._devices_are_alike()
        present = _values(self._all)
        written = torch.zeros_like(_values(self._trained)) if self._written is None else self._written
        every = collectives.all_gather(torch.cat([present, written])[None], self._topology)
        self._written = None
        # Of each parameter norm and sum. Equal bits may be of no number.
        apart = (every.view(torch.int64) != every[0].view(torch.int64)).any(0).any(-1)
        if not self._alike:
            # A sum moves by no more than the norm of what moved, times the root of the number of elements.
            times = torch.tensor([[1.0, each.numel() ** 0.5] for each in (*self._all, *self._trained)])
            allowed = ROUNDING * every[0, :, :1] * times.to(every)
            apart &= ~((every - every[0]).abs() <= allowed).all(0).all(-1)
        differ = apart.tolist()
        if not any(differ):
            return
        here = [name for name, one in zip(self._names, differ, strict=False) if one]
        which = (
            f"{', '.join(here[:4])}{f' and {len(here) - 4} more' if len(here) > 4 else ''} differ"
            if here
            else "they were different before an earlier step"
        )
        raise UsageError(
            f"the parameters of {type(self._module).__name__} are not the same on all ranks ({which}): a forward, a "
            "hook or the script has written different values to them",
            cure="Write the same values on every rank: compute them from gathered or averaged ones "
            "(accelerator.gather, accelerator.reduce(values, 'mean')), seed random ones alike "
            "(drivetrain.utils.set_seed), or use rank 0's (drivetrain.utils.broadcast).",
        )

    def _devices_are_alike(self) -> bool:
        """Whether the same operations give the same bits on all ranks. Collective."""
        mine = int.from_bytes(hashlib.blake2b(device_kind(self._topology.device).encode(), digest_size=7).digest())
        every = collectives.all_gather(torch.tensor([mine], device=self._topology.device), self._topology)
        return bool((every == mine).all())


def device_kind(device: str) -> str:
    """Return a key of the device's kernels and their order of summation. Not collective."""
    kind = torch.device(device)
    if kind.type == "cpu":
        its = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    else:
        its = str(getattr(torch.get_device_module(kind).get_device_properties(kind), "name", ""))
    return f"{kind.type} {its} {torch.__version__}"


def _values(tensors: Sequence[Tensor]) -> Tensor:
    """Return two float64 checksums of each tensor."""
    numbers = []
    for each in tensors:
        value = each.detach()
        value = value if value.is_floating_point() else value.double()  # torch has no norm of integers
        numbers += [torch.linalg.vector_norm(value, dtype=torch.float64), value.sum(dtype=torch.float64)]
    return torch.stack(numbers).view(-1, 2) if numbers else torch.zeros(0, 2, dtype=torch.float64)
