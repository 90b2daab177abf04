"""Jobs that save without end, and a driver that kills them: ``kill_jobs.py FOLDER rank|launcher KILLS [PLACE]``.

A FOLDER that is an address lies on a remote storage; PLACE is then a local folder, where ranks find each other.

The driver forks every job from one process that has imported torch, so that a kill costs tenths of a second. It prints
what it found after each kill as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import checkpoint_jobs
import object_store  # noqa: F401 (brings `bucket://`)
import torch
import torch.distributed as dist

from drivetrain.checkpoint import Naming, Saver, folder_of, inspect, load
from drivetrain.checkpoint.manifest import MANIFEST
from drivetrain.checkpoint.tensors import read_tensor
from drivetrain.errors import CheckpointError

WORLDS = (2, 1, 3)
"""Sizes of successive jobs: each takes up what a job of another size has left."""


def resumed(backend, folder, limit=3):
    """A sharded run at the newest checkpoint, if there is one."""
    net, optimizer, scheduler = checkpoint_jobs.build("sharded", 0, width=64)
    state = checkpoint_jobs.run_state(net, optimizer, scheduler)
    naming = Naming(folder, total_limit=limit)
    newest = backend.broadcast_object(naming.latest() if naming.complete() else None)
    if newest is not None:
        manifest = load(newest, state, backend)
        gain = checkpoint_jobs.whole(net.gain.detach()).item()
        assert gain == state.counters["step"] == manifest.info["iteration"], "numbers and manifest are of one save"
        if backend.topology.rank == 0:
            naming.resumed(manifest)
        naming.iteration = backend.broadcast_object(naming.iteration)
    return net, optimizer, scheduler, state, naming


def advance(run):
    """One step; the parameter that says which one it was."""
    net, optimizer, scheduler, state, naming = run
    checkpoint_jobs.train(net, optimizer, scheduler, 1)
    with torch.no_grad():
        net.gain.fill_(naming.iteration)
    state.counters["step"] = naming.iteration
    return {"iteration": naming.iteration}


def next_path(backend, naming):
    """The next checkpoint's folder; the main process holds the one above it."""
    naming.iteration = backend.broadcast_object(naming.claim_next() if backend.topology.rank == 0 else None)
    return naming.path


def save_for_ever(folder, beside):
    """Save numbered checkpoints until killed."""
    with checkpoint_jobs.started() as backend:
        run = resumed(backend, folder)
        state, naming = run[3:]
        saver = Saver(backend)
        while True:
            info = advance(run)
            if beside:
                saver.wait()
                path = next_path(backend, naming)
                saver.start(path, state, info=info, afterwards=partial(naming.prune, path))
            else:
                path = next_path(backend, naming)
                saver.save(path, state, info=info)
                if backend.topology.rank == 0:
                    naming.prune(path)
                backend.barrier()
            naming.iteration += 1


def rank_process(rank, world_size, folder, meeting, beside):
    """One rank, in a process of its own; never returns."""
    warnings.simplefilter("ignore")
    mine, all_ranks = str(rank), str(world_size)
    os.environ.update(RANK=mine, WORLD_SIZE=all_ranks, LOCAL_RANK=mine, LOCAL_WORLD_SIZE=all_ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GLOO_SOCKET_IFNAME="lo")
    with contextlib.suppress(BaseException), contextlib.redirect_stderr(None):
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
        save_for_ever(folder, beside)
    os._exit(1)


def launch(world_size, folder, meeting, beside):
    """Fork the ranks; their process ids."""
    ranks = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            rank_process(rank, world_size, folder, meeting, beside)
        ranks.append(child)
    return ranks


def launcher_process(world_size, folder, meeting, beside, pipe):
    """A launcher: forks the ranks, tells who they are, and waits. Never returns."""
    ranks = launch(world_size, folder, meeting, beside)
    os.write(pipe, (json.dumps(ranks) + "\n").encode())
    for child in ranks:
        os.waitpid(child, 0)
    os._exit(0)


