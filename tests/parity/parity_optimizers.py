"""One loop under each optimizer, torch's and others', in each place where its state may be cut.

``make optimizers`` runs all of them; a test those whose packages the other tests need too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from parity_common import Result, Script, build, loader, mean, result
from parity_worlds import Matrix, Place
from torch import Tensor, nn
from torch.nn import functional as F

Make = Callable[[nn.Module], Any]
"""One optimizer of a model's parameters, or a list of several."""

STEPS = 6

WIDE = 96
"""Hidden units where an optimizer quantises the states of large parameters only, of 4,096 elements and more."""

ROUGH = {"torchao": 2e-3, "bitsandbytes": 2e-3, "Muon": 2e-3}
"""Of weights whose updates round to 8 bits or fewer. Where ranks sum a gradient in another order, its last bit differs,
and now and then a rounded number by a whole step: an element of a state that is quantised, a product in bfloat16 when
Muon orthogonalises. An update differs by up to a few hundredths of itself; updates are 0.02 long, and there are six."""


class Net(nn.Module):
    """Matrices and vectors; four ranks do not divide the 10 rows of most. ``(B, 8) -> (B, 4)``."""

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.head = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.body(x))
        return hidden


class Elementwise(torch.optim.Optimizer):
    """Somebody's own: momentum of the sign of gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                held = state.setdefault("momentum", torch.zeros_like(one))
                held.lerp_(one.grad, 0.3)
                one.sub_(held / (held.abs() + 0.01), alpha=group["lr"])


class Matrixwise(Elementwise):
    """Somebody's own: each gradient divided by the norms of its rows."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    norms = one.grad.norm(dim=-1, keepdim=True)
                    one.sub_(one.grad / (norms + 0.01), alpha=group["lr"])


