"""Measures what a rank holds and how long a step takes, and prints both once beside what was predicted."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (  # type: ignore[attr-defined]
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _len_torch_dispatch_stack,
)
from torch.utils._pytree import tree_leaves

from drivetrain_planner.choosing import gib
from drivetrain_planner.report import as_time, table

_SEEN, _COUNTED, _TIMED = 1, 2, 3
"""Steps after which, in order: memory is looked at, its peak is counted, and the clock runs; each for one step. By the
third step the optimizer has its state, and kernels and allocators have settled."""

UNCOUNTED = "not counted: the script has a dispatch mode of its own around its steps"
UNKNOWN = "not counted: this kind of device keeps no peak"


@final
class PlanCheck:
    """Compares one run; see :func:`drivetrain.hookspecs.drivetrain_check_plan`. Costs nothing after the fourth step.

    Args:
        accelerator: the run's.
        predicted: see :func:`drivetrain_planner.described.prediction`.
    """

    def __init__(self, accelerator: Any, predicted: Mapping[str, Any]) -> None:
        self._accelerator, self._predicted = accelerator, predicted
        device = accelerator.device
        self._memory: _Storages | _Device = _Storages() if device.type == "cpu" else _Device(device)
        self._steps = 0
        self._measured: dict[str, Any] = {}
        self._begun = 0.0

    def step_ended(self, step: int, skipped: bool) -> None:
        """Take one measurement. Collective over all ranks at the end of the fourth step; a skipped one does not count.

        Args:
            step: as the hook says.
            skipped: likewise.
        """
        del step
        if skipped or self._steps > _TIMED:
            return
        self._steps += 1
        if self._steps == _SEEN:
            self._memory.look()
        elif self._steps == _COUNTED:
            self._memory.begin()
        elif self._steps == _TIMED:
            self._measured = self._memory.end()
            self._begun = self._now()
        else:
            self._tell(self._now() - self._begun)

    def close(self) -> None:
        """Say so if the run has ended too early."""
        self._memory.stop()
        if self._steps <= _TIMED and self._accelerator.is_main_process:
            steps = f"{self._steps} optimizer step{'' if self._steps == 1 else 's'}"
            told = f"plan.check compares after {_TIMED + 1} optimizer steps, and the run ended after {steps}"
            sys.stderr.write(f"{told}\n")

    def _now(self) -> float:
        self._memory.synchronize()
        return time.perf_counter()

    def _tell(self, seconds: float) -> None:
        accelerator = self._accelerator
        own = {"rank": accelerator.process_index, "seconds": seconds, **self._measured}
        ranks = [own]
        if accelerator.num_processes > 1 and dist.is_initialized():
            ranks = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(ranks, own)
        if not accelerator.is_main_process:
            return
        found = {
            "accumulation": accelerator.gradient_accumulation_steps,
            "mixed_precision": str(accelerator.mixed_precision),
            "device_type": accelerator.device.type,
        }
        sys.stderr.write("\n".join(("", *compared(self._predicted, ranks, found), "", "")))


def compared(
    predicted: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], found: Mapping[str, Any] | None = None
) -> list[str]:
    """A line for each rank, one for the step, and what the numbers are.

    Args:
        predicted: see :func:`drivetrain_planner.described.prediction`.
        ranks: of each ``rank``, ``seconds`` of a step and ``bytes`` at the most, or ``why`` there are none; on an
            accelerator also ``reserved`` bytes.
        found: what the script trains with, of the keys of ``predicted``.
    """
    size, reserves = predicted["bytes"], any("reserved" in each for each in ranks)
    rows = [["rank", "predicted", "measured", "difference"]]
    if reserves:
        rows[0] += ["with the allocator's", "reserved"]
    for each in ranks:
        row = [str(each["rank"]), gib(size), gib(each["bytes"]) if "bytes" in each else each["why"]]
        row.append(_difference(size, each.get("bytes")))
        if reserves:
            row += [gib(size + predicted["unused"]), gib(each["reserved"]) if "reserved" in each else ""]
        rows.append(row)
    slowest = max(each["seconds"] for each in ranks)
    rows.append(
        ["a step", as_time(predicted["seconds"]), as_time(slowest), _difference(predicted["seconds"], slowest)]
        + [""] * (2 * reserves)
    )
    kind = "the device's own count of tensors" if reserves else "tensors that the operators of two steps touched"
    layout = f"{predicted['layout']} on {len(ranks)} x {predicted['machine']}"
    told = [
        f"plan.check: {layout}, {predicted['micro_batch']} samples in a micro-batch",
        *table(rows),
        f"Predicted is the fullest rank's. Measured are {kind}, in the third step, and the slowest rank's fourth step.",
    ]
    differs = [
        f"{key.replace('_', ' ')}: {value} in the script, {predicted[key]} in the plan"
        for key, value in (found or {}).items()
        if value != predicted[key]
    ]
    return [*told, *(f"The plan is of something else: {each}." for each in differs)]


def _difference(predicted: float, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else ""


@final
class _Device:
    """Reads an accelerator's own statistics.

    Args:
        device: this rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def look(self) -> None:
        """Nothing: the allocator counts all the time."""

    def begin(self) -> None:
        """Forget the peak of the steps before."""
        if hasattr(self._module, "reset_peak_memory_stats"):  # MPS has none
            self._module.reset_peak_memory_stats(self._device)

    def end(self) -> dict[str, Any]:
        """The most since then."""
        if not hasattr(self._module, "max_memory_allocated"):
            return {"why": UNKNOWN}
        held = self._module.max_memory_allocated(self._device)
        return {"bytes": held, "reserved": self._module.max_memory_reserved(self._device)}

    def stop(self) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize(self._device)


