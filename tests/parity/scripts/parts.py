"""Parts of models, their inputs and outputs, and batches, in the forms that people give them."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.data import DataLoader, Dataset


def sgd(model, lr=0.3, **more):
    return torch.optim.SGD(model.parameters(), lr=lr, **more)


def start(accelerator, kind=Net, lr=0.3, data=None, **more):
    model = build(kind)
    return accelerator.prepare(model, sgd(model, lr, **more), loader() if data is None else data)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def fit(accelerator, model, optimizer, batches, loss_of=cross_entropy, epochs=1, after=lambda step: None, edit=None):
    """The ordinary loop; ``edit()`` comes before each step, ``after(step)`` behind it."""
    losses = []
    for _ in range(epochs):
        for batch in batches:
            loss = loss_of(model, *batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            if edit is not None:
                edit()
            optimizer.step()
            losses.append(mean(accelerator, loss))
            after(len(losses))
    return result(accelerator, losses, model=model)


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x, grad.sum(0)


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, FEATURES) * 0.3), nn.Parameter(torch.zeros(16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(OwnLinear.apply(x, self.weight, self.bias)))


@script()
def own_autograd_function(accelerator):
    """A linear layer by an autograd function with a backward of its own."""
    return fit(accelerator, *start(accelerator, OwnFunction))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [FEATURES, 16, 16, CLASSES]
        self.weights = nn.ParameterList([torch.randn(o, i) * i**-0.5 for i, o in itertools.pairwise(sizes)])
        self.biases = nn.ParameterDict({str(n): nn.Parameter(torch.zeros(o)) for n, o in enumerate(sizes[1:])})

    def forward(self, x):
        for n, weight in enumerate(self.weights):
            x = F.linear(torch.tanh(x) if n else x, weight, self.biases[str(n)])
        return x


@script()
def parameters_in_lists_and_dicts(accelerator):
    """``nn.ParameterList`` and ``nn.ParameterDict`` hold all weights."""
    return fit(accelerator, *start(accelerator, Lists))


class Task(nn.Module):
    def __init__(self, encoder, outputs):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(16, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)))


def shared():
    torch.manual_seed(1)
    encoder = nn.Linear(FEATURES, 16)
    return Task(encoder, CLASSES), Task(encoder, 1)


@script()
def encoder_shared_by_two_models(accelerator):
    """Two models hold one encoder; each is prepared, one optimizer has every parameter once."""
    first, second = shared()
    parameters = {id(p): p for p in (*first.parameters(), *second.parameters())}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.3)
    first, second, optimizer, batches = accelerator.prepare(first, second, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(first(x), y) + second(x).pow(2).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, first=first, second=second)


class OddOrder(nn.Module):
    """Modules that are registered in another order than forward calls them in, one of them twice."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, CLASSES)
        self.blocks = nn.ModuleList([nn.ModuleDict({"b": nn.Linear(16, 16), "a": nn.Linear(16, 16)}) for _ in range(2)])
        self.stem = nn.Linear(FEATURES, 16)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        for block in reversed(self.blocks):
            x = x + torch.tanh(block["b"](torch.tanh(block["a"](x))))
        return self.head(torch.tanh(self.blocks[0]["a"](x)))


@script()
def modules_in_odd_order(accelerator):
    """Nested modules are called against the order in which they are registered, one of them twice."""
    return fit(accelerator, *start(accelerator, OddOrder))


@script()
def ensemble(accelerator):
    """Three models in a list, one loss of the mean of their answers, one optimizer."""
    models = [build(seed=seed) for seed in (1, 2, 3)]
    optimizer = torch.optim.Adam([{"params": model.parameters()} for model in models], lr=0.02)
    *models, optimizer, batches = accelerator.prepare(*models, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(torch.stack([model(x) for model in models]).mean(0), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, **{f"model{n}": model for n, model in enumerate(models)})


class SomeNone(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.extra = Net(), nn.Linear(FEATURES, 2)

    def forward(self, x, mask=None, *, with_extra=False):
        logits = self.net(x) if mask is None else self.net(x * mask)
        return logits, None, {"extra": self.extra(x) if with_extra else None, "mask": mask}


@script()
def outputs_that_are_none(accelerator):
    """Forward returns a tuple and a dictionary, some of whose parts are ``None`` in some steps."""
    model, optimizer, batches = start(accelerator, SomeNone)
    count = itertools.count()

    def loss_of(model, x, y):
        step = next(count)
        logits, nothing, rest = model(x, torch.ones_like(x) if step == 1 else None, with_extra=step % 2 == 1)
        assert nothing is None
        loss = F.cross_entropy(logits, y)
        return loss if rest["extra"] is None else loss + rest["extra"].pow(2).mean()

    return fit(accelerator, model, optimizer, batches, loss_of)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(FEATURES, 16) for _ in range(2)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs, *, scales, name):
        assert name == "sum"
        found = [tower(x) for tower, x in zip(self.towers, inputs["views"], strict=True)]
        return [self.head(torch.tanh(scale * h)) for scale, h in zip(scales, found, strict=True)]


@script()
def nested_inputs_and_outputs(accelerator):
    """Forward takes a dictionary of lists, a tuple of numbers and a string, and returns a list."""
    x, y = points()
    model, optimizer, batches = start(accelerator, Nested, data=loader(x, noise(*x.shape), y))

    def loss_of(model, x, z, y):
        first, second = model({"views": [x, z]}, scales=(1.0, 0.5), name="sum")
        return F.cross_entropy(first, y) + F.mse_loss(second, first.detach())

    return fit(accelerator, model, optimizer, batches, loss_of)


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    names: list


class Named(Dataset):
    def __init__(self):
        self.x, self.y = points()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index]), f"sample {index}"


