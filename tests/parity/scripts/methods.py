"""Methods of published work that go around the ordinary loop: graphs, lists of boxes, projected and noisy gradients."""

from __future__ import annotations

import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

RATE = 0.3


def sgd(model, lr=RATE):
    return torch.optim.SGD(model.parameters(), lr=lr)


def fit(accelerator, model, optimizer, batches, loss_of, before_step=lambda: None, after=lambda: None):
    """Two epochs of the ordinary loop."""
    losses = []
    for _ in range(2):
        for batch in batches:
            loss = loss_of(model, *batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            before_step()
            optimizer.step()
            losses.append(mean(accelerator, loss))
            after()
    return result(accelerator, losses, model=model)


def of_classes(model, x, y):
    return F.cross_entropy(model(x), y)


class Graphs(Dataset):
    """Graphs of 3 to 6 nodes in a ring, with a class each."""

    def __len__(self):
        return 4 * BATCH

    def __getitem__(self, index):
        nodes = 3 + index % 4
        x = noise(nodes, FEATURES, seed=index)
        ring = torch.arange(nodes)
        return x, torch.stack([ring, ring.roll(1)]), int(x.sum() > 0) + 2 * (index % 2)


def one_graph(samples):
    """Batches of graphs are one graph, as torch_geometric collates them."""
    sizes = torch.tensor([len(x) for x, _, _ in samples])
    starts = sizes.cumsum(0) - sizes
    edges = torch.cat([edge + start for (_, edge, _), start in zip(samples, starts, strict=True)], 1)
    of_graph = torch.repeat_interleave(torch.arange(len(samples)), sizes)
    return torch.cat([x for x, _, _ in samples]), edges, of_graph, torch.tensor([y for _, _, y in samples])


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x, edges, of_graph, graphs):
        for layer in (self.first, self.second):
            sent = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = torch.tanh(layer(x + sent))
        pooled = x.new_zeros(graphs, x.shape[1]).index_add(0, of_graph, x)
        return self.head(pooled)


@script()
def graphs_in_one_batch(accelerator):
    """A graph network: a batch of graphs is one graph, whose rows are nodes and not samples."""
    model = build(Convolutions)
    batches = DataLoader(Graphs(), batch_size=BATCH, collate_fn=one_graph)
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.05), batches)
    return fit(
        accelerator, model, optimizer, batches,
        lambda model, x, edges, of_graph, y: F.cross_entropy(model(x, edges, of_graph, len(y)), y),
    )  # fmt: skip


class Boxes(Dataset):
    """Images of several sizes, each with one to three boxes."""

    def __len__(self):
        return 2 * BATCH

    def __getitem__(self, index):
        image = noise(FEATURES, 3 + index % 3, seed=index)
        return image, {"boxes": noise(1 + index % 3, 4, seed=100 + index), "labels": torch.arange(1 + index % 3)}


class Detector(nn.Module):
    """As in torchvision: a list of images and one of targets in, a dict of losses out."""

    def __init__(self):
        super().__init__()
        self.backbone, self.boxes = nn.Linear(FEATURES, 16), nn.Linear(16, 4)
        self.labels = nn.Linear(16, CLASSES)

    def forward(self, images, targets):
        seen = torch.stack([torch.tanh(self.backbone(image.T)).mean(0) for image in images])
        boxes, labels = self.boxes(seen), self.labels(seen)
        return {
            "boxes": torch.stack(
                [(box - each["boxes"]).abs().mean() for box, each in zip(boxes, targets, strict=True)]
            ).mean(),
            "labels": torch.stack(
                [F.cross_entropy(label.expand(len(each["labels"]), -1), each["labels"])
                 for label, each in zip(labels, targets, strict=True)]
            ).mean(),
        }  # fmt: skip


