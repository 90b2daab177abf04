"""What refusals advise, done: each script names those whose refusal it follows, and ends as on one process.

A refusal's words say what to write instead. ``test_parity_advice.py`` holds a script of this kind, here or in another
file, to "same" in the places where what it follows is refused.
"""

from __future__ import annotations

import importlib
import math
from contextlib import contextmanager

import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune


def start(accelerator, kind=Net, lr=0.1, data=None, **more):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **more)
    return accelerator.prepare(model, optimizer, loader() if data is None else data)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def fit(accelerator, model, optimizer, batches, loss_of=cross_entropy, before=lambda: None):
    """The ordinary loop; ``before()`` comes before each step."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        accelerator.backward(loss)
        before()
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script(
    follows="plain_backward hooks_of_a_plain_backward gradients_kept gradients_kept_and_clipped zero_grad_of_one_part "
    "own_optimizer_object optimizer_made_after optimizer_never_prepared descent_by_hand closure_of_sgd"
)
def loop_as_advised(accelerator):
    """An optimizer that is prepared with its model, ``accelerator.backward``, and ``zero_grad`` once for each step."""
    return fit(accelerator, *start(accelerator))


@script(follows="weights_loaded_by_assignment")
def weights_loaded_without_assignment(accelerator):
    """Other weights are loaded after ``prepare`` by ``load_state_dict`` without ``assign=True``."""
    other = build(seed=5).state_dict()
    model, optimizer, batches = start(accelerator)
    model.load_state_dict(other)
    return fit(accelerator, model, optimizer, batches)


class BothHeads(nn.Module):
    """``(B, F) -> (B, C), (B, 1)``."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.first, self.second = nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, x):
        found = self.encoder(x)
        return self.first(found), self.second(found)


@script(follows="encoder_of_two_models_with_two_optimizers encoder_shared_by_two_models")
def heads_of_one_encoder_in_one_module(accelerator):
    """Two heads and the encoder that they share are one module with one optimizer, and one backward trains both."""

    def loss_of(model, x, y):
        first, second = model(x)
        return F.cross_entropy(first, y) + second.pow(2).mean()

    return fit(accelerator, *start(accelerator, BothHeads), loss_of)


@script(follows="trained_in_eval_mode")
def trained_with_parts_in_eval_mode(accelerator):
    """A model is fine-tuned in training mode, with all of its parts in eval mode, so that dropout stays off."""
    model, optimizer, batches = start(
        accelerator, lambda: nn.Sequential(Net(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES))
    )
    model.train()
    for part in model.children():
        part.eval()
    return fit(accelerator, model, optimizer, batches)


@script(follows="optimizer_in_backward")
def optimizers_of_parameters_after_backward(accelerator):
    """An optimizer for each parameter, prepared with the model, stepped one after the other when backward is over."""
    model = build()
    optimizers = [torch.optim.SGD([p], lr=0.3, foreach=False) for p in model.parameters()]
    model, batches, *optimizers = accelerator.prepare(model, loader(), *optimizers)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script(follows="two_losses_of_one_forward graph_kept_for_a_second_backward")
def losses_of_one_forward_added_up(accelerator):
    """Two losses of one forward are added up, and one backward goes through it."""

    def loss_of(model, x, y):
        logits = model(x)
        return F.cross_entropy(logits, y) + logits.pow(2).mean()

    return fit(accelerator, *start(accelerator), loss_of)


def lazy():
    return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, CLASSES))


@script(follows="lazy_layers")
def lazy_layers_called_once(accelerator):
    """A model with ``nn.LazyLinear`` is called once before ``prepare``."""
    model = build(lazy)
    with torch.no_grad():
        model(points()[0][:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return fit(accelerator, *accelerator.prepare(model, optimizer, loader()))


@script(follows="new_head_after_prepare")
def new_head_before_prepare(accelerator):
    """``model.head`` is replaced before ``prepare``, with a rate of its own."""
    model = build()
    torch.manual_seed(7)
    model.head = nn.Linear(16, CLASSES)
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.3}]
    return fit(accelerator, *accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1), loader()))


@script(follows="listed_before_prepare")
def listed_after_the_first_forward(accelerator):
    """Parameters that are listed after the first forward are clamped before each step."""
    model, optimizer, batches = start(accelerator)
    listed = []

    def clamp():
        listed.extend(() if listed else model.parameters())
        with torch.no_grad():
            for p in listed:
                p.clamp_(-0.2, 0.2)

    return fit(accelerator, model, optimizer, batches, before=clamp)


@script(follows="gradient_norm_by_hand step_hook_measures_gradients")
def gradient_norm_by_the_accelerator(accelerator):
    """The norm of all gradients, which ``clip_grad_norm_`` measures with ``math.inf``, sets the learning rate."""
    model, optimizer, batches = start(accelerator)
    norms = []

    def measure():
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.param_groups[0]["lr"] = 0.1 / (norms[-1] + 0.1)

    losses, weights = fit(accelerator, model, optimizer, batches, before=measure)
    return losses + norms, weights