def collate(samples):
    x, y, names = zip(*samples, strict=True)
    return Sample(torch.stack(x), torch.tensor(y), list(names))


@script()
def batches_that_are_dataclasses(accelerator):
    """``collate_fn`` makes a dataclass with tensors and a list of strings."""
    data = DataLoader(Named(), batch_size=BATCH, collate_fn=collate)
    model, optimizer, batches = start(accelerator, data=data)
    losses = []
    for batch in batches:
        assert len(batch.names) == len(batch.x)
        loss = F.cross_entropy(model(batch.x), batch.y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, FEATURES, dtype=torch.complex64) * 0.3)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh((x.to(self.weight.dtype) @ self.weight.T).abs()))


@script()
def complex_parameters(accelerator):
    """A layer with complex weights, under Adam."""
    model = build(Complex)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return fit(accelerator, *accelerator.prepare(model, optimizer, loader()))


@script()
def parameter_registered_later(accelerator):
    """``model.register_parameter`` after ``prepare``, used by a forward hook, with a parameter group of its own."""
    model, optimizer, batches = start(accelerator)
    model.register_parameter("temperature", nn.Parameter(torch.ones(1)))
    optimizer.add_param_group({"params": [model.temperature], "lr": 0.1})
    model.register_forward_hook(lambda module, inputs, output: output * module.temperature)
    return fit(accelerator, model, optimizer, batches)


def lazy():
    return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(CLASSES))


@script()
def lazy_layers(accelerator):
    """``nn.LazyLinear``, whose sizes the first training forward finds."""
    model = build(lazy)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    torch.manual_seed(1)
    return fit(accelerator, model, optimizer, batches)


@script()
def second_phase_prepares_again(accelerator):
    """Frozen, then thawed: the second phase makes another optimizer and another loader, and prepares all again."""
    model = build()
    model.body.requires_grad_(False)
    head = torch.optim.SGD(model.head.parameters(), lr=0.3)
    model, head, batches = accelerator.prepare(model, head, loader())
    losses, _ = fit(accelerator, model, head, batches)
    model.body.requires_grad_(True)
    everything = torch.optim.Adam(model.parameters(), lr=0.02)
    model, everything, batches = accelerator.prepare(model, everything, loader(*points(seed=8)))
    more, weights = fit(accelerator, model, everything, batches)
    return losses + more, weights


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(20, 8, padding_idx=0), nn.LSTM(8, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, ids, lengths):
        packed = rnn.pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(torch.cat([hidden[0], hidden[1]], 1))


def sentences():
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, 20, (4 * BATCH, 7), generator=generator)
    lengths = torch.arange(4 * BATCH) * 5 % 7 + 1
    ids[torch.arange(7)[None] >= lengths[:, None]] = 0
    return ids, lengths, ids.sum(1) % CLASSES


@script()
def packed_sequences(accelerator):
    """A bidirectional LSTM over ``pack_padded_sequence``."""
    model, optimizer, batches = start(accelerator, Packed, data=loader(*sentences()))
    return fit(accelerator, model, optimizer, batches, lambda model, ids, n, y: F.cross_entropy(model(ids, n), y))


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(FEATURES, 12, batch_first=True), nn.Linear(12, FEATURES)

    def forward(self, x, hidden=None):
        out, hidden = self.rnn(x, hidden)
        return self.head(out), hidden


@script()
def hidden_state_over_batches(accelerator):
    """The hidden state goes from batch to batch, as word-level language models do."""
    model, optimizer, batches = start(accelerator, Stateful, data=loader(noise(4 * BATCH, 5, FEATURES).cumsum(1)))
    hidden, losses = None, []
    for (x,) in batches:
        out, hidden = model(x[:, :-1], hidden)
        hidden = hidden.detach()
        loss = F.mse_loss(out, x[:, 1:])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.head = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.LayerNorm(8),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x, padding):
        found, weights = self.attention(
            x, x, x, key_padding_mask=padding, need_weights=True, average_attn_weights=False
        )
        return self.head(self.norm(x + found).mean(1)), weights


@script()
def attention_weights_in_the_loss(accelerator):
    """``nn.MultiheadAttention`` with padding, whose attention weights are part of the loss."""
    _, lengths, y = sentences()
    padding = torch.arange(7)[None] >= lengths[:, None]
    data = loader(noise(4 * BATCH, 7, 8), padding, y)
    model, optimizer, batches = start(accelerator, Attention, data=data)

    def loss_of(model, x, padding, y):
        logits, weights = model(x, padding)
        return F.cross_entropy(logits, y) + weights.pow(2).sum(-1).mean()

    return fit(accelerator, model, optimizer, batches, loss_of)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(FEATURES, 12, batch_first=True), nn.Linear(12, 6)

    def forward(self, x):
        return self.head(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)