@script()
def detection_by_lists(accelerator):
    """Detection: lists of images of different sizes and of targets, and a dict of losses that is summed."""
    model = build(Detector)
    batches = DataLoader(Boxes(), batch_size=BATCH, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.1), batches)
    return fit(
        accelerator, model, optimizer, batches,
        lambda model, images, targets: sum(model(list(images), list(targets)).values()),
    )  # fmt: skip


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(20, 16, mode="mean"), nn.Linear(16, CLASSES)

    def forward(self, words, offsets):
        return self.head(torch.tanh(self.words(words, offsets)))


def bagged(samples):
    words = [torch.arange(2 + int(y)) + int(y) for _, y in samples]
    sizes = torch.tensor([len(each) for each in words])
    return torch.cat(words), sizes.cumsum(0) - sizes, torch.stack([y for _, y in samples])


@script()
def bags_with_offsets(accelerator):
    """``EmbeddingBag`` over texts of different lengths, joined, with the offset of each."""
    model = build(Bag)
    batches = DataLoader(list(zip(*points(), strict=True)), batch_size=BATCH, collate_fn=bagged)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), batches)
    return fit(
        accelerator, model, optimizer, batches,
        lambda model, words, offsets, y: F.cross_entropy(model(words, offsets), y),
    )  # fmt: skip


class UNet(nn.Module):
    """Each layer of the way down is read again on the way up."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
        self.up = nn.ModuleList([nn.Linear(32, 16), nn.Linear(32, 16)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        x = kept.pop()
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], 1)))
        return self.head(x)


@script()
def skips_of_a_u_net(accelerator):
    """A U-Net: outputs of early layers are inputs of late ones."""
    model = build(UNet)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(accelerator, model, optimizer, batches, of_classes)


class Hyper(nn.Module):
    """One network makes the weights of another, for each sample."""

    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, FEATURES * CLASSES))

    def forward(self, x):
        return torch.einsum("bf,bcf->bc", x, self.maker(x).view(-1, CLASSES, FEATURES))


@script()
def weights_made_by_a_network(accelerator):
    """A hypernetwork: its outputs are the weights with which each sample is classified."""
    model = build(Hyper)
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.1), loader())
    return fit(accelerator, model, optimizer, batches, of_classes)


@script()
def langevin_dynamics(accelerator):
    """SGLD: normal noise by ``torch.randn_like`` is added to each parameter after the step."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    torch.manual_seed(7)

    def after():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)

    return fit(accelerator, model, optimizer, batches, of_classes, after=after)


