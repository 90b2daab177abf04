"""Real workers: what they are given, how the first failure is told, and that nothing survives."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

REPORT = """
    import json, os, sys
    from drivetrain.launch.environment import CONFIG, read_process_info
    process = read_process_info()
    out = {"rank": process.rank, "world": process.world_size, "launcher": process.launcher, "argv": sys.argv,
           "name": __name__, "path": sys.path[0], "threads": os.environ["OMP_NUM_THREADS"], "file": __file__,
           "config": json.loads(os.environ[CONFIG]) is not None, "main": sys.modules["__main__"].__dict__ is globals()}
    open(f"report{process.rank}.json", "w").write(json.dumps(out))
"""


def reports(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("report*.json"))]


def test_two_workers_on_the_cpu_with_the_scripts_own_arguments(launch, script, tmp_path):
    path = script(REPORT)
    done = launch("num_processes=2", path, "--num_processes", "7", "-m", "--", "x")
    assert done.returncode == 0, done.stderr
    found = reports(tmp_path)
    assert [(one["rank"], one["world"], one["launcher"]) for one in found] == [
        (0, 2, "drivetrain"),
        (1, 2, "drivetrain"),
    ]
    for one in found:
        assert one["argv"] == [str(path), "--num_processes", "7", "-m", "--", "x"]
        assert (one["name"], one["path"], one["file"], one["main"]) == ("__main__", str(tmp_path), str(path), True)
        assert one["config"]


def test_a_module_and_threads_of_the_users_choice(launch, script, tmp_path):
    script(REPORT, "amodule.py")
    done = launch("num_processes=2 module=1", "amodule", "-q", OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    for one in reports(tmp_path):
        assert one["argv"] == [str(tmp_path / "amodule.py"), "-q"]
        assert (one["threads"], one["name"], one["main"]) == ("3", "__main__", True)


def test_a_program_without_python(launch):
    done = launch("num_processes=2 no_python=1 output.local_ranks_filter=all", "printenv", "RANK")
    assert sorted(done.stdout.splitlines()) == ["[rank0] 0", "[rank1] 1"], done.stderr


def before(folder):
    """Python's path with this folder in front."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.slow
def test_workers_meet_though_they_are_there_before_the_store(launch, script):
    """The launcher imports torch while the workers do; here its import takes much longer than theirs."""
    path = script("""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        assert total.item() == 2
        print("met")
    """)
    slow = path.parent / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_IMPORT)
    done = launch("num_processes=2 output.local_ranks_filter=all", path, PYTHONPATH=before(slow))
    assert done.returncode == 0, done.stderr
    words = [line for line in sorted(done.stdout.splitlines()) if "Gloo" not in line]  # which torch 2.9 makes talk
    assert words == ["[rank0] met", "[rank1] met"]


SLOW_IMPORT = """
import os, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            time.sleep(6)

if "RANK" not in os.environ:
    sys.meta_path.insert(0, Slow())
"""


@pytest.mark.slow
def test_workers_are_stopped_when_there_will_be_no_store(launch, script):
    path = script("import time; time.sleep(100)")
    broken = path.parent / "broken"
    broken.mkdir()
    refuse = SLOW_IMPORT.replace("time.sleep(6)", "raise ImportError('no such library')")
    (broken / "sitecustomize.py").write_text(refuse)
    done = launch("num_processes=2", path, PYTHONPATH=before(broken))
    assert done.returncode == 1
    assert "ImportError: no such library" in done.stderr


