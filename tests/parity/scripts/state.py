"""Models whose forward keeps something from one call to the next, besides parameters and buffers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from parity_common import CLASSES, Net, build, loader, script
from parity_scripts_losses import fit
from torch import nn
from torch.nn import functional as F


class Gated(nn.Module):
    """Multiplies its logits by a number or row that ``gate`` makes anew in each call; ``(B, F) -> (B, C)``."""

    def __init__(self, first=False):
        super().__init__()
        self.first = first
        self.net, self.last = Net(), nn.Linear(CLASSES, CLASSES)
        self.begin()

    def forward(self, x):
        if self.first:
            return self.last(torch.tanh(self.net(x * self.gate(x))))
        return self.last(torch.tanh(self.net(x))) * self.gate(x)


def gated(accelerator, kind):
    """Train a gated model whose gate comes behind its layers."""
    return fit(
        accelerator, build(kind), loader(), lambda model, x, y: F.cross_entropy(model(x), y)
    )


class CountsInPlace(Gated):
    def begin(self):
        self.seen, self.table = torch.zeros(()), {"calls": torch.zeros(()), "number": 0}

    def gate(self, x):
        self.seen.add_(1)
        self.table["calls"] += 1
        self.table["number"] += 1
        return 3 / (1 + float(self.seen) + float(self.table["calls"]) + self.table["number"])


@script()
def counted_in_place(accelerator):
    """Forward counts its calls in a tensor and in a dict, in place, and fades its output with them."""
    return gated(accelerator, CountsInPlace)


class Decays(Gated):
    def begin(self):
        self.memory = torch.zeros(CLASSES)

    def gate(self, x):
        self.memory = 0.5 * self.memory + 0.5
        return self.memory


@script()
def tensor_attribute_that_grows(accelerator):
    """Forward computes an attribute from its last value, which does not depend on the batch."""
    return gated(accelerator, Decays)


class DrawsByTorch(Gated):
    def begin(self):
        self.generator = torch.Generator().manual_seed(3)

    def gate(self, x):
        return 0.5 + torch.rand(1, generator=self.generator)


class DrawsByNumpy(DrawsByTorch):
    def begin(self):
        self.generator = np.random.default_rng(3)

    def gate(self, x):
        return 0.5 + self.generator.random()


class DrawsByPython(DrawsByNumpy):
    def begin(self):
        self.generator = random.Random(3)


@script()
def generator_of_the_model(accelerator):
    """Forward draws a number for the whole batch from a ``torch.Generator`` of its own."""
    return gated(accelerator, DrawsByTorch)


@script()
def numpy_generator_of_the_model(accelerator):
    """The same from numpy's generator."""
    return gated(accelerator, DrawsByNumpy)


@script()
def python_generator_of_the_model(accelerator):
    """The same from Python's, an object of its own."""
    return gated(accelerator, DrawsByPython)


@script()
def generator_drawn_from_before_the_layers(accelerator):
    """The same, where the number is drawn before the first layer."""
    return gated(accelerator, lambda: DrawsByTorch(first=True))


class TakesTheNext(Gated):
    def begin(self):
        self.steps, self.rates = itertools.count(1), itertools.cycle([1.0, 0.5, 0.7])

    def gate(self, x):
        return next(self.rates) / next(self.steps)


@script()
def iterators_of_the_model(accelerator):
    """Forward takes the next of two iterators."""
    return gated(accelerator, TakesTheNext)


class TakesTheNextOfAFunction(Gated):
    def begin(self):
        self.steps = (1 / number for number in itertools.count(1))

    def gate(self, x):
        return next(self.steps)


@script()
def generator_function_of_the_model(accelerator):
    """Forward takes the next value of a Python generator, which nothing can copy."""
    return gated(accelerator, TakesTheNextOfAFunction)


class CountsInAFunction(Gated):
    def begin(self):
        calls = [0]

        def fade():
            calls[0] += 1
            return 1 / calls[0]

        self.fade = fade

    def gate(self, x):
        return self.fade()


@script()
def counter_of_a_function(accelerator):
    """Forward calls a function that counts its calls in a variable around it."""
    return gated(accelerator, CountsInAFunction)


CALLS = 0


class CountsGlobally(Gated):
    def begin(self):
        global CALLS  # noqa: PLW0603 (what is tried)
        CALLS = 0

    def forward(self, x):
        global CALLS  # noqa: PLW0603 (what is tried)
        CALLS += 1
        return self.last(torch.tanh(self.net(x))) / CALLS


@script()
def counter_in_a_global_variable(accelerator):
    """Forward counts its calls in a global variable."""
    return gated(accelerator, CountsGlobally)


class GoesOn(Gated):
    def begin(self):
        self.state = None

    def gate(self, x):
        before = torch.zeros(len(x), CLASSES) if self.state is None or len(self.state) != len(x) else self.state
        state = torch.tanh(x[:, :CLASSES] + before)
        self.state = state.detach()
        return state


@script()
def state_of_each_row_carried_on(accelerator):
    """Forward goes on with the state that the rows of the batch before have left, detached (truncated BPTT)."""
    return gated(accelerator, GoesOn)


class LastOfAll(Gated):
    def begin(self):
        self.features, self.history = None, []

    def gate(self, x):
        self.features = x.detach()
        self.history = [*self.history, x.detach().mean()]
        return 1.0


@script()
def activations_kept_for_a_look(accelerator):
    """Forward keeps what it has seen in attributes, which no other forward reads."""
    return gated(accelerator, LastOfAll)
