"""What refusals advise, done: each script names those whose refusal it follows, and ends as on one process.

A refusal's words say what to write instead. ``test_parity_advice.py`` holds a script of this kind, here or in another
file, to "same" in the places where what it follows is refused.
"""

from __future__ import annotations

import copy
import importlib
import math
from contextlib import contextmanager

import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader, TensorDataset


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
    "own_optimizer_object optimizer_made_after optimizer_never_prepared descent_by_hand closure_of_sgd "
    "update_by_hand gradients_zeroed_in_place gradients_taken gradients_of_listed_parameters gradients_taken_alone "
    "subset_of_each_rank halves_of_the_tensors sampler_of_each_rank stream_of_each_rank stream_of_each_rank_marked "
    "batch_size_of_each_rank"
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


@script(follows="two_losses_of_one_forward")
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


@script(follows="gradient_norm_by_hand step_hook_measures_gradients gradient_norms_seen_by_hook")
def gradient_norm_by_the_accelerator(accelerator):
    """The norm of all gradients, which ``clip_grad_norm_`` measures with ``math.inf``, sets the learning rate."""
    model, optimizer, batches = start(accelerator)
    norms = []

    def measure():
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.param_groups[0]["lr"] = 0.1 / (norms[-1] + 0.1)

    losses, weights = fit(accelerator, model, optimizer, batches, before=measure)
    return losses + norms, weights


@script(
    follows="penalties penalty_with_a_backward_of_its_own penalty_with_its_own_backward "
    "kept_batch_beside_that_of_another_loader penalty_before_the_forward penalty_scaled_by_the_loss "
    "penalty_on_one_vector_before_the_forward penalty_by_attributes_of_parameters"
)
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


@script(
    follows="ema_copy ema_averaged_model ema_averaged_unwrapped averaged_from_the_first_step_on ema_of_parameters "
    "ema_of_state_dict ema_foreach"
)
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


@script(follows="encode_then_head submodule_alone clamped_between_two_ways_in layer_called_alone_clamps_itself_later")
def forward_told_what_to_compute(accelerator):
    """``model(x, part="encode")`` gives what the body finds, without gradients, and ``model(x)`` trains."""
    model, optimizer, batches = start(accelerator, Parted)
    losses, weights = fit(accelerator, model, optimizer, batches)
    model.eval()
    with torch.no_grad():
        losses += [mean(accelerator, model(x, part="encode").pow(2).mean()) for x, _ in batches]
    return losses, weights


@script(
    follows="a_mean_that_becomes_a_sum half_a_sum_of_squares divided_by_the_batch_size losses_of_rows_in_a_stack "
    "summed_over_the_batch"
)
def sums_divided_by_the_rows(accelerator):
    """Least squares as a sum over rows, divided by how many there are here."""

    def loss_of(model, x, y):
        return ((model(x) - F.one_hot(y, CLASSES)) ** 2).sum() / 2 / len(x)

    return fit(accelerator, *start(accelerator), loss_of)


@script(
    follows="temperature_not_prepared layers_in_a_list_not_prepared temperature_in_the_models_optimizer "
    "temperature_with_a_prepared_optimizer clipped_with_the_model clipped_with_two_optimizers"
)
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
    "clamped_by_later_forwards later_forwards_clamp_under_no_grad weights_scaled_in_place "
    "weights_scaled_before_the_step"
)
def weights_clamped_after_the_step(accelerator):
    """Weights are clamped and scaled after each step, whole where they are shared out, and not in a forward."""

    def write(model):
        for p in model.parameters():
            p.clamp_(-0.2, 0.2).mul_(0.99)

    return fit_and_write(accelerator, write)