@script(follows="penalty_in_the_loss penalties penalty_with_a_backward_of_its_own penalty_with_its_own_backward")
def penalty_by_weight_decay(accelerator):
    """A penalty on the squares of all weights is the optimizer's ``weight_decay``."""
    return fit(accelerator, *start(accelerator, weight_decay=2e-2))


@script(follows="weights_logged histogram_of_weights weights_as_lists_and_arrays")
def weights_of_the_state_dict_logged(accelerator):
    """Norms and lists of weights are logged on the main process, which ``get_state_dict`` gives all of them."""
    model, optimizer, batches = start(accelerator)
    seen = []

    def log():
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            seen.append([float(value.norm()) for value in state.values()] + state["head.bias"].tolist())

    losses, weights = fit(accelerator, model, optimizer, batches, before=log)
    return losses, weights | ({"seen": torch.tensor(seen)} if accelerator.is_main_process else {})


@script(follows="ema_copy ema_averaged_model ema_averaged_unwrapped averaged_from_the_first_step_on")
def average_of_the_state_dict(accelerator):
    """The average of all weights is a second model on the main process, that ``get_state_dict`` is loaded into."""
    model, optimizer, batches = start(accelerator)
    average = build(seed=1)

    def update():
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            mixed = {name: value.lerp(state[name], 0.5) for name, value in average.state_dict().items()}
            average.load_state_dict(mixed)

    losses, weights = fit(accelerator, model, optimizer, batches, before=update)
    own = average.state_dict() if accelerator.is_main_process else {}
    return losses, weights | {f"average.{name}": value for name, value in own.items()}


class Parted(nn.Module):
    """Its forward takes what it computes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x, part="all"):
        found = self.body(x)
        return found if part == "encode" else self.head(found)


@script(follows="encode_then_head submodule_alone")
def forward_told_what_to_compute(accelerator):
    """``model(x, part="encode")`` gives what the body finds, without gradients, and ``model(x)`` trains."""
    model, optimizer, batches = start(accelerator, Parted)
    losses, weights = fit(accelerator, model, optimizer, batches)
    model.eval()
    with torch.no_grad():
        losses += [mean(accelerator, model(x, part="encode").pow(2).mean()) for x, _ in batches]
    return losses, weights


@script(follows="a_mean_that_becomes_a_sum half_a_sum_of_squares divided_by_the_batch_size losses_of_rows_in_a_stack")
def sums_divided_by_the_rows(accelerator):
    """Least squares as a sum over rows, divided by how many there are here."""

    def loss_of(model, x, y):
        return ((model(x) - F.one_hot(y, CLASSES)) ** 2).sum() / 2 / len(x)

    return fit(accelerator, *start(accelerator), loss_of)


@script(follows="temperature_not_prepared layers_in_a_list_not_prepared")
def temperature_in_the_model(accelerator):
    """A temperature is a parameter of the model whose logits it divides."""

    class Tempered(Net):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(0.3))

        def forward(self, x):
            return super().forward(x) * self.temperature.exp()

    return fit(accelerator, *start(accelerator, Tempered))


@contextmanager
def written(model):
    """In here all weights are whole and may be written: ZeRO 3 gathers them, the others have them anyhow."""
    parameters = list(model.parameters())
    if hasattr(parameters[0], "ds_id"):
        zero = importlib.import_module("deepspeed").zero
        with zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
            yield
    else:
        with torch.no_grad():
            yield


def fit_and_write(accelerator, write, kind=Net):
    """The ordinary loop; ``write(model)`` comes after each step."""
    model, optimizer, batches = start(accelerator, kind)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
        with written(model):
            write(model)
    return result(accelerator, losses, model=model)


@script(
    follows="layer_clamps_itself forward_clamps_a_layer_before_its_call forward_clamps_a_layer_after_its_call "
    "clamped_by_later_forwards later_forwards_clamp_under_no_grad weights_scaled_in_place"
)
def weights_clamped_after_the_step(accelerator):
    """Weights are clamped and scaled after each step, whole where they are shared out, and not in a forward."""

    def write(model):
        for p in model.parameters():
            p.clamp_(-0.2, 0.2).mul_(0.99)

    return fit_and_write(accelerator, write)


@script(
    follows="data_assigned data_with_other_strides data_through_another_type forward_assigns_data "
    "initialised_after_prepare"
)
def values_copied_into_weights(accelerator):
    """Other values are copied into the weights in place, after each step: ``p.copy_(values)``."""

    def write(model):
        for p in model.parameters():
            p.copy_(0.5 * p + 0.01)

    return fit_and_write(accelerator, write)


@script(follows="gradients_scaled")
def gradients_scaled_by_hooks(accelerator):
    """Gradients are halved by a hook on each parameter."""
    model, optimizer, batches = start(accelerator, momentum=0.9)
    for p in model.parameters():
        p.register_hook(lambda grad: 0.5 * grad)
    return fit(accelerator, model, optimizer, batches)


@script(follows="one_optimizer_of_two_models")
def an_optimizer_for_each_of_two_models(accelerator):
    """Two models, an optimizer and a backward for each."""
    models = [build(seed=seed) for seed in (1, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first, second, *optimizers, batches = accelerator.prepare(*models, *optimizers, loader())
    losses = []
    for x, y in batches:
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, first=first, second=second)


class Tied(nn.Module):
    """A decoder that uses the encoder's weight transposed, with layers between them; ``(B, F) -> (B, F)``."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x):
        found = self.middle(torch.tanh(self.encoder(x)))
        return F.linear(found, self.encoder.weight.t())