@final
class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the storages on the CPU that operators touch, at every operator: engines resize and free them unseen.

    It is entered for two steps. In the first it learns which storages there are, since most live longer than a step; in
    the second it looks for the peak. What no operator touches in two steps is not counted. Modes are a stack, so it is
    neither entered nor left inside of another mode.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._process = os.getpid()
        self._entered = self._counting = False
        self._most = 0

    def look(self) -> None:
        """Begin to learn."""
        if _len_torch_dispatch_stack() == 0:
            self._entered = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin to count."""
        self._counting = True

    def end(self) -> dict[str, Any]:
        """The most since then."""
        self.stop()
        return {"bytes": self._most} if self._most else {"why": UNCOUNTED}

    def stop(self) -> None:
        """Stop looking, now or, inside of another mode, for good."""
        self._counting = False
        self._alive.clear()
        if self._entered and _get_current_dispatch_mode() is self:
            self._entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Nothing: the CPU has done what it was told."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Operators of autograd's own are given parts of tensors as the class that a script sees, whose functions would
        # gather them: the kernel is to run on the part, and its storage is what the rank holds.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch has no public word for it)
            result = func(*args, **(kwargs or {}))
            if os.getpid() != self._process:  # a loader's worker, forked while the mode was on
                return result
            for leaf in tree_leaves((args, kwargs, result)):
                # A pipeline knows the layers of other ranks by tensors without memory.
                if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and not isinstance(leaf, FakeTensor):
                    self._see(getattr(leaf, "_local_tensor", leaf).untyped_storage())
        if self._counting:
            found = [one() for one in list(self._alive.values())]
            self._most = max(self._most, sum(one.nbytes() for one in found if one is not None))
        return result

    def _see(self, storage: Any) -> None:
        number = storage._cdata  # noqa: SLF001 (the identity of a storage)
        if number not in self._alive:
            self._alive[number] = weakref.ref(storage, partial(self._freed, number))

    def _freed(self, number: int, _: Any) -> None:
        self._alive.pop(number, None)
