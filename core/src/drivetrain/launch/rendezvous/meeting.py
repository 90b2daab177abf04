"""How the launchers of several machines agree who trains: a rendezvous for torch's elastic agent. Imports torch.

Machine 0 keeps a store at ``main_process_ip:main_process_port``. Every launcher has a thread that gives signs of life
there; that of machine 0 also hears the others and writes down what it decides (:mod:`drivetrain.launch.machines`).
The agent's own thread never waits for the network while workers run: a dead link would hold it for many minutes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from drivetrain.errors import LaunchError
from drivetrain.launch.machines import Board, Card, Fate, Rules
from drivetrain.launch.network import interface_of, is_here, route_to
from drivetrain.launch.rendezvous.keeping import HURRY, Address, Guest, Keeper, Role, join_store

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Gloo asks the machine's host name for its address, which on many systems is a loopback address."""

_BEAT = 1.0
"""Seconds between two signs of life while nothing happens."""

_STOP_WORKERS = 40.0
"""Seconds that machine 0 stays for machines that have to go: their agents give workers 30 to end."""


@final
class Meeting(RendezvousHandler):
    """What torch's elastic agent asks who trains. One for each launch; nothing happens before the agent asks.

    Global ranks follow ``machine_rank``. Workers are stopped as soon as machine 0 says so: when a machine is lost, when
    one joins, when the run is over.

    Args:
        address: this machine, and machine 0.
        rules: how many machines, and how long to wait for them; the same on all machines.
    """

    def __init__(self, address: Address, rules: Rules) -> None:
        self.address, self.rules = address, rules
        self._role: Role = Guest(address, rules) if address.machine else Keeper(address, rules)
        # What other machines see of machine 0 is where they reach it.
        own = route_to(address.host) if address.machine else address.host
        self._card = Card(address.machine, uuid.uuid4().hex, socket.gethostname(), own)
        self._said: Card | None = None
        self._board = Board()
        self._round = 0
        self._contact = time.monotonic()
        self._broken = ""
        self._news = threading.Condition()
        self._hurry, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._chooses_interface = INTERFACE not in os.environ

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the next round begins. On every machine.

        Raises:
            LaunchError: machines did not come in time (the message says which), the port or this machine's number is
                taken, or the run is over.
        """
        if self._thread is None:
            self._role.come(self._card, self.rules.timeout)
            self._contact = time.monotonic()
            self._thread = threading.Thread(target=self._live, name="drivetrain-meeting", daemon=True)
            self._say(ready=1)
            self._thread.start()
        # Machine 0 knows who is missing; its sentence shall be read before this machine despairs by itself.
        end = time.monotonic() + self.rules.timeout + self.rules.last_call + 3 * self.rules.lost_after
        place: int | None = None
        while place is None:
            self._check()
            if time.monotonic() > end:
                raise LaunchError(f"{self.address} began no round within {self.rules.timeout:g} seconds")
            with self._news:
                board = self._board
                if board.round > self._round:
                    self._round, place = board.round, board.place_of(self._card.id)
                elif self._card.ready <= self._round:
                    self._say(ready=self._round + 1)
                else:
                    self._news.wait(HURRY)
        self._hurry.clear()
        self._lend_interface(board)
        agents = join_store(self.address.host if self.address.machine else "localhost", self.address.port)
        return RendezvousInfo(
            PrefixStore(f"agents/{board.round}", agents),
            place,
            len(board.members),
            RendezvousStoreInfo(self.address.host, board.port),
        )

    def num_nodes_waiting(self) -> int:
        """1 when this machine shall stop its workers and get ready for the next round.

        Raises:
            LaunchError: the run is over, or machine 0 was lost.
        """
        self._check()
        return int(self._board.called > self._round)

    def leave(self, fate: Fate, why: str = "") -> list[str]:
        """Tell the others that this machine goes, and why. Machine 0 stays until all others have gone or are lost.

        Returns:
            What became of other machines, a sentence for each that was lost or failed.
        """
        if self._thread is None:
            return []
        # Who failed wants to hear what became of the others; machine 0 has to serve them until they know.
        patience = self.rules.lost_after + (2 * _BEAT if self.address.machine else _STOP_WORKERS)
        self._say(fate=fate, why=why, bye=fate != "failed")
        self._wait(self._is_done, float("inf") if fate == "finished" else patience)
        self._say(bye=True)
        self._wait(lambda: self._said is self._card, _BEAT)
        self._stop.set()
        self._hurry.set()
        self._thread.join(_BEAT)  # torch's C++ aborts a program that ends while a thread returns from the store
        others = [it for machine, it in self._board.fates.items() if it and machine != self.address.machine]
        # The cause goes last, where it is read first.
        return [it for it in (*sorted(others, key=_is_loss), self._lost_keeper()) if it]

    def verdict(self) -> str:
        """Why the run is over for all machines; empty when it is not, or ended well."""
        return self._board.over or ""

    def get_backend(self) -> str:
        """The name in torch's registry."""
        return "drivetrain"

    def get_run_id(self) -> str:
        """Machines find each other by the port alone."""
        return "drivetrain"

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in a store that machine 0's launcher keeps."""
        return True

    def is_closed(self) -> bool:
        """The run is over."""
        return self._board.over is not None

    def set_closed(self) -> None:
        """Left to :meth:`leave`, which can say why."""

    def shutdown(self) -> bool:
        """Left to :meth:`leave`, which can say why."""
        return True

    def _say(self, **changes: Any) -> None:
        self._card = replace(self._card, **changes)
        self._hurry.set()

    def _live(self) -> None:
        """The thread: beat until nobody depends on it."""
        while not self._stop.is_set():
            card = self._card
            try:
                board = self._role.beat(card)
            except (DistError, RuntimeError) as error:
                self._broken = str(error).partition("\n")[0]
                return
            with self._news:
                self._board, self._said, self._contact = board, card, time.monotonic()
                self._news.notify_all()
            if self._hurry.is_set() or board.called > board.round or board.over is not None:
                self._stop.wait(HURRY)
            else:
                self._hurry.wait(_BEAT)

    def _check(self) -> None:
        if self._board.over is not None:
            raise LaunchError(self._board.over, cure=self._hint())
        if lost := self._lost_keeper():
            raise LaunchError(lost, cure="Start all machines again; the script goes on from its last checkpoint.")

    def _lost_keeper(self) -> str:
        """The sentence about machine 0 when it was lost; empty while it is there."""
        if self.address.machine and self._broken:
            return f"{self.address}, where the machines meet, was lost: it closed the connection"
        if self._broken:
            return f"the store of the machines at port {self.address.port} failed ({self._broken})"
        if time.monotonic() - self._contact > self.rules.lost_after:
            return f"{self.address}, where the machines meet, was lost: no answer for {self.rules.lost_after:g} seconds"
        return ""

    def _hint(self) -> str:
        if self.address.machine or self._round or is_here(self.address.host):
            return ""
        return f"main_process_ip {self.address.host} is no address of this machine; the others look for it there."

    def _is_done(self) -> bool:
        """Whether this machine may go: it was heard, nobody needs it, and it knows what it wants to know."""
        if self._said is not self._card:
            return False
        if not self.address.machine:
            return not set(self._board.here) - {0}
        return self._card.bye or {card.machine for card in self._board.members} <= self._board.fates.keys()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (self._lost_keeper() or condition()):
            time.sleep(HURRY)

    def _lend_interface(self, board: Board) -> None:
        """Tell gloo which interface leads to the other machines, unless the user did. Workers inherit it."""
        others = [card.address for card in board.members if card.id != self._card.id]
        name = interface_of(route_to(others[0])) if others else ""
        if self._chooses_interface and name:
            os.environ[INTERFACE] = name


def _is_loss(sentence: str) -> bool:
    return " was lost: " in sentence
