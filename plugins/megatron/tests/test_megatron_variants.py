"""Models off the beaten track: frozen beginnings, functions with gradients of their own, what layers leave behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError
from drivetrain_testing import spawn

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

WORDS, WIDTH, LENGTH = 12, 8, 5
ATOL = 5e-6
"""Float32: a batch in parts adds the same numbers in another order."""


def accelerator(section):
    overrides = {"distributed_type": "megatron", "use_cpu": True}
    overrides |= {f"megatron.{key}": value for key, value in section.items()}
    return Accelerator(config=load_config(overrides=overrides, environ={}))


class Frozen(nn.Module):
    """Nothing is trained before the second stage begins."""

    def __init__(self, frozen=1):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.embed.requires_grad_(False)
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


class Twisted(Frozen):
    """A weight that meets the way of the activations in every block, where another one meets it too."""

    def __init__(self, frozen=0):
        super().__init__(frozen)
        self.embed.requires_grad_(True)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.gains = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(4))

    def forward(self, ids):
        x, bias = self.embed(ids), torch.tanh(self.bias)
        for block, gain in zip(self.blocks, self.gains, strict=True):
            x = x + torch.relu(block(x) + bias * gain)
        return self.head(x)


class Behind(Frozen):
    """The second half computes something of its own before it looks at what the first half made."""

    def __init__(self, frozen=0):
        super().__init__(frozen)
        self.embed.requires_grad_(True)
        self.own = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks[:2]:
            x = x + torch.relu(block(x))
        y = self.blocks[2](self.own(ids))
        return self.head(torch.tanh(self.blocks[3](y)) + x), y.mean()


def words():
    ids = torch.arange(8 * LENGTH).view(8, LENGTH) * 7 % WORDS
    return ids, (ids * 5 + 1) % WORDS


def logits_of(output):
    """Of the kinds above, some return a number too."""
    return output[0] + output[1] if isinstance(output, tuple) else output


def follows(section, kind, frozen=0):
    made = accelerator(section)
    torch.manual_seed(0)
    plain = kind(frozen)
    model = copy.deepcopy(plain)
    trained = [one for one in model.parameters() if one.requires_grad]
    step = torch.optim.SGD([one for one in plain.parameters() if one.requires_grad], lr=0.3)
    model, optimizer = made.prepare(model, torch.optim.SGD(trained, lr=0.3))
    ids, labels = words()
    for _ in range(2):
        loss = F.cross_entropy(logits_of(plain(ids)).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        step.step()
        step.zero_grad()
        found = F.cross_entropy(logits_of(model(ids)).flatten(0, 1), labels.flatten())
        made.backward(found)
        torch.testing.assert_close(made.clip_grad_norm_(model.parameters(), 1.0), norm, rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
        assert found.item() == pytest.approx(loss.item(), abs=ATOL)
    state = made.unwrap_model(model).state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=ATOL)
    made.end_training()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv", "dualpipev"])
def test_stages_behind_what_is_frozen_are_trained(schedule) -> None:
    section = {"pipeline_parallel_size": 2, "num_micro_batches": 4, "schedule": schedule}
    # The second stage begins with the first block: what it receives is not trained.
    section["split_points"] = "blocks.0" if schedule == "1f1b" else "blocks.0,blocks.1,blocks.3"
    for frozen in (0, 1, 2):
        spawn(follows, 2, section, Frozen, frozen, timeout=180)


@pytest.mark.parametrize("kind", [Twisted, Behind])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_weights_that_a_split_backward_would_miss_or_count_twice(kind, schedule) -> None:
    section = {"pipeline_parallel_size": 2, "num_micro_batches": 4, "schedule": schedule}
    section["split_points"] = "blocks.2" if schedule == "1f1b" else "blocks.0,blocks.1,blocks.2"
    spawn(follows, 2, section, kind, timeout=180)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu() ** 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x.relu()


class OwnGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.down(Square.apply(self.up(x)))


def between_shared_layers(section):
    made = accelerator(section)
    model = made.prepare(OwnGradient())
    with pytest.raises(UnsupportedError, match=r"torch\.autograd\.Function of the model's own.*replicated"):
        made.backward(model(torch.ones(2, WIDTH)).sum())
    made.end_training()


def between_whole_layers(section):
    made = accelerator({**section, "tp_plan": {"up": "replicated", "down": "rowwise"}})
    torch.manual_seed(0)
    plain = OwnGradient()
    model, optimizer = (module := copy.deepcopy(plain)), torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = made.prepare(model, optimizer)
    x = torch.ones(2, WIDTH)
    plain(x).sum().backward()
    made.backward(model(x).sum())
    optimizer.step()
    state = made.unwrap_model(model).state_dict()
    torch.testing.assert_close(state["up.weight"], plain.up.weight.detach() - 0.1 * plain.up.weight.grad)
    made.end_training()


def test_a_function_with_its_own_gradient_between_shared_layers() -> None:
    section = {"tensor_parallel_size": 2}
    spawn(between_shared_layers, 2, section)
    spawn(between_whole_layers, 2, section)


SEEN: list[Any] = []
"""What the blocks of a :class:`Recorded` computed in this forward."""


class Recorded(Frozen):
    """Adds a loss from what was recorded inside of its blocks, as Transformers' models do with router logits."""

    def __init__(self, *, asked: str):
        super().__init__(0)
        self._asked = asked
        for block in self.blocks:
            block.register_forward_hook(lambda module, given, result: SEEN.append(result.mean()))

    def forward(self, ids) -> Any:
        SEEN.clear()
        logits = super().forward(ids)
        if self._asked == "loss":
            return logits + SEEN[0]
        return logits, tuple(SEEN)


def left_behind(section):
    made = accelerator(section)
    ids, _ = words()
    for asked in ("loss", "output"):
        model = made.prepare(Recorded(asked=asked))
        with pytest.raises(UnsupportedError, match=r"recorded inside of them|changes 'SEEN'"):
            model(ids)
    made.end_training()


def chained(section):
    made = accelerator(section)
    ids, _ = words()
    first, second = made.prepare(Frozen()), made.prepare(nn.Sequential(nn.Linear(WORDS, 4), nn.Tanh(), nn.Linear(4, 1)))
    with pytest.raises(UnsupportedError, match="Put both models into one module"):
        second(first(ids))
    made.end_training()


@pytest.mark.parametrize("refused", [left_behind, chained])
def test_what_a_pipeline_cannot_pass_on_is_told(refused) -> None:
    spawn(refused, 2, {"pipeline_parallel_size": 2})
