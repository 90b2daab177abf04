"""The prepared model is the user's own object, and any way into it gives the gradients of one process."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain_testing import RankFailedError, spawn

# Sums over ranks are taken in another order than on one process.
TOLERANCE = 2e-5


@dataclass
class Output:
    logits: torch.Tensor


class Net(nn.Module):
    """Has methods that call the model, methods that do not, and an attribute that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.scale = 1.0
        self.calls = 0

    def encode(self, x):
        return torch.tanh(self.body(x))

    def forward(self, x):
        self.calls += 1
        return Output(self.head(self.encode(x)) * self.scale)

    def loss(self, x, y):
        return nn.functional.mse_loss(self(x).logits, y)


def batches(accelerator, steps, rows=12):
    draws = torch.Generator().manual_seed(1)
    rank, size = accelerator.process_index, accelerator.num_processes
    for _ in range(steps):
        x = torch.randn(rows, 4, generator=draws)
        yield x[rank::size], x[rank::size].sum(dim=1, keepdim=True).expand(-1, 2)


WAYS = {
    "call": lambda accelerator, model, net, x: model(x).logits,
    "forward": lambda accelerator, model, net, x: model.forward(x).logits,
    "methods": lambda accelerator, model, net, x: model.head(model.encode(x)),
    "module": lambda accelerator, model, net, x: model.module(x).logits,
    "unwrapped": lambda accelerator, model, net, x: accelerator.unwrap_model(model)(x).logits,
    "original": lambda accelerator, model, net, x: net(x).logits,
    "submodules": lambda accelerator, model, net, x: net.head(torch.tanh(net.body(x))),
    "several forwards": lambda accelerator, model, net, x: (model(x).logits + model(x.flip(0)).logits.flip(0)) / 2,
}


def start(backend, **arguments):
    torch.manual_seed(0)
    return Accelerator(distributed_type=backend, cpu=True, **arguments)


def finish(accelerator, model):
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return weights


