"""What only pipelines and tensor parallelism have: schedules, cuts, what stages cannot know of each other.

Scripts that any backend could run stand in tests/parity/scripts; the places ``tp-2``, ``pp-2`` and ``pp-3`` run them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_and_prepared import (
    CLASSES,
    PIPELINES,
    ROWS,
    TENSOR,
    WIDTH,
    Batch,
    Net,
    accelerator,
    batch,
    classify,
    follow,
    refused,
    same_state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_testing import spawn

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

# ---- models that mix samples -----------------------------------------------------------------------------------------


class Mixing(Net):
    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, x):
        return self.head(self.mix(self.encode(x)))


def centred(x):
    return x - x.mean(0)


def shuffled(x):
    return 0.5 * (x + x[torch.randperm(len(x))])


def shuffled_by_sorting(x):
    return 0.5 * (x + x[torch.rand(len(x)).argsort()])


def half_dropped(x):
    return F.dropout(x, 0.5) + 0.01 * torch.randn_like(x)


def mixing_is_refused(section: dict[str, Any]) -> None:
    made = accelerator({**section, "num_micro_batches": 2})
    for mix in (centred, shuffled, shuffled_by_sorting):
        refused(made, "num_micro_batches: 1", lambda mix=mix: Mixing(mix))
    refused(made, "(?s)BatchNorm", lambda: Mixing(nn.BatchNorm1d(WIDTH)))
    channels = lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten())  # noqa: E731
    refused(made, "(?s)BatchNorm", lambda: Mixing(channels()))
    # Randomness alone mixes nothing.
    model, optimizer = made.prepare(model := Mixing(half_dropped), torch.optim.SGD(model.parameters(), lr=0.1))
    made.backward(classify(model, batch(0)))
    optimizer.step()
    assert len(made.backend.gather(torch.rand(1)).unique()) == 1, "dropout moves the script's numbers alike everywhere"
    made.end_training()


def mixing_runs_in_one_piece(section: dict[str, Any]) -> None:
    made = accelerator(section)
    follow(made, lambda: Mixing(centred))
    made.free_memory()
    follow(made, lambda: Mixing(nn.BatchNorm1d(WIDTH)))
    made.end_training()


def test_models_that_mix_samples() -> None:
    spawn(mixing_is_refused, 2, PIPELINES[0][1])
    for asked in ({}, {"num_micro_batches": 1}):
        spawn(mixing_runs_in_one_piece, 2, {**PIPELINES[0][1], **asked})


# ---- one draw --------------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    """Another draw for whoever reads it."""

    def __init__(self, *, labels_only: bool):
        self.generator, self.labels_only = torch.Generator(), labels_only
        self.generator.seed()

    def __len__(self):
        return 16

    def __getitem__(self, index):
        noise = torch.randn(WIDTH, generator=self.generator)
        return (torch.full((WIDTH,), float(index)) if self.labels_only else noise), noise[:CLASSES].argmax()


def one_draw(section: dict[str, Any]) -> None:
    made = accelerator(section)
    for labels_only in (False, True):
        model = Net()
        loader = DataLoader(Augmented(labels_only=labels_only), batch_size=ROWS)
        model, loader = made.prepare(model, loader)
        one = Batch(*next(iter(loader)))
        with pytest.raises(UsageError, match=r"different (values of|losses: the labels differ).*dispatch_batches"):
            made.backward(classify(model, one))
        made.free_memory()
    made.end_training()
    made = accelerator(section, **{"dataloader.dispatch_batches": True})
    model, loader = made.prepare(Net(), DataLoader(Augmented(labels_only=False), batch_size=ROWS))
    made.backward(classify(model, Batch(*next(iter(loader)))))
    made.end_training()


@pytest.mark.parametrize("section", [PIPELINES[0][1], TENSOR])
def test_ranks_that_drew_other_samples_are_told(section) -> None:
    spawn(one_draw, 2, section)


# ---- what stages do not know of each other ---------------------------------------------------------------------------


class Growing(Net):
    def __init__(self):
        super().__init__()
        self.total = 0

    def forward(self, x):
        self.total += len(x)
        return super().forward(x) / self.total


class Remembering(Net):
    aux: Any = 0.0

    def forward(self, x):
        x = self.encode(x)
        self.aux = x.square().mean()
        return self.head(x)


class Reentrant(Net):
    def encode(self, x):
        # Torch warns of a checkpoint none of whose inputs requires a gradient.
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = checkpoint(lambda value, layer=layer: torch.tanh(layer(value)), x, use_reentrant=True)
        return x


class Frozen(Net):
    def forward(self, x):
        with torch.no_grad():
            x = self.encode(x)
        return self.head(x)


class Scaled(Net):
    scale, doubled = 1.0, False

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.ones(CLASSES))

    def forward(self, x):
        if self.doubled:
            x = self.layers[0](x) + x
        return super().forward(x) * self.scale * self.weights


def rescaled(model: Any) -> None:
    model.scale, model.doubled = 3.0, True
    model.weights = torch.linspace(0.5, 2, CLASSES)


def other_ways(section: dict[str, Any]) -> None:
    made = accelerator(section)
    model, optimizer = made.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    early = AveragedModel(model)
    model(batch(0).x)
    with pytest.raises(UsageError, match="backward"):
        optimizer.step()
    with pytest.raises(UsageError, match="after its first forward"):
        early.update_parameters(model)
    with pytest.raises(UsageError, match="a copy of"):
        AveragedModel(model)(batch(0).x)
    made.free_memory()
    follow(made, Scaled, after=rescaled)
    made.free_memory()
    follow(made, Growing)
    made.free_memory()
    refused(made, "aux is written by the forward", Remembering, lambda model, one: classify(model, one) + model.aux)
    refused(made, "use_reentrant=False", Reentrant)
    refused(made, "gradients are not recorded", Frozen)
    made.end_training()


def test_what_stages_do_not_know_of_each_other_is_refused() -> None:
    spawn(other_ways, 2, PIPELINES[0][1])


# ---- parts that are frozen -------------------------------------------------------------------------------------------


def thawing(section: dict[str, Any]) -> None:
    """Freezes other layers before each step, as gradual unfreezing does, with an optimizer that decays weights."""
    made = accelerator(section)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net())
        models[-1].layers.requires_grad_(False)
    plain, model = models
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    step = torch.optim.SGD(plain.parameters(), **options)
    model, prepared = made.prepare(model, torch.optim.SGD(model.parameters(), **options))
    for seed, trained in enumerate(((), (3,), (0, 2), (0, 1, 2, 3), (1,))):
        for one in models:
            for index, layer in enumerate(one.layers):
                layer.requires_grad_(index in trained)
        whole, mine = batch(seed), batch(seed)
        if made.backend.topology.dp_size > 1:
            half = slice(made.backend.topology.dp_rank * ROWS // 2, (made.backend.topology.dp_rank + 1) * ROWS // 2)
            mine = Batch(whole.x[half], whole.labels[half])
        classify(plain, whole).backward()
        step.step()
        step.zero_grad()
        made.backward(classify(model, mine))
        prepared.step()
        prepared.zero_grad()
    same_state(made, model, plain)
    made.end_training()


@pytest.mark.parametrize(
    ("ranks", "section"),
    [
        PIPELINES[1],
        (4, {**PIPELINES[0][1], "data_parallel": "zero1"}),
        (4, {**PIPELINES[0][1], "data_parallel": "fsdp"}),
        (4, {**TENSOR, "data_parallel": "zero1"}),
    ],
)
def test_layers_that_are_frozen_and_unfrozen(ranks, section) -> None:
    spawn(thawing, ranks, section)


# Words, not rows of numbers: an embedding begins the model.
WORDS, LENGTH = 12, 5


class FrozenFirst(nn.Module):
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


class Twisted(FrozenFirst):
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


class Behind(FrozenFirst):
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


def words(_: int) -> Batch:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % WORDS
    return Batch(ids, (ids * 5 + 1) % WORDS)


def of_words(model: Any, one: Batch) -> Tensor:
    """Some of the kinds above return a number too."""
    output = model(one.x)
    logits = output[0] + output[1] if isinstance(output, tuple) else output
    return F.cross_entropy(logits.flatten(0, 1), one.labels.flatten())


def sgd_of_trained(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in parameters if one.requires_grad], lr=lr)


def follows_in_each(section: dict[str, Any], kinds: list[Callable[[], nn.Module]]) -> None:
    made = accelerator(section)
    for kind in kinds:
        follow(made, kind, of_words, batches=words, optimizer=sgd_of_trained, clip=1.0)
        made.free_memory()
    made.end_training()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv", "dualpipev"])
def test_stages_behind_what_is_frozen_are_trained(schedule) -> None:
    section = {"pipeline_parallel_size": 2, "num_micro_batches": 4, "schedule": schedule}
    # The second stage begins with the first block: what it receives is not trained.
    section["split_points"] = "blocks.0" if schedule == "1f1b" else "blocks.0,blocks.1,blocks.3"
    spawn(follows_in_each, 2, section, [partial(FrozenFirst, frozen) for frozen in (0, 1, 2)], timeout=180)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_weights_that_a_split_backward_would_miss_or_count_twice(schedule) -> None:
    section = {"pipeline_parallel_size": 2, "num_micro_batches": 4, "schedule": schedule}
    section["split_points"] = "blocks.2" if schedule == "1f1b" else "blocks.0,blocks.1,blocks.2"
    spawn(follows_in_each, 2, section, [Twisted, Behind], timeout=180)


# ---- functions with gradients of their own, and what layers leave behind ---------------------------------------------


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
    made = accelerator({**section, "tp_plan": {"up": "colwise", "down": "rowwise"}})
    model = made.prepare(OwnGradient())
    with pytest.raises(UnsupportedError, match=r"torch\.autograd\.Function of the model's own.*replicated"):
        made.backward(model(torch.ones(2, WIDTH)).sum())
    made.end_training()


def between_whole_layers(section, plan):
    made = accelerator({**section, **plan})
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
    # A plan that is derived from the forward leaves both layers whole.
    for plan in ({}, {"tp_plan": {"up": "replicated", "down": "rowwise"}}):
        spawn(between_whole_layers, 2, section, plan)


SEEN: list[Any] = []
"""What the blocks of a :class:`Recorded` computed in this forward."""


class Recorded(FrozenFirst):
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
    ids = words(0).x
    for asked in ("loss", "output"):
        model = made.prepare(Recorded(asked=asked))
        with pytest.raises(UnsupportedError, match=r"recorded inside of them|changes 'SEEN'"):
            model(ids)
    made.end_training()


def chained(section):
    made = accelerator(section)
    ids = words(0).x
    first = made.prepare(FrozenFirst())
    second = made.prepare(nn.Sequential(nn.Linear(WORDS, 4), nn.Tanh(), nn.Linear(4, 1)))
    with pytest.raises(UnsupportedError, match="Put both models into one module"):
        second(first(ids))
    made.end_training()


@pytest.mark.parametrize("refused", [left_behind, chained])
def test_what_a_pipeline_cannot_pass_on_is_told(refused) -> None:
    spawn(refused, 2, {"pipeline_parallel_size": 2})
