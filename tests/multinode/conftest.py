"""Machines made of network namespaces: each has an interface, an address and processes; a switch joins them.

Nothing of it touches the network of the machine that runs the tests: the switch is a namespace, too. The file system
is shared, as that of a cluster is.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PORT = 29617
PATIENCE = 200.0
"""Seconds within which anything that must happen has happened, on a machine that does ten other things."""

START = "from drivetrain.cli.main import main; main()"

_PREFIX = "dtmachines"


def ip(*words: str) -> str:
    """``ip``, of iproute2. Raises with what it says."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def remove(namespace: str) -> None:
    """End every process in a namespace, then take it away; its interfaces go with it."""
    for pid in ip("netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "delete", namespace)


def left_behind() -> list[str]:
    """Namespaces of test processes that were killed before they could clean up."""
    found = re.findall(rf"^{_PREFIX}-(\d+)-\w+", ip("netns", "list"), re.MULTILINE)
    dead = {pid for pid in found if not Path(f"/proc/{pid}").exists()}
    return re.findall(rf"^{_PREFIX}-(?:{'|'.join(dead)})-\w+", ip("netns", "list"), re.MULTILINE) if dead else []


@dataclass
class Machine:
    """One namespace.

    Args:
        number: its ``machine_rank``.
        namespace: its name.
        link: its end of the cable, in the switch.
        processes: the launchers that were started here.
    """

    number: int
    namespace: str
    link: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where the other machines reach it."""
        return f"10.231.7.{self.number + 1}"

    def run(self, *command: object, **environment: str) -> subprocess.Popen[str]:
        """Start a program here."""
        ours = ("DRIVETRAIN_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "GLOO_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *map(str, command)],
            env={**inherited, "MACHINE": str(self.number), "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def kill(self) -> None:
        """Power off: every process ends at once. The kernel closes their connections."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Every process that runs here."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]


class Cluster:
    """Machines on one switch, and the launches on them."""

    port = PORT

    def __init__(self, count: int) -> None:
        name = f"{_PREFIX}-{os.getpid()}"
        self.switch = f"{name}-switch"
        self.machines = [Machine(number, f"{name}-m{number}", f"m{number}") for number in range(count)]

    def open(self) -> None:
        """Make the namespaces and the cables. Raises ``OSError`` where this is not allowed."""
        for namespace in left_behind():
            remove(namespace)
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for machine in self.machines:
            ip("netns", "add", machine.namespace)
            ip("-n", machine.namespace, "link", "set", "lo", "up")
            cable = ("link", "add", machine.link, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
            ip("-n", self.switch, *cable)
            ip("-n", self.switch, "link", "set", machine.link, "master", "bridge", "up")
            ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
            ip("-n", machine.namespace, "link", "set", "eth0", "up")

    def close(self) -> None:
        """Take everything away, whatever state it is in."""
        listed = ip("netns", "list")
        for namespace in (*(machine.namespace for machine in self.machines), self.switch):
            if re.search(rf"^{namespace}\b", listed, re.MULTILINE):
                remove(namespace)
        for machine in self.machines:
            for process in machine.processes:
                process.communicate(timeout=PATIENCE)

    def unplug(self, number: int) -> None:
        """Take the cable of a machine out: it lives on, and nobody hears of it."""
        ip("-n", self.switch, "link", "set", self.machines[number].link, "down")

    def launch(
        self, number: int, *words: object, command: tuple[object, ...], on: int | None = None
    ) -> subprocess.Popen[str]:
        """``drivetrain launch`` on one machine, with the flags that place it there.

        Args:
            number: the ``machine_rank``.
            words: further flags.
            command: the script and its arguments.
            on: the machine; ``None`` = that of this number.
        """
        return self.machines[number if on is None else on].run(
            *(sys.executable, "-c", START, "launch", "--cpu", "--quiet"),
            *("--machine_rank", number, "--main_process_ip", self.machines[0].address),
            *("--main_process_port", PORT, "--set", "rendezvous.last_call_seconds=1", *words, *command),
        )

    def ends(self, *launched: subprocess.Popen[str]) -> list[tuple[int, str]]:
        """Exit code and stderr of each, when all have ended."""
        words = [process.communicate(timeout=PATIENCE)[1] for process in launched]
        return list(zip((process.returncode for process in launched), words, strict=True))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that must happen while every program that was started goes on."""
        end = time.monotonic() + PATIENCE
        while not condition():
            ended = [
                process for machine in self.machines for process in machine.processes if process.poll() is not None
            ]
            assert not ended, ended[0].communicate()[1]
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.05)


@pytest.fixture
def cluster() -> Iterator[Callable[[int], Cluster]]:
    """``cluster(3)`` has three machines; they are gone after the test, with all that ran on them."""
    opened: list[Cluster] = []

    def make(count: int) -> Cluster:
        opened.append(Cluster(count))
        try:
            opened[-1].open()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        return opened[-1]

    yield make
    for each in opened:
        with contextlib.suppress(FileNotFoundError):  # there is no `ip` here, so that there are no namespaces either
            each.close()
