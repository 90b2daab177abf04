"""Compares the planner's order of layouts with the seconds of real steps on this machine.

Run it from the root of the repository as ``python -m benchmarks.planner_ranking``. The machine is measured first, as
``drivetrain plan measure`` does. Each layout that the planner offers for a model then trains in fresh processes on the
CPU, a few steps at a time; the layouts take turns, and the order turns round. A layout's seconds are its quickest
turn's median: work of others on the machine only adds to it.

- **chosen** is the planner's first; **lost** is how much longer its steps take than the quickest layout's.
- **tau** is Kendall's: 1 where all pairs of layouts are in the right order, -1 where none is.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain_planner.choosing import Candidate, choose, settings_of
from drivetrain_planner.machines import Machine
from drivetrain_planner.measuring import as_file, measure
from drivetrain_planner.requests import Asked, request
from drivetrain_testing import preload, spawn

WARM_UP = 3
"""Steps of a turn before the clock runs: the first makes the optimizer's state, DeepSpeed learns in the second."""

SECTIONS = {"deepspeed": {"reduce_bucket_size": 5_000_000}}
"""Keeps DeepSpeed's bucket small: its default of 2 GB would fill the CPU's memory."""

IMPORTS = {
    "transformers": [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "resnet", "vit")],
    "deepspeed": ["deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"],
}
"""Modules that ranks find imported."""


def gpt2() -> nn.Module:
    """4 layers of 192."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_positions=64, n_embd=192, n_layer=4, n_head=6, **ends))


def llama() -> nn.Module:
    """4 layers of 192 with a vocabulary of 8,000: half of the parameters are tables."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def vit() -> nn.Module:
    """4 layers of 192, and no table."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768, image_size=32, patch_size=4,
        num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config)


def resnet() -> nn.Module:
    """8 convolutions, whose activations are larger than their parameters."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config)


def tokens() -> dict[str, torch.Tensor]:
    """4 samples of 64."""
    ids = torch.arange(4 * 64).view(4, 64) * 7 % 2000
    return {"input_ids": ids, "labels": ids.clone()}


def images() -> dict[str, torch.Tensor]:
    """4 samples of 32 x 32, 65 places each."""
    return {"pixel_values": torch.ones(4, 3, 32, 32), "labels": torch.arange(4)}


def pictures() -> dict[str, torch.Tensor]:
    """8 samples of 96 x 96."""
    return {"pixel_values": torch.ones(8, 3, 96, 96), "labels": torch.arange(8)}


MODELS = {"gpt2": (gpt2, tokens), "llama": (llama, tokens), "vit": (vit, images), "resnet": (resnet, pictures)}