@script()
def weights_dropped_by_draws(accelerator):
    """Each weight is zero with a chance of a twentieth after each step, by ``bernoulli`` and ``F.dropout`` in turn."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    torch.manual_seed(7)

    def after():
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                if number % 2:
                    parameter.mul_(torch.bernoulli(torch.full_like(parameter, 0.95)))
                else:
                    parameter.copy_(0.95 * F.dropout(parameter, 0.05))

    return fit(accelerator, model, optimizer, batches, of_classes, after=after)


class Columns(nn.Module):
    """A convolution in ``channels_last``, and layers whose weights lie by columns as a transposed matrix does."""

    def __init__(self):
        super().__init__()
        self.images = nn.Conv2d(FEATURES // 2, 16, 2).to(memory_format=torch.channels_last)
        self.body, self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, CLASSES)
        for layer in (self.body[0], self.body[2], self.head):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())

    def forward(self, x):
        pixels = torch.stack([x, x.flip(1), x.cos(), x.sin()], -1).view(len(x), FEATURES // 2, 2, 4)
        return self.head(self.body(torch.tanh(self.images(pixels).mean((2, 3)))))


@script()
def noise_on_weights_by_columns(accelerator):
    """Noise for weights that do not lie row by row: torch draws random numbers in the order of memory."""
    model = build(Columns)
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.1), loader())
    torch.manual_seed(7)

    def after():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
                parameter.data.add_(torch.rand_like(parameter.data * 2), alpha=0.01)

    return fit(accelerator, model, optimizer, batches, of_classes, after=after)


@script()
def weights_by_columns_drawn_anew(accelerator):
    """Weights that do not lie row by row are initialised after ``prepare``, in the ways of ``nn.init``."""
    model = build(Columns)
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.1), loader())
    torch.manual_seed(7)
    with torch.no_grad():
        nn.init.kaiming_uniform_(model.images.weight)
        nn.init.orthogonal_(model.body[0].weight)
        model.body[2].weight.data.normal_(0, 0.2)
        model.head.weight.copy_(torch.bernoulli(torch.full_like(model.head.weight, 0.5)) - 0.5)
        model.head.weight.mul_(F.dropout(model.head.weight, 0.2) + 1)
    return fit(accelerator, model, optimizer, batches, of_classes)


@script()
def weights_by_columns_drawn_by_views(accelerator):
    """As above, by rows, transposed views, copies, and what was computed from such weights."""
    model = build(Columns)
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.1), loader())
    torch.manual_seed(7)
    images, first, second, head = (each.weight for each in (model.images, model.body[0], model.body[2], model.head))
    with torch.no_grad():
        images.data[2:].normal_(0, 0.2)
        first.copy_(torch.randn_like(first.t()).t() / 4)
        first[:, 3:].uniform_(-0.2, 0.2)
        second.data.t().normal_(0, 0.2)
        second.add_(torch.rand_like(second.detach().clone().abs_()) / 8)
        second.add_(torch.randn_like(second, memory_format=torch.contiguous_format) / 8)
        second.add_(torch.randn_like(second.contiguous()) / 8)
        head.add_(F.dropout(head.t() * 2, 0.2).t())
        nn.init.trunc_normal_(head[1:], 0, 0.2)
        images.add_(torch.normal(images, 0.1))
    return fit(accelerator, model, optimizer, batches, of_classes)


def two_tasks(model, x, y):
    """Losses of a classification and of a regression, from one forward."""
    out = model(x)
    return [F.cross_entropy(out[:, :CLASSES], y), out[:, CLASSES:].pow(2).mean()]


def gradients_of(accelerator, optimizer, model, loss):
    """Gradients over all processes, as ``accelerator.backward`` leaves them; the graph is kept."""
    optimizer.zero_grad()
    accelerator.backward(loss, retain_graph=True)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    return found


def surgery(accelerator, gradients):
    """PCGrad, given a function of accelerator, optimizer, model and loss that finds the gradients of one task."""
    model = build(lambda: Net(classes=2 * CLASSES))
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    losses = []
    for x, y in batches:
        tasks = two_tasks(model, x, y)
        found = [gradients(accelerator, optimizer, model, task) for task in tasks]
        first, second = (torch.cat([each.flatten() for each in one]) for one in found)
        dot = torch.dot(first, second)
        if dot < 0:
            first, second = first - dot / second.dot(second) * second, second - dot / first.dot(first) * first
        optimizer.zero_grad()
        start = 0
        for parameter in model.parameters():
            size = parameter.numel()
            parameter.grad = (first + second)[start : start + size].view_as(parameter)
            start += size
        optimizer.step()
        losses.append(mean(accelerator, sum(tasks)))
    return result(accelerator, losses, model=model)


@script()
def gradient_surgery(accelerator):
    """PCGrad: gradients of two tasks by ``autograd.grad``, projected where they disagree, and assigned as a sum."""
    return surgery(
        accelerator,
        lambda _accelerator, _optimizer, model, task: torch.autograd.grad(
            task, list(model.parameters()), retain_graph=True
        ),
    )


@script(follows="gradient_surgery")
def gradient_surgery_by_backward(accelerator):
    """PCGrad: the gradients of two tasks by a backward each, projected where they disagree, and assigned as a sum."""
    return surgery(accelerator, gradients_of)


def weighed(accelerator, norm):
    """GradNorm, given a function of accelerator, optimizer, model and loss that finds the norm of one gradient."""
    model = build(lambda: Net(classes=2 * CLASSES))
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    losses = []
    for x, y in batches:
        tasks = two_tasks(model, x, y)
        norms = [norm(accelerator, optimizer, model, task) for task in tasks]
        loss = sum(task * (norms[1 - number] / sum(norms)).detach() for number, task in enumerate(tasks))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def tasks_weighed_by_their_gradients(accelerator):
    """GradNorm: each task's weight is the other's share of the gradient norm of the last shared layer."""

    def norm(_accelerator, _optimizer, model, task):
        return torch.autograd.grad(task, model.body[2].weight, retain_graph=True)[0].norm()

    return weighed(accelerator, norm)


@script(follows="tasks_weighed_by_their_gradients tasks_weighed_by_gradients_reduced_by_hand")
def tasks_weighed_by_a_backward_of_each(accelerator):
    """GradNorm: each task's weight is the other's share of the gradient norm, which a backward of each task leaves."""
    shared = 2  # the place of the last shared layer's weight among the parameters
    return weighed(accelerator, lambda *given: gradients_of(*given)[shared].norm())


@script(follows="tasks_weighed_by_their_gradients")
def tasks_weighed_by_gradients_reduced_by_hand(accelerator):
    """GradNorm: each process's gradients of the last shared layer are averaged before their norms are taken."""

    def norm(accelerator, _optimizer, model, task):
        with accelerator.no_sync(model):
            own = torch.autograd.grad(task, model.body[2].weight, retain_graph=True)[0]
        return accelerator.reduce(own, "mean").norm()

    return weighed(accelerator, norm)


