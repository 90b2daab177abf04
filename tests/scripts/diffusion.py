"""Denoise small vectors, in the manner of diffusion fine-tuning: adapter, EMA, hooks with files of their own."""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.logging import get_logger
from drivetrain.tracking import GeneralTracker, on_main_process
from drivetrain.utils import DistributedDataParallelKwargs, DistributedType, ProjectConfiguration, set_seed, tqdm

logger = get_logger(__name__)


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False
    main_process_only = True

    @on_main_process
    def __init__(self, run_name):
        super().__init__()
        self.run_name, self.config, self.values, self.finished = run_name, None, [], False

    @property
    def tracker(self):
        return self.values

    @on_main_process
    def store_init_configuration(self, values):
        self.config = values

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.values.append((step, values))

    @on_main_process
    def finish(self):
        self.finished = True


class EMA:
    """An average of the weights over time, with a state like that of a module."""

    def __init__(self, parameters, decay=0.9):
        self.shadow = [p.clone().detach() for p in parameters]
        self.decay, self.optimization_step, self.temp = decay, 0, None

    @torch.no_grad()
    def step(self, parameters):
        self.optimization_step += 1
        decay = min(self.decay, (1 + self.optimization_step) / (10 + self.optimization_step))
        for shadow, parameter in zip(self.shadow, parameters, strict=True):
            shadow.sub_((1 - decay) * (shadow - parameter))

    def to(self, device):
        self.shadow = [p.to(device) for p in self.shadow]

    def state_dict(self):
        return {"shadow": self.shadow, "decay": self.decay, "step": self.optimization_step, "temp": self.temp}

    def load_state_dict(self, state):
        state = copy.deepcopy(state)
        self.shadow, self.decay, self.optimization_step = state["shadow"], state["decay"], state["step"]


class Denoiser(nn.Module):
    """A frozen body and a small adapter that is trained."""

    def __init__(self, size=8):
        super().__init__()
        self.config = {"size": size}
        self.base = nn.Linear(size + 1, size)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(size + 1, 3, bias=False), nn.Linear(3, size, bias=False)

    def forward(self, x, timestep):
        x = torch.cat([x, timestep[:, None].to(x.dtype) / 10], dim=1)
        return self.base(x) + self.up(torch.tanh(self.down(x)))

    def save_adapter(self, folder, state):
        os.makedirs(folder, exist_ok=True)
        torch.save(state, os.path.join(folder, "adapter.pt"))
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(self.config, f)


def adapter_state(model):
    return {name: value for name, value in model.state_dict().items() if not name.startswith("base")}