@script(
    follows="data_assigned data_with_other_strides data_through_another_type forward_assigns_data "
    "initialised_after_prepare data_exchanged data_between_forward_and_backward weights_as_one_vector "
    "parameter_replaced weights_written_from_an_array"
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


@script(follows="one_optimizer_of_two_models ensemble cycle_of_generators")
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


@script(follows="continued_by_torch_save saved_by_torch parameters_by_torch_save")
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


# ---- gradients -------------------------------------------------------------------------------------------------------


@script(follows="gradients_centralised gradients_edited_by_rows parts_of_gradients_scaled")
def gradients_edited_by_hooks(accelerator):
    """Hooks take the mean from gradients, and halve some rows: what they return is linear in the gradient."""
    model, optimizer, batches = start(accelerator, momentum=0.9)
    rows = torch.linspace(0.5, 1.0, 16)[:, None]
    model.body[0].weight.register_hook(lambda grad: (grad - grad.mean(1, keepdim=True)) * rows)
    model.head.weight.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
    return fit(accelerator, model, optimizer, batches)


@script(follows="gradients_dropped zero_grad_of_a_part_before_the_step")
def gradients_of_one_layer_dropped_by_hooks(accelerator):
    """A hook makes the gradients of the head zero."""
    model, optimizer, batches = start(accelerator)
    for p in model.head.parameters():
        p.register_hook(torch.zeros_like)
    return fit(accelerator, model, optimizer, batches)


@script(follows="gradients_decayed")
def decay_by_the_optimizer(accelerator):
    """Weights decay by the optimizer's ``weight_decay``, with momentum."""
    return fit(accelerator, *start(accelerator, momentum=0.9, weight_decay=0.1))


@script(follows="backward_for_some_inputs")
def body_frozen_for_some_losses(accelerator):
    """The body does not require gradients in the forward of a loss that shall not train it."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for step, (x, y) in enumerate(batches):
        model.body.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def clamped_after_plain_windows():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    batches = list(loader())
    losses = []
    for window in (batches[:2], batches[2:]):
        for x, y in window:
            loss = F.cross_entropy(model(x), y)
            (loss / 2).backward()
            losses.append(loss.item())
        for p in model.parameters():
            p.grad.clamp_(-0.02, 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


@script(
    follows="gradients_clamped_in_windows gradients_clamped_in_windows_of_a_known_size "
    "gradients_clamped_in_counted_windows hooks_after_accumulation_in_windows",
    reference=clamped_after_plain_windows,
    gradient_accumulation_steps=2,
)
def gradients_clamped_after_each_window(accelerator):
    """Gradients are clamped when all batches of a window are added up, after the last ``accelerator.backward``."""
    model, optimizer, batches = start(accelerator, lr=0.3)
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.02)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


class Moved(Net):
    """Adds a vector to its input, which alone is trained."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.prompt = nn.Parameter(noise(FEATURES))

    def forward(self, x):
        return super().forward(x + self.prompt)


@script(follows="soft_prompt_before_a_frozen_model perturbation_by_hand perturbation_by_a_prepared_optimizer")
def prompt_in_the_frozen_model(accelerator):
    """What moves the inputs is a parameter of the model, all others of which are frozen."""
    return fit(accelerator, *start(accelerator, Moved))


@script(follows="perturbation_by_hand")
def perturbation_by_a_prepared_optimizer(accelerator):
    """What moves the inputs has an optimizer that is prepared, and the model is frozen."""
    model, moved = build().requires_grad_(False), nn.Parameter(torch.zeros(FEATURES))
    optimizer = torch.optim.SGD([moved], lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses, weights = fit(
        accelerator, model, optimizer, batches, lambda model, x, y: F.cross_entropy(model(x + moved), y)
    )
    return losses, weights | {"moved": moved.detach().clone()}


# ---- what is built before prepare ------------------------------------------------------------------------------------


@script(follows="double_after_prepare")
def double_before_prepare(accelerator):
    """``model.double()`` and ``model.to("cpu")`` before ``prepare``, and inputs to match."""
    x, y = points()
    return fit(accelerator, *start(accelerator, lambda: Net().double().to("cpu"), data=loader(x.double(), y)))


class Adapted(Net):
    """Has an adapter beside its head, whose second part is zero at first, and a buffer that scales it."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, CLASSES))
        nn.init.zeros_(self.adapter[1].weight)
        nn.init.zeros_(self.adapter[1].bias)
        self.register_buffer("gain", torch.tensor(2.0))

    def forward(self, x):
        found = self.body(x)
        return self.head(found) + self.gain * self.adapter(found)


@script(
    follows="adapter_after_prepare layer_appended parameter_registered_later buffer_after_prepare a_network_that_grows"
)
def adapter_frozen_until_it_is_used(accelerator):
    """An adapter and a buffer are there before ``prepare``, and the adapter is frozen until the third step."""
    model, optimizer, batches = start(accelerator, Adapted, lr=0.3)
    model.adapter.requires_grad_(False)
    losses = []
    for step, (x, y) in enumerate(batches):
        if step == 2:
            model.adapter.requires_grad_(True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script(follows="initialised_from_each_ranks_seed")
def initialised_from_one_seed(accelerator):
    """The head is drawn anew after each step, from the same seed on every rank."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
        torch.manual_seed(step)
        values = torch.randn(CLASSES) / 4
        with written(model):
            model.head.bias.copy_(values)
    return result(accelerator, losses, model=model)


# ---- one parameter under two names -----------------------------------------------------------------------------------


def reconstruction(model, x, _):
    return F.mse_loss(model(x), x)


class Towers(nn.Module):
    """Two towers of which one parameter is tied, and rows of one layer used as another; ``(B, F) -> (B, F)``."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, 16), nn.Linear(FEATURES, 16)
        self.right.weight = self.left.weight
        self.out = nn.Linear(16 + 4, FEATURES)

    def forward(self, x):
        both = torch.tanh(self.left(x)) - 0.5 * torch.tanh(self.right(2 * x))
        narrow = F.linear(2 * x, self.left.weight[:4])
        return self.out(torch.tanh(torch.cat([both, narrow], 1))) + 0.1 * both @ self.left.weight


@script(
    follows="towers_with_one_data part_of_a_larger_parameter buffer_in_the_memory_of_a_weight "
    "two_models_with_one_memory prompt_in_the_memory_of_a_weight"
)
def one_parameter_for_all_that_share_it(accelerator):
    """Two towers in one module share one parameter, whose rows are used as a smaller layer's and as they are."""
    return fit(accelerator, *start(accelerator, Towers, momentum=0.9), reconstruction)


@script(follows="slices_of_a_vector_that_is_scaled")
def memory_of_each_parameter_its_own(accelerator):
    """Parameters that lay in one vector get memory of their own before ``prepare``, and are shrunk themselves."""

    def kind():
        model = Net()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        begin = 0
        for p in model.parameters():
            p.data = flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        for p in model.parameters():
            p.data = p.data.clone()
        return model

    def write(model):
        for p in model.parameters():
            p.mul_(0.9)

    return fit_and_write(accelerator, write, kind)


class Vocabulary(nn.Module):
    """Two embeddings of one parameter, frozen at first; ``(B,), (B,) -> (B, C)``."""

    def __init__(self):
        super().__init__()
        self.left = nn.Embedding.from_pretrained(torch.randn(20, FEATURES))
        self.right = nn.Embedding(20, FEATURES)
        self.right.weight = self.left.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, left, right):
        return self.head(torch.tanh(self.left(left) - 2 * self.right(right)))


@script(follows="one_of_two_frozen_embeddings_is_trained_later")
def frozen_embeddings_of_one_parameter_are_trained_later(accelerator):
    """Two frozen embeddings are one parameter, which a new optimizer trains from the third step on."""
    words = torch.arange(48) * 7 % 20
    model, optimizer, batches = start(accelerator, Vocabulary, lr=0.5, data=loader(words, words.roll(5), points()[1]))
    losses = []
    for step, (left, right, y) in enumerate(batches):
        if step == 2:
            model.left.weight.requires_grad_(True)
            optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(left, right), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


# ---- what the forward computes ---------------------------------------------------------------------------------------


class Margin(Net):
    """A head of classes' centres, with the margin of ArcFace where labels are given."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, x, y):
        cosine = F.linear(F.normalize(super().forward(x)), F.normalize(self.centres))
        return 4 * (cosine - 0.2 * F.one_hot(y, CLASSES))


@script(follows="head_beside_the_model head_with_a_prepared_optimizer loss_module_with_weights")
def head_in_the_model(accelerator):
    """ArcFace: the classes' centres are a parameter of the model, whose forward is given the labels."""
    return fit(accelerator, *start(accelerator, Margin), lambda model, x, y: F.cross_entropy(model(x, y), y))


class Weighed(nn.Module):
    """Returns the loss of each row, two tasks weighed by parameters; ``(B, F), (B,) -> (B,)``."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.classes, self.value = nn.Linear(16, CLASSES), nn.Linear(16, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x, y):
        found = self.body(x)
        classes = F.cross_entropy(self.classes(found), y, reduction="none")
        value = (self.value(found)[:, 0] - x.sum(1)).pow(2)
        weights = torch.exp(-self.log_variances)
        return weights[0] * classes + weights[1] * value + self.log_variances.sum()


@script(follows="learned_loss_weights loose_loss_weights loss_weights_in_windows")
def loss_weights_in_the_forward(accelerator):
    """Weights of two losses are parameters of the model, whose forward returns the loss of each row."""
    return fit(accelerator, *start(accelerator, Weighed), lambda model, x, y: model(x, y).mean())


class ModuleList(nn.Module):
    """Layers in a list that torch knows of."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.hidden = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x):
        x = self.first(x).tanh()
        for layer in self.hidden:
            x = layer(x).tanh()
        return self.last(x)


@script(follows="layers_in_a_list layers_in_a_list_with_a_prepared_optimizer")
def layers_in_a_module_list(accelerator):
    """Layers in an ``nn.ModuleList``, in the optimizer of the model."""
    return fit(accelerator, *start(accelerator, ModuleList, momentum=0.9))


class Experts(nn.Module):
    """Each expert sees all rows, and a mask chooses what counts; ``(B, F) -> (B, C)``."""

    def __init__(self):
        super().__init__()
        self.router, self.body = nn.Linear(FEATURES, 2), nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.high, self.low = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)

    def forward(self, x):
        found, share = self.body(x), self.router(x).softmax(1)
        return torch.where(share[:, :1] > 0.5, share[:, :1] * self.high(found), share[:, 1:] * self.low(found))


