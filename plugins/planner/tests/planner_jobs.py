"""What is really held: a training step on the CPU with every allocation counted. Runs on each rank."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
import time
import warnings
import weakref
from bisect import bisect
from pathlib import Path

import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STEPS = 3
"""Steps until every step holds what the one before held."""

MEASURED = 3
"""Steps that a census counts; the least counts, since what gloo's threads free late can only add."""

LATE = 12
"""Steps after which nothing compares the first ones."""

NEAR, PATIENCE = 0.95, 0.2
"""From which part of the most that an earlier step held gloo's threads are waited for, and how many seconds."""


def optimizer_of(model, name):
    return {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-3),
    }[name]()


class Storages(TorchDispatchMode):
    """Sums the sizes of all storages that are alive, at every operator: they are made, resized and freed unseen."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.sizes = {}
        self.most = {"backward": 0, "step": 0}
        self.phase = ""
        self.bytes = 0
        self.known = 0
        """The most that a step before this one held."""
        self.plain_resize = torch.UntypedStorage.resize_

    def __enter__(self):
        def resize(storage, size):
            found = self.plain_resize(storage, size)
            if storage._cdata in self.alive:
                self.note(storage)
            return found

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        torch.UntypedStorage.resize_ = self.plain_resize

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Autograd keeps parts of tensors, which a script sees as what they are parts of.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                # A pipeline knows the layers of other ranks by tensors without memory.
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and not isinstance(leaf, FakeTensor):
                    self.note(getattr(leaf, "_local_tensor", leaf).untyped_storage())
            self.look()
        return result

    def note(self, storage):
        number, size = storage._cdata, storage.nbytes()
        if number not in self.alive:
            self.alive[number] = weakref.ref(storage, lambda _: self.forget(number))
        self.bytes += size - self.sizes.get(number, 0)
        self.sizes[number] = size

    def forget(self, number):
        if self.alive.pop(number, None) is not None:
            self.bytes -= self.sizes.pop(number)

    def look(self):
        held = self.sum()
        if self.phase and held > self.most[self.phase]:
            # On a busy machine gloo's threads may free what they have sent after several operators of this thread.
            end = time.monotonic() + PATIENCE if 0 < NEAR * self.known < held else 0.0
            while held > self.most[self.phase] and time.monotonic() < end:
                time.sleep(PATIENCE / 10)
                held = self.sum()
            self.most[self.phase] = max(self.most[self.phase], held)
        return held

    def sum(self):
        return self.bytes

    def stepped(self, optimizer):
        """An optimizer step has ended, or none was taken yet: what was added up is what there is."""
        there = [one() for one in list(self.alive.values())]  # Which gloo's threads cannot free from here on.
        assert self.bytes == sum(storage.nbytes() for storage in there if storage is not None)

    def of_host(self):
        """Bytes in host memory, where that is told apart."""
        return 0


class DeviceStorages(Storages):
    """Sums what would be on a device while fsdp keeps its shards in host memory.

    On a CPU both are one memory, and the engine's copies from one to the other are none. They are made here, at the two
    places where the engine asks for them. The host has the shards, what the optimizer keeps of them, their gradients
    once they have been copied, and the step.
    """

    def __init__(self):
        super().__init__()
        self.host = {}
        self.copies = {"all_gather_inputs": 0, "foreach_reduce": 0}
        self.plain_to = torch.Tensor.to

    def __enter__(self):
        def to(tensor, *args, **kwargs):
            caller = sys._getframe(1).f_code.co_name
            if caller not in self.copies:
                return self.plain_to(tensor, *args, **kwargs)
            self.copies[caller] += 1
            copied = tensor.clone()
            if caller == "foreach_reduce":
                self.on_host(copied)
            return copied

        torch.Tensor.to = to
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        torch.Tensor.to = self.plain_to
        assert raised[0] is not None or all(self.copies.values()), self.copies

    def on_host(self, tensor):
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        self.host[storage._cdata] = weakref.ref(storage)

    def stepped(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert hasattr(parameter, "_local_tensor"), "a parameter that is no shard stays on the device"
                self.on_host(parameter)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.on_host(value)

    def look(self):
        return 0 if self.phase == "step" else super().look()

    def sum(self):
        found = [one() for number, one in list(self.alive.items()) if not self.hosts(number)]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def of_host(self):
        found = [one() for one in self.host.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def hosts(self, number):
        found = self.host.get(number)
        # The number of a storage is its address, which another gets when it is gone.
        return found is not None and found() is not None


class ZeroDeviceStorages(DeviceStorages):
    """Sums what would be on a device while ZeRO keeps its optimizer, and maybe the parameters, in host memory.

    The engine copies in place, from one tensor that is there to another, but where stage 3 takes a part of host memory
    to the device: to gather it, or to add to it and to compute its norm. These copies are made here.
    """

    def __init__(self):
        super().__init__()
        self.copies = {"partition_parameters.py": 0, "stage3.py": 0}
        self.zero = None

    def __enter__(self):
        entered = super().__enter__()

        def to(tensor, *args, **kwargs):
            file = Path(sys._getframe(1).f_code.co_filename).name
            moves = isinstance(args[0] if args else kwargs.get("device"), str | torch.device)
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if file not in self.copies or not moves or not self.hosts(storage._cdata):
                return self.plain_to(tensor, *args, **kwargs)
            self.copies[file] += 1
            return tensor.detach().clone()

        torch.Tensor.to = to
        return entered

    def __exit__(self, *raised):
        Storages.__exit__(self, *raised)
        torch.Tensor.to = self.plain_to
        if raised[0] is None and self.zero is not None and hasattr(self.zero, "fp32_partitioned_groups_flat"):
            assert self.copies["stage3.py"], self.copies
            assert bool(self.copies["partition_parameters.py"]) == self.zero.offload_param, self.copies

    def stepped(self, optimizer):
        if self.zero is None:
            names = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
            (self.zero,) = [one for one in gc.get_objects() if type(one).__name__ in names]
        zero = self.zero
        if hasattr(zero, "fp32_partitioned_groups_flat"):
            masters, others = zero.fp32_partitioned_groups_flat, [zero.grad_partitions_flat_buffer]
            others += zero.param_groups_fp16_flat_cpu_memory if zero.offload_param else []
        else:
            masters, others = zero.single_partition_of_fp32_groups, [zero.temp_grad_buffer_for_cpu_offload]
            others += zero.param_buffer_of_bit16_for_cpu_offload_groups
            others += zero.accumulated_grads_in_cpu.values()
        states = [value for state in zero.optimizer.state.values() for value in state.values()]
        for each in (*masters, *(one.grad for one in masters), *others, *states):
            if isinstance(each, torch.Tensor):
                self.on_host(each)


def censused_on_device(settings, model, optimizer="adamw", micro_batch=4):
    """As :func:`censused`, of a device beside the host's memory."""
    kind = ZeroDeviceStorages if settings["distributed_type"] == "deepspeed" else DeviceStorages
    return censused(settings, model, optimizer, micro_batch, kind)


