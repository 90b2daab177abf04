"""What ordinary scripts do to parameters and gradients between steps: the numbers of one process, or a sentence."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain import Accelerator, load_config
from drivetrain.api import DrivetrainError, UnsupportedError
from drivetrain_testing import spawn

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

WIDTH, BATCH, STEPS = 5, 12, 4


class Net(nn.Module):
    """Widths that three ranks share unevenly, tied weights, and a 0-d parameter, which no rank can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.again = nn.Linear(WIDTH, 4)
        self.again.weight = self.head.weight
        self.gain = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = torch.tanh(block(x)) * self.gain
        return self.head(x) + self.again(x.flip(-1))


def mask_of(tensor: Tensor) -> Tensor:
    """Some elements, by their place in the whole."""
    return (torch.arange(tensor.numel()).view(tensor.shape) % 3 > 0).to(torch.float32)


class Script:
    """A training loop with places where a script may do something. Its own backward where ``plain``."""

    window = 1
    plain = False

    def before_prepare(self, model: nn.Module) -> None: ...
    def after_prepare(self, model: nn.Module) -> None: ...
    def after_backward(self, model: nn.Module, step: int) -> None: ...
    def after_step(self, model: nn.Module, step: int) -> None: ...

    def run(self, backend: str) -> dict[str, Any]:
        overrides = {"distributed_type": backend, "use_cpu": True, "gradient_accumulation_steps": self.window}
        accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
        torch.manual_seed(3)
        net = Net()
        self.found: list[float] = []
        self.rank = accelerator.process_index
        self.before_prepare(net)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5))
        inner = accelerator.unwrap_model(model)
        self.after_prepare(inner)
        share = slice(self.rank, None, accelerator.num_processes)
        for step in range(STEPS * self.window):
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))[share]
            with accelerator.accumulate(model):
                loss = (model(x) - x[:, :4]).square().mean()
                if self.plain:
                    loss.backward()
                else:
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.after_backward(inner, step)
                optimizer.step()
                if accelerator.sync_gradients:
                    self.after_step(inner, step)
                optimizer.zero_grad()
        weights = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
        accelerator.end_training()
        return {"weights": weights, "found": self.found}


class PruningMask(Script):
    """Set before prepare, in windows."""

    window = 2

    def before_prepare(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            mask = mask_of(parameter)
            parameter.register_hook(lambda grad, mask=mask: grad * mask)


class FrozenRows(Script):
    """The handle of a hook that was set before prepare still removes it."""

    def before_prepare(self, model: nn.Module) -> None:
        def keep(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad[:2] = 0
            return grad

        self.handle = model.head.weight.register_hook(keep)

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 2:
            self.handle.remove()


class GradientsOfItsOwn(Script):
    """Assigned in place of those of the backward, in windows, of all parameters; the 0-d one is on every rank."""

    window = 2

    def after_backward(self, model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            self.found.append(float(parameter.grad.norm()))
            parameter.grad = 0.5 * parameter.grad


SCRIPTS = [PruningMask, FrozenRows, GradientsOfItsOwn]


def run_all(backend: str) -> dict[str, Any]:
    return {kind.__name__: kind().run(backend) for kind in SCRIPTS}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return spawn(run_all, 1, "single")[0]


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, Any]]:
    return spawn(run_all, 3, "fsdp")


@pytest.mark.parametrize("script", [kind.__name__ for kind in SCRIPTS])
def test_scripts_give_the_numbers_of_one_process(
    script: str, alone: dict[str, Any], sharded: list[dict[str, Any]]
) -> None:
    expected = alone[script]
    for rank in sharded:
        # Float32: three ranks add the parts of sums in another order.
        assert rank[script]["found"] == pytest.approx(expected["found"], rel=2e-4, abs=1e-5)
    found = sharded[0][script]["weights"]
    assert list(found) == list(expected["weights"])
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5, msg=name)


# ---- refused in words -----------------------------------------------------------------------------------------------


def answer(call: Callable[[], Any]) -> str:
    try:
        call()
    except DrivetrainError as error:
        return str(error)
    return "not refused"


