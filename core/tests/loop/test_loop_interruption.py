"""A signal that one rank hears ends all ranks after the same step."""

from __future__ import annotations

import os
import signal
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.api import BackendInfo, Capabilities, DistributedBackend, Mesh, Topology, hookimpl
from drivetrain.errors import UnsupportedError
from drivetrain.registry import get_registry
from drivetrain_testing import spawn


def told_on_one_rank(folder, last):
    accelerator = Accelerator(cpu=True, distributed_type="ddp", save_on_interrupt=True, project_dir=folder)
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(24, 2)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    steps = 0
    try:
        for (x,) in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == last and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)  # from the scheduler and from the launcher
    except SystemExit as stop:
        return steps, stop.code, Path(folder, "interrupted/manifest.json").exists()
    return steps, None, False


def test_ranks_agree_on_the_step_when_one_of_them_hears(tmp_path):
    # It names the end of the step after the one in which it heard, since the others may have passed that already.
    assert spawn(told_on_one_rank, 2, str(tmp_path), 2) == [(3, 75, True)] * 2


def test_the_last_step_of_a_pass_ends_with_the_pass(tmp_path):
    # Heard in the last but one of six steps, so that there is no further batch to be asked for.
    assert spawn(told_on_one_rank, 2, str(tmp_path), 5) == [(6, 75, True)] * 2


def left_after_a_step(folder):
    accelerator = Accelerator(cpu=True, distributed_type="single", save_on_interrupt=True, project_dir=folder)

    def train():
        model = nn.Linear(2, 1)
        loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for (x,) in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()
            break
        return weakref.ref(loader)

    loader = train()
    accelerator.free_memory()
    return loader() is None


def test_a_loop_that_is_left_after_a_step_keeps_no_loader(tmp_path):
    assert spawn(left_after_a_step, 1, str(tmp_path)) == [True]


def begun_anew(folder, loads):
    accelerator = Accelerator(cpu=True, distributed_type="single", save_on_interrupt=True, project_dir=folder)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if loads:
        accelerator.load_state(str(Path(folder, "interrupted")))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 2)).mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(Path(folder, "interrupted")))
    accelerator.end_training()


@pytest.mark.parametrize(("first", "loads", "told"), [(True, False, 0), (False, False, 1), (False, True, 0)])
def test_a_run_that_does_not_load_what_an_interrupted_one_saved_says_so(tmp_path, caplog, first, loads, told):
    if not first:
        begun_anew(str(tmp_path), loads=False)
    caplog.clear()
    begun_anew(str(tmp_path), loads)
    said = [each for each in caplog.messages if "saved itself when it was told to stop" in each]
    assert len(said) == told
    assert all(f'load_state("{tmp_path}/interrupted")' in each for each in said)


class Groupless(DistributedBackend):
    """Several processes that form no process group, as those of an engine with a way of its own to meet."""

    capabilities = Capabilities()

    def start(self):
        self.topology = Topology(self.settings.process, Mesh({"dp_replicate": 2}), "cpu")
        return self.topology

    def prepare(self, model, optimizers=(), *, training=True):
        raise AssertionError("nothing is trained")

    def stop(self):
        pass


class GrouplessPlugin:
    @hookimpl
    def drivetrain_backends(self):
        return [BackendInfo("groupless", "a toy", f"{__name__}:Groupless", capabilities=Groupless.capabilities)]


def without_a_group(folder):
    get_registry().register(GrouplessPlugin(), name="groupless")
    words = r"save_on_interrupt lets ranks agree through a process group's store, and this backend forms none\. Leave"
    with pytest.raises(UnsupportedError, match=words):
        Accelerator(cpu=True, distributed_type="groupless", save_on_interrupt=True, project_dir=folder)
    return Accelerator(cpu=True, distributed_type="groupless", project_dir=folder).num_processes


def test_a_backend_without_a_process_group_is_refused_and_trains_without_saving_itself(tmp_path):
    assert spawn(without_a_group, 2, str(tmp_path)) == [2, 2]
