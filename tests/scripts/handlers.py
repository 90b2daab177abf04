"""Everything that is passed to the constructor: handlers, plugins, precision; and a profile of the run."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.state import PartialState
from drivetrain.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    set_seed,
)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def main(args):
    trace = os.path.join(args.output_dir, "trace")
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, even_batches=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=2, adjust_scheduler=True, sync_with_dataloader=True
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True),
            GradScalerKwargs(init_scale=1024.0, growth_interval=4),
            InitProcessGroupKwargs(timeout=timedelta(seconds=90)),
            AutocastKwargs(cache_enabled=True),
            ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=trace),
        ],
        rng_types=["torch", "generator"],
        step_scheduler_with_optimizer=True,
    )
    set_seed(args.seed)
    state = PartialState()
    model = Residual()
    calls = []
    model.first.register_forward_hook(lambda module, inputs, output: calls.append(output.dtype))
    rows = [{"x": torch.randn(6), "y": torch.randn(6)} for _ in range(44)]
    loader = DataLoader(rows, batch_size=8, shuffle=True, num_workers=0, pin_memory=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 5], gamma=0.5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])
    model = accelerator.prepare_model(model)
    optimizer = accelerator.prepare_optimizer(optimizer)
    loader = accelerator.prepare_data_loader(loader)
    scheduler = accelerator.prepare_scheduler(scheduler)
    accelerator.register_for_checkpointing(scheduler)
    losses, synced, ends = [], [], []
    with accelerator.profile() as prof:
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader:
                with accelerator.accumulate(model):
                    output = model(batch["x"])
                    with accelerator.autocast():
                        loss = nn.functional.mse_loss(output, batch["y"])
                    accelerator.backward(loss)
                    synced.append(accelerator.gradient_state.sync_gradients)
                    ends.append(accelerator.gradient_state.end_of_dataloader)
                    if accelerator.sync_gradients and accelerator.scaler is not None:
                        accelerator.unscale_gradients()
                    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
                    optimizer.step()
                    if not accelerator.optimizer_step_was_skipped:
                        scheduler.step()
                    optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            accelerator.save_state(os.path.join(args.output_dir, "state"))
    rates = scheduler.get_last_lr()
    accelerator.load_state(os.path.join(args.output_dir, "state"))
    accelerator.wait_for_everyone()
    names = {event.key for event in prof.key_averages()}
    accelerator.save_model(model, os.path.join(args.output_dir, "model"))
    result = {
        "losses": losses,
        "synced": synced,
        "ends": ends,
        "rates": [rates, scheduler.get_last_lr()],
        "norm": float(norm),
        "dtype": str(calls[-1]),
        "output": str(output.dtype),
        "profiled": any("linear" in name or "addmm" in name for name in names),
        "traces": sorted(os.listdir(trace)),
        "same state": state.process_index == accelerator.process_index == accelerator.state.process_index,
        "batch size": loader.total_batch_size,
        "weights": accelerator.get_state_dict(model)["second.weight"].flatten().tolist(),
        "files": sorted(os.listdir(os.path.join(args.output_dir, "model"))),
    }
    accelerator.end_training()
    return result


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="handlers")
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--seed", type=int, default=9)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
