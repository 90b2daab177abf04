"""How scripts ask for a trained model's state, and give it back, while each rank holds a part of the model."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator, load_config
from drivetrain.api import DrivetrainError, UnsupportedError, UsageError
from drivetrain_megatron import meeting
from drivetrain_testing import RankFailedError, spawn

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

WORDS, WIDTH, LENGTH = 12, 8, 5
ATOL = 5e-6
"""Float32: a batch in parts, and matrices on other ranks, add the same numbers in another order."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"tensor_parallel_size": 2}),
    "pp": (2, {"pipeline_parallel_size": 2}),
    "tp-pp": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "fsdp-pp": (4, {"pipeline_parallel_size": 2, "data_parallel": "fsdp"}),
    "zero1": (2, {"data_parallel": "zero1"}),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 32), nn.Linear(16, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Net(nn.Module):
    """Packed layers, a tied head that the outermost forward computes by itself, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


def batch():
    ids = torch.arange(8 * LENGTH).view(8, LENGTH) * 7 % WORDS
    return ids, (ids * 5 + 1) % WORDS


def trained(section, **config):
    """A plain model and a prepared one after one step each, and the rows of this rank."""
    overrides = {"distributed_type": "megatron", "use_cpu": True, **config}
    overrides |= {f"megatron.{key}": value for key, value in section.items()}
    made = Accelerator(config=load_config(overrides=overrides, environ={}))
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    step = torch.optim.SGD(plain.parameters(), lr=0.3)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    ids, labels = batch()
    F.cross_entropy(plain(ids).flatten(0, 1), labels.flatten()).backward()
    step.step()
    size = len(ids) // made.backend.topology.dp_size
    rows = slice(made.backend.topology.dp_rank * size, (made.backend.topology.dp_rank + 1) * size)
    made.backward(F.cross_entropy(model(ids[rows]).flatten(0, 1), labels[rows].flatten()))
    optimizer.step()
    optimizer.zero_grad()
    return made, plain, model


def same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        # A file of anything else could not be read by another program.
        assert type(found[name]) in {torch.Tensor, nn.Parameter}, name
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )


def asked_by_all(section, folder):
    made, plain, model = trained(section)
    unwrapped, expected = made.unwrap_model(model), plain.state_dict()
    same(unwrapped.state_dict(), expected)
    same(model.state_dict(), expected)
    same(unwrapped.blocks.state_dict(), plain.blocks.state_dict())
    same(unwrapped.head.state_dict(), plain.head.state_dict())
    same(made.get_state_dict(model) if made.is_main_process else expected, expected)
    if not made.is_main_process:
        made.get_state_dict(model)
    made.save(unwrapped.state_dict(), folder / "model.bin")
    made.wait_for_everyone()
    same(torch.load(folder / "model.bin", weights_only=True), expected)
    # The best weights so far, and back to them.
    best = copy.deepcopy(unwrapped.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    halved = unwrapped.state_dict()
    torch.testing.assert_close(halved["blocks.0.gate_up.weight"], best["blocks.0.gate_up.weight"] / 2)
    model.load_state_dict(best)
    same(unwrapped.state_dict(), expected)
    unwrapped.blocks.load_state_dict({name: value * 2 for name, value in plain.blocks.state_dict().items()})
    torch.testing.assert_close(unwrapped.state_dict()["blocks.3.down.bias"], expected["blocks.3.down.bias"] * 2)
    model.load_state_dict(torch.load(folder / "model.bin", weights_only=True))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**expected, "head.weight": torch.zeros(2, 2)}, strict=False)
    if section.get("data_parallel") != "fsdp":
        # Torch refuses to copy modules that fully_shard has cut.
        same(copy.deepcopy(unwrapped).state_dict(), expected)
    # A module that is called by itself is the model all the same.
    ids, _ = batch()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(unwrapped(ids), plain(ids), rtol=0, atol=ATOL)
    made.end_training()


@pytest.mark.parametrize("layout", ["tp", "pp", "tp-pp", "fsdp", "fsdp-pp", "zero1"])
def test_all_ranks_ask_for_the_whole_state(layout, tmp_path) -> None:
    size, section = LAYOUTS[layout]
    spawn(asked_by_all, size, section, tmp_path, timeout=100)


def written_in_a_state_dict(section):
    made, plain, model = trained(section)
    ids, _ = batch()
    name = "blocks.3.gate_up.weight"
    kept = model.state_dict()
    model(ids)  # nothing was written so far
    for state in (kept, model.state_dict()):
        state[name].mul_(0.5)
    said = ""
    try:
        model(ids)
    except UsageError as error:
        said = str(error)
    # What the refusal says.
    state = model.state_dict()
    state[name].mul_(0.25)
    model.load_state_dict(state)
    del kept, state
    with torch.no_grad():
        plain.get_parameter(name).mul_(0.25 if said else 0.0625)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(made.unwrap_model(model)(ids), plain(ids), rtol=0, atol=ATOL)
    made.end_training()
    return said


@pytest.mark.parametrize(("layout", "copied"), [("tp", True), ("fsdp", True), ("pp", False)])
def test_a_write_to_a_copy_in_a_state_dict_is_refused_at_the_next_forward(layout, copied) -> None:
    size, section = LAYOUTS[layout]
    for said in spawn(written_in_a_state_dict, size, section):
        assert ("call model.load_state_dict(state) after the write" in said) is copied


def asked_by_one(section, folder):
    made, plain, model = trained(section)
    made.wait_for_everyone()
    if made.is_main_process:
        torch.save(made.unwrap_model(model).state_dict(), folder / "model.bin")
        same(made.unwrap_model(model).blocks[2].state_dict(), plain.blocks[2].state_dict())
    made.wait_for_everyone()
    same(torch.load(folder / "model.bin", weights_only=True), plain.state_dict())
    if made.is_main_process:
        torch.save(made.unwrap_model(model).state_dict(), folder / "again.bin")
    made.end_training()
    assert (folder / "again.bin").is_file()


@pytest.mark.parametrize("layout", ["tp", "pp", "tp-pp"])
def test_ranks_at_a_barrier_help_one_that_asks_alone(layout, tmp_path) -> None:
    size, section = LAYOUTS[layout]
    spawn(asked_by_one, size, section, tmp_path, timeout=100)


def refused_alone(section, folder):
    meeting.PATIENCE_SECONDS = 0.5
    made, plain, model = trained(section)
    unwrapped = made.unwrap_model(model)
    told = []
    if made.is_main_process:
        calls = (
            unwrapped.state_dict,
            lambda: made.get_state_dict(model),
            lambda: made.save_model(model, folder / "alone"),
        )
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            told.append(str(caught.value))
        assert not (folder / "alone").exists()
        (folder / "done").touch()
    while not (folder / "done").exists():
        # Busy with something of its own, as a rank is that has gone on to the next batch.
        time.sleep(0.05)
    # Nothing is lost: everybody together gets it.
    same(unwrapped.state_dict(), plain.state_dict())
    made.save_model(model, folder / "together")
    made.end_training()
    return told


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_one_rank_alone_is_told_what_to_write(layout, tmp_path) -> None:
    size, section = LAYOUTS[layout]
    told, others = spawn(refused_alone, size, section, tmp_path, timeout=100)
    assert others == []
    assert len(told) == 3
    for text in told:
        assert "was called on 1 of 2 processes" in text
        assert "before `if accelerator.is_main_process:`" in text


def leaves_a_barrier_out(section, folder):
    # The comparison of ranks would hold against one of them that it goes on after the error.
    made, plain, model = trained(section, **{"rank_monitor.enabled": False})
    told, done = "", folder / "told"
    made.backend._meeting = meeting.Meeting(made.backend.topology, 0.5)
    if made.is_main_process:
        while not done.exists():
            time.sleep(0.05)
    else:
        with pytest.raises(DrivetrainError) as caught:
            made.wait_for_everyone()
        told = str(caught.value)
        done.touch()
    # What the refusal says, in a run with time enough.
    made.backend._meeting = meeting.Meeting(made.backend.topology)
    made.wait_for_everyone()
    same(model.state_dict(), plain.state_dict())
    made.end_training()
    return told


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_barrier_that_one_rank_leaves_out_is_told(layout, tmp_path) -> None:
    size, section = LAYOUTS[layout]
    first, second = spawn(leaves_a_barrier_out, size, section, tmp_path, timeout=100)
    assert first == ""
    assert "1 of 2 processes did not reach a barrier in 0.5 s" in second
    assert "Call wait_for_everyone and end_training on every process." in second


def goes_on_after_a_refusal(section, rates):
    meeting.PATIENCE_SECONDS = 0.5
    overrides = {"distributed_type": "megatron", "use_cpu": True, "rank_monitor.interval_seconds": 0.05}
    overrides |= {f"megatron.{key}": value for key, value in section.items()}
    made = Accelerator(config=load_config(overrides=overrides, environ={}))
    torch.manual_seed(0)
    model = Net()
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if made.is_main_process:
        with pytest.raises(UsageError, match="on 1 of 2 processes"):
            made.get_state_dict(model)
    made.wait_for_everyone()
    optimizer.param_groups[0]["lr"] = rates[made.process_index]
    ids, labels = batch()
    for _ in range(3):
        made.backward(F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    made.end_training()


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_ranks_are_compared_after_a_call_that_one_rank_was_refused(layout) -> None:
    """It counts as not made: ranks that go on alike are not apart, and others are."""
    size, section = LAYOUTS[layout]
    spawn(goes_on_after_a_refusal, size, section, (0.1, 0.1), timeout=100)
    with pytest.raises(RankFailedError) as caught:
        spawn(goes_on_after_a_refusal, size, section, (0.1, 0.2), timeout=100)
    assert type(caught.value.cause).__name__ == "CollectiveMismatchError", caught.value
    assert "optimizer 0, rates 0.2" in str(caught.value.cause)


def pretrained(section, folder):
    import transformers

    overrides = {"distributed_type": "megatron", "use_cpu": True}
    overrides |= {f"megatron.{key}": value for key, value in section.items()}
    made = Accelerator(config=load_config(overrides=overrides, environ={}))
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**sizes, **heads)
    model = transformers.LlamaForCausalLM(config)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(8).view(2, 4)
    made.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    unwrapped = made.unwrap_model(model)
    ways: dict[str, dict[str, Any]] = {"own": {}, "given": {"state_dict": made.get_state_dict(model)}}
    for name, how in ways.items():
        unwrapped.save_pretrained(folder / name, is_main_process=made.is_main_process, save_function=made.save, **how)
    made.wait_for_everyone()
    model.eval()
    words = unwrapped.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False, pad_token_id=0)
    for name in ways:
        again = transformers.LlamaForCausalLM.from_pretrained(folder / name).eval()
        same(again.state_dict(), unwrapped.state_dict())
        assert torch.equal(again.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0), words)
    if "pipeline_parallel_size" in section:
        with pytest.raises(UnsupportedError, match="use_cache=False"):
            unwrapped.generate(ids, max_new_tokens=3, pad_token_id=0)
        with pytest.raises(UsageError, match="a copy of a part of a pipelined"):
            copy.deepcopy(unwrapped)(ids)
    made.end_training()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_save_pretrained_and_generate(layout, tmp_path) -> None:
    pytest.importorskip("transformers")
    size, section = LAYOUTS[layout]
    spawn(pretrained, size, section, tmp_path, timeout=150)


def prepared_again() -> None:
    overrides = {"distributed_type": "megatron", "use_cpu": True, "megatron.pipeline_parallel_size": 2}
    made = Accelerator(config=load_config(overrides=overrides, environ={}))
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS

    def step(model: Any) -> Any:
        model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        made.backward(F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
        optimizer.step()
        return model

    model = Net()
    prepared = step(model)
    state = made.get_state_dict(prepared)
    made.free_memory()
    words = r"this Net was prepared before: .* construct it again, and on the main process load the state"
    with pytest.raises(UnsupportedError, match=words):
        made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    again = Net()
    if made.is_main_process:
        again.load_state_dict(state)
    trained = made.get_state_dict(step(again))
    if made.is_main_process:
        alone = Net()
        alone.load_state_dict(state)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        F.cross_entropy(alone(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=ATOL)
    made.end_training()


def test_a_model_with_one_stage_is_not_prepared_again_and_one_that_is_constructed_again_is() -> None:
    """Refuse a part of a model; the whole one goes on from the weights that the main process loads."""
    spawn(prepared_again, 2)
