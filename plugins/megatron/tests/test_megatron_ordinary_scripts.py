"""What ordinary scripts do under pipelines and tensor parallelism: the numbers of one process, or an error in words."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from plain_and_prepared import (
    ATOL,
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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_testing import spawn

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

# ---- where a batch is cut --------------------------------------------------------------------------------------------


class TimeFirst(nn.Module):
    """Torch's default layout of recurrent and attention layers, [time, batch, feature]."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.GRU(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.mix = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, hidden=None):
        x, _ = self.first(x, hidden)
        x, _ = self.second(x)
        return self.head(self.mix(x))


class Sequences(NamedTuple):
    x: Tensor
    labels: Tensor
    hidden: Tensor


def sequences(length: int) -> Callable[[int], Sequences]:
    def made(seed: int) -> Sequences:
        generator = torch.Generator().manual_seed(seed)
        return Sequences(
            torch.randn(length, ROWS, WIDTH, generator=generator),
            torch.randint(CLASSES, (length, ROWS), generator=generator),
            torch.randn(1, ROWS, WIDTH, generator=generator),
        )

    return made


def flattened(model: Any, one: Sequences) -> Tensor:
    return F.cross_entropy(model(one.x).flatten(0, 1), one.labels.flatten())


def transposed(model: Any, one: Sequences) -> Tensor:
    return F.cross_entropy(model(one.x, hidden=one.hidden).permute(1, 2, 0), one.labels.t())


class Collecting(nn.Module):
    """Writes its rows into memory that it makes, as layers of experts do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows = torch.zeros(len(x), WIDTH)
        return rows.index_add_(0, torch.arange(len(x)), self.inner(x))


class Collected(Net):
    """Its loss is a sum over memory that it makes and writes, divided by labels that count."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Collecting() for _ in range(4))

    def forward(self, x, labels):
        logits = torch.zeros(len(x), CLASSES)
        logits.index_add_(0, torch.arange(len(x)), super().forward(x))
        chosen = logits.log_softmax(-1).gather(1, labels.clamp(min=1)[:, None])[:, 0]
        return -(chosen * (labels > 0)).sum() / (labels > 0).sum()


def layouts_are_found(section: dict[str, Any]) -> None:
    made = accelerator(section)
    # As many steps as rows: nothing but the numbers tells the dims apart.
    for length in (5, ROWS):
        for loss in (flattened, transposed):
            follow(made, TimeFirst, loss, batches=sequences(length))
            made.free_memory()
    # As many classes as rows: these weights are not cut with the batch.
    weights = torch.linspace(0.1, 2.0, ROWS)
    follow(made, lambda: Net(ROWS), lambda model, one: F.cross_entropy(model(one.x), one.labels, weight=weights))
    made.free_memory()
    follow(made, Collected, lambda model, one: model(one.x, one.labels))
    made.end_training()


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
    made = accelerator(section)
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
    made = accelerator({**section, "num_micro_batches": 1})
    follow(made, lambda: Mixing(centred))
    made.free_memory()
    follow(made, lambda: Mixing(nn.BatchNorm1d(WIDTH)))
    made.end_training()


@pytest.mark.parametrize(("ranks", "section"), PIPELINES)
def test_batches_are_cut_along_the_dim_of_their_samples(ranks, section) -> None:
    spawn(layouts_are_found, ranks, section)


def test_models_that_mix_samples() -> None:
    spawn(mixing_is_refused, 2, PIPELINES[0][1])
    spawn(mixing_runs_in_one_piece, 2, PIPELINES[0][1])


# ---- what a forward keeps --------------------------------------------------------------------------------------------


