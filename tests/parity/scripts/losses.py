"""Losses of all kinds, and tasks with more than one."""

from __future__ import annotations

import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

N = 4 * BATCH


def fit(accelerator, model, batches, loss_of, lr=0.3, prepared=lambda model: None):
    """The ordinary loop over batches of any kind; ``prepared`` is given the prepared model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    prepared(model)
    losses = []
    for batch in batches:
        loss = loss_of(model, *batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def class_weights(accelerator):
    """Cross entropy with a weight for each class, divided by the number of samples."""
    weight = torch.tensor([0.5, 1.0, 2.0, 3.0])
    return fit(
        accelerator,
        build(),
        loader(),
        lambda model, x, y: F.cross_entropy(model(x), y, weight=weight, reduction="sum") / len(y),
    )


@script()
def sample_weights(accelerator):
    """A weight for each sample multiplies its loss."""
    x, y = points()
    return fit(
        accelerator,
        build(),
        loader(x, y, torch.linspace(0.1, 2, N)),
        lambda model, x, y, w: (F.cross_entropy(model(x), y, reduction="none") * w).mean(),
    )


@script()
def as_many_classes_as_samples(accelerator):
    """Class weights that are as many as a batch has samples."""
    x, _ = points()
    y = torch.arange(N) % BATCH
    weight = torch.linspace(0.5, 2.0, BATCH)
    return fit(
        accelerator,
        build(lambda: Net(classes=BATCH)),
        loader(x, y),
        lambda model, x, y: F.cross_entropy(model(x), y, weight=weight, reduction="sum") / len(y),
    )


@script()
def label_smoothing(accelerator):
    """Label smoothing, by a loss module."""
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return fit(accelerator, build(), loader(), lambda model, x, y: criterion(model(x), y))


@script()
def mixup(accelerator):
    """Mixup with the partner and the share of each sample in the dataset."""
    x, y = points()
    order, share = torch.arange(N).flip(0), torch.linspace(0.1, 0.9, N)
    mixed = share[:, None] * x + (1 - share[:, None]) * x[order]

    def loss_of(model, x, first, second, share):
        logits = model(x)
        one, two = (F.cross_entropy(logits, y, reduction="none") for y in (first, second))
        return (share * one + (1 - share) * two).mean()

    return fit(accelerator, build(), loader(mixed, y, y[order], share), loss_of)


@script()
def focal(accelerator):
    """The focal loss, written with softmax and gather."""

    def loss_of(model, x, y):
        log = F.log_softmax(model(x), dim=-1).gather(1, y[:, None]).squeeze(1)
        return -((1 - log.exp()) ** 2 * log).mean()

    return fit(accelerator, build(), loader(), loss_of)


@script()
def contrastive(accelerator):
    """InfoNCE: each sample brings its anchor, its positive and its negatives, embedded in one forward."""
    views = noise(N, 6, FEATURES)
    views[:, 1] = views[:, 0] + 0.1 * views[:, 1]

    def loss_of(model, views):
        z = F.normalize(model(views), dim=-1)
        scores = (z[:, :1] * z[:, 1:]).sum(-1) / 0.2
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))

    return fit(accelerator, build(), loader(views), loss_of)


@script(whole_batch="the other samples of the batch are the negatives")
def contrastive_in_batch(accelerator):
    """InfoNCE between two views of a batch, whose other samples are the negatives: a loss that mixes samples."""
    x, _ = points()

    def loss_of(model, x, z):
        scores = F.normalize(model(x), dim=-1) @ F.normalize(z, dim=-1).T / 0.2
        return F.cross_entropy(scores, torch.arange(len(x)))

    return fit(accelerator, build(), loader(x, noise(N, CLASSES)), loss_of)


class Clip(nn.Module):
    """Two towers; forward returns the scores of each sample with each."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Net(), Net()

    def forward(self, x, z):
        return F.normalize(self.left(x), dim=-1) @ F.normalize(self.right(z), dim=-1).T / 0.2


@script(whole_batch="the other samples of the batch are the negatives")
def model_mixes_samples(accelerator):
    """A model of two towers whose forward compares each sample with all others of the batch."""
    x, _ = points()
    return fit(
        accelerator,
        build(Clip),
        loader(x, noise(N, FEATURES)),
        lambda model, x, z: F.cross_entropy(model(x, z), torch.arange(len(x))),
    )