@script()
def ctc(accelerator):
    """Connectionist temporal classification: the output is ``(T, B, C)``, as ``F.ctc_loss`` wants it."""
    generator = torch.Generator().manual_seed(4)
    goals = torch.randint(1, 6, (4 * BATCH, 4), generator=generator)
    lengths = torch.arange(4 * BATCH) % 3 + 2
    model, optimizer, batches = start(
        accelerator, Speech, lr=0.1, data=loader(noise(4 * BATCH, 12, FEATURES), goals, lengths)
    )

    def loss_of(model, x, goals, lengths):
        return F.ctc_loss(model(x), goals, torch.full((len(x),), 12), lengths)

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def lottery_ticket(accelerator):
    """Train, prune by magnitude, rewind to the first weights, train again under the masks."""
    model, optimizer, batches = start(accelerator)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, _ = fit(accelerator, model, optimizer, batches)
    masks = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                masks[name] = (p.abs() > p.abs().flatten().kthvalue(p.numel() // 2).values).float()
            p.copy_(first[name] * masks.get(name, 1.0))

    def after(step):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in masks:
                    p.mul_(masks[name])

    more, weights = fit(accelerator, model, optimizer, batches, after=after)
    return losses + more, weights


class MixtureDensity(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.weights, self.means, self.scales = nn.Linear(16, 3), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.body(x)
        mixture = torch.distributions.Categorical(logits=self.weights(hidden))
        parts = torch.distributions.Normal(self.means(hidden), F.softplus(self.scales(hidden)) + 0.1)
        return torch.distributions.MixtureSameFamily(mixture, parts)


@script()
def mixture_density(accelerator):
    """Forward returns a distribution of ``torch.distributions``, whose likelihood is the loss."""
    x, _ = points()
    model, optimizer, batches = start(accelerator, MixtureDensity, lr=0.05, data=loader(x, x.sum(1).sin()))
    return fit(accelerator, model, optimizer, batches, lambda model, x, y: -model(x).log_prob(y).mean())


class Reverse(torch.autograd.Function):
    """Two halves that change each other by turns: backward computes the inputs anew from the outputs."""

    @staticmethod
    def forward(ctx, x, one, other, *parameters):
        a, b = x.chunk(2, 1)
        with torch.no_grad():
            a = a + one(b)
            b = b + other(a)
        ctx.layers = one, other
        made = torch.cat([a, b], 1)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx, gradient):
        (made,) = ctx.saved_tensors
        one, other = ctx.layers
        a, b = made.chunk(2, 1)
        with torch.no_grad():
            b = b - other(a)
            a = a - one(b)
        x = torch.cat([a, b], 1).requires_grad_()
        with torch.enable_grad():
            a, b = x.chunk(2, 1)
            a = a + one(b)
            b = b + other(a)
            again = torch.cat([a, b], 1)
        gradients = torch.autograd.grad(again, [x, *one.parameters(), *other.parameters()], gradient)
        return gradients[0], None, None, *gradients[1:]


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        half = FEATURES // 2
        self.one = nn.Sequential(nn.Linear(half, 16), nn.Tanh(), nn.Linear(16, half))
        self.other = nn.Sequential(nn.Linear(half, 16), nn.Tanh(), nn.Linear(16, half))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        parameters = [*self.one.parameters(), *self.other.parameters()]
        return self.head(Reverse.apply(x, self.one, self.other, *parameters))


@script()
def reversible_layers(accelerator):
    """An autograd function computes its inputs anew in backward, and calls ``torch.autograd.grad`` there."""
    model = build(Reversible)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


class Latent(nn.Module):
    """A variational autoencoder, whose forward makes the distributions; ``(B, F), (B, 4) -> (B, F), (B,)``."""

    checks: bool | None = None

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES)

    def forward(self, x, noise):
        centre, spread = self.encoder(x).chunk(2, 1)
        prior = torch.distributions.Normal(0.0, 1.0, validate_args=self.checks)
        found = torch.distributions.Normal(centre, (spread / 2).exp(), validate_args=self.checks)
        apart = torch.distributions.kl_divergence(found, prior).sum(1)
        return self.decoder(centre + noise * (spread / 2).exp()), apart


class Unchecked(Latent):
    checks = False


def fit_latent(accelerator, kind):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x, _ = points()
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(x, noise(4 * BATCH, 4)))
    losses = []
    for x, drawn in batches:
        decoded, apart = model(x, drawn)
        loss = (decoded - x).square().sum(1).mean() + apart.mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def distributions_made_in_forward(accelerator):
    """Forward makes ``torch.distributions.Normal`` of what its layers return."""
    return fit_latent(accelerator, Latent)


@script(follows="distributions_made_in_forward")
def distributions_without_checks(accelerator):
    """Forward makes its distributions with ``validate_args=False``."""
    return fit_latent(accelerator, Unchecked)