class Global(Elementwise):
    """Somebody's own: all gradients divided by their common norm."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        params = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in params]).norm()
        for one in params:
            one.sub_(one.grad / (norm + 0.01), alpha=self.param_groups[0]["lr"])


def _torch(name: str, **settings: Any) -> Make:
    return lambda model: getattr(torch.optim, name)(model.parameters(), **settings)


def _from(module: str, name: str, **settings: Any) -> Make:
    def make(model: nn.Module) -> Any:
        return getattr(__import__(module, fromlist=[name]), name)(model.parameters(), **settings)

    return make


def _groups(model: nn.Module) -> Any:
    """Biases without weight decay, and a group that has no parameters yet."""
    matrices, vectors = _by_dim(model)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}, {"params": []}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


def _muon_and_adamw(model: nn.Module) -> Any:
    matrices, vectors = _by_dim(model)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]


def _normuon(model: nn.Module) -> Any:
    import pytorch_optimizer

    matrices, vectors = _by_dim(model)
    groups = [{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}]
    return pytorch_optimizer.NorMuon(groups, lr=0.02)


def _soap(model: nn.Module) -> Any:
    import pytorch_optimizer

    # The larger side of a matrix of few columns has a singular covariance, along whose null space rounding decides.
    return pytorch_optimizer.SOAP(model.parameters(), lr=0.01, max_precondition_dim=8)


def _by_dim(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(model.parameters())
    return [one for one in params if one.ndim == 2], [one for one in params if one.ndim != 2]


OPTIMIZERS: dict[str, tuple[str, Make]] = {
    # name: what it is of, and how it is made
    "SGD": ("torch", _torch("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "SGD, fused": ("torch", _torch("SGD", lr=0.1, momentum=0.9, fused=True)),
    "Adam, amsgrad": ("torch", _torch("Adam", lr=0.01, amsgrad=True)),
    "AdamW": ("torch", _torch("AdamW", lr=0.01)),
    "AdamW, foreach": ("torch", _torch("AdamW", lr=0.01, foreach=True)),
    "AdamW, fused": ("torch", _torch("AdamW", lr=0.01, fused=True)),
    "AdamW, groups": ("torch", _groups),
    "Adamax": ("torch", _torch("Adamax", lr=0.01)),
    "NAdam": ("torch", _torch("NAdam", lr=0.01)),
    "RAdam": ("torch", _torch("RAdam", lr=0.01)),
    "Adadelta": ("torch", _torch("Adadelta", lr=0.5)),
    "Adagrad": ("torch", _torch("Adagrad", lr=0.05)),
    "ASGD": ("torch", _torch("ASGD", lr=0.1)),
    "RMSprop": ("torch", _torch("RMSprop", lr=0.005, momentum=0.5, centered=True)),
    "Rprop": ("torch", _torch("Rprop", lr=0.01)),
    "Adafactor": ("torch", _torch("Adafactor", lr=0.05)),
    "Muon and AdamW": ("torch", _muon_and_adamw),
    "Adafactor, relative steps": ("transformers", _from("transformers.optimization", "Adafactor")),
    "Adafactor, fixed rate": (
        "transformers",
        _from("transformers.optimization", "Adafactor", lr=0.01, relative_step=False, scale_parameter=False),
    ),
    "Lion": ("pytorch_optimizer", _from("pytorch_optimizer", "Lion", lr=0.003)),
    "LAMB": ("pytorch_optimizer", _from("pytorch_optimizer", "Lamb", lr=0.01)),
    "SOAP": ("pytorch_optimizer", _soap),
    "Shampoo": ("pytorch_optimizer", _from("pytorch_optimizer", "Shampoo", lr=0.01)),
    "NorMuon": ("pytorch_optimizer", _normuon),
    "AdEMAMix": ("pytorch_optimizer", _from("pytorch_optimizer", "AdEMAMix", lr=0.01)),
    "D-Adaptation": ("pytorch_optimizer", _from("pytorch_optimizer", "DAdaptAdam", lr=1.0)),
    "Prodigy": ("prodigyopt", _from("prodigyopt", "Prodigy", lr=1.0)),
    "schedule-free AdamW": ("schedulefree", _from("schedulefree", "AdamWScheduleFree", lr=0.01)),
    "schedule-free SGD": ("schedulefree", _from("schedulefree", "SGDScheduleFree", lr=0.1)),
    "AdamW8bit, torchao": ("torchao", _from("torchao.optim", "AdamW8bit", lr=0.01)),
    "AdamW4bit, torchao": ("torchao", _from("torchao.optim", "AdamW4bit", lr=0.01)),
    "AdamWFp8, torchao": ("torchao", _from("torchao.optim", "AdamWFp8", lr=0.01)),
    "AdamW8bit, bitsandbytes": ("bitsandbytes", _from("bitsandbytes.optim", "AdamW8bit", lr=0.01)),
    "own, element-wise": ("", lambda model: Elementwise(model.parameters())),
    "own, matrix-wise": ("", lambda model: Matrixwise(model.parameters())),
    "own, over all": ("", lambda model: Global(model.parameters())),
}


def _loop(make: Make, hidden: int) -> Callable[[Any], Result]:
    def train(accelerator: Any) -> Result:
        model = build(partial(Net, hidden))
        made = make(model)
        optimizers = made if isinstance(made, list) else [made]
        # One with relative steps has no rate to be scheduled.
        scheduled = [each for each in optimizers if each.param_groups[0]["lr"] is not None]
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.9) for each in scheduled]
        model, batches, *prepared = accelerator.prepare(model, loader(), *optimizers, *schedules)
        optimizers, schedules = prepared[: len(optimizers)], prepared[len(optimizers) :]
        for each in optimizers:
            # Schedule-free ones have two points, and step from this one only.
            if hasattr(each, "train"):
                each.train()
        losses: list[float] = []
        while len(losses) < STEPS:
            for x, y in batches:
                if len(losses) == STEPS:
                    break
                # Gradients of a cross entropy sum to zero over classes: SOAP and Shampoo would divide rounding by
                # rounding along that direction.
                loss = F.mse_loss(model(x), F.one_hot(y, 4).float())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                for each in (*optimizers, *schedules):
                    each.step()
                for each in optimizers:
                    each.zero_grad()
                losses.append(mean(accelerator, loss))
        return result(accelerator, losses, model=model)

    return train


def load() -> dict[str, Script]:
    """A script for each optimizer."""
    return {
        name: Script(
            name,
            _loop(make, WIDE if package in ("torchao", "bitsandbytes") else 10),
            tolerance=ROUGH["Muon"] if "Muon" in name else ROUGH.get(package),
        )
        for name, (package, make) in OPTIMIZERS.items()
    }


def installed() -> list[str]:
    """Names of the optimizers whose package is there."""
    return [name for name, (package, _) in OPTIMIZERS.items() if not package or find_spec(package) is not None]


def _zero(stage: int, **section: Any) -> Place:
    name = f"ZeRO-{stage} x 2" + (", offload" if section else "")
    return Place(name, 2, {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": stage, **section}})


def _megatron(name: str, world_size: int, **section: Any) -> Place:
    return Place(name, world_size, {"distributed_type": "megatron", "megatron": section})


PLACES = {
    place.name: place
    for place in (
        Place("single", 1, {"distributed_type": "single"}),
        Place("ddp x 2", 2, {"distributed_type": "ddp"}),
        Place("ddp x 4", 4, {"distributed_type": "ddp"}),
        Place("fsdp x 2", 2, {"distributed_type": "fsdp"}),
        Place("fsdp x 4", 4, {"distributed_type": "fsdp"}),
        Place("HSDP 2 x 2", 4, {"distributed_type": "fsdp", "mesh": {"dp_replicate": 2, "dp_shard": 2}}),
        *(_zero(stage) for stage in (0, 1, 2, 3)),
        _zero(2, offload_optimizer="cpu"),
        _megatron("tp 2", 2, tensor_parallel_size=2),
        _megatron("pp 2", 2, pipeline_parallel_size=2),
        _megatron("tp 2 x fsdp 2", 4, tensor_parallel_size=2, data_parallel="fsdp"),
        _megatron("zero1 x 2", 2, data_parallel="zero1"),
    )
}

MATRIX = Matrix(load, PLACES, Path(__file__).with_name("optimizers.json"), distances=True)