@script(
    follows="experts_chosen_by_the_top_share routed_by_task forward_branches_on_values forward_swaps_rows_once "
    "conditional_branches unused_parameters"
)
def experts_chosen_by_masks(accelerator):
    """Both experts run on every rank, and ``torch.where`` takes the one that a row has chosen."""
    return fit(accelerator, *start(accelerator, Experts))


class Densities(nn.Module):
    """Returns the parameters of a mixture; ``(B, F) -> (B, K), (B, K)``."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.shares, self.means = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x):
        found = self.body(x)
        return self.shares(found), self.means(found)


@script(follows="mixture_density custom_output")
def tuple_of_the_parameters_of_a_mixture(accelerator):
    """Forward returns a tuple, and the loss is the likelihood of the mixture that it describes."""

    def loss_of(model, x, _):
        shares, means = model(x)
        squares = (x[:, :1] - means).pow(2) / 2
        return -torch.logsumexp(shares.log_softmax(1) - squares, 1).mean()

    return fit(accelerator, *start(accelerator, Densities), loss_of)


# ---- calls of a pipelined model --------------------------------------------------------------------------------------


@script(follows="several_forwards triplets mean_teacher triplets_of_three_forwards")
def batches_stacked_in_one_call(accelerator):
    """A batch and a noisy one go through the model together, ``(B, 2, F)``, and a loss compares their outputs."""
    x, y = points()

    def loss_of(model, x, y, z):
        clean, near = model(torch.stack((x, x + 0.1 * z), 1)).unbind(1)
        return F.cross_entropy(clean, y) + (near - clean).pow(2).mean()

    return fit(accelerator, *start(accelerator, data=loader(x, y, noise(*x.shape))), loss_of)


@script(follows="distillation_prepared")
def distillation_of_one_call(accelerator):
    """A teacher that is prepared, in eval mode, and one call of the student for both losses."""
    teacher = build(lambda: Net(hidden=24), seed=6).eval().requires_grad_(False)
    student = build()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.3)
    teacher, student, optimizer, batches = accelerator.prepare(teacher, student, optimizer, loader())
    teacher.eval()

    def loss_of(model, x, y):
        with torch.no_grad():
            goal = F.softmax(teacher(x), dim=-1)
        logits = model(x)
        return F.cross_entropy(logits, y) + F.cross_entropy(logits, goal)

    return fit(accelerator, student, optimizer, batches, loss_of)


@script(follows="soft_update_by_state_dict")
def target_moved_by_its_parameters(accelerator):
    """A target network, prepared too and in eval mode, whose parameters are written after each step."""
    model = build()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, target, optimizer, batches = accelerator.prepare(model, target, optimizer, loader())
    target.eval()
    losses = []
    for x, y in batches:
        with torch.no_grad():
            goal = target(x)
        logits = model(x)
        loss = F.cross_entropy(logits, y) + 0.1 * F.mse_loss(logits, goal)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        with written(model), written(target):
            for mine, p in zip(target.parameters(), model.parameters(), strict=True):
                mine.copy_(0.9 * mine + 0.1 * p)
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model, target=target)


@script(follows="plateau_of_a_ranks_own_accuracy")
def accuracy_read_in_its_step(accelerator):
    """The share of right answers of each batch is read by ``.item()`` before the next call, and averaged."""
    model, optimizer, batches = start(accelerator)
    losses, right = [], []
    for x, y in batches:
        logits = model(x)
        right.append(mean(accelerator, (logits.argmax(1) == y).float().mean()))
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses + right, model=model)


class Adversaries(nn.Module):
    """A generator and a critic, which answers for real and made rows; ``(B, F), (B, Z) -> (B, 2)``."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, real, z):
        return self.critic(torch.stack((real, self.generator(z)), 1))[..., 0]


