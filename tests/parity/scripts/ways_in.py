"""The model reached by other ways than ``model(x)``, and changed after ``prepare``."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, result, script
from torch import Tensor, nn
from torch.nn import functional as F


def fit(accelerator, model, optimizer, batches, loss_of, epochs=1):
    """The loop that these scripts share: ``loss_of(x, y)`` reaches the model in its own way."""
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            loss = loss_of(x, y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def prepared(accelerator, kind=Net, lr=0.3):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return accelerator.prepare(model, optimizer, loader())


class WithMethods(Net):
    def loss(self, x, y):
        return F.cross_entropy(self(x), y)

    def encode(self, x):
        return self.body(x)


@script()
def loss_method(accelerator):
    """``model.loss(x, y)``, a method that calls ``self(x)``."""
    model, optimizer, batches = prepared(accelerator, WithMethods)
    return fit(accelerator, model, optimizer, batches, model.loss)


@script()
def encode_then_head(accelerator):
    """``model.head(model.encode(x))``: the model's own forward is never called."""
    model, optimizer, batches = prepared(accelerator, WithMethods)
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model.head(model.encode(x)), y))


@script()
def submodule_alone(accelerator):
    """A submodule is trained alone beside the whole model: a second loss on ``model.body(x)``."""
    model, optimizer, batches = prepared(accelerator)
    return fit(
        accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y) + model.body(x).pow(2).mean()
    )


@script()
def original_object(accelerator):
    """The script goes on with its own object and ignores what ``prepare`` returned for it."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    prepared_model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    return fit(accelerator, prepared_model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))


@script()
def unwrapped_call(accelerator):
    """``accelerator.unwrap_model(model)(x)`` in the training loop."""
    model, optimizer, batches = prepared(accelerator)
    inner = accelerator.unwrap_model(model)
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(inner(x), y))


class Scaled(Net):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


@script()
def attribute_after_prepare(accelerator):
    """``model.scale = 3.0`` after ``prepare``, and again in the loop."""
    model, optimizer, batches = prepared(accelerator, Scaled)
    model.scale = 3.0

    def loss_of(x, y):
        model.scale *= 0.9
        return F.cross_entropy(model(x), y)

    return fit(accelerator, model, optimizer, batches, loss_of)


def followed(model):
    """The loop with which scripts and libraries take off what wraps a model."""
    while hasattr(model, "module"):
        model = model.module
    return model


@script()
def module_followed(accelerator):
    """``while hasattr(model, "module")``, then the inner model is called, written to and switched to evaluation."""
    model, optimizer, batches = prepared(accelerator, Scaled)
    inner = followed(model)
    inner.scale = 3.0
    probe = torch.linspace(-1, 1, FEATURES).expand(BATCH, FEATURES)

    def loss_of(x, y):
        inner.eval()
        with torch.no_grad():
            inner.scale *= 0.9 + 0.01 * float(followed(accelerator.unwrap_model(model))(probe).mean().tanh())
        inner.train()
        return F.cross_entropy(inner(x), y)

    return fit(accelerator, model, optimizer, batches, loss_of)


class Buffered(Net):
    def forward(self, x):
        return super().forward(x * self.gain if hasattr(self, "gain") else x)


@script()
def buffer_after_prepare(accelerator):
    """``model.register_buffer`` after ``prepare``, read by forward and saved with the weights."""
    model, optimizer, batches = prepared(accelerator, Buffered)
    model.register_buffer("gain", torch.linspace(0.5, 2.0, FEATURES))
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))


@script()
def compiled_in_place(accelerator):
    """``model.compile()`` after ``prepare``."""
    model, optimizer, batches = prepared(accelerator)
    model.compile(backend="eager")
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))


@script()
def compiled(accelerator):
    """``torch.compile(model)`` before ``prepare``."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(torch.compile(model, backend="eager"), optimizer, loader())
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))


@dataclasses.dataclass
class Answer:
    logits: Tensor
    features: Tensor


class Pair(NamedTuple):
    logits: Tensor
    features: Tensor


class Custom:
    """No type that any engine knows."""

    def __init__(self, logits, inputs):
        self.hidden = {"deep": [logits]}
        self.inputs = [inputs, {"more": (inputs * 2,)}]

    @property
    def logits(self):
        return self.hidden["deep"][0]


class Answering(Net):
    def answer(self, logits, features):
        return {"logits": logits, "features": features}

    def forward(self, x):
        features = self.body(x)
        return self.answer(self.head(features), features)


class AnsweringDataclass(Answering):
    def answer(self, logits, features):
        return Answer(logits, features)


class AnsweringPair(Answering):
    def answer(self, logits, features):
        return Pair(logits, features)


