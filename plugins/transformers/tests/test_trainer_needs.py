"""What Transformers' Trainer asks of the core and of the backends, each by a test of that name.

What has its own home is tested there too: orders in ``core/tests/data``, configuration files in ``core/tests/cli``,
names in ``core/tests/compat``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_jobs
import trainer_needs_jobs as jobs
from test_trainer_backends import BACKENDS
from torch.utils.data import DataLoader

from drivetrain import (
    Accelerator,
    AcceleratorState,
    DataLoaderConfiguration,
    DistributedType,
    init_empty_weights,
    load_config,
)
from drivetrain_testing import RankFailedError, spawn

if find_spec("accelerate") is None or find_spec("transformers") is None:
    pytest.skip("Transformers and Accelerate are not installed", allow_module_level=True)

TOLERANCE = 2e-6
"""Losses near 2 in float32, of which two ranks add the same numbers in another order."""

PLACES = [name for name in BACKENDS if name not in ("single", "ddp of 3")]


def on(name: str, job: Any, *given: Any, **named: Any) -> list[Any]:
    """What each rank of a backend finds."""
    if name.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    config, processes, dp = BACKENDS[name]
    return spawn(job, processes, config, dp, *given, timeout=240, **named)


def assert_losses(found: list[Any], expected: list[float]) -> None:
    assert len(expected) == 6
    for rank in found:
        assert rank == pytest.approx(expected, abs=TOLERANCE)


# ---- 1. gather_for_metrics of a loss that is repeated for its rows


def repeated(config: dict[str, Any], dp: int, rows: int) -> list[float]:
    run = jobs.begun(config)
    found: list[float] = []
    for batch in run.prepare(DataLoader(torch.arange(float(rows)), batch_size=4)):
        found += run.gather_for_metrics(batch.mean().repeat(4)).tolist()
    run.end_training()
    return found


@pytest.mark.parametrize("name", ["single", "ddp", "ddp of 3", "tp"])
@pytest.mark.gate("single", "ddp of 3")
def test_a_repeated_loss_is_cut_where_the_last_batch_is_short(name: str) -> None:
    """As the Trainer's evaluation and ``run_clm_no_trainer`` write it; 13 and 26 samples in batches of 4."""
    for rows in (13, 26):
        for found in on(name, repeated, rows):
            assert len(found) == rows
            assert sum(found) == pytest.approx(sum(range(rows)))


# ---- 2. an empty parameter group


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.gate("fsdp", "zero3", "pp")
def test_a_parameter_group_that_is_empty(name: str) -> None:
    """The Trainer makes a group without decay, which is empty for an adapter; and so do scripts."""
    if name.startswith("zero"):
        with pytest.raises(RankFailedError, match=r"parameter group 1 of AdamW holds no trained parameter.*if group\["):
            on(name, jobs.empty_group)
        return
    found = on(name, jobs.empty_group)
    assert_losses([losses for losses, _ in found], jobs.plain(decayed=True))
    assert all(counts == [2, 2] for _, counts in found)


# ---- 3. a model that is prepared twice