def censused(settings, model, optimizer="adamw", micro_batch=4, kind=Storages):
    """As :func:`counted`, by a census of storages: gloo's threads free what this thread has made."""
    from planner_models import MODELS

    from drivetrain import Accelerator

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.yaml")
        path.write_text(yaml.safe_dump({**settings, "use_cpu": True}))
        accelerator = Accelerator(config=str(path))
    make, batches = MODELS[model]
    torch.manual_seed(0)
    # T5's blocks return a view, to which nothing is added in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    with kind() as storages:
        network = make()
        network.train()
        own = optimizer_of(network, optimizer)
        network, stepper = accelerator.prepare(network, own)
        storages.stepped(own)
        batch = batches(micro_batch)
        measured = []
        for step in range(STEPS - 1 + MEASURED):
            storages.most = {"backward": 0, "step": 0}
            storages.known = min((each["most"] for each in measured[STEPS - 1 :]), default=0)
            before = storages.look()
            for _ in range(accelerator.gradient_accumulation_steps):
                storages.phase = "backward" if step >= STEPS - 1 else ""
                with accelerator.accumulate(network):
                    loss = network(**batch).loss
                    accelerator.backward(loss)
                    del loss
                    storages.phase = "step" if storages.phase else ""
                    stepper.step()
                    stepper.zero_grad()
                    storages.phase = ""
            storages.stepped(own)
            most = {"most": max(storages.most.values()), "host": storages.of_host()}
            measured.append({**most, "before": before, **storages.most})
    accelerator.end_training()
    return min(measured[STEPS - 1 :], key=lambda each: each["most"])


class Copies(TorchDispatchMode):
    """Adds up bytes that copies and the like read and write, once it is on."""

    def __init__(self):
        super().__init__()
        self.on = False
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = COPIES.get(func.name().partition(".")[0]) if self.on else None
        if count is not None:
            self.bytes += count(args, kwargs, result)
        return result


