"""``drivetrain check``: what is said about scripts as people write them, and nothing about those that fit."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from drivetrain.api import UsageError
from drivetrain_convert.check import check
from drivetrain_convert.script_check import Kind, check_script

START = """\
import torch
from drivetrain import Accelerator
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
"""Four lines before each of these; line 5 is the first of the script."""

SCRIPTS: dict[str, tuple[str, list[tuple[int, Kind, str]]]] = {
    # ---- nothing to say
    "plain loop": (
        """
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state("folder")
        """,
        [],
    ),
    "evaluation": (
        """
        for batch in loader:
            predictions, labels = accelerator.gather_for_metrics((model(batch), batch["labels"]))
            first = predictions[:5]
        """,
        [],
    ),
    "main process prints and logs": (
        """
        if accelerator.is_main_process:
            accelerator.print("done")
            accelerator.log({"loss": 1.0})
            accelerator.init_trackers("run")
            print(loader)
        """,
        [],
    ),
    "either process": ("if accelerator.is_main_process or save_everywhere:\n    accelerator.save_state('x')", []),
    "moved before prepare": ("other = torch.nn.Linear(2, 2).to(accelerator.device)", []),
    "schedule": ("schedule = get_scheduler('linear', optimizer, 10, num_training_steps=100)", []),
    "learning rate by processes": ("rate = 1e-3 * accelerator.num_processes", []),
    "a list's own slice": ("rows = names[: len(names) - 1]", []),
    "names": (
        "from drivetrain.utils import set_seed, is_wandb_available, DistributedType, FullyShardedDataParallelPlugin",
        [],
    ),
    "submodules": ("from drivetrain.utils.operations import gather_object", []),
    "our own modules": ("from drivetrain.checkpoint import save_object", []),
    "another backward": ("network.backward(delta)", []),
    "a loss that is shown": (
        """
        with accelerator.accumulate(model):
            accelerator.backward(loss)
            total += loss.item() / args.gradient_accumulation_steps
        """,
        [],
    ),
    "a schedule in global batches": ("s = StepLR(o, len(rows) // (8 * accelerator.num_processes))", []),
    # modules and names
    "accelerate": ("from accelerate import Accelerator", [(5, Kind.DIFFERS, "from drivetrain import")]),
    "accelerate.utils": (
        "from accelerate.utils import set_seed, gather_object",
        [(5, Kind.DIFFERS, "from drivetrain.utils import")],
    ),
    "import accelerate": ("import accelerate", [(5, Kind.DIFFERS, "import drivetrain as accelerate")]),
    "import accelerate as a": ("import accelerate as acc", [(5, Kind.DIFFERS, "import drivetrain as acc")]),
    "big models": (
        "from accelerate import dispatch_model, infer_auto_device_map",
        [
            (5, Kind.DIFFERS, "Accelerate's"),
            (5, Kind.RAISES, "no dispatch_model here"),
            (5, Kind.RAISES, "no infer_auto_device_map here"),
        ],
    ),
    "no such module": (
        "from accelerate.commands.config import get_user_input",
        [(5, Kind.DIFFERS, "Accelerate's"), (5, Kind.RAISES, "no module drivetrain.commands.config")],
    ),
    "no such name": ("from drivetrain.utils import everything_else", [(5, Kind.RAISES, "no name everything_else")]),
    # ---- the accelerator
    "fp8": ("other = Accelerator(mixed_precision='fp8')", [(5, Kind.RAISES, "fp8")]),
    "an engine's plugin": ("other = Accelerator(fsdp_plugin=mine)", [(5, Kind.DIFFERS, "section `fsdp:`")]),
    "megatron's plugin": ("o = Accelerator(megatron_lm_plugin=mine)", [(5, Kind.DIFFERS, "section `megatron:`")]),
    "parallelism": ("o = Accelerator(parallelism_config=mine)", [(5, Kind.DIFFERS, "section `mesh:`")]),
    "no such argument": ("o = Accelerator(gpus=2)", [(5, Kind.RAISES, "takes no gpus")]),
    "no such method": ("accelerator.teleport(model)", [(5, Kind.RAISES, "has no teleport")]),
    "accelerator of an object": (
        """
        class Trainer:
            def __init__(self):
                self.runner = Accelerator()
                self.net = self.runner.prepare(net)
            def save(self):
                if self.runner.is_main_process:
                    self.runner.save_state("x")
        """,
        [(11, Kind.DIFFERS, "every process takes part")],
    ),
    # ---- main process only
    "save under main": (
        "if accelerator.is_main_process:\n    accelerator.save_state('x')",
        [(6, Kind.DIFFERS, "save_state is called on the main process alone")],
    ),
    "gather under local main": (
        "if accelerator.is_local_main_process and step % 10 == 0:\n    print(accelerator.gather(loss))",
        [(6, Kind.DIFFERS, "gather is called on the main process alone")],
    ),
    "else of not main": (
        "if not accelerator.is_main_process:\n    pass\nelse:\n    accelerator.wait_for_everyone()",
        [(8, Kind.DIFFERS, "wait_for_everyone")],
    ),
    "state dict for save_pretrained": (
        """
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained("x", state_dict=accelerator.get_state_dict(model))
        """,
        [(6, Kind.DIFFERS, "get_state_dict")],
    ),
    "decorated": (
        "@accelerator.on_main_process\ndef save():\n    accelerator.save_model(model, 'x')",
        [(7, Kind.DIFFERS, "save_model")],
    ),
    # ---- loops by hand
    "loss.backward": ("loss.backward()", [(5, Kind.DIFFERS, "accelerator.backward(loss)")]),
    "clipping": (
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        [(5, Kind.DIFFERS, "accelerator.clip_grad_norm_")],
    ),
    "clipping by import": (
        "from torch.nn.utils import clip_grad_norm_\nclip_grad_norm_(model.parameters(), 1.0)",
        [(6, Kind.DIFFERS, "accelerator.clip_grad_norm_")],
    ),
    "divides twice": (
        """
        with accelerator.accumulate(model):
            loss = model(x).mean()
            accelerator.backward(loss / accelerator.gradient_accumulation_steps)
        """,
        [(7, Kind.DIFFERS, "divides twice")],
    ),
    "divides twice in place": (
        """
        with accelerator.accumulate(model):
            loss /= args.gradient_accumulation_steps
            accelerator.backward(loss)
        """,
        [(6, Kind.DIFFERS, "divides twice")],
    ),
    "multiplies for tokens": (
        """
        with accelerator.accumulate(model):
            loss = loss_sum * args.gradient_accumulation_steps / tokens
            accelerator.backward(loss)
        """,
        [(6, Kind.DIFFERS, "num_items")],
    ),
    "warm-up by processes": (
        "schedule = get_cosine_schedule_with_warmup(optimizer, warmup * accelerator.num_processes, 100)",
        [(5, Kind.DIFFERS, "moves once an update")],
    ),
    "steps by processes": (
        "s = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=steps * accelerator.num_processes)",
        [(5, Kind.DIFFERS, "step_per_process")],
    ),
    # ---- evaluation and resuming
    "gather and cut": (
        "found = accelerator.gather(logits)\nfound = found[: len(loader.dataset) - seen]",
        [(6, Kind.LEAVE_OUT, "gather_for_metrics")],
    ),
    "gather and cut at once": (
        "found = accelerator.gather(logits)[: len(loader.dataset)]",
        [(5, Kind.LEAVE_OUT, "gather_for_metrics")],
    ),
    "skips after a load": (
        "accelerator.load_state('x')\nrest = accelerator.skip_first_batches(loader, 7)",
        [(6, Kind.LEAVE_OUT, "restores the position")],
    ),
    "skips by hand": ("rest = accelerator.skip_first_batches(loader, 7)", []),
    # ---- engines, data and devices by hand
    "ddp": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)",
        [(6, Kind.RAISES, "distributed_type chooses")],
    ),
    "fsdp": (
        "from torch.distributed.fsdp import fully_shard\nfully_shard(model)",
        [(6, Kind.RAISES, "distributed_type chooses")],
    ),
    "deepspeed": (
        "import deepspeed\nengine, *_ = deepspeed.initialize(model=model)",
        [(6, Kind.RAISES, "distributed_type chooses")],
    ),
    "process group": ("torch.distributed.init_process_group('nccl')", [(5, Kind.LEAVE_OUT, "Leave it out")]),
    "sampler": (
        "from torch.utils.data.distributed import DistributedSampler\nsampler = DistributedSampler(data)",
        [(6, Kind.LEAVE_OUT, "DataLoader(dataset, shuffle=...)")],
    ),
    "shards by hand": (
        "data = data.shard(num_shards=accelerator.num_processes, index=accelerator.process_index)",
        [(5, Kind.DIFFERS, "already_sharded")],
    ),
    "cuda": ("x = x.cuda()", [(5, Kind.DIFFERS, "accelerator.device")]),
    "to cuda": ("x = x.to('cuda:0')", [(5, Kind.DIFFERS, "accelerator.device")]),
    "cuda device": ("device = torch.device('cuda')", [(5, Kind.DIFFERS, "accelerator.device")]),
    # ---- prepared models
    "module": ("hidden = model.module.config.hidden_size", [(5, Kind.LEAVE_OUT, "Write model")]),
    "converted": ("model.half()", [(5, Kind.RAISES, "before accelerator.prepare")]),
    "copied": ("import copy\nema = copy.deepcopy(model)", [(6, Kind.RAISES, "drivetrain.EMA")]),
    "torch.save": ("torch.save(model.state_dict(), 'x')", [(5, Kind.DIFFERS, "accelerator.save_model")]),
    "torch.save of another": ("torch.save(other.state_dict(), 'x')", []),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_said(name: str) -> None:
    script, expected = SCRIPTS[name]
    found = check_script(START + textwrap.dedent(script).removeprefix("\n"))
    said = [(each.line, each.kind) for each in found]
    assert said == [(line, kind) for line, kind, _ in expected], found
    for each, (_, _, words) in zip(found, expected, strict=True):
        assert words in f"{each.text}. {each.instead}"


