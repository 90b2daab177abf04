"""A private name of torch that is gone ends in a sentence, before a backend starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from drivetrain import Accelerator
from drivetrain.api import BackendBlockedError
from drivetrain.api.engines import is_taken
from drivetrain.backends import torch_names
from drivetrain_testing import spawn


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    torch_names.check.cache_clear()
    yield
    torch_names.check.cache_clear()


def test_installed_torch_has_all() -> None:
    torch_names.check()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.modules.module, "_has_any_global_hook"),
        (torch.amp.GradScaler, "_found_inf_per_device"),
        (torch._C, "_functorch"),
        (distributed_c10d, "_get_default_store"),
    ],
)
def test_what_is_missing_is_named(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(BackendBlockedError) as caught:
        torch_names.check()
    said = str(caught.value)
    assert f"has no {name}" in said
    assert f"torch {metadata.version('torch')}" in said
    assert f"pip install torch=={torch_names.TESTED}" in said


def begins() -> str:
    del distributed_c10d._get_default_store
    try:
        Accelerator(cpu=True)
    except BackendBlockedError as error:
        return str(error)
    return ""


def test_an_accelerator_says_so() -> None:
    (said,) = spawn(begins, 1)
    assert "distributed_c10d has no _get_default_store, which drivetrain needs of torch" in said


def test_whose_gradient_is_taken_is_not_read_from_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(3))
    found: list[bool] = []

    def hook(gradient: Tensor) -> Tensor:
        found.append(is_taken(weight))
        return gradient

    weight.register_hook(hook)
    (weight * 2).sum().backward()
    torch.autograd.grad((weight * 2).sum(), weight)
    assert found == [False, True]

    theirs = torch._C._will_engine_execute_node

    def in_other_words(node: object) -> bool:
        try:
            return theirs(node)
        except RuntimeError:
            raise RuntimeError("in other words") from None

    monkeypatch.setattr(torch._C, "_will_engine_execute_node", in_other_words)
    torch.autograd.grad((weight * 2).sum(), weight)
    assert found == [False, True, True]
    with pytest.raises(RuntimeError, match="in other words"):
        is_taken(weight)  # Not in a backward, where it has no answer.
