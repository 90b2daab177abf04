"""What the scripts of ``scripts/`` share: their register, a small model, data, and how results are handed back.

A script is a function that trains on the ``accelerator`` it is given, as a user would write it, and returns
:func:`result`. Its loaders take batches of the whole run (``split_batches``), so the same lines ask for the same
samples on any number of processes. Shapes: ``B`` samples, ``F`` = 8 features, ``C`` = 4 classes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 8, 4
BATCH = 12
"""Samples of a step over all processes: divides by 2, 3 and 4."""

Result = tuple[list[float], dict[str, Tensor]]
"""Losses in order, each the mean over the whole batch, and the final weights under their names."""


@dataclass(frozen=True)
class Script:
    """A registered script.

    Args:
        name: its function's name.
        train: the function.
        settings: keyword arguments of its ``Accelerator``.
        reference: the loop in plain torch, where ``train`` itself on :class:`parity_plain.Plain` would not be one.
        whole_batch: why its numbers are only defined where one process sees the whole batch; empty for most.
        tolerance: of a loss or weight, where the ordinary one cannot hold.
        follows: names of scripts that are refused somewhere, and are told there to write what this one does.
    """

    name: str
    train: Callable[[Any], Result]
    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[], Result] | None = None
    whole_batch: str = ""
    tolerance: float | None = None
    follows: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """What it shows: the first line of its docstring."""
        return (self.train.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def theme(self) -> str:
        """The file that it stands in."""
        return self.train.__module__.removeprefix("parity_scripts_")


SCRIPTS: dict[str, Script] = {}
"""Every script by name, filled by :func:`load`."""


def script(
    *,
    reference: Callable[[], Result] | None = None,
    whole_batch: str = "",
    tolerance: float | None = None,
    follows: str = "",
    **settings: Any,
) -> Callable[[Callable[[Any], Result]], Callable[[Any], Result]]:
    """Register a function under its name; see :class:`Script`."""

    def register(train: Callable[[Any], Result]) -> Callable[[Any], Result]:
        name = train.__name__
        assert name not in SCRIPTS, name
        followed = tuple(follows.split())
        SCRIPTS[name] = Script(name, train, settings, reference, whole_batch, tolerance, followed)
        return train

    return register


def load() -> dict[str, Script]:
    """Import every file of ``scripts/``, in order of their names."""
    for path in sorted((Path(__file__).parent / "scripts").glob("*.py")):
        name = f"parity_scripts_{path.stem}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    return SCRIPTS


class Net(nn.Module):
    """Two hidden layers with smooth activations, whose rounding does not grow at kinks; ``(B, F) -> (B, C)``."""

    def __init__(self, features: int = FEATURES, classes: int = CLASSES, hidden: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def build(kind: Callable[[], nn.Module] = Net, seed: int = 1) -> Any:
    """A model whose weights are a function of the seed."""
    torch.manual_seed(seed)
    return kind()


def points(samples: int = 4 * BATCH, seed: int = 2) -> tuple[Tensor, Tensor]:
    """``(N, F)`` features, and the class of each, which a small model can learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)


def noise(*shape: int, seed: int = 3) -> Tensor:
    """Normal numbers that belong to the samples, so that each sample meets the same ones on any process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loader(*tensors: Tensor, batch_size: int = BATCH) -> Any:
    """Batches of the whole run, in order."""
    return DataLoader(TensorDataset(*(tensors or points())), batch_size=batch_size)


def mean(accelerator: Any, value: Tensor) -> float:
    """A mean over this process's batch as that over the whole batch. Collective."""
    return accelerator.reduce(value.detach(), "mean").item()


def result(accelerator: Any, losses: list[float], **models: Any) -> Result:
    """Losses, and the whole weights of each model under the name given. Collective."""
    weights = {}
    for name, model in models.items():
        state = accelerator.get_state_dict(model)
        weights |= {f"{name}.{key}": value.detach().clone() for key, value in state.items()}
    return losses, weights