def refusals() -> dict[str, str]:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    net = Net()
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    inner, trainable = accelerator.unwrap_model(model), accelerator._loop.models[0].trainable
    x = torch.randn(4, WIDTH)
    listed = [one for one in inner.parameters() if one.dim()]
    loss = model(x).square().mean()
    accelerator.backward(model(x).square().mean())
    weight = inner.head.weight

    def penalty() -> None:
        wanted = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(wanted).sum(), wanted, create_graph=True)
        accelerator.backward(slope.square().mean())

    plain = nn.Parameter(torch.zeros(weight.shape))

    def assign() -> None:
        weight.data = weight.data * 2

    found = {
        "listed": answer(lambda: torch.autograd.grad(loss, listed, retain_graph=True)),
        "listed and perhaps unused": answer(lambda: torch.autograd.grad(loss, listed, allow_unused=True)),
        "data": answer(assign),
        "data of an ordinary one": answer(lambda: setattr(plain, "data", 2 * weight.data)),
        "pickle": answer(lambda: torch.save(inner.state_dict(), io.BytesIO())),
        "part": answer(lambda: torch.save({"w": inner.state_dict()["head.weight"].cpu()}, io.BytesIO())),
        "alone": answer(lambda: inner.head(x)),
        "mixed": answer(lambda: weight.grad * mask_of(weight)),
        "memory": answer(lambda: nn.init.orthogonal_(inner.body[0].weight.view(1, -1))),
        "copy": answer(trainable.before_copy),
        "dtype": answer(trainable.before_conversion),
        "layer": answer(lambda: trainable.before_registration(inner, "new", nn.Linear(2, 2))),
        "buffer": answer(lambda: trainable.before_registration(inner, "new", torch.ones(2))),
        "penalty": answer(penalty),
        "assigned": answer(lambda: inner.load_state_dict(Net().state_dict(), assign=True)),
        "numpy": answer(weight.numpy),
        "dlpack": answer(lambda: torch.from_dlpack(weight.detach())),
        "dlpack of a copy": answer(lambda: np.from_dlpack(weight.detach()[0].clone())),
    }
    accelerator.end_training()
    return found


def test_what_cannot_be_honoured_is_refused_in_words() -> None:
    wanted = {
        "listed": "accelerator.backward(loss), which leaves gradients over all ranks in p.grad",
        "listed and perhaps unused": "accelerator.backward(loss), which leaves gradients over all ranks in p.grad",
        "data": "param.copy_(value)",
        "data of an ordinary one": "q.copy_(x)",
        "pickle": "accelerator.get_state_dict(model)",
        "part": "accelerator.get_state_dict(model)",
        "alone": "forward_methods",
        "mixed": "full_tensor()",
        "copy": "p.detach().clone()",
        "dtype": "before accelerator.prepare(model)",
        "layer": "before accelerator.prepare(model)",
        "buffer": "not refused",
        "penalty": "create_graph=True",
        "assigned": "without assign=True",
        "numpy": "p.detach().numpy()",
        "dlpack": "Give it p.full_tensor()",
        "dlpack of a copy": "Give it p.full_tensor()",
    }
    for found in spawn(refusals, 2):
        for name, words in wanted.items():
            assert words in found[name], (name, found[name])


def read_and_copied() -> tuple[Any, ...]:
    """Numbers of a sharded weight as lists and arrays, and weights that a list operation has written."""
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    torch.manual_seed(3)
    model = accelerator.prepare(Net())
    weight = model.head.weight
    array = weight.detach().numpy()
    assert torch.equal(torch.from_dlpack(weight.full_tensor().detach()), torch.tensor(weight.tolist()))
    read = weight.tolist(), array.copy(), array.flags.writeable
    parameters = [p.data for p in model.parameters()]
    shadow = [p.clone() for p in parameters]
    torch._foreach_mul_(shadow, 2.0)
    torch._foreach_copy_(parameters, shadow)
    twice = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
    torch._foreach_copy_(parameters, [torch.full(p.shape, 0.5 + accelerator.process_index) for p in parameters])
    plain = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return read, twice, plain