@pytest.mark.parametrize("name", [*PLACES, "ddp of 3"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.gate("True-fsdp", "*-zero3", "False-pp", "False-ddp of 3")
def test_a_model_is_evaluated_and_then_trained(name: str, late: bool) -> None:
    """Prepared with ``evaluation_mode=True``, then with its optimizer: its gradients are averaged."""
    if name == "zero3":
        with pytest.raises(RankFailedError, match="Prepare a model together with an optimizer"):
            on(name, jobs.evaluated_then_trained, late=late)
        return
    assert_losses(on(name, jobs.evaluated_then_trained, late=late), jobs.plain())


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.gate("ddp", "zero3")
def test_a_model_is_freed_and_prepared_again(name: str) -> None:
    """What cannot be made whole is refused in words."""
    if name in ("ddp", "tp"):
        assert_losses(on(name, jobs.freed_then_trained), jobs.plain())
        return
    with pytest.raises(RankFailedError, match="Prepare a model once, together with its optimizer"):
        on(name, jobs.freed_then_trained)


# ---- 4. loaders of evaluations in checkpoints


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
@pytest.mark.gate("fsdp")
def test_loaders_that_each_evaluation_prepares_do_not_count(name: str, tmp_path: Path) -> None:
    for differences in on(name, jobs.loaders_of_each_epoch, str(tmp_path)):
        assert len(differences) == 6
        assert max(differences) <= TOLERANCE


# ---- 5. save_model, and the way back into a prepared model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.gate("fsdp-True", "zero3-False", "tp-True", "pp-False")
def test_a_prepared_model_loads_what_save_model_wrote(name: str, tied: bool, tmp_path: Path) -> None:
    for before, after in on(name, jobs.weights_loaded, str(tmp_path / "model"), tied=tied):
        assert before > 1e-3
        assert after == 0


# ---- 6. generate() of an encoder and a decoder


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero3", "tp"])
@pytest.mark.gate("fsdp", "tp")
def test_generate_of_an_encoder_and_decoder(name: str) -> None:
    if name.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    config, processes, _ = BACKENDS[name]
    expected = jobs.t5_generates({})
    assert len(set(expected[0].tolist())) == 6, "each word is another one"
    for found in spawn(jobs.t5_generates, processes, config, timeout=240):
        assert torch.equal(found, expected)


# ---- 7. PEFT under tensor parallelism


@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
def test_an_adapter_is_cut_by_the_plan_of_its_model() -> None:
    """Its losses are in test_trainer_adapters.py and in the table; here, that the base is cut as it is without."""
    config = BACKENDS["tp"][0]
    (plain, _), (adapted, _) = (spawn(jobs.of_peft, 2, config, adapter=one, timeout=240) for one in (False, True))
    assert len(plain) > 10
    # Of Transformers 5.20 the table of words is in no plan, so that only a derived one cuts it.
    assert adapted == plain or sorted({*adapted} - {"model.embed_tokens.weight"}) == sorted(plain)


# ---- 8. to 11.


def command(folder: Path, *arguments: str, **environment: str) -> str:
    """What the command line prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DRIVETRAIN_", "OMP_"))}
    code = "from drivetrain.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env={**kept, **environment}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_configuration_that_nobody_named_is_found(tmp_path: Path) -> None:
    """The order of places, and what is said of them, are in core/tests/cli/test_cli_files.py."""
    place = tmp_path / "hub" / "accelerate" / "default_config.yaml"
    place.parent.mkdir(parents=True)
    place.write_text("distributed_type: NO\ngradient_accumulation_steps: 7\n")
    where = {"HF_HOME": str(tmp_path / "hub"), "XDG_CONFIG_HOME": str(tmp_path / "settings")}
    shown = command(tmp_path, "config", "show", **where)
    (line,) = [line for line in shown.splitlines() if "gradient_accumulation_steps" in line]
    assert line.split()[1] == "7"


@pytest.mark.slow  # It starts a run of its own.
def test_the_command_test_takes_a_file_about_the_users_model(tmp_path: Path) -> None:
    """Its own model has no ``LlamaDecoderLayer``, which the file of the user's run names."""
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: fsdp\nuse_cpu: true\nnum_processes: 2\nfsdp:\n  transformer_layer_cls: LlamaDecoderLayer\n"
    )
    assert "Everything works." in command(tmp_path, "test", "--config", "fsdp.yaml")


def test_the_order_of_a_shuffled_loader_is_torchs() -> None:
    """More of it in core/tests/data/test_data_torch_order.py."""

    def loader() -> Any:
        return DataLoader(torch.arange(20), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))

    run = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(), config=load_config(overrides={}, environ={})
    )  # fmt: skip
    expected, prepared = loader(), run.prepare(loader())
    for _ in range(2):
        assert [each.tolist() for each in prepared] == [each.tolist() for each in expected]
    run.end_training()


def test_names_that_libraries_ask_for() -> None:
    assert {"fsdp", "ddp"} <= {str(one) for one in DistributedType}
    assert DistributedType("FSDP") == "fsdp"
    AcceleratorState._reset_state()  # a Trainer of another test never ends its accelerator, which may be alive
    with init_empty_weights():
        assert torch.nn.Linear(2, 2).weight.is_meta


def test_loaders_are_as_the_configuration_says_where_arguments_say_nothing(tmp_path: Path) -> None:
    """Two processes share batches of 4, so that their losses are those of one process with batches of 4."""
    shared = {"distributed_type": "ddp", "dataloader": {"split_batches": True}}
    one = spawn(trainer_jobs.ours, 1, {"distributed_type": "single"}, str(tmp_path / "one"), timeout=240)[0]
    two = spawn(trainer_jobs.ours, 2, shared, str(tmp_path / "two"), timeout=240)[0]
    assert one[0]["loss"] == pytest.approx(two[0]["loss"], rel=1e-5)