@script()
def triplets(accelerator):
    """Metric learning: anchor, positive and negative in three forwards."""
    a, p, n = noise(N, FEATURES), noise(N, FEATURES, seed=4), noise(N, FEATURES, seed=5)

    def loss_of(model, a, p, n):
        near, far = (model(a) - model(p)).pow(2).sum(1), (model(a) - model(n)).pow(2).sum(1)
        return F.softplus(near - far).mean()

    return fit(accelerator, build(), loader(a, a + 0.1 * p, n), loss_of, lr=0.05)


class Siamese(nn.Module):
    """One encoder on both inputs, inside one forward."""

    def __init__(self):
        super().__init__()
        self.encoder = Net()
        self.score = nn.Linear(CLASSES, 1)

    def forward(self, left, right):
        return self.score((self.encoder(left) - self.encoder(right)).pow(2)).squeeze(-1)


@script()
def siamese(accelerator):
    """A siamese network: the same encoder twice in one forward."""
    left, right = noise(N, FEATURES), noise(N, FEATURES, seed=4)
    return fit(
        accelerator,
        build(Siamese),
        loader(left, right, (torch.arange(N) % 2).float()),
        lambda model, left, right, y: F.binary_cross_entropy_with_logits(model(left, right), y),
    )


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.classes, self.value = nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, x):
        features = self.body(x)
        return self.classes(features), self.value(features).squeeze(-1)


@script()
def several_heads(accelerator):
    """Two tasks, two heads, one loss that weighs both."""
    x, y = points()

    def loss_of(model, x, y):
        logits, value = model(x)
        return F.cross_entropy(logits, y) + 0.5 * F.mse_loss(value, x.sum(1))

    return fit(accelerator, build(Tasks), loader(x, y), loss_of)


@script()
def alternating_losses(accelerator):
    """Two tasks, two heads, of which each step trains one."""
    model = build(Tasks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for step, (x, y) in enumerate(batches):
        logits, value = model(x)
        loss = F.cross_entropy(logits, y) if step % 2 == 0 else F.mse_loss(value, x.sum(1))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


class Uncertain(Tasks):
    """Weighs the tasks by parameters of its own, which no forward reads."""

    def __init__(self):
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))


@script()
def learned_loss_weights(accelerator):
    """Weights of two tasks are parameters of the model, used by the loss and by no forward."""
    x, y = points()

    def loss_of(model, x, y):
        logits, value = model(x)
        first, second = model.log_variances.unbind()
        loss = torch.exp(-first) * F.cross_entropy(logits, y) + torch.exp(-second) * F.mse_loss(value, x.sum(1))
        return loss + first + second

    return fit(accelerator, build(Uncertain), loader(x, y), loss_of, lr=0.1)


@script()
def distillation(accelerator):
    """A teacher that is not prepared, in evaluation mode, and a student that follows its softened answers."""
    teacher = build(lambda: Net(hidden=24), seed=6).eval().requires_grad_(False)

    def loss_of(model, x, y):
        with torch.no_grad():
            goal = F.softmax(teacher(x) / 2, dim=-1)
        logits = model(x)
        return F.cross_entropy(logits, y) + F.kl_div(F.log_softmax(logits / 2, dim=-1), goal, reduction="batchmean") * 4

    return fit(accelerator, build(), loader(), loss_of)


@script()
def distillation_prepared(accelerator):
    """A teacher that is prepared too, without an optimizer."""
    teacher = build(lambda: Net(hidden=24), seed=6).eval().requires_grad_(False)
    student = build()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.3)
    teacher, student, optimizer, batches = accelerator.prepare(teacher, student, optimizer, loader())
    losses = []
    for x, y in batches:
        with torch.no_grad():
            goal = F.softmax(teacher(x), dim=-1)
        loss = F.cross_entropy(student(x), y) + F.cross_entropy(student(x), goal)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, student=student)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES)

    def forward(self, x, z):
        middle, spread = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(torch.tanh(middle + (0.5 * spread).exp() * z)), middle, spread


@script()
def variational_autoencoder(accelerator):
    """A variational autoencoder whose noise belongs to the samples."""
    x, _ = points()

    def loss_of(model, x, z):
        found, middle, spread = model(x, z)
        divergence = -0.5 * (1 + spread - middle.pow(2) - spread.exp()).sum(1).mean()
        return F.mse_loss(found, x) + 0.1 * divergence

    return fit(accelerator, build(Autoencoder), loader(x, noise(N, 4)), loss_of, lr=0.1)


