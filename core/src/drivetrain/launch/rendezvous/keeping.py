"""The store by which machines talk: machine 0 keeps it, hears the others and decides; they join it. Imports torch."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import final

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from drivetrain.errors import LaunchError
from drivetrain.launch.machines import Board, Card, RollCall, Rules
from drivetrain.launch.network import wait_for

HURRY = 0.1
"""Seconds between two looks at the store while something is awaited."""

_CONNECT = 20.0
"""Seconds within which a store answers a connection that it has accepted."""


@dataclass(frozen=True)
class Address:
    """Who this machine is, and where machine 0 keeps the store."""

    machine: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"machine 0 at {self.host}, port {self.port}"


class Role(ABC):
    """What a machine does at each beat. Called by the thread of the meeting, and by nobody else at that time."""

    @abstractmethod
    def come(self, card: Card, seconds: float) -> None:
        """Be there: open the store, or join it. Called once, before the thread starts."""

    @abstractmethod
    def beat(self, card: Card) -> Board:
        """Say what is on the card, and read what was decided."""


@final
class Keeper(Role):
    """Machine 0: keeps the store, hears the others, decides."""

    def __init__(self, address: Address, rules: Rules) -> None:
        self.address, self.rules = address, rules
        self.roll = RollCall(rules, time.monotonic())
        self._workers: TCPStore | None = None

    def come(self, card: Card, seconds: float) -> None:
        port = self.address.port
        try:
            self.store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        except DistError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise LaunchError(
                f"port {port} of this machine is taken, so that the machines cannot meet there",
                cure="Write another --main_process_port, the same on every machine.",
            ) from None
        self.store.set("board", self.roll.board.to_json())

    def beat(self, card: Card) -> Board:
        self._hear(card)
        before, now = self.roll.board, time.monotonic()
        if self.roll.look(now):
            # Of its own, and new in each round: keys of workers that are gone would mislead the next ones.
            self._workers = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self.roll.begin(self._workers.port)
        if self.roll.board != before:
            self.store.set("board", self.roll.board.to_json())
        return self.roll.board

    def _hear(self, mine: Card) -> None:
        now = time.monotonic()
        self.roll.hear(mine, int(now * 1e6), now)
        for machine in range(1, self.rules.maximum):
            if self.store.check([f"card/{machine}"]):
                card = Card.from_json(self.store.get(f"card/{machine}"))
                self.roll.hear(card, self.store.add(f"beat/{card.id}", 0), now)


@final
class Guest(Role):
    """Every other machine."""

    def __init__(self, address: Address, rules: Rules) -> None:
        self.address, self.rules = address, rules
        self._said: Card | None = None

    def come(self, card: Card, seconds: float) -> None:
        reason = wait_for(self.address.host, self.address.port, seconds)
        if reason:
            raise LaunchError(
                f"{self.address} did not come within {seconds:g} seconds ({reason})",
                cure="Start it with --machine_rank 0 and the same port, and check that this machine reaches it.",
            )
        self.store = join_store(self.address.host, self.address.port, seconds)
        self._claim(card)

    def _claim(self, card: Card) -> None:
        """Take this machine's number, unless a launcher that lives has it."""
        key, said, there = f"card/{card.machine}", card.to_json(), ""
        while (found := self.store.compare_set(key, there, said).decode()) != said:
            other = Card.from_json(found)
            if other.fate is None and self._lives(other):
                raise LaunchError(
                    f"{other} is already there",
                    cure="Give each machine its own --machine_rank, and each run its own --main_process_port.",
                )
            there = found

    def _lives(self, other: Card) -> bool:
        """Whether another launcher gives signs of life, after as long as it may take to be sure that it does not."""
        first = self.store.add(f"beat/{other.id}", 0)
        end = time.monotonic() + self.rules.lost_after
        while time.monotonic() < end:
            time.sleep(HURRY)
            if self.store.add(f"beat/{other.id}", 0) != first:
                return True
        return False

    def beat(self, card: Card) -> Board:
        self.store.add(f"beat/{card.id}", 1)
        if card != self._said:
            self.store.set(f"card/{card.machine}", card.to_json())
            self._said = card
        return Board.from_json(self.store.get("board"))


def join_store(host: str, port: int, seconds: float = _CONNECT) -> TCPStore:
    """A connection to a store that is there. Raises :class:`LaunchError` when what is there is something else.

    In a thread, since torch waits for ever for the first word of a program that accepts connections and says nothing.
    """
    seconds = min(seconds, _CONNECT)
    joined: list[TCPStore] = []

    def join() -> None:
        with contextlib.suppress(DistError):
            joined.append(TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds)))

    thread = threading.Thread(target=join, name="drivetrain-join", daemon=True)
    thread.start()
    thread.join(2 * seconds)
    if not joined:
        raise LaunchError(
            f"what answers at {host}, port {port}, is no `drivetrain launch`",
            cure="Another program has this port: write another --main_process_port, the same on every machine.",
        )
    return joined[0]
