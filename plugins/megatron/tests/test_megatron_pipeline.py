"""Pipelines against the same training in one process: schedules, losses, outputs, cuts, and what is refused."""

from __future__ import annotations

import gc
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.pipeline import compiling
from drivetrain_megatron.pipeline.batches import Rows
from drivetrain_megatron.pipeline.calls import ModelCall
from drivetrain_megatron.pipeline.cutting import partition
from drivetrain_megatron.pipeline.skeleton import Elsewhere
from drivetrain_testing import spawn

WORDS, WIDTH, LENGTH = 11, 8, 5
ATOL = 5e-6
"""Float32: a batch in parts, and matrices on other ranks, add the same numbers in another order."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x, scale):
        return x + self.down(torch.tanh(self.up(x))) * scale


class Net(nn.Module):
    """Tied embeddings at both ends, a parameter used without a module, a mask for every block, a dict as output."""

    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, mask):
        x = self.embed(ids) + self.position[: ids.shape[1]]
        scale = mask.float().unsqueeze(-1)
        for block in self.blocks:
            x = block(x, scale)
        return {"logits": self.head(x), "hidden": x}


@dataclass
class Answer:
    logits: Any
    loss: Any = None


class Awkward(nn.Module):
    """The residual is added outside of the blocks, the first embedding comes back at the end, the loss is inside."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, labels=None):
        x = first = self.embed(ids)
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            x = x + torch.relu(mix(norm(x)))
        logits = self.out(x + first)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Answer(logits, loss)


def accelerator(section, **config):
    overrides = {"distributed_type": "megatron", "use_cpu": True, **config}
    overrides |= {f"megatron.{key}": value for key, value in section.items()}
    return Accelerator(config=load_config(overrides=overrides, environ={}))


def pair(made, kind=Net, rate=0.5):
    """The same model twice: plain, and prepared."""
    torch.manual_seed(0)
    plain = kind()
    torch.manual_seed(0)
    model = kind()
    step = torch.optim.SGD(plain.parameters(), lr=rate)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
    return plain, step, model, optimizer


