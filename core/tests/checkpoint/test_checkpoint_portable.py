from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.backend import PortableState, TensorSpec
from drivetrain.backends.portable import load_portable_state, portable_state, portable_template, tied_names
from drivetrain.checkpoint.tensors import dtype_name
from drivetrain.checkpoint.tree import Encoder, decode
from drivetrain.errors import CheckpointError, CheckpointMismatchError


def carry(source, target):
    """From one module with optimizers to another, as a checkpoint would."""
    saved = portable_state(*source)
    copies = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    template = portable_template(
        *target, {name: TensorSpec(tuple(one.shape), dtype_name(one.dtype)) for name, one in copies.items()}
    )
    for name, tensor in template.tensors.items():
        with torch.no_grad():
            tensor.copy_(copies[name])
    encoder = Encoder()
    node = encoder.encode([saved.optimizers, saved.extra], "x")
    optimizers, extra = decode(node, lambda key: encoder.tensors[key].clone())
    load_portable_state(*target, PortableState(template.tensors, optimizers, extra))


def step(module, *optimizers, times=2):
    for number in range(times):
        loss = module(torch.full((2, 4), float(number + 1))).pow(2).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step(lambda loss=loss: loss) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in module.parameters()]


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, 0.01),
    lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    lambda p: torch.optim.NAdam(p, 0.01),
    lambda p: torch.optim.Adagrad(p, 0.01),
    lambda p: torch.optim.Adafactor(p, 0.01),
    lambda p: torch.optim.LBFGS(p, 0.01, max_iter=2),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_every_optimizer_goes_on_as_if_nothing_had_happened(make, used):
    first, second = net(0), net(1)
    before, after = make(first.parameters()), make(second.parameters())
    step(first, before)
    if used:
        step(second, after, times=1)
    carry((first, [before]), (second, [after]))
    for expected, got in zip(step(first, before), step(second, after), strict=True):
        assert torch.equal(expected, got)


def test_parameters_are_found_by_name_not_by_order():
    first, second = net(0), net(1)
    before = torch.optim.Adam(first.parameters())
    after = torch.optim.Adam(reversed(list(second.parameters())))
    step(first, before)
    carry((first, [before]), (second, [after]))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(before.state[one]["exp_avg"], after.state[other]["exp_avg"])


def test_state_that_the_checkpoint_lacks_does_not_stay():
    first, second = net(0), net(1)
    before, after = torch.optim.Adam(first.parameters()), torch.optim.Adam(second.parameters())
    step(second, after)
    carry((first, [before]), (second, [after]))
    assert not after.state


def test_hyper_parameters_travel_but_the_device_s_choices_do_not():
    first, second = net(0), net(1)
    before = torch.optim.Adam(first.parameters(), lr=0.5, betas=(0.1, 0.2), foreach=True)
    after = torch.optim.Adam(second.parameters(), lr=torch.tensor(0.1), fused=True)
    before.param_groups[0]["initial_lr"] = 0.7
    carry((first, [before]), (second, [after]))
    group = after.param_groups[0]
    assert group["lr"].item() == 0.5
    assert (group["betas"], group["initial_lr"], group["fused"], group["foreach"]) == ((0.1, 0.2), 0.7, True, None)


def test_other_groups_are_refused_and_the_optimizer_stays():
    first, second = net(0), net(1)
    before = torch.optim.Adam(first.parameters(), lr=0.5)
    after = torch.optim.Adam(list(second.parameters())[:2], lr=0.1)
    with pytest.raises(CheckpointMismatchError, match=r"2\.bias, 2\.weight"):
        carry((first, [before]), (second, [after]))
    assert after.param_groups[0]["lr"] == 0.1


def test_an_optimizer_of_two_modules_gives_each_its_own():
    one, two = net(0), net(1)
    shared = torch.optim.Adam([*one.parameters(), *two.parameters()])
    step(one, shared)
    step(two, shared)
    names = [set(portable_state(module, [shared]).tensors) for module in (one, two)]
    assert names[0] == names[1]
    assert all(len(state) == 4 + 4 * 3 for state in names)
    third, fourth = net(2), net(3)
    other = torch.optim.Adam([*third.parameters(), *fourth.parameters()])
    carry((one, [shared]), (third, [other]))
    carry((two, [shared]), (fourth, [other]))
    for old, new in zip(two.parameters(), fourth.parameters(), strict=True):
        assert torch.equal(shared.state[old]["exp_avg_sq"], other.state[new]["exp_avg_sq"])


def test_a_parameter_of_two_optimizers_is_refused():
    module = net(0)
    with pytest.raises(CheckpointError, match=r"two optimizers hold the parameter 0\.weight"):
        portable_state(module, [torch.optim.SGD(module.parameters()), torch.optim.SGD(module.parameters())])


def test_tied_volatile_and_wrapped_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Linear(2, 2)
            self.b.weight = self.a.weight
            self.register_buffer("kept", torch.ones(1))
            self.register_buffer("lost", torch.ones(1), persistent=False)

    module = Tied()
    assert tied_names(module) == {"b.weight": "a.weight"}
    wrapped = nn.Sequential(torch.compile(module, backend="eager"))
    names = {f"model.0.{name}" for name in ("a.weight", "a.bias", "b.bias", "kept")}
    assert set(portable_state(wrapped).tensors) == names


def test_extra_state_of_submodules_travels():
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def get_extra_state(self):
            return {"scale": self.scale}

        def set_extra_state(self, state):
            self.scale = state["scale"]

    first, second = nn.Sequential(Scaled(3)), nn.Sequential(Scaled(4))
    carry((first, []), (second, []))
    assert second[0].scale == 3


def test_parameters_are_filled_in_place():
    module = net(0)
    template = portable_template(module, [], {})
    assert template.tensors["model.0.weight"].data_ptr() == module[0].weight.data_ptr()


def test_absent_tensors_keep_their_values():
    module = net(0)
    before = module[0].weight.clone()
    load_portable_state(module, [], PortableState({"model.0.bias": torch.full((4,), 3.0)}))
    assert torch.equal(module[0].weight, before)
    assert module[0].bias.tolist() == [3.0] * 4


@pytest.mark.gpu
def test_state_on_an_accelerator_travels_to_the_cpu_and_back():
    device = torch.accelerator.current_accelerator()
    first, second = net(0).to(device), net(1)
    before = torch.optim.AdamW(first.parameters(), capturable=True)
    after = torch.optim.AdamW(second.parameters())
    for parameter in first.parameters():
        parameter.grad = torch.ones_like(parameter)
    before.step()
    carry((first, [before]), (second, [after]))
    third = net(2).to(device)
    last = torch.optim.AdamW(third.parameters(), fused=True)
    carry((second, [after]), (third, [last]))
    for one, other in zip(first.parameters(), third.parameters(), strict=True):
        assert torch.equal(one, other)
        assert last.state[other]["step"].device == other.device
        assert torch.equal(before.state[one]["exp_avg"], last.state[other]["exp_avg"])