@script()
def elastic_weights(accelerator):
    """EWC: squared gradients of a first task are its importances, which hold the weights in a second."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    importance = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(of_classes(model, x, y))
        for total, parameter in zip(importance, model.parameters(), strict=True):
            total.add_(parameter.grad.detach() ** 2 / len(batches))
    optimizer.zero_grad()
    anchor = [parameter.detach().clone() for parameter in model.parameters()]

    def loss_of(model, x, y):
        held = zip(importance, model.parameters(), anchor, strict=True)
        return of_classes(model, x, (y + 1) % CLASSES) + 5 * sum((i * (p - a) ** 2).sum() for i, p, a in held)

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def consistent_dropout(accelerator):
    """R-Drop without its chance: two forwards of a batch, one with inputs changed, and the divergence between them."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def loss_of(model, x, y):
        one, other = model(x), model(x * 0.9)
        apart = F.kl_div(one.log_softmax(1), other.softmax(1), reduction="batchmean")
        return (F.cross_entropy(one, y) + F.cross_entropy(other, y)) / 2 + apart

    return fit(accelerator, model, optimizer, batches, loss_of)


class Deep(Net):
    """A head behind each hidden layer."""

    def __init__(self):
        super().__init__()
        self.early = nn.Linear(16, CLASSES)

    def forward(self, x):
        first = self.body[:2](x)
        return self.early(first), self.head(self.body[2:](first))


@script()
def supervised_in_the_middle(accelerator):
    """Deep supervision: a head in the middle has a loss of its own."""
    model = build(Deep)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def loss_of(model, x, y):
        early, late = model(x)
        return F.cross_entropy(late, y) + 0.3 * F.cross_entropy(early, y)

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def contractive_autoencoder(accelerator):
    """The encoder's Jacobian in closed form from its weight: ``sum((1 - h^2)^2 * sum(w^2))``."""

    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)

        def forward(self, x):
            hidden = torch.tanh(self.encoder(x))
            slopes = ((1 - hidden**2) ** 2 @ (self.encoder.weight**2).sum(1)).mean()
            return self.decoder(hidden), slopes

    model = build(Coder)
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.1), loader())

    def loss_of(model, x, _):
        again, slopes = model(x)
        return F.mse_loss(again, x) + 0.1 * slopes

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def soft_thresholds_after_the_step(accelerator):
    """ISTA: after each step, weights are brought nearer to zero by the threshold."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def after():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.sign() * (parameter.abs() - 0.003).clamp(min=0))

    return fit(accelerator, model, optimizer, batches, of_classes, after=after)


@script()
def rows_of_one_length(accelerator):
    """Rows of the head are normalised after each step, as of a cosine classifier."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def after():
        with torch.no_grad():
            model.head.weight.copy_(F.normalize(model.head.weight, dim=1))

    return fit(accelerator, model, optimizer, batches, of_classes, after=after)