@script(follows="decoder_is_a_view_of_the_encoder")
def one_weight_for_encoder_and_decoder(accelerator):
    """An encoder and a decoder use one parameter, which the decoder transposes."""
    return fit(accelerator, *start(accelerator, Tied), lambda model, x, y: F.mse_loss(model(x), x))


@script(follows="continued_by_torch_save saved_by_torch")
def weights_saved_by_the_accelerator(accelerator):
    """Weights are written by ``accelerator.save(accelerator.get_state_dict(model), path)`` and read by torch."""
    model, optimizer, batches = start(accelerator)
    losses, weights = fit(accelerator, model, optimizer, batches)
    path = f"{accelerator.project_dir}/weights.pt"
    accelerator.save(accelerator.get_state_dict(model), path)
    accelerator.wait_for_everyone()
    found = torch.load(path) if accelerator.is_main_process else {}
    return losses, weights | {f"saved.{name}": value for name, value in found.items()}


@script(follows="pruned_midway")
def pruned_before_prepare_by_a_share(accelerator):
    """Half of a matrix is pruned before ``prepare``."""
    model = build()
    prune.l1_unstructured(model.body[0], "weight", amount=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fit(accelerator, *accelerator.prepare(model, optimizer, loader()))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


@script(follows="parametrized_after_prepare")
def parametrized_before_prepare_as_symmetric(accelerator):
    """A square matrix is made symmetric by a parametrization before ``prepare``."""
    model = build()
    parametrize.register_parametrization(model.body[2], "weight", Symmetric())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fit(accelerator, *accelerator.prepare(model, optimizer, loader()))


# ---- train_step ------------------------------------------------------------------------------------------------------


def by_train_step(accelerator, kind, loss_fn, data, lr=0.1):
    model, optimizer, batches = start(accelerator, kind, lr, data)
    losses = [accelerator.train_step(model, batch, loss_fn).loss.item() for batch in batches]
    del optimizer
    return result(accelerator, losses, model=model)


def by_hand(kind, loss_fn, data, lr=0.1):
    """The same steps in plain torch."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in data:
        loss = loss_fn(model(batch[0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


def loss_of_rows(output, batch):
    rows = [F.cross_entropy(row[None], goal[None]) for row, goal in zip(output, batch[1], strict=True)]
    return torch.stack(rows).mean()


@script(
    follows="losses_of_rows_in_a_stack losses_of_rows_joined one_loss_for_each_row",
    reference=lambda: by_hand(Net, loss_of_rows, loader()),
)
def losses_of_rows_in_train_step(accelerator):
    """Losses of rows, which are taken apart and stacked, in the ``loss_fn`` of ``train_step``."""
    return by_train_step(accelerator, Net, loss_of_rows, loader())


class Speech(nn.Module):
    """``(B, T, F) -> (T, B, 6)`` log-probabilities."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.head = nn.Linear(16, 6)

    def forward(self, x):
        return self.head(self.body(x)).log_softmax(-1).transpose(0, 1)


def utterances():
    generator = torch.Generator().manual_seed(4)
    goals = torch.randint(1, 6, (4 * BATCH, 4), generator=generator)
    lengths = torch.arange(4 * BATCH) % 3 + 2
    return loader(noise(4 * BATCH, 12, FEATURES), goals, lengths)


def ctc_loss(output, batch):
    _, goals, lengths = batch
    return F.ctc_loss(output, goals, torch.full((len(goals),), 12), lengths)


@script(follows="ctc", reference=lambda: by_hand(Speech, ctc_loss, utterances()))
def ctc_in_train_step(accelerator):
    """``F.ctc_loss`` reads the values of an output, in the ``loss_fn`` of ``train_step``."""
    return by_train_step(accelerator, Speech, ctc_loss, utterances())