class Counting(Net):
    """Counts its forwards in a Python attribute and a buffer, and computes with both; power iterations move too."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("steps", torch.zeros(()))
        for index in (0, 3):
            self.layers[index] = nn.utils.parametrizations.spectral_norm(self.layers[index])

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.steps += 1
        return super().forward(x) * (1 + self.steps / self.calls) / self.calls


def counts_once(section: dict[str, Any]) -> None:
    made = accelerator(section)
    torch.manual_seed(0)
    plain, model = follow(made, Counting)
    assert (model.calls, model.seen, model.steps.item()) == (plain.calls, plain.seen, plain.steps.item())
    made.end_training()


class Growing(Net):
    def __init__(self):
        super().__init__()
        self.total = 0

    def forward(self, x):
        self.total += len(x)
        return super().forward(x) / self.total


def trials_leave_no_trace() -> None:
    made = accelerator(TENSOR)
    plain, model = follow(made, Counting)
    assert (model.calls, model.seen) == (plain.calls, plain.seen)
    made.end_training()


@pytest.mark.parametrize(("ranks", "section"), PIPELINES)
def test_a_forward_in_parts_counts_once(ranks, section) -> None:
    spawn(counts_once, ranks, section)


def sums_over_parts_are_refused() -> None:
    made = accelerator(PIPELINES[0][1])
    refused(made, "total", Growing)
    made.end_training()


def test_state_that_follows_the_batch() -> None:
    spawn(sums_over_parts_are_refused, 2)
    spawn(trials_leave_no_trace, 2)


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
        with pytest.raises(UsageError, match=r"different values of .*dispatch_batches"):
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


# ---- sums and norms that the script takes ----------------------------------------------------------------------------


class Normalised(torch.optim.SGD):
    """Divides by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        for one in held:
            one.grad.div_(norm)
        return super().step(closure)


