"""Ways into a model beside its plain forward: methods that scripts call, compiled units, ranks that go other ways."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError
from drivetrain_testing import spawn
from drivetrain_testing.processes import RankFailedError

REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Torch 2.9 has no such switch."""


def accelerator_with(section: dict[str, Any]) -> Accelerator:
    overrides = {"distributed_type": "fsdp", "use_cpu": True, **{f"fsdp.{key}": each for key, each in section.items()}}
    return Accelerator(config=load_config(overrides=overrides, environ={}))


class Encoder(nn.Module):
    """A model with a second way in, that no ``forward`` goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x))) @ self.head.weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.head.bias


def by_method(section: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Parameters of the reference and of the model after steps through ``encode`` and ``forward`` in turn."""
    torch.manual_seed(6)
    reference = Encoder()
    torch.manual_seed(6)
    model: Any = Encoder()
    accelerator = accelerator_with(section)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(accelerator.num_processes)[accelerator.process_index]
        if step % 2:
            (reference.encode(x) ** 2).mean().backward()
            accelerator.backward((model.encode(mine) ** 2).mean())
        else:
            (reference(x) ** 2).mean().backward()
            accelerator.backward((model(mine) ** 2).mean())
        # An evaluation between backward and step, by the method: the step must reach the next forward.
        with torch.no_grad():
            model.encode(mine)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    state = {name: tensor.clone() for name, tensor in model._drivetrain.trainable.full_state_dict()}
    accelerator.end_training()
    return [reference.state_dict(), state]


def test_other_methods_gather_parameters_too() -> None:
    for expected, found in spawn(by_method, 2, {"forward_methods": "encode"}):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6, msg=name)
    with pytest.raises(RankFailedError, match="got mixed"):
        # Without the setting the root's parameters are shards when the method meets them, and torch says so.
        spawn(by_method, 2, {})
    with pytest.raises(RankFailedError, match="Encoder has no method 'decode'"):
        spawn(by_method, 2, {"forward_methods": ["encode", "decode"]})


# ---- refusals, and what they advise


def hooked(method: str, returned: Any) -> Tensor:
    """A parameter after a step in which a hook of it returned something."""
    accelerator = accelerator_with({})
    torch.manual_seed(6)
    model: Any = Encoder()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def hook(at: Tensor) -> Any:
        if returned == "in place":
            at.grad = at.grad * 2
        return at * 2 if returned == "double" else None if returned == "in place" else returned

    getattr(model.head.weight, method)(hook)
    accelerator.backward((model(torch.ones(2, 4)) ** 2).mean())
    optimizer.step()
    found: Tensor = accelerator.get_state_dict(model)["head.weight"]
    accelerator.end_training()
    return found


def test_what_a_hook_may_not_return_is_refused_and_what_it_may_is_taken() -> None:
    before, after = "register_hook", "register_post_accumulate_grad_hook"
    words = r"a hook of head\.weight returned Tensor of shape \[3\] for a gradient of shape \[3, 4\]\. Return a tensor"
    with pytest.raises(RankFailedError, match=words):
        spawn(hooked, 1, before, torch.ones(3))
    with pytest.raises(RankFailedError, match=r"a hook of head\.weight returned int of shape \[\] for a gradient"):
        spawn(hooked, 1, before, 3)
    words = r"accumulate grad hook of head\.weight returned something; torch wants None\. Change param\.grad in place"
    with pytest.raises(RankFailedError, match=words):
        spawn(hooked, 1, after, 3)
    doubled, in_place, left = (
        spawn(hooked, 1, *how)[0] for how in ((before, "double"), (after, "in place"), (before, None))
    )
    torch.testing.assert_close(doubled, in_place, rtol=0, atol=0)
    assert not torch.equal(doubled, left)