def end(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def gone(process):
    """Wait for a process that may be nobody's child any more."""
    for _ in range(2000):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
            return
        time.sleep(0.002)
    raise AssertionError("a killed process is still there")


def kill_once(folder, meeting, victim, number):
    """Start a job, wait for its first checkpoint, kill at a random moment; what is on the disk then."""
    chance = random.Random(number)
    world_size, beside = WORLDS[number % len(WORLDS)], bool(number // len(WORLDS) % 2)
    before = highest(folder)
    processes = []
    if victim == "launcher":
        reading, writing = os.pipe()
        launcher = os.fork()
        if launcher == 0:
            launcher_process(world_size, folder, meeting, beside, writing)
        os.close(writing)
        with os.fdopen(reading) as told:
            ranks = json.loads(told.readline())
        processes.append(launcher)
    else:
        ranks = launch(world_size, folder, meeting, beside)
    deadline = time.monotonic() + 30
    while highest(folder) <= before:
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.06))
    first = processes[0] if victim == "launcher" else chance.choice(ranks)
    end(first)
    time.sleep(chance.uniform(0, 0.02))  # The others go on for a moment, or find out.
    for process in ranks:
        end(process)
    for process in [*processes, *ranks]:
        gone(process)
    path = Naming(folder).latest()
    found = inspect(path)
    manifest = found.manifest
    gain = read_tensor(path, "model.gain", manifest.tensors["model.gain"]).item()
    return [list(found.problems), manifest.info["iteration"], gain, manifest.world_size, unfinished(folder)]


def unfinished(folder):
    """Count the saves in a folder that are not complete."""
    if isinstance(folder, Path):
        return sum(one.name.startswith(".") for one in folder.iterdir())
    return sum(len(one.subfolders()) > 1 or not (one / MANIFEST).exists() for one in folder.subfolders())


def highest(folder):
    """Number of the newest checkpoint; a remote folder is there before it is one."""
    if isinstance(folder, Path):
        return max((int(path.name.split("_")[1]) for path in folder.glob("checkpoint_*")), default=-1)
    return max((one.number for one in Naming(folder).complete()), default=-1)


@contextlib.contextmanager
def limited(chance, backend):
    """One rank may write files up to a random size only."""
    victim, limit = chance.randrange(backend.topology.world_size), chance.randrange(0, 60_000)
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    if victim == backend.topology.rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, whole[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, whole)


@contextlib.contextmanager
def filled(chance, backend, folder):
    """A random number of bytes is left on the disk of this folder."""
    filler, left = Path(folder).parent / "filler", chance.randrange(0, 160_000)
    if backend.topology.rank == 0:
        disk = os.statvfs(folder)
        filler.write_bytes(bytes(max(disk.f_bavail * disk.f_frsize - left, 0)))
    backend.barrier()
    try:
        yield
    finally:
        backend.barrier()
        if backend.topology.rank == 0:
            filler.unlink()


def full_disk_job(folder, times, small=False):
    """Saves, some in the background, with a disk that is full at random points.

    ``small``: the folder lies on a disk of its own, which is really full; else a limit on one rank's files stands for
    that. Returns how many failed, what was wrong with the newest checkpoint after any of them, what failed saves left,
    the newest iteration, and what the errors said.
    """
    with checkpoint_jobs.started() as backend:
        Path(folder).mkdir(parents=True, exist_ok=True)
        run = resumed(backend, folder)
        state, naming = run[3:]
        saver = Saver(backend)
        problems, errors = [], []
        for number in range(times):
            chance = random.Random(number)
            info = advance(run)
            path = next_path(backend, naming)
            try:
                with filled(chance, backend, folder) if small else limited(chance, backend):
                    if number % 2:
                        saver.start(path, state, info=info, afterwards=partial(naming.prune, path))
                        advance(run)
                        saver.wait()
                    else:
                        saver.save(path, state, info=info)
            except CheckpointError as problem:
                errors.append(str(problem))
            naming.iteration += 1
            if backend.topology.rank == 0 and naming.complete():
                found = inspect(naming.latest())
                problems += found.problems
                gain = read_tensor(found.path, "model.gain", found.manifest.tensors["model.gain"]).item()
                problems += [] if gain == found.manifest.info["iteration"] else [f"{gain} in {found.path}"]
                naming.prune(naming.latest())
            backend.barrier()
        saver.close()
        left = [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]
        newest = naming.complete()[-1].number
        return len(errors), problems, left, newest, errors


def load_job(folder):
    """The newest checkpoint's step, loaded into a sharded run of this world's size."""
    with checkpoint_jobs.started() as backend:
        return resumed(backend, folder)[3].counters["step"]


def main(folder, victim, kills, place=None):
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    place = place or folder.parent
    dist.init_process_group("gloo", init_method=f"file://{place}/warm", rank=0, world_size=1)
    checkpoint_jobs.train(*checkpoint_jobs.build("sharded", 0), 1)  # The first step of an optimizer imports much.
    dist.destroy_process_group()
    reports = [kill_once(folder, f"{place}/meet-{number}", victim, number) for number in range(kills)]
    print(json.dumps(reports))


if __name__ == "__main__":
    main(folder_of(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
