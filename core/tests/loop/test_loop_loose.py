"""Tensors that a loss trains and that are of no prepared model: averaged by a prepared optimizer, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, LocalSGD
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop.loss import leaves
from drivetrain_testing import spawn

ROWS, RANKS = 12, 3


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * ROWS, 6, generator=generator), torch.randint(0, 3, (2 * ROWS,), generator=generator)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def in_the_prepared_optimizer(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [loose]}], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) + loose, y))
        optimizer.step()
        optimizer.zero_grad()


def in_a_prepared_optimizer_of_its_own(accelerator: Any, loose: Tensor, batches: Any) -> None:
    """What the refusal says."""
    model, optimizer = accelerator.prepare(net(), torch.optim.Adam([loose], lr=0.1))
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) * loose, y))
        accelerator.clip_grad_norm_([loose], 0.01)
        optimizer.step()
        optimizer.zero_grad()


def reached_by_some_ranks(accelerator: Any, loose: Tensor, batches: Any) -> None:
    """Another tensor beside the model is reached by the last rank's loss alone, a third one by none."""
    other, third = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    model, optimizer = accelerator.prepare(net(), torch.optim.SGD([loose, other, third], lr=0.1, weight_decay=0.5))
    last = accelerator.process_index == accelerator.num_processes - 1
    for x, y in batches:
        logits = model(x) + loose
        accelerator.backward(F.cross_entropy(logits, y) + (other.sum() * accelerator.num_processes if last else 0))
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(third, torch.ones(3))
    torch.testing.assert_close(other.detach(), torch.full((3,), -0.1 - 0.095))


def added_later(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.add_param_group({"params": loose, "lr": 0.2})
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) + loose, y))
        optimizer.step()
        optimizer.zero_grad()


def in_two_backwards(accelerator: Any, loose: Tensor, batches: Any) -> None:
    """The second backward adds to a gradient that was averaged already."""
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([*model.parameters(), loose], lr=0.1))
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) + loose, y))
        accelerator.backward((model(x) * loose).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()


def in_train_step(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model = net()
    model, _ = accelerator.prepare(model, torch.optim.SGD([*model.parameters(), loose], lr=0.1))
    for batch in batches:
        accelerator.train_step(model, batch, lambda output, batch: F.cross_entropy(output + loose, batch[1]))


def with_a_schedule(accelerator: Any, loose: Tensor, batches: Any) -> None:
    optimizer = torch.optim.SGD([loose], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(net(), optimizer, scheduler)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) + loose, y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert scheduler.get_last_lr() == [0.025]


def with_an_optimizer_of_its_own(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model = accelerator.prepare(net())
    optimizer = torch.optim.SGD([loose], lr=0.1)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x).detach() * loose, y))
        optimizer.step()
        optimizer.zero_grad()


def against_a_frozen_model(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model = accelerator.prepare(net().requires_grad_(False))
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) + loose, y))
        with torch.no_grad():
            loose.sub_(0.1 * loose.grad)
        loose.grad = None


def in_a_model_that_was_forgotten(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model, other = accelerator.prepare(net()), nn.ParameterList([loose])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) + other[0], y))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loose.copy_(other[0])