def test_a_taken_port_is_told_before_anything_starts(launch, script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch(f"num_processes=2 main_process_port={port}", script("print('started')"))
    assert f"port {port} of this machine is taken. Write another main_process_port, or 0 for a free one" in done.stderr
    assert "started" not in done.stdout


@pytest.mark.slow
def test_a_port_of_the_users_choice_serves_every_restart(launch, script):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = script("""
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print(os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RESTART_COUNT"])
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "2"
        assert os.environ["TORCHELASTIC_RUN_ID"]
        dist.destroy_process_group()
    """)
    done = launch(f"num_processes=2 max_restarts=2 main_process_port={port}", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{port} 2"


def _started_with_hangups(handling, launcher, path):
    """A launcher that inherits how a hangup is handled."""
    before = signal.signal(signal.SIGHUP, handling)
    try:
        return launcher("num_processes=1", path)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_told_to_ignore_hangups_does(launcher, script, tmp_path):
    """As under ``nohup``; else the workers are stopped."""
    path = script("""
        import os, time
        open("there" + os.environ["RANK"], "w").close()
        time.sleep(100 if os.environ["RANK"] == "0" else 0)
    """)
    ignoring = _started_with_hangups(signal.SIG_IGN, launcher, path)
    _wait_for((tmp_path / "there0").exists)
    ignoring.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        ignoring.wait(2)
    ignoring.send_signal(signal.SIGTERM)
    host = socket.gethostname()
    words = f"rank 0 was stopped [host {host}; at job.py:4]\nstopped by SIGTERM; no worker is left\n"
    assert ignoring.communicate(timeout=180)[1] == words
    (tmp_path / "there0").unlink()
    # A test that is itself started under `nohup` inherits that it is ignored.
    heeding = _started_with_hangups(signal.SIG_DFL, launcher, path)
    _wait_for((tmp_path / "there0").exists)
    heeding.send_signal(signal.SIGHUP)
    words = f"rank 0 was stopped [host {host}]\nstopped by SIGHUP; no worker is left\n"
    assert heeding.communicate(timeout=180)[1] == words
    assert heeding.returncode == 128 + signal.SIGHUP


def test_the_local_rank_stands_where_an_argument_asks_for_it(launch):
    done = launch("num_processes=2 no_python=1 output.local_ranks_filter=all", "echo", "gpu${local_rank}", "$$")
    assert sorted(done.stdout.splitlines()) == ["[rank0] gpu0 $$", "[rank1] gpu1 $$"], done.stderr


def test_one_failing_rank_stops_the_others_and_its_traceback_is_shown_once(launch, script):
    path = script("""
        import os, time
        def inner():
            while not os.path.exists("there"):  # what a rank that has not begun was doing cannot be told
                time.sleep(0.1)
            raise ValueError("bang")
        if os.environ["RANK"] == "1":
            inner()
        open("there", "w").close()
        time.sleep(50)
    """)
    done = launch("num_processes=2", path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.count("in inner") == 1
    assert "worker.py" not in done.stderr
    failed, stopped, report = done.stderr.splitlines()[-3:]  # rank 0 had a stack: the launcher stopped it
    assert failed.startswith("rank 1 failed: ValueError: bang (exit code 1) [host ")
    assert failed.endswith("; at job.py:6]")
    assert stopped.startswith("rank 0 was stopped [host ")
    assert stopped.endswith("; at job.py:10]")
    assert report.startswith("With the stack of rank 0: ")


def test_peers_that_lose_their_connection_do_not_bury_the_cause(launch, script):
    path = script("""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise KeyError("the cause")
        dist.all_reduce(torch.ones(1))
    """)
    done = launch("num_processes=2", path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "rank 1 failed: KeyError: 'the cause' (exit code 1)" in done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(7)", 7, "rank 1 failed: SystemExit: 7 (exit code 7)"),
        ("os._exit(9)", 9, "rank 1 failed: exit code 9"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 failed: ended by signal 9 (SIGKILL)"),
        ("this is no Python", 1, "SyntaxError"),
    ],
)
@pytest.mark.gate("os.kill*")
def test_every_way_to_end_has_its_exit_code(launch, script, ending, code, words):
    if ending.startswith("this"):
        path = script(ending)
    else:
        path = script(f"import os, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(50)")
    done = launch("num_processes=2", path)
    assert done.returncode == code
    assert words in done.stderr


def test_a_restart_shows_what_failed_and_may_succeed(launch, script, tmp_path):
    path = script("""
        import os
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("the first time")
    """)
    done = launch("num_processes=1 max_restarts=1", path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("the workers are started again: restart 1 of 1\n")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.gate("9")
def test_no_worker_survives_the_launcher(launcher, script, tmp_path, how):
    path = script("""
        import os, time
        open("pid" + os.environ["RANK"], "w").write(str(os.getpid()))
        time.sleep(100)
    """)
    process = launcher("num_processes=2", path)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    _wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    process.send_signal(how)
    _, words = process.communicate(timeout=180)
    assert process.returncode == (-9 if how == signal.SIGKILL else 128 + how)
    where = "".join(f"rank {rank} was stopped [host {socket.gethostname()}; at job.py:4]\n" for rank in range(2))
    assert words == ("" if how == signal.SIGKILL else f"{where}stopped by {how.name}; no worker is left\n")
    _wait_for(lambda: not any(_alive(pid) for pid in pids))


def test_mistakes_are_found_before_anything_starts(launch, script):
    done = launch("num_processes=2", "not_there.py")
    assert "UsageError: there is no script 'not_there.py'" in done.stderr
    done = launch("num_processes=2 distributed_type=single", script("print('started')"))
    assert "trains in one process, but 2 were asked for" in done.stderr
    assert "started" not in done.stdout
    done = launch("module=1 no_python=1", "x")
    assert "exclude each other" in done.stderr


def test_a_launch_of_nothing_is_refused_and_starts_once_a_script_is_named(launch, script):
    done = launch("num_processes=1")
    assert "UsageError: no script was named. Write: drivetrain launch [options] script.py" in done.stderr
    assert done.returncode != 0
    assert launch("num_processes=1", script("print('started')")).stdout == "started\n"


def test_two_machines_meet(launcher, script, tmp_path):
    path = script(REPORT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = f"num_processes=2 num_machines=2 main_process_ip=127.0.0.1 rdzv_backend=static main_process_port={port}"
    machines = [launcher(f"{settings} machine_rank={rank}", path) for rank in (0, 1)]
    words = [machine.communicate(timeout=180)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], words
    assert [(one["rank"], one["world"]) for one in reports(tmp_path)] == [(0, 2), (1, 2)]


def _wait_for(condition):
    """Wait until something becomes true; the test's own time-out ends what never does."""
    while not condition():
        time.sleep(0.05)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat").read_text()  # a zombie only waits for its new parent to look
    return status.rpartition(")")[2].split()[0] != "Z"
