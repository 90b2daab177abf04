"""Rounds are those of the paper: real workers against the algorithm written down in one process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

from drivetrain.api import CheckpointError, UsageError
from drivetrain_diloco.commands import diloco
from drivetrain_diloco.traffic import Traffic
from drivetrain_testing import spawn

WORKERS, LOCAL_STEPS, ROUNDS = 2, 3, 3
TOLERANCE = 1e-6
"""Float32 numbers of size 1 after nine steps, summed in another order; 6e-8 was seen."""


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batch(step, worker):
    made = torch.Generator().manual_seed(1000 * step + worker)
    return torch.randn(6, 5, generator=made), torch.randint(0, 3, (6,), generator=made)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def algorithm(num_steps, *, lr, momentum, clip=None, start=0):
    """Algorithm 1 of the paper, for all workers in one process; nothing of Drivetrain. The parameters at the end."""
    shared = model()
    workers = [model() for _ in range(WORKERS)]
    inner = [adamw(worker.parameters()) for worker in workers]
    velocity = [torch.zeros_like(one) for one in shared.parameters()]
    for step in range(start, start + num_steps):
        for number, (worker, optimizer) in enumerate(zip(workers, inner, strict=True)):
            x, y = batch(step, number)
            optimizer.zero_grad()
            F.cross_entropy(worker(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(worker.parameters(), clip)
            optimizer.step()
        if (step + 1) % LOCAL_STEPS:
            continue
        with torch.no_grad():
            of_workers = zip(*(worker.parameters() for worker in workers), strict=True)
            for one, moved, speed in zip(shared.parameters(), of_workers, velocity, strict=True):
                gradient = one - torch.stack(list(moved)).mean(0)
                speed.mul_(momentum).add_(gradient)
                one.sub_(lr * (gradient + momentum * speed if momentum else gradient))
                for each in moved:
                    each.copy_(one)
            for buffers in zip(*(worker.buffers() for worker in workers), strict=True):
                if buffers[0].is_floating_point():
                    mean = torch.stack(list(buffers)).mean(0)
                    for each in buffers:
                        each.copy_(mean)
    return [dict(worker.state_dict()) for worker in workers]


def make(folder, **section):
    from drivetrain import Accelerator

    # Each rank its own: one that is being written must not be read.
    file = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    config = {"distributed_type": "diloco", "use_cpu": True, "diloco": {"local_steps": LOCAL_STEPS, **section}}
    file.write_text(json.dumps(config), encoding="utf-8")
    os.environ["DRIVETRAIN_CONFIG_FILE"] = str(file)
    try:
        return Accelerator(log_with="jsonl", project_dir=str(folder))
    finally:
        del os.environ["DRIVETRAIN_CONFIG_FILE"]


def prepared(accelerator):
    made = model()
    return accelerator.prepare(made, adamw(made.parameters()))


def train(accelerator, trained, optimizer, num_steps, *, start=0, clip=None):
    for step in range(start, start + num_steps):
        x, y = batch(step, accelerator.process_index)
        accelerator.backward(F.cross_entropy(trained(x), y))
        if clip is not None:
            accelerator.clip_grad_norm_(trained.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def values(trained):
    return {name: one.detach().clone() for name, one in trained.state_dict().items()}


def run_rounds(folder, num_steps, clip, section):
    accelerator = make(folder, **section)
    trained, optimizer = prepared(accelerator)
    train(accelerator, trained, optimizer, num_steps, clip=clip)
    found = values(trained)
    accelerator.end_training()
    return found


@pytest.mark.parametrize(
    ("num_steps", "lr", "momentum", "clip"),
    [
        (LOCAL_STEPS * ROUNDS, 0.7, 0.9, None),
        (LOCAL_STEPS * ROUNDS, 1.0, 0.0, 0.1),
        (LOCAL_STEPS * ROUNDS + 1, 0.7, 0.9, None),
    ],
)
def test_workers_follow_the_paper(tmp_path, num_steps, lr, momentum, clip):
    section = {"outer_lr": lr, "outer_momentum": momentum}
    found = spawn(run_rounds, WORKERS, tmp_path, num_steps, clip, section)
    expected = algorithm(num_steps, lr=lr, momentum=momentum, clip=clip)
    for mine, theirs in zip(found, expected, strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=0, atol=TOLERANCE, msg=name)
    together = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert together == (num_steps % LOCAL_STEPS == 0), "workers agree between rounds, and only then"


def run_and_resume(folder, cut):
    accelerator = make(folder, synchronous_steps=2)
    trained, optimizer = prepared(accelerator)
    train(accelerator, trained, optimizer, 2 + LOCAL_STEPS)
    accelerator.save_state(str(Path(folder) / "saved"))
    momenta = [momentum.clone() for momentum in trained._drivetrain.trainable.rounds[0].momenta().values()]
    inner = [slots["exp_avg"] for slots in optimizer.optimizer.state.values()]
    means = [accelerator.reduce(each, "mean") for each in inner]
    assert not all(torch.equal(mine, mean) for mine, mean in zip(inner, means, strict=True)), "workers never differed"
    at_save = values(trained)
    accelerator.end_training()

    accelerator = make(folder, synchronous_steps=2)
    trained, optimizer = prepared(accelerator)
    accelerator.load_state(str(Path(folder) / "saved"))
    again = trained._drivetrain.trainable.rounds[0]
    assert (again.steps, again.position, again.synchronous) == (2 + LOCAL_STEPS, 0, False)
    for mine, theirs in zip(again.momenta().values(), momenta, strict=True):
        assert torch.equal(mine, theirs)
    for name, tensor in values(trained).items():
        assert torch.equal(tensor, at_save[name]), name
    assert all(set(slots) == {"step", "exp_avg", "exp_avg_sq"} for slots in optimizer.optimizer.state.values())
    first = [slots["exp_avg"].clone() for slots in optimizer.optimizer.state.values()]
    for mine, mean in zip(first, means, strict=True):
        torch.testing.assert_close(mine, mean, rtol=0, atol=TOLERANCE)
    train(accelerator, trained, optimizer, cut, start=2 + LOCAL_STEPS)
    outcome = values(trained), first, len(momenta)
    accelerator.end_training()
    return outcome


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    (one, first, momenta), (two, second, _) = spawn(run_and_resume, WORKERS, tmp_path, LOCAL_STEPS)
    assert momenta == 6
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs), "every worker resumes from the mean of the inner states"
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def run_portable(folder):
    """Another backend loads what DiLoCo saved, keeps the outer momentum, and DiLoCo finds it again."""
    from drivetrain import Accelerator

    accelerator = make(folder)
    trained, optimizer = prepared(accelerator)
    train(accelerator, trained, optimizer, LOCAL_STEPS)
    accelerator.save_state(str(Path(folder) / "saved"))
    before = [one.clone() for one in trained._drivetrain.trainable.rounds[0].momenta().values()]
    accelerator.end_training()
    plain = Accelerator(cpu=True)
    trained, optimizer = prepared(plain)
    plain.load_state(str(Path(folder) / "saved"))
    plain.save_state(str(Path(folder) / "copied"))
    assert plain.distributed_type == "single"
    plain.end_training()
    accelerator = make(folder)
    trained, optimizer = prepared(accelerator)
    accelerator.load_state(str(Path(folder) / "copied"))
    after = list(trained._drivetrain.trainable.rounds[0].momenta().values())
    assert len(after) == len(before) == 6
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(after, before, strict=True))
    accelerator.end_training()


def test_the_outer_momentum_travels_through_other_backends(tmp_path):
    spawn(run_portable, 1, tmp_path)


def run_within_a_round(folder):
    from drivetrain_diloco.backend import synchronise

    accelerator = make(folder, outer_lr=0.5, outer_momentum=0.0)
    trained, optimizer = prepared(accelerator)
    train(accelerator, trained, optimizer, 1)
    with pytest.raises(CheckpointError, match=r"checkpoint was asked for in local step 1 of a round.*synchronise"):
        accelerator.save_state(str(Path(folder) / "saved"))
    with pytest.raises(UsageError, match="weights were asked for in local step 1"):
        accelerator.get_state_dict(trained)
    alone = values(trained)
    synchronise(accelerator)
    together = values(trained)
    mean = accelerator.reduce(alone["0.weight"], "mean")
    halfway = (mean + model().state_dict()["0.weight"]) / 2
    torch.testing.assert_close(together["0.weight"], halfway, rtol=0, atol=TOLERANCE)
    synchronise(accelerator)  # They agree: nothing happens.
    assert all(torch.equal(tensor, together[name]) for name, tensor in values(trained).items())
    accelerator.save_state(str(Path(folder) / "saved"))
    # Weights that the script loads between two rounds are where the next one begins.
    trained.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in together.items()})
    train(accelerator, trained, optimizer, 1, start=1)
    synchronise(accelerator)
    assert trained.state_dict()["0.weight"].abs().max() < 0.1, "one step of AdamW is at most its learning rate, 0.05"
    # The next round is a whole one.
    train(accelerator, trained, optimizer, LOCAL_STEPS - 1, start=1)
    assert trained._drivetrain.trainable.rounds[0].position == LOCAL_STEPS - 1
    train(accelerator, trained, optimizer, 1, start=LOCAL_STEPS)
    assert trained._drivetrain.trainable.rounds[0].position == 0
    accelerator.end_training()


def test_within_a_round_there_is_no_one_model_to_save(tmp_path):
    spawn(run_within_a_round, WORKERS, tmp_path)


def run_counted(folder):
    """How many messages each step of two rounds sent, whoever sent them."""
    import torch.distributed as dist

    accelerator = make(folder)
    trained, optimizer = prepared(accelerator)
    counts, sent = [], []
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier")
    before = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*args, **kwargs):
            sent.append(name)
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    for step in range(2 * LOCAL_STEPS):
        sent.clear()
        train(accelerator, trained, optimizer, 1, start=step)
        counts.append(len(sent))
    for name in names:
        setattr(dist, name, before[name])
    accelerator.end_training()
    return counts


def test_workers_send_nothing_within_a_round(tmp_path):
    for counts in spawn(run_counted, WORKERS, tmp_path):
        # One message for all parameters, and one for each of the two floating buffers.
        assert counts == [0, 0, 3] * 2


def run_observed(folder):
    told = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("drivetrain.diloco")
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    accelerator = make(folder)
    accelerator.init_trackers("observed")
    trained, optimizer = prepared(accelerator)
    train(accelerator, trained, optimizer, 2 * LOCAL_STEPS)
    accelerator.end_training()
    logger.removeHandler(listener)
    return told


def test_the_observer_logs_rounds_and_tells_the_traffic(tmp_path):
    told = spawn(run_observed, WORKERS, tmp_path)
    (file,) = tmp_path.rglob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rounds = [line for line in lines if "diloco/round" in line]
    assert [line["diloco/round"] for line in rounds] == [1, 2]
    assert all(line["diloco/drift"] > 0 for line in rounds)
    assert len(told[0]) == 1
    assert told[0][0].startswith(f"2 rounds of {LOCAL_STEPS} local steps: each worker averaged")
    assert told[1] == [], "the main process tells it once"


def test_the_command_tells_what_a_run_sends():
    arguments = ["traffic", "--parameters", "1e9", "--workers", "4", "--steps", "1000", "--local_steps", "100"]
    outcome = CliRunner().invoke(diloco, [*arguments, "--json"], catch_exceptions=False)
    every, rounds = json.loads(outcome.output)
    assert every["bytes"] == 1000 * 2 * 3 / 4 * 1e9 * 4
    assert rounds["bytes"] == every["bytes"] / 100
    assert rounds["seconds"] - 1000 == pytest.approx((every["seconds"] - 1000) / 100)
    assert "rounds of 100" in CliRunner().invoke(diloco, arguments, catch_exceptions=False).output
    assert Traffic(10, 2, 10, 5, 1, 1).message == 40


def test_its_command_is_one_of_drivetrains():
    script = "from drivetrain.cli.main import main; main(['diloco', 'traffic', '--help'])"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "--local_steps" in done.stdout