class Shift(nn.Module):
    def __init__(self, by: Tensor) -> None:
        super().__init__()
        self.by = nn.Parameter(by.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def in_a_module(accelerator: Any, loose: Tensor, batches: Any) -> None:
    """What the refusal says."""
    model, holder = net(), Shift(loose)
    model, holder, optimizer = accelerator.prepare(model, holder, torch.optim.SGD(holder.parameters(), lr=0.1))
    for x, y in batches:
        accelerator.backward(F.cross_entropy(holder(model(x)), y))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loose.copy_(holder.by)


def of_each_rank(accelerator: Any, loose: Tensor, batches: Any) -> None:
    """What the refusal says, too: an attack on this rank's samples."""
    model = accelerator.prepare(net())
    optimizer = torch.optim.SGD([loose], lr=0.1)
    for x, y in batches:
        F.cross_entropy(model(x) + loose, y).backward(inputs=[loose])
        optimizer.step()
        optimizer.zero_grad()


def trained(how: Any) -> tuple[Tensor, str]:
    """The tensor at the end, and the refusal."""
    accelerator = Accelerator(cpu=True, split_batches=True)
    batches = accelerator.prepare(DataLoader(TensorDataset(*data()), batch_size=ROWS))
    loose, said = torch.linspace(-1, 1, 3, requires_grad=True), ""
    try:
        how(accelerator, loose, batches)
    except UsageError as error:
        said = str(error)
    accelerator.end_training()
    return loose.detach().clone(), said


RIGHT = [
    in_the_prepared_optimizer,
    in_a_prepared_optimizer_of_its_own,
    added_later,
    in_two_backwards,
    in_train_step,
    with_a_schedule,
]

WRONG = [
    with_an_optimizer_of_its_own,
    against_a_frozen_model,
    in_a_model_that_was_forgotten,
]


@pytest.mark.parametrize("how", WRONG)
def test_a_tensor_of_no_prepared_model_is_refused_before_it_is_stepped(how: Any) -> None:
    for loose, said in spawn(trained, RANKS, how):
        assert torch.equal(loose, torch.linspace(-1, 1, 3))
        assert "this rank's samples alone" in said
        assert "optimizer = accelerator.prepare(optimizer)" in said
        assert "loss.backward() instead of accelerator.backward(loss)" in said


@pytest.mark.parametrize("how", RIGHT)
def test_a_prepared_optimizer_averages_what_no_model_holds(how: Any) -> None:
    ((wanted, said),) = spawn(trained, 1, how)
    assert not said
    assert not torch.allclose(wanted, torch.linspace(-1, 1, 3), atol=1e-3)
    for loose, said in spawn(trained, RANKS, how):
        assert not said
        torch.testing.assert_close(loose, wanted)


def test_ranks_whose_loss_does_not_reach_it_take_part() -> None:
    found = spawn(trained, RANKS, reached_by_some_ranks)
    assert [said for _, said in found] == [""] * RANKS
    for loose, _ in found[1:]:
        torch.testing.assert_close(loose, found[0][0])


def resumed(folder: str, stop: bool) -> Tensor:
    """Momentum and value of what is beside the model come back."""
    accelerator = Accelerator(cpu=True, split_batches=True)
    model, loose = net(), torch.linspace(-1, 1, 3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1, momentum=0.9)
    second = torch.optim.Adam([other], lr=0.1)
    batches = DataLoader(TensorDataset(*data()), batch_size=ROWS // 2)
    model, optimizer, second, batches = accelerator.prepare(model, optimizer, second, batches)
    for number, (x, y) in enumerate(batches):
        if number == 2:
            if stop:
                with torch.no_grad():
                    loose.zero_(), other.zero_()
                for each in (optimizer, second):
                    each.state.clear()
                    each.param_groups[-1]["lr"] = 7.0
                accelerator.load_state(folder)
            else:
                accelerator.save_state(folder)
        accelerator.backward(F.cross_entropy(model(x) * other + loose, y))
        for each in (optimizer, second):
            each.step()
            each.zero_grad()
    accelerator.end_training()
    return torch.stack([loose.detach(), other.detach()])


def test_a_checkpoint_holds_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    (wanted, *_) = spawn(resumed, 2, folder, False)
    for found in spawn(resumed, 2, folder, True):
        torch.testing.assert_close(found, wanted)
    ((alone),) = spawn(resumed, 1, folder, True)
    torch.testing.assert_close(alone, wanted)


def raised(call: Any) -> str:
    accelerator = Accelerator(cpu=True, split_batches=True)
    said = ""
    try:
        call(accelerator)
    except (UnsupportedError, UsageError) as error:
        said = str(error)
    accelerator.end_training()
    return said


def nothing_prepared(accelerator: Any) -> None:
    accelerator.backward(net()(torch.ones(2, 6)).sum())


def plain_backward(accelerator: Any) -> None:
    loose = torch.ones(3, requires_grad=True)
    model, optimizer = accelerator.prepare(net(), torch.optim.SGD([loose], lr=0.1))
    (model(torch.ones(2, 6)) * loose).sum().backward()
    optimizer.step()


def alone(accelerator: Any) -> None:
    loose = torch.ones(3, requires_grad=True)
    model, _ = accelerator.prepare(net(), torch.optim.SGD([loose], lr=0.1))
    LocalSGD(accelerator, model, 2)


def uneven(accelerator: Any) -> None:
    loose = torch.ones(3, requires_grad=True)
    model, _ = accelerator.prepare(net(), torch.optim.SGD([loose], lr=0.1))
    with accelerator.join_uneven_inputs([model]):
        pass


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (nothing_prepared, "backward() was called before accelerator.prepare(model)"),
        (plain_backward, "with the gradient of this rank's samples alone"),
        (alone, "LocalSGD follows the parameters of models"),
        (uneven, "join_uneven_inputs follows the parameters of models"),
    ],
)
def test_what_cannot_be_averaged_is_refused(call: Any, words: str) -> None:
    for said in spawn(raised, RANKS, call):
        assert words in said
    assert spawn(raised, 1, call) == [""]


@pytest.mark.parametrize("how", WRONG)
def test_one_process_trains_it(how: Any) -> None:
    ((loose, said),) = spawn(trained, 1, how)
    assert not said
    assert not torch.allclose(loose, torch.linspace(-1, 1, 3), atol=1e-3)


def test_the_cures_of_the_refusal() -> None:
    ((wanted, _),) = spawn(trained, 1, in_a_module)
    for loose, said in spawn(trained, RANKS, in_a_module):
        assert not said
        torch.testing.assert_close(loose, wanted)
    assert [said for _, said in spawn(trained, RANKS, of_each_rank)] == [""] * RANKS


def test_leaves_of_a_loss() -> None:
    one, two, frozen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
    found = list(leaves((one * frozen + two.exp() * one).sum()))
    assert len(found) == 2
    assert {id(each) for each in found} == {id(one), id(two)}
    assert list(leaves(frozen.sum())) == []
