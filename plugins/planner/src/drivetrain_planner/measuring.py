"""Measures this machine: arithmetic, memory, the start of a kernel, the links of its devices, a step in host memory.

Each number is measured in all processes at once, as in training, where they share a machine; the slowest counts. Links
are measured with ``all_reduce``. What is kept is a machine file, which :func:`drivetrain_planner.machines.find` reads.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from drivetrain.api import UsageError
from drivetrain_planner.machines import MACHINES, Link, Machine

_ON_CPU, _ON_DEVICE = 512, 8192
"""Rows and columns of the matrices that are multiplied: 0.3 and 1,100 billion operations."""

_STEPPED = 2**22
"""Bytes of the parameters on which AdamW steps in host memory, in every process; no cache holds what it reads."""

_SMALL_MESSAGE = 2**14
"""Bytes whose all_reduce takes about as long as an empty one."""


def measure(
    processes: int | None = None, seconds: float = 0.3, device_type: str | None = None, size: int | None = None
) -> Machine:
    """Measure this machine in processes of its own. Not collective; call it outside of a job.

    Args:
        processes: one for each device; ``None`` = all accelerators of the machine, or 2 where there is none.
        seconds: that each number is measured for, warm-up apart.
        device_type: ``"cpu"`` leaves accelerators aside; ``None`` takes them where there are any.
        size: rows and columns of the matrices; ``None`` = enough to keep a device busy.

    Returns:
        Its numbers; ``outside``, the link to other machines, is that of the machine table and is not measured.

    Raises:
        UsageError: more processes than accelerators, or a process failed.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device_type != "cpu" else None
    kind = "cpu" if accelerator is None else accelerator.type
    there = os.cpu_count() or 1 if kind == "cpu" else torch.accelerator.device_count()
    count = processes or (min(2, there) if kind == "cpu" else there)
    if kind != "cpu" and count > there:
        raise UsageError(f"{count} processes for {there} devices", cure=f"Ask for --processes {there}, or fewer.")
    with tempfile.TemporaryDirectory(prefix="drivetrain-measure-") as folder:
        try:
            spawn(_run, (count, kind, seconds, folder, size), count)  # type: ignore[no-untyped-call]
        except (ProcessRaisedException, ProcessExitedException) as problem:
            last = str(problem).strip().splitlines()[-1]
            raise UsageError(
                f"this machine cannot be measured: {last}", cure="Name one: --machine h100x8."
            ) from problem
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]
    worst = {key: (max if key in ("launch", "context") else min)(each[key] for each in ranks) for key in _KEYS}
    small, following, large = (max(each[key] for each in ranks) for key in ("small", "next", "large"))
    base = MACHINES["cpu" if kind == "cpu" else "h100"]
    return replace(
        base,
        name=ranks[0]["name"],
        device_type=kind,
        devices=count,
        inside=replace(link(count, following, large, ranks[0]["message"]), latency=small) if count > 1 else base.inside,
        host=Link(max(each["host_start"] for each in ranks), min(each["host_copy"] for each in ranks)),
        host_bandwidth=count * min(each["host_step"] for each in ranks),
        **{**worst, "memory": int(worst["memory"]), "context": int(worst["context"])},
    )


_KEYS = ("memory", "context", "flops", "half_flops", "bandwidth", "launch")


def link(ranks: int, small: float, large: float, message: int) -> Link:
    """Latency and bandwidth from two all_reduces, of which a ring sends ``2 (n - 1) / n`` of the bytes.

    Args:
        ranks: in the group.
        small: seconds of a message whose bytes do not count.
        large: seconds of the large message.
        message: its bytes.
    """
    sent = 2 * (ranks - 1) / ranks * message
    # On a busy machine a small message may take as long as a large one; then all of it is bandwidth.
    return Link(small, sent / (large - small if large > small else large))


def as_file(machine: Machine) -> dict[str, Any]:
    """Keys and values of a machine file, to three digits."""
    found = asdict(machine)
    for key in ("flops", "half_flops", "bandwidth", "launch", "host_bandwidth"):
        found[key] = float(f"{found[key]:.3g}")
    for key in ("inside", "outside", "host"):
        found[key] = {name: float(f"{value:.3g}") for name, value in found[key].items()}
    return {"base": "cpu" if machine.device_type == "cpu" else "h100", **found}


