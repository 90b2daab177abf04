"""Records the first optimizer steps of a run, for ``drivetrain compare``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.distributed import trees
from drivetrain.distributed.nested import gather_object
from drivetrain.launch.environment import RECORD
from drivetrain.parameter_names import original_name

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

SUMMARY = "summary.json"
"""File of a record that holds everything but the weights. It is written last."""

_DROPOUTS = ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")


@final
class RunRecord:
    """Record of what each of the first steps reads, computes and changes, which ends the script after them.

    Written by the main process: ``1-before.pt`` and ``1-after.pt`` with the weights around the first step, and so on.
    A step that begins with the weights that the one before has left has no file of its own for them.

    Args:
        folder: exists.
        steps: optimizer steps of all accelerators of the script, after which it ends.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._limit = folder, steps
        self._read, self._losses = [0.0, 0.0, 0.0], [0.0, 0.0]
        self._steps: list[dict[str, Any]] = []
        self._buffers: set[str] = set()
        self._left: dict[str, Tensor] = {}
        """Weights after the last step, on the main process."""
        self._accelerator: Accelerator
        _turn_dropout_off()

    def begin(self, accelerator: Accelerator) -> None:
        """Record this accelerator from now on: the script has made it."""
        self._accelerator = accelerator

    def batch(self, batch: Any) -> None:
        """Count the rows of a batch that a prepared loader has yielded, and add up its numbers."""
        tensors = [leaf.detach() for _, leaf in trees.leaves(batch) if isinstance(leaf, Tensor)]
        rows = trees.find_batch_size(batch) if any(tensor.dim() for tensor in tensors) else 0
        numbers = [_real(tensor).double() for tensor in tensors]
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

    def step_begins(self) -> None:
        """Keep the weights, if they are not those that the step before has left. Collective over all ranks."""
        weights = self._weights()
        left = self._left
        if weights.keys() != left.keys() or not all(_equal(weights[name], left[name]) for name in weights):
            self._save(f"{len(self._steps) + 1}-before", weights)

    def step_ended(self) -> None:
        """Keep the weights; end the script with the last step. Collective over all ranks."""
        # As objects, since not every device has float64.
        shares = gather_object([(self._read, self._losses)])
        rows, total, squares = (sum(read[place] for read, _ in shares) for place in range(3))
        loss, weight = (sum(losses[place] for _, losses in shares) for place in range(2))
        self._read, self._losses = [0.0, 0.0, 0.0], [0.0, 0.0]
        loss = loss / weight if weight else 0.0
        self._steps.append({"rows": rows, "sum": total, "squares": squares, "loss": loss})
        self._left = self._weights()
        self._save(f"{len(self._steps)}-after", self._left)
        if len(self._steps) == self._limit:
            self.close()
            self._accelerator.wait_for_everyone()
            raise SystemExit(0)

    def close(self) -> None:
        """Write what the run was. Not collective."""
        run = self._accelerator
        if not run.is_main_process:
            return
        summary = {
            "steps": self._steps,
            "buffers": sorted(self._buffers),
            "backend": str(run.distributed_type),
            "processes": run.num_processes,
            "precision": run.mixed_precision,
        }
        (self._folder / SUMMARY).write_text(json.dumps(summary), encoding="utf-8")

    def _weights(self) -> dict[str, Tensor]:
        """Whole parameters and buffers of all prepared models, by name, on the main process. Collective."""
        found: dict[str, Tensor] = {}
        for model in self._accelerator._loop.models:  # noqa: SLF001 (the accelerator's other half)
            state = self._accelerator.get_state_dict(model.source)
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            numbers = {
                name: _real(value.detach()).cpu().clone()
                for name, value in tensors.items()
                if value.is_floating_point() or value.is_complex()
            }
            found |= {f"{model.index}.{name}": value for name, value in numbers.items()}
            self._buffers |= {f"{model.index}.{original_name(name)}" for name, _ in model.source.named_buffers()}
        return found

    def _save(self, name: str, weights: Mapping[str, Tensor]) -> None:
        if self._accelerator.is_main_process:
            torch.save(dict(weights), self._folder / f"{name}.pt")


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are the same, elements that are no numbers included."""
    return one.shape == other.shape and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def read_weights(folder: Path, step: int) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """Return the weights of a record before a step, ``None`` for those that the step before left, and after it."""
    before, after = folder / f"{step}-before.pt", folder / f"{step}-after.pt"
    return torch.load(before, weights_only=True) if before.exists() else None, torch.load(after, weights_only=True)


@cache
def asked_for() -> RunRecord | None:
    """Return this process's record, if the launcher has asked for one."""
    asked = os.environ.get(RECORD)
    if asked is None:
        return None
    settings = json.loads(asked)
    return RunRecord(Path(settings["folder"]), settings["steps"])


def _turn_dropout_off() -> None:
    """Let dropout pass everything on: which elements it drops depends on how many processes share a batch."""
    modules: Any = functional
    for name in _DROPOUTS:
        setattr(modules, name, _pass_on)
    library: Any = torch
    library.dropout = _pass_on
    # Recurrent layers hand their attribute to torch's own loop over layers.
    nn.RNNBase.dropout = property(lambda _: 0.0, lambda _, __: None)  # type: ignore[assignment]
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
