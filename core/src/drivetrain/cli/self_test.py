"""Trains a few steps on every process and compares them with plain torch, for ``drivetrain test``.

Each check prints one line on the main process. A wrong number raises, which ends the whole run. With the path of a
picture as its argument it also collects what ``drivetrain test --plot`` shows, and draws it.
"""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.cli import self_test_picture
from drivetrain.cli.self_test_picture import OTHERS, RankReport
from drivetrain.config.load import worker_config
from drivetrain.utils import broadcast_object_list, gather_object, set_seed

BATCH = 4
"""Samples of a data-parallel rank."""
STEPS = 2
SCALE = 0.01
"""Makes the loss small, so that configured clipping does not change its gradients."""

# One float32 step apart in the order of a sum over ranks. Half precision rounds the products themselves: 8 bits of
# mantissa over two steps of size 0.1 leave about 1e-2.
TOLERANCE = {"no": 1e-5, "bf16": 2e-2, "fp16": 5e-3}


class SelfTestError(AssertionError):
    """A number differs from that of one plain process."""


def main() -> None:
    """Run all checks. Collective over all ranks."""
    # Backend, precision and mesh are configured; accumulation and batch sizes are those of the reference below.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration())
    check(accelerator)
    if pictures := sys.argv[1:]:
        draw(accelerator, Path(pictures[0]))
    accelerator.end_training()


def check(accelerator: Accelerator) -> None:
    """Run all checks. Collective over all ranks.

    Args:
        accelerator: without anything prepared.

    Raises:
        SelfTestError: a number is wrong; says which.
    """
    accelerator.gradient_accumulation_steps = 1
    mesh = {axis: size for axis, size in accelerator.backend.topology.mesh.sizes.items() if size > 1}
    accelerator.print(
        f"{accelerator.num_processes} process(es), backend {accelerator.distributed_type}, "
        f"mesh {mesh or 'of one'}, device {accelerator.device}"
    )
    check_gather(accelerator)
    # The main process makes and removes the folder for the checkpoint.
    made = tempfile.mkdtemp(prefix="drivetrain-test-") if accelerator.is_main_process else ""
    [folder] = broadcast_object_list([made])
    try:
        check_training(accelerator, Path(folder) / "checkpoint")
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(folder)


def check_gather(accelerator: Accelerator) -> None:
    """Check that values are gathered in the order of ranks, and reduced to their sum. Collective over all ranks.

    Ranks that share a sample, along ``tp``, ``cp`` or ``pp``, are one data-parallel rank and count once.
    """
    topology = accelerator.backend.topology
    mine = torch.tensor([topology.dp_rank], device=accelerator.device)
    ranks = list(range(topology.dp_size))
    gathered = accelerator.gather(mine).tolist()
    expect(gathered == ranks, f"gather returned {gathered}, not {ranks}")
    total = accelerator.reduce(mine, reduction="sum").item()
    expect(total == sum(ranks), f"reduce returned {total}, not {sum(ranks)}")
    objects = gather_object([f"rank {topology.dp_rank}"])
    expect(objects == [f"rank {rank}" for rank in ranks], f"gather_object returned {objects}")
    accelerator.print(f"gather, reduce, gather_object: every rank has the part of {len(ranks)} data-parallel rank(s)")


def check_training(accelerator: Accelerator, folder: Path) -> None:
    """Check that steps on parts of a batch are those on whole batches, and repeat themselves from a checkpoint.

    Collective over all ranks.
    """
    dp_size = accelerator.backend.topology.dp_size
    x = torch.randn(STEPS * BATCH * dp_size, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True).sin())
    reference, optimizer = make_model()
    for inputs, targets in DataLoader(data, batch_size=BATCH * dp_size):
        (mse_loss(reference(inputs), targets) * SCALE).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, loader = accelerator.prepare(*make_model(), DataLoader(data, batch_size=BATCH))

    def train() -> dict[str, Tensor]:
        for inputs, targets in loader:
            accelerator.backward(mse_loss(model(inputs), targets) * SCALE)
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(accelerator, model)

    trained = train()
    largest, limit = difference(trained, reference.state_dict()), TOLERANCE[accelerator.mixed_precision]
    expect(largest <= limit, f"parameters differ from one plain process by {largest:.2e}, more than {limit:.0e}")
    accelerator.print(f"gradients: parameters equal those of one plain process to {largest:.1e} (limit {limit:.0e})")

    accelerator.save_state(str(folder))
    further = train()
    expect(difference(further, trained) > 0, "training after the save changed nothing")
    accelerator.load_state(str(folder))
    loaded = parameters_of(accelerator, model)
    expect(difference(loaded, trained) == 0, "load_state did not bring the parameters back")
    again = difference(train(), further)
    # The momentum is part of the state: without it the second pass differs by about 1e-2.
    expect(again <= 1e-6, f"training after load_state differs by {again:.2e} from training after save_state")
    accelerator.print("save_state, load_state: parameters and optimizer come back, training repeats itself")


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same small model on every rank, with an optimizer that has state."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1 / SCALE, momentum=0.9)