def timed(settings: dict[str, Any], model: str, steps: int) -> float:
    """Median seconds of an optimizer step. Runs on every rank.

    Args:
        settings: keys of a configuration.
        model: of ``MODELS``.
        steps: that are timed.
    """
    torch.set_num_threads(1)
    # Advice for each layout: that a mean over labels weighs by samples, of which all have as many here.
    logging.getLogger("drivetrain").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.yaml")
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        accelerator = Accelerator(config=str(path))
    make, batch = MODELS[model]
    network = make()
    network.train()
    micro_batch = batch()
    rows = len(micro_batch["labels"])
    samples = [{name: values[row] for name, values in micro_batch.items()} for row in range(rows)]
    # Each step reads a micro-batch for each process, whether they read samples of their own or the same ones.
    loader = DataLoader(samples * (accelerator.num_processes * (WARM_UP + steps)), batch_size=rows)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    taken, begun = [], time.perf_counter()
    for given in loader:
        with accelerator.accumulate(network):
            accelerator.backward(network(**given).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            taken.append(time.perf_counter() - begun)
            begun = time.perf_counter()
    accelerator.end_training()
    return median(taken[WARM_UP:])


def predicted(model: str, processes: int, machine: Machine) -> list[tuple[Candidate, dict[str, Any]]]:
    """Layouts that fit, the one to take first, with the configuration of each."""
    make, batch = (f"{__file__}:{one.__name__}" for one in MODELS[model])
    asked = request(Asked(model=make, batch=batch, processes=processes, sections=SECTIONS), machine)
    found = choose(asked, machine)
    for told in (*found.complaints, *(f"{each.estimate.title}: {each.verdict}" for each in found.rejected)):
        sys.stdout.write(f"  not compared: {told}\n")
    return [(each, settings_of(each, asked)) for each in found.fitting]


def kendall(first: list[float], second: list[float]) -> float:
    """Kendall's tau of two orders; ties of either count for neither side."""
    pairs = [(a - b) * (c - d) for (a, c), (b, d) in combinations(list(zip(first, second, strict=True)), 2)]
    return sum((each > 0) - (each < 0) for each in pairs) / max(1, len(pairs))


def compare(model: str, processes: int, machine: Machine, turns: int, steps: int) -> dict[str, Any]:
    """Seconds of each layout of a model, in the planner's order, printed too."""
    layouts = predicted(model, processes, machine)
    seconds: dict[str, list[float]] = {each.estimate.title: [] for each, _ in layouts}
    for turn in range(turns):
        for each, settings in layouts[:: -1 if turn % 2 else 1]:
            ranks = spawn(timed, processes, settings, model, steps, timeout=600)
            seconds[each.estimate.title].append(max(ranks))
    measured = [min(seconds[each.estimate.title]) for each, _ in layouts]
    best = min(measured)
    found: dict[str, Any] = {
        "model": model,
        "lost": measured[0] / best - 1,
        "tau": kendall([each.time for each, _ in layouts], measured),
        "layouts": [
            {"layout": each.estimate.title, "predicted": each.time, "parts": each.seconds, "measured": one}
            for (each, _), one in zip(layouts, measured, strict=True)
        ],
    }
    sys.stdout.write(f"{model} on {processes} processes: lost {found['lost']:.1%}, tau {found['tau']:+.2f}\n")
    for row in found["layouts"]:
        parts = ", ".join(f"{name} {1000 * value:.0f}" for name, value in row["parts"].items())
        mark = "*" if row["measured"] == best else " "
        sys.stdout.write(
            f"{mark} {row['layout']:34} {1000 * row['measured']:6.0f} ms measured "
            f"{1000 * row['predicted']:6.0f} ms predicted ({parts})\n"
        )
    sys.stdout.flush()
    return found


def tables(found: list[dict[str, Any]], processes: int) -> str:
    """A table for each model, in the planner's order; the quickest layout is marked."""
    told = []
    for each in found:
        best = min(row["measured"] for row in each["layouts"])
        told += [
            f"### {each['model']}, {processes} processes: {each['lost']:.1%} lost, tau {each['tau']:+.2f}",
            "",
            "| layout | predicted ms | measured ms | measured / predicted |",
            "|---|--:|--:|--:|",
        ]
        for row in each["layouts"]:
            mark = " (quickest)" if row["measured"] == best else ""
            predicted, measured = 1000 * row["predicted"], 1000 * row["measured"]
            told.append(f"| {row['layout']}{mark} | {predicted:.0f} | {measured:.0f} | {measured / predicted:.2f} |")
        told.append("")
    return "\n".join(told)


def main() -> None:
    """Compare the models, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2, help="of each layout")
    parser.add_argument("--steps", type=int, default=5, help="timed in a turn")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    parser.add_argument("--markdown", type=Path, help="a file for the tables")
    given = parser.parse_args()
    for library, modules in IMPORTS.items():
        if find_spec(library) is not None:
            preload(*modules, opens_accelerators=library == "deepspeed")
    machine = measure(given.processes, device_type="cpu")
    sys.stdout.write(f"this machine: {json.dumps(as_file(machine))}\n")
    found = [compare(each, given.processes, machine, given.turns, given.steps) for each in given.models]
    if given.json:
        given.json.write_text(json.dumps({"machine": as_file(machine), "models": found}, indent=1), encoding="utf-8")
    if given.markdown:
        given.markdown.write_text(tables(found, given.processes), encoding="utf-8")


if __name__ == "__main__":
    main()