def main(args):
    project = ProjectConfiguration(project_dir=args.output_dir, logging_dir=os.path.join(args.output_dir, "logs"))
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=ListTracker("denoise"),
        project_config=project,
        kwargs_handlers=handlers,
    )
    logger.info(accelerator.state, main_process_only=False)
    if args.seed is not None:
        set_seed(args.seed)
    if accelerator.is_main_process and args.output_dir is not None:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

    weight_dtype = torch.float32
    if accelerator.mixed_precision == "fp16":
        weight_dtype = torch.float16
    elif accelerator.mixed_precision == "bf16":
        weight_dtype = torch.bfloat16

    teacher = nn.Linear(8, 8)
    teacher.requires_grad_(False)
    teacher.to(accelerator.device, dtype=weight_dtype)
    unet = Denoiser()

    def unwrap_model(model):
        model = accelerator.unwrap_model(model)
        return model._orig_mod if hasattr(model, "_orig_mod") else model

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            ema.to(accelerator.device)
            torch.save(ema.state_dict(), os.path.join(output_dir, "ema.pt"))
            for model in models:
                if isinstance(unwrap_model(model), type(unwrap_model(unet))):
                    unwrap_model(model).save_adapter(os.path.join(output_dir, "adapter"), adapter_state(model))
                else:
                    raise ValueError(f"unexpected model: {model.__class__}")
        for _ in models:
            # Popped everywhere, so that the weights are not saved twice.
            if weights:
                weights.pop()

    def load_model_hook(models, input_dir):
        while len(models) > 0:
            model = models.pop()
            if not isinstance(unwrap_model(model), type(unwrap_model(unet))):
                raise ValueError(f"unexpected model: {model.__class__}")
            state = torch.load(os.path.join(input_dir, "adapter", "adapter.pt"), weights_only=True)
            unwrap_model(model).load_state_dict(state, strict=False)

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)

    clean = torch.randn(64, 8)
    params = list(filter(lambda p: p.requires_grad, unet.parameters()))
    optimizer = torch.optim.AdamW(params, lr=2e-2)
    loader = DataLoader(TensorDataset(clean), shuffle=True, batch_size=args.train_batch_size)
    steps_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps / accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.05 * step))
    unet, optimizer, loader, scheduler = accelerator.prepare(unet, optimizer, loader, scheduler)
    ema = EMA([p for p in unet.parameters() if p.requires_grad])
    accelerator.register_for_checkpointing(ema)
    steps_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    epochs = math.ceil(args.max_train_steps / steps_per_epoch)
    accelerator.init_trackers("denoise", config={key: str(value) for key, value in vars(args).items()})

    global_step, first_epoch = 0, 0
    if args.resume_from_checkpoint:
        if args.resume_from_checkpoint != "latest":
            path = os.path.basename(args.resume_from_checkpoint)
        else:
            dirs = [d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")]
            dirs = sorted(dirs, key=lambda x: int(x.split("-")[1]))
            path = dirs[-1] if len(dirs) > 0 else None
        if path is None:
            accelerator.print("No checkpoint; a new run begins.")
        else:
            accelerator.load_state(os.path.join(args.output_dir, path))
            global_step = int(path.split("-")[1])
            first_epoch = global_step // steps_per_epoch

    progress_bar = tqdm(range(args.max_train_steps), initial=global_step, desc="Steps", disable=True)
    losses = []
    for _ in range(first_epoch, epochs):
        unet.train()
        train_loss = 0.0
        for (latents,) in loader:
            with accelerator.accumulate(unet):
                latents = latents.to(weight_dtype)
                timesteps = (latents[:, 0].abs() * 10).long() % 10
                noise = torch.sin(latents * 17)
                with torch.no_grad():
                    noise = noise + 0.01 * teacher(latents)
                noisy = latents + noise * (timesteps[:, None] / 10).to(weight_dtype)
                prediction = unet(noisy, timesteps)
                loss = nn.functional.mse_loss(prediction.float(), noise.float(), reduction="mean")
                avg_loss = accelerator.gather(loss.repeat(args.train_batch_size)).mean()
                train_loss += avg_loss.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(params, 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step([p for p in unet.parameters() if p.requires_grad])
                progress_bar.update(1)
                global_step += 1
                accelerator.log({"train_loss": train_loss}, step=global_step)
                losses.append(train_loss)
                train_loss = 0.0
                if global_step % args.checkpointing_steps == 0:
                    if accelerator.is_main_process and args.checkpoints_total_limit is not None:
                        checkpoints = [d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")]
                        checkpoints = sorted(checkpoints, key=lambda x: int(x.split("-")[1]))
                        for old in checkpoints[: max(len(checkpoints) - args.checkpoints_total_limit + 1, 0)]:
                            shutil.rmtree(os.path.join(args.output_dir, old))
                    if accelerator.is_main_process or not args.save_on_main:
                        accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
            progress_bar.set_postfix(step_loss=loss.detach().item(), lr=scheduler.get_last_lr()[0])
            if global_step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process and args.save_on_main:
        accelerator.save_model(unet, os.path.join(args.output_dir, "whole"))
    if accelerator.is_main_process:
        final = unwrap_model(unet)
        final.save_adapter(os.path.join(args.output_dir, "final"), adapter_state(final))
        for tracker in accelerator.trackers:
            if tracker.name == "list":
                tracker.values.append(("images", len(tracker.values)))
    seen = accelerator.get_tracker("list", unwrap=True) if accelerator.is_main_process else None
    accelerator.end_training()
    accelerator.print("done")
    return {
        "losses": losses,
        "global_step": global_step,
        "adapter": unet.up.weight.detach().flatten().tolist(),
        "ema": ema.shadow[0].flatten().tolist(),
        "tracked": seen and len(seen),
        "type": accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU),
    }


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="denoise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", default=None)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--max_train_steps", type=int, default=12)
    parser.add_argument("--checkpointing_steps", type=int, default=3)
    parser.add_argument("--checkpoints_total_limit", type=int, default=None)
    parser.add_argument("--save_on_main", action="store_true")
    parser.add_argument("--resume_from_checkpoint", default=None)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