def bytes_of(*values):
    tensors = [getattr(leaf, "_local_tensor", leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _copy_(args, kwargs, result):
    into, given = args[:2]
    return 0 if into.data_ptr() == given.data_ptr() else bytes_of(into, given)


COPIES = {
    "aten::copy_": _copy_,
    "aten::_foreach_copy_": lambda args, kwargs, result: bytes_of(args[0], args[1]),
    "aten::_to_copy": lambda args, kwargs, result: bytes_of(args[0], result),
    "aten::div_": lambda args, kwargs, result: 2 * bytes_of(result),
    "aten::mul_": lambda args, kwargs, result: 2 * bytes_of(result),
    "aten::mul": lambda args, kwargs, result: bytes_of(args[0], result) if "out" in kwargs else 0,
    "aten::cat": lambda args, kwargs, result: bytes_of(args[0], result),
    "aten::linalg_vector_norm": lambda args, kwargs, result: bytes_of(args[0]),
    "fsdp::all_gather_copy_in": lambda args, kwargs, result: 2 * bytes_of(args[0]),
    "fsdp::chunk_cat": lambda args, kwargs, result: bytes_of(args[0], kwargs["out"]),
    "fsdp::split_with_sizes_copy": lambda args, kwargs, result: 2 * bytes_of(args[0]),
}
"""By operator what its call reads and writes. Gloo copies by the first, too: inside of its collectives none counts."""


def copied(settings, model, optimizer="sgd", micro_batch=4):
    """Bytes that copies and the like read and write in a step, when what a plugin does in its first steps is over."""
    from planner_models import MODELS

    from drivetrain import Accelerator

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.yaml")
        path.write_text(yaml.safe_dump({**settings, "use_cpu": True}))
        accelerator = Accelerator(config=str(path))
    make, batches = MODELS[model]
    torch.manual_seed(0)
    network = make()
    network, stepper = accelerator.prepare(network, optimizer_of(network, optimizer))
    batch = batches(micro_batch)
    with Copies() as copies:
        for step in range(LATE + 1):
            copies.on = step == LATE
            for _ in range(accelerator.gradient_accumulation_steps):
                with accelerator.accumulate(network):
                    accelerator.backward(network(**batch).loss)
                    stepper.step()
                    stepper.zero_grad()
    accelerator.end_training()
    return copies.bytes


def counted(settings, model, optimizer="adamw", micro_batch=4):
    """Most bytes of the third step by torch's own allocations, made and freed by this thread.

    Moments within a convolution do not count: what oneDNN allocates there, and frees before it returns, follows from
    the processor's instructions. One without AVX-512 was seen to take four times a weight for the weight's gradient.
    """
    from planner_models import MODELS

    from drivetrain import Accelerator

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.yaml")
        path.write_text(yaml.safe_dump({**settings, "use_cpu": True}))
        accelerator = Accelerator(config=str(path))
    make, batches = MODELS[model]
    torch.manual_seed(0)
    marks = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        network = make()
        network.train()
        stepper = optimizer_of(network, optimizer)
        network, stepper = accelerator.prepare(network, stepper)
        batch = batches(micro_batch)
        for step in range(STEPS):
            if step == STEPS - 1:
                marks["begin"] = time.time_ns()
            for _ in range(accelerator.gradient_accumulation_steps):
                with accelerator.accumulate(network):
                    loss = network(**batch).loss
                    accelerator.backward(loss)
                    del loss
                    stepper.step()
                    stepper.zero_grad()
        marks["end"] = time.time_ns()
    kept = prof.profiler.kineto_results.events()
    events = sorted((event.start_ns(), event.nbytes()) for event in kept if event.name() == "[memory]")
    convolutions = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in kept
        if event.name() in ("aten::convolution", "aten::convolution_backward")
    )
    live, trail = 0, []
    for at, size in events:
        live += size
        before = bisect(convolutions, (at, math.inf)) - 1
        if marks["begin"] <= at <= marks["end"] and not (before >= 0 and at <= convolutions[before][1]):
            trail.append(live)
    accelerator.end_training()
    return {"most": max(trail)}


def checked(settings, script, predicted, steps=5):
    """What this rank writes to stderr while a script trains with ``plan: {check: true}`` and a launch's prediction."""
    from drivetrain import Accelerator

    specification = importlib.util.spec_from_file_location("train", script)
    train = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(train)
    os.environ["DRIVETRAIN_INTERNAL_PREDICTION"] = json.dumps(predicted)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.yaml")
        path.write_text(yaml.safe_dump(settings))
        accelerator = Accelerator(config=str(path))
    with contextlib.redirect_stderr(io.StringIO()) as written:
        train.train(accelerator, steps)
        accelerator.end_training()
    return written.getvalue()
