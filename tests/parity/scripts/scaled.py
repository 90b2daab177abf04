"""Losses that are scaled (``mixed_precision="fp16"``): several optimizers, overflows, steps that the script leaves out.

Autocast casts none of the operations, so that numbers are those of float32 unless an engine computes with weights in
float16. What is compared is which step is skipped, and by what gradients are divided.
"""

import torch
from parity_common import BATCH, FEATURES, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD

from drivetrain import GradScalerKwargs

SCALER = {"init_scale": 2.0**10, "growth_interval": 2}
STEPS = 8
HALF = FEATURES // 2
HUGE = 1e37
"""A feature whose gradient is finite, and is not once it is scaled."""


ROUNDING = 2e-3
"""Of weights of the order of 1 that fsdp rounds to float16, 2 ** -11 of each, in some steps. A gradient that is divided
by another scale than its own is wrong by a factor of 2."""


def scaled(reference):
    handlers = [GradScalerKwargs(**SCALER)]
    return script(reference=reference, tolerance=ROUNDING, mixed_precision="fp16", kwargs_handlers=handlers)


class Scale(nn.Module):
    """Multiplies each feature."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features) / 4)

    def forward(self, x):
        return x * self.weight


class Sums(nn.Module):
    """Two parts, each of which sees half of the features; ``(B, F) -> (B,)``."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Scale(HALF), Scale(HALF)

    def forward(self, x):
        return self.body(x[:, :HALF]).sum(1) + self.head(x[:, HALF:]).sum(1)


def data(huge=(), features=slice(0, HALF)):
    """``(x, y)``, with huge features in some steps: by default those of the body."""
    x, _ = points(STEPS * BATCH)
    y = x.sin().sum(1)
    for step in huge:
        x[step * BATCH : (step + 1) * BATCH, features] *= HUGE
    return x, y


def optimizers_of(model):
    return [SGD(model.body.parameters(), lr=0.2), SGD(model.head.parameters(), lr=0.1, momentum=0.5)]


def bounded(loss):
    """Its value for the record, where it may be huge."""
    return loss.detach().clamp(max=100.0)


