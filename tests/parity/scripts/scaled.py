"""Losses that are scaled (``mixed_precision="fp16"``): several optimizers, overflows, steps that the script leaves out.

Autocast casts none of the operations, so that numbers are those of float32 unless an engine computes with weights in
float16. What is compared is which step is skipped, and by what gradients are divided.
"""

import torch
from parity_common import BATCH, FEATURES, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
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