class Layerwise(torch.optim.Optimizer):
    """Divides by the norm of each parameter's gradient."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad / one.grad.norm(), alpha=-group["lr"])


def whole_or_refused(section: dict[str, Any]) -> None:
    made = accelerator(section)
    penalised = lambda model, one: classify(model, one) + 1e-2 * sum((p**2).sum() for p in model.parameters())  # noqa: E731
    refused(made, "outside of its forward|another pipeline stage", Net, penalised)
    refused(made, "stepping several parameters together and each alone", optimizer=Normalised)
    follow(made, optimizer=Layerwise)
    made.free_memory()
    model, optimizer = made.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    made.backward(classify(model, batch(0)))
    for take in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: float(sum((p.grad**2).sum() for p in model.parameters())),
        lambda: float(sum((p.detach() ** 2).sum() for p in model.parameters())),
        lambda: torch.cat([p.data.flatten() for p in model.parameters()]).tolist(),
    ):
        with pytest.raises(UsageError, match="another pipeline stage"):
            take()
    # Each parameter alone: its own stage does it.
    with torch.no_grad():
        for one in model.parameters():
            one.clamp_(-0.01, 0.01)
            one.data.mul_(0.5)
    optimizer.step()
    model.zero_grad()
    with pytest.raises(UsageError, match="not prepared"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises((UsageError, UnsupportedError), match="requires a gradient"):
        model(batch(0).x.requires_grad_())
    made.end_training()


def numbers_of_parts() -> None:
    made = accelerator(TENSOR)
    follow(made, optimizer=Layerwise)
    made.free_memory()
    refused(made, "Adafactor cannot step", optimizer=torch.optim.Adafactor)
    follow(made, optimizer=torch.optim.Adagrad)
    made.free_memory()
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model, _ = made.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    classify(plain, batch(0)).backward()
    made.backward(classify(model, batch(0)))
    expected = float(sum((p.grad**2).sum() for p in plain.parameters()))
    assert float(sum((p.grad**2).sum() for p in model.parameters())) == pytest.approx(expected, rel=1e-5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad.norm().item() == pytest.approx(other.grad.norm().item(), rel=1e-5)
    for clip, bound in ((nn.utils.clip_grad_norm_, 0.1), (nn.utils.clip_grad_value_, 0.01)):
        told = [clip(one.parameters(), bound) for one in (model, plain)]
        assert told[0] is None or float(told[0]) == pytest.approx(float(told[1]), rel=1e-5)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            whole = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            torch.testing.assert_close(whole, other.grad, rtol=0, atol=ATOL)
    made.end_training()


def test_norms_are_whole_or_refused() -> None:
    spawn(whole_or_refused, 2, PIPELINES[0][1])
    spawn(numbers_of_parts, 2)


def masked(model: Any) -> None:
    model.layers[0].weight.register_hook(lambda grad: grad * torch.arange(grad.numel()).view_as(grad) / grad.numel())
    model.layers[3].weight.register_hook(lambda grad: grad / grad.norm())
    model.head.bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


def hooks_are_called(section: dict[str, Any]) -> None:
    made = accelerator(section)
    follow(made, before=masked)
    made.free_memory()
    follow(made, after=masked)
    made.end_training()


@pytest.mark.parametrize("section", [PIPELINES[0][1], TENSOR])
def test_gradient_hooks_see_whole_gradients(section) -> None:
    spawn(hooks_are_called, 2, section)


# ---- other ways into the model ---------------------------------------------------------------------------------------


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


class ReentrantInside(Net):
    def encode(self, x):
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        return checkpoint(lambda value: torch.tanh(self.layers[3](value)), x, use_reentrant=True)


class Recomputing(Net):
    def encode(self, x):
        return checkpoint(super().encode, x, use_reentrant=False)


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


class Custom(Net):
    def forward(self, x):
        return SimpleNamespace(scores={"logits": super().forward(x)}, inputs=x, name="custom")


class Answer(NamedTuple):
    logits: Any
    others: Any


class Nested(Net):
    def forward(self, x):
        return Answer(super().forward(x), [x, {"more": (x * 2,)}])


def ways_in(section: dict[str, Any]) -> None:
    made = accelerator(section)
    follow(made, Net, lambda model, one: model.loss(*one))
    made.free_memory()
    follow(made, Net, lambda model, one: F.cross_entropy(made.unwrap_model(model)(one.x), one.labels))
    made.free_memory()
    follow(made, Scaled, after=rescaled)
    made.free_memory()
    follow(made, Custom, lambda model, one: F.cross_entropy(model(one.x).scores["logits"], one.labels))
    made.free_memory()
    follow(made, Nested, lambda model, one: F.cross_entropy(model(one.x).logits, one.labels))
    made.free_memory()
    for kind in (Recomputing, ReentrantInside):
        follow(made, kind)
        made.free_memory()
    in_pieces = lambda model, one: F.cross_entropy(model.head(model.encode(one.x)), one.labels)  # noqa: E731
    refused(made, "called past the model's own call", Net, in_pieces)
    refused(made, "'layers.0' .* past the model's own call", Net, lambda model, one: model.layers[0](one.x).mean())
    refused(made, "aux is written by the forward", Remembering, lambda model, one: classify(model, one) + model.aux)
    refused(made, "use_reentrant=False", Reentrant)
    refused(made, "gradients are not recorded", Frozen)
    renewed = lambda model: setattr(model, "head", nn.Linear(WIDTH, 4))  # noqa: E731
    refused(made, "'head' was set on Net after prepare", after=renewed)
    refused(made, "was set on Net after prepare", after=lambda model: model.register_buffer("more", torch.ones(1)))
    refused(made, "float64 now", Net, lambda model, one: model.double()(one.x.double()).mean())
    made.end_training()


def a_new_head() -> None:
    made = accelerator(TENSOR)

    def renewed(model: Any) -> None:
        torch.manual_seed(1)
        model.head = nn.Linear(WIDTH, CLASSES)

    follow(made, after=renewed)
    made.end_training()


def test_other_ways_into_a_model() -> None:
    spawn(ways_in, 2, PIPELINES[0][1])
    spawn(a_new_head, 2)


def averages(section: dict[str, Any]) -> None:
    made = accelerator(section)
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}):
        torch.manual_seed(0)
        plain = Net()
        torch.manual_seed(0)
        model, optimizer = made.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.3))
        step = torch.optim.SGD(plain.parameters(), lr=0.3)
        early, kept = AveragedModel(model, **options), []
        for seed in range(3):
            classify(plain, batch(seed)).backward()
            step.step()
            step.zero_grad()
            made.backward(classify(model, batch(seed)))
            optimizer.step()
            optimizer.zero_grad()
            kept = kept or [AveragedModel(one, **options) for one in (plain, model)]
            for average, one in zip(kept, (plain, model), strict=True):
                average.update_parameters(one)
        with pytest.raises(UsageError, match="after its first forward"):
            early.update_parameters(model)
        with pytest.raises(UsageError, match="a copy of"):
            kept[1](batch(0).x)
        state = kept[1].module.state_dict()
        for name, tensor in kept[0].module.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=ATOL)
        made.free_memory()
    made.end_training()


def test_averages_of_weights() -> None:
    spawn(averages, 3, PIPELINES[1][1])


def steps_without_backward() -> None:
    made = accelerator(PIPELINES[0][1])
    model, optimizer = made.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(0).x)
    with pytest.raises(UsageError, match="backward"):
        optimizer.step()
    made.end_training()


def test_a_step_that_no_backward_reached() -> None:
    spawn(steps_without_backward, 2)


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
        *PIPELINES,
        (2, TENSOR),
        (4, {**PIPELINES[0][1], "data_parallel": "zero1"}),
        (4, {**PIPELINES[0][1], "data_parallel": "fsdp"}),
        (4, {**TENSOR, "data_parallel": "zero1"}),
    ],
)
def test_layers_that_are_frozen_and_unfrozen(ranks, section) -> None:
    spawn(thawing, ranks, section)
