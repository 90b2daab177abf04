"""Trains a few steps on every process and compares them with plain torch, for ``drivetrain test``.

Each check prints one line on the main process. A wrong number raises, which ends the whole run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.utils import broadcast_object_list, gather_object, set_seed

SAMPLES_PER_PROCESS = 8
BATCH = 4
STEPS = 2
SCALE = 0.01

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
    trained = check_gradients(accelerator)
    with shared_folder(accelerator) as folder:
        check_checkpoint(accelerator, *trained, folder)


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


def check_gradients(
    accelerator: Accelerator,
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[Tensor, ...]]]:
    """Check that steps on parts of a batch give the parameters of the same steps on whole batches. Collective.

    Returns:
        The prepared model, optimizer and loader.
    """
    dp_size = accelerator.backend.topology.dp_size
    data = make_data(dp_size)
    plain, plain_optimizer = make_model()
    for x, y in DataLoader(data, batch_size=BATCH * dp_size):
        loss_of(plain(x), y).backward()  # type: ignore[no-untyped-call]
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    model, optimizer = make_model()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    train_epoch(accelerator, model, optimizer, loader)
    largest = difference(parameters_of(accelerator, model), plain.state_dict())
    limit = TOLERANCE[accelerator.mixed_precision]
    expect(largest <= limit, f"parameters differ from one plain process by {largest:.2e}, more than {limit:.0e}")
    accelerator.print(f"gradients: parameters equal those of one plain process to {largest:.1e} (limit {limit:.0e})")
    return model, optimizer, loader


def check_checkpoint(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, ...]],
    folder: Path,
) -> None:
    """Check that steps after loading a checkpoint repeat those taken after saving it. Collective."""
    accelerator.save_state(str(folder))
    saved = parameters_of(accelerator, model)
    train_epoch(accelerator, model, optimizer, loader)
    first = parameters_of(accelerator, model)
    expect(difference(first, saved) > 0, "training after the save changed nothing")
    accelerator.load_state(str(folder))
    expect(difference(parameters_of(accelerator, model), saved) == 0, "load_state did not bring the parameters back")
    train_epoch(accelerator, model, optimizer, loader)
    again = difference(parameters_of(accelerator, model), first)
    # The momentum is part of the state: without it the second pass differs by about 1e-2.
    expect(again <= 1e-6, f"training after load_state differs by {again:.2e} from training after save_state")
    accelerator.print("save_state, load_state: parameters and optimizer come back, training repeats itself")


def train_epoch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, ...]],
) -> None:
    """Take one step a batch. Collective."""
    for x, y in loader:
        accelerator.backward(loss_of(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A small loss, so that configured clipping does not change its gradients."""
    return mse_loss(output, target) * SCALE


def make_data(dp_size: int) -> TensorDataset:
    """Return the same samples on every rank; as many as make :data:`STEPS` steps on each."""
    assert SAMPLES_PER_PROCESS == STEPS * BATCH
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES_PER_PROCESS * dp_size, 3, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same small model on every rank, with an optimizer that has state."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1 / SCALE, momentum=0.9)


def parameters_of(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole parameters, on every rank. Collective over all ranks."""
    state = accelerator.get_state_dict(model)
    if not accelerator.backend.capabilities.replicated:
        state = accelerator.backend.broadcast_object(state)  # only the main process was given it
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def difference(these: dict[str, Tensor], those: dict[str, Tensor]) -> float:
    """Return the largest difference between two sets of parameters of the same names."""
    expect(set(these) == set(those), f"parameters {sorted(these)} are not {sorted(those)}")
    return max(float((these[name].float() - those[name].float()).abs().max()) for name in those)


@contextmanager
def shared_folder(accelerator: Accelerator) -> Iterator[Path]:
    """Context with a temporary folder, which the main process makes and removes. Collective."""
    [name] = broadcast_object_list([tempfile.mkdtemp(prefix="drivetrain-test-") if accelerator.is_main_process else ""])
    try:
        yield Path(name) / "checkpoint"
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(name)


def expect(condition: bool, otherwise: str) -> None:
    """Raise :class:`SelfTestError` unless the condition holds."""
    if not condition:
        raise SelfTestError(otherwise)


if __name__ == "__main__":
    main()