@script()
def signs_of_gradients(accelerator):
    """signSGD: ``.grad`` becomes its sign before the step."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.01), loader())

    def before_step():
        for parameter in model.parameters():
            parameter.grad.sign_()

    return fit(accelerator, model, optimizer, batches, of_classes, before_step)


@script()
def clipped_by_the_norm_of_each_row(accelerator):
    """AGC: each row of a gradient is at most a hundredth of the row of weights that it belongs to."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def before_step():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    most = 0.05 * parameter.norm(dim=1, keepdim=True)
                    norm = parameter.grad.norm(dim=1, keepdim=True)
                    parameter.grad.mul_((most / norm.clamp(min=1e-12)).clamp(max=1))

    return fit(accelerator, model, optimizer, batches, of_classes, before_step)


@script()
def gradients_kept_aside_by_hand(accelerator):
    """A window by hand: gradients of each batch are cloned into a list; every second step assigns their mean."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    losses, aside = [], []
    for x, y in batches:
        loss = of_classes(model, x, y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        aside.append([parameter.grad.clone() for parameter in model.parameters()])
        losses.append(mean(accelerator, loss))
        if len(aside) == 2:
            for parameter, gradients in zip(model.parameters(), zip(*aside, strict=True), strict=True):
                parameter.grad = torch.stack(gradients).mean(0)
            optimizer.step()
            aside.clear()
    return result(accelerator, losses, model=model)


@script()
def units_that_sleep_begin_anew(accelerator):
    """Rows of weights whose unit answers least are drawn anew from a generator, midway."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    draws = torch.Generator().manual_seed(5)
    steps = []

    def after():
        steps.append(1)
        if len(steps) == 3:
            with torch.no_grad():
                weight = model.body[0].weight
                least = weight.norm(dim=1).topk(3, largest=False).indices
                weight[least] = torch.randn(3, FEATURES, generator=draws) / 3

    return fit(accelerator, model, optimizer, batches, of_classes, after=after)


@script()
def singular_value_by_power_iteration(accelerator):
    """A penalty on the largest singular value of a weight, by power iteration on a vector that is kept."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    vector = F.normalize(noise(16), dim=0)

    def loss_of(model, x, y):
        nonlocal vector
        loss, weight = of_classes(model, x, y), model.body[2].weight
        with torch.no_grad():
            vector = F.normalize(weight.T @ (weight @ vector), dim=0)
        return loss + 0.1 * (weight @ vector).norm()

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def pruned_by_moving_scores(accelerator):
    """Movement pruning: scores add up weight times gradient, and the lowest are zero from then on."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    scores, steps, masks = torch.zeros(16, 16), [], []

    def before_step():
        weight = model.body[2].weight
        scores.sub_((weight * weight.grad).detach())

    def after():
        steps.append(1)
        if len(steps) == 4:
            masks.append((scores > scores.flatten().kthvalue(128).values).float())
        with torch.no_grad():
            for mask in masks:
                model.body[2].weight.mul_(mask)

    return fit(accelerator, model, optimizer, batches, of_classes, before_step, after)