def parameters_of(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the full parameters, on every rank. Collective over all ranks."""
    state = accelerator.get_state_dict(model)
    if not accelerator.backend.capabilities.replicated:
        state = accelerator.backend.broadcast_object(state)  # only the main process was given it
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def difference(these: dict[str, Tensor], those: dict[str, Tensor]) -> float:
    """Return the largest difference between two sets of parameters of the same names."""
    expect(set(these) == set(those), f"parameters {sorted(these)} are not {sorted(those)}")
    return max(float((these[name].float() - those[name].float()).abs().max()) for name in those)


# ---- the picture ----------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 256, 4
"""Size of the model whose shards are drawn: some megabytes, to exceed the other memory of an engine."""


def draw(accelerator: Accelerator, path: Path) -> None:
    """Draw which samples each rank reads, and what it holds. Collective over all ranks; the main process writes it."""
    accelerator.free_memory()
    topology = accelerator.backend.topology
    coordinates = topology.mesh.coordinates(topology.rank)
    shown = {axis: place for axis, place in coordinates.items() if topology.mesh.sizes[axis] > 1}
    config = worker_config().config.dataloader.model_dump()
    for key, value in config.items():
        setattr(accelerator.dataloader_config, key, value)
    samples, size = read_samples(accelerator), batch_size(accelerator)
    for key, value in vars(DataLoaderConfiguration()).items():
        setattr(accelerator.dataloader_config, key, value)
    mine = RankReport(topology.dp_rank, shown, samples, held_bytes(accelerator))
    reports = [accelerator.backend.broadcast_object(mine, src=rank) for rank in range(topology.world_size)]
    if accelerator.is_main_process:
        settings = [f"batch_size={size}"]
        settings += [key for key in ("split_batches", "dispatch_batches") if config[key]]
        settings += [] if config["even_batches"] else ["even_batches off"]
        backend = f"{accelerator.distributed_type} on {accelerator.num_processes} process(es)"
        self_test_picture.write(reports, path, backend=backend, settings=settings)


def batch_size(accelerator: Accelerator) -> int:
    """Return the size by which a script makes a loader of which each data-parallel rank reads 4 samples at a time."""
    return BATCH * accelerator.backend.topology.dp_size if accelerator.split_batches else BATCH


def read_samples(accelerator: Accelerator) -> list[list[int]]:
    """Return the numbers of the samples in each batch that this rank reads of one epoch. Collective over all ranks.

    For half of the data-parallel ranks one sample is left in the end, so that it shows what the others do then.
    """
    dp_size = accelerator.backend.topology.dp_size
    data = TensorDataset(torch.arange(2 * BATCH * dp_size + (dp_size + 1) // 2))
    loader = DataLoader(data, batch_size=batch_size(accelerator))
    loader = accelerator.prepare_data_loader(loader, device_placement=False)
    return [numbers.tolist() for (numbers,) in loader]


def held_bytes(accelerator: Accelerator) -> dict[str, int]:
    """Return the bytes that this rank holds of a model in training, by part. Collective over all ranks.

    Taken after a backward, when the optimizer has stepped before. What an engine holds beside the model's tensors (flat
    buffers, gradients that it keeps itself) is found by looking through all tensors that Python knows.
    """
    former = all_tensors()  # kept, so that no new tensor has the address of one of them
    set_seed(0)
    layers = ((nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))
    model: nn.Module = nn.Sequential(*(layer for block in layers for layer in block))
    data = torch.randn(STEPS * BATCH * accelerator.backend.topology.dp_size, WIDTH)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(data), batch_size=BATCH))
    for number, (inputs,) in enumerate(loader, start=1):
        accelerator.backward(model(inputs).square().mean())
        if number < STEPS:
            optimizer.step()
            optimizer.zero_grad()
    del inputs, data
    trainable = accelerator._preparer.find(model).trainable  # noqa: SLF001 (of the same core)
    state = trainable.portable_state().tensors
    parts: dict[str, Iterable[Any]] = {
        "parameters": [*trainable.live_tensors().values(), *trainable.module.parameters()],
        "gradients": gradients_of(all_tensors()),
        "optimizer states": [tensor for name, tensor in state.items() if name.startswith("optim.")],
    }
    found: dict[str, int] = {}
    counted = set(live_storages(former))
    for part, tensors in {**parts, OTHERS: all_tensors()}.items():
        storages = {key: size for key, size in live_storages(tensors).items() if key not in counted}
        found[part] = sum(storages.values())
        counted = counted | set(storages)
    return found


def gradients_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return what autograd has accumulated for leaves, such as the parameters of a pipeline's stage."""
    read: Any = Tensor.grad  # the attribute of the class: an engine's parameters may refuse to be asked
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (as above)
        found = [read.__get__(tensor) for tensor in tensors if tensor.is_leaf]
    return [gradient for gradient in found if gradient is not None]


def all_tensors() -> list[Tensor]:
    """Return every tensor that the garbage collector tracks."""
    gc.collect()
    # The type, not isinstance, which asks objects of other libraries for their class.
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def live_storages(tensors: Iterable[Any]) -> Mapping[tuple[str, int], int]:
    """Return the bytes of the memory behind tensors, each once, by device and address."""
    found: dict[tuple[str, int], int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (an engine's parameters may refuse to be asked)
        for tensor in tensors:
            if hasattr(type(tensor), "__tensor_flatten__"):
                parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
                found.update(live_storages(part for part in parts if isinstance(part, Tensor)))
            elif tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                # Tensors without values, fake ones among them, have a storage on the device "meta".
                if storage.device.type != "meta" and (address := storage.data_ptr()):
                    found[str(tensor.device), address] = storage.nbytes()
    return found


def expect(condition: bool, otherwise: str) -> None:
    """Raise :class:`SelfTestError` unless the condition holds."""
    if not condition:
        raise SelfTestError(otherwise)


if __name__ == "__main__":
    main()
