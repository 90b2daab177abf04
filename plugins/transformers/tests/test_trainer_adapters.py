"""LoRA under every backend: the losses of stock Trainer on one process, and a resume that loads the adapter alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_jobs as jobs
from safetensors.torch import load_file
from test_trainer_backends import BACKENDS, close, slug

from drivetrain_testing import spawn

# test_trainer_backends.py shows Trainer itself under every backend.
pytestmark = pytest.mark.slow

if any(find_spec(name) is None for name in ("accelerate", "transformers", "peft")):
    pytest.skip("Transformers, Accelerate and PEFT are not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return spawn(jobs.stock, 1, str(tmp_path_factory.mktemp("stock")), jobs.lora, timeout=60, **jobs.WINDOWS)[0]


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.turns(2)
def test_lora(name: str, stock: Any, tmp_path: Path) -> None:
    if name.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    config, processes, dp = BACKENDS[name]
    folder = f"{tmp_path}/{slug(name)}"
    results = spawn(jobs.adapters, processes, config, folder, dp, timeout=120)
    assert stock[0]["loss"][-1] < stock[0]["loss"][0] - 0.05, "it trains"
    for rank in results:
        for run in rank.values():
            for key in ("loss", "grad_norm", "learning_rate"):
                assert close(run[0][key], stock[0][key]), key
    final = results[0]["resumed"][1]
    assert all(close(final[key], tensor, 1e-5) for key, tensor in stock[1].items())
    checkpoint = Path(folder, "plain", "checkpoint-3")
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "model.safetensors").exists()
    state = sum(each.stat().st_size for each in (checkpoint / "drivetrain").rglob("*.safetensors"))
    whole = sum(tensor.numel() * tensor.element_size() for tensor in stock[1].values())
    assert state < whole, "the weights that do not train are not in it"


@pytest.fixture(scope="module")
def stock_with_head(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("head"))
    return spawn(jobs.stock, 1, folder, jobs.lora_and_head, timeout=90, **jobs.WINDOWS)[0]


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.turns(2)
def test_modules_to_save(name: str, stock_with_head: Any, tmp_path: Path) -> None:
    """What PEFT trains whole beside the adapter is in its file, whatever engine shards it, and is resumed from it."""
    if name.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    config, processes, dp = BACKENDS[name]
    expected, weights = stock_with_head
    for rank in spawn(jobs.adapters, processes, config, str(tmp_path), dp, jobs.lora_and_head, timeout=180):
        for run in rank.values():
            for key in ("loss", "grad_norm", "learning_rate"):
                assert close(run[0][key], expected[key]), key
    # PEFT's names: base_model.model.model.embed_tokens.weight of ....embed_tokens.modules_to_save.default.weight
    saved = load_file(tmp_path / "plain" / "checkpoint-6" / "adapter_model.safetensors")
    whole = {name: one for name, one in weights.items() if ".modules_to_save.default." in name}
    assert len(whole) == 2
    for key, tensor in whole.items():
        assert close(saved[key.replace("modules_to_save.default.", "")], tensor, 1e-5), key


def test_the_adapter_is_what_peft_loads(stock: Any, tmp_path: Path) -> None:
    spawn(jobs.adapters, 1, {"distributed_type": "single"}, str(tmp_path), 1, timeout=60)
    loaded = spawn(jobs.loaded_adapter, 1, str(tmp_path / "plain" / "checkpoint-6"), timeout=60)[0]
    assert loaded.keys() == stock[1].keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in stock[1].items())