@script()
def denoising_diffusion(accelerator):
    """A step of diffusion training: noise of a drawn strength is predicted, both from the dataset."""
    x, _ = points()
    net = build(lambda: Net(features=FEATURES + 1, classes=FEATURES))

    def loss_of(model, x, z, t):
        noisy = (1 - t) * x + t * z
        return F.mse_loss(model(torch.cat((noisy, t), dim=1)), z)

    return fit(accelerator, net, loader(x, noise(N, FEATURES), torch.linspace(0, 1, N)[:, None]), loss_of)


@script()
def policy_gradient(accelerator):
    """REINFORCE: actions come with the samples, rewards from the environment, and a bonus for entropy."""
    states, _ = points()
    actions = torch.arange(N) % CLASSES
    rewards = (states[:, 0] * (actions - 1.5)).contiguous()

    def loss_of(model, state, action, reward):
        policy = torch.distributions.Categorical(logits=model(state))
        return -(policy.log_prob(action) * reward).mean() - 0.01 * policy.entropy().mean()

    return fit(accelerator, build(), loader(states, actions, rewards), loss_of, lr=0.1)


@script()
def policy_rollout(accelerator):
    """The policy chooses (greedily) under ``no_grad`` in the loop; the update follows what was chosen."""

    def loss_of(model, x, y):
        with torch.no_grad():
            chosen = model(x).argmax(-1)
        reward = (chosen == y).float() - 0.5
        return -(F.log_softmax(model(x), dim=-1).gather(1, chosen[:, None]).squeeze(1) * reward).mean()

    return fit(accelerator, build(), loader(), loss_of)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, t):
        return self.layers(t)


@script()
def physics_informed(accelerator):
    """The residual of u' = -u by ``autograd.grad`` with respect to the inputs is part of the loss."""

    def loss_of(model, t):
        t = t.clone().requires_grad_()
        u = model(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return (slope + u).pow(2).mean() + (model(torch.zeros_like(t)) - 1).pow(2).mean()

    return fit(accelerator, build(Field), loader(torch.linspace(0, 2, N)[:, None]), loss_of, lr=0.02)


@script()
def adversarial_examples(accelerator):
    """Inputs are moved along the sign of their gradient (FGSM), then trained on."""

    def loss_of(model, x, y):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
        return F.cross_entropy(model((x + 0.05 * slope.tanh()).detach()), y)

    return fit(accelerator, build(), loader(), loss_of)


@script()
def loss_module_with_weights(accelerator):
    """A loss module with parameters of its own (class centres), prepared beside the model, two optimizers."""

    class Centres(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.zeros(CLASSES, CLASSES))

        def forward(self, z, y):
            return (z - self.centres[y]).pow(2).sum(1).mean()

    model, centres = build(), build(Centres)
    first, second = torch.optim.SGD(model.parameters(), lr=0.2), torch.optim.SGD(centres.parameters(), lr=0.5)
    model, centres, first, second, batches = accelerator.prepare(model, centres, first, second, loader())
    losses = []
    for x, y in batches:
        logits = model(x)
        loss = F.cross_entropy(logits, y) + 0.1 * centres(logits, y)
        first.zero_grad()
        second.zero_grad()
        accelerator.backward(loss)
        first.step()
        second.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model, centres=centres)


@script()
def sum_over_several_losses(accelerator):
    """Losses of parts of the batch are computed in a Python loop and added."""

    def loss_of(model, x, y):
        logits = model(x)
        return sum(F.cross_entropy(logits[i : i + 1], y[i : i + 1]) for i in range(len(y))) / len(y)

    return fit(accelerator, build(), loader(), loss_of)


@script()
def loss_depends_on_value(accelerator):
    """``if loss.item() > 1: loss = loss * 0.5`` before backward, with a loss that all processes share."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        losses.append(mean(accelerator, loss))
        if losses[-1] > 1.3:
            loss = loss * 0.5
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return result(accelerator, losses, model=model)


@script()
def summed_over_the_batch(accelerator):
    """A loss that is a sum over the batch, as the first examples of autoencoders write it."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    for x, y in batches:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return result(accelerator, [], model=model)


def fit_with_an_extra_term(accelerator, extra_of):
    """Cross entropy, and a tenth of a second term of the logits and of a mask of rows."""
    x, y = points()
    counts = torch.arange(N) % 3 > 0

    def loss_of(model, x, y, counts):
        logits = model(x)
        return F.cross_entropy(logits, y) + 0.1 * extra_of(logits, counts) / len(x)

    return fit(accelerator, build(), loader(x, y, counts), loss_of)