def _run(rank: int, count: int, kind: str, seconds: float, folder: str, size: int | None) -> None:
    """One process."""
    if kind == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
        device = torch.device("cpu")
    else:
        device = torch.device(kind, rank)
        torch.accelerator.set_device_index(rank)
    backend = dist.get_default_backend_for_device(device)
    store = dist.FileStore(str(Path(folder, "store")), count)  # type: ignore[attr-defined]
    # Bound to the device, or torch warns at each barrier that it takes the one in use.
    bound = None if kind == "cpu" else device
    wait = timedelta(minutes=2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=wait, device_id=bound)
    try:
        found = _measured(device, seconds, size or (_ON_CPU if kind == "cpu" else _ON_DEVICE))
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _measured(device: torch.device, seconds: float, size: int) -> dict[str, Any]:
    cpu = device.type == "cpu"
    memory, context, name = _memory(device)
    found: dict[str, Any] = {"memory": memory, "context": context, "name": name}
    for key, dtype in (("flops", torch.float32), ("half_flops", torch.bfloat16)):
        first, second = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype, device=device)
        with _tf32(key == "flops" and not cpu):
            taken = _timed(lambda a=first, b=second, c=out: torch.mm(a, b, out=c), device, seconds)  # type: ignore[misc]
        found[key] = 2 * size**3 / taken
    moved = torch.ones((2**26 if cpu else 2**30) // 4, device=device)
    target = torch.empty_like(moved)
    found["bandwidth"] = 2 * moved.nbytes / _timed(lambda: target.copy_(moved), device, seconds)
    tiny = torch.ones(1, device=device)
    found["launch"] = _timed(lambda: [tiny.add_(1) for _ in range(100)], device, seconds) / 100
    found |= _of_host(device, seconds)
    message = 2**23 if cpu else 2**28
    # Between two messages of a step ranks compute, end at different times, and on a CPU gloo sleeps: two to four times
    # what a message takes right after another. The bandwidth is that of messages of which each follows another.
    first, second, out = (torch.ones(size, size, device=device) for _ in range(3))
    small, large = (torch.zeros(bytes_ // 4, device=device) for bytes_ in (_SMALL_MESSAGE, message))
    found["small"] = _timed(
        lambda: dist.all_reduce(small), device, seconds, together=True, before=lambda: torch.mm(first, second, out=out)
    )
    found["next"] = _timed(lambda: dist.all_reduce(small), device, seconds, together=True)
    found["large"] = _timed(lambda: dist.all_reduce(large), device, seconds, together=True)
    return {**found, "message": message}


def _of_host(device: torch.device, seconds: float) -> dict[str, float]:
    """Seconds and bytes in a second of copies from host memory to a device, and bytes in a second of a step there."""
    there = torch.ones((2**24 if device.type == "cpu" else 2**28) // 4)
    # On an accelerator as engines that offload are advised to have it: in memory that the system does not move.
    there = there if device.type == "cpu" else there.pin_memory()
    here = torch.empty_like(there, device=device)
    start = _timed(lambda: here[:1].copy_(there[:1]), device, seconds)
    copied = _timed(lambda: here.copy_(there), device, seconds)
    stepped = torch.nn.Parameter(torch.ones(_STEPPED // 4))
    stepped.grad = torch.ones_like(stepped)
    optimizer = torch.optim.AdamW([stepped])
    # As the planner counts it: reads parameter, gradient and both moments, writes all but the gradient.
    step = _timed(optimizer.step, torch.device("cpu"), seconds)
    return {"host_start": start, "host_copy": there.nbytes / copied, "host_step": 7 * _STEPPED / step}


def _memory(device: torch.device) -> tuple[int, int, str]:
    """Bytes of a device, those that the driver holds once it is in use, and its name."""
    if device.type == "cpu":
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return whole // dist.get_world_size(), 0, "cpu"
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    module = torch.get_device_module(device.type)
    free, whole = module.mem_get_info(device)
    return whole, max(0, whole - free - module.memory_reserved(device)), module.get_device_name(device)


class _tf32:  # noqa: N801 (a context)
    """Lets float32 products use the devices' short formats, as the machine table takes for granted."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        if self._on:
            torch.set_float32_matmul_precision("high")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._before)


def _timed(
    function: Callable[[], Any],
    device: torch.device,
    seconds: float,
    *,
    together: bool = False,
    before: Callable[[], Any] | None = None,
) -> float:
    """Median seconds of a call, over as many as fill the time.

    Args:
        function: what is measured.
        device: waits for it after each call.
        seconds: in all.
        together: it is collective, so that all ranks make as many calls, the number that rank 0 takes for the time.
        before: is done before each call, and not timed.
    """

    def once() -> float:
        if before is not None:
            before()
            _wait(device)
        begun = time.perf_counter()
        function()
        _wait(device)
        return time.perf_counter() - begun

    first = min(once() for _ in range(3))
    calls = max(3, min(1000, int(seconds / max(first, 1e-7))))
    if together:
        agreed = torch.tensor([calls], device=device)
        dist.broadcast(agreed, 0)
        calls = int(agreed.item())
    dist.barrier()
    return median(once() for _ in range(calls))


def _wait(device: torch.device) -> None:
    """Wait for what was started on a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
