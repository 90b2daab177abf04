"""TRL's trainers on Drivetrain have the losses of their own on one process, and what they generate is the same."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import trainer_jobs as jobs
from test_trainer_backends import BACKENDS, close, slug

from drivetrain_testing import RankFailedError, spawn

# test_trainer_backends.py shows Trainer itself under every backend.
pytestmark = pytest.mark.slow

if any(find_spec(name) is None for name in ("accelerate", "transformers", "trl")):
    pytest.skip("Transformers, Accelerate and TRL are not installed", allow_module_level=True)

KINDS = ("sft", "dpo", "reward", "grpo", "rloo")
ADAPTED = ("sft", "dpo", "grpo")
"""With LoRA, whose reference is the model without its adapter."""

PLACES = [name for name in BACKENDS if name not in ("ddp", "pp")]
"""Three processes of ddp show what two could show by luck."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("trl"))


RUNS = [(kind, False) for kind in KINDS] + [(kind, True) for kind in ADAPTED if find_spec("peft") is not None]
"""Every kind of trainer, and whether it trains an adapter."""


@pytest.fixture(scope="module")
def stock(base: str) -> Any:
    """What stock trainers find."""
    return spawn(jobs.several_with_trl, 1, RUNS, f"{base}/stock", timeout=220)[0]


@pytest.fixture(scope="module")
def ours(request: pytest.FixtureRequest, base: str) -> Any:
    """Return what each rank finds at a place, computed once in one group of ranks for the tests that run."""
    tests = [item for item in request.session.items if item.path == request.path]
    found: dict[str, list[Any]] = {}

    def at(name: str) -> list[Any]:
        if name not in found:
            kinds = []
            for adapter, test in enumerate((test_losses, test_losses_of_an_adapter)):
                mine = [item for item in tests if getattr(item, "function", None) is test]
                named = [item.callspec.params["kind"] for item in mine if item.callspec.params["name"] == name]
                kinds += [(kind, bool(adapter)) for kind in named]
            found[name] = run(jobs.several_with_trl, kinds, name, base)
        return found[name]

    return at


def run(job: Any, kind: Any, name: str, folder: str) -> list[Any]:
    if name.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    config, processes, dp = BACKENDS[name]
    return spawn(job, processes, kind, f"{folder}/{slug(name)}", config, dp, timeout=220)


def assert_same(found: list[Any], expected: dict[str, list[float]]) -> None:
    assert len(expected["loss"]) == 6
    for rank in found:
        for key, numbers in expected.items():
            assert len(rank[key]) == len(numbers)
            assert close(rank[key], numbers), key


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.turns(3)
def test_losses(kind: str, name: str, stock: Any, ours: Any) -> None:
    assert_same([rank[kind, False] for rank in ours(name)], stock[kind, False])


@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kind", ADAPTED)
@pytest.mark.turns(2)
def test_losses_of_an_adapter(kind: str, name: str, stock: Any, ours: Any) -> None:
    assert_same([rank[kind, True] for rank in ours(name)], stock[kind, True])


@pytest.mark.parametrize(("kind", "adapter"), RUNS)
@pytest.mark.turns(2)
def test_losses_on_a_pipeline(kind: str, adapter: bool, stock: Any, base: str) -> None:
    config, processes, dp = BACKENDS["pp"]
    folder = f"{base}/pp-{kind}-{adapter}"
    found = spawn(jobs.with_trl, processes, kind, folder, config, dp, adapter=adapter, timeout=220)
    assert_same(found, stock[kind, adapter])


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_pipeline_that_is_to_cut_pairs_refuses(kind: str, base: str) -> None:
    config, processes, dp = BACKENDS["pp"]
    config = {**config, "megatron.num_micro_batches": 2}
    with pytest.raises(RankFailedError, match="cannot be computed on one micro-batch at a time"):
        spawn(jobs.with_trl, processes, kind, f"{base}/pairs-{kind}", config, dp, max_steps=1, timeout=120)


@pytest.fixture(scope="module")
def spoken(base: str) -> Any:
    return spawn(jobs.generating, 1, "grpo", f"{base}/spoken", timeout=220)[0]


@pytest.mark.parametrize("name", PLACES)
def test_completions_that_the_model_generates(name: str, spoken: Any, base: str) -> None:
    """Without chance they are those of one process; with it, ranks differ, end at different times, and agree on all."""
    said = spoken[0]
    assert len({len(one.split()) for one in said}) > 1, "they end at different times"
    ranks = run(jobs.generating, "grpo", name, f"{base}/generating")
    first, sampled, logs, _ = ranks[0]
    assert first == said
    assert len(set(sampled)) > 3, "ranks and rows draw different numbers"
    assert all(math.isfinite(one) for numbers in logs.values() for one in numbers)
    assert ranks[0][3] > 0, "it trains"
    for rank in ranks[1:]:
        assert rank[:3] == ranks[0][:3]
