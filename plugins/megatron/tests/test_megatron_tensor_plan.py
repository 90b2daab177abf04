"""Which parameters are cut: derived from a forward, written by the user, a plugin or the model; what is refused."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_and_prepared import follow, refused
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.api import UsageError, hookimpl
from drivetrain.api.programs import get_registry
from drivetrain_megatron.tensor.plan import make_plan, table
from drivetrain_megatron.tensor.trial import Cut
from drivetrain_testing import spawn

WORDS, WIDTH = 33, 16


class Fused(nn.Module):
    """Attention whose queries, keys and values come from one layer and are split in one of three ways."""

    def __init__(self, way: str, heads: int = 4) -> None:
        super().__init__()
        self.way, self.heads = way, heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        fused = self.qkv(x)
        if self.way == "split":
            q, k, v = fused.split(C, dim=2)
        elif self.way == "slices":
            q, k, v = fused[..., :C], fused[..., C : 2 * C], fused[:, :, 2 * C :]
        else:
            q, k, v = fused.reshape(B, T, 3, C).unbind(2)
        q, k, v = (each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(B, T, C))


class Grouped(nn.Module):
    """Grouped-query attention by hand: keys and values of 2 heads serve 4 of queries; a gain inside of the heads."""

    def __init__(self, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, WIDTH // heads
        self.wq = nn.Linear(WIDTH, heads * self.size, bias=False)
        self.wk = nn.Linear(WIDTH, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(WIDTH, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(self.size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.heads, self.size) * self.gain
        k = self.wk(x).view(B, T, self.kv_heads, 1, self.size)
        k = k.expand(B, T, self.kv_heads, self.heads // self.kv_heads, self.size).reshape(q.shape)
        v = self.wv(x).view(B, T, self.kv_heads, self.size).repeat_interleave(self.heads // self.kv_heads, dim=2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.size)
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))


class Gated(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, width, bias=False), nn.Linear(WIDTH, width, bias=False)
        self.w2 = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Language(nn.Module):
    def __init__(self, attention: nn.Module, *, tied: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.norm, self.attention, self.unit = nn.LayerNorm(WIDTH), attention, Gated()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.attention(self.norm(x))
        return self.head(self.norm(x + self.unit(x)))


UNIT = {"unit.w1.weight": Cut(0), "unit.w3.weight": Cut(0), "unit.w2.weight": Cut(1)}


@pytest.mark.parametrize("way", ["split", "slices", "view"])
def test_a_fused_layer_is_cut_in_its_parts(way: str) -> None:
    plan = make_plan(Language(Fused(way)), 2, None)
    parts = (WIDTH,) * 3
    fused = {"attention.qkv.weight": Cut(0, parts), "attention.qkv.bias": Cut(0, parts), "attention.out.weight": Cut(1)}
    assert plan.cuts == {"words.weight": Cut(0)} | fused | UNIT
    assert plan.uneven == {"words.weight"}


def test_grouped_heads_and_an_untied_head() -> None:
    plan = make_plan(Language(Grouped(), tied=False), 2, None)
    columns = {f"attention.{name}.weight": Cut(0) for name in ("wq", "wk", "wv")}
    vocabulary = {"words.weight": Cut(0), "head.weight": Cut(0)}
    assert plan.cuts == vocabulary | columns | {"attention.wo.weight": Cut(1)} | UNIT
    assert plan.uneven == set(vocabulary)


def test_torchs_own_attention() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, WIDTH)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.layer(self.table(ids), src_mask=nn.Transformer.generate_square_subsequent_mask(ids.shape[1]))

    model = Encoder()
    model.eval()
    plan = make_plan(model, 2, None)
    parts = (WIDTH,) * 3
    assert plan.cuts["layer.self_attn.in_proj_weight"] == plan.cuts["layer.self_attn.in_proj_bias"] == Cut(0, parts)
    assert plan.cuts["layer.self_attn.out_proj.weight"] == plan.cuts["layer.linear2.weight"] == Cut(1)
    assert plan.used_in == {"layer.self_attn.out_proj.weight": {"layer.self_attn"}}
    assert not model.layer.training


def test_matrices_without_a_module_and_a_table_used_elsewhere() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, WIDTH)
            self.into, self.out = nn.Parameter(torch.randn(WIDTH, 24)), nn.Parameter(torch.randn(WIDTH, 24))
            self.bias = nn.Parameter(torch.zeros(24))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            x = x + torch.relu(x @ self.into + self.bias) @ self.out.T
            return F.linear(x, self.table.weight)

    plan = make_plan(Raw(), 2, None)
    assert plan.cuts == {"table.weight": Cut(0), "into": Cut(1), "bias": Cut(0), "out": Cut(1)}
    assert plan.used_in == {"table.weight": {""}}


def test_a_residual_stream_is_not_cut() -> None:
    # Without norms nothing else would keep the stream of width 16 from being cut through all layers.
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.units, self.head = (
                nn.Linear(5, WIDTH),
                nn.ModuleList([Gated(), Gated()]),
                nn.Linear(WIDTH, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.inputs(x)
            for unit in self.units:
                x = x + unit(x)
            return self.head(x)

    plan = make_plan(Residual(), 2, None)
    assert set(plan.cuts) == {f"units.{number}.{name}.weight" for number in (0, 1) for name in ("w1", "w2", "w3")}


def test_recording_leaves_the_model_alone() -> None:
    torch.manual_seed(0)
    model = Language(Fused("split"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    make_plan(model.train(), 2, None)
    assert model.training
    assert model.norm.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def tiny(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    }
    if name == "GPT2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4))
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_own_plans_equal_derived_ones() -> None:
    model = tiny("Llama")
    own = make_plan(model, 2, None)
    assert "LlamaForCausalLM itself" in own.source
    type(model).tp_plan, before = property(lambda self: {}), type(model).tp_plan
    try:
        model._tp_plan = {}
        derived = make_plan(model, 2, None)
    finally:
        type(model).tp_plan = before
    assert "derived" in derived.source
    # Of Transformers 5.20 the table of words is in no plan.
    in_no_plan = {"model.embed_tokens.weight"} - own.cuts.keys()
    assert {name: cut for name, cut in derived.cuts.items() if name not in in_no_plan} == own.cuts
    assert derived.uneven - in_no_plan == own.uneven
    assert {unit.count for unit, _ in derived.units} == {unit.count for unit, _ in own.units} == {2, 4, 16, 32, 48}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gpt2_has_no_plan_and_transposed_fused_layers() -> None:
    cuts = make_plan(tiny("GPT2"), 2, None).cuts
    assert cuts["transformer.h.0.attn.c_attn.weight"] == Cut(1, (32,) * 3)
    assert cuts["transformer.h.0.attn.c_attn.bias"] == Cut(0, (32,) * 3)
    assert cuts["transformer.h.0.mlp.c_proj.weight"] == Cut(0)
    assert cuts["transformer.wte.weight"] == Cut(0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_experts_of_mixtral() -> None:
    cuts = make_plan(tiny("Mixtral", num_local_experts=4), 2, None).cuts
    assert cuts["model.layers.0.mlp.experts.gate_up_proj"] == Cut(1, (48, 48))
    assert cuts["model.layers.0.mlp.experts.down_proj"] == Cut(2)


def test_the_users_plan_goes_first_then_a_plugins_then_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        @hookimpl
        def drivetrain_tensor_parallel_plan(self, model: nn.Module, degree: int) -> dict[str, str] | None:
            return {"unit.w1": "colwise"} if isinstance(model, Language) else None

    model = Language(Grouped())
    model._tp_plan = {"unit.w3": "colwise"}
    assert set(make_plan(model, 2, None).cuts) == {"unit.w3.weight"}
    registry = type(get_registry())()
    registry.register(Plugin(), name="a-plan")
    monkeypatch.setattr("drivetrain_megatron.tensor.plan.get_registry", lambda: registry)
    assert set(make_plan(model, 2, None).cuts) == {"unit.w1.weight"}
    written = {"attention.wq": "colwise", "attention.wo": "rowwise"}
    assert set(make_plan(model, 2, written).cuts) == {"attention.wq.weight", "attention.wo.weight"}
    monkeypatch.undo()
    del model._tp_plan
    assert "derived" in make_plan(model, 2, None).source


def test_wildcards_stand_for_one_component() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Gated(), Gated()]), "w1": nn.Linear(WIDTH, WIDTH)})
    model.forward = lambda x: x  # type: ignore[method-assign]
    cuts = make_plan(model, 2, {"layers.*.w1": "colwise", "layers.*.w2": "rowwise"}).cuts
    assert set(cuts) == {f"layers.{number}.{name}.weight" for number in (0, 1) for name in ("w1", "w2")}


def test_a_written_plan_finds_the_parts_of_a_fused_layer() -> None:
    plan = make_plan(Language(Fused("split")), 2, {"attention.qkv": "colwise", "attention.out": "rowwise"})
    assert plan.cuts["attention.qkv.weight"] == plan.cuts["attention.qkv.bias"] == Cut(0, (WIDTH,) * 3)


@pytest.mark.parametrize(
    ("written", "says", "advised"),
    [
        (
            {},
            "megatron.tp_plan is empty. Name layers, {'layers.*.wq': colwise, ...}, or leave",
            [None, {"*.w1": "colwise"}],
        ),
        (
            {"attention.wq": "columnwise"},
            "says 'columnwise' of attention.wq, which is no style. Did you mean 'colwise'? There are",
            [{"attention.wq": "colwise"}],
        ),
        (
            {"atention.wq": "colwise"},
            "names atention.wq, which Language has not. Near it are attention.wq",
            [{"attention.wq": "colwise"}],
        ),
        (
            {"attention": "colwise"},
            "attention, a Grouped without a matrix called weight. Name the modules in it, or its parameters: gain.",
            [{"attention.wq": "colwise", "attention.wo": "rowwise"}],
        ),
        (
            {"attention.wq": "replicated"},
            "shares no parameter of Language: it names nothing but what stays whole. Write megatron.tp_plan: {'layers.",
            [None, {"attention.wq": "replicated", "attention.wo": "rowwise"}],
        ),
        (
            {"words": "vocabulary", "head": "rowwise"},
            "0 and, as head.weight, along dim 1. Tied parameters are one; give both modules the style vocabulary.",
            [{"words": "vocabulary", "head": "vocabulary"}],
        ),
    ],
)
def test_plans_that_cannot_be(written: dict[str, str], says: str, advised: list[dict[str, str] | None]) -> None:
    with pytest.raises(UsageError) as raised:
        make_plan(Language(Grouped()), 2, written)
    assert says in str(raised.value)
    for each in advised:
        assert make_plan(Language(Grouped()), 2, each).cuts


def test_every_style_that_a_refusal_lists_can_be_written() -> None:
    with pytest.raises(UsageError) as raised:
        make_plan(Language(Grouped()), 2, {"attention.wq": "columnwise"})
    listed = raised.value.cure.partition("There are ")[2].rstrip(".").split(", ")
    assert {"colwise", "rowwise", "packed_colwise", "vocabulary", "replicated"} <= set(listed)
    for style in listed:
        assert "unit.w1.weight" in make_plan(Language(Grouped()), 2, {"unit.w1": "colwise", "unit.w3": style}).cuts


class Lookup(nn.Module):
    """Words that are looked up, and a head, which may be the same matrix."""

    def __init__(self, *, tied: bool = False, **table: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH, **table), nn.Linear(WIDTH, WORDS, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


class Bare(Lookup):
    """Its words are a parameter without a module."""

    def __init__(self) -> None:
        super().__init__()
        table = self.words.weight
        del self.words
        self.words = table

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.words, max_norm=0.5)
        return self.head(x + self.down(torch.relu(self.up(x))))


def words_and_next(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (8,), generator=generator), torch.randint(WORDS, (8,), generator=generator)


def of_next(model: Any, one: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(one[0]), one[1])


def refused_and_then_shared(folder: Path) -> None:
    unit, tied = {"up": "colwise", "down": "rowwise"}, partial(Lookup, tied=True)
    whole = r"cannot be cut \(words(\.weight)?\)\. Write words: replicated into megatron\.tp_plan, beside .* leave tp_"
    cases: list[tuple[Callable[[], nn.Module], dict[str, str], str, list[dict[str, str] | None]]] = [
        (tied, {}, r"megatron\.tp_plan is empty\. Name layers, .*, or leave it out", [None, unit]),
        (tied, {**unit, "up": "columnwise"}, r"says 'columnwise' of up, .*\. Did you mean 'colwise'\?", [unit]),
        (tied, {**unit, "op": "colwise"}, r"names op, which Lookup has not\. Near it are up\.", [unit]),
        (
            tied,
            {"words": "vocabulary", "head": "rowwise"},
            r"as head\.weight, along dim 1\. Tied .* both modules the style vocabulary",
            [{"words": "vocabulary", "head": "vocabulary"}],
        ),
        *(
            (kind, {"words": "vocabulary"}, whole, [None, {"words": "replicated", **unit}])
            for kind in (partial(Lookup, max_norm=0.5), partial(Lookup, sparse=True), Bare)
        ),
    ]
    file = folder / f"{os.environ['RANK']}.yaml"
    for kind, written, words, advised in cases:
        for plan in (written, *advised):
            section = {"tensor_parallel_size": 2} | ({} if plan is None else {"tp_plan": plan})
            config = {"distributed_type": "megatron", "use_cpu": True, "megatron": section}
            file.write_text(json.dumps(config), encoding="utf-8")
            made = Accelerator(config=file)
            if plan is written:
                refused(made, words, kind, of_next, batches=words_and_next)
            else:
                follow(made, kind, of_next, batches=words_and_next)
            made.end_training()


def test_plans_are_written_as_refusals_advise_and_train(tmp_path: Path) -> None:
    spawn(refused_and_then_shared, 2, tmp_path, timeout=100)


ALL_HEADS = {f"attention.{name}": "colwise" for name in ("wq", "wk", "wv")}


@pytest.mark.parametrize("written", [None, ALL_HEADS, {"attention.wk": "colwise"}], ids=["derived", "all", "one"])
def test_heads_that_do_not_divide(written: dict[str, str] | None) -> None:
    with pytest.raises(UsageError) as raised:
        make_plan(Language(Grouped()), 4, written)
    message = str(raised.value)
    assert "tensor_parallel_size 4 does not divide attention.wk.weight" in message
    assert "8 features in 2 heads or groups" in message
    assert message.endswith("Degrees that work for this model: 1, 2.")


def test_widths_that_do_not_divide() -> None:
    model = Language(Fused("split", heads=4))
    model.unit = Gated(22)
    with pytest.raises(
        UsageError, match=r"does not divide unit\.w1\.weight.*: 22 features.*work for this model: 1, 2\."
    ):
        make_plan(model, 4, None)


class Branching(nn.Module):
    """A forward that asks for values between modules that do not."""

    def __init__(self, *, between: nn.Module | None = None) -> None:
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.gate, self.head, self.between = nn.Linear(4, 2), nn.Linear(4, 2), between or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.unit(x)
        rows = (self.gate(h)[:, 0] > 0).nonzero().flatten()
        return self.head(self.between(h).index_fill(0, rows, 0.0) if len(rows) else h)


def test_modules_between_which_a_forward_asks_for_values_are_shared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = make_plan(Branching(), 2, None)
    assert set(plan.cuts) == {"unit.0.weight", "unit.0.bias", "unit.2.weight"}
    assert "Branching was not followed as a whole" in caplog.text
    assert re.search(r"\(its forward cannot be run without values: it asks for them at \S+_plan\.py:\d+\)", caplog.text)
    assert "computes all of: gate, head." in caplog.text  # the weight of unit.2 is shared, though its bias is not


class Scaled(nn.Module):
    """A forward with a number that is a value of its input, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        blocks = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x / x.abs().max().item() * self.gain)


