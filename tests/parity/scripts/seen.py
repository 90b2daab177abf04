"""Gradients of activations, seen and changed by hooks and by ``autograd.Function`` of the script's own."""

from __future__ import annotations

import torch
from parity_common import Net, build, loader, points, result, script
from parity_scripts_losses import fit
from torch.nn import functional as F

SCALE = "the norm of a row's gradient depends on how many rows the mean of the loss is over"


def normed(gradient):
    """Each row of a gradient divided by its norm; ``(B, H) -> (B, H)``."""
    return gradient / (0.01 + gradient.norm(dim=1, keepdim=True))


class Touched(Net):
    """Lets ``touch`` see the hidden activations ``(B, H)`` behind the first layer."""

    def forward(self, x):
        hidden = self.touch(self.body[1](self.body[0](x)))
        return self.head(self.body[3](self.body[2](hidden)))


def touched(accelerator, kind, prepared=lambda model: None):
    return fit(accelerator, build(kind), loader(), lambda model, x, y: F.cross_entropy(model(x), y), prepared=prepared)


class NormedByHook(Touched):
    def touch(self, hidden):
        hidden.register_hook(normed)
        return hidden


@script(whole_batch=SCALE)
def gradients_normed_by_a_hook_in_forward(accelerator):
    """``hidden.register_hook`` in forward divides each row of the gradient by its norm."""
    return touched(accelerator, NormedByHook)


class MaskedByHook(Touched):
    def touch(self, hidden):
        mask = torch.arange(hidden.shape[1]) % 3 > 0
        hidden.register_hook(lambda gradient: gradient * mask)
        return hidden


@script()
def gradients_masked_by_a_hook_in_forward(accelerator):
    """``hidden.register_hook`` in forward leaves out some of the features."""
    return touched(accelerator, MaskedByHook)


class Norming(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return normed(gradient)


class NormedByFunction(Touched):
    def touch(self, hidden):
        return Norming.apply(hidden)


@script(whole_batch=SCALE)
def gradients_normed_by_a_function(accelerator):
    """A function of the script's own divides each row of its gradient by its norm."""
    return touched(accelerator, NormedByFunction)


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        ctx.save_for_backward(hidden)
        return hidden / hidden.norm(dim=1, keepdim=True)

    @staticmethod
    def backward(ctx, gradient):
        (hidden,) = ctx.saved_tensors
        norm = hidden.norm(dim=1, keepdim=True)
        unit = hidden / norm
        return (gradient - unit * (gradient * unit).sum(1, keepdim=True)) / norm


class ScaledByFunction(Touched):
    def touch(self, hidden):
        return Scaling.apply(hidden)


@script()
def rows_scaled_by_a_function(accelerator):
    """A function of the script's own saves its input and scales it to length 1, with a backward written by hand."""
    return touched(accelerator, ScaledByFunction)


@script(whole_batch=SCALE)
def backward_hook_of_a_module(accelerator):
    """``register_full_backward_hook`` changes the gradient of a module's input."""

    class Hooked(Net):
        def __init__(self):
            super().__init__()
            self.body[1].register_full_backward_hook(lambda module, given, made: tuple(map(normed, given)))

    return touched(accelerator, Hooked)


@script(whole_batch=SCALE)
def backward_pre_hook_of_a_module_after_prepare(accelerator):
    """``register_full_backward_pre_hook`` on a layer of the prepared model changes the gradient of its output."""
    return touched(
        accelerator,
        Net,
        lambda model: model.body[0].register_full_backward_pre_hook(lambda module, made: tuple(map(normed, made))),
    )


@script(whole_batch="reads the gradients of all rows of the batch")
def gradients_of_activations_kept(accelerator):
    """``retain_grad`` in a forward hook, and the spread of the gradients over the features after backward."""
    model, kept = build(), []

    def keep(module, given, made):
        if made.requires_grad:
            made.retain_grad()
            kept[:] = [made]

    model.body[0].register_forward_hook(keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points()))
    spreads = []
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        spreads.append(float(kept[0].grad.abs().sum(0).std()))
    return result(accelerator, spreads, model=model)
