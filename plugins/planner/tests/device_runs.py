"""Models that were trained on an accelerator, and what the planner predicts of those runs.

    drivetrain launch --check_plan --config ROW.yaml plugins/planner/tests/device_runs.py MODEL

trains one for five steps and prints what the device held; rows of ``device_runs.json`` are written down from there,
with the sections of their configuration. The loop keeps no output, which :func:`estimate` takes into account.

    python plugins/planner/tests/device_runs.py

predicts all rows and writes ``device_memory.json``.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path

import torch

GIB = 2**30
ROWS = Path(__file__).with_name("device_runs.json")
RECORD = Path(__file__).with_name("device_memory.json")


def gpt2():
    """124 million parameters, with dropout and an activation function that is written as a power."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def vit():
    """ViT-Base."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig())


def tokens():
    """8 samples of 1,024."""
    ids = (torch.arange(8 * 1024) * 7 % 499).view(8, 1024)
    return {"input_ids": ids, "labels": ids.clone()}


def images():
    """32 samples of 224 x 224."""
    return {"pixel_values": torch.ones(32, 3, 224, 224), "labels": torch.arange(32) % 2}


MODELS = {"gpt2": (gpt2, tokens), "vit": (vit, images)}


def rows():
    """Of the file: ``model``, ``backend``, ``sections``, ``precision``, and GiB ``allocated`` and ``reserved``."""
    return json.loads(ROWS.read_text(encoding="utf-8"))["rows"]


def record():
    """Bytes of tensors by a row's name."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def name_of(row):
    """Model, layout and precision."""
    return f"{row['model']}; {row['layout']}; {row['precision']}"


def estimate(row):
    """What the planner says of this row's layout on one device."""
    from drivetrain.api.programs import policy_for
    from drivetrain_planner import PlanRequest
    from drivetrain_planner.choosing import GROUP
    from drivetrain_planner.optimizers import optimizer_costs
    from drivetrain_planner.tracing import Example, Tracer

    make, batch = MODELS[row["model"]]
    with torch.device("meta"):
        model = make()
    policy = policy_for(row["precision"])
    tracer = Tracer(model, Example((), batch(), None, kept=False), policy, "cuda")
    request = PlanRequest(
        model=model,
        world_size=1,
        ranks_per_node=1,
        device_type="cuda",
        precision=policy,
        micro_batch=len(next(iter(batch().values()))),
        global_batch=len(next(iter(batch().values()))),
        optimizer=optimizer_costs("AdamW", {}, "cuda"),
        sections=row["sections"],
        trace=tracer.trace,
        arguments=((), batch()),
        run=tracer.run,
    )
    (point,) = entry_points(group=GROUP, name=row["backend"])
    (found,) = [each for each in point.load()(request) if each.title == row["layout"] and not each.refused]
    return found


def train(which):
    """As a script would."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    make, batch = MODELS[which]
    model = make()
    model.train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    given = {name: each.to(accelerator.device) for name, each in batch().items()}
    for _ in range(5):
        accelerator.backward(model(**given).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def main():
    """Predict and record."""
    found = {}
    for row in rows():
        found[name_of(row)] = estimate(row).peak
        error = found[name_of(row)] / GIB / row["allocated"] - 1
        sys.stdout.write(f"{name_of(row)}: {found[name_of(row)] / GIB:.2f}, measured {row['allocated']} {error:+.1%}\n")
        sys.stdout.flush()
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        main()