def sharded_twice() -> None:
    accelerator = accelerator_with({})
    model: Any = accelerator.prepare(Encoder())
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    words = r"this Encoder is sharded already, by an earlier prepare or by fully_shard, and cannot be sharded again"
    with pytest.raises(UnsupportedError, match=rf"{words}.*construct it again, and on the main process load"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    again = Encoder()
    if accelerator.is_main_process:
        again.load_state_dict(state)
    again, optimizer = accelerator.prepare(again, torch.optim.SGD(again.parameters(), lr=0.1))
    for name, value in accelerator.get_state_dict(again).items():
        assert torch.equal(value, state[name])
    accelerator.backward(again(torch.ones(2, 4)).mean())
    optimizer.step()
    accelerator.end_training()


def test_a_sharded_model_is_not_sharded_again_and_one_that_is_constructed_again_is() -> None:
    spawn(sharded_twice, 2)


def quantised(by_name: str, *, packed: bool) -> None:
    model = Encoder()
    if packed:
        model.head.weight.quant_state = "as bitsandbytes marks a packed parameter"
    overrides = {"distributed_type": by_name, "use_cpu": True}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.end_training()


def test_a_quantised_model_is_refused_and_goes_with_ddp_or_unpacked() -> None:
    with pytest.raises(RankFailedError, match=r"head\.weight is a quantised Parameter, .*Use distributed_type: ddp"):
        spawn(quantised, 1, "fsdp", packed=True)
    spawn(quantised, 1, "ddp", packed=True)
    spawn(quantised, 1, "fsdp", packed=False)


class Unit(nn.Module):
    """A class of the user's: of torch's own containers an older compiler compiles nothing behind FSDP's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.inner(x))


class Stack(nn.Module):
    """As little to compile as there can be: two blocks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unit() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled() -> tuple[list[dict[str, Tensor]], int, list[str]]:
    """Parameters of the reference and of the compiled model after two steps, graphs compiled, and the names."""
    from torch._dynamo.utils import counters

    x = torch.randn(4, 4)
    torch.manual_seed(6)
    reference = Stack()
    torch.manual_seed(6)
    model: Any = Stack()
    accelerator = accelerator_with({"compile": True, "transformer_layer_cls": "Unit"})
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    mine = x.chunk(accelerator.num_processes)[accelerator.process_index]
    for _ in range(2):
        (reference(x) ** 2).mean().backward()
        accelerator.backward((model(mine) ** 2).mean())
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    state = {name: tensor.clone() for name, tensor in model._drivetrain.trainable.full_state_dict()}
    accelerator.end_training()
    return [reference.state_dict(), state], counters["stats"]["unique_graphs"], list(state)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler for the CPU needs g++")
@pytest.mark.filterwarnings("ignore")  # Torch's compiler imports what torch itself has deprecated.
def test_units_compiled_by_inductor() -> None:
    for (expected, found), graphs, names in spawn(compiled, 2, timeout=280):
        assert graphs >= 1
        assert names == list(expected), "names of the user's module"
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6, msg=name)


def ranks_differ() -> float:
    """Each rank uses another branch."""
    accelerator = accelerator_with({"reduce_unused_parameters": True})
    torch.manual_seed(1)
    model: Any = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = model

        def forward(self, x: Tensor, way: str) -> Tensor:
            return self.ways[way](x)

    either: Any = accelerator.prepare(Either())
    accelerator.backward(either(torch.ones(2, 3), "ab"[accelerator.process_index]).mean())
    norm = float(accelerator.clip_grad_norm_(either.parameters(), 1e9))
    accelerator.end_training()
    return norm


@pytest.mark.skipif(not REDUCES_UNUSED, reason="this torch cannot reduce what only some ranks use; it is refused")
def test_ranks_may_use_other_parameters() -> None:
    # Half of (1, 1, 1) and of 1, in each of two branches.
    assert spawn(ranks_differ, 2) == pytest.approx([math.sqrt(2.0)] * 2)


@pytest.mark.skipif(REDUCES_UNUSED, reason="this torch can")
def test_an_older_torch_refuses_unused_parameters() -> None:
    with pytest.raises(RankFailedError, match="reduce_unused_parameters needs a newer torch"):
        spawn(ranks_differ, 2)


class Heads(nn.Module):
    """The second head runs on the second rank alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.low, self.high, self.rank = nn.Linear(3, 2), nn.Linear(3, 2), rank

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x) + self.high(x) if self.rank else self.low(x)


def head_on_one_rank() -> None:
    accelerator = accelerator_with({})
    model = accelerator.prepare(Heads(accelerator.process_index))
    accelerator.backward(model(torch.ones(2, 3)).mean())


def test_a_head_that_runs_on_one_rank_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 reduces .*high\.weight, high\.bias among them"):
        spawn(head_on_one_rank, 2)
