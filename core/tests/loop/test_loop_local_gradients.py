"""Which gradients are one rank's alone, and that torch.autograd.grad of parameters does not return such in silence."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from drivetrain.api import LocalGradients, UsageError
from drivetrain.api.engines import is_taken


def model():
    return nn.Sequential(OrderedDict(body=nn.Linear(3, 4), head=nn.Linear(4, 2)))


def loss_of(net, x=None):
    return net(torch.ones(5, 3) if x is None else x).square().mean()


def test_a_backward_of_whoever_is_noticed_until_gradients_are_reduced():
    net = model()
    local = LocalGradients(net, lambda: True)
    assert not local.exist()
    loss_of(net).backward()
    assert set(local.reached) == set(net.parameters())
    local.before_backward()
    assert not local.reached
    assert local.exist()
    local.reduced()
    assert not local.exist()


@pytest.mark.parametrize("wanted", ["body.weight", "head.bias"])
def test_taking_a_gradient_of_a_parameter_is_refused(wanted):
    net = model()
    local = LocalGradients(net, lambda: True)
    parameter = net.get_parameter(wanted)
    with pytest.raises(UsageError, match=rf"gradient of {wanted} of Sequential.*accelerator\.no_sync\(model\)"):
        torch.autograd.grad(loss_of(net), parameter)
    loss_of(net).backward()
    with pytest.raises(UsageError, match=wanted):
        torch.autograd.grad(loss_of(net), [torch.autograd.graph.get_gradient_edge(parameter)])
    local.release()
    torch.autograd.grad(loss_of(net), parameter)


def test_other_gradients_are_given_and_are_no_contributions():
    net, reduces = model(), True
    local = LocalGradients(net, lambda: reduces)
    loss_of(net).backward()
    local.reduced()
    x = torch.ones(5, 3, requires_grad=True)
    torch.autograd.grad(loss_of(net, x), x)
    torch.autograd.grad(loss_of(net, x), x, create_graph=True)
    reduces = False
    torch.autograd.grad(loss_of(net), list(net.parameters()))
    torch.autograd.grad(loss_of(net), list(net.parameters()), create_graph=True)
    # What .grad holds is still what was reduced.
    assert not local.exist()
    loss_of(net).backward(inputs=[net.head.bias])
    assert set(local.reached) == {net.head.bias}


class Recomputes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer, *parameters):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            made = ctx.layer(x)
        return None, None, *torch.autograd.grad(made, list(ctx.layer.parameters()), gradient)


def test_a_function_that_takes_gradients_in_its_backward_is_part_of_it():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    layer(x).square().mean().backward()
    expected = layer.weight.grad
    layer.zero_grad()
    local = LocalGradients(layer, lambda: True)
    made = Recomputes.apply(x, layer, *layer.parameters())
    made.square().mean().backward()
    torch.testing.assert_close(layer.weight.grad, expected)
    assert set(map(id, local.reached)) == set(map(id, layer.parameters()))
    with pytest.raises(UsageError, match=r"torch\.autograd\.grad was asked for the gradient of weight"):
        torch.autograd.grad(layer(x).sum(), layer.weight)
    local.release()


def test_the_first_gradient_of_each_backward_is_told():
    net, begun = model(), []
    local = LocalGradients(net, lambda: True, lambda: begun.append(len(local.reached)))
    for _ in range(2):
        local.before_backward()
        loss_of(net).backward()
    assert begun == [0, 0]


def test_the_model_is_followed():
    net = model()
    local = LocalGradients(net, lambda: True)
    gone, net.head = net.head, nn.Linear(4, 2)
    local.watch()
    loss_of(net).backward()
    assert set(local.reached) == set(net.parameters())
    assert not gone.weight._backward_hooks


def test_only_a_leaf_of_autograd_grad_is_taken():
    found = []
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    one.register_hook(lambda _: found.append((is_taken(one), is_taken(other))))
    (one * other).sum().backward()
    torch.autograd.grad((one * other).sum(), one)
    assert found == [(False, False), (True, False)]