def batch(seed, rows=8):
    """Words, a mask, and labels of which two rows, a whole micro-batch of four, count none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, LENGTH), generator=generator)
    mask = torch.rand(rows, LENGTH, generator=generator) > 0.2
    labels = torch.randint(WORDS, (rows, LENGTH), generator=generator)
    labels[0, :4] = -100
    labels[2:4] = -100
    return ids, mask, labels


def same_parameters(made, model, plain):
    state = made.backend.broadcast_object(dict(made.get_state_dict(model)))
    assert set(state) == set(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(
            state[name], tensor, rtol=0, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )


def schedule_follows(section):
    made = accelerator(section)
    plain, step, model, optimizer = pair(made)
    # The last batch of an epoch is shorter, and its parts are of two sizes.
    for seed, rows in enumerate((8, 8, 7)):
        ids, mask, labels = batch(seed, rows)
        loss = F.cross_entropy(plain(ids, mask)["logits"].view(-1, WORDS), labels.view(-1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        step.step()
        step.zero_grad()
        found = F.cross_entropy(model(ids, mask=mask)["logits"].view(-1, WORDS), labels.view(-1))
        made.backward(found)
        torch.testing.assert_close(made.clip_grad_norm_(model.parameters(), 0.5), norm, rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
        assert found.item() == pytest.approx(loss.item(), abs=ATOL)
    same_parameters(made, model, plain)
    model.eval()
    with torch.no_grad():
        found, expected = model(ids, mask), plain(ids, mask)
    assert list(found) == list(expected)
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=ATOL)
    held = sum(one.numel() for one in model.parameters() if type(one) is nn.Parameter)
    made.end_training()
    return held


@pytest.mark.parametrize(
    "section",
    [
        {"schedule": "gpipe", "num_micro_batches": 3},
        {"schedule": "1f1b", "num_micro_batches": 4},
        {"schedule": "interleaved_1f1b", "num_micro_batches": 4},
        {"schedule": "zero_bubble", "num_micro_batches": 4},
        {"schedule": "zero_bubble", "num_micro_batches": 4, "stages_per_rank": 1},
        {"schedule": "zbv", "num_micro_batches": 4},
        {"schedule": "dualpipev", "num_micro_batches": 4},
    ],
    ids=lambda section: "-".join(map(str, section.values())),
)
@pytest.mark.gate("1f1b-4", "zbv-4")
def test_every_schedule_trains_the_same_model(section) -> None:
    held = spawn(schedule_follows, 2, {"pipeline_parallel_size": 2, **section})
    whole = sum(one.numel() for one in Net().parameters())
    assert all(one < whole for one in held), "a rank holds the whole model"


def test_four_stages() -> None:
    spawn(schedule_follows, 4, {"pipeline_parallel_size": 4, "num_micro_batches": 5})


def windows_follow(section):
    """Two batches of unequal size a window, labels counted."""
    made = accelerator(section, gradient_accumulation_steps=2)
    plain, step, model, optimizer = pair(made)
    batches = [batch(seed, rows) for seed, rows in enumerate((8, 5, 6, 8))]
    for first in (0, 2):
        window = batches[first : first + 2]
        total = sum((labels != -100).sum() for _, _, labels in window)
        for ids, mask, labels in window:
            logits = plain(ids, mask)["logits"].view(-1, WORDS)
            (F.cross_entropy(logits, labels.view(-1), reduction="sum") / total).backward()
        step.step()
        step.zero_grad()
    for ids, mask, labels in batches:
        with made.accumulate(model):
            logits = model(ids, mask)["logits"].view(-1, WORDS)
            loss = F.cross_entropy(logits, labels.view(-1), reduction="sum")
            made.backward(loss, num_items=(labels != -100).sum())
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(made, model, plain)
    made.end_training()


def test_windows_on_top_of_micro_batches() -> None:
    spawn(windows_follow, 2, {"pipeline_parallel_size": 2, "num_micro_batches": 3})


def loss_follows(made, plain, model, form, arguments):
    """A loss of the prepared model and its gradients are those of the plain one; both then have no gradients."""
    expected = form(plain(*arguments))
    expected.backward()
    loss = form(model(*arguments))
    made.backward(loss)
    assert loss.item() == pytest.approx(expected.item(), abs=ATOL), form.__name__
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, Elsewhere) and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=0, atol=ATOL)
            parameter.grad = None
    plain.zero_grad()


def losses_follow(section):
    """Losses as scripts write them, each against plain torch; values, too, where more than the loss was recorded."""
    made = accelerator(section)
    plain, _, model, _ = pair(made)
    ids, mask, labels = batch(5)
    weight = torch.rand(WORDS) + 0.5
    target = torch.randn(8, LENGTH, WIDTH)

    def several(output):
        flat = output["logits"].flatten(0, 1).float()
        return (
            F.cross_entropy(flat, labels.flatten(), label_smoothing=0.1, weight=weight)
            + 0.1 * F.mse_loss(output["hidden"], target)
            + output["hidden"].pow(2).mean() / 3
            + 2.0
        )

    def by_hand(output):
        counted = labels != -100
        each = F.cross_entropy(output["logits"].transpose(1, 2), labels.clamp(min=0), reduction="none")
        return (each * counted).sum() / counted.sum()

    def sequence_first(output):
        return F.cross_entropy(output["logits"].transpose(0, 1).flatten(0, 1), labels.t().flatten())

    def by_shape(output):
        rows, length, words = output["logits"].shape
        return F.nll_loss(output["logits"].view(rows * length, words).log_softmax(-1), labels.view(rows * length))

    def contrastive(output):
        pooled = output["hidden"].mean(1)
        return F.cross_entropy(pooled @ pooled.t(), torch.arange(len(pooled)))

    for form in (several, by_hand, by_shape, sequence_first):
        loss_follows(made, plain, model, form, (ids, mask))
    with pytest.raises(UnsupportedError, match="train_step"):
        made.backward(contrastive(model(ids, mask)))
    made.end_training()


def test_losses_as_scripts_write_them() -> None:
    spawn(losses_follow, 2, {"pipeline_parallel_size": 2, "num_micro_batches": 4})


def masks_follow(section):
    """Losses of chosen elements: in one piece as written, in micro-batches times the mask; never without gradient."""
    made = accelerator(section)
    plain, _, model, _ = pair(made)
    ids, mask, labels = batch(5)
    counted = labels != -100

    def by_mask(output):
        return F.cross_entropy(output["logits"][counted], labels[counted]) + output["hidden"][mask].pow(2).mean()

    def selected(output):
        return torch.masked_select(output["hidden"], counted[..., None]).pow(2).mean()

    def multiplied(output):
        squares = output["hidden"].pow(2).mean(-1)
        return (squares * counted).sum() / counted.sum()

    def constant(output):
        with torch.no_grad():
            logits = output["logits"]
            scale = logits[logits > 0].mean()
        return output["hidden"].pow(2).mean() * scale + logits.detach()[counted].mean()

    def flooded(output):
        return (output["hidden"].pow(2).mean() - 0.001).abs() + 0.001

    def of_the_first(output):
        return output["hidden"].pow(2).mean((1, 2))[:4].mean()

    in_parts = section["num_micro_batches"] > 1
    # Outputs are larger than what a trial of all rows computes with.
    compiling._MOST_ELEMENTS = 0
    for form in (by_mask, selected, multiplied, constant, flooded, of_the_first):
        if in_parts and form in {by_mask, selected, flooded, of_the_first}:
            with pytest.raises(UnsupportedError, match="num_micro_batches: 1"):
                made.backward(form(model(ids, mask)))
            continue
        loss_follows(made, plain, model, form, (ids, mask))
    output = model(ids, mask)
    with pytest.raises(UnsupportedError, match="no gradient flows"):
        made.backward(output["logits"].mean() + output["logits"][output["logits"] > 0].mean())
    with pytest.raises(UsageError, match="no gradient"), torch.no_grad():
        made.backward(output["logits"].mean())
    with pytest.raises(UsageError, match="no gradient"):
        made.backward(output["logits"].detach().mean())
    made.end_training()


@pytest.mark.parametrize("parts", [1, 2])
def test_losses_of_elements_that_a_mask_chooses(parts) -> None:
    spawn(masks_follow, 2, {"pipeline_parallel_size": 2, "num_micro_batches": parts})


def values_follow(section):
    """Reading before backward, after it, and too late."""
    told = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("drivetrain_megatron").addHandler(listener)
    made = accelerator(section)
    plain, _, model, optimizer = pair(made)
    ids, mask, labels = batch(1)
    expected = F.cross_entropy(plain(ids, mask)["logits"].flatten(0, 1), labels.flatten())
    output = model(ids, mask)
    assert tuple(output["logits"].shape) == (8, LENGTH, WORDS)
    loss = F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())
    assert "known after" in repr(loss)
    assert loss.item() == pytest.approx(expected.item(), abs=ATOL)
    if loss > 1e9:
        raise AssertionError("control flow on a value reads it")
    again = [text for text in told if "runs once more" in text]
    assert len(again) == 1, told
    found = made.gather(output["logits"].float() + 1)
    torch.testing.assert_close(found - 1, plain(ids, mask)["logits"], rtol=0, atol=ATOL)
    total = 0
    total += loss.detach().float()
    running = same_tensor = torch.ones(())
    running += loss.detach()
    right = (output["logits"].argmax(-1) == labels).sum()
    surprise = torch.exp(loss)
    made.backward(loss)
    hits = int((plain(ids, mask)["logits"].argmax(-1) == labels).sum())
    optimizer.step()
    assert float(total) == pytest.approx(expected.item(), abs=ATOL)
    assert float(running) == float(same_tensor) == pytest.approx(1 + expected.item(), abs=ATOL)
    assert int(right) == hits
    assert surprise.item() == pytest.approx(expected.exp().item(), rel=1e-5)
    later = model(ids, mask)["logits"].mean()
    running += later.detach()
    made.backward(later)
    assert float(running) == pytest.approx(1 + expected.item() + later.item(), abs=ATOL)
    hidden = model(ids, mask)["hidden"]
    optimizer.step()
    with pytest.raises(UsageError, match="after the optimizer stepped"):
        hidden.norm().item()
    made.end_training()


def test_values_before_and_after_backward() -> None:
    spawn(values_follow, 2, {"pipeline_parallel_size": 2})


def refusals(section):
    made = accelerator(section)
    plain, _, model, _ = pair(made)
    ids, mask, _ = batch(1)
    output = model(ids, mask)
    with pytest.raises(UnsupportedError, match="train_step"):
        output["logits"].mul_(2)
    with pytest.raises(UnsupportedError, match="train_step"):
        output["logits"][0] = 0.0
    with pytest.raises(UsageError, match=r"accelerator\.backward"):
        output["logits"].mean().backward()
    with pytest.raises(UsageError, match=r"needs one number, this loss has several\. Reduce it: \.mean\(\) or \.sum"):
        made.backward(output["logits"])
    with pytest.raises(UnsupportedError, match="on both batches"):
        output["logits"] + model(ids, mask)["logits"]
    pooled = F.normalize(output["hidden"].mean(1), dim=-1)
    with pytest.raises(UnsupportedError, match="train_step"):
        # Every sample is compared with every other: no micro-batch can do that alone.
        made.backward(F.cross_entropy(pooled @ pooled.t(), torch.arange(len(ids))))
    for reduced in (lambda given: given["logits"].mean(), lambda given: (0.02 * given["logits"]).sum()):
        loss_follows(made, plain, model, reduced, (ids, mask))
    model.eval()
    evaluated = model(ids, mask)["logits"].mean().requires_grad_()
    with pytest.raises(UsageError, match="training mode"):
        made.backward(evaluated)
    made.end_training()


def test_what_cannot_be_recorded_says_what_to_write() -> None:
    spawn(refusals, 2, {"pipeline_parallel_size": 2, "num_micro_batches": 2})


def kept_whole(section):
    """A loss over pairs, and one of masked elements, with no number of micro-batches set."""
    told = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("drivetrain_megatron").addHandler(listener)
    made = accelerator(section)
    plain, _, model, _ = pair(made)
    ids, mask, labels = batch(5)

    def pairs(output):
        pooled = F.normalize(output["hidden"].mean(1), dim=-1)
        return F.cross_entropy(pooled @ pooled.t(), torch.arange(len(ids)))

    def masked(output):
        return F.cross_entropy(output["logits"][labels != -100], labels[labels != -100])

    def ordinary(output):
        return F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())

    for form in (pairs, ordinary, masked, pairs):
        loss_follows(made, plain, model, form, (ids, mask))
    for _ in range(4):
        made.backward(pairs(model(ids, mask)))
    gc.collect()
    assert sum(type(one) is ModelCall for one in gc.get_objects()) <= 1, "calls of earlier steps are kept"
    said = [text for text in told if "stays in one piece" in text]
    assert len(said) == 1, told
    assert "num_micro_batches: 1" in said[0]
    made.end_training()


def test_a_batch_that_must_not_be_cut_stays_in_one_piece() -> None:
    spawn(kept_whole, 2, {"pipeline_parallel_size": 2})


def awkward_follows(section):
    """Values of the first stage are used in the second beside the block's argument; the loss is the model's own."""
    made = accelerator(section)
    plain, step, model, optimizer = pair(made, Awkward, rate=0.1)
    for seed in range(3):
        ids, _, labels = batch(seed)
        expected = plain(ids, labels).loss
        expected.backward()
        step.step()
        step.zero_grad()
        answer = model(ids, labels=labels)
        assert isinstance(answer, Answer)
        made.backward(answer.loss)
        optimizer.step()
        optimizer.zero_grad()
        assert answer.loss.item() == pytest.approx(expected.item(), abs=ATOL)
    same_parameters(made, model, plain)
    made.end_training()


@pytest.mark.parametrize("points", ["mixes.2", "norms.1", "out"])
@pytest.mark.gate("norms.1")
def test_values_that_pass_by_the_blocks(points) -> None:
    section = {"pipeline_parallel_size": 2, "num_micro_batches": 4, "split_points": points}
    spawn(awkward_follows, 2, section)


def cut_fails(section, words):
    made = accelerator(section)
    _, _, model, _ = pair(made)
    ids, mask, _ = batch(1)
    with pytest.raises(UsageError) as caught:
        model(ids, mask)
    made.end_training()
    return all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"split_points": "block.2"}, ["'block.2'", "not a module", "Did you mean 'blocks.2'?"]),
        ({"split_points": "blocks"}, ["never called"]),
        ({"split_points": "blocks.1,blocks.2"}, ["names 2", "need 1"]),
        (
            {"split_points": "blocks.2,blocks.1,blocks.3", "schedule": "interleaved_1f1b"},
            ["another order", "blocks.1, blocks.2, blocks.3"],
        ),
        ({"stages_per_rank": 6, "schedule": "interleaved_1f1b"}, ["12 pipeline stages"]),
    ],
)
def test_a_wrong_cut_says_where_and_why(section, words) -> None:
    for right, text in spawn(cut_fails, 2, {"pipeline_parallel_size": 2, **section}, words):
        assert right, text


def too_few(section):
    made = accelerator(section)
    with pytest.raises(UsageError, match="num_micro_batches") as caught:
        pair(made)
    made.end_training()
    return str(caught.value)


def test_micro_batches_that_a_schedule_does_not_take() -> None:
    assert "Use 3 micro-batches" in spawn(too_few, 3, {"pipeline_parallel_size": 3, "num_micro_batches": 2})[0]


def transformers_follow(section, name):
    import transformers as library

    common = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    small = {"vocab_size": 64, "n_embd": 16, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    t5 = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 4, "d_kv": 4, "dropout_rate": 0.0}
    t5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
    kinds = {
        "llama": lambda: library.LlamaForCausalLM(library.LlamaConfig(**common)),
        "gpt2": lambda: library.GPT2LMHeadModel(library.GPT2Config(**small, **quiet)),
        "mixtral": lambda: library.MixtralForCausalLM(library.MixtralConfig(**common, num_local_experts=4)),
        "t5": lambda: library.T5ForConditionalGeneration(library.T5Config(**t5)),
    }
    made = accelerator(section)
    plain, step, model, optimizer = pair(made, kinds[name], rate=0.1)
    plain.train()
    model.train()
    for seed in range(2):
        ids, mask, labels = batch(seed)
        given = {"input_ids": ids, "attention_mask": mask.long().index_fill(1, torch.tensor([0]), 1), "labels": labels}
        expected = plain(**given)
        expected.loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        step.step()
        step.zero_grad()
        output = model(**given)
        made.backward(output.loss)
        # Attention over other shapes of micro-batches adds in another order.
        torch.testing.assert_close(made.clip_grad_norm_(model.parameters(), 1.0), norm, rtol=1e-4, atol=0)
        optimizer.step()
        optimizer.zero_grad()
        assert output.loss.item() == pytest.approx(expected.loss.item(), abs=2e-5)
    same_parameters(made, model, plain)
    model.eval()
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, plain(**given).logits, rtol=0, atol=2e-5)
    made.end_training()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5"])
@pytest.mark.gate("gpt2")
def test_transformers_with_their_own_loss(name) -> None:
    pytest.importorskip("transformers")
    section = {"pipeline_parallel_size": 2, "num_micro_batches": 4}
    spawn(transformers_follow, 2, section, name, timeout=100)


def test_rows_are_shared_out_evenly_and_never_empty() -> None:
    assert Rows.of(7, 3).bounds == (0, 2, 4, 7)
    assert Rows.of(2, 4).bounds == (0, 1, 2)
    assert [Rows.of(7, 3).count(index) for index in range(3)] == [2, 2, 3]


@pytest.mark.parametrize(
    ("costs", "parts", "begins"),
    [([1, 1, 1, 1], 2, [2]), ([9, 1, 1, 1], 2, [1]), ([1, 1, 1, 9], 3, [1, 3]), ([5, 0, 0, 5], 2, [1])],
)
def test_the_dearest_part_is_as_cheap_as_can_be(costs, parts, begins) -> None:
    assert partition(costs, parts) == begins


def test_partition_is_as_good_as_trying_all() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        costs = torch.randint(0, 9, (7,), generator=generator).tolist()
        found = partition(costs, 3)
        bounds = [0, *found, len(costs)]
        worst = max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))
        best = min(
            max(sum(costs[:a]), sum(costs[a:b]), sum(costs[b:])) for a, b in itertools.combinations(range(1, 7), 2)
        )
        assert worst == best
        assert len(set(bounds)) == 4


def functions_follow(section):
    """``train_step`` with losses that look at values, which no recording can hold."""
    made = accelerator(section)
    plain, step, model, _ = pair(made, rate=0.01)
    ids, mask, labels = batch(2)
    words = torch.cat([ids, labels], dim=1)

    def hard_words_only(output, given):
        # A choice by values: positions whose label is unlikely, each weighed by what a number says.
        target = given["words"][:, LENGTH:]
        each = F.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), reduction="none")
        chosen = each[each > 1.0]
        return chosen.sum() if chosen.numel() else each.sum() * 0.0

    def mean_by_rows(output, given):
        total = output["hidden"].new_zeros(())
        for row in output["hidden"]:
            total = total + (row.pow(2).mean() if row.mean().item() > 0 else row.abs().mean())
        return total / len(output["hidden"])

    def inputs(given):
        return (given["words"][:, :LENGTH],), {"mask": given["mask"]}

    for form in (hard_words_only, mean_by_rows):
        given = {"words": words, "mask": mask}
        expected = form(plain(ids, mask), given)
        expected.backward()
        step.step()
        step.zero_grad()
        result = made.train_step(model, given, form, inputs=inputs)
        assert float(result.loss) == pytest.approx(expected.item(), rel=1e-5), form.__name__
    same_parameters(made, model, plain)

    def compares_samples(output, given):
        pooled = output["hidden"].mean(1)
        each = (pooled @ pooled.t()).max(dim=1).values
        return each[each > 0.0].sum()

    with pytest.raises(UnsupportedError, match="micro-batch"):
        made.train_step(model, {"words": words, "mask": mask}, compares_samples, inputs=inputs)
    made.end_training()


def test_losses_as_functions_may_look_at_values() -> None:
    spawn(functions_follow, 2, {"pipeline_parallel_size": 2, "num_micro_batches": 3})