@script(follows="gan gan_critic_frozen wgan_clamp")
def gan_in_one_module(accelerator):
    """A generator and a critic in one module, with an optimizer for each, of which each loss steps one."""
    model = build(Adversaries)
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (model.critic, model.generator)]
    model, *optimizers, batches = accelerator.prepare(model, *optimizers, loader(points()[0], noise(4 * BATCH, 4)))
    losses = []
    for real, z in batches:
        for turn, optimizer in enumerate(optimizers):
            scores = model(real, z)
            loss = F.softplus(-scores[:, 1]).mean()
            if turn == 0:
                loss = F.softplus(-scores[:, 0]).mean() + F.softplus(scores[:, 1]).mean()
            for each in optimizers:
                each.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


# ---- samples ---------------------------------------------------------------------------------------------------------


@script(follows="each_rank_skips_another_batch all_ranks_skip_a_batch")
def broken_batches_skipped_by_all(accelerator):
    """A batch is skipped where any sample of it, on any rank, is broken; the flag is reduced first."""
    x, y = points()
    x[BATCH + 1, 0] = math.nan
    model, optimizer, batches = start(accelerator, data=loader(x, y))

    def whole():
        for x, y in batches:
            if accelerator.reduce(x.isnan().any().float(), "sum") == 0:
                yield x, y

    return fit(accelerator, model, optimizer, whole())