@script()
def elements_by_a_mask(accelerator):
    """A term of the loss takes the rows that a mask of the batch chooses."""
    return fit_with_an_extra_term(accelerator, lambda logits, counts: logits[counts].pow(2).sum())


@script()
def elements_by_masked_select(accelerator):
    """A term of the loss takes elements by ``torch.masked_select``."""
    return fit_with_an_extra_term(
        accelerator, lambda logits, counts: torch.masked_select(logits, counts[:, None]).pow(2).sum()
    )


@script()
def elements_by_their_own_values(accelerator):
    """A term of the loss takes the elements that are positive."""
    return fit_with_an_extra_term(accelerator, lambda logits, counts: logits[logits > 0].pow(2).sum())


@script(follows="elements_by_their_own_values")
def elements_times_a_mask(accelerator):
    """A term of the loss multiplies by a mask, of the batch and of the values, in place of an index."""
    return fit_with_an_extra_term(
        accelerator, lambda logits, counts: (logits.pow(2) * counts[:, None] * (logits > 0)).sum()
    )


@script()
def loss_of_masked_rows(accelerator):
    """The whole loss is that of the rows that count."""
    x, y = points()

    def loss_of(model, x, y, counts):
        return F.cross_entropy(model(x)[counts], y[counts], reduction="sum") / len(x)

    return fit(accelerator, build(), loader(x, y, torch.arange(N) % 3 > 0), loss_of)


@script()
def constants_read_of_the_output(accelerator):
    """Numbers of the output that take no part in the gradient are read before backward."""

    def constant(logits, counts):
        chosen = logits.detach()
        positive = chosen[chosen > 0].sum().item()
        right = float((logits.argmax(1)[counts] == 0).sum())
        return (positive + right + len([row for row in logits])) * 1e-3  # noqa: C416 (iterating is what is tried)

    return fit_with_an_extra_term(accelerator, constant)


class Encoder(nn.Module):
    """``(B, F) -> (B, 8)``, of length 1."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return F.normalize(self.head(self.body(x)), dim=-1)


def of_pairs(accelerator, model, x, y):
    """The supervised contrastive loss over all rows of the global batch."""
    codes, labels = accelerator.gather((model(x), y), gradients=True)
    others = 1 - torch.eye(len(codes))
    alike = (labels[:, None] == labels).float() * others
    scores = codes @ codes.t() / 0.5
    chances = scores - (scores.exp() * others).sum(1, keepdim=True).log()
    return -((chances * alike).sum(1) / alike.sum(1).clamp(min=1)).mean()


@script()
def sum_over_the_rows_of_all_processes(accelerator):
    """A cross entropy that is summed over rows of all processes, and divided by the constant 40."""

    def loss_of(model, x, y):
        logits, labels = accelerator.gather((model(x), y), gradients=True)
        return F.cross_entropy(logits, labels, reduction="sum") / 40

    return fit(accelerator, build(), loader(), loss_of)


@script()
def pairs_over_all_processes(accelerator):
    """A contrastive loss of all rows, joined by ``accelerator.gather(..., gradients=True)``."""
    return fit(accelerator, build(Encoder), loader(), lambda model, x, y: of_pairs(accelerator, model, x, y))


@script()
def divided_by_the_boxes_of_all_ranks(accelerator):
    """Detection: a sum over the boxes of this rank's images, divided by the mean number of boxes of a rank."""
    boxes = torch.arange(N) % 7 % 3 + 1

    def loss_of(model, x, target, number):
        there = torch.arange(4) < number[:, None]
        mean_of_ranks = accelerator.reduce(number.sum().float(), "mean")
        return (model(x) - target).abs()[there].sum() / max(mean_of_ranks.item(), 1.0)

    return fit(accelerator, build(), loader(points()[0], noise(N, CLASSES, seed=4), boxes), loss_of, lr=0.1)


@script()
def likelihood_of_all_data(accelerator):
    """Variational inference: the likelihood of a batch is extrapolated to all samples, ``N / len(x) * sum``."""
    samples = N + 5
    x, target = noise(samples, FEATURES, seed=5), noise(samples, CLASSES, seed=6)
    data = DataLoader(TensorDataset(x, target), batch_size=BATCH, drop_last=True)

    def loss_of(model, x, target):
        apart = (model(x) - target).square()
        return samples / len(x) * apart.sum() / 1000

    return fit(accelerator, build(), data, loss_of, lr=0.3)
