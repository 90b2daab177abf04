"""Who may join a run: launchers of another one, and strangers, are refused and told so."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict

import pytest

from drivetrain.config import load_config
from drivetrain.config.schema import RendezvousConfig
from drivetrain.errors import LaunchError
from drivetrain.launch.coordinator import TOKEN, JobState, Node, NodeStatus, RunIdentity, _Client, _Server
from drivetrain.launch.plan import LaunchPlan, make_plan
from drivetrain.launch.script import identify

FACTS = {"mixed_precision": "aa", "the command": "bb"}
RUN = RunIdentity(facts=FACTS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture
def meet(capfd):
    """Let launchers of these identities meet: the error of the second, and what the first says."""

    def run(first: RunIdentity, second: RunIdentity) -> tuple[str, str]:
        plan = LaunchPlan(2, 1, 2, 0, f"127.0.0.1:{free_port()}")
        server = _Server(plan, first)
        try:
            client = _Client("127.0.0.1", server._socket.getsockname()[1], plan, second)
        except LaunchError as refused:
            error = str(refused)
        else:
            error = ""
            assert client.exchange(NodeStatus(1, "b", "host", "127.0.0.1", 1)).present == (1,)
            client.close()
        server.close()
        # The first launcher answers before it prints.
        said, until = capfd.readouterr().err, time.monotonic() + 10
        while error and not said and time.monotonic() < until:
            time.sleep(0.02)
            said = capfd.readouterr().err
        return error, said

    return run


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RUN, RUN),
        (RunIdentity("77", facts=FACTS), RUN),  # the shell of one machine is not in the scheduler's job
        (RunIdentity("mine", given=True, facts=FACTS), RunIdentity("mine", given=True, facts={"the command": "cc"})),
        (RunIdentity("77", facts=FACTS, token="secret"), RunIdentity("77", facts=FACTS, token="secret")),
    ],
)
def test_launchers_of_one_run_meet(meet, first, second):
    assert meet(first, second) == ("", "")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (RUN, RunIdentity(facts={**FACTS, "the command": "cc"}), "the command is not the same"),
        (
            RUN,
            RunIdentity(facts={"mixed_precision": "cc", "the command": "bb", "the section fsdp": "dd"}),
            "mixed_precision, the section fsdp are not the same",
        ),
        (RunIdentity("77", facts=FACTS), RunIdentity("76", facts=FACTS), "its run is 76, this one 77"),
        (RunIdentity("a", given=True, facts=FACTS), RUN, "its run is without a name, this one a"),
        (RUN, RunIdentity("a", given=True, facts=FACTS), "its run is a, this one without a name"),
        (RunIdentity(facts=FACTS, token="one"), RunIdentity(facts=FACTS, token="two"), "its token is another one"),
        (RunIdentity(facts=FACTS, token="one"), RUN, "or only one of the two has a token"),
        (RUN, RunIdentity(facts=FACTS, token="two"), "or only one of the two has a token"),
    ],
)
def test_a_launcher_of_another_run_is_refused_and_both_are_told(meet, first, second, words):
    error, said = meet(first, second)
    assert words in error
    assert "--set rendezvous.run_id=NAME" in error
    assert said == f"refused a launcher of another run from 127.0.0.1: {said.partition('127.0.0.1: ')[2]}"
    assert words in said


def test_a_token_is_never_sent_and_its_proof_is_good_for_one_connection():
    identity = RunIdentity("77", facts=FACTS, token="secret")
    plan = LaunchPlan(2, 1, 2, 0, f"127.0.0.1:{free_port()}")
    server = _Server(plan, identity)
    try:
        said = []
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", server._socket.getsockname()[1]), timeout=60) as link:
                stream = link.makefile("rw")
                assert stream.readline() == "drivetrain launch\n"
                nonce = stream.readline().strip()
                hello = {"run_id": "77", "given": False, "facts": FACTS, "nonce": "ab"}
                # The second time it is what was overheard the first time.
                said = said or [{**hello, "proof": identity.proof("launcher", nonce, "ab")}]
                stream.write(json.dumps(said[0]) + "\n")
                stream.flush()
                said.append(json.loads(stream.readline()))
        assert list(said[1]) == ["proof"]
        assert "its token is another one" in said[2]["refused"]
        assert "secret" not in json.dumps(said)
    finally:
        server.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[]\n", b'{"run_id": 1}\n', b"\xff\n", b""])
def test_another_program_is_let_go_and_nobody_is_disturbed(said):
    server = _Server(LaunchPlan(2, 1, 2, 0, f"127.0.0.1:{free_port()}"), RUN)
    try:
        with socket.create_connection(("127.0.0.1", server._socket.getsockname()[1]), timeout=60) as link:
            stream = link.makefile("rb")
            assert stream.readline() == b"drivetrain launch\n"
            stream.readline()
            link.sendall(said)
            link.shutdown(socket.SHUT_WR)
            assert stream.read() == b""
        assert not server._coordinator._heard
    finally:
        server.close()


@contextlib.contextmanager
def machine_0(goes):
    """A machine 0 that goes after its greeting, after its answer, or never, and begins a round after two seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            link, _ = listening.accept()
            with contextlib.suppress(OSError), link, link.makefile("rw") as stream:

                def say(text):
                    stream.write(f"{text}\n")
                    stream.flush()

                say("drivetrain launch\n77")
                hello = json.loads(stream.readline())
                if goes == "after its greeting":
                    return
                say(json.dumps({"proof": RUN.proof("coordinator", "77", hello["nonce"])}))
                if goes == "after its answer":
                    return
                for number, line in enumerate(stream):
                    state = JobState(1, (NodeStatus(**json.loads(line)),), 7) if number >= 20 else JobState()
                    say(json.dumps(asdict(state)))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            thread.join()


