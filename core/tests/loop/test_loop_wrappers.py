"""Tells torch's wrappers of a model or its parts from modules of the script that have the same names in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import UsageError


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    made = Accelerator(cpu=True)
    yield made
    made.end_training()


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self._orig_mod = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.first(x))


@pytest.mark.parametrize("nested", [False, True])
def test_a_submodule_by_the_name_of_torch_compile_is_refused(accelerator: Accelerator, nested: bool) -> None:
    model = nn.Sequential(Wraps()) if nested else Wraps()
    with pytest.raises(UsageError, match="Wraps has a submodule by the name _orig_mod") as caught:
        accelerator.prepare(model)
    assert caught.value.cure == "Give the submodule another name."
    assert [name for name, _ in Wraps().named_children()] == ["first", "_orig_mod"], "nothing was changed"


# torch deprecates TorchScript, which torch.compile imports.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_part_is_not(accelerator: Accelerator) -> None:
    model = nn.Sequential(torch.compile(nn.Linear(3, 4)), nn.Linear(4, 2))
    prepared = accelerator.prepare(model)
    assert sorted(accelerator.get_state_dict(prepared)) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert sorted(accelerator.get_state_dict(accelerator.prepare(torch.compile(nn.Linear(3, 4))))) == ["bias", "weight"]
