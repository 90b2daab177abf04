"""Machines that cannot meet: each reads one sentence in time, which says who is missing."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.timeout(900)  # on a machine that does ten other things

PORT = 29617
SLEEP = ("--no_python", "sleep", "100")
TWO = ("--num_machines", 2, "--num_processes", 2, "--set", "rendezvous.timeout_seconds=2")
THREE = ("--num_machines", 3, "--num_processes", 3, "--set", "rendezvous.timeout_seconds=4")

LISTEN = f"""
import socket, time
listening = socket.create_server(("0.0.0.0", {PORT}))
print("listening", flush=True)
time.sleep(1000)
"""


def test_a_port_that_is_taken(cluster):
    machines = cluster(2)
    other = machines.machines[0].run(sys.executable, "-c", LISTEN)
    assert other.stdout is not None
    assert other.stdout.readline() == "listening\n"
    (first, second) = machines.ends(*(machines.launch(number, *TWO, command=SLEEP) for number in range(2)))
    cure = "rite another --main_process_port, the same on every machine.\n"
    assert first[0] == second[0] == 1
    assert f"error: port {PORT} of this machine is taken, and the machines of the run would connect to it. W{cure}" in (
        first[1]
    )
    assert f"error: what answers at 10.231.7.1, port {PORT}, is no `drivetrain launch`." in second[1]
    assert second[1].endswith(cure)


def test_a_machine_that_does_not_come_is_named_on_all_that_did(cluster):
    machines = cluster(3)
    for code, words in machines.ends(*(machines.launch(number, *THREE, command=SLEEP) for number in (0, 1))):
        assert code == 1
        assert words.startswith("error: after 4 seconds machine 0 ("), words
        assert words.endswith(", 10.231.7.2) came, machine 2 did not.\n"), words


def test_machine_0_does_not_come(cluster):
    machines = cluster(2)
    ((code, words),) = machines.ends(machines.launch(1, *TWO, command=SLEEP))
    assert code == 1
    assert words.startswith(
        f"error: machine 0 did not answer at 10.231.7.1, port {PORT}, within 2 seconds (Connection refused)"
    )


def test_main_process_ip_is_another_machines_address(cluster):
    machines = cluster(2)
    words = machines.ends(machines.launch(0, *TWO, "--main_process_ip", "10.231.7.9", command=SLEEP))[0][1]
    assert "machine 1 did not. main_process_ip 10.231.7.9 is no address of this machine" in words


def test_two_machines_of_one_number(cluster):
    machines = cluster(3)
    first, second = (machines.launch(number, *TWO, command=SLEEP) for number in range(2))
    machines.wait_until(lambda: len(machines.machines[1].pids()) == 2)  # launcher and worker
    ((code, words),) = machines.ends(machines.launch(1, *TWO, command=SLEEP, on=2))
    assert code == 1
    assert words.startswith("error: machine 1 (")
    assert "is already there. Give each machine its own --machine_rank" in words
    assert (first.poll(), second.poll()) == (None, None)