@script()
def largest_losses_of_each_sample_kept(accelerator):
    """The largest loss of each sample over its positions: what is compared lies within a sample."""
    model = build(lambda: Net(classes=3 * CLASSES))
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def loss_of(model, x, y):
        each = F.cross_entropy(model(x).view(-1, CLASSES, 3), y[:, None].expand(-1, 3), reduction="none")
        return each.topk(2, dim=1).values.mean()

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def halves_of_the_batch_by_two_calls(accelerator):
    """GhostBatch by hand: each half of the batch goes through the model on its own, and the outputs are joined."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def loss_of(model, x, y):
        middle = len(x) // 2
        return F.cross_entropy(torch.cat([model(x[:middle]), model(x[middle:])]), y)

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def a_state_that_follows_the_loss(accelerator):
    """A baseline as in REINFORCE: a running mean of the loss, reduced over processes, is taken from each."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    baseline = [0.0]

    def loss_of(model, x, y):
        each = F.cross_entropy(model(x), y, reduction="none")
        loss = (each * (each.detach() - baseline[0])).mean()
        baseline[0] = 0.9 * baseline[0] + 0.1 * mean(accelerator, each.mean())
        return loss

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def second_order_by_a_diagonal(accelerator):
    """Hutchinson: a draw of signs times the Hessian-vector product divides the gradient (AdaHessian)."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.05), loader())
    draws = torch.Generator().manual_seed(3)
    losses = []
    for x, y in batches:
        loss = of_classes(model, x, y)
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        signs = [torch.randint(0, 2, each.shape, generator=draws) * 2.0 - 1 for each in gradients]
        products = torch.autograd.grad(gradients, parameters, signs)
        optimizer.zero_grad()
        for parameter, gradient, sign, product in zip(parameters, gradients, signs, products, strict=True):
            parameter.grad = gradient.detach() / ((sign * product).abs() + 0.5)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script(follows="second_order_by_a_diagonal")
def second_order_reduced_by_hand(accelerator):
    """AdaHessian: gradients and products of each process's samples, which the script averages over processes."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.05), loader())
    draws = torch.Generator().manual_seed(3)
    losses = []
    for x, y in batches:
        loss = of_classes(model, x, y)
        parameters = list(model.parameters())
        with accelerator.no_sync(model):
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            signs = [torch.randint(0, 2, each.shape, generator=draws) * 2.0 - 1 for each in gradients]
            products = torch.autograd.grad(gradients, parameters, signs)
        optimizer.zero_grad()
        for parameter, gradient, sign, product in zip(parameters, gradients, signs, products, strict=True):
            over_all = accelerator.reduce(gradient.detach(), "mean"), accelerator.reduce(product, "mean")
            parameter.grad = over_all[0] / ((sign * over_all[1]).abs() + 0.5)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script(follows="singular_value_by_power_iteration")
def singular_value_of_a_gathered_weight(accelerator):
    """The penalty on the largest singular value: the whole weight moves the vector, and the loss has ``1 * weight``."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    vector = F.normalize(noise(16), dim=0)

    def loss_of(model, x, y):
        nonlocal vector
        weight = model.body[2].weight
        with torch.no_grad():
            whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            vector = F.normalize(whole.T @ (whole @ vector), dim=0)
        return of_classes(model, x, y) + 0.1 * ((1 * weight) @ vector).norm()

    return fit(accelerator, model, optimizer, batches, loss_of)


class Spectral(Net):
    """Returns the largest singular value beside the logits, the same for each row; ``(B, F) -> (B, C), (B,)``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("vector", F.normalize(noise(16), dim=0))

    def forward(self, x):
        weight, vector = self.body[2].weight, self.vector
        with torch.no_grad():
            for _ in range(3):
                vector = F.normalize(weight.T @ (weight @ vector), dim=0)
        value = (weight @ vector).norm()
        return super().forward(x), value.expand(len(x))


@script(follows="singular_value_by_power_iteration singular_value_of_a_gathered_weight")
def singular_value_in_the_forward(accelerator):
    """The penalty on the largest singular value, where forward computes it, from one vector each time."""
    model = build(Spectral)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def loss_of(model, x, y):
        logits, value = model(x)
        return F.cross_entropy(logits, y) + 0.1 * value.mean()

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def embeddings_moved_towards_their_neighbours(accelerator):
    """Retrofitting: rows of an embedding are averaged with the rows that a list names, after each epoch's step."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(CLASSES * 2, 16), nn.Linear(16, CLASSES)

        def forward(self, ids):
            return self.head(torch.tanh(self.words(ids)))

    model = build(Words)
    _, y = points()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader(y * 2, y))
    near = torch.arange(CLASSES * 2).roll(1)

    def after():
        with torch.no_grad():
            weight = model.words.weight
            weight.copy_(0.9 * weight + 0.1 * weight[near])

    return fit(accelerator, model, optimizer, batches, of_classes, after=after)