WHOLE = sorted((Path(__file__).parent / "whole_scripts").iterdir())


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_whole_scripts(file: Path) -> None:
    """Scripts in the styles of well-known tutorials; a comment marks each line of which something is said."""
    source = file.read_text(encoding="utf-8")
    marked = {
        number: line.rpartition("# <- ")[2] for number, line in enumerate(source.splitlines(), 1) if "# <- " in line
    }
    found = check_script(source, file.name)
    assert {each.line: str(each.kind) for each in found} == marked, found


def test_files_that_do_not_train_are_left_alone() -> None:
    script = "import torch\nx = x.cuda()\ntorch.nn.utils.clip_grad_norm_(p, 1.0)\nloss.backward()\n"
    assert check_script(script) == []


@pytest.mark.parametrize("script", ["for", "x = \0", "(" * 500])
def test_what_is_not_python(script: str) -> None:
    with pytest.raises(UsageError, match=r"the script(, line 1)? is not Python: .*\. Give a script that Python"):
        check_script(script)
    assert check_script("for each in ():\n    pass\n") == []


def test_the_command(tmp_path) -> None:
    fits, other, binary = tmp_path / "fits.py", tmp_path / "other.py", tmp_path / "binary.py"
    fits.write_text(START + "hidden = model.module.hidden\n")
    other.write_text(START + "loss.backward()\n")
    binary.write_bytes(b"\xff\xfe\x00")
    run = CliRunner().invoke(check, [str(fits)])
    assert run.exit_code == 0
    assert run.output.splitlines()[-1] == f"{fits}: 0 lines to change, 1 line that can go."
    run = CliRunner().invoke(check, [str(fits), str(other)])
    assert run.exit_code == 1
    assert f"{other}:5: differs: loss.backward() bypasses the engine" in run.output
    assert CliRunner().invoke(check, [str(tmp_path / "absent.py")]).exit_code == 2
    run = CliRunner().invoke(check, [str(binary)])
    assert run.exit_code != 0
    assert "cannot be read as text" in run.output + str(run.exception)
