"""Implements the jobs that ranks run in the tests of remote storages."""

from __future__ import annotations

import background_jobs
import checkpoint_jobs
import object_store  # noqa: F401 (brings `bucket://`)
import torch

from drivetrain.checkpoint import folder_of, load, save
from drivetrain.errors import CheckpointError

# Of this module, so that a rank that looks for them imports it, and the scheme with it.


def save_job(*args):
    return checkpoint_jobs.save_job(*args)


def load_job(*args):
    return checkpoint_jobs.load_job(*args)


def load_warnings_job(*args):
    return checkpoint_jobs.load_warnings_job(*args)


def hooks_job(*args):
    return checkpoint_jobs.hooks_job(*args)


def names(folder):
    return [each.name for each in folder.subfolders()]


def named_job(url, blocking):
    """A run with automatic naming and a limit of 2; what is there after each save, and whether the newest loads."""
    accelerator, model, optimizer = background_jobs.run(url, limit=2)
    seen, paths = [], []
    for _ in range(4):
        background_jobs.step(accelerator, model, optimizer)
        was = background_jobs.weights(model)
        paths.append(accelerator.save_state(blocking=blocking))
        accelerator.wait_for_checkpoint()
        accelerator.wait_for_everyone()
        seen.append(names(folder_of(url) / "checkpoints"))
        accelerator.wait_for_everyone()
    background_jobs.step(accelerator, model, optimizer)
    loaded = accelerator.load_state()
    restored = torch.equal(background_jobs.weights(model), was)
    again = accelerator.save_state()
    accelerator.end_training()
    return paths, seen, loaded, restored, again


def interrupted_job(url):
    """Return where an interrupted run saves itself, and the error of trackers that write files for such a folder."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, project_dir=url)
    where = accelerator._save_interrupted()
    accelerator.load_state(where)
    accelerator.end_training()
    try:
        Accelerator(cpu=True, project_dir=url, log_with="jsonl")
    except ValueError as problem:
        return where, accelerator.logging_dir, str(problem)
    return None


def refused_job(url):
    """A save whose storage nobody can reach; every rank's error."""
    with checkpoint_jobs.started() as backend:
        try:
            save(url, checkpoint_jobs.run_state(*checkpoint_jobs.build("replicated", 0)), backend)
        except CheckpointError as problem:
            return str(problem)
        return None


def hooks_loading_job(url):
    """The files that a load hook sees."""
    seen = []
    with checkpoint_jobs.started() as backend:
        state = checkpoint_jobs.run_state(*checkpoint_jobs.build("replicated", 0))

        def hooks(folder):
            seen.extend(sorted(path.name for path in folder.rglob("*")))
            assert (folder / "adapter-1.txt").read_text() == "mine"
            return [0]

        load(url, state, backend, hooks=hooks)
    return seen