def test_lists_arrays_and_list_operations_are_of_whole_tensors() -> None:
    torch.manual_seed(3)
    expected = Net()
    results = spawn(read_and_copied, 3)
    for (listed, array, writeable), _, _ in results:
        assert listed == expected.head.weight.tolist()
        assert (array == expected.head.weight.detach().numpy()).all()
        assert not writeable  # a write would be lost
    _, twice, plain = results[0]
    for name, value in expected.named_parameters():
        torch.testing.assert_close(twice[name], 2 * value.detach())
        assert (plain[name] == 0.5).all()  # rank 0's, as everywhere


def tied() -> bool:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    model = accelerator.prepare(Net())
    state = accelerator.get_state_dict(model)
    # DCP and torch's own functions are given shards, on every rank.
    own = torch.distributed.checkpoint.state_dict.get_model_state_dict(accelerator.unwrap_model(model))
    same = not state or state["head.weight"] is state["again.weight"]
    accelerator.end_training()
    return same and all(isinstance(one, DTensor) for one in own.values() if one.dim())


def test_tied_weights_stay_tied_in_the_whole_state() -> None:
    assert spawn(tied, 2) == [True, True]


def uses_of_former() -> dict[str, str]:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    net = Net()
    # Without the 0-d parameter, which stays what it was.
    kept: list[Any] = [one for one in net.parameters() if one.dim()]
    optimizer = torch.optim.SGD(kept, lr=0.1)
    model, optimizer = accelerator.prepare(net, optimizer)
    assert sum(one.numel() for one in kept) == sum(one.numel() for one in model.parameters() if one.dim())
    first, graph = kept[0], torch.autograd.graph

    def scale_all() -> None:
        with torch.no_grad():
            torch._foreach_mul_(kept, 2.0)

    found = {
        "written": answer(lambda: torch.nn.init.zeros_(first)),
        "written past autograd": answer(lambda: first.data.mul_(2)),
        "given other values": answer(lambda: setattr(first, "data", torch.zeros(1))),
        "written with others": answer(scale_all),
        "read": answer(lambda: torch.ones_like(first).lerp_(first, 0.5)),
        "computed with": answer(lambda: sum(one.square().sum() for one in kept)),
        "frozen": answer(lambda: first.requires_grad_(False)),
        "hook": answer(lambda: first.register_hook(lambda grad: None)),
        "later hook": answer(lambda: first.register_post_accumulate_grad_hook(lambda one: None)),
        "hook on several": answer(lambda: graph.register_multi_grad_hook(kept[:2], lambda grads: None)),
        "hook on any": answer(lambda: graph.register_multi_grad_hook(kept[:2], lambda grad: None, mode="any")),
    }
    # An optimizer that was made of them is given the sharded ones.
    accelerator.backward(model(torch.ones(BATCH, WIDTH)).square().mean())
    optimizer.step()
    accelerator.end_training()
    return found


def test_parameters_of_before_prepare_are_not_used_in_silence() -> None:
    for found in spawn(uses_of_former, 3):
        for use, said in found.items():
            assert "taken from the model before accelerator.prepare" in said, (use, said)


def gradient_of_former() -> str:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    net = Net()
    kept = list(net.parameters())
    model = accelerator.prepare(net)
    accelerator.backward(model(torch.ones(BATCH, WIDTH)).square().mean())
    said = answer(lambda: torch.nn.utils.clip_grad_norm_(kept, 0.1))
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0
    accelerator.end_training()
    return said


def test_parameters_of_before_prepare_have_no_gradient_in_silence() -> None:
    for said in spawn(gradient_of_former, 2):
        assert "taken from the model before accelerator.prepare" in said


