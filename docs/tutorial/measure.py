"""Run the examples under every backend of the tutorial, and draw what it shows.

    make pictures

takes a few minutes on two cores. What pictures and tables say is in `pictures/runs.json`, which `make docs` reads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"
EXAMPLES = HERE.parents[1] / "examples"
HOW_TO = HERE.parent / "how-to"

COMMON = "num_processes: 2\nuse_cpu: true\ndataloader: {split_batches: true}\n"
PIPELINE = "megatron:\n  pipeline_parallel_size: 2\n  num_micro_batches: 4\n"
CONFIGURATIONS = {
    "single": COMMON.replace("num_processes: 2", "num_processes: 1") + "distributed_type: single\n",
    "ddp": COMMON + "distributed_type: ddp\n",
    "fsdp": COMMON + "distributed_type: fsdp\n",
    "deepspeed": COMMON + "distributed_type: deepspeed\n",
    "megatron": COMMON + "distributed_type: megatron\n" + PIPELINE,
}
"""The batch of the script is the global one, so that the same command trains on the same numbers everywhere."""

STYLES = {
    "single": {"color": "0.75", "linewidth": 9},
    "ddp": {"color": "#0072b2", "linewidth": 6},
    "fsdp": {"color": "#e69f00", "linewidth": 3.5},
    "deepspeed": {"color": "#56b4e9", "linewidth": 1.8},
    "megatron": {"color": "black", "linewidth": 0.8},
}
"""Thick lines below thin ones, so that curves that lie on each other are all seen, in colours that people who tell red
from green badly can tell apart (Okabe and Ito).
"""

MARKS = {"ddp": "o", "fsdp": "s", "deepspeed": "^", "megatron": "x"}
"""Of points; all but the last hollow, so that one behind another is seen."""


def launch(name: str, folder: Path, script: Path, *arguments: str) -> None:
    """Run one script under one backend."""
    file = folder / f"{name}.yaml"
    file.write_text(CONFIGURATIONS[name], encoding="utf-8")
    program = str(Path(sys.executable).parent / "drivetrain")
    command = [program, "launch", "--config", str(file), str(script), *arguments]
    # Two ranks on few cores: each with one thread.
    subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


def digits(name: str, folder: Path) -> dict[str, Any]:
    """Three epochs of the digits: the loss after each update, and the accuracy at the end."""
    output = folder / name
    arguments = ("--epochs", "3", "--batch_size", "32", "--output", str(output))
    launch(name, folder, EXAMPLES / "digits.py", *arguments)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "accuracy": [line["accuracy"] for line in lines if "accuracy" in line][-1],
    }


def memory(name: str, folder: Path) -> list[int]:
    """A few updates of the language model: the bytes of all tensors that each rank holds, by rank."""
    launch(name, folder, HERE / "watched.py", str(EXAMPLES), str(folder), str(PICTURES))
    return [int(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(f"{name}-rank-*.txt"))]


def draw_losses(runs: dict[str, Any], path: Path) -> None:
    """Every loss curve over the others, and beside them how far each is from the one of a single process."""
    figure, (left, right) = _figure(2)
    for name, run in runs.items():
        updates = range(1, len(run["losses"]) + 1)
        left.plot(updates, run["losses"], label=name, **STYLES[name])
        if name != "single":
            apart = [abs(mine - other) for mine, other in zip(run["losses"], runs["single"]["losses"], strict=True)]
            # Points, since a difference of nothing has no place on a logarithmic axis.
            points = [value or math.nan for value in apart]
            look = {"color": STYLES[name]["color"], "marker": MARKS[name], "markersize": 4, "fillstyle": "none"}
            right.plot(updates, points, label=name, linestyle="none", **look)
        else:
            right.plot(updates, run["losses"], label="the loss itself", color=STYLES[name]["color"], linewidth=2)
    left.set(xlabel="optimizer updates", ylabel="loss", title="Loss on the digits", ylim=(0, None))
    right.set(xlabel="optimizer updates", ylabel="difference of the loss", yscale="log", ylim=(1e-9, 10))
    right.set(title="Distance from one process")
    left.legend()
    right.legend(loc="center right", bbox_to_anchor=(1, 0.52))
    _save(figure, path)


def draw_memory(runs: dict[str, Any], path: Path) -> None:
    """One bar for each rank."""
    figure, (axes,) = _figure(1)
    labels, position = [], 0.0
    for name, run in runs.items():
        for rank, held in enumerate(run["memory"]):
            mebibytes = held / 2**20
            axes.barh(position, mebibytes, color=STYLES[name]["color"])
            axes.text(mebibytes, position, f" {mebibytes:.0f}", va="center")
            labels.append((position, f"{name}, rank {rank}"))
            position += 1
        position += 0.6
    axes.set_yticks(*zip(*labels, strict=True))
    axes.invert_yaxis()
    axes.set(title="What a rank of the language model holds")
    axes.set_xlabel("MiB of tensors after an update, before zero_grad")
    _save(figure, path)


UNITS = {"GiB": 1.0, "MiB": 2.0**-10}
PARTS = {
    "parameters": "#0072b2",
    "gradients": "#d55e00",
    "optimizer": "#009e73",
    "activations": "#e69f00",
    "other": "#bdbdbd",
}
"""Of the bars, in the colours of `drivetrain plan choose --plot`."""
MOST = 0.8 * 40e9 / 2**30
"""GiB of a card of 40 GB that a plan may take."""


def draw_layouts(page: Path, path: Path) -> None:
    """One bar for each layout of the table that `drivetrain plan memory` prints on a page, by what it consists of."""
    _, found, rest = page.read_text(encoding="utf-8").partition("```text\nlayout ")
    if not found:
        raise ValueError(f"{page} has no table of layouts")
    head, *rows = (re.split(r"  +", f"layout {line}".strip()) for line in rest.partition("```")[0].splitlines())
    figure, (axes,) = _figure(1)
    for position, row in enumerate(each for each in rows if len(each) == len(head)):
        cells = dict(zip(head, row, strict=True))
        begin = 0.0
        for part, colour in PARTS.items():
            number, unit = cells[part].split()
            size = float(number) * UNITS[unit]
            axes.barh(position, size, left=begin, color=colour, label=part if position == 0 else None)
            begin += size
        axes.text(begin, position, f" {cells['all'].split()[0]}", va="center")
    names = [row[0].removeprefix("layout ") for row in rows if len(row) == len(head)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(MOST, color="black", linestyle="--", linewidth=1, label=f"80 % of a card, {MOST:.1f} GiB")
    axes.set(title="What a rank holds: a Llama of 1.1 billion parameters on eight cards", xlabel="GiB on each rank")
    axes.margins(x=0.08)
    axes.legend(loc="lower right", framealpha=1)
    _save(figure, path)


def _figure(columns: int) -> Any:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(9, 4), layout="constrained", squeeze=False)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> None:
    # No version of the drawing library in the file: the same numbers give the same picture.
    figure.savefig(path, dpi=120, metadata={"Software": None})


def run() -> dict[str, Any]:
    """Train under every backend, and keep the numbers."""
    runs = {}
    with tempfile.TemporaryDirectory(prefix="drivetrain-tutorial-") as name:
        for backend in CONFIGURATIONS:
            sys.stdout.write(f"== {backend}\n")
            sys.stdout.flush()
            runs[backend] = {**digits(backend, Path(name)), "memory": memory(backend, Path(name))}
    return runs


def main() -> None:
    """Run, unless only the drawing changed; draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only_draw", action="store_true", help="from the numbers of the last run")
    numbers = PICTURES / "runs.json"
    runs = json.loads(numbers.read_text(encoding="utf-8")) if parser.parse_args().only_draw else run()
    lines = ",\n".join(f'"{name}": {json.dumps(run)}' for name, run in runs.items())
    numbers.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    draw_losses(runs, PICTURES / "losses.png")
    draw_memory(runs, PICTURES / "memory.png")
    draw_layouts(HOW_TO / "which-backend.md", HOW_TO / "pictures/layouts.png")


if __name__ == "__main__":
    main()