def train_every_way(backend, accumulation):
    accelerator, found = start(backend, gradient_accumulation_steps=accumulation), {}
    for way, outputs in WAYS.items():
        torch.manual_seed(0)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        for x, y in batches(accelerator, 4):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(outputs(accelerator, model, net, x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        found[way] = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        accelerator.free_memory()
    accelerator.end_training()
    return found


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.gate("3-2")
def test_every_way_into_the_model_is_reduced(world, accumulation):
    wanted = spawn(train_every_way, 1, "single", accumulation)[0]
    for rank in spawn(train_every_way, world, "ddp", accumulation):
        for way in WAYS:
            assert_close(rank[way], wanted[way])


def train_and_change(backend, change):
    accelerator = start(backend)
    net = Net()
    if change == "unfreeze":
        net.body.requires_grad_(False)
    if change == "double":
        net.half()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    if change == "double":
        model.double()
    for step, (given, wanted) in enumerate(batches(accelerator, 6)):
        x, y = (given.double(), wanted.double()) if change == "double" else (given, wanted)
        if step == 3:
            changed(accelerator, model, optimizer, change)
        logits = model(x).logits
        if change == "two heads" and step % 2:
            logits = model.other(model.encode(x))
        if change == "buffer":
            logits = logits * getattr(model, "gain", 1.0)
        if change == "new layer" and step >= 3:
            logits = logits + model.added(x)
        accelerator.backward(nn.functional.mse_loss(logits, y))
        optimizer.step()
        optimizer.zero_grad()
    return finish(accelerator, model)


def changed(accelerator, model, optimizer, change):
    if change == "attribute":
        model.scale = 3.0
    elif change == "buffer":
        model.register_buffer("gain", torch.tensor(0.5))
    elif change == "new layer":
        # Ranks draw other values; those of rank 0 count.
        torch.manual_seed(100 + accelerator.process_index)
        model.added = nn.Linear(4, 2)
        optimizer.add_param_group({"params": list(model.added.parameters())})
    elif change == "unfreeze":
        model.body.requires_grad_(True)
    elif change == "freeze":
        model.body.requires_grad_(False)
    elif change == "write":
        with torch.no_grad():
            model.head.weight.mul_(0.5)
    elif change == "load":
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    elif change == "replaced head":
        torch.manual_seed(7)
        model.head = nn.Linear(8, 2)
        optimizer.add_param_group({"params": list(model.head.parameters())})


CHANGES = [
    "attribute",
    "buffer",
    "new layer",
    "unfreeze",
    "freeze",
    "two heads",
    "write",
    "load",
    "replaced head",
    "double",
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_script_changes_after_prepare_is_what_trains(change):
    wanted = spawn(train_and_change, 1, "single", change)[0]
    plain = plain_loop(change)
    assert_close(wanted, plain)
    for rank in spawn(train_and_change, 3, "ddp", change):
        assert_close(rank, wanted)


def plain_loop(change):
    """The same script without an accelerator."""

    class Alone:
        process_index, num_processes = 0, 1

    torch.manual_seed(0)
    model = Net()
    if change == "unfreeze":
        model.body.requires_grad_(False)
    if change == "double":
        model.half().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, (given, wanted) in enumerate(batches(Alone, 6)):
        x, y = (given.double(), wanted.double()) if change == "double" else (given, wanted)
        if step == 3:
            changed(Alone, model, optimizer, change)
        logits = model(x).logits
        if change == "two heads" and step % 2:
            logits = model.other(model.encode(x))
        if change == "buffer":
            logits = logits * getattr(model, "gain", 1.0)
        if change == "new layer" and step >= 3:
            logits = logits + model.added(x)
        nn.functional.mse_loss(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def look_at_it(backend):
    accelerator = start(backend)
    net = Net()
    order = []
    hooks = [net.register_forward_hook(lambda *_: order.append("before"))]
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    hooks.append(model.register_forward_hook(lambda *_: order.append("after")))
    assert model is net
    assert isinstance(model, Net)
    assert (type(model).__name__, type(model).__module__) == ("Net", Net.__module__)
    assert accelerator.unwrap_model(model) is model
    follow_module(accelerator, model)
    x = torch.randn(4, 4)
    accelerator.backward(model(x).logits.sum())
    assert order == ["before", "after"]
    assert model.calls == 1
    optimizer.step()
    for hook in hooks:
        hook.remove()
    model.eval()
    assert not model.body.training
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)
    for copied in (copy.deepcopy(model), averaged.module, pickle.loads(pickle.dumps(model))):
        assert type(copied) is Net
        assert "_drivetrain" not in vars(copied)
        assert torch.equal(copied.head.weight, model.head.weight)
        assert copied.head.weight is not model.head.weight
        copied(x)
    chain = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert type(chain[:1]) is nn.Sequential
    inner = model.module
    accelerator.free_memory()
    assert type(model) is type(inner) is Net
    inner.scale = 5.0
    assert model.scale == 5.0
    accelerator.end_training()


def follow_module(accelerator, model):
    inner = model.module
    # Where the loops of scripts and libraries end.
    assert not hasattr(inner, "module")
    assert isinstance(inner, Net)
    assert inner is model.module
    assert (inner, hash(inner)) == (model, hash(model))
    assert accelerator.unwrap_model(inner) is model
    assert "_drivetrain" not in vars(copy.deepcopy(inner))
    # One state under both names, for whatever is set later, too.
    inner.scale = 2.0
    inner.register_buffer("later", torch.ones(2))
    inner.eval()
    assert (model.scale, model.training, "later" in model.state_dict()) == (2.0, False, True)
    inner.extra = nn.Linear(2, 2)
    assert model.extra is inner.extra
    del model.later, model.extra
    inner.scale = 1.0
    model.train()
    assert (inner.training, hasattr(inner, "later"), hasattr(inner, "extra")) == (True, False, False)


@pytest.mark.parametrize(("backend", "world"), [("single", 1), ("dp", 1), ("ddp", 2)])
def test_a_prepared_model_is_the_users_object(backend, world):
    spawn(look_at_it, world, backend)


class WithModule(nn.Module):
    """A submodule that is called ``module`` stays what ``model.module`` is."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 2)

    def forward(self, x):
        return self.module(x)


class WithSlots(Net):
    __slots__ = ("mark",)


def test_what_module_is_where_the_class_says_so():
    accelerator = start("single")
    for kind in (WithModule, WithSlots):
        model = accelerator.prepare(kind())
        assert getattr(model, "module", None) is model._modules.get("module")
    accelerator.end_training()


def save_as_transformers_does(folder):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_utils import unwrap_model

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    accelerator = start("ddp")
    model = accelerator.prepare(LlamaForCausalLM(config))
    found = unwrap_model(model), unwrap_model(model.module)
    assert all(isinstance(one, LlamaForCausalLM) for one in found)
    if find_spec("accelerate") is None:
        # Else Transformers asks Accelerate, which leaves a model without a wrapper of torch's as it is.
        assert not any(hasattr(one, "module") for one in found)
    for number, one in enumerate((model, model.module, accelerator.unwrap_model(model))):
        # Transformers lets the first process write.
        one.save_pretrained(folder / str(number))
        accelerator.wait_for_everyone()
        saved = LlamaForCausalLM.from_pretrained(folder / str(number))
        assert saved.config.architectures == ["LlamaForCausalLM"]
        for name, value in accelerator.get_state_dict(model).items():
            assert torch.equal(saved.state_dict()[name], value), name
    accelerator.end_training()


def test_transformers_comes_to_an_end_where_it_follows_module(tmp_path):
    spawn(save_as_transformers_does, 2, tmp_path)


def refuse(backend, mistake):
    accelerator = start(backend)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    try:
        for x, y in batches(accelerator, 1):
            loss = model.loss(x, y)
            if mistake == "plain backward":
                loss.backward()
                optimizer.step()
            elif mistake == "plain backward, unprepared optimizer":
                loss.backward()
                own.step()
            elif mistake == "step after no_sync":
                with accelerator.no_sync(model):
                    accelerator.backward(loss)
                optimizer.step()
            elif mistake == "backward after the reduction":
                accelerator.backward(loss)
                model.loss(x, y).backward()
                optimizer.step()
            elif mistake == "no backward":
                optimizer.step()
            elif mistake == "gradients taken":
                torch.autograd.grad(loss, net.head.weight)
            elif mistake == "other values on each rank":
                torch.manual_seed(accelerator.process_index)
                nn.init.normal_(model.head.weight)
                before["head.weight"] = model.head.weight.detach().clone()
                accelerator.backward(model.loss(x, y))
                optimizer.step()
    except UsageError as error:
        unchanged = all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
        return str(error), unchanged
    return "", True


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("plain backward", "gradients of this rank's samples alone"),
        ("plain backward, unprepared optimizer", "gradients of this rank's samples alone"),
        ("step after no_sync", "gradients of this rank's samples alone"),
        ("backward after the reduction", "gradients of this rank's samples alone"),
        ("no backward", "no backward since its last step"),
        ("gradients taken", "of this rank's samples alone"),
        ("other values on each rank", "not the same on all ranks"),
    ],
)
def test_a_step_that_would_let_replicas_drift_apart_is_refused(mistake, said):
    for message, unchanged in spawn(refuse, 3, "ddp", mistake):
        assert said in message
        assert unchanged


def write_on_one_rank():
    accelerator = start("ddp")
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for x, y in batches(accelerator, 2):
        with torch.no_grad():
            model.head.weight.add_(float(accelerator.is_main_process))
        accelerator.backward(model.loss(x, y))
        optimizer.step()


def test_a_write_on_one_rank_alone_is_refused():
    with pytest.raises(RankFailedError, match="not the same on all ranks"):
        spawn(write_on_one_rank, 3)