class AnsweringCustom(Net):
    def forward(self, x):
        return Custom(super().forward(x), x)


@script()
def dict_output(accelerator):
    """Forward returns a dictionary, both of whose entries are in the loss."""
    model, optimizer, batches = prepared(accelerator, Answering)

    def loss_of(x, y):
        found = model(x)
        return F.cross_entropy(found["logits"], y) + 0.1 * found["features"].pow(2).mean()

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def dataclass_output(accelerator):
    """Forward returns a dataclass."""
    model, optimizer, batches = prepared(accelerator, AnsweringDataclass)
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x).logits, y))


@script()
def namedtuple_output(accelerator):
    """Forward returns a named tuple."""
    model, optimizer, batches = prepared(accelerator, AnsweringPair)
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x).logits, y))


@script()
def custom_output(accelerator):
    """Forward returns an object of a class of its own, in which outputs and inputs lie deep."""
    model, optimizer, batches = prepared(accelerator, AnsweringCustom)
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x).logits, y))


class AnswersDataclass(nn.Linear):
    def forward(self, x):
        return Answer(super().forward(x), x)


class WithAnsweringLayer(Net):
    def __init__(self):
        super().__init__()
        self.inner = AnswersDataclass(16, 16)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.body(x)).logits))


@script()
def layer_that_returns_a_dataclass(accelerator):
    """A layer of the model, with parameters of its own, returns a dataclass."""
    model, optimizer, batches = prepared(accelerator, WithAnsweringLayer)
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))


@script()
def parameters_counted(accelerator):
    """Parameters are counted by ``numel`` and ``shape`` after each step."""
    model, optimizer, batches = prepared(accelerator)
    losses, weights = fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))
    losses.append(float(sum(p.numel() for p in model.parameters())))
    losses += [float(size) for p in model.parameters() for size in p.shape]
    return losses, weights



class Warming(Net):
    """Counts its forwards in Python, by a number and in a list, and grows warmer with them."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return super().forward(x) * (1 + 0.1 * self.calls) * (1 - 0.05 * len(self.seen))


@script()
def counter_in_forward(accelerator):
    """A Python counter in forward scales the output, as a warm-up does."""
    model, optimizer, batches = prepared(accelerator, Warming)
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))


@script()
def new_head_after_prepare(accelerator):
    """``model.head`` is replaced after ``prepare`` and its parameters given to the optimizer."""
    model, optimizer, batches = prepared(accelerator)
    torch.manual_seed(7)
    model.head = nn.Linear(16, CLASSES)
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.1})
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))


@script()
def forward_hook(accelerator):
    """A forward hook, registered after ``prepare``, scales what a layer returns; another counts the model's calls."""
    model, optimizer, batches = prepared(accelerator)
    model.head.register_forward_hook(lambda module, args, output: output * 2)
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append(1))
    losses, weights = fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))
    return [*losses, float(len(calls))], weights


class Losing(Net):
    """Its forward returns the loss alone."""

    def forward(self, x, y):
        return F.cross_entropy(super().forward(x), y)


@script()
def forward_returns_loss(accelerator):
    """``loss = model(x, y)``: forward returns nothing but the loss."""
    model, optimizer, batches = prepared(accelerator, Losing)
    return fit(accelerator, model, optimizer, batches, model)


class Prototypes(Net):
    """Compares each sample with each row of a table that is given with the batch."""

    def forward(self, x, table):
        return super().forward(x) @ table.T


@script()
def shared_input_as_long_as_the_batch(accelerator):
    """Forward takes a table that belongs to no sample and has as many rows as the batch samples."""
    model, optimizer, batches = prepared(accelerator, Prototypes, lr=0.1)
    table = torch.linspace(-1, 1, BATCH * CLASSES).view(BATCH, CLASSES)
    return fit(accelerator, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x, table), y))


class Balanced(Net):
    """Returns a mean over the batch beside its logits, as routers of experts do."""

    def forward(self, x):
        features = self.body(x)
        return self.head(features), features.pow(2).mean()


@script()
def auxiliary_loss(accelerator):
    """Forward returns logits and a mean over the batch, and the loss takes both."""
    model, optimizer, batches = prepared(accelerator, Balanced)

    def loss_of(x, y):
        logits, extra = model(x)
        return F.cross_entropy(logits, y) + 0.5 * extra

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def functional_call_with_other_values(accelerator):
    """``functional_call`` with other values than the model's own."""
    model, optimizer, batches = prepared(accelerator, lr=0.1)

    def loss_of(x, y):
        values = {name: one * 0.9 for name, one in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

    return fit(accelerator, model, optimizer, batches, loss_of)