def plainly(accelerator, x, y, after, *, made=optimizers_of):
    """Train; ``after(model, optimizers, loss, step)`` goes backward and steps."""
    model = build(Sums)
    optimizers = made(model)
    batches = loader(x, y)
    if accelerator is not None:
        model, batches, *optimizers = accelerator.prepare(model, batches, *optimizers)
    losses = []
    for step, (a, b) in enumerate(batches):
        loss = F.smooth_l1_loss(model(a), b)
        after(model, optimizers, loss, step)
        losses.append(bounded(loss).item() if accelerator is None else mean(accelerator, bounded(loss)))
    if accelerator is None:
        return losses, {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    return result(accelerator, losses, model=model)


def with_scaler(x, y, *, clip=None, leaves_out=None, together=False):
    """The loop of torch's documentation, with one update of the scale in each step."""
    scaler = torch.amp.GradScaler("cpu", **SCALER)

    def after(model, optimizers, loss, step):
        scaler.scale(loss).backward()
        norm = None
        if clip is not None:
            for each in optimizers:
                scaler.unscale_(each)
            norm = clip_grad_norm_(model.parameters(), clip)
        if leaves_out is None or not leaves_out(norm):
            for each in optimizers:
                scaler.step(each)
        scaler.update()
        for each in optimizers:
            each.zero_grad()

    return plainly(None, x, y, after, made=one_optimizer if together else optimizers_of)


def one_optimizer(model):
    return [SGD(model.parameters(), lr=0.2, momentum=0.5)]


def here(accelerator, x, y, *, clip=None, leaves_out=None, together=False):
    def after(model, optimizers, loss, step):
        accelerator.backward(loss)
        norm = None
        if clip is not None:
            norm = accelerator.clip_grad_norm_(model.parameters(), clip)
        if leaves_out is None or not leaves_out(norm):
            for each in optimizers:
                each.step()
        for each in optimizers:
            each.zero_grad()

    return plainly(accelerator, x, y, after, made=one_optimizer if together else optimizers_of)


@scaled(lambda: with_scaler(*data((2, 5))))
def overflow_of_one_of_two_optimizers(accelerator):
    """Gradients of one optimizer of two overflow: the other steps, with gradients divided by the scale they have."""
    return here(accelerator, *data((2, 5)))


@scaled(lambda: with_scaler(*data((1, 2, 3, 4), slice(None))))
def overflows_of_two_optimizers(accelerator):
    """All gradients overflow four times in a row: the scale is halved once for both optimizers, and grows again."""
    return here(accelerator, *data((1, 2, 3, 4), slice(None)))


@scaled(lambda: with_scaler(*data(), clip=0.4))
def two_scaled_optimizers_clipped_together(accelerator):
    """One norm over the parameters of two optimizers, while the scale grows."""
    return here(accelerator, *data(), clip=0.4)


def paces(optimizers, step):
    """The head steps each time, the body every second time."""
    return [each for index, each in enumerate(optimizers) if index == 1 or step % 2]


def at_two_paces():
    """Without a scaler: no gradient overflows."""

    def after(model, optimizers, loss, step):
        loss.backward()
        for each in paces(optimizers, step):
            each.step()
            each.zero_grad()

    return plainly(None, *data(), after)


@scaled(at_two_paces)
def scaled_optimizers_at_two_paces(accelerator):
    """The scale grows while gradients of the slower optimizer wait."""

    def after(model, optimizers, loss, step):
        accelerator.backward(loss)
        for each in paces(optimizers, step):
            each.step()
            each.zero_grad()

    return plainly(accelerator, *data(), after)


def is_large(norm):
    return norm > 1.2


@scaled(lambda: with_scaler(*data(), clip=0.5, leaves_out=is_large, together=True))
def scaled_steps_of_large_norm_left_out(accelerator):
    """``if norm > limit: optimizer.zero_grad(); continue`` after clipping."""
    return here(accelerator, *data(), clip=0.5, leaves_out=is_large, together=True)


def is_broken(norm):
    return not torch.isfinite(norm)


@scaled(lambda: with_scaler(*data((1, 4), slice(None)), clip=0.5, leaves_out=is_broken, together=True))
def scaled_steps_of_broken_norm_left_out(accelerator):
    """``if not torch.isfinite(norm): optimizer.zero_grad(); continue`` after clipping."""
    return here(accelerator, *data((1, 4), slice(None)), clip=0.5, leaves_out=is_broken, together=True)


def two_models(backward, prepare, step, number):
    """A generator that multiplies noise, and a critic that multiplies what it is given."""
    torch.manual_seed(1)
    generator, critic = Scale(FEATURES), Scale(FEATURES)
    optimizers = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
    x, _ = points(STEPS * BATCH)
    z = noise(STEPS * BATCH, FEATURES)
    x[2 * BATCH : 3 * BATCH] *= HUGE
    generator, critic, first, second, batches = prepare(generator, critic, *optimizers, loader(x, z))
    losses = []
    for index, (a, b) in enumerate(batches):
        second.zero_grad()
        loss = critic(generator(b).detach()).sum(1).tanh().mean() - critic(a).sum(1).mean()
        backward(loss)
        step(second)
        first.zero_grad()
        backward(-critic(generator(b)).sum(1).tanh().mean())
        step(first)
        losses.append(number(loss) if index != 2 else 0.0)
    return losses, generator, critic


def two_models_plainly():
    scaler = torch.amp.GradScaler("cpu", **SCALER)

    def step(optimizer):
        scaler.step(optimizer)
        scaler.update()

    losses, generator, critic = two_models(
        lambda loss: scaler.scale(loss).backward(), lambda *all_: all_, step, lambda loss: loss.item()
    )
    weights = {"generator.weight": generator.weight, "critic.weight": critic.weight}
    return losses, {name: value.detach().clone() for name, value in weights.items()}


@scaled(two_models_plainly)
def two_scaled_models(accelerator):
    """A generator and a critic, each with an optimizer; the critic's gradient overflows once."""
    losses, generator, critic = two_models(
        accelerator.backward,
        accelerator.prepare,
        lambda optimizer: optimizer.step(),
        lambda loss: mean(accelerator, loss),
    )
    return result(accelerator, losses, generator=generator, critic=critic)


def scales():
    return Scale(FEATURES), Scale(FEATURES)


def layers():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))


def coded(models, prepare, backward, clip, number):
    """An encoder and a decoder, each with an optimizer; ``clip(optimizers, parameters)`` is given those of both."""
    torch.manual_seed(1)
    encoder, decoder = models()
    optimizers = SGD(encoder.parameters(), lr=0.2), SGD(decoder.parameters(), lr=0.2)
    x, _ = points(STEPS * BATCH)
    encoder, decoder, *optimizers, batches = prepare(encoder, decoder, *optimizers, loader(x, 4 * x.sin().sum(1)))
    losses = []
    for a, b in batches:
        loss = F.mse_loss(decoder(encoder(a)).sum(1), b)
        backward(loss)
        clip(optimizers, [*encoder.parameters(), *decoder.parameters()])
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(number(loss))
    return losses, encoder, decoder


