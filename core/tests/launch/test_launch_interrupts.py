"""Ctrl-C and SIGTERM end to end: what is saved, which exit code, that a resumed run goes on as if nothing had been."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from drivetrain import Accelerator
from drivetrain.errors import UsageError

# Starts a launcher with several programs in each test; test_launch_local.py starts some too.
pytestmark = pytest.mark.slow

TRAIN = """
    import sys, time, torch
    from torch import nn
    from drivetrain import Accelerator, set_seed
    from drivetrain.utils import ProjectConfiguration
    name, resume = sys.argv[1], len(sys.argv) > 2
    project = ProjectConfiguration("out", automatic_checkpoint_naming=name == "alone")
    accelerator = Accelerator(project_config=project, save_on_interrupt=True)
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.utils.data.TensorDataset(torch.randn(48, 4))
    workers = 2 if name == "alone" else 0
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(None if name == "alone" else "out/interrupted")
    for epoch in range(loader.epoch, 2):
        for (x,) in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.is_main_process:
                print(repr(loss.item()), file=open(name + ".log", "a"), flush=True)
            if name != "whole" and "finish" not in sys.argv:
                time.sleep(0.2)  # so that the signal finds it at work
    accelerator.end_training()
"""


def losses(folder, name):
    return (folder / f"{name}.log").read_text().split()


def stop(process, how, log, at_least=3, tell=None):
    """Wait until some steps are done, send the signal, and return what the process wrote to stderr."""
    while not log.exists() or len(log.read_text().split()) < at_least:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    (tell or process.send_signal)(how)
    return process.communicate(timeout=90)[1]


@pytest.mark.slow
@pytest.mark.timeout(400)  # four launches of two ranks on a machine that does other things, too
def test_two_ranks_save_themselves_and_go_on_as_if_nothing_had_been(launch, launcher, script, tmp_path):
    path = script(TRAIN)
    settings = "num_processes=2 use_cpu=true"
    whole = launch(settings, path, "whole")
    assert whole.returncode == 0, whole.stderr
    log = tmp_path / "cut.log"
    for how, code, at_least, resume in ((signal.SIGTERM, 75, 2, []), (signal.SIGINT, 130, 5, ["resume"])):
        process = launcher(settings, path, "cut", *resume)
        words = stop(process, how, log, at_least)
        assert process.returncode == code, words
        assert "this run saved itself in out/interrupted and stops" in words
        assert "the run saved itself and stopped; started again, a script that loads its newest checkpoint" in words
    assert len(losses(tmp_path, "cut")) < 12
    resumed = launch(settings, path, "cut", "resume", "finish")
    assert resumed.returncode == 0, resumed.stderr
    # Equal to the last digit: the same numbers are added in the same order on the same machine.
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
    assert len(losses(tmp_path, "whole")) == 12


def test_a_lone_process_saves_the_next_checkpoint_and_ends_with_the_code(clean_environment, script, tmp_path):
    """Told as a scheduler tells: every process at once, those of the loader, too."""
    path = script(TRAIN)
    started = [sys.executable, str(path)]
    options = {"env": clean_environment(), "cwd": tmp_path, "text": True, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*started, "alone"], **options, start_new_session=True)
    words = stop(process, signal.SIGTERM, tmp_path / "alone.log", tell=lambda how: os.killpg(process.pid, how))
    assert process.returncode == 75, words
    assert (tmp_path / "out/checkpoints/checkpoint_0/manifest.json").exists()
    done = subprocess.run([*started, "alone", "resume", "finish"], **options, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path, "alone")) == 24


def test_a_second_ctrl_c_leaves_nobody(launcher, script, tmp_path):
    path = script("""
        import os, signal, subprocess, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        open("pids" + os.environ["RANK"], "w").write(f"{os.getpid()} {child.pid} .")
        time.sleep(600)
    """)
    process = launcher("num_processes=2", path)
    files = [tmp_path / "pids0", tmp_path / "pids1"]
    while not all(file.exists() and file.read_text().endswith(".") for file in files):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    pids = [int(pid) for file in files for pid in file.read_text().split()[:2]]
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # it is waiting for workers that do not heed the first one
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=180)
    assert process.returncode == 130, words
    assert words.endswith("stopped by SIGINT; no worker is left\n")
    assert [pid for pid in pids if alive(pid)] == []


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # it only waits for its new parent to look


STARTING = """
    import os, time
    open("starting" + os.environ["RANK"], "w").write(str(os.getpid()))
    if os.environ["RANK"] == "0":
        from drivetrain import Accelerator
    time.sleep(600)
