"""What guides tell to call without an ``if`` works on every rank, and is done once."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Accelerator, tqdm
from drivetrain.errors import UsageError
from drivetrain.tracking import GeneralTracker, register_tracker_class
from drivetrain_testing import spawn


class Recording(GeneralTracker):
    """A tracker with a method of its own, whose library's object has one too; both write a line."""

    name = "recording"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        self.path = Path(logging_dir) / f"{run_name}.txt"
        self.tracker = self
        super().__init__()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.log_artifact(f"{step} {values}")

    def log_artifact(self, text: str) -> str:
        with self.path.open("a") as file:
            file.write(f"{text}\n")
        return text


def script(folder: str) -> dict[str, Any]:
    """The calls of an ordinary script, none behind ``if accelerator.is_main_process:``; what this rank has of them."""
    register_tracker_class(Recording)
    shown, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
        accelerator = Accelerator(cpu=True, log_with="recording", project_dir=folder)
        accelerator.init_trackers("run")
        accelerator.print("ready", 1, sep="-")
        bar = tqdm(total=3, desc="steps", mininterval=0)
        steps = 0
        while bar.n < bar.total:  # ranks whose bar does not count would never stop
            bar.update()
            bar.set_postfix(loss=0.5)
            accelerator.log({"loss": 0.5}, step=steps)
            steps += 1
            assert steps < 10
        seen = list(tqdm(range(4), desc="batches", mininterval=0))
        bar.close()
        tracker = accelerator.get_tracker("recording")
        tracker.log_artifact("of the tracker")
        accelerator.get_tracker("recording", unwrap=True).log_artifact("of the library")
        for one in accelerator.trackers:
            one.log_artifact("of each")
        accelerator.save({"w": torch.full((2,), float(accelerator.process_index))}, Path(folder) / "w.pt")
        accelerator.save({"w": torch.ones(2)}, Path(folder) / "w.safetensors", safe_serialization=True)
        accelerator.wait_for_everyone()
        saved = torch.load(Path(folder) / "w.pt")["w"].tolist()
        with pytest.raises(UsageError, match="this run has no tracker 'wandb'"):
            accelerator.get_tracker("wandb")
        accelerator.end_training()
    about = (bar.n, bar.total, bar.desc, bar.postfix, bar.unit, bar.format_dict["n"], bar.format_dict["elapsed"] >= 0)
    return {
        "steps": steps,
        "seen": seen,
        "bar": about,
        "shown": shown.getvalue(),
        "bars": errors.getvalue(),
        "saved": saved,
    }


def test_every_rank_may_call_what_only_the_main_process_does(tmp_path: Path) -> None:
    main, other = spawn(script, 2, str(tmp_path))
    assert main["shown"] == "ready-1\n"
    assert "3/3" in main["bars"]
    assert "4/4" in main["bars"]
    assert other.pop("shown") == other.pop("bars") == ""
    assert main["bar"] == (3, 3, "steps", "loss=0.5", "it", 3, True)
    assert other == {key: main[key] for key in other}
    assert main["saved"] == [0.0, 0.0]
    assert (tmp_path / "w.safetensors").is_file()
    steps = [f"{step} {{'loss': 0.5}}" for step in range(3)]
    artifacts = ["of the tracker", "of the library", "of each"]
    assert (tmp_path / "run.txt").read_text().splitlines() == [*steps, *artifacts]
