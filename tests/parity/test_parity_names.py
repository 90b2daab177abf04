"""Names of weights are those of the user's own module, whatever is put around a part of it, under every backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_worlds import PLACES
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from drivetrain import Accelerator, load_config
from drivetrain_testing import spawn

LAYOUTS = ("single", "ddp-2", "fsdp-2", "deepspeed-2", "deepspeed-3", "tp-2", "pp-2")


class Scaled(nn.Module):
    """With a buffer and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("places", torch.linspace(0.5, 1.0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * self.places


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Scaled())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def compiled(part: nn.Module) -> nn.Module:
    """``backend="eager"`` runs torch.compile's wrapper and its tracing, without a compiler."""
    wrapper: nn.Module = torch.compile(part, backend="eager")  # type: ignore[assignment]
    return wrapper


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = Net()
    if kind == "a compiled part":
        model.encoder = compiled(model.encoder)
    elif kind == "a compiled layer":
        model.encoder[0] = compiled(model.encoder[0])
    elif kind == "a recomputed part":
        model.encoder = checkpoint_wrapper(model.encoder)
    elif kind == "both":
        model.encoder = compiled(checkpoint_wrapper(model.encoder))
    return model


KINDS = ("a compiled part", "a compiled layer", "a recomputed part", "both")


def prepared(config: Mapping[str, Any], kind: str) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(config=load_config(overrides={**config, "use_cpu": True}, environ={}))
    net = wrapped(kind)
    return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9))


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def weights(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    whole = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    found: dict[str, torch.Tensor] = accelerator.backend.broadcast_object(whole)
    return found


def train(config: Mapping[str, Any], folder: str) -> None:
    """One step, saved; a second one from there, with another wrapper or none."""
    torch.manual_seed(0)
    wanted = list(Net().state_dict())
    for kind in KINDS:
        where = Path(folder, kind)
        accelerator, model, optimizer = prepared(config, kind)
        step(accelerator, model, optimizer)
        saved = weights(accelerator, model)
        assert list(saved) == wanted, (kind, list(saved))
        accelerator.save_model(model, where / "model")
        accelerator.wait_for_everyone()
        with safe_open(where / "model" / "model.safetensors", "pt") as file:
            assert sorted(file.keys()) == sorted(wanted), kind
        accelerator.save_state(where / "state")
        step(accelerator, model, optimizer)
        second = weights(accelerator, model)
        accelerator.end_training()
        for source, target in ((where, "nothing"), (where, KINDS[KINDS.index(kind) - 1])):
            accelerator, model, optimizer = prepared(config, target)
            accelerator.load_state(source / "state")
            step(accelerator, model, optimizer)
            for name, value in weights(accelerator, model).items():
                torch.testing.assert_close(value, second[name], rtol=0, atol=1e-6, msg=f"{kind}, {target}: {name}")
            accelerator.end_training()


# torch's tracer makes an object of the function that DeepSpeed's linear layers are, and asks activations for gradients.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.gate("single", "fsdp-2", "pp-2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_that_wrap_have_no_names(layout: str, tmp_path: Path) -> None:
    place = PLACES[layout]
    spawn(train, place.world_size, place.config, str(tmp_path), timeout=200)


def load(config: Mapping[str, Any]) -> None:
    """Names of the module itself, and those of its wrappers, are loaded alike."""
    torch.manual_seed(0)
    for kind in KINDS:
        own = wrapped(kind).state_dict()
        accelerator, model, _ = prepared(config, kind)
        state = {name: value.clone() for name, value in Net().state_dict().items()}
        assert list(model.state_dict()) == list(accelerator.unwrap_model(model).state_dict()) == list(state)
        for given in (state, own):
            assert not any(model.load_state_dict(given)), kind
            for value, loaded in zip(given.values(), weights(accelerator, model).values(), strict=True):
                torch.testing.assert_close(loaded, value, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({name: value for name, value in state.items() if name != "encoder.0.weight"})
        assert model.load_state_dict({}, strict=False).missing_keys, kind
        accelerator.end_training()


@pytest.mark.parametrize("layout", ["single", "ddp-2"])
def test_a_script_loads_either_names(layout: str) -> None:
    place = PLACES[layout]
    spawn(load, place.world_size, place.config, timeout=100)