class Hidden:
    """No tree walk of torch looks into it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(self.layer(x))


def train_hidden() -> str:
    accelerator = Accelerator(distributed_type="fsdp", cpu=True)
    net = Hiding()
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    try:
        accelerator.backward(model(torch.ones(2, WIDTH)).value.sum())
    except DrivetrainError as error:
        return str(error)
    return ""


def test_an_output_that_hides_its_tensors_is_refused() -> None:
    for said in spawn(train_hidden, 2):
        assert "returns Hidden, in which fully_shard finds no tensors" in said


class Bounded(nn.Module):
    """Each of its parts may write to its own weight in forward."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.writes = writes
        bound = 0.5 if writes == "max_norm" else None
        self.embedding = nn.Embedding(6, WIDTH, max_norm=bound)
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, step: int) -> Tensor:
        if self.writes == "data":
            self.head.weight.data = nn.functional.normalize(self.head.weight.data)
        if self.writes == "data in place":
            self.head.weight.data.clamp_(-0.1, 0.1)
        if self.writes == "rows that were swapped" and step == 2:
            with torch.no_grad():
                self.embedding.weight.copy_(self.embedding.weight.flip(0).clone())
        if self.writes == "late" and step == 6:
            with torch.no_grad():
                self.head.weight.mul_(0.9)
        if self.writes == "late data" and step >= 5:
            self.head.weight.data.mul_(0.9)
        if self.writes == "functional":
            x = nn.functional.embedding(x, self.embedding.weight, max_norm=0.5)
        else:
            x = self.embedding(x)
        for block in self.body:
            x = block(x).tanh()
        return self.head(x)


class ClampsItself(nn.Linear):
    """A unit of its own, whose parameters are gathered for it alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def train_bounded(writes: str) -> str:
    accelerator = Accelerator(distributed_type="fsdp", cpu=True)
    torch.manual_seed(3)
    net = Bounded(writes)
    if writes == "block":
        net.body[1] = ClampsItself(WIDTH, WIDTH)
    try:
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with torch.no_grad():
            model(torch.arange(6), -1)
        for step in range(10):
            accelerator.backward(model(torch.arange(6), step).square().sum())
            optimizer.step()
            optimizer.zero_grad()
    except UnsupportedError as error:
        return f"step {step}: {error}" if writes.startswith("late") else str(error)
    accelerator.end_training()
    return ""


@pytest.mark.parametrize(
    ("writes", "where"),
    [
        ("late", "step 6: the forward of Bounded writes to its parameter head.weight"),
        # Torch does not count it: found in forward 8.
        ("late data", "step 8: the forward of Bounded writes to its parameter head.weight"),
    ],
)
def test_a_forward_that_writes_to_parameters_is_refused(writes: str, where: str) -> None:
    for said in spawn(train_bounded, 2, writes):
        assert where in said
        assert "the write is lost" in said
        assert "after optimizer.step()" in said


@torch.no_grad()
def write(kind: str, model: Any, optimizer: Any) -> None:
    held = [name for state in optimizer.state.values() for name in state]
    assert held == ["momentum_buffer"] * len(list(model.parameters()))
    if kind in {"all", "parameters"}:
        for parameter in model.parameters():
            parameter.clamp_(-0.5, 0.5)
        model.head.weight.data.mul_(0.9)
    if kind in {"all", "state"}:
        optimizer.state.clear()


def writes_on_one_rank(kind: str, folder: str = "") -> str:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    x = torch.ones(2, WIDTH)
    try:
        for step in range(20):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if kind == "all" or (accelerator.is_main_process and step == 1):
                write(kind, model, optimizer)
            if folder and step == 1:
                accelerator.save_state(folder)
                accelerator.load_state(folder)
        accelerator.end_training()
    except DrivetrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "named"), [("parameters", "a sharded parameter or gradient"), ("state", "an optimizer's state")]
)
def test_writes_of_one_rank_alone_are_named(kind: str, named: str) -> None:
    for said in spawn(writes_on_one_rank, 2, kind):
        assert f"write to {named} at test_fsdp_scripts.py" in said
        assert "the ranks' copies or parts of the model were changed in different ways" in said


def test_writes_of_all_ranks_are_left_alone() -> None:
    assert spawn(writes_on_one_rank, 3, "all") == [""] * 3


def test_a_rank_that_only_reads_is_left_alone_after_a_load_too(tmp_path: Path) -> None:
    assert spawn(writes_on_one_rank, 2, "read", str(tmp_path / "checkpoint")) == [""] * 2