def begun(goes, **timeouts):
    """The port of machine 0, and the round that a second machine begins with it."""
    with machine_0(goes) as port:
        node = Node(LaunchPlan(2, 1, 2, 1, f"127.0.0.1:{port}", rendezvous=RendezvousConfig(**timeouts)), RUN)
        try:
            return node.next_round()
        finally:
            node.leave("stopped")


@pytest.mark.parametrize("goes", ["after its greeting", "after its answer"])
def test_a_machine_0_that_goes_is_said_and_a_round_begins_with_one_that_stays(goes):
    words = r"machine 0 at 127\.0\.0\.1, port \d+ closed the connection\. Look at what that machine prints"
    with pytest.raises(LaunchError, match=words):
        begun(goes)
    assert begun("never").master_port == 7


def test_a_machine_that_waits_in_vain_says_how_long_it_waited_and_comes_in_with_more_time():
    short = {"last_call_seconds": 0.1, "lost_after_seconds": 0.1}
    words = r"began no round within 0\.1 seconds\. Look at what that machine prints.* rendezvous\.timeout_seconds is"
    with pytest.raises(LaunchError, match=words):
        begun("never", timeout_seconds=0.1, **short)
    assert begun("never", timeout_seconds=60.0, **short).num_nodes == 1


def identity(command=("train.py", "--lr", "1"), environ=None, **overrides):
    resolved = load_config(overrides={"use_cpu": True, "main_process_ip": "n0", **overrides}, environ={})
    return identify(resolved, make_plan(resolved, environ={}), command, environ or {})


def test_what_is_each_machines_own_does_not_count():
    here = identity(num_machines=2, num_processes=4, machine_rank=0, project_dir="/home/a")
    there = identity(
        ("/elsewhere/train.py", "--lr", "1"), num_machines=2, num_processes=4, machine_rank=1,
        main_process_ip="10.0.0.1", project_dir="/home/b",
        **{"output.log_dir": "logs", "rendezvous.timeout_seconds": 5},
    )  # fmt: skip
    assert here.difference(there) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixed_precision": "bf16"}, "mixed_precision is not the same"),
        ({"mesh.dp_replicate": 4}, "mesh is not the same"),
        ({"num_processes": 8}, "num_processes is not the same"),
        ({"ddp.static_graph": True}, "the section ddp is not the same"),
        ({"command": ("train.py", "--lr", "2")}, "the command is not the same"),
        ({"rendezvous.run_id": "b"}, "its run is b, this one without a name"),
    ],
)
def test_what_makes_another_run_is_named(changes, words):
    common = {"num_machines": 2, "num_processes": 4}
    assert identity(**common).difference(identity(**{**common, **changes})) == words


def test_the_number_of_the_schedulers_job_names_the_run():
    assert identity(environ={"SLURM_JOB_ID": "77"}).run_id == "77"
    assert identity(environ={"SLURM_JOB_ID": "78", "SLURM_HET_JOB_ID": "77"}).run_id == "77"
    assert identity(environ={"SLURM_JOB_ID": "77"}, **{"rendezvous.run_id": "mine"}).run_id == "mine"
    assert identity(environ={TOKEN: "secret"}).token == "secret"


@pytest.mark.timeout(400)
def test_a_launcher_that_an_earlier_run_left_over_does_not_train_with_this_one(clean_environment, script, tmp_path):
    """The leftover is machine 1 of another script, and comes first; the new run's own machine 1 is let in."""
    writes = "import os, pathlib, sys; pathlib.Path(sys.argv[1] + os.environ['RANK']).write_text(sys.argv[2])"
    job, old = script(writes), script(writes, "old.py")
    common = ["--cpu", "--quiet", "--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1"]
    common += ["--main_process_port", str(free_port()), "--set", "rendezvous.timeout_seconds=100", "--machine_rank"]

    def start(rank: int, path, word: str) -> subprocess.Popen[str]:
        words = ["-c", "from drivetrain.cli.main import main; main()", "launch", *common, str(rank), str(path)]
        return subprocess.Popen(
            [sys.executable, *words, f"{tmp_path}/rank", word],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )

    leftover = start(1, old, "old")
    first = start(0, job, "new")
    assert "is of another run: the command is not the same" in leftover.communicate(timeout=200)[1]
    assert leftover.returncode == 1
    second = start(1, job, "new")
    said = first.communicate(timeout=200)[1]
    assert "refused a launcher of another run from 127.0.0.1: the command is not the same\n" in said
    assert (first.returncode, second.wait(200)) == (0, 0)
    second.communicate()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["new", "new"]
