"""A user's model trains as in plain torch under every installed backend, and its cases catch wrong backends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import user_models
import wrong_backends

from drivetrain.errors import UsageError
from drivetrain.registry import get_registry
from drivetrain_testing import RankFailedError, user_model
from drivetrain_testing.kit import Kit, passed_together, run_case, user_model_cases
from drivetrain_testing.requirements import BaseRequirements

# Programs beside the library.
pytestmark = pytest.mark.slow


def places():
    for report in get_registry().reports():
        can = report.capabilities
        if report.ready and can is not None and (not can.devices or "cpu" in can.devices):
            yield report.name, 2 if can.multi_process else 1


@pytest.mark.parametrize("model", ["plain", "llama"])
@pytest.mark.parametrize("place", list(places()), ids=lambda place: f"{place[0]}-{place[1]}")
@pytest.mark.turns(2)
def test_brought_model_trains_as_in_plain_torch(place, model, tmp_path):
    if model == "llama":
        pytest.importorskip("transformers", reason="the model is one of Transformers")
    backend, world_size = place
    kits = {}
    for case in user_model_cases():
        (tmp_path / case).mkdir()
        kits[case] = Kit.plain(backend, tmp_path / case).with_model(f"user_models:{model}")
    passed = passed_together(kits, world_size, tmp_path)
    for case in kits.keys() - passed:  # for its report
        again = tmp_path / "again" / case
        again.mkdir(parents=True)
        run_case(case, Kit.plain(backend, again).with_model(f"user_models:{model}"), world_size)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        ("averagestwice", "follows_plain_torch"),
        ("forgetsworldsize", "explicit_step"),
        ("dropsmicrobatches", "windows_and_clipping"),
        ("clipsperrank", "windows_and_clipping"),
        ("forgetsmoments", "resumes"),
    ],
)
def test_a_wrong_backend_is_caught_by_a_brought_model(mistake, case, tmp_path):
    class Requirements(BaseRequirements):
        backend = mistake
        setup = "wrong_backends:register"
        model = "user_models:plain"

    assert mistake in wrong_backends.MISTAKES
    with pytest.raises(RankFailedError) as caught:
        run_case(f"brought.{case}", Kit.of(Requirements, 2, tmp_path), 2)
    assert isinstance(caught.value.cause, AssertionError), caught.value


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("random", "draws random numbers in forward"),
        ("without_loss", "holds no loss. Return"),
        ("nothing", r"returned NoneType, not \(model, dataset"),
        ("empty", "the dataset of user_models:empty is empty"),
        ("absent", "user_models:absent cannot be found"),
    ],
)
def test_a_model_that_cannot_be_compared_is_told(name, told):
    with pytest.raises(UsageError, match=told):
        user_model.check_deterministic(f"user_models:{name}")


def test_a_target_without_a_function_is_told():
    with pytest.raises(UsageError, match="'mymodule' names no function"):
        user_model.build("mymodule")


def test_the_command_line_needs_nothing_but_the_model(tmp_path):
    """In a folder with a module, as the documents say, without a test file or a conftest."""
    source = Path(user_models.__file__).read_text(encoding="utf-8")
    (tmp_path / "mymodule.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--drivetrain-model", "mymodule:plain"]
    done = subprocess.run(
        [*command, "-k", "single"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(user_model_cases())} passed" in done.stdout