def coded_plainly(clip, *, models, is_scaled):
    scaler = torch.amp.GradScaler("cpu", enabled=is_scaled, **SCALER)

    def clip_and_step(optimizers, parameters):
        for each in optimizers:
            scaler.unscale_(each)
        clip(parameters)
        for each in optimizers:
            scaler.step(each)
        scaler.update()

    losses, *both = coded(
        models, lambda *all_: all_, lambda loss: scaler.scale(loss).backward(), clip_and_step, torch.Tensor.item
    )
    weights = {}
    for name, model in zip(("encoder", "decoder"), both, strict=True):
        weights |= {f"{name}.{key}": value.detach().clone() for key, value in model.state_dict().items()}
    return losses, weights


def coded_here(accelerator, clip, models):
    def clip_and_step(optimizers, parameters):
        clip(parameters)
        for each in optimizers:
            each.step()

    losses, encoder, decoder = coded(
        models, accelerator.prepare, accelerator.backward, clip_and_step, lambda loss: mean(accelerator, loss)
    )
    return result(accelerator, losses, encoder=encoder, decoder=decoder)


LIMIT = 0.5
"""Below the norm of both models' gradients; a tenth of it is below some of their elements."""


@scaled(lambda: coded_plainly(lambda each: clip_grad_norm_(each, LIMIT), models=scales, is_scaled=True))
def two_scaled_models_clipped_together(accelerator):
    """One norm over the parameters of an encoder and a decoder, whose loss is scaled."""
    return coded_here(accelerator, lambda each: accelerator.clip_grad_norm_(each, LIMIT), scales)


@scaled(lambda: coded_plainly(lambda each: clip_grad_value_(each, LIMIT / 10), models=scales, is_scaled=True))
def two_scaled_models_clamped_together(accelerator):
    """Elements of the gradients of an encoder and a decoder are clamped by one call, and their loss is scaled."""
    return coded_here(accelerator, lambda each: accelerator.clip_grad_value_(each, LIMIT / 10), scales)


@script(reference=lambda: coded_plainly(lambda each: clip_grad_norm_(each, LIMIT), models=layers, is_scaled=False))
def two_models_clipped_together(accelerator):
    """One norm over the parameters of an encoder and a decoder."""
    return coded_here(accelerator, lambda each: accelerator.clip_grad_norm_(each, LIMIT), layers)


@script(
    reference=lambda: coded_plainly(lambda each: clip_grad_value_(each, LIMIT / 10), models=layers, is_scaled=False)
)
def two_models_clamped_together(accelerator):
    """Elements of the gradients of an encoder and a decoder are clamped by one call."""
    return coded_here(accelerator, lambda each: accelerator.clip_grad_value_(each, LIMIT / 10), layers)


def clip_by_torch(model):
    clip_grad_norm_(model.parameters(), LIMIT)


def edit(model):
    """Decays weights by their gradients, and clamps those, as scripts do by hand."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.add_(parameter, alpha=0.1).clamp_(-0.05, 0.05)


def edited(accelerator, change, *, huge=()):
    """``change(model)`` stands between the backward and the step."""
    scaler = torch.amp.GradScaler("cpu", **SCALER) if accelerator is None else None

    def after(model, optimizers, loss, step):
        if scaler is None:
            accelerator.backward(loss)
        else:
            scaler.scale(loss).backward()
            for each in optimizers:
                scaler.unscale_(each)
        change(model)
        for each in optimizers:
            each.step() if scaler is None else scaler.step(each)
        if scaler is not None:
            scaler.update()
        for each in optimizers:
            each.zero_grad()

    return plainly(accelerator, *data(huge), after)


@scaled(lambda: edited(None, clip_by_torch))
def scaled_gradients_clipped_by_torch(accelerator):
    """``torch.nn.utils.clip_grad_norm_`` after the backward, under fp16: it sees gradients without the scale."""
    return edited(accelerator, clip_by_torch)


@scaled(lambda: edited(None, edit, huge=(2, 5)))
def scaled_gradients_edited(accelerator):
    """Gradients are edited and clamped before the step, under fp16: those that overflowed are still noticed."""
    return edited(accelerator, edit, huge=(2, 5))
