"""Builds a user's own model for the kit: ``pytest --drivetrain-model mymodule:build`` trains it under every backend.

``build`` is a function without arguments. It returns ``(model, dataset)`` or ``(model, dataset, loss_fn)``:

- ``model``: an ``nn.Module`` on the CPU. It must not draw random numbers in forward (dropout 0), since the run is
  compared with plain torch's. ``build`` is called several times, each time after the same seed.
- ``dataset``: samples as a ``DataLoader`` takes them; repeated where it is shorter than the run. A sample that is a
  mapping is given to the model as keywords, of a tuple or list the first element, anything else as it is.
- ``loss_fn(output, batch)``: a 0-d mean. Without it the loss is ``output.loss`` or ``output["loss"]``, as models of
  Transformers return it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate

from drivetrain.errors import UsageError
from drivetrain.loop.train_step import model_inputs
from drivetrain_testing import models

CURE = "See drivetrain_testing.user_model for what the function returns."


@dataclass
class UserModel:
    """Result of ``build``, with methods to run it.

    Args:
        model: a fresh model.
        dataset: its samples.
        loss_fn: ``loss_fn(output, batch)``, a 0-d mean.
    """

    model: nn.Module
    dataset: Any
    loss_fn: Callable[[Any, Any], Tensor]

    def samples(self, count: int) -> Subset[Any]:
        """The first samples of the dataset, from its beginning again where it is shorter."""
        return Subset(self.dataset, [number % len(self.dataset) for number in range(count)])

    def batch(self, first: int, count: int) -> Any:
        """Samples ``first`` to ``first + count`` as one batch."""
        return default_collate([self.dataset[number % len(self.dataset)] for number in range(first, first + count)])

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Forward and loss of one batch, by whatever ran the model."""
        args, kwargs = model_inputs(batch)
        return self.loss_fn(model(*args, **kwargs), batch)


def own_loss(output: Any, _batch: Any) -> Tensor:
    """The loss that a model has computed itself.

    Raises:
        UsageError: its output holds none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        raise UsageError(
            f"the model's output ({type(output).__name__}) holds no loss",
            cure=f"Return (model, dataset, loss_fn). {CURE}",
        )
    loss: Tensor = found
    return loss


def build(target: str) -> UserModel:
    """Call ``"module:function"`` under the kit's seed and check what it returns.

    The current folder is importable meanwhile, as for a script that is run there.

    Raises:
        UsageError: there is no such function, or it returned something else.
    """
    module, _, name = target.partition(":")
    if not (module and name):
        raise UsageError(f"{target!r} names no function", cure="Write --drivetrain-model mymodule:build.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target} cannot be found: {error}", cure=CURE) from error
    finally:
        sys.path.pop(0)
    with models.seeded(1):
        answer = function()
    if not (isinstance(answer, tuple) and len(answer) in {2, 3} and isinstance(answer[0], nn.Module)):
        raise UsageError(f"{target} returned {type(answer).__name__}, not (model, dataset[, loss_fn])", cure=CURE)
    model, dataset, *rest = answer
    if not len(dataset):
        raise UsageError(f"the dataset of {target} is empty", cure=CURE)
    return UserModel(model, dataset, rest[0] if rest else own_loss)


def check_deterministic(target: str) -> None:
    """Raise :class:`UsageError` where a forward in training mode gives two losses for one batch."""
    user = build(target)
    user.model.train()
    batch = user.batch(0, 2)
    with torch.no_grad():
        first, second = (user.loss(user.model, batch).item() for _ in range(2))
    if first != second:
        raise UsageError(
            f"the model of {target} draws random numbers in forward: losses {first:g} and {second:g} for one batch",
            cure="Build it with dropout 0.",
        )