"""


@pytest.mark.parametrize("told", ["launcher", "workers"])
@pytest.mark.parametrize(("saves", "code"), [("true", 75), ("false", 143)])
def test_sigterm_before_the_accelerator_is_made_starts_the_job_again(launcher, script, tmp_path, told, saves, code):
    settings = f"num_processes=2 use_cpu=true project_dir=out save_on_interrupt={saves}"
    process = launcher(settings, script(STARTING))
    files = [tmp_path / "starting0", tmp_path / "starting1"]
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    if told == "launcher":
        process.send_signal(signal.SIGTERM)
    else:
        for file in files:
            os.kill(int(file.read_text()), signal.SIGTERM)
    _, words = process.communicate(timeout=90)
    assert process.returncode == code, words
    assert ("started again, it goes on from its checkpoint" in words) == (code == 75)


def test_it_needs_a_folder_and_gives_the_signals_back(tmp_path):
    with pytest.raises(UsageError, match="save_on_interrupt has no folder to save in"):
        Accelerator(cpu=True, save_on_interrupt=True)
    before = signal.getsignal(signal.SIGTERM)
    accelerator = Accelerator(cpu=True, save_on_interrupt=True, project_dir=tmp_path)
    assert signal.getsignal(signal.SIGTERM) != before
    accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_step_without_a_prepared_loader_ends_with_the_optimizer(tmp_path):
    import torch

    accelerator = Accelerator(cpu=True, save_on_interrupt=True, project_dir=tmp_path)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).mean())
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        optimizer.step()
    assert stopped.value.code == 75
    assert (tmp_path / "interrupted/manifest.json").exists()


def test_a_step_asks_nobody_until_one_rank_is_told(launch, script, tmp_path):
    path = script("""
        import os, signal, time, torch
        from drivetrain import Accelerator
        accelerator = Accelerator(save_on_interrupt=True, project_dir="out")
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        interruption = accelerator._interruption
        store, interruption._store = interruption._store, object()  # has nothing that could be asked
        for step in range(1000):
            if step == 5:
                interruption._store = store
                if accelerator.process_index == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
            accelerator.backward(model(torch.ones(1, 1)).mean())
            optimizer.step()
            time.sleep(0.02)
        raise RuntimeError("nobody heard it")
    """)
    done = launch("num_processes=2 use_cpu=true", path)
    assert done.returncode == 75, done.stderr
    assert (tmp_path / "out/interrupted/manifest.json").exists()


def test_ctrl_c_leaves_the_terminal_as_it_was(script, clean_environment, tmp_path):
    path = script("""
        import sys, time
        sys.stdout.write("\\x1b[?25l 7/10 of a bar")
        sys.stdout.flush()
        open("there", "w").close()
        time.sleep(60)
    """)
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)

    def at_the_terminal():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", "launch"]
    command += ["--cpu", "--num_processes", "1", path.name]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stdin=theirs, stdout=theirs, stderr=theirs,
        preexec_fn=at_the_terminal,  # noqa: PLW1509 (two system calls, and no lock)
    )  # fmt: skip
    try:
        while not (tmp_path / "there").exists():
            assert process.poll() is None, os.read(ours, 9999)
            time.sleep(0.1)
        os.write(ours, b"\x03")
        assert process.wait(60) == 130
        written = os.read(ours, 99999).decode()
        while "no worker is left" not in written:
            written += os.read(ours, 99999).decode()
        assert termios.tcgetattr(theirs)[3] == before[3]
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
    bar, _, rest = written.partition("\x1b[?25l 7/10 of a bar")
    assert bar
    assert rest.partition("\x1b[?25h")[2].startswith("\r\n"), written
    assert "\r\nstopped by SIGINT; no worker is left\r\n" in rest
