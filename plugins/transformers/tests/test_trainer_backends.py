"""Trainer under every backend: losses, norms and weights of stock Trainer on one process; checkpoints that travel."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_jobs as jobs

from drivetrain_testing import spawn

if find_spec("accelerate") is None or find_spec("transformers") is None:
    pytest.skip("Transformers and Accelerate are not installed", allow_module_level=True)

TOLERANCE = 2e-6
"""Losses near 4 in float32, of which several ranks add the same numbers in another order: at most four last digits."""

BACKENDS: dict[str, tuple[dict[str, Any], int, int]] = {
    # name: configuration, processes, data-parallel processes
    "single": ({"distributed_type": "single"}, 1, 1),
    "ddp": ({"distributed_type": "ddp"}, 2, 2),
    "ddp of 3": ({"distributed_type": "ddp"}, 3, 3),
    "fsdp": ({"distributed_type": "fsdp"}, 2, 2),
    "zero2": ({"distributed_type": "deepspeed", "deepspeed.zero_stage": 2}, 2, 2),
    "zero3": ({"distributed_type": "deepspeed", "deepspeed.zero_stage": 3}, 2, 2),
    "tp": ({"distributed_type": "megatron", "mesh.tp": 2}, 2, 1),
    "pp": ({"distributed_type": "megatron", "mesh.pp": 2}, 2, 1),
}
JOURNEYS = {
    "ddp": ["single", "fsdp"], "single": ["ddp of 3"], "tp": ["fsdp"], "pp": ["zero3"], "zero2": ["tp"],
    "fsdp": ["pp"], "ddp of 3": ["zero2"], "zero3": ["ddp"],
}  # fmt: skip
"""Where each backend resumes from."""


def slug(name: str) -> str:
    return name.replace(" ", "-")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def whole(folder: str) -> dict[str, Any]:
    return spawn(jobs.whole, 1, folder, timeout=120)[0]


@pytest.fixture(scope="module")
def found(folder: str) -> dict[str, list[dict[str, Any]]]:
    return {}


@pytest.fixture(params=list(BACKENDS))
def of_backend(request: Any, folder: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each rank of one backend found."""
    return run(request.param, folder, found)


def run(name: str, folder: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    if name not in found:
        if name.startswith("zero") and find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed")
        config, processes, dp = BACKENDS[name]
        found[name] = spawn(jobs.backend, processes, config, folder, dp, slug(name), timeout=240)
    return found[name]


def close(one: Any, other: Any, tolerance: float = TOLERANCE) -> bool:
    # Norms of a window of one sample are nearly 5, and the last digits of the parameters are in them.
    return bool(torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=5e-6, atol=tolerance))


def assert_same(run: Any, reference: Any) -> None:
    for key in ("loss", "grad_norm", "learning_rate"):
        assert len(run[0][key]) == len(reference[0][key]) == 6
        assert close(run[0][key], reference[0][key]), key
    if run[1]:  # Where parameters are sharded the main process has them.
        assert run[1].keys() == reference[1].keys()
        assert all(close(run[1][name], tensor, 1e-5) for name, tensor in reference[1].items())


@pytest.mark.gate("single", "ddp", "fsdp", "zero3", "tp", "pp")
def test_losses_norms_and_weights(of_backend: Any, whole: Any) -> None:
    for rank in of_backend:
        assert_same(rank["plain"], whole["plain"])
    assert of_backend[0]["plain"][1], "the main process has the weights"


@pytest.mark.gate("single", "ddp", "fsdp", "zero3", "tp", "pp")
def test_a_last_batch_that_ranks_share_unevenly(of_backend: Any, whole: Any) -> None:
    for rank in of_backend:
        assert_same(rank["uneven"], whole["uneven"])


@pytest.mark.gate("single", "ddp", "fsdp", "zero3", "tp", "pp")
def test_evaluate_before_train(of_backend: Any, whole: Any) -> None:
    for rank in of_backend:
        assert close(rank["evaluated first"][2], whole["loss"])
        assert_same(rank["evaluated first"], whole["plain"])


@pytest.mark.gate("single", "ddp", "fsdp", "zero3", "tp", "pp")
def test_eval_loss_is_the_mean_over_labels(of_backend: Any, folder: str, found: Any) -> None:
    expected = run("single", folder, found)[0]["plain"][0]["eval_loss"]
    for rank in of_backend:
        assert len(rank["plain"][0]["eval_loss"]) == 3
        assert close(rank["plain"][0]["eval_loss"], expected)


@pytest.mark.gate("single", "ddp", "fsdp", "zero3", "tp", "pp")
def test_each_sample_is_predicted_once(of_backend: Any, whole: Any) -> None:
    for rank in of_backend:
        logits, labels, loss = rank["predictions"]
        assert torch.equal(labels, whole["labels"])
        assert close(logits, whole["logits"])
        assert close(loss, whole["loss"])


@pytest.mark.parametrize("kind", ["best", "best only"])
@pytest.mark.gate("single-best", "ddp-best", "fsdp-best", "zero3-best", "tp-best", "pp-best")
def test_best_model_is_loaded(of_backend: Any, kind: str) -> None:
    for rank in of_backend:
        expected, last, again = rank[kind]
        assert last > expected + 0.01, "the last model is not the best"
        assert close(again, expected)


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.gate("ddp", "fsdp", "zero3", "tp", "pp")
def test_resumes_what_another_backend_saved(name: str, folder: str, found: Any) -> None:
    expected = run("single", folder, found)[0]["shuffled"]
    config, processes, dp = BACKENDS[name]
    paths = {}
    for origin in JOURNEYS[name]:
        run(origin, folder, found)
        paths[slug(origin)] = f"{folder}/{slug(origin)}/run/checkpoint-3"
    results = spawn(jobs.resumed, processes, config, f"{folder}/{slug(name)}/resumed", dp, paths, timeout=120)
    for rank in results:
        for result in rank.values():
            assert_same(result, expected)


@pytest.fixture(scope="module")
def stock_tied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return spawn(jobs.stock, 1, str(tmp_path_factory.mktemp("tied")), jobs.tied, timeout=60, **jobs.WINDOWS)[0]


@pytest.mark.parametrize("name", ["fsdp", "zero3", "tp", "pp"])
@pytest.mark.gate("tp")
def test_tied_weights(name: str, stock_tied: Any, tmp_path: Path) -> None:
    if name.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    config, processes, dp = BACKENDS[name]
    for run, again, read in spawn(jobs.tied_run, processes, config, str(tmp_path), dp, timeout=90):
        assert_same(run, stock_tied)
        assert_same(again, stock_tied)
        assert all(close(read[key], tensor, 1e-5) for key, tensor in stock_tied[1].items())


@pytest.mark.gate("single", "ddp", "fsdp", "zero3", "tp", "pp")
def test_a_checkpoint_holds_transformers_own_files(of_backend: Any, folder: str, request: Any) -> None:
    name = request.node.callspec.params["of_backend"]
    checkpoint = Path(folder, slug(name), "run", "checkpoint-3")
    files = {each.name for each in checkpoint.iterdir()}
    own = {"config.json", "generation_config.json", "model.safetensors", "scheduler.pt", "trainer_state.json"}
    assert files == own | {"training_args.bin", "drivetrain", "drivetrain_trainer.json"}
