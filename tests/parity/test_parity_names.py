"""Names of weights are those of the user's own module, whatever is put around a part of it, under every backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_worlds import PLACES
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from drivetrain import Accelerator, load_config
from drivetrain.errors import UsageError
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
    elif kind == "a part in DataParallel":
        model.encoder = nn.DataParallel(model.encoder)
    elif kind == "a compiled part in DistributedDataParallel":
        model.encoder = alone_or_not(compiled(model.encoder))
    elif kind == "a layer in DistributedDataParallel, compiled":
        model.encoder[0] = compiled(alone_or_not(model.encoder[0]))
    return model


def alone_or_not(part: nn.Module) -> nn.Module:
    """In torch's wrapper, which needs a process group; on one process in the one that needs none."""
    return nn.parallel.DistributedDataParallel(part) if dist.is_initialized() else nn.DataParallel(part)


KINDS = (
    *("a compiled part", "a compiled layer", "a recomputed part", "both", "a part in DataParallel"),
    *("a compiled part in DistributedDataParallel", "a layer in DistributedDataParallel, compiled"),
)


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
@pytest.mark.gate("fsdp-2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_that_wrap_have_no_names(layout: str, tmp_path: Path) -> None:
    place = PLACES[layout]
    spawn(train, place.world_size, place.config, str(tmp_path), timeout=200)


def load(config: Mapping[str, Any]) -> None:
    """Names of the module itself, and those of its wrappers, are loaded alike."""
    torch.manual_seed(0)
    for kind in KINDS:
        accelerator, model, _ = prepared(config, kind)
        own = wrapped(kind).state_dict()
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


def unwrap(config: Mapping[str, Any]) -> None:
    """What is unwrapped has neither wrapper at any depth, shares its values with the model, and leaves it as it was."""
    for kind in KINDS:
        accelerator, model, optimizer = prepared(config, kind)
        parts = [type(part).__name__ for part in model.modules()]
        own = accelerator.unwrap_model(model, keep_torch_compile=False)
        assert type(own) in (Net, type(model)), kind
        assert [type(part).__name__ for part in own.modules()].count("Linear") == 2, kind
        names = [name for name, _ in own.named_modules()]
        assert names == ["", "encoder", "encoder.0", "encoder.1", "encoder.2", "head"], (kind, names)
        assert [name for name, _ in own.named_parameters()] == [name for name, _ in Net().named_parameters()], kind
        assert all(one is other for one, other in zip(own.parameters(), model.parameters(), strict=True)), kind
        assert [type(part).__name__ for part in model.modules()] == parts, kind
        assert accelerator.unwrap_model(model).encoder is model.encoder, kind
        step(accelerator, model, optimizer)
        accelerator.end_training()


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.gate("single", "fsdp-2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_and_recomputed_parts_are_unwrapped_at_any_depth(layout: str) -> None:
    place = PLACES[layout]
    spawn(unwrap, place.world_size, place.config, timeout=100)


def sharded_by_torch(config: Mapping[str, Any]) -> None:
    """A part that torch has sharded is refused, and the advice works."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    accelerator = Accelerator(config=load_config(overrides={**config, "use_cpu": True}, environ={}))
    net: Any = wrapped("")
    net.encoder = FullyShardedDataParallel(net.encoder, device_id=torch.device("cpu"))
    with pytest.raises(UsageError, match=r"Pass the model without it to accelerator\.prepare"):
        accelerator.prepare(net)
    net = wrapped("")
    step(accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5)))
    accelerator.end_training()


def test_torchs_fully_sharded_part_is_refused() -> None:
    spawn(sharded_by_torch, 2, PLACES["ddp-2"].config, timeout=100)
