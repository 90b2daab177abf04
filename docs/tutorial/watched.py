"""Train the language model of the examples for a few updates, and write down what this rank holds meanwhile.

Started by `measure.py` under one backend after the other; under a pipeline it also draws the schedule that it measured.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.utils import set_seed

UPDATES = 3


def held() -> int:
    """Bytes of memory behind all tensors of this process, gradients included; shared memory counts once."""
    gc.collect()
    # Asking for a gradient makes the object that the second look finds. Engines that hold gradients in parts refuse to
    # show them to a script: torch's own attribute is read, past its subclasses.
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch documents it for those who extend it
        leaves = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.is_leaf]
        gradients = [torch.Tensor.grad.__get__(each) for each in leaves]
    # Tensors of other classes (DTensor) stand for plain ones.
    plain = [each for each in gc.get_objects() if type(each) in {torch.Tensor, nn.Parameter}]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in plain}
    del gradients, leaves
    return sum(storages.values())


def main() -> None:
    """Train."""
    examples, results, pictures = map(Path, sys.argv[1:])
    sys.path.insert(0, str(examples))
    from language_model import GPT, make_data, next_byte_loss

    set_seed(0)
    accelerator = Accelerator()
    data, _ = make_data(kilobytes=64, context=64)
    before = held()
    model = GPT(context=64, channels=384, layers=8, heads=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    batches = iter(loader)

    def update() -> int:
        (windows,) = next(batches)
        accelerator.backward(next_byte_loss(model, windows).mean())
        optimizer.step()
        now = held()
        optimizer.zero_grad()
        return now - before

    bytes_held = [update() for _ in range(UPDATES)]
    file = results / f"{accelerator.distributed_type}-rank-{accelerator.process_index}.txt"
    file.write_text(str(bytes_held[-1]), encoding="utf-8")
    if accelerator.distributed_type == "megatron":
        draw_schedule(accelerator, model, update, pictures / "schedule.png")
    accelerator.end_training()


def draw_schedule(accelerator: Accelerator, model: nn.Module, update: Callable[[], int], path: Path) -> None:
    """Draw one update as the ranks of the pipeline ran it. Collective."""
    from drivetrain_megatron.planner import picture
    from drivetrain_megatron.planner.training import measure

    with measure(model) as measured:
        update()
    if accelerator.is_main_process:
        picture.write(measured.timeline, path, title="One update, as two ranks ran it", unit="s")


if __name__ == "__main__":
    main()
