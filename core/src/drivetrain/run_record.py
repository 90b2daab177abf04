"""Records the first optimizer steps of a run, for ``drivetrain compare``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.nn import functional

from drivetrain.distributed import trees
from drivetrain.distributed.nested import gather_object
from drivetrain.launch.environment import RECORD

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

SUMMARY = "summary.json"
"""File of a record that holds everything but the weights. It is written last."""

_DROPOUTS = ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")


@final
class RunRecord:
    """Record of what each of the first steps reads, computes and leaves behind, which ends the script after them.

    Written by the main process: ``0.pt`` with the weights before the first step, ``1.pt`` after it, and so on.

    Args:
        accelerator: of the script.
        folder: exists.
        steps: optimizer steps after which the script ends.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, steps: int) -> None:
        self._accelerator, self._folder, self._steps = accelerator, folder, steps
        self._read, self._losses = [0.0, 0.0, 0.0], [0.0, 0.0]
        self._taken: list[dict[str, float]] = []
        self._written = False
        _turn_dropout_off()

    def prepared(self) -> None:
        """Keep the weights of what was prepared before the first step. Collective over all ranks."""
        if not self._taken:
            self._keep_weights(0)

    def batch(self, batch: Any) -> None:
        """Count the rows of a batch that a prepared loader has yielded, and add up its numbers."""
        tensors = [leaf.detach() for _, leaf in trees.leaves(batch) if isinstance(leaf, Tensor)]
        rows = trees.find_batch_size(batch) if any(tensor.dim() for tensor in tensors) else 0
        numbers = [tensor.double() for tensor in tensors if not tensor.is_complex()]
        total = sum(float(each.sum()) for each in numbers)
        found = rows or 0, total, sum(float(each.square().sum()) for each in numbers)
        self._read = [before + now for before, now in zip(self._read, found, strict=True)]

    def backward(self, loss: Tensor, weight: float, *, is_sum: bool) -> None:
        """Add the loss of a micro-batch.

        Args:
            loss: after its backward.
            weight: rows that it is a mean over, or items that it is a sum over.
            is_sum: it is a sum.
        """
        self._losses[0] += float(loss.detach()) * (1 if is_sum else weight)
        self._losses[1] += weight

    def step_ended(self, step: int, skipped: bool) -> None:
        """Keep the weights; end the script with the last step. Collective over all ranks."""
        del step
        accelerator = self._accelerator
        # As objects, since not every device has float64.
        shares = gather_object([(self._read, self._losses)])
        rows, total, squares = (sum(read[place] for read, _ in shares) for place in range(3))
        loss, weight = (sum(losses[place] for _, losses in shares) for place in range(2))
        self._read, self._losses = [0.0, 0.0, 0.0], [0.0, 0.0]
        loss = loss / weight if weight else 0.0
        self._taken.append({"rows": rows, "sum": total, "squares": squares, "loss": loss, "skipped": skipped})
        self._keep_weights(len(self._taken))
        if len(self._taken) == self._steps:
            self.close()
            accelerator.wait_for_everyone()
            raise SystemExit(0)

    def close(self) -> None:
        """Write what the run was. Not collective."""
        if self._written or not self._accelerator.is_main_process:
            return
        self._written = True
        run = self._accelerator
        summary = {
            "steps": self._taken,
            "models": len(run._loop.models),  # noqa: SLF001 (the accelerator's other half)
            "backend": str(run.distributed_type),
            "processes": run.num_processes,
            "precision": run.mixed_precision,
        }
        (self._folder / SUMMARY).write_text(json.dumps(summary), encoding="utf-8")

    def _keep_weights(self, number: int) -> None:
        weights: dict[str, Tensor] = {}
        models = self._accelerator._loop.models  # noqa: SLF001 (the accelerator's other half)
        for model in models:
            state = self._accelerator.get_state_dict(model.source)
            prefix = f"{model.index}." if len(models) > 1 else ""
            floats = {
                name: value for name, value in state.items() if isinstance(value, Tensor) and value.is_floating_point()
            }
            weights |= {f"{prefix}{name}": value.detach().cpu().clone() for name, value in floats.items()}
        if self._accelerator.is_main_process:
            torch.save(weights, self._folder / f"{number}.pt")


def read_weights(folder: Path, number: int) -> dict[str, Tensor]:
    """Return the weights of a record after a number of steps, by name; 0: before the first."""
    found: dict[str, Tensor] = torch.load(folder / f"{number}.pt", weights_only=True)
    return found


def record_of(accelerator: Accelerator) -> RunRecord | None:
    """Return the record that the launcher has asked for; ``None`` in any other run."""
    asked = os.environ.get(RECORD)
    if asked is None:
        return None
    settings = json.loads(asked)
    return RunRecord(accelerator, Path(settings["folder"]), settings["steps"])


def _turn_dropout_off() -> None:
    """Let dropout pass everything on: which elements it drops depends on how many processes share a batch."""
    modules: Any = functional
    for name in _DROPOUTS:
        setattr(modules, name, _pass_on)
    attention = functional.scaled_dot_product_attention

    def without_dropout(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > _PLACE_OF_DROPOUT:
            args = (*args[:_PLACE_OF_DROPOUT], 0.0, *args[_PLACE_OF_DROPOUT + 1 :])
        else:
            kwargs["dropout_p"] = 0.0
        return attention(*args, **kwargs)

    modules.scaled_dot_product_attention = without_dropout


_PLACE_OF_DROPOUT = 4
"""Index of ``dropout_p`` among the arguments of ``scaled_dot_product_attention``."""


def _pass_on(input: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: A002 (torch's name, which may be a keyword)
    return input