def test_the_layers_that_stay_whole_are_listed_together(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = make_plan(Scaled(), 2, None)
    assert {name for name in plan.cuts if name.endswith("weight")} == {
        f"blocks.{block}.{layer}.weight" for block in range(3) for layer in (1, 3)
    }
    assert "computes all of: gain, blocks.0-2.0." in caplog.text


def test_a_module_that_asks_for_values_is_followed_by_its_own_modules() -> None:
    plan = make_plan(nn.Sequential(Branching(between=Branching())), 2, None)
    cut = {"unit.0.weight", "unit.0.bias", "unit.2.weight"}
    assert set(plan.cuts) == {f"{path}.{name}" for path in ("0", "0.between") for name in cut}


def test_what_another_module_holds_too_stays_whole() -> None:
    model = Branching()
    model.gate.weight = nn.Parameter(torch.zeros(8, 4))
    model.gate.bias = model.unit[0].bias
    assert "unit.0.bias" not in make_plan(model, 2, None).cuts


def test_a_module_without_values_is_followed_by_a_guess_at_its_input() -> None:
    with torch.device("meta"):
        model = Branching()
    assert set(make_plan(model, 2, None).cuts) == {"unit.0.weight", "unit.0.bias", "unit.2.weight"}


def test_a_forward_that_cannot_run_on_shapes(caplog: pytest.LogCaptureFixture) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) if x.sum() > 0 else x

    with caplog.at_level(logging.WARNING):
        assert not make_plan(Deciding(), 2, None).cuts
    assert "No layer of Deciding can be shared" in caplog.text
    assert "cannot be run without values: it asks for them at test_megatron_tensor_plan.py:" in caplog.text
    plan = make_plan(Deciding(), 2, {"first": "colwise", "second": "rowwise"})
    assert set(plan.cuts) == {"first.weight", "first.bias", "second.weight"}


def test_nothing_to_cut_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not make_plan(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), 2, None).cuts
    assert "No layer of Sequential can be shared over 2 tensor-parallel ranks" in caplog.text


def test_the_table_of_a_plan() -> None:
    source, rows = table(Language(Fused("split")), 2, None)
    assert source == "a plan derived from its forward"
    by_name = {row.name: row for row in rows}
    assert by_name["words.weight"][1:] == ("vocabulary", (33, 16), [(17, 16), (16, 16)])
    assert by_name["attention.qkv.weight"][1:] == ("packed_colwise (3 parts)", (48, 16), [(24, 16)] * 2)
    assert by_name["attention.out.weight"][1:] == ("rowwise", (16, 16), [(16, 8)] * 2)
    assert by_name["norm.weight"].style == "replicated"
