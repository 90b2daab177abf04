"""What the examples tell the user while they train: a progress bar, `metrics.jsonl`, and a picture of the loss.

Only the main process writes. On a terminal there is a bar; elsewhere (a log file, a batch job) one plain line an epoch.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable

    from drivetrain import Accelerator


class Progress:
    """Where the run is. Registered with `accelerator.register_for_checkpointing`, so a resumed run knows it as well."""

    def __init__(self, planned: int) -> None:
        self.epoch = 0
        self.update = 0
        self.planned = planned

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "update": self.update, "planned": self.planned}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.update, self.planned = state["epoch"], state["update"], state["planned"]

    def check(self, updates: int) -> None:
        """End the program where more updates are asked for than the schedule of the run that was loaded has."""
        if updates > self.planned:
            raise SystemExit(
                f"The run was planned for {self.planned} updates, after which its learning rate is 0, and {updates} "
                "are asked for now. For a longer run begin a new one: the same command without --resume."
            )


def fresh_directory(accelerator: Accelerator, directory: Path) -> None:
    """Make an empty directory for a new run; an earlier run in it is moved aside, not lost. Collective."""
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            if directory.exists():
                number = 1
                while (aside := directory.with_name(f"{directory.name}-{number}")).exists():
                    number += 1
                directory.rename(aside)
                print(f"The run that was in {directory} is now in {aside}.")
            directory.mkdir(parents=True)


class Report:
    """The run as the user sees it.

    Args:
        accelerator: tells which process is the main one.
        directory: gets `metrics.jsonl` and `loss.png`.
        total: number of optimizer updates in the whole run.
        done: updates that an earlier run did; lines that it wrote after its last checkpoint are dropped.
    """

    def __init__(self, accelerator: Accelerator, directory: Path, total: int, done: int = 0) -> None:
        self.enabled = accelerator.is_main_process
        self.file = directory / "metrics.jsonl"
        self.picture = directory / "loss.png"
        self.stack = ExitStack()
        self.advance: Callable[[int, str], None] = lambda _update, _text: None
        if not self.enabled:
            return
        kept = [line for line in self.read() if line["update"] <= done]
        self.file.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        if sys.stdout.isatty():
            self._show_bar(total, done)

    def _show_bar(self, total: int, done: int) -> None:
        bar = self.stack.enter_context(tqdm(total=total, initial=done, desc="training", leave=False))

        def advance(update: int, text: str) -> None:
            bar.set_description(text, refresh=False)
            bar.update(update - bar.n)

        self.advance = advance

    def read(self) -> list[dict[str, Any]]:
        """Every line of `metrics.jsonl` so far."""
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines()]

    def log(self, update: int, **values: float) -> None:
        """Append one line to `metrics.jsonl` and move the bar."""
        if self.enabled:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"update": update, **values}) + "\n")
            self.advance(update, "  ".join(f"{name} {value:.3g}" for name, value in values.items()))

    def close(self, title: str, quality: str) -> None:
        """End the bar and draw the loss, and beside it the measure named `quality`, over the updates."""
        self.stack.close()
        if not self.enabled:
            return
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot as plt

        lines = self.read()
        figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        for axes, name, colour in zip(panels, ("loss", quality), ("#0072b2", "#d55e00"), strict=True):
            updates, values = zip(*((line["update"], line[name]) for line in lines if name in line), strict=True)
            axes.plot(updates, values, color=colour, marker="o" if name == quality else None, markersize=4)
            axes.annotate(f"{values[-1]:.3g}", (updates[-1], values[-1]), xytext=(4, 0), textcoords="offset points")
            if 0 < 100 * min(values) < max(values):
                axes.set_yscale("log")  # else most of the run would lie on the axis
            else:
                axes.set_ylim(0, 1.05 if max(values) <= 1 else None)
            axes.set(title=name.replace("_", " "), xlabel="optimizer updates")
            axes.grid(color="0.9")
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title)
        figure.savefig(self.picture, dpi=120)
        plt.close(figure)