@script(follows="unseeded_augmentation stream_of_each_rank_marked")
def augmented_by_the_index(accelerator):
    """What is added to a sample is a function of its index."""

    class Augmented(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + 0.1 * noise(FEATURES, seed=index), y

    return fit(accelerator, *start(accelerator, data=DataLoader(Augmented(*points()), batch_size=BATCH)))


@script(follows="replay_beside_a_single_row batch_and_memory_in_one_loss")
def short_batch_dropped(accelerator):
    """``drop_last=True`` leaves out a batch that not every rank has samples of, beside one that is kept."""
    data = DataLoader(TensorDataset(*points(3 * BATCH + 1)), batch_size=BATCH, drop_last=True)
    model, optimizer, batches = start(accelerator, data=data)
    kept = None
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        if kept is not None:
            accelerator.backward(F.cross_entropy(model(kept[0]), kept[1]))
        optimizer.step()
        kept = kept or (x, y)
    return result(accelerator, [], model=model)


# ---- precision -------------------------------------------------------------------------------------------------------


def in_half_precision():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [], {f"model.{name}": value for name, value in model.state_dict().items()}


@script(follows="own_grad_scaler scaler_of_torch", reference=in_half_precision, tolerance=3e-3, mixed_precision="fp16")
def scaled_by_the_configuration(accelerator):
    """``mixed_precision="fp16"`` scales losses: the weights are float32's, to the rounding of float16."""
    _, weights = fit(accelerator, *start(accelerator))
    return [], weights


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
    follows="losses_of_rows_in_a_stack losses_of_rows_joined",
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


def loss_of_two_loaders(output, batch):
    known, unknown = output.unbind(1)
    return F.cross_entropy(known, batch[1]) + 0.1 * unknown.pow(2).mean()


def two_loaders():
    """Labelled batches beside others, of which there are more: ``(B, 2, F), (B,)``."""
    labelled, others = loader(), loader(noise(5 * BATCH, FEATURES))
    return [(torch.stack((x, z), 1), y) for (x, y), (z,) in zip(labelled, others, strict=False)]


@script(reference=lambda: by_hand(Net, loss_of_two_loaders, two_loaders(), lr=0.3))
def two_loaders_in_train_step(accelerator):
    """Batches of two loaders are stacked into one for ``train_step``."""
    model, optimizer, labelled = start(accelerator, lr=0.3)
    others = accelerator.prepare(loader(noise(5 * BATCH, FEATURES)))
    losses = []
    for (x, y), (z,) in zip(labelled, others, strict=False):
        losses.append(accelerator.train_step(model, (torch.stack((x, z), 1), y), loss_of_two_loaders).loss.item())
    del optimizer
    return result(accelerator, losses, model=model)
